"""How the GPUs of another tool's run share out its training, as far as its file and the user say it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.prediction.estimate import memory_of
from autotune.prediction.sharded_memory import MAX_LIVE, DeepSpeedBuffers
from autotune.report.values.check import FP32_BASE, ForeignConfig

_STAGE = re.compile(
    r"z(?:ero)?[-_]?([0-3])(?!\d)"
)  # in the name of a file, as zero3_bf16.json or ds_z2_config.json
_BY_STAGE = ("ddp", "zero1", "zero2", "zero3")
_OFF: tuple[Any, ...] = (None, False, "", "false", "False", [], {})


def strategy_of(values: Mapping[str, Any]) -> str | None:
    """The strategy that a file's values name, as `sharding` says it; None where they name none that is known.

    FSDP 1 is called FSDP2, whose successor that is.
    """
    name = str(values.get("accelerate_config") or "")
    if name.startswith("fsdp"):
        return "fsdp2"
    if name in _BY_STAGE:
        return name
    deepspeed = values.get("deepspeed")
    if isinstance(deepspeed, dict):
        number = _count(_zero(values).get("stage"))
        if number is not None and number < len(_BY_STAGE):
            return _BY_STAGE[number]
        deepspeed = values.get("deepspeed_file")
    if isinstance(deepspeed, str) and (
        stage := _STAGE.search(PurePosixPath(deepspeed).name.lower())
    ):
        return _BY_STAGE[int(stage[1])]
    if deepspeed not in _OFF:
        return None
    if all(values.get(key) in _OFF for key in ("fsdp", "fsdp_config", "fsdp_version")):
        return None
    named = str(values.get("fsdp")).lower()
    if "no_shard" in named:
        return "ddp"
    reshards = str(_of_fsdp(values, "reshard_after_forward", default=True)).lower()
    keeps = "shard_grad_op" in named or reshards in ("false", "shard_grad_op", "no_shard")
    return "fsdp2_keep" if keeps else "fsdp2"


def shared_out(run: ForeignConfig, model: ModelSpec, gpus: int | None) -> ForeignConfig:
    """The run on so many GPUs, or on those that its file names, as they share it out; as it is where that is unknown.

    `gpus` is what the user says. A note says what of it is not counted.
    """
    number = gpus or run.num_gpus or 1
    run = replace(run, num_gpus=gpus or run.num_gpus)
    named = strategy_of(run.values)
    strategy = named or ("ddp" if gpus else None)
    if run.objective is not Objective.SFT and number > 1:
        note = load_data("autotune.planning", "foreign_keys")["notes"]["one_gpu"].format(
            objective=run.objective
        )
        return replace(run, notes=(*run.notes, note))
    if number == 1 or strategy is None or number not in KNOBS["num_gpus"].choices:
        return run
    said = run.values.get("dp_replicate_size")
    copies = next((number for number in KNOBS["copies"].choices if number == said), 1)
    config = replace(run.config, num_gpus=number, sharding=strategy, copies=copies)
    parallelism = Parallelism.of(config)
    if parallelism.shards and config.precision == "bf16_pure" and run.values.get("bf16") != "full":
        config = replace(
            config, precision="bf16_mixed"
        )  # FSDP2 and DeepSpeed keep what is trained in fp32
    notes = load_data("autotune.planning", "foreign_keys")["notes"]
    reason = parallelism.refusal(config)
    if reason is None and parallelism.shards and FP32_BASE in run.notes:
        reason = "no formula covers a base in float32 that is shared out"
    if reason is None and memory_of(model, config) is None:
        reason = "no formula covers a rank of this run"
    if reason is not None:
        return replace(run, notes=(*run.notes, notes["not_shared"].format(reason=reason)))
    kept = [note for note in run.notes if named is None or note != notes["sharded"]]
    if strategy.startswith("fsdp2") and _is_fsdp_1(run.values):
        kept.append(notes["fsdp_1"])
    if _offloads(run.values):
        kept.append(notes["less_memory"].format(key="Offloading of the model"))
    return replace(run, config=config, notes=tuple(kept))


def buffers_of(run: ForeignConfig) -> DeepSpeedBuffers:
    """How much DeepSpeed gathers and sends at once, as its own file says it, or by its defaults and the Trainer's."""
    zero = _zero(run.values)
    live = _count(zero.get("stage3_max_live_parameters"))
    bucket = _count(zero.get("reduce_bucket_size"))
    return DeepSpeedBuffers(
        live=MAX_LIVE if live is None else live, bucket=bucket, builds_whole=False
    )


def _zero(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ZeRO, where DeepSpeed's own file is known."""
    deepspeed = values.get("deepspeed")
    found = deepspeed.get("zero_optimization") if isinstance(deepspeed, dict) else None
    return found if isinstance(found, dict) else {}


def _count(value: Any) -> int | None:
    """A number of parameters, which people also write as 5e8; None for "auto" and what is no such number."""
    try:
        return int(float(value)) if float(value) >= 0 else None
    except (TypeError, ValueError, OverflowError):
        return None


def _of_fsdp(values: Mapping[str, Any], key: str, *, default: Any = None) -> Any:
    """A setting of FSDP, with or without its prefix, beside its other settings or in a mapping of them."""
    inside = values.get("fsdp_config")
    for place in (inside if isinstance(inside, dict) else {}, values):
        for name in (f"fsdp_{key}", key):
            if place.get(name) is not None:
                return place[name]
    return default


def _is_fsdp_1(values: Mapping[str, Any]) -> bool:
    named = str(values.get("accelerate_config") or "")
    return named == "fsdp1" or (not named and str(_of_fsdp(values, "version", default=1)) == "1")


def _offloads(values: Mapping[str, Any]) -> bool:
    """Whether parameters or the optimizer's state wait in the host's memory."""
    deepspeed = values.get("deepspeed")
    if isinstance(deepspeed, dict):
        parts = [_zero(values).get(f"offload_{part}") for part in ("param", "optimizer")]
        devices = [
            str(part.get("device", "cpu")).lower() for part in parts if isinstance(part, dict)
        ]
        return any(device != "none" for device in devices) or bool(_zero(values).get("cpu_offload"))
    if "offload" in f"{deepspeed} {values.get('fsdp')}".lower():
        return True
    return any(
        str(_of_fsdp(values, key)).lower() == "true" for key in ("offload_params", "cpu_offload")
    )

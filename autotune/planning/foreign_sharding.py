"""Reads how another tool's run shards its training, from its file and the user's GPU count."""

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

# In the name of a file, such as zero3_bf16.json or ds_z2_config.json
_STAGE = re.compile(r"z(?:ero)?[-_]?([0-3])(?!\d)")
_BY_STAGE = ("ddp", "zero1", "zero2", "zero3")
_OFF: tuple[Any, ...] = (None, False, "", "false", "False", [], {})


def strategy_of(values: Mapping[str, Any]) -> str | None:
    """Return the file's strategy as a value of the knob `sharding`, or None if it names none.

    FSDP 1 counts as FSDP2, its successor.
    """
    name = str(values.get("accelerate_config") or "")
    if name.startswith("fsdp"):
        return "fsdp2"
    if name in _BY_STAGE:
        return name

    # DeepSpeed: the stage in its own file, else the stage in the file's name
    deepspeed = values.get("deepspeed")
    if isinstance(deepspeed, dict):
        number = _count(_zero_settings(values).get("stage"))
        if number is not None and number < len(_BY_STAGE):
            return _BY_STAGE[number]
        deepspeed = values.get("deepspeed_file")
    if isinstance(deepspeed, str) and (
        stage := _STAGE.search(PurePosixPath(deepspeed).name.lower())
    ):
        return _BY_STAGE[int(stage[1])]
    if deepspeed not in _OFF:
        return None

    # FSDP
    if all(values.get(key) in _OFF for key in ("fsdp", "fsdp_config", "fsdp_version")):
        return None
    fsdp = str(values.get("fsdp")).lower()
    if "no_shard" in fsdp:
        return "ddp"
    reshards = str(_fsdp_setting(values, "reshard_after_forward", default=True)).lower()
    keeps = "shard_grad_op" in fsdp or reshards in ("false", "shard_grad_op", "no_shard")
    return "fsdp2_keep" if keeps else "fsdp2"


def shared_out(run: ForeignConfig, model: ModelSpec, gpus: int | None) -> ForeignConfig:
    """Return the run sharded over `gpus` GPUs, or over the number that its file names.

    `gpus` is the user's number. If the sharding is unknown, the run is returned unchanged. A note
    says which part is not counted.
    """
    number = gpus or run.num_gpus or 1
    run = replace(run, num_gpus=gpus or run.num_gpus)
    file_strategy = strategy_of(run.values)
    strategy = file_strategy or ("ddp" if gpus else None)

    if run.objective is not Objective.SFT and number > 1:
        note = load_data("autotune.planning", "foreign_keys")["notes"]["one_gpu"].format(
            objective=run.objective
        )
        return replace(run, notes=(*run.notes, note))
    if number == 1 or strategy is None or number not in KNOBS["num_gpus"].choices:
        return run

    replicas = run.values.get("dp_replicate_size")
    copies = next((number for number in KNOBS["copies"].choices if number == replicas), 1)
    config = replace(run.config, num_gpus=number, sharding=strategy, copies=copies)
    parallelism = Parallelism.of(config)
    if parallelism.shards and config.precision == "bf16_pure" and run.values.get("bf16") != "full":
        # FSDP2 and DeepSpeed keep the trained parameters in fp32.
        config = replace(config, precision="bf16_mixed")

    notes = load_data("autotune.planning", "foreign_keys")["notes"]
    reason = parallelism.refusal(config)
    if reason is None and parallelism.shards and FP32_BASE in run.notes:
        reason = "no formula covers a base in float32 that is shared out"
    if reason is None and memory_of(model, config) is None:
        reason = "no formula covers a rank of this run"

    if reason is not None:
        return replace(run, notes=(*run.notes, notes["not_shared"].format(reason=reason)))

    kept_notes = [note for note in run.notes if file_strategy is None or note != notes["sharded"]]
    if strategy.startswith("fsdp2") and _is_fsdp_1(run.values):
        kept_notes.append(notes["fsdp_1"])
    if _offloads(run.values):
        kept_notes.append(notes["less_memory"].format(key="Offloading of the model"))
    return replace(run, config=config, notes=tuple(kept_notes))


def buffers_of(run: ForeignConfig) -> DeepSpeedBuffers:
    """Return the numbers of parameters that DeepSpeed gathers and sends at once.

    They come from DeepSpeed's own file, or from its defaults and the Trainer's.
    """
    zero = _zero_settings(run.values)
    live = _count(zero.get("stage3_max_live_parameters"))
    bucket = _count(zero.get("reduce_bucket_size"))
    return DeepSpeedBuffers(
        live=MAX_LIVE if live is None else live, bucket=bucket, builds_whole=False
    )


def _zero_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ZeRO, if DeepSpeed's own file is known."""
    deepspeed = values.get("deepspeed")
    settings = deepspeed.get("zero_optimization") if isinstance(deepspeed, dict) else None
    return settings if isinstance(settings, dict) else {}


def _count(value: Any) -> int | None:
    """Return a number of parameters, which may be written as 5e8, or None for another value."""
    try:
        return int(float(value)) if float(value) >= 0 else None
    except (TypeError, ValueError, OverflowError):
        return None


def _fsdp_setting(values: Mapping[str, Any], key: str, *, default: Any = None) -> Any:
    """Return a setting of FSDP: with or without its prefix, at the top level or in its mapping."""
    inside = values.get("fsdp_config")
    for place in (inside if isinstance(inside, dict) else {}, values):
        for name in (f"fsdp_{key}", key):
            if place.get(name) is not None:
                return place[name]
    return default


def _is_fsdp_1(values: Mapping[str, Any]) -> bool:
    preset = str(values.get("accelerate_config") or "")
    return preset == "fsdp1" or (
        not preset and str(_fsdp_setting(values, "version", default=1)) == "1"
    )


def _offloads(values: Mapping[str, Any]) -> bool:
    """Return whether parameters or the optimizer's state are offloaded to the host's memory."""
    deepspeed = values.get("deepspeed")
    if isinstance(deepspeed, dict):
        parts = [_zero_settings(values).get(f"offload_{part}") for part in ("param", "optimizer")]
        devices = [
            str(part.get("device", "cpu")).lower() for part in parts if isinstance(part, dict)
        ]
        return any(device != "none" for device in devices) or bool(
            _zero_settings(values).get("cpu_offload")
        )

    if "offload" in f"{deepspeed} {values.get('fsdp')}".lower():
        return True
    return any(
        str(_fsdp_setting(values, key)).lower() == "true"
        for key in ("offload_params", "cpu_offload")
    )

"""Reads how another tool's run shards its training, from its file and the user's GPU count."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import PureWindowsPath
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.core.objective import Objective
from autotune.core.parallelism import BITSANDBYTES, FSDP2, ZERO, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import count
from autotune.prediction.estimate import memory_of
from autotune.prediction.sharded_memory import BUCKET, MAX_LIVE, ShardingSettings
from autotune.report.values.check import FP32_BASE, ForeignConfig, Uncounted

# The ZeRO stage in the name of a file, such as zero3_bf16.json or ds_z2_config.json
_STAGE = re.compile(r"z(?:ero)?[-_]?([0-3])(?!\d)")
_BY_STAGE = ("ddp", "zero1", "zero2", "zero3")
TORCHAO = {"adamw_torch_8bit", "ao_adamw_8bit"}  # the tools' names for its 8-bit AdamW
# Terms of MemoryBreakdown whose tensors stay on the GPU between micro batches
_LASTING = ("weights", "adapters", "gradients", "optimizer")
# Terms of MemoryBreakdown that are sharded over the GPUs, by strategy
_SHARED = {
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("gradients", "optimizer"),
    "zero3": _LASTING,
    "fsdp2": _LASTING,
    "fsdp2_keep": ("gradients", "optimizer"),
}
SHARDS = "dp_shard_size"  # this key only shards parameters
_NAMES = {"zero": " by DeepSpeed's ZeRO", "fsdp": " by FSDP"}
# The dtypes in which accelerate shards 4-bit weights. It leaves integers whole on each GPU.
_FLOATS = ("bfloat16", "float16", "float32")
# Axolotl and LLaMA-Factory store 4-bit weights in the dtype of the computation, TRL in uint8.
_STORAGE = {"axolotl": "bfloat16", "llamafactory": "bfloat16", "trl": "uint8"}
# The objectives whose training on several GPUs is estimated
SHARDED = (Objective.SFT, Objective.GRPO)
# torch's numbers of FSDP 1's strategies, which accelerate's files may have in place of the names
_FSDP_1 = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}
_KEEPING = ("shard_grad_op", "hybrid_shard_zero2")  # these keep whole weights after a forward pass
_OFF: tuple[Any, ...] = (None, False, "", "false", "False", [], {})


def strategy_of(values: Mapping[str, Any]) -> str | None:
    """Return the file's strategy as a value of the knob `sharding`, or None if it is unknown.

    A file for FSDP 1 gets the strategy of FSDP2, its successor.
    """
    name = str(values.get("accelerate_config") or "")
    if name.startswith("fsdp"):
        return "fsdp2"
    if name in _BY_STAGE:
        return name

    # DeepSpeed: the ZeRO stage is in DeepSpeed's own file, or else in this file's name.
    deepspeed = values.get("deepspeed")
    if isinstance(deepspeed, dict):
        number = _count(_zero_settings(values).get("stage"))
        if number is not None and number < len(_BY_STAGE):
            return _BY_STAGE[number]
        deepspeed = values.get("deepspeed_file")
    if isinstance(deepspeed, str) and (
        stage := _STAGE.search(PureWindowsPath(deepspeed).name.lower())
    ):
        return _BY_STAGE[int(stage[1])]
    if deepspeed not in _OFF:
        return None

    # FSDP
    if all(values.get(key) in _OFF for key in ("fsdp", "fsdp_config", "fsdp_version")):
        return None
    fsdp = str(values.get("fsdp")).lower()
    of_fsdp_1 = str(_fsdp_setting(values, "sharding_strategy")).lower()
    if _is_fsdp_1(values):
        fsdp += f" {_FSDP_1.get(of_fsdp_1, of_fsdp_1)}"
    if "no_shard" in fsdp:
        return "ddp"
    reshards = str(_fsdp_setting(values, "reshard_after_forward", default=True)).lower()
    keeps = any(name in fsdp for name in _KEEPING) or reshards in ("false", *_KEEPING, "no_shard")
    return "fsdp2_keep" if keeps else "fsdp2"


def shard_run(run: ForeignConfig, model: ModelSpec, gpus: int | None) -> ForeignConfig:
    """Return the run sharded over `gpus` GPUs or, without `gpus`, over the number in its file.

    `gpus` is the number that the user gave, or None. If no formula covers the run's sharding or
    offloading, the result's field `uncounted` describes it.
    """
    number = gpus or run.num_gpus or 1
    run = replace(run, num_gpus=gpus or run.num_gpus)
    notes = load_data("autotune.planning", "foreign_keys")["notes"]
    file_strategy = strategy_of(run.values)
    replicates = gpus or (run.num_gpus and notes["sharded"] not in run.notes)
    strategy = file_strategy or ("ddp" if replicates else None)

    if run.objective not in SHARDED and number > 1:
        note = notes["one_gpu"].format(objective=run.objective)
        return _with_uncounted(replace(run, notes=(*run.notes, note)), number)
    # On one GPU, only DeepSpeed makes a difference: it offloads to the host.
    alone = (
        number == 1
        and strategy in ZERO
        and run.objective in SHARDED
        and bool(_offloaded_terms(run.values))
    )
    if strategy is None or (number == 1 and not alone):
        return _with_uncounted(run, number)
    if number not in KNOBS["num_gpus"].choices:
        return _with_uncounted(run, number, f"no formula covers {number} GPUs")

    replicas = run.values.get("dp_replicate_size")
    copies = next((number for number in KNOBS["copies"].choices if number == replicas), 1)
    offloads = strategy in FSDP2 and bool(_offloaded_terms(run.values))
    config = replace(
        run.config,
        num_gpus=number,
        sharding=strategy,
        copies=copies,
        offload=offloads,
        sync_each_batch=strategy in FSDP2 and _syncs_each_batch(run.values),
    )
    parallelism = Parallelism(strategy=strategy) if alone else Parallelism.of(config)
    if parallelism.shards and config.precision == "bf16_pure" and run.values.get("bf16") != "full":
        # FSDP2 and DeepSpeed keep the trained parameters in fp32.
        config = replace(config, precision="bf16_mixed")

    reason = _split(run.values) or _refusal(parallelism, config, run.values)
    if reason is None and parallelism.shards and FP32_BASE in run.notes:
        reason = "no formula covers a sharded float32 base"
    settings = settings_of(run)
    known = partial(memory_of, parallelism=parallelism, settings=settings, count=count)
    if reason is None and known(model, config) is None:
        reason = "no formula covers the memory of a rank of this run"
    if reason is not None:
        return _with_uncounted(run, number, reason)

    kept_notes = [note for note in run.notes if file_strategy is None or note != notes["sharded"]]
    if strategy.startswith("fsdp2") and _is_fsdp_1(run.values):
        kept_notes.append(notes["fsdp_1"])
    if config.quantization == "nf4" and strategy in (*FSDP2, "zero3"):
        kept_notes.append(
            notes["sharded_4_bits" if settings.shards_packed else "whole_4_bits"].format(
                key="bnb_4bit_quant_storage"
            )
        )
    shared = replace(
        run, config=config, notes=tuple(kept_notes), on_one_gpu=strategy if alone else None
    )
    return _with_uncounted(shared, number, is_counted=True)


def synced(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the edit that makes FSDP shard its gradients after each micro batch."""
    config = _mapping(values, "accelerator_config")
    kwargs = _mapping(config, "gradient_accumulation_kwargs") | {"sync_each_batch": True}
    return {"accelerator_config": config | {"gradient_accumulation_kwargs": kwargs}}


def _syncs_each_batch(values: Mapping[str, Any]) -> bool:
    kwargs = _mapping(_mapping(values, "accelerator_config"), "gradient_accumulation_kwargs")
    return kwargs.get("sync_each_batch") not in _OFF


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def _refusal(
    parallelism: Parallelism, config: TrainConfig, values: Mapping[str, Any]
) -> str | None:
    """Return the reason why a tool cannot shard the run, or None if it can.

    The tools train some configurations that autotune's own trainer refuses, and formulas cover
    them: 4-bit bases, fused losses under ZeRO, and 8-bit optimizers on FSDP 1's plain tensors or on
    DeepSpeed's. torchao's 8-bit optimizers work with the sharded tensors of FSDP2, too.
    """
    plain = replace(config, quantization="none") if config.quantization == "nf4" else config
    if parallelism.strategy in ZERO:
        plain = replace(plain, loss="full", compile="none")
    of_torchao = {values.get("optim"), values.get("optimizer")} & TORCHAO
    if config.optimizer in BITSANDBYTES and (
        parallelism.strategy in ZERO or _is_fsdp_1(values) or of_torchao
    ):
        plain = replace(plain, optimizer="adamw_torch")
    return parallelism.refusal(plain)


def _with_uncounted(
    run: ForeignConfig, number: int, reason: str | None = None, *, is_counted: bool = False
) -> ForeignConfig:
    """Return the run, with the memory savings that no formula covers in its field `uncounted`.

    `number` is the number of GPUs. `reason` says why no formula covers the run's sharding. With
    `is_counted`, a formula covers the run's sharding and offloading.
    """
    table = load_data("autotune.planning", "foreign_keys")
    notes = table["notes"]
    causes = []
    exchanges = False

    # Some keys save an amount of memory that no formula predicts.
    freed: set[str] = set()
    for key, terms in table["lessens"].items():
        if run.values.get(key) not in _OFF and notes["less_memory"].format(key=key) in run.notes:
            causes.append(f"the memory that {key} saves")
            freed |= set(terms)
    for part, terms in table["smaller_optimizers"].items():
        if notes["less_memory"].format(key=f"optimizer {part}") in run.notes:
            causes.append(f"the memory that the optimizer {part} saves")
            freed |= set(terms)

    terms = _offloaded_terms(run.values)
    if terms and (not is_counted or run.values.get("use_kt") not in _OFF):
        causes.append("the memory that is offloaded to the host")
        freed |= terms
        exchanges = True

    # The strategy decides which terms of memory are sharded. If the strategy is unknown, the lower
    # bound of the memory assumes that every term is sharded if at least one strategy shards it.
    shared: set[str] = set()
    unshared_notes = list(run.notes)
    if notes["sharded"] in run.notes and number > 1:
        strategy = strategy_of(run.values)
        shared = set(_SHARED.get(strategy or "", _LASTING))
        if _split(run.values) or (
            strategy is None and any(run.values.get(key) not in _OFF for key in _splits(table))
        ):
            shared |= {"activations", "logits"}
        if shared:
            freed.add("reserved")  # the allocator gives unused memory back if memory is short
            why = f" ({reason})" if reason else ""
            by = _NAMES.get((strategy or "")[:4], "")
            causes.append(f"the sharding of the model over {number} GPUs{by}{why}")
            exchanges = True
            unshared_notes.remove(notes["sharded"])
    elif notes["sharded"] in run.notes and freed:
        unshared_notes.remove(notes["sharded"])
    if reason and not shared:
        unshared_notes.append(notes["not_shared"].format(reason=reason))

    if not causes:
        return replace(run, notes=tuple(unshared_notes))
    uncounted = Uncounted(
        causes=tuple(causes),
        num_gpus=number,
        shared=frozenset(shared - freed),
        freed=frozenset(freed),
        exchanges=exchanges,
    )
    return replace(run, notes=tuple(unshared_notes), uncounted=uncounted)


def _split(values: Mapping[str, Any]) -> str | None:
    """Return a reason if GPUs split layers or sequences, besides sharding parameters, or None."""
    keys = [key for key in _splits(load_data("autotune.planning", "foreign_keys")) if key != SHARDS]
    used = next((key for key in keys if (_count(values.get(key)) or 1) > 1), None)
    return used and f"no formula covers {used}"


def _splits(table: Mapping[str, Any]) -> list[str]:
    """Return the keys for parallelism that splits rows or layers, instead of only parameters."""
    return [*table["parallel"], *table["split"]]


def settings_of(run: ForeignConfig) -> ShardingSettings:
    """Return the settings of the run's tool that determine how much memory a rank needs.

    DeepSpeed's settings come from the file that the run names, or from the defaults of DeepSpeed
    and the Trainer. The scales of a 4-bit base stay whole on each GPU.
    """
    zero = _zero_settings(run.values)
    # DeepSpeed reads both spellings of the key.
    live = _count(zero.get("stage3_max_live_parameters", zero.get("max_live_parameters")))
    bucket = _count(zero.get("reduce_bucket_size"))
    # The Trainer only replaces "auto". Files for stage 3 that the tools ship say "auto".
    below_3 = strategy_of(run.values) in ("zero1", "zero2")
    if bucket is None and below_3 and zero.get("reduce_bucket_size") != "auto":
        bucket = BUCKET
    if bucket is not None and below_3 and zero.get("overlap_comm"):
        bucket *= 2
    offloaded = _offloaded_terms(run.values) if strategy_of(run.values) in ZERO else set()
    quantisation = run.values.get("bnb_config_kwargs")
    inside = quantisation if isinstance(quantisation, dict) else {}
    key = "bnb_4bit_quant_storage"
    storage = str(inside.get(key) or run.values.get(key) or _STORAGE[run.format])
    return ShardingSettings(
        live=MAX_LIVE if live is None else live,
        bucket=bucket,
        offloads_weights="weights" in offloaded,
        offloads_state="optimizer" in offloaded,
        fsdp_1=_is_fsdp_1(run.values) and strategy_of(run.values) in FSDP2,
        shards_statistics=False,
        shards_packed=storage.removeprefix("torch.") in _FLOATS,
    )


def _zero_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ZeRO settings of the DeepSpeed file that the run names, or {} if none was read."""
    deepspeed = values.get("deepspeed")
    settings = deepspeed.get("zero_optimization") if isinstance(deepspeed, dict) else None
    return settings if isinstance(settings, dict) else {}


def _count(value: Any) -> int | None:
    """Return a value such as 3, "3" or 5e8 as an integer, or None for any other value."""
    try:
        return int(float(value)) if float(value) >= 0 else None
    except (TypeError, ValueError, OverflowError):
        return None


def _fsdp_setting(values: Mapping[str, Any], key: str, *, default: Any = None) -> Any:
    """Return a setting of FSDP, whose key may have the prefix `fsdp_`.

    The setting is read in the mapping `fsdp_config`, or else at the top level.
    """
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


def _offloaded_terms(values: Mapping[str, Any]) -> set[str]:
    """Return the terms of MemoryBreakdown that the run may keep in the host's memory.

    If the optimizer's state is in the host's memory, the gradients are there, too. KTransformers
    trains the experts of a mixture on the host, and the experts hold almost all of its weights.
    """
    parameters, state = {"weights", "adapters"}, {"gradients", "optimizer"}
    if values.get("use_kt") not in _OFF:
        return {*parameters, *state, "activations"}
    deepspeed = values.get("deepspeed")
    if isinstance(deepspeed, dict):
        zero = _zero_settings(values)
        terms = state if zero.get("cpu_offload") else set()
        for name, parts in (("offload_param", parameters), ("offload_optimizer", state)):
            setting = zero.get(name)
            device = str(setting.get("device", "cpu")) if isinstance(setting, dict) else "none"
            terms = terms | (parts if device.lower() != "none" else set())
        return terms

    if "offload" in f"{deepspeed} {values.get('fsdp')}".lower():
        return parameters | state
    offloads = any(
        str(_fsdp_setting(values, key)).lower() == "true"
        for key in ("offload_params", "cpu_offload")
    )
    return parameters | state if offloads else set()

"""Says in the keys of a tool how a faster configuration differs from the run of a file."""

from dataclasses import dataclass
from typing import Any

from autotune.core.train_config import TrainConfig
from autotune.export.keys import attention_of, gap, key_of, sections
from autotune.planning.fixes import apply_edits, fused_loss, liger_layers
from autotune.report.values.check import FP32_BASE, TRANSFORMERS, Edits, ForeignConfig

_KNOBS = ("checkpointing", "checkpoint_every", "compile")  # with rows in the table of keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes from a run to a configuration.

    `edits` are keys of the run's tool with their new values. `own` has phrases in autotune's words,
    such as "loss full", for the settings that the tool cannot express.
    """

    edits: Edits
    own: tuple[str, ...]


def changes_to(
    run: ForeignConfig, config: TrainConfig, accumulation: int, *, packing: bool
) -> Changes:
    """Return the changes from a run to a configuration with `accumulation` micro batches a step.

    `packing` says whether packing counts as a change.
    """
    old, tool = run.config, run.format
    edits: Edits = {}
    own = []
    if config.micro_batch_size != old.micro_batch_size:
        edits[key_of(tool, "micro_batch_size")] = config.micro_batch_size
    if accumulation != run.accumulation:
        edits[key_of(tool, "accumulation")] = accumulation

    if config.checkpointing != old.checkpointing and not _expresses(tool, "checkpointing", config):
        own.append(f"checkpointing {config.checkpointing}")
    else:
        edits |= _difference(run, config, ("checkpointing", "checkpoint_every"))
    edits |= _difference(run, config, ("compile",))
    if packing and run.tool == TRANSFORMERS and config.packing != old.packing:
        own.append(f"packing {config.packing}".lower())
    elif packing:
        edits |= _difference(run, config, ("packing",))
    if "eager" in (config.attention, old.attention) and config.attention != old.attention:
        edits[key_of(tool, "attention")] = attention_of(tool, config)

    fused, phrases = _kernels(run, config)
    edits |= fused
    if FP32_BASE in run.notes:
        edits["dtype"] = "bfloat16"
    return Changes(edits=edits, own=(*own, *phrases))


def _difference(run: ForeignConfig, config: TrainConfig, knobs: tuple[str, ...]) -> Edits:
    """Return the keys that a tool's file has for these knobs, and that the run's file lacks."""
    before, after = (_written(run, one, knobs) for one in (run.config, config))
    gone = {key: False for key, value in before.items() if value is True and key not in after}
    edits: Edits = {}
    for path, value in (gone | after).items():
        if before.get(path) == value:
            continue
        key, _, inner = path.partition(".")
        edits[key] = edits.get(key, run.values.get(key) or {}) | {inner: value} if inner else value
    return edits


def _written(run: ForeignConfig, config: TrainConfig, knobs: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys and values of a tool's file for these knobs; a dot is of a nested key."""
    values = _values(config)
    found: dict[str, Any] = {}
    for row in (row for rows in sections().values() for row in rows):
        if row.of in knobs or (row.of is None and row.when.keys() & set(knobs)):
            found |= row.entries(run.format, values)
    # The other half of transformers 5.20's new name
    if "activation_checkpointing" in run.values and "gradient_checkpointing" in found:
        found["activation_checkpointing"] = found.pop("gradient_checkpointing")
    ignored = ("tf32", "gradient_checkpointing_kwargs.use_reentrant")
    return {key: value for key, value in found.items() if key not in ignored}


def _values(config: TrainConfig) -> dict[str, Any]:
    every = config.checkpoint_every
    return config.as_dict() | {
        "objective": "sft",
        "by_layer": True,
        "checkpoint_every": every,
        "skips_layers": (every or 1) > 1,
        "selects": config.activation_budget < 1,
    }


def _expresses(tool: str, knob: str, config: TrainConfig) -> bool:
    return not gap(tool, knob, getattr(config, knob), _values(config))


def _kernels(run: ForeignConfig, config: TrainConfig) -> tuple[Edits, list[str]]:
    """Return the edits for the kernels and the loss, and phrases for what no key expresses."""
    old = run.config
    loss, kernels = config.loss != old.loss, config.kernels != old.kernels
    liger = config.kernels == "liger"
    if run.format == "axolotl":
        edits = fused_loss(run.values, fuses=config.loss == "chunked") if loss else {}
        if kernels:
            edits |= liger_layers(apply_edits(run.values, edits), on=liger)
        return edits, []
    if run.tool == "trl":
        edits = {"use_liger_kernel": liger} if kernels else {}
        return edits, [f"loss {config.loss}"] if loss else []

    # One key switches on both.
    key = "enable_liger_kernel" if run.format == "llamafactory" else "use_liger_kernel"
    wanted = liger or config.loss == "chunked"
    had = old.kernels == "liger" or old.loss == "chunked"
    phrases = [f"loss {config.loss}"] if wanted and config.loss != "chunked" else []
    phrases += [f"kernels {config.kernels}"] if wanted and not liger else []
    return ({key: wanted} if wanted != had else {}), phrases

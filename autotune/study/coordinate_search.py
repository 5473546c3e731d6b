"""The first moves of a search: from the best so far, one knob at a time, each only in the direction that may pay.

Knobs act on speed nearly independently, so that climbing from the baseline finds most of what there is in a few
probes; the sampler goes on from there, and finds what only shows together. Learning knobs are not touched, but for
precision, which changes speed as much as any, and products in fp8 where they are allowed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace

# Compilation comes late: it costs seconds for every configuration, and helps the one that the others lead to. Products
# of 8-bit floats come after it, since they pay in compiled layers alone.
ORDER = (
    "loss",
    "packing",
    "checkpointing",
    "micro_batch_size",
    "precision",
    "attention",
    "kernels",
    "compile",
    "quantization",
)
# The same arithmetic in less memory, which the moves after it may use: taken unless it is slower.
MAKES_ROOM = ("loss",)
# The fastest first. What stands behind the present value is slower wherever both fit, and is not tried.
FASTEST_FIRST = {
    "precision": ("bf16_pure", "bf16_mixed", "fp16_mixed", "fp32"),
    "attention": ("flash_attention_2", "sdpa_cudnn", "sdpa", "flex_attention", "eager"),
    "compile": ("per_layer", "none"),
    "loss": ("chunked", "full"),
    "kernels": ("liger", "torch"),
    "quantization": ("fp8", "none", "int8", "nf4"),
    "packing": (True, False),
}
TOO_LARGE = (Outcome.OOM, Outcome.REFUSED)


def next_move(space: SearchSpace, here: TrainConfig, name: str, tried: Mapping[str, Outcome]) -> dict[str, Any] | None:
    """The choice to try next from `here` by knob `name`; None where nothing is left. `tried` is keyed by digest."""
    knob = space.knob(name)
    for value in _better(knob, here) if knob else ():
        moved = replace(here, **{name: value})
        # Less recomputation may pay even at the price of a smaller micro batch, and packing may need one.
        for config in smaller_batches(space, moved) if name in ("checkpointing", "packing") else [moved]:
            chosen = space.clip(config)
            if getattr(space.config(chosen), name) != value:
                continue  # it has no effect beside the others
            outcome = tried.get(space.config(chosen).digest)
            if outcome is None:
                return chosen
            if outcome not in TOO_LARGE:
                break
        else:
            continue
        # A micro batch may pay in either direction, and recomputing some layers more than none, where that would take
        # a smaller one. Other values only get slower.
        if name != "micro_batch_size" and not (name == "checkpointing" and config != moved):
            return None
    return None


def _better(knob: Knob, here: TrainConfig) -> list[Any]:
    """The values of a knob that may be faster than the present one, the most promising first."""
    present, values = getattr(here, knob.name), knob.choices()
    if knob.name == "micro_batch_size":
        larger, smaller = [one for one in values if one > present], [one for one in values if one < present]
        return [*sorted(larger)[:1], *sorted(smaller)[-1:]]
    if knob.name == "checkpointing":
        tried = {value: replace(here, checkpointing=value) for value in values}
        speed = {value: (one.kept, not one.offloads) for value, one in tried.items()}
        return sorted((one for one in values if speed[one] > speed[present]), key=lambda one: speed[one], reverse=True)
    if knob.name == "quantization" and present != "none":
        return []  # another base to learn from, not a faster way to the same
    order = FASTEST_FIRST[knob.name]
    return sorted((value for value in values if order.index(value) < order.index(present)), key=order.index)


def smaller_batches(space: SearchSpace, config: TrainConfig) -> Iterator[TrainConfig]:
    """This configuration, then with ever smaller micro batches."""
    yield config
    knob = space.knob("micro_batch_size")
    for size in sorted(knob.choices() if knob else (), reverse=True):
        if size < config.micro_batch_size:
            yield replace(config, micro_batch_size=size)


def neighbours(
    space: SearchSpace, best: TrainConfig | None, seen: set[str], rank: int | None = None
) -> list[dict[str, Any]]:
    """The choices that differ least from the best, of those whose digest was not seen; other ranks than `rank` last."""
    there, choices = best.as_dict() if best else {}, _choices(space)
    apart = [
        (rank is not None and config.lora_rank != rank, len(config.as_dict().items() ^ there.items()))
        for _, config in choices
    ]
    for _, places in groupby(sorted(range(len(choices)), key=apart.__getitem__), key=apart.__getitem__):
        if unseen := [chosen for chosen, config in map(choices.__getitem__, places) if config.digest not in seen]:
            return unseen
    return []


_last: tuple[str, list[tuple[dict[str, Any], TrainConfig]]] = ("", [])


def _choices(space: SearchSpace) -> list[tuple[dict[str, Any], TrainConfig]]:
    """Every choice with its configuration; those of the space that was asked for last are kept."""
    global _last
    if _last[0] != space.digest:
        _last = space.digest, [(one, space.config(one)) for one in islice(space.enumerate(), 100_000)]
    return _last[1]

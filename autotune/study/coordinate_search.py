"""The first moves of a search: from the best configuration so far, one knob at a time, where that may pay.

Knobs act on speed nearly independently, so that coordinate search from the baseline finds most of the gain in a few
probes. The sampler continues from there, and finds what only shows in combination. Learning knobs are left alone,
except precision, which changes speed as much as any knob, and fp8 products where they are allowed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace

# Compilation comes late: it costs seconds for every configuration, and helps the one that the other knobs lead to.
# Products of 8-bit floats come after it, since they only pay in compiled layers.
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
# The same arithmetic in less memory, which later moves may use: taken unless it is slower.
MAKES_ROOM = ("loss",)
TOO_LARGE = (Outcome.OOM, Outcome.REFUSED)


def next_move(
    space: SearchSpace, current: TrainConfig, name: str, tried: Mapping[str, Outcome]
) -> dict[str, Any] | None:
    """The choice to try next from `current` by knob `name`, or None if nothing is left.

    `tried` has the outcome of each configuration that was tried, by its digest.
    """
    knob = space.knob(name)
    for value in _faster_values(knob, current) if knob else ():
        moved = replace(current, **{name: value})
        # Less recomputation may pay even at the price of a smaller micro batch, and packing may need one.
        shrinks = name in ("checkpointing", "packing")
        fits = False
        for config in smaller_batches(space, moved) if shrinks else [moved]:
            chosen = space.clip(config)
            if getattr(space.config(chosen), name) != value:
                continue  # the knob has no effect with these values of the others
            outcome = tried.get(space.config(chosen).digest)
            if outcome is None:
                return chosen
            if outcome not in TOO_LARGE:
                fits = True
                break
        if not fits:
            continue
        # A micro batch may pay in either direction. Recomputing some layers may pay more than recomputing none, if that
        # takes a smaller micro batch. The remaining values of other knobs are only slower.
        if name != "micro_batch_size" and not (name == "checkpointing" and config != moved):
            return None
    return None


def _faster_values(knob: Knob, current: TrainConfig) -> list[Any]:
    """The values of a knob that may be faster than the present one, the most promising first."""
    present, values = getattr(current, knob.name), knob.choices()
    if knob.name == "micro_batch_size":
        larger = sorted(value for value in values if value > present)
        smaller = sorted(value for value in values if value < present)
        return [*larger[:1], *smaller[-1:]]
    if knob.name == "quantization" and present != "none":
        return []  # another base to learn from, not a faster way to the same result
    speed_rank = KNOBS[knob.name].speed_rank
    return sorted((value for value in values if speed_rank(value) < speed_rank(present)), key=speed_rank)


def smaller_batches(space: SearchSpace, config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield this configuration, then the same with ever smaller micro batches."""
    yield config
    knob = space.knob("micro_batch_size")
    for size in sorted(knob.choices() if knob else (), reverse=True):
        if size < config.micro_batch_size:
            yield replace(config, micro_batch_size=size)


def neighbours(
    space: SearchSpace, best: TrainConfig | None, seen: set[str], rank: int | None = None
) -> list[dict[str, Any]]:
    """The choices nearest to `best` whose configurations are not in `seen` (digests): all of the same distance.

    Configurations with another LoRA rank than `rank`, if it is given, come after all others. An empty list means that
    every configuration of the space is in `seen`. Without `best`, distances count from the default configuration.
    """
    centre = best or TrainConfig()
    if rank is not None:
        same_rank = space.pin("lora_rank", rank)
        if space.knob("method"):
            same_rank = same_rank.pin("method", "lora")
        nearest = _nearest_unseen(same_rank, centre, seen)
        if nearest:
            return nearest
    return _nearest_unseen(space, centre, seen)


def _nearest_unseen(space: SearchSpace, centre: TrainConfig, seen: set[str]) -> list[dict[str, Any]]:
    for distance in range(len(space.knobs) + 1):
        unseen = [chosen for chosen in at_distance(space, centre, distance) if space.config(chosen).digest not in seen]
        if unseen:
            return unseen
    return []


def by_distance(space: SearchSpace, centre: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield every choice of the space once, those that differ from `centre` in the fewest knobs first."""
    for distance in range(len(space.knobs) + 1):
        yield from at_distance(space, centre, distance)


def at_distance(space: SearchSpace, centre: TrainConfig, distance: int) -> Iterator[dict[str, Any]]:
    """Yield the choices that differ from `centre` (clipped to the space) in exactly `distance` active knobs.

    Each is made by so many edits, so that nothing nearer or farther is enumerated.
    """

    def extend(chosen: dict[str, Any], index: int, edits: int) -> Iterator[dict[str, Any]]:
        if edits > len(space.knobs) - index:
            return
        if index == len(space.knobs):
            yield chosen
            return
        knob = space.knobs[index]
        if not knob.is_active(chosen):
            yield from extend(chosen, index + 1, edits)
            return
        own = knob.nearest(getattr(centre, knob.name))
        for value in knob.choices() if edits else [own]:
            yield from extend(chosen | {knob.name: value}, index + 1, edits if value == own else edits - 1)

    return extend({}, 0, distance)

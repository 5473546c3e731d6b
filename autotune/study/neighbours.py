"""Which configurations of a space differ least from a given one: made by edits of knobs, however large it is."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace

COMPILED = "per_layer"
FASTEST = {"compile": COMPILED, "lora_kernels": KNOBS["lora_kernels"].fastest_first[0]}


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


def compiled_variants(space: SearchSpace, configs: Iterable[TrainConfig]) -> list[TrainConfig]:
    """The same configurations with compiled layers and the fastest adapters, of those that the space has so."""
    variants = [space.config(space.clip(replace(config, **FASTEST))) for config in configs]
    return [config for config in variants if config.compile == COMPILED]


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
        possible = knob.possible(chosen)
        own = knob.nearest(getattr(centre, knob.name), possible)
        for value in possible if edits else [own]:
            yield from extend(chosen | {knob.name: value}, index + 1, edits if value == own else edits - 1)

    return extend({}, 0, distance)

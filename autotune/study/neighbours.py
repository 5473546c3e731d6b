"""Find the configurations of a space that differ least from a given configuration.

The search changes only a few knobs of the given configuration, so it is quick even in a large
space.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace

COMPILED = "per_layer"


def neighbours(
    space: SearchSpace, best: TrainConfig | None, seen: set[str], rank: int | None = None
) -> list[dict[str, Any]]:
    """Return the untried choices (knob values) that differ least from `best`.

    `seen` holds the digests of the tried configurations. If `rank` is given, choices with another
    LoRA rank are returned only after all choices with this rank were tried. The list is empty if
    the whole space was tried. Without `best`, the default configuration takes its place.
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


def _nearest_unseen(
    space: SearchSpace, centre: TrainConfig, seen: set[str]
) -> list[dict[str, Any]]:
    for distance in range(len(space.knobs) + 1):
        unseen = [
            chosen
            for chosen in choices_at_distance(space, centre, distance)
            if space.config(chosen).digest not in seen
        ]
        if unseen:
            return unseen
    return []


def compiled_variants(space: SearchSpace, configs: Iterable[TrainConfig]) -> list[TrainConfig]:
    """Return copies of the configurations with compiled layers and the fastest `lora_kernels`.

    Configurations whose layers cannot be compiled are left out.
    """
    kernels = min(space.choices("lora_kernels"), key=KNOBS["lora_kernels"].speed_rank)
    fastest = {"compile": COMPILED, "lora_kernels": kernels}
    variants = [space.config(space.clip(replace(config, **fastest))) for config in configs]
    return [config for config in variants if config.compile == COMPILED]


def grouped_variants(space: SearchSpace, configs: Iterable[TrainConfig]) -> list[TrainConfig]:
    """Return the compiled variants whose experts use grouped matrix products (grouped GEMM).

    The variants also use the loss implementation that needs the least memory. No formula predicts
    the speed of a mixture of experts, and grouped products are the change that speeds it up most.
    """
    loss = min(space.choices("loss"), key=KNOBS["loss"].memory_rank)
    fastest = min(space.choices("attention"), key=KNOBS["attention"].speed_rank)
    starts = [
        replace(
            config,
            loss=loss,
            # If a model does not support SDPA, its baseline uses eager attention.
            attention=fastest if config.attention == "eager" else config.attention,
        )
        for config in configs
    ]
    variants = compiled_variants(space, starts)
    return [variant for variant in variants if variant.lora_kernels == "grouped"]


def leaner_optimizer(space: SearchSpace, config: TrainConfig) -> list[TrainConfig]:
    """Return a copy with the next optimizer that needs less memory, or [] if there is none."""
    rank = KNOBS["optimizer"].memory_rank
    present = rank(config.optimizer)
    leaner = [value for value in space.choices("optimizer") if rank(value) < present]
    return [replace(config, optimizer=max(leaner, key=rank))] if leaner else []


def choices_by_distance(space: SearchSpace, centre: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield every choice of the space once, the choices with the fewest changes to `centre` first.

    A change is a knob whose value differs from the value in `centre`.
    """
    for distance in range(len(space.knobs) + 1):
        yield from choices_at_distance(space, centre, distance)


def choices_at_distance(
    space: SearchSpace, centre: TrainConfig, distance: int
) -> Iterator[dict[str, Any]]:
    """Yield the choices that differ from `centre` in exactly `distance` knobs.

    If a value of `centre` is not in the space, the nearest value of the space takes its place.
    Knobs without effect are not counted. Choices at other distances are not generated.
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
            yield from extend(
                chosen | {knob.name: value}, index + 1, edits if value == own else edits - 1
            )

    return extend({}, 0, distance)

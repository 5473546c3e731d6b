"""The first moves of a search: from the best so far, one knob at a time, the cheap ones first.

Knobs act on speed nearly independently, so that climbing from the baseline finds most of what there is in a few
probes; the sampler goes on from there, and finds what only shows together.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autotune.config import TrainConfig
from autotune.space import Knob, SearchSpace

# Compilation comes last: it costs seconds for every configuration, and helps the one that the others lead to.
ORDER = (
    "checkpointing",
    "micro_batch_size",
    "precision",
    "attention",
    "optimizer",
    "quantization",
    "double_quant",
    "seq_len",
    "lora_rank",
    "compile",
)


def neighbours(space: SearchSpace, config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Choices that differ from `config` in one knob: by the next value where values have an order."""
    knobs = {knob.name: knob for knob in space.knobs}
    for name in (*ORDER, *(name for name in knobs if name not in ORDER)):
        if name in knobs and name != "method":
            for value in steps(knobs[name], getattr(config, name)):
                chosen = space.clip(replace(config, **{name: value}))
                if space.config(chosen) != config:  # a knob without effect here
                    yield chosen


def steps(knob: Knob, value: Any) -> list[Any]:
    """The values next to this one: the next larger and smaller number (twice and half in a range), or all others."""
    choices = knob.choices()
    if knob.is_range and isinstance(value, int):
        near = (min(2 * value, choices[-1]), max(value // 2, choices[0]))
        return [other for other in near if other != value]
    if all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices) and isinstance(value, int):
        larger = [choice for choice in choices if choice > value]
        smaller = [choice for choice in choices if choice < value]
        return [*([min(larger)] if larger else []), *([max(smaller)] if smaller else [])]
    return [choice for choice in choices if choice != value]

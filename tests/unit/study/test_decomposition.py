"""The factors of a speed-up: by groups of knobs on the way from the baseline to the winner, and
their product.
"""

import math
from dataclasses import replace

import pytest

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.study.decomposition import GROUPS, WHOLE, decompose, intermediate_configs

BASELINE = TrainConfig(micro_batch_size=8, checkpointing="full", packing=False)
WINNER = replace(
    BASELINE,
    micro_batch_size=2,
    packing=True,
    checkpointing="none",
    compile="per_layer",
    lora_rank=64,
)


def speed(config: TrainConfig) -> float:
    """Every knob has its own factor."""
    made = (
        1000.0
        * (3.0 if config.packing else 1.0)
        * (1.25 if config.checkpointing == "none" else 1.0)
    )
    made *= 1.2 if config.compile == "per_layer" else 1.0
    return (
        made
        * (0.9 if config.micro_batch_size == 2 else 1.0)
        * (0.98 if config.lora_rank == 64 else 1.0)
    )


def factors(speedup: float, *unknown: str) -> dict[str, float]:
    """The factors where these groups end at configurations that cannot be probed."""
    by_config = {config: name for name, config in intermediate_configs(WINNER, BASELINE)}
    made = decompose(
        WINNER,
        BASELINE,
        speedup,
        lambda config: None if by_config.get(config) in unknown else speed(config),
    )
    assert made is not None and (made.winner, made.baseline) == (WINNER, BASELINE)
    assert math.prod(one.factor for one in made.factors) == pytest.approx(speedup)
    return {one.name: pytest.approx(one.factor) for one in made.factors}


def test_each_group_of_knobs_has_its_factor() -> None:
    """The whole models differ by 4 % more than the truncated ones."""
    ratio = speed(WINNER) / speed(BASELINE)
    assert factors(1.04 * ratio) == {
        "padding or packing": 3.0,
        "batch": 0.9,
        "recomputation": 1.25,
        "compilation": 1.2,
        "other settings": 0.98,
        WHOLE: 1.04,
    }


def test_steps_that_cannot_be_probed_share_a_factor_with_the_next() -> None:
    ratio = speed(WINNER) / speed(BASELINE)
    shared = factors(ratio, "padding or packing", "batch", "compilation")
    assert shared == {
        "padding or packing + batch + recomputation": 3.0 * 0.9 * 1.25,
        "compilation + other settings": 1.2 * 0.98,
        WHOLE: 1.0,
    }


def test_without_the_speed_of_either_end_there_are_no_factors() -> None:
    for end in (WINNER, BASELINE):
        assert (
            decompose(WINNER, BASELINE, 2.0, lambda config, end=end: None if config == end else 1.0)
            is None
        )  # type: ignore[misc]
    assert decompose(WINNER, WINNER, 1.0, speed) is None


def test_the_way_ends_at_the_winner_and_names_no_knob_twice() -> None:
    assert intermediate_configs(WINNER, BASELINE)[-1][1] == WINNER
    named = [knob for knobs in GROUPS.values() for knob in knobs]
    assert len(named) == len(set(named))
    assert {"lora_rank", "method"}.isdisjoint(named) and {
        "packing",
        "compile",
        "checkpointing",
    } <= KNOBS.keys()

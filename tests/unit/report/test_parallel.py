"""Parallel coordinates: which knobs have an axis, where each configuration runs, who is among the fastest."""

from dataclasses import replace

import pytest

from autotune.core.train_config import TrainConfig
from autotune.report.parallel import ParallelInfo, parallel
from autotune.study.summary import StudySummary
from tests.helpers.factories import summary


def study(*trials: tuple[TrainConfig, float | None]) -> StudySummary:
    made = summary()
    rows = tuple(
        replace(made.trials[0], number=number, config=config, tokens_per_second=speed)
        for number, (config, speed) in enumerate(trials)
    )
    return replace(made, trials=rows)


HERE = TrainConfig(micro_batch_size=2, checkpointing="none")
LARGER = replace(HERE, micro_batch_size=4)
RECOMPUTED = replace(HERE, micro_batch_size=16, checkpointing="full")


def test_places_groups_and_axes() -> None:
    found = parallel(study((HERE, 960.0), (LARGER, 1000.0), (RECOMPUTED, 400.0), (replace(HERE, lora_rank=64), None)))
    assert found.axes == (("micro_batch_size", ("2", "4", "16")), ("checkpointing", ("full", "none")))
    assert found.fastest == 1000.0
    slow, close, best = found.lines  # the best is drawn last
    assert (slow.places, slow.group) == ((1.0, 0.0, 0.4), 2)
    assert (close.places, close.group) == ((0.0, 1.0, 0.96), 0)
    assert (best.places, best.group) == ((0.5, 1.0, 1.0), 0)


def test_a_configuration_that_was_measured_twice_is_one_line() -> None:
    found = parallel(study((HERE, 700.0), (HERE, 800.0), (RECOMPUTED, 600.0)))
    assert [line.tokens_per_second for line in found.lines] == [600.0, 800.0]
    assert found.lines[0].group == 1


@pytest.mark.parametrize(
    "trials", [(), ((HERE, 5.0),), ((HERE, 5.0), (LARGER, 6.0)), ((HERE, None), (RECOMPUTED, None))]
)
def test_too_little_was_varied(trials: tuple[tuple[TrainConfig, float | None], ...]) -> None:
    found: ParallelInfo = parallel(study(*trials))
    assert found.axes == () and found.lines == ()


def test_values_of_several_kinds_have_an_order() -> None:
    full = replace(HERE, method="full", lora_rank=None)
    found = dict(parallel(study((HERE, 5.0), (full, 6.0))).axes)
    assert found["lora_rank"] == ("None", "16") and found["method"] == ("full", "lora")

"""The plain values behind figures and tables: points, map, comparison, learning cells, row lengths,
parallel lines.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.report import infos
from autotune.report.html import draw, render
from autotune.study.summary import Candidate, Recipe, StudySummary
from tests.helpers.factories import summary


@pytest.fixture(scope="module")
def study() -> StudySummary:
    """Twelve trials, all OK except for OOM at 2 and 7 and refusals at 4 and 9."""
    return summary()


def recipe_of(study: StudySummary) -> Recipe:
    assert study.recipe is not None
    return study.recipe


def test_candidates_are_those_that_exist(study: StudySummary) -> None:
    assert list(infos.candidates(study)) == ["winner", "baseline"]
    assert infos.candidates(replace(study, recipe=None)) == {}


def test_limit_without_a_winner_is_the_trials_median(study: StudySummary) -> None:
    assert infos.limit_gib(study) == 132.0
    rows = [
        replace(row, limit_gib=limit)
        for row, limit in zip(study.trials, (100.0, 110.0, 150.0), strict=False)
    ]
    assert infos.limit_gib(replace(study, recipe=None, trials=tuple(rows))) == 110.0
    assert infos.limit_gib(replace(study, recipe=None, trials=())) is None


def test_best_so_far(study: StudySummary) -> None:
    # Speed rises by 400 a trial, so that each fit is a new best; 11 is the last.
    best = infos.best_so_far(study)
    assert [number for number, _ in best] == [0, 1, 3, 5, 6, 8, 10, 11]
    assert best[-1] == (11, 8000.0 + 400 * 11)
    falling = tuple(
        replace(
            row, tokens_per_second=None if row.tokens_per_second is None else 100.0 - row.number
        )
        for row in study.trials
    )
    assert infos.best_so_far(replace(study, trials=falling)) == ((0, 100.0), (11, 100.0))


def test_feasibility_map(study: StudySummary) -> None:
    info = infos.feasibility(study)
    assert list(info) == ["1", "2", "4", "8", "16", "32"]
    assert all(list(cells) == ["512", "1,024", "2,048"] for cells in info.values())
    # Micro batch 2**(n % 6) with seq_len n % 3: trials 2 and 8 share a cell (OOM, fit), 4 and 10
    # too (refused, fit).
    mixed = info["4"]["2,048"]
    assert (mixed.state, mixed.num_tried, mixed.best_tokens_per_second) == (
        "mixed",
        2,
        8000.0 + 400 * 8,
    )
    assert info["16"]["1,024"].state == "mixed"
    assert (info["1"]["512"].state, info["1"]["512"].num_tried) == ("fits", 2)
    assert (info["1"]["1,024"].state, info["1"]["1,024"].num_tried) == ("untried", 0)


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        (["oom", "refused"], "oom"),
        (["refused"], "refused"),
        (["crash", "timeout"], "failed"),
        (["ok", "crash"], "fits"),
        (["slow", "oom"], "mixed"),
    ],
)
def test_state_of_a_cell(study: StudySummary, outcomes: list[str], state: str) -> None:
    rows = tuple(replace(study.trials[0], outcome=Outcome(name)) for name in outcomes)
    assert infos.feasibility(replace(study, trials=rows))["1"]["512"].state == state


def test_a_long_axis_is_grouped(study: StudySummary) -> None:
    rows = tuple(
        replace(study.trials[0], config=TrainConfig(seq_len=length)) for length in range(1000, 1050)
    )
    info = infos.feasibility(replace(study, trials=rows))
    assert {column: cell.num_tried for column, cell in info["8"].items()} == {
        "512 to 1,023": 24,
        "1,024 to 2,047": 26,
    }


def test_memory_terms_sum_to_the_allocated_peak(study: StudySummary) -> None:
    bars = infos.memory(study)
    assert list(bars) == ["winner", "baseline"]
    assert tuple(bars["winner"]) == infos.TERMS
    assert bars["winner"]["weights"] == 13.5
    assert sum(bars["winner"].values()) == pytest.approx(53.3)
    assert infos.memory(replace(study, recipe=None)) == {}


def test_memory_rest_is_never_negative(study: StudySummary) -> None:
    recipe = recipe_of(study)
    odd = replace(
        recipe.winner, measurement=replace(recipe.winner.measurement, peak_allocated_gib=1.0)
    )
    assert (
        infos.memory(replace(study, recipe=replace(recipe, winner=odd)))["winner"][infos.TERMS[-1]]
        == 0.0
    )


def test_compare_marks_what_changed(study: StudySummary) -> None:
    rows = {row.name: row for row in infos.compare(recipe_of(study))}
    changed = {name for name, row in rows.items() if row.changed}
    assert changed == {
        "micro_batch_size",
        "checkpointing",
        "compile",
        "padding",
        "accumulation steps",
    }
    assert (rows["checkpointing"].baseline, rows["checkpointing"].winner) == ("full", "none")
    assert (rows["accumulation steps"].baseline, rows["accumulation steps"].winner) == ("4", "8")
    assert rows["useful tokens/s"].ratio == pytest.approx(recipe_of(study).speedup)
    assert "USD at the spot price" not in rows  # unknown of both


def test_compare_without_a_baseline_shows_dashes(study: StudySummary) -> None:
    rows = infos.compare(replace(recipe_of(study), baseline=None))
    assert {row.baseline for row in rows} == {"–"}
    assert not any(row.changed for row in rows)


def test_costs_of_all_sizes_once(study: StudySummary) -> None:
    recipe = recipe_of(study)
    assert [cost.examples for cost in infos.costs(recipe)] == [10_000, 50_000, 100_000]
    own = replace(recipe.winner, cost=replace(recipe.winner.cost, examples=777))
    assert [cost.examples for cost in infos.costs(replace(recipe, winner=own))] == [
        777,
        10_000,
        50_000,
        100_000,
    ]


def test_cells_are_relative_to_the_winner(study: StudySummary) -> None:
    first, second = infos.learning_cells(recipe_of(study))
    assert (first.is_winner, first.extra) == (True, 0.0)
    assert second.extra == pytest.approx((recipe_of(study).speedup or 0) - 1.0)
    # Rows of 1,024 tokens: a third of the second is cut off; one micro batch of four in 16 has only
    # the first.
    workload = replace(recipe_of(study).workload, lengths=Lengths.of([512, 1536], "counted"))
    first, _ = infos.learning_cells(replace(recipe_of(study), workload=workload))
    assert first.candidate.config.seq_len == 1024
    assert (first.cut, first.padding) == (0.25, pytest.approx(1 - 768 / (1024 - 512 / 16)))


def test_trade_offs_with_other_learning_cells(study: StudySummary) -> None:
    made = recipe_of(study)
    winner = made.winner

    def cell(speed: float, evidence: Evidence = Evidence.MEASURED, **knobs: Any) -> Candidate:
        faster = replace(
            winner.performance, tokens_per_second=speed * winner.performance.tokens_per_second
        )
        return replace(
            winner, config=replace(winner.config, **knobs), performance=faster, evidence=evidence
        )

    cells = (
        winner,
        cell(0.99, micro_batch_size=2),  # nothing that changes what is learned
        cell(0.8, lora_rank=64),
        cell(1.25, Evidence.EXTRAPOLATED, seq_len=512),
    )
    workload = replace(made.workload, lengths=Lengths.of([512, 1024], "counted"))
    assert infos.trade_offs(replace(made, cells=cells, workload=workload)) == [
        "seq_len 512 instead of 1024: -20.0% cost, 33.3% instead of 0.0% of the tokens cut off"
        " [extrapolated]",
        "lora_rank 64 instead of 16: +25.0% cost [measured]",
    ]


def test_what_each_row_length_does_to_the_examples(study: StudySummary) -> None:
    recipe = recipe_of(study)
    assert infos.row_lengths(study) == ()  # all are of one length
    lengths = Lengths.of([512, 512, 1024, 2048], "counted")
    skewed = replace(
        study,
        recipe=replace(recipe, workload=replace(recipe.workload, examples=4, lengths=lengths)),
    )
    rows = {row.seq_len: row for row in infos.row_lengths(skewed)}
    assert {128, 256, 512, 1024, 2048} <= rows.keys() and {
        row.config.seq_len for row in study.trials
    } <= rows.keys()
    assert (
        [seq_len for seq_len, row in rows.items() if row.is_winner]
        == [recipe.winner.config.seq_len]
        == [1024]
    )
    one = rows[1024]
    # All four rows of a micro batch are short in one of 16 cases.
    assert (one.examples_cut, one.tokens_cut, one.fill) == (
        0.25,
        0.25,
        pytest.approx(768 / (1024 - 512 / 16)),
    )
    assert (one.packed_fill, one.examples_a_row) == (1.0, pytest.approx(4 / 3))
    # of four: 2, 3 or all of the 4 lengths each
    longest = (512 * 16 + 1024 * (81 - 16) + 2048 * (256 - 81)) / 256
    assert (rows[2048].tokens_cut, rows[2048].packed_fill) == (0.0, 1.0)
    assert rows[2048].fill == pytest.approx(1024 / longest)
    heading = "Sequence length and your examples"
    assert heading in render(skewed, "out") and heading not in render(study, "out")


def test_fingerprint_has_every_package(study: StudySummary) -> None:
    fingerprint = infos.fingerprint(recipe_of(study))
    assert fingerprint["torch"] == "2.11.0"
    assert fingerprint["threads"] == "–"


# ---- shares of the variation


def measured(speed: Callable[[TrainConfig], float], **changes: Any) -> StudySummary:
    """24 configurations whose whole models were timed: three
    micro batches, two losses, four ranks.
    """
    made = summary()
    configs = [
        TrainConfig(micro_batch_size=size, loss=loss, lora_rank=rank)
        for size in (1, 2, 4)
        for loss in ("full", "chunked")
        for rank in (8, 16, 32, 64)
    ]
    rows = [
        replace(
            made.trials[0], number=number, config=config, tokens_per_second=speed(config), **changes
        )
        for number, config in enumerate(configs)
    ]
    return replace(made, trials=tuple(rows))


def mostly_size(config: TrainConfig) -> float:
    return (
        1000.0 * config.micro_batch_size
        + (7.0 if config.loss == "chunked" else 0.0)
        + (config.lora_rank or 0)
    )


def test_a_share_is_what_lies_between_the_means_of_a_knobs_values() -> None:
    found = infos.importances(measured(mostly_size))
    assert list(found) == ["micro_batch_size", "lora_rank", "loss"]
    size, loss = found["micro_batch_size"], found["loss"]
    assert size.share > 0.99 and loss.share == 0.0  # its means differ by 0.3 %
    for one in found.values():
        assert 0.0 <= one.interval[0] <= one.share <= one.interval[1] <= 1.0
    # By hand, of two values with the means 1.5 and 3.5: 1 - (1.0 / 2) / (5.0 / 3).
    assert infos._explained_share(
        [("a", 1.0), ("a", 2.0), ("b", 3.0), ("b", 4.0)]
    ) == pytest.approx(0.7)
    assert infos._explained_share([("a", 1.0), ("b", 1.0), ("b", 1.0)]) == 0.0


def test_the_interval_of_a_share_widens_with_what_one_trial_decides() -> None:
    even = infos.importances(measured(mostly_size))["micro_batch_size"].interval
    single = infos.importances(
        measured(
            lambda config: (
                9e4 if config == TrainConfig(micro_batch_size=1, loss="full", lora_rank=8) else 1e3
            )
        )
    )["micro_batch_size"].interval
    assert even[1] - even[0] < 0.01 < single[1] - single[0]


@pytest.mark.parametrize(
    "study",
    [
        replace(
            measured(mostly_size), trials=measured(mostly_size).trials[: infos.MIN_MEASURED - 1]
        ),
        measured(mostly_size, evidence=Evidence.EXTRAPOLATED),
        measured(mostly_size, outcome=Outcome.SLOW),
    ],
)
def test_too_few_measured_trials_have_no_shares(study: StudySummary) -> None:
    assert infos.importances(study) == {}
    assert "Which settings the speed varies with" not in render(study, "out")


def test_a_value_that_was_measured_once_is_no_comparison() -> None:
    study = measured(mostly_size)
    first, *others = study.trials
    once = replace(first, config=replace(first.config, compile="per_layer"))
    assert "compile" not in infos.importances(replace(study, trials=(once, *others)))


def test_the_report_defines_the_share_and_draws_its_interval() -> None:
    study = measured(mostly_size)
    page, drawn = render(study, "out"), draw(study)["importances"]
    assert "the 24 configurations whose whole model was timed" in page and "eta squared" in page
    assert drawn is not None and drawn["data"][0]["y"][0] == "micro_batch_size 100%"
    assert len(drawn["data"][0]["error_x"]["array"]) == 3


# ---- parallel coordinates


def trials_of(*trials: tuple[TrainConfig, float | None]) -> StudySummary:
    made = summary()
    rows = tuple(
        replace(made.trials[0], number=number, config=config, tokens_per_second=speed)
        for number, (config, speed) in enumerate(trials)
    )
    return replace(made, trials=rows)


CONFIG = TrainConfig(micro_batch_size=2, checkpointing="none")
LARGER = replace(CONFIG, micro_batch_size=4)
UNKNOWN = replace(CONFIG, lora_rank=64)
RECOMPUTED = replace(CONFIG, micro_batch_size=16, checkpointing="full")


def test_parallel_heights_groups_and_axes() -> None:
    found = infos.parallel(
        trials_of((CONFIG, 960.0), (LARGER, 1000.0), (RECOMPUTED, 400.0), (UNKNOWN, None))
    )
    assert found.axes == (
        ("micro_batch_size", ("2", "4", "16")),
        ("checkpointing", ("full", "none")),
    )
    assert found.fastest == 1000.0
    slow, close, best = found.lines  # the best is drawn last
    assert (slow.heights, slow.group) == ((1.0, 0.0, 0.4), 2)
    assert (close.heights, close.group) == ((0.0, 1.0, 0.96), 0)
    assert (best.heights, best.group) == ((0.5, 1.0, 1.0), 0)


def test_a_configuration_measured_twice_is_one_line() -> None:
    found = infos.parallel(trials_of((CONFIG, 700.0), (CONFIG, 800.0), (RECOMPUTED, 600.0)))
    assert [line.tokens_per_second for line in found.lines] == [600.0, 800.0]
    assert found.lines[0].group == 1


@pytest.mark.parametrize(
    "trials",
    [(), ((CONFIG, 5.0),), ((CONFIG, 5.0), (LARGER, 6.0)), ((CONFIG, None), (RECOMPUTED, None))],
)
def test_no_parallel_axes_where_too_little_varies(
    trials: tuple[tuple[TrainConfig, float | None], ...],
) -> None:
    found = infos.parallel(trials_of(*trials))
    assert found.axes == () and found.lines == ()


def test_values_of_several_kinds_have_an_order() -> None:
    full = replace(CONFIG, method="full", lora_rank=None)
    found = dict(infos.parallel(trials_of((CONFIG, 5.0), (full, 6.0))).axes)
    assert found["lora_rank"] == ("None", "16") and found["method"] == ("full", "lora")

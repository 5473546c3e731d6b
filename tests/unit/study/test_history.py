"""A study read back: whose result a trial has, what it took, what was measured again, and what all
of it cost.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import find_price
from autotune.core.probe_types import Evidence, OomDetail, Outcome, Phase, Rung
from autotune.core.train_config import TrainConfig
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.study.ablation import AblatedKnob, Ablation
from autotune.study.decomposition import Decomposition
from autotune.study.evaluator import Evaluation
from autotune.study.history import restore, summarize, to_record, training_data
from autotune.study.optimizer import FinishedTrial
from autotune.study.selection import Selection
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.summary import Learned, Projections, Quality, StudySummary
from tests.helpers.factories import add_measured, measurement, result
from tests.helpers.sessions import BASELINE, record_of, subject_of

TASK = subject_of()
OTHER = replace(BASELINE, checkpointing="none")
OUT = OomDetail(
    phase=Phase.BACKWARD, requested_gib=1.0, allocated_gib=4.0, reserved_gib=4.0, limit_gib=4.0
)


def finished(
    number: int, config: TrainConfig, outcome: Outcome = Outcome.OK, **changes: Any
) -> FinishedTrial:
    values: dict[str, Any] = {"value": None, "reused": False, "reason": None}
    return FinishedTrial(number=number, config=config, outcome=outcome, **(values | changes))


def stored(
    trial: int | None, config: TrainConfig = BASELINE, outcome: Outcome = Outcome.OK, **changes: Any
) -> Any:
    return StoredProbe(trial=trial, result=result(config, outcome, **changes))


# --- one trial


def test_a_trial_that_was_measured() -> None:
    """Eight rows of 256 tokens in 0.5 s; a batch of 32 has four of them, and takes 0.02 s more."""
    found = result(BASELINE, reason="slow at first", log="a.log")
    found = replace(found, notes=("by another node",), evidence=Evidence.EXTRAPOLATED)
    row = to_record(7, Evaluation(result=found, reused=True, seconds=2.5), TASK)
    assert (row.number, row.reused, row.seconds, row.log) == (7, True, 2.5, "a.log")
    assert row.reason == "slow at first; by another node"
    assert row.evidence is Evidence.EXTRAPOLATED
    assert row.tokens_per_second == pytest.approx(32 * 256 / 2.02)
    assert (row.peak_reserved_gib, row.limit_gib) == (pytest.approx(20.4), 132.0)
    assert row.margin == pytest.approx(20.4 / 132 - 1) and row.oom is None


def test_a_trial_that_ran_out_and_one_that_crashed() -> None:
    row = to_record(0, Evaluation(result=result(BASELINE, Outcome.OOM, oom=OUT)), TASK)
    assert (row.limit_gib, row.margin, row.oom) == (4.0, pytest.approx(0.25), OUT)
    assert row.tokens_per_second is row.peak_reserved_gib is None
    row = to_record(0, Evaluation(result=result(BASELINE, Outcome.CRASH)), TASK)
    assert row.limit_gib is row.margin is row.reason is None


# --- a whole study


def test_a_trial_has_its_own_result_or_that_of_its_configuration_or_what_optuna_knows() -> None:
    rows, selection = restore(
        TASK,
        [
            finished(0, BASELINE),
            finished(1, BASELINE, reused=True),
            finished(2, OTHER, Outcome.CRASH, reason="elsewhere"),
        ],
        [
            stored(0, outcome=Outcome.OOM, oom=OUT),
            stored(None, measurement=measurement(0.25)),
            stored(0, depth=2, seconds={"total": 4.0}, measurement=measurement(0.1)),
            stored(0, depth=8, seconds={"load": 9.0}),
            stored(1, seconds={"load": 9.0}, measurement=measurement(0.25)),
        ],
    )
    assert [row.outcome for row in rows] == [Outcome.OOM, Outcome.OK, Outcome.CRASH]
    # with the truncated models, and nothing for what is reused
    assert [row.seconds for row in rows] == [7.0, 0.0, 0.0]
    assert [row.reused for row in rows] == [False, True, False]
    assert [row.is_own for row in rows] == [False, True, False]
    assert (rows[2].reason, rows[2].rung, rows[2].config) == ("elsewhere", Rung.FULL, OTHER)
    assert selection.record(BASELINE).measured == measurement(0.25)
    assert selection.tried == {BASELINE, OTHER}


def test_the_last_measurement_counts_as_in_the_session_that_made_it() -> None:
    """Other work disturbed the baseline before the search, and again in its trial."""
    disturbed = {"evidence": Evidence.DISTURBED, "disturbed": "other processes used 1.5 of 2 cores"}
    first, second = (
        stored(trial, measurement=measurement(step_s), **disturbed)
        for trial, step_s in ((None, 0.25), (0, 0.5))
    )
    _, selection = restore(TASK, [finished(0, BASELINE)], [first, second])
    live = Selection(TASK)
    for row in (first, second):
        live.add_result(row.result)
    assert selection.record(BASELINE).best_known == live.record(BASELINE).best_known
    assert live.record(BASELINE).best_known == [measurement(0.5)]


def test_a_result_is_of_the_study_if_it_measured_it_before_the_trial() -> None:
    """OTHER was measured by another study; this one confirms it later."""
    rows, _ = restore(
        TASK,
        [finished(0, BASELINE, reused=True), finished(1, OTHER, reused=True)],
        [
            stored(None, BASELINE),
            stored(0, BASELINE, seconds={}),
            stored(1, OTHER, seconds={}),
            stored(None, OTHER, rung=Rung.CONFIRM),
        ],
    )
    assert [row.is_own for row in rows] == [True, False]
    assert [row.is_from_other for row in rows] == [False, True]


def test_what_was_stored_without_a_trial_counts_if_it_was_searched() -> None:
    """A node's reading and a truncated model do not; a whole model of feasibility or of a close
    call does.
    """
    small, tiny = (replace(BASELINE, micro_batch_size=size) for size in (2, 1))
    rows, selection = restore(
        TASK,
        [],
        [
            stored(None, BASELINE),
            stored(None, OTHER, rung=Rung.NODE),
            stored(None, small, depth=2, rung=Rung.SHALLOW),
            stored(None, tiny, rung=Rung.SHALLOW),
            stored(5, replace(OTHER, micro_batch_size=4)),  # a trial that was given back
        ],
    )
    assert rows == [] and {record.config for record in selection.records.values()} == {BASELINE}


def test_what_was_measured_again_and_references_are_no_results_of_the_search() -> None:
    reference = replace(OTHER, micro_batch_size=2)
    again, failed = measurement(0.75), replace(OTHER, micro_batch_size=1)
    _, selection = restore(
        TASK,
        [finished(0, BASELINE), finished(1, OTHER)],
        [
            stored(0),
            stored(1, OTHER),
            stored(None, rung=Rung.CONFIRM, measurement=again),
            stored(None, OTHER, Outcome.CRASH, rung=Rung.CONFIRM, reason="it crashed"),
            stored(None, reference, rung=Rung.REFERENCE),
            stored(None, failed, Outcome.OOM, rung=Rung.REFERENCE),
        ],
    )
    assert (
        selection.record(BASELINE).confirmed == [again] and selection.record(OTHER).best_known == []
    )
    assert selection.references == {reference.digest: measurement(), failed.digest: None}
    assert len(selection.caveats) == 1


# --- what all of it cost


def summary(selection: Selection, task: Task = TASK, **fields: Any) -> StudySummary:
    return summarize(
        record_of(task, **fields),
        [],
        selection,
        [stored(3)],
        project=lambda *_: Projections(),
        wall_seconds=1800.0,
    )


def test_the_search_costs_the_hours_of_all_workers() -> None:
    price = find_price("h200-sxm")
    assert price is not None
    priced = replace(TASK, price=price)
    assert summary(Selection(priced)).search_usd == pytest.approx(price.usd_per_hour / 2)
    shared = summary(Selection(priced), worker_seconds={"one": 5000.0, "two": 400.0})
    assert shared.search_usd == pytest.approx(price.usd_per_hour * 2)
    made = summary(Selection(TASK), spec=StudySpec(model="demo-3m", dataset="a.jsonl"))
    assert (made.search_usd, made.wall_seconds, made.dataset) == (None, 1800.0, "a.jsonl")
    assert made.cards == () and [probe.outcome for probe in made.probes] == [Outcome.OK]


def test_notes_and_explanation_are_of_this_winner() -> None:
    found = Learned(
        config=OTHER, full_run_hours=1.0, full_run_usd=None, seconds=1.0, loss_after=1.0
    )
    quality = Quality(steps=1, trained_on=1, held_out=1, tokens=1, learned=(found,))
    of_baseline, of_other = (
        Ablation(
            winner=AblatedKnob(
                knob="", config=config, outcome=Outcome.OK, evidence=Evidence.MEASURED
            ),
            baseline=BASELINE,
            undone=(),
        )
        for config in (BASELINE, OTHER)
    )
    selection = Selection(TASK)
    made = summary(selection, quality=quality, ablation=of_baseline)
    assert made.notes == () and made.explanation is None and made.quality == quality
    missed = summary(selection, too_short_for=("the search", "the rest")).notes
    assert missed == ("the budget was too short for the search and the rest",)
    add_measured(selection, BASELINE, measurement())
    made = summary(selection, quality=quality, ablation=of_baseline)
    assert (
        made.explanation == of_baseline
        and summary(selection, ablation=of_other).explanation is None
    )
    (note,) = made.notes
    assert note.startswith("the winner's loss is unknown")


def test_factors_are_of_this_winner_and_this_baseline() -> None:
    selection = Selection(TASK)
    made = Decomposition(winner=OTHER, baseline=BASELINE, factors=())
    assert summary(selection, decomposition=made).decomposition is None  # there is no winner yet
    add_measured(selection, BASELINE, measurement(1.0))
    add_measured(selection, OTHER, measurement(0.5))
    assert summary(selection, decomposition=made).decomposition == made
    for other in (replace(made, winner=BASELINE), replace(made, baseline=OTHER)):
        assert summary(selection, decomposition=other).decomposition is None
    assert summary(selection).decomposition is None


@pytest.mark.parametrize("said", ["spec", "model"])
def test_a_dataset_has_the_chat_template_of_the_tokenizer_that_was_given_or_is_the_models(
    said: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    spec = StudySpec(model="demo-3m", dataset=str(tmp_path / "rows.jsonl"))
    model = replace(TASK.model, tokenizer=None)
    if said == "spec":
        spec = replace(spec, tokenizer=str(tmp_path))
    else:
        model = replace(model, tokenizer=str(tmp_path))
    found = training_data(record_of(replace(TASK, model=model), spec=spec))
    assert found is not None and found.chat_template == "{{ messages }}"
    assert found.path == str(tmp_path / "rows.jsonl")

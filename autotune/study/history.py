"""A study's trials as people see them: from verdicts as they fall, and from what Optuna and our table remember."""

from collections.abc import Callable, Iterable

from autotune.core.probe_types import Fingerprint, Outcome, ProbeResult, Rung
from autotune.problem.performance import margins
from autotune.problem.run_cost import DeviceEstimate
from autotune.problem.task import Task
from autotune.study.ablation import Ablation
from autotune.study.evaluator import Evaluation
from autotune.study.optimizer import FinishedTrial
from autotune.study.selection import Selection
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.summary import Candidate, Quality, StudySummary, TrialRecord, Verification


def to_record(number: int, verdict: Evaluation, task: Task) -> TrialRecord:
    """A verdict as the row that people see."""
    result, measurement = verdict.result, verdict.result.measurement
    return TrialRecord(
        number=number,
        config=result.config,
        outcome=result.outcome,
        rung=result.rung,
        evidence=result.evidence,
        reused=verdict.reused,
        reason="; ".join(filter(None, (result.reason, *result.notes))) or None,
        tokens_per_second=task.score(result),
        peak_reserved_gib=measurement.peak_reserved_gib if measurement else None,
        limit_gib=measurement.limit_gib if measurement else result.oom.limit_gib if result.oom else None,
        margin=margins(result)["memory"] if measurement or result.oom else None,
        oom=result.oom,
        seconds=verdict.seconds,
        log=result.log,
    )


def restore(
    task: Task, finished: list[FinishedTrial], stored: list[StoredProbe]
) -> tuple[list[TrialRecord], Selection]:
    """A study's rows and judge from what Optuna and the probe table remember."""
    selection = Selection(task)
    beside = (Rung.CONFIRM, Rung.REFERENCE, Rung.NODE)
    searched = [row for row in stored if row.result.rung not in beside and row.result.depth is None]
    by_trial = {row.trial: row.result for row in searched if row.trial is not None}
    seconds: dict[int | None, float] = {}
    for row in stored:
        seconds[row.trial] = seconds.get(row.trial, 0.0) + row.result.seconds.get("total", 0.0)
    by_config = {row.result.config.digest: row.result for row in searched}
    rows = []
    for told in finished:
        result = by_trial.get(told.number) or by_config.get(told.config.digest)
        if result is None:  # answered from another study's probe
            result = ProbeResult(
                request_digest="",
                config=told.config,
                rung=Rung.FULL,
                outcome=told.outcome,
                reason=told.reason,
            )
        spent = 0.0 if told.reused else seconds.get(told.number, 0.0)
        rows.append(to_record(told.number, Evaluation(result=result, reused=told.reused, seconds=spent), task))
        selection.add_result(result)
    for row in searched:
        if row.trial is None and row.result.rung is Rung.FULL:
            selection.add_result(row.result)
    for row in stored:
        if row.result.rung is Rung.REFERENCE:
            selection.references[row.result.config.digest] = row.result.measurement
        if row.result.rung is Rung.CONFIRM:
            if row.result.outcome is Outcome.OK and row.result.measurement is not None:
                selection.confirm(row.result.config, row.result.measurement)
                selection.record_startup(row.result)
            else:
                fits = row.result.outcome not in (Outcome.OOM, Outcome.NUMERICS)
                selection.reject(row.result.config, row.result.reason or row.result.outcome, fits=fits)
    return rows, selection


def summarize(
    rows: list[TrialRecord],
    selection: Selection,
    fingerprint: Fingerprint,
    stored: Iterable[StoredProbe],
    *,
    cards: Callable[[Selection, Candidate], tuple[DeviceEstimate, ...]] = lambda selection, winner: (),
    wall_seconds: float,
    others_seconds: float = 0.0,
    importances: dict[str, float],
    quality: Quality | None = None,
    verification: Verification | None = None,
    explanation: Ablation | None = None,
) -> StudySummary:
    """What the study says so far. `cards` computes what the winner does on other devices.

    `others_seconds` is what further GPUs worked on it.
    """
    price, recipe = selection.task.search_price, selection.recipe(fingerprint)
    return StudySummary(
        study=selection.task.study,
        recipe=recipe,
        trials=tuple(rows),
        wall_seconds=wall_seconds,
        search_usd=None if price is None else (wall_seconds + others_seconds) / 3600 * price.usd_per_hour,
        probes=tuple(row.result for row in stored),
        importances=importances,
        cards=() if recipe is None else cards(selection, recipe.winner),
        quality=quality,
        verification=verification,
        explanation=explanation if recipe and explanation and explanation.of(recipe.winner.config) else None,
        notes=tuple(quality.said(recipe.winner.config)) if quality and recipe else (),
    )

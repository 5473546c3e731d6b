"""A study's trials as people see them: from verdicts as they fall, and from what Optuna and our table remember."""

from collections.abc import Iterable
from typing import Any

from autotune.crew import WORKED
from autotune.elsewhere import elsewhere
from autotune.explanation import Explanation
from autotune.judge import Judge
from autotune.ladder import Verdict
from autotune.objective import margins
from autotune.recipe import OnCard, Quality, Recipe, StudySummary, TrialRow, Verification
from autotune.result import Fingerprint, Outcome, ProbeResult, Rung
from autotune.search import Told
from autotune.store import StoredProbe
from autotune.subject import Subject


def row_of(number: int, verdict: Verdict, subject: Subject) -> TrialRow:
    """A verdict as the row that people see."""
    result, measurement = verdict.result, verdict.result.measurement
    return TrialRow(
        number=number,
        config=result.config,
        outcome=result.outcome,
        rung=result.rung,
        evidence=result.evidence,
        reused=verdict.reused,
        reason="; ".join(filter(None, (result.reason, *result.notes))) or None,
        tokens_per_second=subject.score(result),
        peak_reserved_gib=measurement.peak_reserved_gib if measurement else None,
        limit_gib=measurement.limit_gib if measurement else result.oom.limit_gib if result.oom else None,
        margin=margins(result)["memory"] if measurement or result.oom else None,
        oom=result.oom,
        seconds=verdict.seconds,
        log=result.log,
    )


def recall(subject: Subject, finished: list[Told], stored: list[StoredProbe]) -> tuple[list[TrialRow], Judge]:
    """A study's rows and judge from what Optuna and the probe table remember."""
    judge = Judge(subject)
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
        rows.append(row_of(told.number, Verdict(result=result, reused=told.reused, seconds=spent), subject))
        judge.take(result)
    for row in searched:
        if row.trial is None and row.result.rung is Rung.FULL:
            judge.take(row.result)
    for row in stored:
        if row.result.rung is Rung.REFERENCE:
            judge.references[row.result.config.digest] = row.result.measurement
        if row.result.rung is Rung.CONFIRM:
            if row.result.outcome is Outcome.OK and row.result.measurement is not None:
                judge.confirm(row.result.config, row.result.measurement)
                judge.begun(row.result)
            else:
                fits = row.result.outcome not in (Outcome.OOM, Outcome.NUMERICS)
                judge.drop(row.result.config, row.result.reason or row.result.outcome, fits=fits)
    return rows, judge


def seconds_of_others(facts: dict[str, Any]) -> float:
    """What the workers of a study beside the one that leads have worked, all together."""
    return sum(float(value) for key, value in facts.items() if key.startswith(WORKED))


def summarize(
    rows: list[TrialRow],
    judge: Judge,
    fingerprint: Fingerprint,
    stored: Iterable[StoredProbe],
    *,
    headroom: float,
    wall_seconds: float,
    others_seconds: float = 0.0,
    importances: dict[str, float],
    quality: Quality | None = None,
    verification: Verification | None = None,
    explanation: Explanation | None = None,
) -> StudySummary:
    """What the study says so far. `others_seconds` is what further GPUs worked on it."""
    price, recipe = judge.subject.search_price, judge.recipe(fingerprint)
    return StudySummary(
        study=judge.subject.study,
        recipe=recipe,
        trials=tuple(rows),
        wall_seconds=wall_seconds,
        search_usd=None if price is None else (wall_seconds + others_seconds) / 3600 * price.usd_per_hour,
        probes=tuple(row.result for row in stored),
        importances=importances,
        cards=() if recipe is None else _cards(judge, recipe, headroom),
        quality=quality,
        verification=verification,
        explanation=explanation if recipe and explanation and explanation.of(recipe.winner.config) else None,
        notes=tuple(quality.said(recipe.winner.config)) if quality and recipe else (),
    )


def _cards(judge: Judge, recipe: Recipe, headroom: float) -> tuple[OnCard, ...]:
    winner = recipe.winner
    return elsewhere(judge.subject, winner, judge.measurements(winner.config.digest), headroom)

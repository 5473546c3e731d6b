"""Convert new evaluations to trial records, and restore a study's records from its database."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from os.path import expanduser

from autotune.core.probe_types import Evidence, Outcome, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_count
from autotune.prediction.projection import run_tokens_per_s
from autotune.problem.dataset import chat_template_in, files_of, full_path
from autotune.problem.performance import TIE, margins
from autotune.problem.task import Task
from autotune.study.decomposition import Decomposition
from autotune.study.evaluator import Evaluation
from autotune.study.optimizer import FinishedTrial
from autotune.study.selection import Selection
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.storage.study_record import StudyPhase, StudyRecord
from autotune.study.summary import Projections, Recipe, StudySummary, TrainingData, TrialRecord

# A function that projects the winner's run to other devices. Its float argument is the share of
# memory to keep free.
Project = Callable[[Selection, Recipe, float], Projections]
NOT_SEARCHED = (Rung.CONFIRM, Rung.REFERENCE, Rung.NODE)


def to_record(number: int, evaluation: Evaluation, task: Task) -> TrialRecord:
    """Convert the evaluation of a trial to its record."""
    result = evaluation.result
    measurement = result.measurement
    oom = result.oom
    limit_gib = oom.limit_gib if oom else None
    disturbed = result.disturbed and f"disturbed: {result.disturbed}"
    return TrialRecord(
        number=number,
        config=result.config,
        outcome=result.outcome,
        rung=result.rung,
        evidence=result.evidence,
        reused=evaluation.reused,
        is_own=evaluation.is_own,
        reason="; ".join(filter(None, (result.reason, *result.notes, disturbed))) or None,
        tokens_per_second=run_tokens_per_s(task, result),
        peak_reserved_gib=measurement.peak_reserved_gib if measurement else None,
        limit_gib=measurement.limit_gib if measurement else limit_gib,
        margin=margins(result)["memory"] if measurement or oom else None,
        oom=oom,
        seconds=evaluation.seconds,
        log=result.log,
    )


def restore(
    task: Task, finished: list[FinishedTrial], stored: list[StoredProbe]
) -> tuple[list[TrialRecord], Selection]:
    """Restore a study's records and Selection from Optuna's finished trials and the probe table."""
    selection = Selection(task)
    searched = [
        row for row in stored if row.result.rung not in NOT_SEARCHED and row.result.depth is None
    ]

    places_by_trial = {row.trial: place for place, row in enumerate(searched)}
    places_by_config = {row.result.config.digest: place for place, row in enumerate(searched)}
    seconds: dict[int | None, float] = {}
    for row in stored:
        seconds[row.trial] = seconds.get(row.trial, 0.0) + row.result.seconds.get("total", 0.0)
    own = _trials_of_own_results(stored)

    records = []
    results: list[tuple[int, ProbeResult, bool]] = [
        (place, row.result, False)
        for place, row in enumerate(searched)
        if row.trial is None and row.result.rung is Rung.FULL
    ]
    for trial in finished:
        place = places_by_trial.get(trial.number, places_by_config.get(trial.config.digest))
        if place is not None:
            result = searched[place].result
        else:  # the trial reused another study's probe
            result = ProbeResult(
                request_digest="",
                config=trial.config,
                rung=Rung.FULL,
                outcome=trial.outcome,
                reason=trial.reason,
            )
        spent = 0.0 if trial.reused else seconds.get(trial.number, 0.0)
        evaluation = Evaluation(
            result=result,
            reused=trial.reused,
            is_own=trial.reused and trial.number in own,
            seconds=spent,
        )
        record = to_record(trial.number, evaluation, task)
        records.append(record)
        results.append((-1 if place is None else place, result, record.is_from_other))

    # Of several measurements of a configuration, the last one counts. The order in which they were
    # stored gives the same winner and the same numbers as the session that measured them.
    for _, result, is_from_other in sorted(results, key=lambda added: added[0]):
        selection.add_result(result, reused=is_from_other)
    for row in stored:
        if row.result.rung is Rung.REFERENCE:
            selection.references[row.result.config.digest] = row.result.measurement
        if row.result.rung is Rung.CONFIRM:
            selection.add_confirmation(row.result)
    return records, selection


def _trials_of_own_results(stored: list[StoredProbe]) -> set[int | None]:
    """Return the trials whose configuration was already probed in an earlier row of the study.

    `stored` has the rows of one study in the order in which they were written.
    """
    measured: set[TrainConfig] = set()
    trials: set[int | None] = set()
    for row in stored:
        if row.result.config in measured:
            trials.add(row.trial)
        if row.result.seconds.get("total"):  # a reused result took no time
            measured.add(row.result.config)
    return trials


def summarize(
    record: StudyRecord,
    rows: list[TrialRecord],
    selection: Selection,
    stored: Iterable[StoredProbe],
    *,
    project: Project,
    wall_seconds: float,
) -> StudySummary:
    """Summarize the study so far. `project` estimates the winner's run on other devices."""
    price = selection.task.search_price
    recipe = selection.recipe(record.fingerprint)
    quality = record.quality

    notes = quality.notes(recipe.config) if quality and recipe else []
    learning = (
        record.learning
        if recipe and record.learning and record.learning.config == recipe.config
        else None
    )
    recipe = recipe and replace(recipe, learning=learning, data=training_data(record))

    stopped = record.phase is StudyPhase.STOPPED
    if stopped:
        notes.append("the study was stopped before its end, so a faster configuration may exist")
    if missed := " and ".join(record.too_short_for):
        notes.append(f"the budget was too short for {missed}")
    projections = project(selection, recipe, record.terms.headroom) if recipe else Projections()

    # The study's price includes the GPUs of the other workers, for the time that they worked.
    gpu_hours = (wall_seconds + record.others_seconds) / 3600

    return StudySummary(
        study=selection.task.study,
        recipe=recipe,
        trials=tuple(rows),
        wall_seconds=wall_seconds,
        search_usd=None if price is None else gpu_hours * price.usd_per_hour,
        probes=tuple(row.result for row in stored),
        cards=projections.cards,
        scaling=projections.scaling,
        quality=quality,
        learning=learning,
        verification=record.verification,
        explanation=record.ablation
        if recipe and record.ablation and record.ablation.of(recipe.config)
        else None,
        decomposition=record.decomposition
        if recipe and _is_of(record.decomposition, recipe)
        else None,
        notes=tuple(notes),
        stopped=stopped,
        slower_than_searched=_slower_than_searched(rows, selection, recipe) if recipe else "",
        has_sdpa=not selection.task.model.lacks("sdpa"),
        dataset=record.spec.dataset,
        split=record.spec.split,
    )


def _slower_than_searched(rows: Iterable[TrialRecord], selection: Selection, recipe: Recipe) -> str:
    """Say why the winner is slower than the best trial that the search showed.

    The text is empty if the winner is not slower. It is also empty if the best trial lost for
    another reason than its speed, which the recipe gives.
    """
    winner = recipe.winner
    speed = winner.performance.tokens_per_second
    best_speed, best = max(
        (
            (row.tokens_per_second, row)
            for row in rows
            if row.outcome is Outcome.OK
            and row.tokens_per_second is not None
            and row.config.num_gpus == winner.config.num_gpus
        ),
        key=lambda scored: scored[0],
        default=(0.0, None),
    )
    if best is None or best_speed <= speed * (1 + TIE):
        return ""

    record = selection.record(best.config)
    shown = f"{'the winner' if best.config == winner.config else f'trial {best.number}'} reached "
    shown += f"{fmt_count(best_speed)} tokens/s in the search"
    if not record.best_known:  # its confirmation failed, which the caveats say
        return ""
    again = selection.candidate(best.config).performance.tokens_per_second
    if again < best_speed / (1 + TIE):
        return (
            f"{shown}, but {fmt_count(again)} tokens/s when it was measured again; "
            "the later measurements count"
        )
    if Evidence.DISTURBED in (record.evidence, best.evidence) and best.config != winner.config:
        return f"{shown}, but other work disturbed this measurement, so it does not count"
    return ""


def training_data(record: StudyRecord) -> TrainingData | None:
    """Return the dataset of a study, or None if the study has none."""
    spec = record.spec
    if spec.dataset is None:
        return None

    path = full_path(spec.dataset)
    tokenizer = spec.tokenizer or record.task.model.tokenizer
    return TrainingData(
        path=path,
        split=spec.split,
        files=files_of(path, spec.split),
        chat_template=chat_template_in(expanduser(tokenizer)) if tokenizer else None,
    )


def _is_of(decomposition: Decomposition | None, recipe: Recipe) -> bool:
    """Whether a decomposition was made for the winner and the baseline of this recipe."""
    baseline = recipe.baseline and recipe.baseline.config
    return decomposition is not None and (decomposition.winner, decomposition.baseline) == (
        recipe.config,
        baseline,
    )

"""The loop of a study: ask, ladder, store, tell; then measure the best again.

Adapters are passed in; nothing here knows a database, a GPU or a screen. Every trial's result is stored before Optuna
hears of it, so that a killed study continues with nothing lost.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from autotune.climb import neighbours
from autotune.config import TrainConfig
from autotune.depth import Extrapolation
from autotune.errors import Cancelled
from autotune.judge import DISAGREEMENT, Judge, Subject
from autotune.ladder import Ladder, Verdict
from autotune.objective import capability, margins, performance, score
from autotune.recipe import StudySummary, TrialRow
from autotune.result import Fingerprint, Outcome, ProbeResult, Rung
from autotune.search import Search, Told
from autotune.store import StoredProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop searching. `trials` is a total over all sessions; `patience` counts trials without a better one."""

    budget_s: float
    trials: int | None = None
    patience: int = 20
    finalists: int = 3
    rounds: int = 2


@dataclass(slots=True)
class Study:
    """One session of a study. `started` is `clock()` when the command began: the budget counts from there."""

    subject: Subject
    search: Search
    ladder: Ladder
    limits: Limits
    started: float
    on_trial: Callable[[TrialRow], None] = lambda row: None
    say: Callable[[str], None] = lambda text: None
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    rows: list[TrialRow] = field(default_factory=list)
    judge: Judge = field(init=False)
    _probe_times: list[float] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 (no secret hangs on it)

    def __post_init__(self) -> None:
        self.judge = Judge(self.subject)

    def resume(self, stored: list[StoredProbe]) -> None:
        """Take over what earlier sessions stored, and settle trials that were cut off."""
        by_trial = {row.trial: row.result for row in stored if row.trial is not None and row.result.depth is None}
        for row in stored:
            self.ladder.learn(row.trial, row.result)

        def settle(number: int) -> bool:
            if number not in by_trial:
                return False
            self._tell(number, Verdict(result=by_trial[number]))
            return True

        queued = self.search.repair(settle)
        self.rows, self.judge = recall(self.subject, self.search.finished(), stored)
        self._probe_times = [row.seconds for row in self.rows if row.outcome is Outcome.OK and not row.reused]
        if self.rows:
            self.say(f"continuing: {len(self.rows)} trials are done, {queued} that were cut off are queued again")

    def begin(self, tried: list[TrainConfig]) -> None:
        """Put the baselines that were tried at the start into a new study's queue; their results are stored already."""
        if not self.rows:
            for config in tried:
                self.search.enqueue(self.subject.space.clip(config))

    def run(self) -> None:
        """Search until a limit is reached, then try the best with its learning knobs at their most capable."""
        seen = {row.config.digest for row in self.rows}
        while not self._done():
            if self.rows and not self.search.is_waiting():  # the baseline comes first
                self._queue_neighbour(seen)
            row = self._step()
            if row is None:
                return
            known = row.config.digest in seen
            seen.add(row.config.digest)
            if known and not self._done() and not self._queue_any(seen):
                self.say("every configuration of the space has been tried")
                break
        for chosen in self._more_capable(seen):
            if self.should_stop() or self._late() or self._full():
                return
            self.search.enqueue(chosen)
            if self._step() is None:
                return
        self._measure_close_calls()

    def _measure_close_calls(self) -> None:
        """Whole models of the cells that a truncated one left just behind the best."""
        for config in self.judge.close_calls():
            if self.should_stop() or self._late():
                return
            self.say(f"close to the best, at full depth: {config.label()}")
            try:
                result = self.ladder.evaluate(config, None).result
            except Cancelled:
                return
            if result.outcome is Outcome.OK and result.measurement is not None and result.depth is None:
                self.judge.add(config, result.measurement)

    def _promise(self, config: TrainConfig, foretold: Extrapolation) -> str | None:
        """Why an extrapolated candidate cannot win; None while it can. A more capable one may cost the slack more."""
        best = self.best()
        if best is None or best.tokens_per_second is None:
            return None
        speed = performance(config, [foretold.measurement], self.subject.workload).tokens_per_second
        bar = best.tokens_per_second
        if capability(config) > capability(best.config):
            bar /= 1 + self.subject.floors.slack
        if speed * (1 + foretold.time_error) >= bar:
            return None
        return f"{speed:,.0f} tokens/s foretold (within {foretold.time_error:.0%}), {bar:,.0f} are to be beaten"

    def _step(self) -> TrialRow | None:
        """One trial; None if the user asked to stop meanwhile."""
        asked = self.search.ask()
        try:
            verdict = self.ladder.evaluate(asked.config, asked.number, self._promise)
        except Cancelled:
            self.search.give_back(asked.number)
            return None
        except BaseException:
            self.search.give_back(asked.number)
            raise
        self._tell(asked.number, verdict)
        row = self._note(asked.number, verdict)
        self.on_trial(row)
        return row

    def confirm(self) -> None:
        """Measure the finalists and the baseline again, interleaved, so that drift hits all alike.

        The first round is always run; later ones only within the budget. Who fails is replaced by the next best.
        """
        entries = self.judge.finalists(self.limits.finalists)
        baseline = self.judge.baseline()
        if baseline is not None and baseline not in entries:
            entries.append(baseline)
        for round_ in range(1, self.limits.rounds + 1):
            waiting = list(entries)
            while waiting:
                config = waiting.pop(0)
                if self.should_stop() or (round_ > 1 and self._late()):
                    return
                confirmed = self._confirm_one(config, f"round {round_} of {self.limits.rounds}", round_)
                if confirmed is None:
                    return
                if not confirmed:
                    entries.remove(config)
                    next_best = [one for one in self.judge.finalists(len(entries) + 1) if one not in entries][:1]
                    if next_best and not self._late():
                        entries += next_best
                        waiting += next_best
        for config in entries:
            if self.judge.disagreement(config) > DISAGREEMENT and not self._late() and not self.should_stop():
                self._confirm_one(config, "once more, since the rounds disagree", self.limits.rounds + 1)

    def _confirm_one(self, config: TrainConfig, why: str, round_: int) -> bool | None:
        """Whether the configuration came through again; None if the user asked to stop meanwhile."""
        micro_steps = min(self.subject.workload.accumulation(config.micro_batch_size), 4)
        self.say(f"confirming, {why}: {config.label()}")
        try:
            result = self.ladder.confirm(config, micro_steps, round_)
        except Cancelled:
            return None
        if result.outcome is Outcome.OK and result.measurement is not None:
            self.judge.confirm(config, result.measurement)
            return True
        self.judge.drop(config, result.reason or result.outcome)
        return False

    def best(self) -> TrialRow | None:
        """The fastest trial so far that was measured, or else extrapolated."""
        rows = [row for row in self.rows if row.outcome is Outcome.OK and row.tokens_per_second is not None]
        return max(rows, key=lambda row: row.tokens_per_second or 0.0, default=None)

    def _done(self) -> bool:
        if self.should_stop() or self._full():
            return True
        if self.rows and self.clock() - self.started + self._reserve_s() >= self.limits.budget_s:
            return True
        return self._stale() >= self.limits.patience

    def _full(self) -> bool:
        return self.limits.trials is not None and len(self.rows) >= self.limits.trials

    def _reserve_s(self) -> float:
        """What confirming will take, half as long again as the probes so far, but at most half the budget."""
        if not self._probe_times:
            return 0.0
        entries = min(len(self._probe_times), self.limits.finalists) + 1
        need = 1.5 * statistics.median(self._probe_times) * entries * self.limits.rounds
        return min(need, self.limits.budget_s / 2)

    def _late(self) -> bool:
        return self.clock() - self.started >= self.limits.budget_s

    def _stale(self) -> int:
        """Feasible trials since the best improved by more than twice the noise."""
        best, since = 0.0, 0
        for row in self.rows:
            if row.tokens_per_second is None or row.reused:
                continue
            if row.outcome is Outcome.SLOW:
                since += 1
                continue
            improved = row.tokens_per_second > best * (1 + 2 * max(self.judge.noise(row.config), 0.005))
            since = 0 if improved else since + 1
            best = max(best, row.tokens_per_second)
        return since

    def _queue_neighbour(self, seen: set[str]) -> bool:
        """Have a configuration tried that is one knob away from the best, while there is one."""
        space, best = self.subject.space, self.best()
        near = iter(()) if best is None else neighbours(space, best.config)
        chosen = next((one for one in near if space.config(one).digest not in seen), None)
        if chosen is not None:
            self.search.enqueue(chosen)
        return chosen is not None

    def _queue_any(self, seen: set[str]) -> bool:
        space = self.subject.space
        untried = [one for one in islice(space.enumerate(), 100_000) if space.config(one).digest not in seen]
        if untried:
            self.search.enqueue(self._random.choice(untried))
        return bool(untried)

    def _more_capable(self, seen: set[str]) -> list[dict[str, Any]]:
        """The best with every learning knob at its most capable, then each alone: within the slack one of them wins."""
        space, best = self.subject.space, self.best()
        if best is None:
            return []
        raised = {
            knob.name: max((capability(replace(best.config, **{knob.name: value})), value) for value in knob.choices())[
                1
            ]
            for knob in space.knobs
            if knob.kind == "learning" and len(knob.choices()) > 1
        }
        wanted = [raised, *({name: value} for name, value in raised.items())]
        choices = [space.clip(replace(best.config, **changes)) for changes in wanted]
        distinct = {space.config(chosen).digest: chosen for chosen in choices}
        return [chosen for digest, chosen in distinct.items() if digest not in seen]

    def _tell(self, number: int, verdict: Verdict) -> None:
        result = verdict.result
        value = score(result, self.subject.workload)
        self.search.tell(number, result.outcome, value, margins(result), reused=verdict.reused, reason=result.reason)

    def _note(self, number: int, verdict: Verdict) -> TrialRow:
        """Keep what a trial found out, and its row."""
        result = verdict.result
        if result.outcome is Outcome.OK and not verdict.reused:
            self._probe_times.append(result.seconds.get("total", 0.0))
        row = row_of(number, verdict, self.subject)
        self.rows.append(row)
        self.judge.take(result)
        return row


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
        reason=result.reason,
        tokens_per_second=score(result, subject.workload),
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
    searched = [row for row in stored if row.result.rung is not Rung.CONFIRM and row.result.depth is None]
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
        if row.result.rung is Rung.CONFIRM:
            if row.result.outcome is Outcome.OK and row.result.measurement is not None:
                judge.confirm(row.result.config, row.result.measurement)
            else:
                judge.drop(row.result.config, row.result.reason or row.result.outcome)
    return rows, judge


def summarize(
    rows: list[TrialRow],
    judge: Judge,
    fingerprint: Fingerprint,
    *,
    probe_seconds: float,
    wall_seconds: float,
    importances: dict[str, float],
    notes: tuple[str, ...] = (),
) -> StudySummary:
    """What the study says so far."""
    price = judge.subject.price
    return StudySummary(
        study=judge.subject.study,
        recipe=judge.recipe(fingerprint),
        trials=tuple(rows),
        probe_seconds=probe_seconds,
        wall_seconds=wall_seconds,
        search_usd=None if price is None else wall_seconds / 3600 * price.usd_per_hour,
        importances=importances,
        notes=notes,
    )

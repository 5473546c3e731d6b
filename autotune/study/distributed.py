"""The trials of a study that several workers share: begin one, record its result, take over the results of others.

Also when a search stops: the user, the budget, the number of trials, or no better configuration for many trials.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.problem.performance import margins
from autotune.problem.task import Task
from autotune.study.evaluator import Evaluation, Evaluator, Pruner
from autotune.study.history import restore, to_record
from autotune.study.neighbours import neighbours
from autotune.study.optimizer import Optimizer, Proposal
from autotune.study.selection import Selection
from autotune.study.storage.leases import Coordinator, SingleWorker
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.storage.study_record import Limits
from autotune.study.summary import TrialRecord

AWAIT_S, REAP_EVERY_S = 0.2, 15.0
LEAST_NOISE = 0.005  # relative
COORDINATE_TRIALS = "climbed"  # the study's attribute with the numbers of the trials of coordinate searches


@dataclass(slots=True, kw_only=True)
class SharedTrials:
    """The trials of one study as one of its workers sees them, and the limits of this worker's session.

    The budget counts from `started`, in seconds of `clock`; the number of trials is limited over all workers and
    sessions. `rows` has the finished trials of all workers, and `selection` what was measured of each configuration.
    `too_short_for` says what the budget was too short for. If `rank` is set, untried configurations of this LoRA rank
    are proposed before all others. `new_rows` returns what others stored since the last call; `on_trial` is called with
    every trial that this worker finished, `on_trial_of_others` with every other. Trials of coordinate search, in
    `exempt`, do not count as patience.
    """

    task: Task
    optimizer: Optimizer
    evaluator: Evaluator
    limits: Limits
    started: float
    coordinator: Coordinator = field(default_factory=SingleWorker)
    say: Callable[[str], None] = lambda text: None
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    new_rows: Callable[[], list[StoredProbe]] = list
    on_trial: Callable[[TrialRecord], None] = lambda row: None
    on_trial_of_others: Callable[[TrialRecord], None] = lambda row: None
    rows: list[TrialRecord] = field(default_factory=list)
    selection: Selection = field(init=False)
    too_short_for: list[str] = field(default_factory=list)
    rank: int | None = None
    exempt: set[int] = field(default_factory=set)
    _whole_probes: list[tuple[float, bool]] = field(default_factory=list)  # seconds, and whether the probe compiled
    _by_others: set[int] = field(default_factory=set)  # the numbers of the trials that other workers finished
    _open: dict[int, str] = field(default_factory=dict)  # this worker's unfinished trials: number -> config digest
    _stored_by_others: dict[int, ProbeResult] = field(default_factory=dict)  # results by trial number
    _not_finished: set[int] = field(default_factory=set)  # of these, the trials that Optuna does not have as finished
    _reap_at: float = 0.0
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 (no secret hangs on it)

    def __post_init__(self) -> None:
        self.selection = Selection(self.task)

    def resume(self, stored: list[StoredProbe]) -> None:
        """Take over what earlier sessions stored, and settle trials that were interrupted."""
        self._stored_by_others = {
            row.trial: row.result for row in stored if row.trial is not None and row.result.depth is None
        }
        for row in stored:
            self.evaluator.learn(row.trial, row.result)
        num_queued = self.optimizer.repair(self._settle, self.coordinator.workers)
        self.rows, self.selection = restore(self.task, self.optimizer.finished(), stored)
        self._not_finished = self._stored_by_others.keys() - {row.number for row in self.rows}
        self._whole_probes = [
            (row.seconds, row.config.compile != "none")
            for row in self.rows
            if row.outcome is Outcome.OK and not row.reused
        ]
        self.exempt = set(self.optimizer.remembered(COORDINATE_TRIALS) or ())
        if self.rows:
            self.say(f"{len(self.rows)} trials are done already, {num_queued} interrupted ones are queued again")

    def begin(self, tried: list[TrainConfig]) -> None:
        """Queue the baselines that were tried before a new study began; their results are stored already."""
        for config in () if self.rows else tried:
            self.optimizer.enqueue(self.task.space.clip(config))

    def run_one(self, pruner: Pruner | None, wanted: dict[str, Any] | None = None) -> TrialRecord | None:
        """Run one trial of the `wanted` choice, or else of what comes next. None if nothing is left to this worker."""
        proposal = self.ask(wanted)
        if proposal is None:
            return None
        return self.record(proposal, self.evaluator.evaluate(proposal.config, proposal.number, pruner))

    def ask(self, wanted: dict[str, Any] | None = None) -> Proposal | None:
        """Begin a trial that no other worker is running: of the `wanted` choice, or else of what comes next."""
        self.sync()
        if self._is_full(lambda: len(self.coordinator.taken())):
            return None
        proposal = self.optimizer.ask(wanted, worker=self.coordinator.name)
        digest = proposal.config.digest
        if not self.coordinator.take(digest, proposal.number):
            self.optimizer.withdraw(proposal.number)
            other = self.untried() if wanted is None else None
            return None if other is None else self.ask(other)
        self._open[proposal.number] = digest
        if self._is_full(lambda: self.coordinator.ahead(digest)):
            self.give_back(proposal.number)
            return None
        return proposal

    def _is_full(self, num_open: Callable[[], int]) -> bool:
        """Whether the finished trials and so many unfinished ones reach the maximum."""
        maximum = self.limits.trials
        return maximum is not None and num_open() + len(self.optimizer.finished_numbers()) >= maximum

    def record(self, proposal: Proposal, evaluation: Evaluation) -> TrialRecord:
        """Finish a trial with its result, which is stored already: if this fails, `Optimizer.repair` finishes it."""
        result = evaluation.result
        digest = self._open.pop(proposal.number)
        counts = self._finish(proposal.number, evaluation)
        self.coordinator.drop(digest)
        if result.outcome is Outcome.OK and not evaluation.reused:
            took_s = result.seconds.get("total", 0.0)
            compiled = result.config.compile != "none" and evaluation.seconds == took_s
            self._whole_probes.append((took_s, compiled))
        row = self._add(proposal.number, evaluation, counts=counts)
        if counts:
            self.on_trial(row)
        return row

    def give_back(self, number: int) -> None:
        """Put an unfinished trial of this worker back into the queue."""
        self.optimizer.give_back(number)
        self.coordinator.drop(self._open.pop(number))

    @contextmanager
    def giving_back(self) -> Iterator[None]:
        """Put unfinished trials back into the queue if the block fails. Cancelled ends the block only."""
        try:
            yield
        except BaseException as error:
            for number in list(self._open):
                self.give_back(number)
            if not isinstance(error, Cancelled):
                raise
            self.cut("the whole search")

    def best(self) -> TrialRecord | None:
        """The fastest trial so far that was measured, or else extrapolated."""
        rows = [row for row in self.rows if row.outcome is Outcome.OK and row.tokens_per_second is not None]
        return max(rows, key=lambda row: row.tokens_per_second or 0.0, default=None)

    def digests(self) -> set[str]:
        """The digests of the configurations of all finished trials."""
        return {row.config.digest for row in self.rows}

    def untried(self) -> dict[str, Any] | None:
        """A choice that differs least from the best, of those that nobody has tried or is trying."""
        best = self.best()
        seen = self.coordinator.taken() | self.digests()
        nearest = neighbours(self.task.space, best.config if best else None, seen, self.rank)
        return self._random.choice(nearest) if nearest else None

    def await_others(self) -> bool:
        """Wait a moment, and return whether others are running or beginning trials, or have given some back."""
        if not self.coordinator.taken() and not self.optimizer.has_unfinished():
            return False
        time.sleep(AWAIT_S)
        return True

    def sync(self, *, reap: bool = False) -> None:
        """Take over the results of others. Every 15 s, or with `reap`, settle the trials of workers that died."""
        for row in self.new_rows():
            self.evaluator.learn(row.trial, row.result)
            if row.trial is not None and row.result.depth is None:
                self._stored_by_others[row.trial] = row.result
                self._not_finished.add(row.trial)
        if reap or self.clock() >= self._reap_at:
            self.reap()
        finished = self._not_finished & self.optimizer.finished_numbers() if self._not_finished else set[int]()
        for number in sorted(finished):  # a trial that was given back does not count, even if its result came later
            self._not_finished.remove(number)
            self._by_others.add(number)
            self.rows = [row for row in self.rows if row.number != number]
            result = self._stored_by_others[number]
            evaluation = Evaluation(result=result, seconds=result.seconds.get("total", 0.0))
            self.on_trial_of_others(self._add(number, evaluation))

    def reap(self) -> None:
        """Settle the trials of workers that died."""
        if isinstance(self.coordinator, SingleWorker):
            return
        self._reap_at = self.clock() + REAP_EVERY_S
        num_queued = self.optimizer.repair(self._settle, self.coordinator.workers)
        if num_queued:
            self.say(f"{num_queued} trials of a worker that died are queued again")

    def _settle(self, number: int) -> bool:
        """Finish the trial of a dead worker if its result is stored."""
        if number not in self._stored_by_others:
            return False
        self._finish(number, Evaluation(result=self._stored_by_others[number]))
        return True

    def _add(self, number: int, evaluation: Evaluation, *, counts: bool = True) -> TrialRecord:
        """Keep a result, which may win in any case; the trial itself `counts` unless others gave it back."""
        row = to_record(number, evaluation, self.task)
        if counts:
            self.rows.append(row)
        self.selection.add_result(evaluation.result)
        return row

    def _finish(self, number: int, evaluation: Evaluation) -> bool:
        result = evaluation.result
        return self.optimizer.tell(
            number,
            result.outcome,
            self.task.score(result),
            margins(result),
            reused=evaluation.reused,
            reason=result.reason,
        )

    def cut(self, what: str) -> None:
        """Keep in mind what the budget was too short for."""
        if what not in self.too_short_for:
            self.too_short_for.append(what)

    def has_ended(self) -> bool:
        """Whether the budget is over, or the user asked to stop."""
        return self.should_stop() or self.clock() - self.started >= self.limits.budget_s

    def is_spent(self) -> bool:
        """Whether the rest of the budget is needed for confirmation."""
        return self.clock() - self.started + self._confirmation_s() >= self.limits.budget_s

    def is_over(self) -> bool:
        """Whether no further trial may begin: stopped, spent, or as many trials as are allowed."""
        return self.should_stop() or self.is_spent() or self._is_full(lambda: len(self._open))

    def is_done(self) -> bool:
        """Whether the search is to end. The first trial runs even if the budget is spent."""
        if self.should_stop() or self._is_full(lambda: len(self._open)) or (self.rows and self.is_spent()):
            return True
        return self.num_stale() >= self.limits.patience

    def num_stale(self) -> int:
        """Trials with a number since the best improved by more than twice the noise; some are exempt."""
        best, num_stale = 0.0, 0
        for row in self.rows:
            if row.tokens_per_second is None or row.reused:
                continue
            improved = False
            if row.outcome is Outcome.OK:
                noise = max(self.selection.noise(row.config), LEAST_NOISE)
                improved = row.tokens_per_second > best * (1 + 2 * noise)
                best = max(best, row.tokens_per_second)
            if improved:
                num_stale = 0
            elif row.number not in self.exempt | self._by_others:
                num_stale += 1
        return num_stale

    def _confirmation_s(self) -> float:
        """Seconds to reserve for confirmation: twice as long as the probes so far, but at most half the budget.

        Confirmation finds compiled code on disk: probes that compiled count only if there are no others.
        """
        probes = self._whole_probes
        if not probes:
            return 0.0
        num_entries = min(len(probes), self.limits.finalists) + 1
        times = [took_s for took_s, compiled in probes if not compiled] or [took_s for took_s, _ in probes]
        num_probes = num_entries + self.limits.rounds - 1  # later rounds are for the winner only
        return min(2.0 * statistics.median(times) * num_probes, self.limits.budget_s / 2)

"""The loop of a study: ask, ladder, store, tell; then measure the best again.

Adapters are passed in; nothing here knows a database, a GPU or a screen. Every trial's result is stored before Optuna
hears of it, so that a killed study continues with nothing lost.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import Extrapolation
from autotune.problem.performance import AGAIN
from autotune.problem.task import Task
from autotune.study.confirmation import Confirmation, measure_close_calls
from autotune.study.coordinate_search import MAKES_ROOM, ORDER, TOO_LARGE, neighbours, next_move, smaller_batches
from autotune.study.distributed import Sharing
from autotune.study.evaluator import Evaluation, Evaluator, Pruner
from autotune.study.formula_seeds import formula_seeds
from autotune.study.history import restore
from autotune.study.optimizer import Optimizer, Proposal
from autotune.study.ranking import Scored, more_capable, to_beat
from autotune.study.selection import Selection
from autotune.study.storage.coordinator import Coordinator, SingleWorker
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.storage.study_record import Limits
from autotune.study.summary import TrialRecord

CLIMBED = "climbed"  # under which a study remembers which trials were
WORTHWHILE = 0.01  # relative gain from which on a climb moves
STARTUP = 8  # trials with a value, before which who helps keeps to the neighbours of the best
Waiting = tuple[float, Proposal]  # for its whole model, with the tokens/s that truncated ones foretell


@dataclass(slots=True)
class Study(Sharing):
    """One session of a study. `started` is `clock()` when the command began: the budget counts from there."""

    task: Task
    optimizer: Optimizer
    evaluator: Evaluator
    limits: Limits
    started: float
    on_trial: Callable[[TrialRecord], None] = lambda row: None  # of this session
    on_trial_of_others: Callable[[TrialRecord], None] = lambda row: None  # of another worker
    say: Callable[[str], None] = lambda text: None
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    rows: list[TrialRecord] = field(default_factory=list)
    coordinator: Coordinator = field(default_factory=SingleWorker)
    new_rows: Callable[[], list[StoredProbe]] = list  # what others stored since this was asked last
    _open: dict[int, str] = field(default_factory=dict)  # asked for, not told yet, with what each tries
    _heard: dict[int, ProbeResult] = field(default_factory=dict)  # what others found out, by trial
    _untold: set[int] = field(default_factory=set)  # of those, the trials that are not told yet
    _theirs: set[int] = field(default_factory=set)  # the trials of others
    _look_at: float = 0.0  # when to look next whether somebody is gone
    _climbed: set[int] = field(default_factory=set)
    _rank: int | None = None  # that is held while sampling
    selection: Selection = field(init=False)
    _probe_times: list[tuple[float, bool]] = field(default_factory=list)  # of whole models, and whether one compiled
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 (no secret hangs on it)

    def __post_init__(self) -> None:
        self.selection = Selection(self.task)

    def resume(self, stored: list[StoredProbe]) -> None:
        """Take over what earlier sessions stored, and settle trials that were cut off."""
        self._heard = {row.trial: row.result for row in stored if row.trial is not None and row.result.depth is None}
        for row in stored:
            self.evaluator.learn(row.trial, row.result)
        queued = self.optimizer.repair(self._settle, self.coordinator.workers)
        self._climbed = set(self.optimizer.remembered(CLIMBED) or ())
        self.rows, self.selection = restore(self.task, self.optimizer.finished(), stored)
        self._untold = self._heard.keys() - {row.number for row in self.rows}
        self._probe_times = [
            (row.seconds, row.config.compile != "none")
            for row in self.rows
            if row.outcome is Outcome.OK and not row.reused
        ]
        if self.rows:
            self.say(f"{len(self.rows)} trials are done already, {queued} that were cut off are queued again")

    def begin(self, tried: list[TrainConfig]) -> None:
        """Put the baselines that were tried at the start into a new study's queue; their results are stored already."""
        if not self.rows:
            for config in tried:
                self.optimizer.enqueue(self.task.space.clip(config))

    def run(self) -> None:
        """Search until a limit is reached, then try the best with its learning knobs at their most capable.

        Trials that were asked for and not told go back to the queue, whatever ends this.
        """
        with self._giving_back():
            while self.optimizer.is_waiting() and not self._done() and self._step(self._promise) is not None:
                pass
            self._climb()
            self._raise_capability()
            self._sample()
            self._raise_capability()
            measure_close_calls(self.selection, self.evaluator, self._ended, self._is_spent, self.say)

    def work(self, is_over: Callable[[], bool]) -> None:
        """Help a study that another session leads: its queue, the best's neighbours, then what the sampler proposes."""
        with self._giving_back():
            known = False  # what was proposed last
            while not self._done() and not is_over():
                wanted, seen = None, {row.config.digest for row in self.rows}
                near = known or sum(row.tokens_per_second is not None for row in self.rows) < STARTUP
                if near and not self.optimizer.is_waiting() and (wanted := self._untried()) is None and known:
                    break
                if (row := self._step(self._promise, wanted)) is None and not self._await_others():
                    break
                known = row is not None and row.config.digest in seen
            self.sync(reap=True)

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            for number in list(self._open):
                self._give_back(number)
            if not isinstance(error, Cancelled):
                raise

    def _climb(self) -> None:
        """From the best, one knob at a time, by what truncated depths foretell; whole models of those that lead."""
        tried = {row.config.digest: row.outcome for row in self.rows}
        self._follow_leads(tried)
        while (best := self.best()) is not None and not self._done():
            seen = len(tried)
            self._measure_waiting(self._pass(best, tried))
            if len(tried) == seen or self.best() is best:
                return

    def _follow_leads(self, tried: dict[str, Outcome]) -> None:
        """What the formulas find best from here; whole models of those that lead."""
        waiting: list[Waiting] = []
        best = self.best()
        for config in formula_seeds(self.task, best.config, best.limit_gib or 0.0) if best else ():
            if config.digest not in tried and not self._done():
                self._look(self.task.space.clip(config), tried, waiting)
        self._measure_waiting(waiting)

    def _pass(self, best: TrialRecord, tried: dict[str, Outcome]) -> list[Waiting]:
        """One move after another by each knob in turn; those that may lead wait, with what they are foretold to do."""
        here, speed = best.config, best.tokens_per_second or 0.0
        waiting: list[Waiting] = []
        for name in ORDER:
            while not self._done() and (chosen := next_move(self.task.space, here, name, tried)) is not None:
                config, reached = self._look(chosen, tried, waiting)
                if reached > speed * (1 - WORTHWHILE if name in MAKES_ROOM else 1 + WORTHWHILE):
                    here, speed = config, reached
        return waiting

    def _look(
        self, chosen: dict[str, Any], tried: dict[str, Outcome], waiting: list[Waiting]
    ) -> tuple[TrainConfig, float]:
        """Look at one choice below full depth: its configuration, and tokens/s. It waits where that did not decide."""
        asked = self._ask(chosen)
        if asked is None:  # another worker is at it
            config = self.task.space.config(chosen)
            tried[config.digest] = Outcome.OK
            return config, 0.0
        self._climbed.add(asked.number)
        self.optimizer.remember(CLIMBED, sorted(self._climbed))  # or they would count as patience when continued
        looked = self.evaluator.evaluate_low_fidelity(asked.config, asked.number) or self.evaluator.evaluate(
            asked.config, asked.number
        )
        if isinstance(looked, Evaluation):
            there = self._close(asked, looked)
            tried[there.config.digest], reached = there.outcome, there.tokens_per_second or 0.0
        else:
            reached = self._speed(asked.config, looked)
            tried[asked.config.digest] = Outcome.OK
            waiting.append((reached, asked))
            self.say(f"{reached:,.0f} tokens/s foretold: {asked.config.label()}")
        return asked.config, reached

    def _measure_waiting(self, waiting: list[Waiting]) -> None:
        """Whole models of those that wait, the most promising first, while they can still win."""
        for place, (_, asked) in enumerate(sorted(waiting, key=lambda one: one[0], reverse=True)):
            if place and self._is_spent():
                self._give_back(asked.number)
            else:
                self._close(asked, self.evaluator.evaluate(asked.config, asked.number, self._promise))

    def _sample(self) -> None:
        """What the sampler proposes, until a limit is reached.

        The rank is held at that of the climb, which most trials have had and whose code is compiled: another moves the
        speed by a percent or two and costs a compilation for each micro batch, and it is raised at the end.
        """
        started = self.best() is not None
        ranks = [row.config.lora_rank for row in self.rows if row.config.lora_rank]
        if ranks and self.task.space.knob("lora_rank"):
            self._rank = statistics.mode(ranks)
            self.optimizer.hold({"lora_rank": self._rank})
        while not self._done():
            seen = {row.config.digest for row in self.rows}
            row = self._step(self._promise)
            if row is None:
                if not self._await_others():
                    return
                continue
            if not started and self.best() is not None:  # no baseline came through at first
                started = True
                self._climb()
            if row.config.digest in seen and not self._done() and not self._queue_any():
                self.say("every configuration of the space has been tried")
                return

    def _raise_capability(self) -> None:
        """The best with its learning knobs at their most capable, then with each alone; with those that won also what
        was as fast as the best by one probe each: which of these is the best is chance, and the winner is not to be."""
        if (best := self.best()) is None:
            return
        most, *singly = more_capable(self.task.space, best.config)
        for raised in ([most], singly):
            for config in raised:
                self._try_sizes(config)
            for config in self._tied(best):
                self._try_sizes(config)

    def _tied(self, best: TrialRecord) -> list[TrainConfig]:
        """The three fastest, the best and what is slower by no more than one probe differs from the next, with the
        learning knobs of what would win by now."""
        if not (likely := self.selection.finalists(1)):
            return []
        space, enough = self.task.space, (best.tokens_per_second or 0.0) * (1 - AGAIN)
        learned = {knob.name: getattr(likely[0], knob.name) for knob in space.knobs if knob.kind == "learning"}
        rows = [row for row in self.rows if row.outcome is Outcome.OK and (row.tokens_per_second or 0.0) >= enough]
        raised = [
            space.config(space.clip(replace(row.config, **learned)))
            for row in sorted(rows, key=lambda row: row.tokens_per_second or 0.0, reverse=True)
            if row.config.method == likely[0].method
        ]
        return list(dict.fromkeys(raised))[:3]

    def _try_sizes(self, config: TrainConfig) -> None:
        """This configuration, and where it does not fit, ever smaller micro batches of it.

        Whole models, unless memory is in doubt: what capability costs is to be known, and most of them are close.
        """
        outcomes = {row.config: row.outcome for row in self.rows}
        for smaller in smaller_batches(self.task.space, config):
            if (outcome := outcomes.get(smaller)) is None:
                if self.should_stop() or self._is_spent() or self._full():
                    return
                row = self._step(None, self.task.space.clip(smaller))
                outcome = Outcome.OK if row is None else row.outcome  # None: another worker is at it
            if outcome not in TOO_LARGE:
                return

    def _promise(self, config: TrainConfig, foretold: Extrapolation) -> str | None:
        """Why an extrapolated candidate cannot win; None while it can."""
        others = self.selection.pool()
        if not others:
            return None
        speed, need = self._speed(config, foretold), foretold.measurement
        candidate = Scored(config=config, score=speed, free_fraction=1 - need.peak_reserved_gib / need.limit_gib)
        bar = to_beat(candidate, others, self.task.floors.slack)
        if speed * (1 + foretold.time_error) >= bar:
            return None
        return f"{speed:,.0f} tokens/s foretold (within {foretold.time_error:.0%}), {bar:,.0f} are to be beaten"

    def _speed(self, config: TrainConfig, foretold: Extrapolation) -> float:
        return self.task.performance(config, [foretold.measurement]).tokens_per_second

    def _step(self, promise: Pruner | None, wanted: dict[str, Any] | None = None) -> TrialRecord | None:
        """One trial, all the way; None where there is nothing to do that nobody else is at."""
        if (asked := self._ask(wanted)) is None:
            return None
        return self._close(asked, self.evaluator.evaluate(asked.config, asked.number, promise))

    def _ask(self, wanted: dict[str, Any] | None = None) -> Proposal | None:
        """A trial that nobody else is at: of what is wanted, or else whatever is next."""
        self.sync()
        limit = self.limits.trials
        if limit is not None and len(self.coordinator.taken()) + len(self.optimizer.told()) >= limit:
            return None
        asked = self.optimizer.ask(wanted, worker=self.coordinator.name)
        if not self.coordinator.take(asked.config.digest, asked.number):
            self.optimizer.withdraw(asked.number)
            if wanted is not None or (other := self._untried()) is None:
                return None
            return self._ask(other)
        self._open[asked.number] = asked.config.digest
        if limit is not None and self.coordinator.ahead(asked.config.digest) + len(self.optimizer.told()) >= limit:
            self._give_back(asked.number)
            return None
        return asked

    def _untried(self) -> dict[str, Any] | None:
        """A choice that differs least from the best, of those that nobody has tried or is at."""
        best, seen = self.best(), self.coordinator.taken() | {row.config.digest for row in self.rows}
        nearest = neighbours(self.task.space, best.config if best else None, seen, self._rank)
        return self._random.choice(nearest) if nearest else None

    def _close(self, asked: Proposal, verdict: Evaluation) -> TrialRecord:
        """Tell what became of a trial, keep what it found out, and its row."""
        result = verdict.result
        digest = self._open.pop(asked.number)  # its result is stored: whatever fails now, `repair` settles it
        counts = self._tell(asked.number, verdict)
        self.coordinator.drop(digest)
        if result.outcome is Outcome.OK and not verdict.reused:
            took = result.seconds.get("total", 0.0)
            compiled_here = result.config.compile != "none" and verdict.seconds == took
            self._probe_times.append((took, compiled_here))
        row = self._keep(asked.number, verdict, counts=counts)
        if counts:
            self.on_trial(row)
        return row

    def confirm(self) -> None:
        """Measure the finalists again, with what is left of the budget."""
        finalists, rounds = self.limits.finalists, self.limits.rounds
        Confirmation(self.task, self.selection, self.evaluator, finalists, rounds, self._ended, self.say).run()

    def _ended(self) -> bool:
        return self.should_stop() or self._late()

    def best(self) -> TrialRecord | None:
        """The fastest trial so far that was measured, or else extrapolated."""
        rows = [row for row in self.rows if row.outcome is Outcome.OK and row.tokens_per_second is not None]
        return max(rows, key=lambda row: row.tokens_per_second or 0.0, default=None)

    def _done(self) -> bool:
        limited = self.should_stop() or self._full() or (bool(self.rows) and self._is_spent())
        return limited or self._stale() >= self.limits.patience

    def _is_spent(self) -> bool:
        """Whether what is left of the budget is wanted for confirming."""
        return self.clock() - self.started + self._reserve_s() >= self.limits.budget_s

    def _full(self) -> bool:
        return self.limits.trials is not None and len(self.optimizer.told()) + len(self._open) >= self.limits.trials

    def _reserve_s(self) -> float:
        """What confirming will take, twice as long as the probes so far, but at most half the budget.

        It finds compiled code on disk: the probes that had to compile count only where there are no others.
        """
        if not self._probe_times:
            return 0.0
        entries = min(len(self._probe_times), self.limits.finalists) + 1
        all_times = [took for took, _ in self._probe_times]
        times = [took for took, compiled in self._probe_times if not compiled] or all_times
        need = 2.0 * statistics.median(times) * (entries + self.limits.rounds - 1)  # later rounds are the winner's
        return min(need, self.limits.budget_s / 2)

    def _late(self) -> bool:
        return self.clock() - self.started >= self.limits.budget_s

    def _stale(self) -> int:
        """Feasible trials since the best improved by more than twice the noise; a climb's own do not count."""
        best, since = 0.0, 0
        for row in self.rows:
            if row.tokens_per_second is None or row.reused:
                continue
            improved = False
            if row.outcome is Outcome.OK:
                improved = row.tokens_per_second > best * (1 + 2 * max(self.selection.noise(row.config), 0.005))
                best = max(best, row.tokens_per_second)
            since = 0 if improved else since + (row.number not in self._climbed and row.number not in self._theirs)
        return since

    def _queue_any(self) -> bool:
        """Queue what differs least from the best; False where everything was tried."""
        if (chosen := self._untried()) is not None:
            self.optimizer.enqueue(chosen)
        return chosen is not None

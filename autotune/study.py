"""The loop of a study: ask, ladder, store, tell; then measure the best again.

Adapters are passed in; nothing here knows a database, a GPU or a screen. Every trial's result is stored before Optuna
hears of it, so that a killed study continues with nothing lost.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.climb import MAKES_ROOM, ORDER, TOO_LARGE, move, neighbours, sizes
from autotune.config import TrainConfig
from autotune.depth import Extrapolation
from autotune.errors import Cancelled
from autotune.judge import DISAGREEMENT, Judge
from autotune.ladder import Ladder, Promise, Verdict
from autotune.leads import leads
from autotune.numerics import REFERENCE
from autotune.objective import Scored, margins, more_capable, to_beat
from autotune.recall import recall, row_of
from autotune.recipe import TrialRow
from autotune.result import Outcome
from autotune.search import Asked, Search
from autotune.store import StoredProbe
from autotune.subject import Subject

CLIMBED = "climbed"  # under which a study remembers which trials were
WORTHWHILE = 0.01  # relative gain from which on a climb moves
Waiting = tuple[float, Asked]  # for its whole model, with the tokens/s that truncated ones foretell


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop searching. `trials` is a total over all sessions; `patience` counts trials without a better one."""

    budget_s: float
    trials: int | None = None
    patience: int = 40
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
    _open: list[int] = field(default_factory=list)  # asked for, not told yet; `run` gives them back
    _climbed: set[int] = field(default_factory=set)
    _rank: int | None = None  # that is held while sampling
    judge: Judge = field(init=False)
    _probe_times: list[tuple[float, bool]] = field(default_factory=list)  # of whole models, and whether one compiled
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
        self._climbed = set(self.search.remembered(CLIMBED) or ())
        self.rows, self.judge = recall(self.subject, self.search.finished(), stored)
        self._probe_times = [
            (row.seconds, row.config.compile != "none")
            for row in self.rows
            if row.outcome is Outcome.OK and not row.reused
        ]
        if self.rows:
            self.say(f"continuing: {len(self.rows)} trials are done, {queued} that were cut off are queued again")

    def begin(self, tried: list[TrainConfig]) -> None:
        """Put the baselines that were tried at the start into a new study's queue; their results are stored already."""
        if not self.rows:
            for config in tried:
                self.search.enqueue(self.subject.space.clip(config))

    def run(self) -> None:
        """Search until a limit is reached, then try the best with its learning knobs at their most capable.

        Trials that were asked for and not told go back to the queue, whatever ends this.
        """
        try:
            while self.search.is_waiting() and not self._done():
                self._step(self._promise)
            self._climb()
            self._raise_capability()
            self._sample()
            self._raise_capability()
            self._measure_close_calls()
        except BaseException as error:
            for number in self._open:
                self.search.give_back(number)
            self._open.clear()
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
        for config in leads(self.subject, best.config, best.limit_gib or 0.0) if best else ():
            if config.digest not in tried and not self._done():
                self._look(self.subject.space.clip(config), tried, waiting)
        self._measure_waiting(waiting)

    def _pass(self, best: TrialRow, tried: dict[str, Outcome]) -> list[Waiting]:
        """One move after another by each knob in turn; those that may lead wait, with what they are foretold to do."""
        here, speed = best.config, best.tokens_per_second or 0.0
        waiting: list[Waiting] = []
        for name in ORDER:
            while not self._done() and (chosen := move(self.subject.space, here, name, tried)) is not None:
                config, reached = self._look(chosen, tried, waiting)
                if reached > speed * (1 - WORTHWHILE if name in MAKES_ROOM else 1 + WORTHWHILE):
                    here, speed = config, reached
        return waiting

    def _look(
        self, chosen: dict[str, Any], tried: dict[str, Outcome], waiting: list[Waiting]
    ) -> tuple[TrainConfig, float]:
        """Look at one choice below full depth: its configuration, and tokens/s. It waits where that did not decide."""
        self.search.enqueue(chosen)
        asked = self._ask()
        self._climbed.add(asked.number)
        self.search.remember(CLIMBED, sorted(self._climbed))  # or they would count as patience when continued
        looked = self.ladder.look(asked.config, asked.number) or self.ladder.evaluate(asked.config, asked.number)
        if isinstance(looked, Verdict):
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
                self._open.remove(asked.number)
                self.search.give_back(asked.number)
            else:
                self._close(asked, self.ladder.evaluate(asked.config, asked.number, self._promise))

    def _sample(self) -> None:
        """What the sampler proposes, until a limit is reached.

        The rank is held at that of the climb, which most trials have had and whose code is compiled: another moves the
        speed by a percent or two and costs a compilation for each micro batch, and it is raised at the end.
        """
        seen, started = {row.config.digest for row in self.rows}, self.best() is not None
        ranks = [row.config.lora_rank for row in self.rows if row.config.lora_rank]
        if ranks and self.subject.space.knob("lora_rank"):
            self._rank = statistics.mode(ranks)
            self.search.hold({"lora_rank": self._rank})
        while not self._done():
            config = self._step(self._promise).config
            if not started and self.best() is not None:  # no baseline came through at first
                started = True
                self._climb()
                seen |= {row.config.digest for row in self.rows}
            known = config.digest in seen
            seen.add(config.digest)
            if known and not self._done() and not self._queue_any(seen):
                self.say("every configuration of the space has been tried")
                return

    def _raise_capability(self) -> None:
        """The best with its learning knobs at their most capable; what does not fit, with smaller micro batches.

        Whole models, unless memory is in doubt: what capability costs is to be known, and most of them are close.
        """
        outcomes = {row.config: row.outcome for row in self.rows}
        best = self.best()
        for config in more_capable(self.subject.space, best.config) if best else []:
            for smaller in sizes(self.subject.space, config):
                if smaller not in outcomes:
                    if self.should_stop() or self._is_spent() or self._full():
                        return
                    self.search.enqueue(self.subject.space.clip(smaller))
                    outcomes[smaller] = self._step(None).outcome
                if outcomes[smaller] not in TOO_LARGE:
                    break

    def _measure_close_calls(self) -> None:
        """Whole models of what a truncated one left close to the best: one, and more while confirming has its time."""
        asked = set[TrainConfig]()
        while left := [config for config in self.judge.close_calls() if config not in asked]:
            if self.should_stop() or self._late() or (asked and self._is_spent()):
                return
            asked.add(left[0])
            self.say(f"close to the best, at full depth: {left[0].label()}")
            try:
                result = self.ladder.evaluate(left[0], None).result
            except Cancelled:
                return
            if result.outcome is Outcome.OK and result.measurement is not None and result.depth is None:
                self.judge.add(left[0], result.measurement)

    def _promise(self, config: TrainConfig, foretold: Extrapolation) -> str | None:
        """Why an extrapolated candidate cannot win; None while it can."""
        others = self.judge.pool()
        if not others:
            return None
        speed, need = self._speed(config, foretold), foretold.measurement
        candidate = Scored(config=config, score=speed, headroom=1 - need.peak_reserved_gib / need.limit_gib)
        bar = to_beat(candidate, others, self.subject.floors.slack)
        if speed * (1 + foretold.time_error) >= bar:
            return None
        return f"{speed:,.0f} tokens/s foretold (within {foretold.time_error:.0%}), {bar:,.0f} are to be beaten"

    def _speed(self, config: TrainConfig, foretold: Extrapolation) -> float:
        return self.subject.performance(config, [foretold.measurement]).tokens_per_second

    def _step(self, promise: Promise | None) -> TrialRow:
        """One trial, all the way."""
        asked = self._ask()
        return self._close(asked, self.ladder.evaluate(asked.config, asked.number, promise))

    def _ask(self) -> Asked:
        asked = self.search.ask()
        self._open.append(asked.number)
        return asked

    def _close(self, asked: Asked, verdict: Verdict) -> TrialRow:
        """Tell what became of a trial, keep what it found out, and its row."""
        result = verdict.result
        self._open.remove(asked.number)  # its result is stored: whatever fails now, `repair` settles it
        self._tell(asked.number, verdict)
        if result.outcome is Outcome.OK and not verdict.reused:
            took = result.seconds.get("total", 0.0)
            compiled_here = result.config.compile != "none" and verdict.seconds == took
            self._probe_times.append((took, compiled_here))
        row = row_of(asked.number, verdict, self.subject)
        self.rows.append(row)
        self.judge.take(result)
        self.on_trial(row)
        return row

    def confirm(self) -> None:
        """Measure the finalists and the baseline again; in later rounds those that may still win.

        The likely winner and the baseline come first, since the budget may end it. Who fails is replaced by the next
        best. One evaluation and one save belong to the full run: who wins has done them.
        """
        entries = self.judge.finalists(self.limits.finalists)
        likely, baseline = entries[:1], self.judge.baseline()
        if baseline is not None and baseline not in likely:
            entries = [*likely, baseline, *(one for one in entries[1:] if one != baseline)]
        for round_ in range(1, self.limits.rounds + 1):
            last = round_ == self.limits.rounds
            waiting = [one for one in entries if round_ == 1 or self.judge.may_win(one)]
            while waiting:
                config = waiting.pop(0)
                if self.should_stop() or self._late():
                    return
                why = f"round {round_} of {self.limits.rounds}"
                confirmed = self._confirm_one(config, why, round_, whole=last or config in likely)
                if confirmed is None:
                    return
                if not confirmed:
                    entries.remove(config)
                    next_best = [one for one in self.judge.finalists(len(entries) + 1) if one not in entries][:1]
                    if next_best and not self._late():
                        entries += next_best
                        waiting += next_best
        again = self.limits.rounds
        for config in entries:
            while self.judge.disagreement(config) > DISAGREEMENT and len(self.judge.confirmed[config.digest]) < 3:
                again += 1
                if self._ended() or not self._confirm_one(config, "once more, since measurements disagree", again):
                    break
        # Who leads now may not have led before.
        while (leader := self.judge.leader()) is not None and not self._ended():
            twice = len(self.judge.confirmed[leader.digest]) >= min(self.limits.rounds, 2)
            if twice and self.ladder.was_evaluated(leader):
                return
            again += 1
            if self._confirm_one(leader, "once more, since it leads", again, whole=True) is None:
                return

    def _ended(self) -> bool:
        return self.should_stop() or self._late()

    def _confirm_one(self, config: TrainConfig, why: str, round_: int, *, whole: bool = False) -> bool | None:
        """Whether the configuration came through again; None if the user asked to stop, or time ran out, meanwhile."""
        micro_steps = min(self.subject.workload.accumulation(config), 4)
        try:
            if config.digest not in self.judge.confirmed and not self._is_sound(config):
                return False
            if self._late():
                return None
            self.say(f"confirming, {why}: {config.label()}")
            result = self.ladder.confirm(config, micro_steps, round_, whole=whole)
        except Cancelled:
            return None
        if result.outcome is Outcome.OK and result.measurement is not None:
            self.judge.confirm(config, result.measurement)
            return True
        self.judge.drop(config, result.reason or result.outcome, fits=result.outcome is not Outcome.OOM)
        return False

    def _is_sound(self, config: TrainConfig) -> bool:
        """Whether its losses are those of its reference, as far as real weights and time can tell."""
        if (reference := self.judge.to_compare(config)) is not None and not self._late():
            self.say(f"comparing the losses of {config.label()} with {REFERENCE}")
            self.judge.references[reference.digest] = self.ladder.reference(reference)
        if (reason := self.judge.unsound(config)) is not None:
            self.ladder.reject(config, reason)
            self.judge.drop(config, reason)
        return reason is None

    def best(self) -> TrialRow | None:
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
        return self.limits.trials is not None and len(self.rows) + len(self._open) >= self.limits.trials

    def _reserve_s(self) -> float:
        """What confirming will take, twice as long as the probes so far, but at most half the budget.

        It finds compiled code on disk: the probes that had to compile count only where there are no others.
        """
        if not self._probe_times:
            return 0.0
        entries = min(len(self._probe_times), self.limits.finalists) + 1
        times = [took for took, compiled in self._probe_times if not compiled] or [
            took for took, _ in self._probe_times
        ]
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
                improved = row.tokens_per_second > best * (1 + 2 * max(self.judge.noise(row.config), 0.005))
                best = max(best, row.tokens_per_second)
            since = 0 if improved else since + (row.number not in self._climbed)
        return since

    def _queue_any(self, seen: set[str]) -> bool:
        """What differs least from the best so far, of what was not tried; False where everything was."""
        best = self.best()
        if nearest := neighbours(self.subject.space, best.config if best else None, seen, self._rank):
            self.search.enqueue(self._random.choice(nearest))
        return bool(nearest)

    def _tell(self, number: int, verdict: Verdict) -> None:
        result, value = verdict.result, self.subject.score(verdict.result)
        self.search.tell(number, result.outcome, value, margins(result), reused=verdict.reused, reason=result.reason)

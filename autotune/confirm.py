"""The end of a study: the best configurations again, longer and interleaved, until it is sure who wins."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.config import TrainConfig
from autotune.errors import Cancelled
from autotune.judge import DISAGREEMENT, Judge
from autotune.ladder import Ladder
from autotune.numerics import REFERENCE
from autotune.result import Outcome
from autotune.subject import Subject


@dataclass(slots=True)
class Confirmation:
    """One pass over the finalists of a study. `ended` says that time is up, or that the user wants to stop."""

    subject: Subject
    judge: Judge
    ladder: Ladder
    finalists: int
    rounds: int
    ended: Callable[[], bool]
    say: Callable[[str], None]

    def run(self) -> None:
        """Measure the finalists and the baseline again; in later rounds those that may still win.

        The likely winner and the baseline come first, since the budget may end it. Who fails is replaced by the next
        best. One evaluation and one save belong to the full run: who wins has done them.
        """
        entries = self.judge.finalists(self.finalists)
        likely, baseline = entries[:1], self.judge.baseline()
        if baseline is not None and baseline not in likely:
            entries = [*likely, baseline, *(one for one in entries[1:] if one != baseline)]
        for round_ in range(1, self.rounds + 1):
            last = round_ == self.rounds
            waiting = [one for one in entries if round_ == 1 or self.judge.may_win(one)]
            while waiting:
                config = waiting.pop(0)
                if self.ended():
                    return
                why = f"round {round_} of {self.rounds}"
                confirmed = self._confirm_one(config, why, round_, whole=last or config in likely)
                if confirmed is None:
                    return
                if not confirmed:
                    entries.remove(config)
                    next_best = [one for one in self.judge.finalists(len(entries) + 1) if one not in entries][:1]
                    if next_best and not self.ended():
                        entries += next_best
                        waiting += next_best
        again = self.rounds
        for config in entries:
            while self.judge.disagreement(config) > DISAGREEMENT and len(self.judge.confirmed[config.digest]) < 3:
                again += 1
                if self.ended() or not self._confirm_one(config, "once more, since measurements disagree", again):
                    break
        # Who leads now may not have led before.
        while (leader := self.judge.leader()) is not None and not self.ended():
            twice = len(self.judge.confirmed[leader.digest]) >= min(self.rounds, 2)
            if twice and self.ladder.was_evaluated(leader):
                return
            again += 1
            if self._confirm_one(leader, "once more, since it leads", again, whole=True) is None:
                return

    def _confirm_one(self, config: TrainConfig, why: str, round_: int, *, whole: bool = False) -> bool | None:
        """Whether the configuration came through again; None if the user asked to stop, or time ran out, meanwhile."""
        micro_steps = min(self.subject.workload.accumulation(config), 4)
        try:
            if config.digest not in self.judge.confirmed and not self._is_sound(config):
                return False
            if self.ended():
                return None
            self.say(f"confirming, {why}: {config.label()}")
            result = self.ladder.confirm(config, micro_steps, round_, whole=whole)
        except Cancelled:
            return None
        if result.outcome is Outcome.OK and result.measurement is not None:
            self.judge.confirm(config, result.measurement)
            self.judge.begun(result)
            return True
        self.judge.drop(config, result.reason or result.outcome, fits=result.outcome is not Outcome.OOM)
        return False

    def _is_sound(self, config: TrainConfig) -> bool:
        """Whether its losses are those of its reference, as far as real weights and time can tell."""
        if (reference := self.judge.to_compare(config)) is not None and not self.ended():
            self.say(f"comparing the losses of {config.label()} with {REFERENCE}")
            self.judge.references[reference.digest] = self.ladder.reference(reference)
        if (reason := self.judge.unsound(config)) is not None:
            self.ladder.reject(config, reason)
            self.judge.drop(config, reason)
        return reason is None


def measure_close_calls(
    judge: Judge, ladder: Ladder, ended: Callable[[], bool], is_spent: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Whole models of what a truncated one left close to the best: one, and more while confirming has its time."""
    asked = set[TrainConfig]()
    while left := [config for config in judge.close_calls() if config not in asked]:
        if ended() or (asked and is_spent()):
            return
        asked.add(left[0])
        say(f"close to the best, at full depth: {left[0].label()}")
        try:
            result = ladder.evaluate(left[0], None).result
        except Cancelled:
            return
        if result.outcome is Outcome.OK and result.depth is None:
            judge.take(result)

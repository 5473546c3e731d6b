"""The end of a study: the best configurations again, longer and interleaved, until it is sure who wins."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.task import Task
from autotune.study.evaluator import Evaluator
from autotune.study.numerics import REFERENCE
from autotune.study.selection import DISAGREEMENT, Selection


@dataclass(slots=True)
class Confirmation:
    """One pass over the finalists of a study. `ended` says that time is up, or that the user wants to stop."""

    task: Task
    selection: Selection
    evaluator: Evaluator
    finalists: int
    rounds: int
    ended: Callable[[], bool]
    say: Callable[[str], None]

    def run(self) -> None:
        """Measure the finalists and the baseline again; in later rounds those that may still win.

        The likely winner and the baseline come first, since the budget may end it. Who fails is replaced by the next
        best. One evaluation and one save belong to the full run: who wins has done them.
        """
        entries = self.selection.finalists(self.finalists)
        likely, baseline = entries[:1], self.selection.baseline()
        if baseline is not None and baseline not in likely:
            entries = [*likely, baseline, *(one for one in entries[1:] if one != baseline)]
        for round_ in range(1, self.rounds + 1):
            last = round_ == self.rounds
            waiting = [one for one in entries if round_ == 1 or self.selection.may_win(one)]
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
                    next_best = [one for one in self.selection.finalists(len(entries) + 1) if one not in entries][:1]
                    if next_best and not self.ended():
                        entries += next_best
                        waiting += next_best
        again = self.rounds
        for config in entries:
            while (
                self.selection.disagreement(config) > DISAGREEMENT and len(self.selection.record(config).confirmed) < 3
            ):
                again += 1
                if self.ended() or not self._confirm_one(config, "once more, since measurements disagree", again):
                    break
        # Who leads now may not have led before.
        while (leader := self.selection.leader()) is not None and not self.ended():
            twice = len(self.selection.record(leader).confirmed) >= min(self.rounds, 2)
            if twice and self.evaluator.was_evaluated(leader):
                return
            again += 1
            if self._confirm_one(leader, "once more, since it leads", again, whole=True) is None:
                return

    def _confirm_one(self, config: TrainConfig, why: str, round_: int, *, whole: bool = False) -> bool | None:
        """Whether the configuration came through again; None if the user asked to stop, or time ran out, meanwhile."""
        micro_steps = self.task.workload.run_shape(config).confirmation_micro_steps
        try:
            if not self.selection.record(config).confirmed and not self._is_sound(config):
                return False
            if self.ended():
                return None
            self.say(f"confirming, {why}: {config.label()}")
            result = self.evaluator.confirm(config, micro_steps, round_, whole=whole)
        except Cancelled:
            return None
        if result.outcome is Outcome.OK and result.measurement is not None:
            self.selection.confirm(config, result.measurement)
            self.selection.record_startup(result)
            return True
        self.selection.reject(config, result.reason or result.outcome, fits=result.outcome is not Outcome.OOM)
        return False

    def _is_sound(self, config: TrainConfig) -> bool:
        """Whether its losses are those of its reference, as far as real weights and time can tell."""
        if (reference := self.selection.missing_reference(config)) is not None and not self.ended():
            self.say(f"comparing the losses of {config.label()} with {REFERENCE}")
            self.selection.references[reference.digest] = self.evaluator.reference(reference)
        if (reason := self.selection.unsound(config)) is not None:
            self.evaluator.reject(config, reason)
            self.selection.reject(config, reason)
        return reason is None


def measure_close_calls(
    selection: Selection,
    evaluator: Evaluator,
    ended: Callable[[], bool],
    is_spent: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Whole models of what a truncated one left close to the best: one, and more while confirming has its time."""
    asked = set[TrainConfig]()
    while left := [config for config in selection.close_calls() if config not in asked]:
        if ended() or (asked and is_spent()):
            return
        asked.add(left[0])
        say(f"close to the best, at full depth: {left[0].label()}")
        try:
            result = evaluator.evaluate(left[0], None).result
        except Cancelled:
            return
        if result.outcome is Outcome.OK and result.depth is None:
            selection.add_result(result)

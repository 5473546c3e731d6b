"""The end of a study: measure the best configurations again, longer and interleaved, until it is sure who wins."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.task import Task
from autotune.study.evaluator import Evaluator
from autotune.study.numerics import REFERENCE
from autotune.study.selection import DISAGREEMENT, Selection

MAX_CONFIRMATIONS = 3  # of a configuration whose measurements disagree


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
        """Measure the finalists and the baseline again; in later rounds only those that may still win.

        The likely winner and the baseline come first, since the budget may end it. A finalist that fails is replaced by
        the next best. A full run also evaluates and saves: the winner must have done both.
        """
        entries = self.selection.finalists(self.finalists)
        likely, baseline = entries[:1], self.selection.baseline()
        if baseline is not None and baseline not in likely:
            entries = [*likely, baseline, *(config for config in entries[1:] if config != baseline)]
        for round_ in range(1, self.rounds + 1):
            if not self._run_round(round_, entries, likely):
                return
        num_rounds = self._settle_disagreements(entries)
        self._confirm_leader(num_rounds)

    def _run_round(self, round_: int, entries: list[TrainConfig], likely: list[TrainConfig]) -> bool:
        """Measure each entry once; False if that was interrupted. Entries that fail are replaced in `entries`."""
        last = round_ == self.rounds
        waiting = [config for config in entries if round_ == 1 or self.selection.may_win(config)]
        while waiting:
            config = waiting.pop(0)
            if self.ended():
                return False
            why = f"round {round_} of {self.rounds}"
            confirmed = self._confirm_one(config, why, round_, whole=last or config in likely)
            if confirmed is None:
                return False
            if not confirmed:
                entries.remove(config)
                finalists = self.selection.finalists(len(entries) + 1)
                next_best = [finalist for finalist in finalists if finalist not in entries][:1]
                if next_best and not self.ended():
                    entries += next_best
                    waiting += next_best
        return True

    def _settle_disagreements(self, entries: list[TrainConfig]) -> int:
        """Measure entries once more while their measurements disagree. Returns the number of the last round."""
        round_ = self.rounds
        for config in entries:
            while (
                self.selection.disagreement(config) > DISAGREEMENT
                and len(self.selection.record(config).confirmed) < MAX_CONFIRMATIONS
            ):
                round_ += 1
                if self.ended() or not self._confirm_one(config, "once more, since measurements disagree", round_):
                    break
        return round_

    def _confirm_leader(self, round_: int) -> None:
        """Measure the leader, which may not have led before, until it has been measured twice and has saved."""
        while (leader := self.selection.leader()) is not None and not self.ended():
            twice = len(self.selection.record(leader).confirmed) >= min(self.rounds, 2)
            if twice and self.evaluator.was_evaluated(leader):
                return
            round_ += 1
            if self._confirm_one(leader, "once more, since it leads", round_, whole=True) is None:
                return

    def _confirm_one(self, config: TrainConfig, why: str, round_: int, *, whole: bool = False) -> bool | None:
        """Whether the configuration succeeded again; None if the user or the budget stopped this."""
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
        """Whether its losses agree with those of its reference, as far as real weights and time can tell."""
        reference = self.selection.missing_reference(config)
        if reference is not None and not self.ended():
            self.say(f"comparing the losses of {config.label()} with {REFERENCE}")
            self.selection.references[reference.digest] = self.evaluator.reference(reference)
        reason = self.selection.unsound(config)
        if reason is not None:
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
    """Measure whole models of extrapolated configurations close to the best: one, and more while time is left."""
    measured = set[TrainConfig]()
    while left := [config for config in selection.close_calls() if config not in measured]:
        if ended() or (measured and is_spent()):
            return
        measured.add(left[0])
        say(f"close to the best, at full depth: {left[0].label()}")
        try:
            result = evaluator.evaluate(left[0], None).result
        except Cancelled:
            return
        if result.outcome is Outcome.OK and result.depth is None:
            selection.add_result(result)

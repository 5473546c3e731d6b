"""What a session of a study does since others may work on it too: hear what they found out, settle what they left."""

import time
from collections.abc import Callable

from autotune.core.probe_types import ProbeResult
from autotune.problem.performance import margins
from autotune.problem.task import Task
from autotune.study.evaluator import Evaluation, Evaluator
from autotune.study.history import to_record
from autotune.study.optimizer import Optimizer
from autotune.study.selection import Selection
from autotune.study.storage.coordinator import Coordinator, SingleWorker
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.summary import TrialRecord

AWAITING_S, LOOK_EVERY_S = 0.2, 15.0


class Sharing:
    """That part of a `Study`, whose fields these are."""

    task: Task
    optimizer: Optimizer
    evaluator: Evaluator
    selection: Selection
    coordinator: Coordinator
    rows: list[TrialRecord]
    new_rows: Callable[[], list[StoredProbe]]
    on_trial_of_others: Callable[[TrialRecord], None]
    say: Callable[[str], None]
    clock: Callable[[], float]
    _open: dict[int, str]
    _heard: dict[int, ProbeResult]
    _untold: set[int]
    _theirs: set[int]
    _look_at: float

    def _await_others(self) -> bool:
        """Whether somebody else is still at something, or has given something back; after a moment."""
        if not self.coordinator.taken() and not self.optimizer.is_waiting():
            return False
        time.sleep(AWAITING_S)
        return True

    def sync(self, *, reap: bool = False) -> None:
        """Take over what others found out, and now and then, or to `look`, what those had begun that are gone."""
        for row in self.new_rows():
            self.evaluator.learn(row.trial, row.result)
            if row.trial is not None and row.result.depth is None:
                self._heard[row.trial] = row.result
                self._untold.add(row.trial)
        # A trial that was given back counts for nothing, even if its result came after all.
        for number in sorted(self._untold & self.optimizer.told()) if self._untold else ():
            self._untold.remove(number)
            self._theirs.add(number)
            self.rows = [row for row in self.rows if row.number != number]
            found = self._heard[number]
            self.on_trial_of_others(
                self._keep(number, Evaluation(result=found, seconds=found.seconds.get("total", 0.0)))
            )
        if reap or self.clock() >= self._look_at:
            self.reap()

    def reap(self) -> None:
        """Settle what those had begun that are gone."""
        if isinstance(self.coordinator, SingleWorker):
            return
        self._look_at = self.clock() + LOOK_EVERY_S
        if queued := self.optimizer.repair(self._settle, self.coordinator.workers):
            self.say(f"{queued} trials of a worker that is gone are queued again")

    def _settle(self, number: int) -> bool:
        """Tell a trial whose worker is gone, if it had stored what it found out."""
        if number not in self._heard:
            return False
        self._tell(number, Evaluation(result=self._heard[number]))
        return True

    def _leave(self, number: int) -> None:
        self.coordinator.drop(self._open.pop(number))

    def _give_back(self, number: int) -> None:
        self.optimizer.give_back(number)
        self._leave(number)

    def _keep(self, number: int, verdict: Evaluation, *, counts: bool = True) -> TrialRecord:
        """What was found out may win in any case; the trial itself `counts` unless others gave it back."""
        row = to_record(number, verdict, self.task)
        if counts:
            self.rows.append(row)
        self.selection.add_result(verdict.result)
        return row

    def _tell(self, number: int, verdict: Evaluation) -> bool:
        result, value = verdict.result, self.task.score(verdict.result)
        return self.optimizer.tell(
            number, result.outcome, value, margins(result), reused=verdict.reused, reason=result.reason
        )

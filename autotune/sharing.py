"""What a session of a study does since others may work on it too: hear what they found out, settle what they left."""

import time
from collections.abc import Callable

from autotune.crew import Alone, Crew
from autotune.judge import Judge
from autotune.ladder import Ladder, Verdict
from autotune.objective import margins
from autotune.recall import row_of
from autotune.recipe import TrialRow
from autotune.result import ProbeResult
from autotune.search import Search
from autotune.store import StoredProbe
from autotune.subject import Subject

AWAITING_S, LOOK_EVERY_S = 0.2, 15.0


class Sharing:
    """That part of a `Study`, whose fields these are."""

    subject: Subject
    search: Search
    ladder: Ladder
    judge: Judge
    crew: Crew
    rows: list[TrialRow]
    news: Callable[[], list[StoredProbe]]
    on_heard: Callable[[TrialRow], None]
    say: Callable[[str], None]
    clock: Callable[[], float]
    _open: dict[int, str]
    _heard: dict[int, ProbeResult]
    _untold: set[int]
    _theirs: set[int]
    _look_at: float

    def _await_others(self) -> bool:
        """Whether somebody else is still at something, or has given something back; after a moment."""
        if not self.crew.taken() and not self.search.is_waiting():
            return False
        time.sleep(AWAITING_S)
        return True

    def hear(self, *, look: bool = False) -> None:
        """Take over what others found out, and now and then, or to `look`, what those had begun that are gone."""
        for row in self.news():
            self.ladder.learn(row.trial, row.result)
            if row.trial is not None and row.result.depth is None:
                self._heard[row.trial] = row.result
                self._untold.add(row.trial)
        # A trial that was given back counts for nothing, even if its result came after all.
        for number in sorted(self._untold & self.search.told()) if self._untold else ():
            self._untold.remove(number)
            self._theirs.add(number)
            self.rows = [row for row in self.rows if row.number != number]
            found = self._heard[number]
            self.on_heard(self._keep(number, Verdict(result=found, seconds=found.seconds.get("total", 0.0))))
        if look or self.clock() >= self._look_at:
            self.look()

    def look(self) -> None:
        """Settle what those had begun that are gone."""
        if isinstance(self.crew, Alone):
            return
        self._look_at = self.clock() + LOOK_EVERY_S
        if queued := self.search.repair(self._settle, self.crew.workers):
            self.say(f"{queued} trials of a worker that is gone are queued again")

    def _settle(self, number: int) -> bool:
        """Tell a trial whose worker is gone, if it had stored what it found out."""
        if number not in self._heard:
            return False
        self._tell(number, Verdict(result=self._heard[number]))
        return True

    def _leave(self, number: int) -> None:
        self.crew.drop(self._open.pop(number))

    def _give_back(self, number: int) -> None:
        self.search.give_back(number)
        self._leave(number)

    def _keep(self, number: int, verdict: Verdict, *, counts: bool = True) -> TrialRow:
        """What was found out may win in any case; the trial itself `counts` unless others gave it back."""
        row = row_of(number, verdict, self.subject)
        if counts:
            self.rows.append(row)
        self.judge.take(verdict.result)
        return row

    def _tell(self, number: int, verdict: Verdict) -> bool:
        result, value = verdict.result, self.subject.score(verdict.result)
        return self.search.tell(
            number, result.outcome, value, margins(result), reused=verdict.reused, reason=result.reason
        )

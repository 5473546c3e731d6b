"""When a search stops: the user, the budget, the number of trials, or no better configuration for many trials."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.core.probe_types import Outcome
from autotune.study.distributed import SharedTrials
from autotune.study.storage.study_record import Limits

LEAST_NOISE = 0.005  # relative


@dataclass(slots=True)
class StoppingRule:
    """The limits of one session. Its budget counts from `started`, in seconds of `clock`.

    `exempt` has the numbers of trials that do not count as patience: those of coordinate search.
    """

    trials: SharedTrials
    limits: Limits
    started: float
    clock: Callable[[], float]
    should_stop: Callable[[], bool]
    exempt: set[int] = field(default_factory=set)

    def has_ended(self) -> bool:
        """Whether the budget is over, or the user asked to stop."""
        return self.should_stop() or self.clock() - self.started >= self.limits.budget_s

    def is_spent(self) -> bool:
        """Whether the rest of the budget is needed for confirmation."""
        return self.clock() - self.started + self._confirmation_s() >= self.limits.budget_s

    def is_over(self) -> bool:
        """Whether no further trial may begin: stopped, spent, or as many trials as are allowed."""
        return self.should_stop() or self.is_spent() or self.trials.is_full()

    def is_done(self) -> bool:
        """Whether the search is to end. The first trial runs even if the budget is spent."""
        if self.should_stop() or self.trials.is_full() or (self.trials.rows and self.is_spent()):
            return True
        return self.num_stale() >= self.limits.patience

    def num_stale(self) -> int:
        """Trials with a number since the best improved by more than twice the noise; some are exempt."""
        best, num_stale = 0.0, 0
        for row in self.trials.rows:
            if row.tokens_per_second is None or row.reused:
                continue
            improved = False
            if row.outcome is Outcome.OK:
                noise = max(self.trials.selection.noise(row.config), LEAST_NOISE)
                improved = row.tokens_per_second > best * (1 + 2 * noise)
                best = max(best, row.tokens_per_second)
            if improved:
                num_stale = 0
            elif row.number not in self.exempt and row.number not in self.trials.by_others:
                num_stale += 1
        return num_stale

    def _confirmation_s(self) -> float:
        """Seconds to reserve for confirmation: twice as long as the probes so far, but at most half the budget.

        Confirmation finds compiled code on disk: probes that compiled count only if there are no others.
        """
        probes = self.trials.whole_probes
        if not probes:
            return 0.0
        num_entries = min(len(probes), self.limits.finalists) + 1
        times = [took_s for took_s, compiled in probes if not compiled] or [took_s for took_s, _ in probes]
        num_probes = num_entries + self.limits.rounds - 1  # later rounds are for the winner only
        return min(2.0 * statistics.median(times) * num_probes, self.limits.budget_s / 2)

"""The savings of one full run of a study's winner, compared with the cost of the search."""

import math
from dataclasses import dataclass
from typing import ClassVar

from autotune.core.json_view import native_fields_plus
from autotune.problem.run_cost import CostProjection

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """The hours and USD that one full run saves, compared with the baseline's full run.

    A negative number means that the winner's run takes longer or costs more than the baseline's
    run. The amounts in USD are None if no price is known. The search took `search_hours` and cost
    `search_usd`.
    """

    JSON: ClassVar = native_fields_plus("pays")

    hours: float
    interval_hours: Interval
    usd: float | None
    interval_usd: Interval | None
    search_hours: float
    search_usd: float | None

    @property
    def pays(self) -> bool | None:
        """Whether one run saves more than the search cost; None if this is uncertain.

        The comparison is uncertain if the cost of the search lies within the interval of the
        savings. Without a price, hours are compared instead of USD.
        """
        if self.interval_usd is None or self.search_usd is None:
            (low, high), spent = self.interval_hours, self.search_hours
        else:
            (low, high), spent = self.interval_usd, self.search_usd
        return None if low <= spent < high else low > spent

    @property
    def runs_to_pay(self) -> int | None:
        """The number of full runs that pay for the search, or None if a run saves nothing."""
        saved, spent = self.usd, self.search_usd
        if saved is None or spent is None:
            saved, spent = self.hours, self.search_hours
        return math.ceil(spent / saved) if saved > 0 else None


def run_savings(
    winner: CostProjection,
    baseline: CostProjection,
    speedup: float,
    interval: Interval,
    *,
    search_hours: float,
    search_usd: float | None,
) -> Savings:
    """Return the savings of the winner's full run.

    `speedup` and its `interval` compare the two speeds. This comparison is more exact than the
    difference of the two costs, because most errors affect both costs equally and cancel out in the
    ratio of the speeds.
    """
    # The savings have the same relative error as the baseline's cost.
    scale = [hours / baseline.full_run_hours for hours in baseline.interval_hours]

    def savings(of_baseline: float, of_winner: float) -> Interval:
        low, high = (of_baseline - of_winner * speedup / ratio for ratio in interval)
        return low * scale[low < 0], high * scale[high > 0]

    usd = None
    interval_usd = None
    if search_usd is not None and None not in (winner.full_run_usd, baseline.full_run_usd):
        of_baseline, of_winner = baseline.full_run_usd or 0.0, winner.full_run_usd or 0.0
        usd = of_baseline - of_winner
        interval_usd = savings(of_baseline, of_winner)

    return Savings(
        hours=baseline.full_run_hours - winner.full_run_hours,
        interval_hours=savings(baseline.full_run_hours, winner.full_run_hours),
        usd=usd,
        interval_usd=interval_usd,
        search_hours=search_hours,
        search_usd=search_usd,
    )

"""The hours of a run on spot instances, which the cloud may take back at any time.

The expected time is Daly's closed form for a run that saves at equal intervals ("A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006). The only assumption is that
the interruptions are independent of each other and of the run.
"""

import math
from dataclasses import dataclass

from autotune.problem.run_options import RunOptions

HOURS_PER_DAY = 24
# The lowest, the likely and the highest number of interruptions a day, unless the user gives the
# number. Providers publish no rate for each GPU, and the rate changes with the hour and the region:
# these three are assumptions, not measurements.
ASSUMED_PER_DAY = (0.0, 1.0, 6.0)
# With more expected interruptions than this between two checkpoints, a run practically never
# reaches the next checkpoint.
MOST_PER_SAVE = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """The interruptions of a run on a spot instance.

    Args:
        per_hour: the lowest, the likely and the highest mean number of interruptions in an hour.
        restart_hours: the paid time from an interruption to the next step: the start of another
            instance, and the loading of the checkpoint. The wait for an instance is not paid.
        save_hours: the time between two checkpoints. An interruption loses the work since the last.
    """

    per_hour: tuple[float, float, float]
    restart_hours: float
    save_hours: float

    def paid_hours(self, hours: float) -> float | None:
        """Return the expected paid hours of a run that takes `hours` without an interruption.

        Returns None if the run practically never ends.
        """
        return self._paid_hours(hours, self.per_hour[1])

    def paid_interval(self, low: float, high: float) -> tuple[float, float] | None:
        """Return the interval of the paid hours of a run that takes from `low` to `high` hours.

        The lower end has the fewest interruptions, and the upper end the most. Returns None if the
        longest run practically never ends.
        """
        least = self._paid_hours(low, self.per_hour[0])
        most = self._paid_hours(high, self.per_hour[2])
        return None if least is None or most is None else (least, most)

    def _paid_hours(self, hours: float, per_hour: float) -> float | None:
        if per_hour == 0:
            return hours
        if per_hour * (min(self.save_hours, hours) + self.restart_hours) > MOST_PER_SAVE:
            return None

        def until_saved(work: float) -> float:
            """The expected hours until `work` hours pass without an interruption."""
            repeated = math.expm1(per_hour * work) / per_hour
            return math.exp(per_hour * self.restart_hours) * repeated

        saves, rest = divmod(hours, self.save_hours)
        return saves * until_saved(self.save_hours) + until_saved(rest)


def interruptions_of(options: RunOptions, hours: float, num_steps: int) -> Interruptions | None:
    """Return the interruptions of a run of `num_steps` steps, or None for a run without steps.

    `hours` is the duration of the run without interruptions.
    """
    if not num_steps or not hours:
        return None
    step_hours = hours / num_steps
    per_day = options.interruptions_per_day
    low, likely, high = ASSUMED_PER_DAY if per_day is None else (per_day,) * 3
    return Interruptions(
        per_hour=(low / HOURS_PER_DAY, likely / HOURS_PER_DAY, high / HOURS_PER_DAY),
        restart_hours=options.restart_minutes / 60,
        save_hours=step_hours * options.steps_between_saves(num_steps, step_hours * 3600),
    )

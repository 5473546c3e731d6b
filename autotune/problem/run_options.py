"""RunOptions: the evaluations, checkpoints and tracker reports between optimizer steps."""

from dataclasses import dataclass

# The supported values of transformers' option `report_to`
TRACKERS = ("none", "wandb", "mlflow", "tensorboard", "trackio")
SAVE_EVERY_S = 1800.0
# The number of checkpoints on disk; a new one is written before the oldest is deleted
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How often a run evaluates and saves, in optimizer steps, and the tracker of its metrics.

    By default, the run saves a checkpoint about every half hour, and evaluates at each save.
    `interruptions_per_day` is the mean number of times a day that the cloud takes a spot instance
    back, or None if the user does not know it. `restart_minutes` is the paid time of each restart.
    """

    eval_steps: int | None = None
    save_steps: int | None = None
    report_to: str = "none"
    interruptions_per_day: float | None = None
    restart_minutes: float = 10.0

    def steps_between_saves(self, num_steps: int, step_time_s: float) -> int:
        """Return the steps between checkpoints; the run of `num_steps` also saves at its end."""
        return max(1, min(self.save_steps or round(SAVE_EVERY_S / step_time_s), num_steps))

    def steps_between_evaluations(self, num_steps: int, step_time_s: float) -> int:
        """Return the steps between evaluations; one evaluation also runs at the end."""
        return max(
            1, min(self.eval_steps or self.steps_between_saves(num_steps, step_time_s), num_steps)
        )

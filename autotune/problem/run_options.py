"""RunOptions: the evaluations, checkpoints and tracker reports between optimizer steps."""

from dataclasses import dataclass

# The names of transformers' `report_to`
TRACKERS = ("none", "wandb", "mlflow", "tensorboard", "trackio")
SAVE_EVERY_S = 1800.0
KEPT_CHECKPOINTS = 2  # the oldest is deleted after another one is written


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The optimizer steps between evaluations and between saves, and the tracker of a run.

    A checkpoint is saved about every half hour by default, and each save has an evaluation.
    """

    eval_steps: int | None = None
    save_steps: int | None = None
    report_to: str = "none"

    def steps_between_saves(self, num_steps: int, step_time_s: float) -> int:
        """Return the steps between checkpoints in a run of `num_steps`; its end is always saved."""
        return max(1, min(self.save_steps or round(SAVE_EVERY_S / step_time_s), num_steps))

    def steps_between_evaluations(self, num_steps: int, step_time_s: float) -> int:
        """Return the steps between evaluations; a run also evaluates at its end."""
        return max(
            1, min(self.eval_steps or self.steps_between_saves(num_steps, step_time_s), num_steps)
        )

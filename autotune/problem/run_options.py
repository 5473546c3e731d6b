"""RunOptions: what the full run does between its optimizer steps: evaluations, checkpoints, reports to a tracker."""

from dataclasses import dataclass

TRACKERS = ("none", "wandb", "mlflow", "tensorboard", "trackio")  # as transformers' report_to names them
SAVE_EVERY_S = 1800.0
KEPT_CHECKPOINTS = 2  # the oldest is deleted once a further one is written


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """When a run evaluates and saves, in optimizer steps, and the tracker (one of TRACKERS) that it reports to.

    Without `save_steps` a checkpoint is saved about every half hour; without `eval_steps` it evaluates as often.
    """

    eval_steps: int | None = None
    save_steps: int | None = None
    report_to: str = "none"

    def steps_between_saves(self, num_steps: int, step_time_s: float) -> int:
        """Optimizer steps from one checkpoint to the next, in a run of `num_steps`; its end is always saved."""
        return max(1, min(self.save_steps or round(SAVE_EVERY_S / step_time_s), num_steps))

    def steps_between_evaluations(self, num_steps: int, step_time_s: float) -> int:
        """Optimizer steps from one evaluation to the next; a run also evaluates at its end."""
        return max(1, min(self.eval_steps or self.steps_between_saves(num_steps, step_time_s), num_steps))

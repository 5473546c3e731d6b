"""The clock of a run by TRL's own script."""

from typing import Any

from autotune.probe.runtime.clock import Clock


class TrlClock(Clock):
    """A clock that ends the last step before the evaluation and the save at the end of the run."""

    num_steps = 0
    tokens_per_step = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
        """Count the tokens of a mean step, padding not included."""
        rows = train_dataloader.dataset
        mean_tokens = sum(map(len, rows["input_ids"])) / len(rows)
        self.tokens_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * mean_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and end it here if it is the last."""
        super().on_step_end(args, state, control)
        self.num_steps = state.global_step
        if self.num_steps == state.max_steps:
            self.mark()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do nothing: the last step has ended already."""

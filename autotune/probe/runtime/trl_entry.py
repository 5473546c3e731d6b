"""TRL's own script with train.py's clock: accelerate's launcher starts this where `trl sft` has it start that script.

The folder it runs in holds `clock.py`, as exported with train.py. Its last line on stdout is what train.py's would be.
"""

import importlib
import json
import runpy
from typing import Any

from autotune.core.process import die_with_parent

STEPS = "steps.jsonl"  # it says there how far it is


def main() -> None:
    die_with_parent()  # the launcher is tied to autotune, and this to it
    from transformers import trainer

    clock: Any = importlib.import_module("clock").Clock

    class Watch(clock):
        """Its last step ends before what is evaluated and saved at the end."""

        def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
            rows = train_dataloader.dataset
            mean = sum(map(len, rows["input_ids"])) / len(rows)
            self.tokens = args.per_device_train_batch_size * args.gradient_accumulation_steps * mean

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            super().on_step_end(args, state, control)
            self.steps = state.global_step
            if self.steps == state.max_steps:
                self.on_step_begin()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            pass

    watch = Watch(False, STEPS)
    trainer.DEFAULT_CALLBACKS.append(watch)
    runpy.run_module("trl.scripts.sft", run_name="__main__", alter_sys=True)
    told = watch.told()
    seconds = told["seconds_per_step"]
    print(json.dumps(told | {"steps": watch.steps, "tokens_per_second": seconds and watch.tokens / seconds}))


if __name__ == "__main__":
    main()

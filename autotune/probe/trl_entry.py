"""Runs TRL's own training script, and times it with the clock of the exported train.py.

accelerate's launcher runs this module in place of the script that `trl sft` would run. The first
argument is the name of the script: sft, dpo, kto or reward. The script trains in the current
folder. The last line of output is JSON, like the last line of train.py.
"""

import json
import runpy
import sys

from autotune.core.process import die_with_parent, pause_garbage_collection

STEPS = "steps.jsonl"  # the file in the current folder that gets a line of JSON after each step


def main() -> None:
    """Train according to the command line, and print the measurements."""
    die_with_parent()  # autotune ends the launcher, and the launcher's end ends this process
    # torch is imported only now: if the launcher ends while torch loads, this process ends too.
    with pause_garbage_collection():
        from transformers import trainer

        from autotune.probe.trl_trainer import TrlClock

    clock = TrlClock(saves=False, progress=STEPS)
    trainer.DEFAULT_CALLBACKS.append(clock)
    runpy.run_module(f"trl.scripts.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)

    measured = clock.measurements()
    seconds = measured["seconds_per_step"]
    tokens_per_second = clock.tokens_per_step / seconds if seconds else None
    print(json.dumps(measured | {"steps": clock.num_steps, "tokens_per_second": tokens_per_second}))


if __name__ == "__main__":
    main()

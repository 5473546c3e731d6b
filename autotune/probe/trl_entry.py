"""TRL's own script, timed by train.py's clock: accelerate's launcher runs this where `trl sft` would run that script.

Its first argument is the name of the script: sft, dpo, kto or reward.

It trains in the current folder. The last line that it prints is the same line of JSON as train.py's.
"""

import json
import runpy
import sys

from autotune.core.process import die_with_parent, loading

STEPS = "steps.jsonl"  # where it reports its progress, in the current folder


def main() -> None:
    """Train as the command line says, and print what was measured."""
    die_with_parent()  # the launcher ends with autotune, and this with the launcher
    # torch loads only now: until then nothing else would end this process with its launcher
    with loading():
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

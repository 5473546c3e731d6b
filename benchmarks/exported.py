"""Write and run exported scripts of configurations that no study measured, with random weights.

Imports no other benchmark, so that it also runs inside the package of another commit
(`gpu_gate_side.py`).
"""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from autotune.core.train_config import TrainConfig
from autotune.export.script import ENCODING, SCRIPT, runtime_files
from autotune.probe.model_settings import model_settings
from autotune.trainer.settings import RunSettings


class RunFailed(Exception):
    """An exported run failed. The message is the last error that it printed."""


def run_settings(
    config: TrainConfig, model_type: str, lengths: list[int], steps: int, *, on_cpu: bool
) -> RunSettings:
    """Return the settings of a run with random weights and one micro batch in each step.

    The examples repeat `lengths` until all steps have their rows. Fields that this version of
    RunSettings lacks are left out.
    """
    per_row = config.seq_len // max(lengths) if config.packing else 1
    values: dict[str, Any] = {
        "about": [],
        "versions": {},
        "model": "random",
        "has_published_weights": False,
        "use_cpu": on_cpu,
        "model_settings": model_settings(config, model_type),
        "accumulation": 1,
        "objective": "sft",
        "loss_on": None,
        "trained_share": 1.0,
        "padded_lengths": [config.seq_len],
        "dealt": False,
        # FSDP2 builds the model as shards, because no GPU needs to hold the whole model.
        "is_larger_than_gpu": config.sharding.startswith("fsdp2"),
        "epochs": 1,
        "warmup_steps": 0,
        "save_steps": steps,
        "save_total_limit": 1,
        "checkpoints_gib": None,
        "eval_share": 0.0,
        "eval_steps": steps,
        "report_to": "none",
        "run_name": "benchmark",
        "examples": steps * config.micro_batch_size * config.num_gpus * per_row,
        "lengths": lengths,
        "images": [],
    }
    found = {}
    for field in fields(RunSettings):
        if field.name in values:
            found[field.name] = values[field.name]
        elif hasattr(config, field.name):
            found[field.name] = getattr(config, field.name)
    return RunSettings(**found)


def write_export(folder: Path, settings: RunSettings, shape: dict[str, Any]) -> None:
    """Write train.py and its files into the folder. `shape` is the content of a config.json."""
    files = {
        "train.py": ENCODING + SCRIPT,
        "train_config.json": settings.to_json(),
        "model_config.json": json.dumps(shape),
        **runtime_files(),
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


def run_export(folder: Path, steps: int, longest_s: float) -> dict[str, Any]:
    """Run the script of the folder with random weights, and return its last line of output.

    Raises RunFailed, and subprocess.TimeoutExpired after `longest_s` seconds.
    """
    command = [sys.executable, "train.py", "--random-weights", "--output-dir", ""]
    done = subprocess.run(
        [*command, "--max-steps", str(steps)],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=longest_s,
    )
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RunFailed((lines or ["no error message"])[-1][:300])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

"""Run an exported script on two ranks many times, stop it or kill its launcher, and look at how the
processes end.

A run hangs if a process of it is left a minute after its last step, or after its stop. An orphan is
a process that is left ten seconds after the launcher's end. Runs are stopped at random: while they
load, or after some steps.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from bench import Mode, finish, run_program, scratch, worker

from autotune.catalog import resolve_device, resolve_model
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all
from autotune.export.run.process import write_files
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from tests.helpers.factories import summary as make_summary

STEPS = 40
STOPPED_BY = {"Ctrl-C": signal.SIGINT, "kill": signal.SIGKILL}
CODES = {"whole": 0, "Ctrl-C": 130, "kill": -signal.SIGKILL}
STRATEGIES: list[dict[str, Any]] = [
    {"sharding": "ddp"},
    {"sharding": "fsdp2"},
    {"sharding": "fsdp2", "offload": True},
]
START_S = 300.0
HANG_S = 60.0
ORPHAN_S = 10.0
COLUMNS = ["strategy", "end", "resumes", "stopped_at", "code", "steps", "end_s", "hangs", "orphans"]


def write_script(folder: Path, device: str, knobs: dict[str, Any]) -> Path:
    """Export the training of a small model on two ranks, and return the script."""
    base = make_summary().recipe
    assert base is not None
    config = TrainConfig(num_gpus=2, micro_batch_size=2, seq_len=32, precision="fp32", **knobs)
    recipe = replace(
        base,
        winner=replace(base.winner, config=config),
        model=resolve_model("demo-3m"),
        device=resolve_device("cpu" if device == "cpu" else "h100-sxm"),
        workload=Workload(examples=400, lengths=Lengths.constant(32), global_batch=8),
    )
    write_files(folder, export_all(recipe, ["train"]))
    return folder / "train.py"


def processes(script: Path) -> list[psutil.Process]:
    """Return the processes of the script: launcher, supervisor, ranks, and their own workers."""
    found = []
    for one in psutil.process_iter(["cmdline", "status"]):
        if (
            str(script) in (one.info["cmdline"] or ())
            and one.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.append(one)
    return found


def wait(until: Callable[[], bool], limit_s: float) -> bool:
    """Wait until a condition holds, and return whether it did within the limit."""
    end = time.monotonic() + limit_s
    while not until():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def started(script: Path, output: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the script, and kill all of its processes at the end."""
    arguments = [
        "--random-weights",
        "--max-steps",
        str(STEPS),
        "--output-dir",
        str(output),
        *options,
    ]
    arguments += ["--progress", str(output.with_suffix(".jsonl"))]
    with (
        output.with_suffix(".log").open("ab") as log,
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as launcher,
    ):
        try:
            yield launcher
        finally:
            for one in processes(script):
                one.kill()


def step_of(output: Path) -> int:
    """Return the last step that a run has reported."""
    file = output.with_suffix(".jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def run_once(
    script: Path, output: Path, end: str, stop_at: tuple[str, float], *options: str
) -> dict[str, Any]:
    """Run the script once, to its end or to a stop, and return a row.

    `stop_at` names the unit (s or steps) and the number after which the run is stopped.
    """
    unit, number = stop_at
    last_step = STEPS if end == "whole" else int(number) if unit == "steps" else 0
    with started(script, output, *options) as launcher:
        if end != "whole" and unit == "s":
            time.sleep(number)
        else:
            wait(lambda: step_of(output) >= last_step or launcher.poll() is not None, START_S)
        began = time.monotonic()
        if end != "whole":
            launcher.send_signal(STOPPED_BY[end])

        wait(lambda: not processes(script), ORPHAN_S)
        code = launcher.poll()
        orphans = processes(script) if code is not None else []
        is_over = wait(lambda: not processes(script), HANG_S - ORPHAN_S)
        end_s = time.monotonic() - began
    return {
        "end": end,
        "stopped_at": None if end == "whole" else f"{number:.3g} {unit}",
        "code": launcher.poll(),
        "steps": step_of(output),
        "end_s": end_s,
        "hangs": int(not is_over),
        "orphans": len(orphans),
    }


def stops(rng: random.Random) -> tuple[str, float]:
    """Choose when to stop a run: three of ten runs while they load."""
    if rng.random() < 0.3:
        return "s", rng.uniform(0.2, 12.0)
    return "steps", rng.randrange(1, STEPS - 8)


def measure(
    args: argparse.Namespace, device: str, strategies: list[dict[str, Any]], plan: list[str]
) -> None:
    """Run the plan: each word is the end of a run, and `+ resume` continues it to its end."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = scratch()
    rng = random.Random(57)
    rows = []
    for number, planned in enumerate(plan):
        knobs = strategies[number % len(strategies)]
        name = " ".join([knobs["sharding"], *(["offload"] if knobs.get("offload") else [])])
        script = write_script(folder / f"{number}" / "export", device, knobs)
        output = folder / f"{number}" / "out"
        end, _, resume = planned.partition(" + ")
        ends = [(end, False), ("whole", True)] if resume else [(end, False)]
        for one, resumes in ends:
            options = ["--resume"] if resumes else []
            row = run_once(script, output, one, stops(rng), *options)
            rows.append({"strategy": name, "resumes": resumes, **row})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if row["code"] != CODES[one]:
                print(output.with_suffix(".log").read_text()[-3000:], file=sys.stderr)
        shutil.rmtree(folder / f"{number}")

    prober = worker(device)
    try:
        fingerprint = prober.fingerprint
    finally:
        prober.close()
    finish(args, fingerprint, rows, COLUMNS)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count hangs and orphans, and return the longest end after Ctrl-C and after the launcher's
    death.
    """
    return {
        "runs": sum(not row["resumes"] for row in rows),
        "resumes": sum(row["resumes"] for row in rows),
        "hangs": sum(row["hangs"] for row in rows),
        "orphans": sum(row["orphans"] for row in rows),
        "other_codes": sum(row["code"] != CODES[row["end"]] for row in rows),
        "end_s_max": max((row["end_s"] for row in rows if row["end"] != "whole"), default=None),
    }


def on_cpu(args: argparse.Namespace) -> None:
    """Run 40 times with two gloo ranks on the CPU, and resume the 20 stopped runs.

    It takes 20 to 30 minutes.
    """
    whole = ["whole"] * (args.runs // 2)
    stopped = ["Ctrl-C + resume", "kill + resume"] * (args.runs // 4)
    measure(args, "cpu", STRATEGIES[:1], whole + stopped)


def on_gpus(args: argparse.Namespace) -> None:
    """Run with NCCL on two GPUs: DDP, FSDP2, and FSDP2 with offload, which has a gloo group too."""
    ends = [end for end in ("whole", "Ctrl-C", "kill", "whole") for _ in STRATEGIES]
    measure(args, "cuda", STRATEGIES[::-1], ends[: args.runs])


MODES = {
    "cpu": Mode(run=on_cpu, result="ranks_end", summarize=summarize, options={"--runs": 40}),
    "gpus": Mode(run=on_gpus, result="ranks_end_gpus", summarize=summarize, options={"--runs": 10}),
}

if __name__ == "__main__":
    run_program(MODES, __doc__)

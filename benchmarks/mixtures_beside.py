"""Measure the speed of a mixture of experts beside other projects' kernels on the same GPU.

The model is Qwen3-30B-A3B with random weights, and LoRA of rank 16 on attention and on every
expert. A step is a whole optimizer step of one micro batch of rows of 1,024 tokens, under the cap
of an 80 GB GPU. Ours is `lora_kernels: grouped`. Each of the others has its own sweep of micro
batches, of recomputation and of its own settings (`mixtures_beside_tool.py`), and its best counts
if its layer of experts agrees with a plain loop. Each project has a process and a folder of
packages (`--sites`) of its own:

    into() { python -m pip install --no-deps --target "sites/$1" "${@:2}"; }
    into axolotl axolotl==0.21.0 addict==2.4.0 liger_kernel==0.8.5
    into unsloth unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 datasets==4.8.5
    into unsloth cut_cross_entropy==25.1.1 msgspec==0.22.0 torchao==0.18.0 multiprocess dill

    python benchmarks/mixtures_beside.py --sites sites --rows earlier.jsonl
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import ROOT, Mode, Rows, finish, run_program, scratch, table
from mixtures import FAST, ON_EXPERTS, QWEN, Case, measure

from autotune import __version__
from autotune.catalog import resolve_model
from autotune.core.train_config import LORA_ALPHA
from autotune.probe.supervisor import WorkerProber

CHILD = Path(__file__).parent / "mixtures_beside_tool.py"
ROW, LOST = "ROW ", 3  # as in the child
RESTARTS = 2
OURS, OTHERS = "autotune", ("unsloth", "axolotl")
OUR_SIZES = (8, 16)
MEMORY_GIB = 79.0
ENOUGH_S = 45.0  # no project is begun with less time than this
GRACE_S = 60.0  # for the configuration that is running when a project's time ends
COLUMNS = ["project", "config", "outcome", "tokens_per_s", "peak_gib", "reason"]


def run(args: argparse.Namespace) -> None:
    """Measure the configurations that have no row yet: ours first, and then each project's."""
    rows = Rows.of(args)
    until = time.monotonic() + args.seconds
    if OURS in args.only:
        measure_ours(rows, until)
    for project in OTHERS:
        if project in args.only and time.monotonic() + ENOUGH_S < until:
            measure_other(rows, project, args, min(until, time.monotonic() + args.limit))
    finish(args, rows.fingerprint, rows.plain, COLUMNS)


def add(rows: Rows, row: dict[str, Any]) -> None:
    """Store a row at once, and print it."""
    rows.add(row)
    table([row], COLUMNS)
    sys.stdout.flush()


def measure_ours(rows: Rows, until: float) -> None:
    """Measure autotune's configurations in one worker. An error becomes a row."""
    cases = [
        Case("ours", QWEN, ON_EXPERTS | FAST | {"micro_batch_size": size}, memory_gib=MEMORY_GIB)
        for size in OUR_SIZES
    ]
    about = {"project": OURS, "version": __version__}
    missing = [case for case in cases if not rows.has(**case.key, outcome="ok")]
    if not missing:
        return
    try:
        with WorkerProber("cuda", scratch()) as prober:
            for case in missing:
                if time.monotonic() < until:
                    add(rows, about | measure(prober, case))
    except Exception as error:  # the other projects are measured nevertheless
        add(rows, about | {"group": "ours", "outcome": "failed", "reason": str(error)[:400]})


def measure_other(rows: Rows, project: str, args: argparse.Namespace, until: float) -> None:
    """Run one project's sweep. After an error of the GPU, the rest runs in another process."""
    ended = ["ok", "oom", "right"]
    for _ in range(1 + RESTARTS):
        limit = until - time.monotonic()
        done = [
            row["config"]
            for row in rows.all
            if row["project"] == project and row["outcome"] in ended
        ]
        if limit < ENOUGH_S or run_child(rows, project, args, limit, done) != LOST:
            return
        ended = [*ended, "failed"]


def run_child(
    rows: Rows, project: str, args: argparse.Namespace, limit: float, done: list[str]
) -> int:
    """Measure a project in its own process, store its rows as they come, and return its status.

    The process begins no configuration after `limit` seconds, and is ended soon after them.
    """
    task = {
        "model": dict(resolve_model(QWEN).config),
        "device": "cuda",
        "rank": 16,
        "alpha": LORA_ALPHA,
        "seq_len": FAST["seq_len"],
        "memory_gib": MEMORY_GIB,
        "micro_batches": args.micro_batches,
        "seconds": limit,
        "done": done,
    }
    folder = scratch()  # some projects write caches where they are started
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    places = [args.sites.absolute() / project, ROOT, os.environ.get("PYTHONPATH", "")]
    log = (args.out or folder) / f"mixtures_beside_{project}.log"
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, str(CHILD), project, str(folder / "task.json")],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            errors="replace",
            start_new_session=True,  # the processes that compile end with it
        )
        timer = threading.Timer(limit + GRACE_S, stop, [process])
        timer.start()
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith(ROW):
                    add(rows, {"group": "others"} | json.loads(line.removeprefix(ROW)))
                else:
                    file.write(line)
        code = process.wait()
        timer.cancel()
    if code and code != LOST:
        said = log.read_text(errors="replace")[-2000:]
        print(f"--- {project}: exit code {code}\n{said}", flush=True)
        row = {"group": "others", "project": project, "config": "process", "outcome": "failed"}
        add(rows, row | {"reason": f"exit code {code}: {said[-300:]}"})
    return code


def stop(process: subprocess.Popen[str]) -> None:
    """End a project's process and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return our best speed over the best speed of the other projects.

    A configuration of another project counts only if its layer was checked.
    """
    ours = [row["tokens_per_s"] for row in rows if row["project"] == OURS and speed(row)]
    best: dict[str, float] = {}
    for row in rows:
        project = row["project"]
        if project != OURS and speed(row) and row["checked"]:
            best[project] = max(row["tokens_per_s"], best.get(project, 0.0))
    theirs = max(best.values(), default=None)
    fastest = max(ours, default=None)
    return {
        "others": len(best),
        "ratio": fastest / theirs if fastest and theirs else None,
        "ours_tokens_per_s": fastest,
        "theirs_tokens_per_s": theirs,
        "best_other": max(best, key=lambda name: best[name], default=None),
        "by_project": best,
    }


def speed(row: dict[str, Any]) -> float | None:
    return row.get("tokens_per_s")


MODES = {
    "": Mode(
        run=run,
        result="mixtures_beside",
        summarize=summarize,
        options={
            "--sites": {
                "type": Path,
                "default": Path("sites"),
                "help": "a folder with a folder of packages for each project",
            },
            "--only": {"nargs": "*", "default": [OURS, *OTHERS], "choices": [OURS, *OTHERS]},
            "--micro-batches": {"nargs": "*", "type": int, "default": [8, 16, 4, 2]},
            "--limit": {"default": 180.0, "help": "seconds of one project"},
            "--rows": None,
            "--seconds": {"type": float, "default": 540.0, "help": "of all"},
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

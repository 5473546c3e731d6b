"""Compare the speed and the memory of two commits on this machine's GPU, in at most nine minutes.

Both commits are measured alternately (old, new, new, old): the start of a command, five probes,
three levers, a mixture of experts and an exported run. Then each commit runs a study of 45 seconds
while time remains. The exit code is 1 if the new commit loses more than 3 % of any speed or needs
more than 0.5 % more memory, and 0 otherwise. A commit is a name of git or a folder with the
package.

`--plant` adds a slowdown or more memory to the new commit's training, to check the gate itself, and
stores a result of its own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import ROOT, Mode, Rows, finish, run_program

OLD, NEW = "old", "new"
TURNS = (OLD, NEW, NEW, OLD)
QUICK = ("start", "probes", "export")
SLOWER, MORE_MEMORY = 0.03, 0.005  # the limits
# A process starts on the host, whose time varies more than the GPU's.
SLOWER_START = 0.10
# Studies may choose winners that are equally fast within the error of the search (`docs/evidence`).
SLOWER_STUDY = 0.05
STUDY_S = 75.0  # a study of 45 seconds, with the start of its process and the confirmation
SECONDS = 530.0
SIDE = Path(__file__).with_name("gpu_gate_side.py")
PLANTED = {
    # The host sleeps for 4 % of each micro batch.
    "slowdown": """

def _slow_down():
    import time

    plain = LeanTrainer.training_step

    def training_step(self, *args, **kwargs):
        began = time.perf_counter()
        loss = plain(self, *args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        time.sleep(0.04 * (time.perf_counter() - began))
        return loss

    LeanTrainer.training_step = training_step


_slow_down()
""",
    # After the first micro batch, the trainer holds 1 % of the peak.
    "memory": """

def _hold_memory():
    plain = LeanTrainer.training_step

    def training_step(self, *args, **kwargs):
        loss = plain(self, *args, **kwargs)
        if not hasattr(self, "planted") and torch.cuda.is_available():
            size = torch.cuda.max_memory_allocated() // 100
            self.planted = torch.empty(size, dtype=torch.uint8, device="cuda")
        return loss

    LeanTrainer.training_step = training_step


_hold_memory()
""",
}
COLUMNS = ("name", "speed_ratio", "memory_ratio", "verdict")


def check_out(commit: str, folder: Path) -> None:
    """Copy the package of a commit, or of a folder, into a folder."""
    if Path(commit).is_dir():
        shutil.copytree(Path(commit) / "autotune", folder / "autotune")
        shutil.copytree(Path(commit) / "search_spaces", folder / "search_spaces")
        return
    folder.mkdir()
    archive = ["git", "-C", str(ROOT), "archive", commit, "autotune", "search_spaces"]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as made:
        subprocess.run(["tar", "-x", "-C", str(folder)], stdin=made.stdout, check=True)
    if made.returncode:
        raise SystemExit(f"{commit} is no commit and no folder")


def plant(folder: Path, kind: str) -> None:
    """Add a known loss to the trainer in the folder."""
    path = folder / "autotune" / "trainer" / "lean_trainer.py"
    path.write_text(path.read_text(encoding="utf-8") + PLANTED[kind], encoding="utf-8")


def run_side(folder: Path, parts: tuple[str, ...], device: str) -> Iterator[dict[str, Any]]:
    """Yield the measurements of a commit as soon as they are made."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(SIDE), "--device", device, *parts]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as side:
        assert side.stdout is not None
        for line in side.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if side.returncode:
        yield {"name": "all", "failed": f"the process ended with code {side.returncode}"}


def run_gate(args: argparse.Namespace) -> None:
    """Measure both commits alternately, and exit with 1 if the new one is slower or needs more."""
    began = time.monotonic()
    if args.plant:
        args.mode = replace(args.mode, result=f"{args.mode.result}_{args.plant}")
    rows = Rows(args.mode.result, args.out, None)
    with tempfile.TemporaryDirectory(prefix="gate-") as temporary:
        folders = {OLD: Path(temporary) / OLD, NEW: Path(temporary) / NEW}
        check_out(args.old, folders[OLD])
        check_out(args.new, folders[NEW])
        if args.plant:
            plant(folders[NEW], args.plant)

        quick = tuple(part for part in QUICK if part in args.parts)
        for turn, side in enumerate(TURNS if quick else ()):
            for row in run_side(folders[side], quick, args.device):
                rows.add({"turn": turn, "side": side, **row})
                print(row, flush=True)
        for turn, side in enumerate(TURNS if "study" in args.parts else ()):
            if time.monotonic() - began + STUDY_S > args.seconds:
                print(f"study {turn + 1}, {side}: no time left", flush=True)
                continue
            for row in run_side(folders[side], ("study",), args.device):
                rows.add({"turn": turn, "side": side, **row})
                print(row, flush=True)

    beside = {"old": args.old, "new": args.new, "planted": args.plant}
    beside["seconds"] = time.monotonic() - began
    finish(args, rows.fingerprint, rows.plain, (), **beside)
    if not args.mode.summarize(rows.all)["passes"]:
        raise SystemExit(1)


def compare(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Compare both sides for one measurement: the means, or the fastest starts of a process.

    Other work on the host only delays a start, so that the fastest one is the least disturbed.
    """
    average = max if name == "start" else statistics.fmean

    def typical(side: str, key: str) -> float | None:
        values = [
            row[key]
            for row in rows
            if row["name"] == name and row["side"] == side and row.get(key) is not None
        ]
        return average(values) if values else None

    def ratio(key: str) -> float | None:
        old, new = typical(OLD, key), typical(NEW, key)
        return new / old if old and new else None

    speed, memory = ratio("speed"), ratio("memory_gib")
    allowed = {"start": SLOWER_START, "study": SLOWER_STUDY}.get(name, SLOWER)
    # A measurement that fails with the new commit only is a loss; a new one has nothing to compare.
    if typical(OLD, "speed") is not None and typical(NEW, "speed") is None:
        verdict = "fails"
    elif speed is None:
        verdict = "not compared"
    elif speed < 1 - allowed:
        verdict = "slower"
    elif memory is not None and memory > 1 + MORE_MEMORY:
        verdict = "more memory"
    else:
        verdict = "passes"
    return {"name": name, "speed_ratio": speed, "memory_ratio": memory, "verdict": verdict}


def summarize_gate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    compared = [compare(rows, name) for name in dict.fromkeys(row["name"] for row in rows)]
    lost = [one for one in compared if one["verdict"] in ("fails", "slower", "more memory")]
    num_passed = sum(one["verdict"] == "passes" for one in compared)
    return {
        "passes": not lost and num_passed > 0,
        "num_passed": num_passed,
        "lost": [f"{one['name']}: {one['verdict']}" for one in lost],
        "not_compared": [one["name"] for one in compared if one["verdict"] == "not compared"],
        "compared": compared,
    }


MODES = {
    "": Mode(
        run=run_gate,
        result="gpu_gate",
        summarize=summarize_gate,
        options={
            "old": {"help": "a commit or a folder"},
            "new": {"help": "a commit or a folder"},
            "--device": "cuda",
            "--parts": {
                "nargs": "+",
                "choices": [*QUICK, "study"],
                "default": [*QUICK, "study"],
                "help": "what to measure",
            },
            "--plant": {"choices": list(PLANTED), "help": "add a loss to the new commit"},
            "--seconds": {"default": SECONDS, "help": "begin no study that would end after this"},
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

"""Run README's study beside a process that uses one core in bursts, and then on a quiet machine.

All studies use two cores and one database. A quiet study's exported script must keep the predicted
speed. A headline beside the busy process must hold for the same two configurations on the quiet
machine, or say that the machine is too unsteady. No quiet study may reuse a disturbed result.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench import (
    Mode,
    fingerprint_of,
    finish,
    run_program,
    run_study,
    save,
    scratch,
    speed,
    worker,
)

from autotune.api import load_study
from autotune.core.train_config import TrainConfig
from autotune.problem.disturbance import ASSUME_QUIET
from autotune.study.storage.probe_store import ProbeStore

STUDY = ["--gpu", "cpu", "--model", "demo-3m", "--examples", "2000", "--epochs", "1"]
CORES = 2
TOLERANCE = 0.15
ALTERNATIONS = 3  # how often winner and baseline of a busy study are measured in turn
COLUMNS = [
    "study",
    "speedup",
    "quiet_speedup",
    "unsteady",
    "trials",
    "disturbed",
    "reused_disturbed",
    "error",
]
# Bursts and pauses of 0.5 to 3 s. The process ends with the one that started it.
BURSTS = """
import os, random, time
parent, rng = os.getppid(), random.Random(57)
while os.getppid() == parent:
    end = time.monotonic() + rng.uniform(0.5, 3.0)
    while time.monotonic() < end:
        pass
    time.sleep(rng.uniform(0.5, 3.0))
"""


@contextmanager
def bursts() -> Iterator[None]:
    """Use one core in bursts meanwhile, in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", BURSTS]) as process:
        try:
            yield
        finally:
            process.kill()


def verified(study: str, url: str, folder: Path) -> dict[str, Any]:
    """Run the exported script of a study's winner, and return the error of its predicted speed."""
    options = [study, "--storage", url, "--tolerance", str(TOLERANCE), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "verify", *options],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    try:
        error = json.loads(done.stdout)["speed_error"]
    except (ValueError, KeyError):  # there was no promise, or the script failed
        error = None
    reasons = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return {"error": error, "reason": next(iter(reasons), None)}


def disturbed_measurements(store: ProbeStore, studies: list[str]) -> set[tuple[float, ...]]:
    """Return the step times of all disturbed results of these studies."""
    results = [row.result for study in studies for row in store.probes_of_study(study)]
    return {one.measurement.step_s for one in results if one.disturbed and one.measurement}


def counts(study: str, url: str, earlier: list[str]) -> dict[str, int]:
    """Count a study's trials, its disturbed results, and the disturbed results that it reused."""
    trials = load_study(study, url).summary.trials
    reused = {row.config for row in trials if row.reused}
    with closing(ProbeStore(url)) as store:
        before = disturbed_measurements(store, earlier)
        own = [row.result for row in store.probes_of_study(study)]
    return {
        "trials": len(trials),
        "reused": len(reused),
        "disturbed": sum(one.disturbed is not None for one in own),
        "reused_disturbed": sum(
            one.disturbed is not None or one.measurement.step_s in before
            for one in own
            if one.measurement and one.config in reused and not one.seconds
        ),
    }


def quiet_speedup(study: str, url: str) -> tuple[float, float] | None:
    """Measure winner and baseline of a study in turn, and return the lowest and highest speed-up.

    The result is None for a study without a headline.
    """
    recipe = load_study(study, url).summary.recipe
    if recipe is None or recipe.baseline is None or recipe.speedup is None:
        return None
    configs = (recipe.config, recipe.baseline.config)
    speeds: dict[TrainConfig, list[float]] = {config: [] for config in configs}
    with worker("cpu") as prober:
        for _ in range(ALTERNATIONS):
            for config in dict.fromkeys(configs):
                row = speed(
                    prober,
                    recipe.model,
                    recipe.device,
                    config,
                    recipe.device.memory_gib,
                    recipe.workload,
                )
                speeds[config].append(row["tokens_per_s"])
    winner, baseline = (speeds[config] for config in configs)
    return min(winner) / max(baseline), max(winner) / min(baseline)


def measure(args: argparse.Namespace) -> None:
    """Run the study `--rounds` times beside bursts, then as often alone.

    It takes about half an hour with the defaults.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    os.environ.pop(ASSUME_QUIET, None)
    folder = args.keep or scratch()
    folder.mkdir(parents=True, exist_ok=True)
    url = f"sqlite:///{folder.resolve()}/autotune.db"
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    fingerprint = None

    for busy in (True, False):
        for number in range(1, args.rounds + 1):
            study = f"{'busy' if busy else 'quiet'}-{number}"
            options = [*STUDY, "--budget", args.budget, "--storage", url, "--study", study]
            with bursts() if busy else nullcontext():
                result = run_study(folder, *options, "--quiet")
            keys = ("speedup", "speedup_interval", "speedup_evidence", "unsteady")
            row = {"study": study, "busy": busy} | {key: result[key] for key in keys}
            row |= counts(study, url, names) | {"error": None, "reason": None}
            row |= {} if busy else verified(study, url, folder)
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
            names.append(study)
            fingerprint = fingerprint_of(result)
            save(args, fingerprint, rows)

    for row in rows:
        row["quiet_speedup"] = quiet_speedup(row["study"], url) if row["busy"] else None
        print(row["study"], row["speedup"], row["quiet_speedup"], file=sys.stderr, flush=True)
    finish(args, fingerprint, rows, COLUMNS)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst error of a quiet study, and count the headlines that were false.

    A headline is false if its interval misses the speed-up of the same two configurations on the
    quiet machine. `weaker` counts true headlines below those of all quiet studies: a busy machine
    leaves time for fewer candidates.
    """
    busy = [row for row in rows if row["busy"]]
    quiet = [row for row in rows if not row["busy"]]
    errors = [abs(row["error"]) for row in quiet if row["error"] is not None]
    intervals = [row["speedup_interval"] for row in quiet if row["speedup_interval"]]
    low = min((interval[0] for interval in intervals), default=None)
    high = max((interval[1] for interval in intervals), default=None)
    headlines = [row for row in busy if row["speedup"] is not None]
    false = [row for row in headlines if not meet(row["speedup_interval"], row["quiet_speedup"])]

    return {
        "rounds": len(quiet),
        "quiet_error_max": max(errors, default=None),
        "quiet_unverified": len(quiet) - len(errors),
        "quiet_headlines": len(intervals),
        "quiet_low": low,
        "quiet_high": high,
        "busy_headlines": len(headlines),
        "false_headlines": len(false),
        "weaker": sum(row["speedup"] < (low or 0.0) for row in headlines if row not in false),
        "disturbed": sum(row["disturbed"] for row in busy),
        "disturbed_quiet": sum(row["disturbed"] for row in quiet),
        "reused_disturbed": sum(row["reused_disturbed"] for row in quiet),
    }


def meet(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two intervals have a value in common."""
    return max(one[0], other[0]) <= min(one[1], other[1])


MODES = {
    "": Mode(
        run=measure,
        result="steady",
        summarize=summarize,
        options={"--rounds": 5, "--budget": "2m", "--keep": None},
    )
}

if __name__ == "__main__":
    run_program(MODES, __doc__)

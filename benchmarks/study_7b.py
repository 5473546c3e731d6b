"""Measure a whole `autotune run` on a 7B model, from the start of the process to the exported files.

The program runs the command in a directory of its own and reads the stored results: how many configurations were
judged, how many full-depth probes ran out of memory, and how many seconds each rung and each phase took.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import run_study, save, table

from autotune.api import load_study
from autotune.core.probe_types import Evidence, Outcome, ProbeResult
from autotune.study.storage.probe_store import ProbeStore

PHASES = ("load", "first_step", "steady", "evaluate", "save", "cleanup", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--budget", default="4m55s")
    parser.add_argument("--keep", type=Path, help="run in this directory and keep the study in it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--gpu", args.gpu, "--model", args.model, "--budget", args.budget]
    url = f"sqlite:///{folder.absolute()}/autotune.db"
    name = f"{args.gpu}-{args.model}"
    options += ["--study", name, "--out", name, "--storage", url]
    begin = time.monotonic()
    result = run_study(folder, *options)
    wall = time.monotonic() - begin

    study = load_study(name, url)
    probes = [row.result for row in ProbeStore(url).of_study(name)]
    launched = [probe for probe in probes if probe.seconds]
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys(map(kind_of, launched)):
        of_kind = [probe for probe in launched if kind_of(probe) == kind]
        seconds: dict[str, float] = defaultdict(float)
        for probe in of_kind:
            for phase, duration in probe.seconds.items():
                seconds[phase] += duration / len(of_kind)
        rows.append(
            {"rung": kind[0], "depth": kind[1], "compiled": kind[2], "probes": len(of_kind)}
            | {phase: seconds.get(phase, 0.0) for phase in PHASES}
        )
    probing = summarize(rows)["probing_seconds"]
    summary = {
        "wall_seconds": wall,
        "configs_judged": result["trials"]["judged"],
        "full_depth_ooms": sum(
            probe.outcome is Outcome.OOM and probe.evidence is Evidence.MEASURED and probe.depth is None
            for probe in probes
        ),
        "speedup": result["speedup"],
        "trials": result["trials"],
        **summarize(rows),
        "seconds_beside_probes": wall - probing,
        "tokens_per_second": result["winner"]["performance"]["tokens_per_second"],
        "exported": sorted(path.name for path in (folder / name / "export").iterdir()),
    }
    save("study_7b", study.record.fingerprint, summary, rows, args.out)
    table(rows, ["rung", "depth", "compiled", "probes", *PHASES])
    print(json.dumps(summary, indent=1))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"probing_seconds": sum(row["probes"] * row["total"] for row in rows)}


def kind_of(probe: ProbeResult) -> tuple[str, int | None, bool]:
    """The rung of a probe, its depth, and whether its layers were compiled."""
    return probe.rung.value, probe.depth, probe.config.compile != "none"


if __name__ == "__main__":
    main()

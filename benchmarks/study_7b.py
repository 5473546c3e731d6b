"""The whole of `autotune run` on a 7B model, from the start of the process to the exported files: what did it take?

Runs the command as a person would, in a directory of its own, then reads what it stored: how many configurations
were judged, how many full-depth probes ran out of memory, and where the seconds went, by rung and by what they were
spent on.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import save, studied, table

from autotune.api import load_study
from autotune.core.probe_types import Evidence, Fingerprint, Outcome
from autotune.core.serialization import from_data
from autotune.study.storage.probe_store import ProbeStore

SPENT_ON = ("load", "first_step", "steady", "evaluate", "save", "cleanup", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--budget", default="4m55s")
    parser.add_argument("--keep", type=Path, help="a directory to run in, and to leave the study in")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--gpu", args.gpu, "--model", args.model, "--budget", args.budget]
    url = f"sqlite:///{folder.absolute()}/autotune.db"
    name = f"{args.gpu}-{args.model}"
    options += ["--study", name, "--out", name, "--storage", url]
    begin = time.monotonic()
    said = studied(folder, *options)
    wall = time.monotonic() - begin

    study = load_study(name, url)
    probes = [row.result for row in ProbeStore(url).of_study(name)]
    launched = [one for one in probes if one.seconds]
    rows: list[dict[str, Any]] = []
    for kind in dict.fromkeys((one.rung.value, one.depth, one.config.compile != "none") for one in launched):
        of_kind = [one for one in launched if (one.rung.value, one.depth, one.config.compile != "none") == kind]
        seconds: dict[str, float] = defaultdict(float)
        for one in of_kind:
            for phase, spent in one.seconds.items():
                seconds[phase] += spent / len(of_kind)
        rows.append(
            {"rung": kind[0], "depth": kind[1], "compiled": kind[2], "probes": len(of_kind)}
            | {phase: seconds.get(phase, 0.0) for phase in SPENT_ON}
        )
    probing = sum(one.seconds.get("total", 0.0) for one in launched)
    summary = {
        "wall_seconds": wall,
        "configs_judged": said["trials"]["judged"],
        "full_depth_ooms": sum(
            one.outcome is Outcome.OOM and one.evidence is Evidence.MEASURED and one.depth is None for one in probes
        ),
        "speedup": said["speedup"],
        "trials": said["trials"],
        "probing_seconds": probing,
        "seconds_beside_probes": wall - probing,
        "tokens_per_second": said["winner"]["performance"]["tokens_per_second"],
        "exported": sorted(path.name for path in (folder / name / "export").iterdir()),
    }
    fingerprint: Fingerprint = from_data(Fingerprint, study.facts["fingerprint"])
    save("study_7b", fingerprint, summary, rows, args.out)
    table(rows, ["rung", "depth", "compiled", "probes", *SPENT_ON])
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()

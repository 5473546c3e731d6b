"""Count how many configurations short studies judge where rows are long and whole models are slow.

The lengths are drawn here, with a fixed seed: 3,000 examples of 376 tokens on average, 4,096 at most. Two studies by
the command line tune for them: full fine-tuning of a 1.5B in one minute, and QLoRA of a 70B in three and a half. A
probe of the whole 70B takes up to a minute, so that a search that measures whole models would end with the baseline.

`--gpu cpu --model demo-3m --space cpu` replaces card and models, for a try on a CPU.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import run_study, save, table

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data

NUM_EXAMPLES, MEAN, LONGEST, SEED = 3_000, 376, 4_096, 22
SIGMA = 1.0  # of the log-normal distribution
STUDIES: dict[str, tuple[str, str, str]] = {  # model, space, budget
    "small": ("qwen2.5-1.5b", "full", "60s"),
    "large": ("llama-3.1-70b", "qlora", "3m30s"),
}
COLUMNS = ["study", "judged", "seconds", "winner", "tokens_per_s", "mfu", "evidence", "baseline_evidence", "speedup"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--model", help="use this model in both studies")
    parser.add_argument("--space", help="use this search space in both studies")
    parser.add_argument("--budget", help="use this budget in both studies")
    parser.add_argument("--studies", nargs="*", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--keep", type=Path, help="run in this directory and keep the studies in it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.absolute() / "lengths.txt"
    path.write_text("".join(f"{length}\n" for length in long_tailed_lengths()))
    rows: list[dict[str, Any]] = []
    fingerprint: dict[str, Any] = {}
    for name in args.studies:
        model, space, budget = STUDIES[name]
        options = ["--gpu", args.gpu, "--model", args.model or model, "--space", args.space or space]
        options += ["--budget", args.budget or budget, "--lengths", str(path), "--study", name, "--out", name]
        begin = time.monotonic()
        study = run_study(folder, *options, "--storage", f"sqlite:///{folder.absolute()}/autotune.db")
        rows.append(row_of(name, study) | {"seconds": time.monotonic() - begin})
        fingerprint = {key: value for key, value in study["fingerprint"].items() if key != "digest"}
        table(rows[-1:], COLUMNS)
    save("long_tails", from_data(Fingerprint, fingerprint), summarize(rows), rows, args.out)
    print(summarize(rows))


def long_tailed_lengths() -> list[int]:
    """Log-normal lengths from 16 tokens on, scaled until their mean is MEAN; the longest example has LONGEST tokens."""
    generator = random.Random(SEED)
    drawn = [generator.lognormvariate(0.0, SIGMA) for _ in range(NUM_EXAMPLES - 1)]

    def scaled(median: float) -> list[int]:
        return [*(min(LONGEST, max(16, round(median * value))) for value in drawn), LONGEST]

    low, high = 1.0, float(LONGEST)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.fmean(scaled(middle)) < MEAN else (low, middle)
    return scaled(high)


def row_of(name: str, study: dict[str, Any]) -> dict[str, Any]:
    """What a study found, from its summary."""
    winner, baseline = study["winner"], study["baseline"]
    return {
        "study": name,
        "model": study["model"],
        "judged": study["trials"]["judged"],
        "trials": study["trials"],
        "winner": winner["config"],
        "tokens_per_s": winner["performance"]["tokens_per_second"],
        "mfu": winner["performance"]["mfu"],
        "evidence": winner["evidence"],
        "baseline": baseline and baseline["config"],
        "baseline_evidence": baseline and baseline["evidence"],
        "baseline_tokens_per_s": baseline and baseline["performance"]["tokens_per_second"],
        "speedup": study["speedup"],
        "caveats": study["caveats"],
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_study = {row["study"]: row for row in rows}
    small, large = by_study.get("small", {}), by_study.get("large", {})
    return {
        "small_judged": small.get("judged"),
        "large_judged": large.get("judged"),
        "large_mfu": large.get("mfu"),
        "small_speedup": small.get("speedup"),
        "large_speedup": large.get("speedup"),
    }


if __name__ == "__main__":
    main()

"""Compare the peaks of memory that `autotune plan --spec` predicts with those that others published of one GPU.

The rows are the suites of other stacks in `studies/published`, which say where they stand and what their sources left
out. Rows that no configuration of autotune expresses are excluded, each with its reason. An error is the prediction
divided by what was published, minus 1. A verdict is wrong where the opposite was seen; within the error of the
prediction there is none. No GPU is needed.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import save, table

from autotune.catalog import resolve_device
from autotune.core.probe_types import Outcome
from autotune.planning.named_estimates import estimate_named_configs
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.study_spec import Published, make_spec, shipped_suites

SUITES = ["torchtune-llama-3.2-3b", "litgpt-a10g", "fms-mistral-7b", "qwen-7b", "axolotl-qlora"]
SUITES += ["llamafactory-llama-2-7b"]
COLUMNS = ["source", "model", "config", "published", "predicted", "error", "verdict"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [row for suite in SUITES for row in compare(suite)]
    table([row for row in rows if row["excluded"] is None], COLUMNS)
    save("plan_published", None, summarize(rows), rows, args.out)
    print(summarize(rows))


def compare(suite: str) -> Iterator[dict[str, Any]]:
    """The published rows of a suite with their predictions. A published peak of None is out of memory."""
    spec = make_spec(shipped_suites()[suite], {})
    for result in estimate_named_configs(spec, device=resolve_device(spec.gpu), counted=True):
        case, theirs = result.case, result.case.published or Published()
        published = theirs.peak_gib if theirs.process_gib is None else theirs.process_gib
        row = {"source": suite.partition("-")[0], "gpu": spec.gpu, "model": case.model or spec.model}
        row |= {"config": result.config.label(), "published": published, "excluded": case.excluded}
        if row["excluded"] is None and result.outcome is Outcome.REFUSED:
            row["excluded"] = "no formula and no count"
        if row["excluded"] is None:
            predicted = result.peak_allocated_gib if theirs.process_gib is None else result.with_context_gib
            verdict = TIGHT if result.tight else FITS if result.outcome is Outcome.OK else OOM
            row |= {
                "predicted": predicted,
                "error": None if published is None or predicted is None else predicted / published - 1,
                "verdict": verdict,
                "wrong": verdict == (FITS if published is None else OOM),
            }
        yield row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`by_source` are the largest errors."""
    compared = [row for row in rows if row["excluded"] is None]
    errors: dict[str, list[float]] = {source: [] for source in dict.fromkeys(row["source"] for row in compared)}
    for row in compared:
        if row["error"] is not None:
            errors[row["source"]].append(abs(row["error"]))
    every = [error for of_source in errors.values() for error in of_source]
    return {
        "rows": len(rows),
        "excluded": len(rows) - len(compared),
        "memory_error_median": statistics.median(every),
        "memory_error_max": max(every),
        "by_source": {source: max(of_source) for source, of_source in errors.items()},
        "verdicts_wrong": sum(row["wrong"] for row in compared),
    }


if __name__ == "__main__":
    main()

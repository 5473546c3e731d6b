"""How well is a speed carried from one card to another? Held against what others published of one workload on two.

Uncalibrated: from data sheets alone. The exponents of `speed_transfer` are rounded from such fits as are made here
with each set left out in turn (least absolute deviations, each pair of cards of a set counting once), and the summary
tells the error of these fits on the sets that they have not seen. Calibrated: each row is foretold from one other row
of the same set, that is of the same method, on the same two cards. Needs no GPU.
"""

import argparse
import itertools
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import save, table

from autotune.catalog import resolve_device
from autotune.core.files import load_yaml
from autotune.prediction.transfer import speed_transfer

PAIRS = Path(__file__).with_name("data") / "published_pairs.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One workload of a set on two cards; `ratio` is the speed on `target` over that on `source`."""

    set: str
    workload: str
    precision: str
    source: str
    target: str
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pairs = read()
    rows = [selection(pair, pairs) for pair in pairs]
    errors = [abs(row["error"]) for row in rows]
    calibrated = [error for row in rows for error in row["calibrated_errors"]]
    widths = [row["half_width"] for row in rows]
    by_set = {name: [row for row in rows if row["set"] == name] for name in dict.fromkeys(row["set"] for row in rows)}
    summary = {
        "pairs": len(rows),
        "sets": len(by_set),
        "error_mean_uncalibrated": statistics.fmean(errors),
        "error_mean_of_sets_uncalibrated": statistics.fmean(
            statistics.fmean(abs(row["error"]) for row in found) for found in by_set.values()
        ),
        "error_mean_of_unseen_sets": statistics.fmean(
            abs(math.exp(told) / pair.ratio - 1)
            for name in by_set
            for fit in [fitted([pair for pair in pairs if pair.set != name])]
            for pair in pairs
            if pair.set == name
            for told in [float(fit @ np.array(logs(pair)))]
        ),
        "exponents_of_all_sets": [round(float(one), 3) for one in fitted(pairs)],
        "error_median_uncalibrated": statistics.median(errors),
        "error_max_uncalibrated": max(errors),
        "error_mean_calibrated": statistics.fmean(calibrated),
        "calibrations": len(calibrated),
        "coverage_80": statistics.fmean(row["inside"] for row in rows),
        "coverage_80_calibrated": statistics.fmean(inside for row in rows for inside in row["calibrated_inside"]),
        "half_width_median": statistics.median(widths),
        "half_width_median_calibrated": statistics.median(row["half_width_calibrated"] for row in rows),
        "error_mean_by_geometric_mean": statistics.fmean(abs(row["geometric_mean_error"]) for row in rows),
        "error_mean_by_flops": statistics.fmean(abs(row["flops_error"]) for row in rows),
    }
    table(
        [
            {
                "set": name,
                "pairs": len(found),
                "error": statistics.fmean(abs(row["error"]) for row in found),
                "bias": statistics.fmean(row["error"] for row in found),
                "inside": statistics.fmean(row["inside"] for row in found),
                "calibrated": statistics.fmean([e for row in found for e in row["calibrated_errors"]] or [math.nan]),
            }
            for name, found in by_set.items()
        ],
        ["set", "pairs", "error", "bias", "inside", "calibrated"],
    )
    save("projection", None, summary, rows, args.out)
    print(summary)


def read() -> list[Pair]:
    """Every pair of cards of every workload, the one that is faster on paper as the target."""
    pairs = []
    for one in load_yaml(PAIRS.read_text(encoding="utf-8"))["sets"]:
        workloads: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in one["rows"]:
            workloads[row["workload"]].append(row)
        for workload, found in workloads.items():
            for first, second in itertools.combinations(found, 2):
                precision = one["precision"] if one["precision"] == "fp8" else "bf16"
                expected = speed_transfer(
                    resolve_device(first["device"]), resolve_device(second["device"]), precision=precision
                )
                if expected is None:
                    continue
                if expected.ratio < 1:
                    first, second = second, first
                pairs.append(
                    Pair(
                        set=one["name"],
                        workload=workload,
                        precision=precision,
                        source=first["device"],
                        target=second["device"],
                        ratio=second["throughput"] / first["throughput"],
                    )
                )
    return pairs


def logs(pair: Pair) -> tuple[float, float]:
    """Logarithms of the ratios of peaks and of bandwidths."""
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    name = "fp8_tflops" if pair.precision == "fp8" else "fp16_tflops"
    peaks = getattr(target, name) / getattr(source, name)
    return math.log(peaks), math.log((target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan))


def fitted(pairs: list[Pair]) -> Any:
    """The two exponents, by iteratively reweighted least squares."""
    counts = Counter((pair.set, pair.source, pair.target) for pair in pairs)
    weights = np.array([1 / counts[pair.set, pair.source, pair.target] for pair in pairs])
    known, told = np.array([logs(pair) for pair in pairs]), np.array([math.log(pair.ratio) for pair in pairs])
    scale = weights
    for _ in range(50):
        fit, *_ = np.linalg.lstsq(known * np.sqrt(scale)[:, None], told * np.sqrt(scale), rcond=None)
        scale = weights / (np.abs(known @ fit - told) + 1e-3)
    return fit


def selection(pair: Pair, pairs: list[Pair]) -> dict[str, Any]:
    """The projection against what was published, without it and after each one other row of its method and cards."""
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    alike = [
        one
        for one in pairs
        if one != pair and (one.set, one.source, one.target) == (pair.set, pair.source, pair.target)
    ]
    carried = speed_transfer(source, target, precision=pair.precision)
    assert carried is not None
    after = [speed_transfer(source, target, [one.ratio], precision=pair.precision) for one in alike]
    known = [one for one in after if one is not None]
    flops = (target.fp16_tflops or math.nan) / (source.fp16_tflops or math.nan)
    bandwidth = (target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan)
    low, high = carried.interval
    narrow = (known[0] if known else carried).interval
    return {
        "set": pair.set,
        "workload": pair.workload,
        "source": pair.source,
        "target": pair.target,
        "ratio": pair.ratio,
        "projected": carried.ratio,
        "error": carried.ratio / pair.ratio - 1,
        "inside": low <= pair.ratio <= high,
        "half_width": (high - low) / 2 / carried.ratio,
        "calibrated_errors": [abs(one.ratio / pair.ratio - 1) for one in known],
        "calibrated_inside": [one.interval[0] <= pair.ratio <= one.interval[1] for one in known],
        "half_width_calibrated": (narrow[1] - narrow[0]) / 2 / (known[0] if known else carried).ratio,
        "geometric_mean_error": math.sqrt(flops * bandwidth) / pair.ratio - 1,
        "flops_error": flops / pair.ratio - 1,
    }


if __name__ == "__main__":
    main()

"""Measure how well a speed on one card predicts the speed on another, with published pairs of measurements.

Uncalibrated projections use data sheets only. The exponents of `speed_transfer` are rounded from fits of least absolute
deviations, in which each pair of cards of a set counts once. The benchmark repeats the fit with each set left out and
reports the error on that set. Calibrated projections also use one other row of the same set, and so of the same method,
on the same two cards. The benchmark needs no GPU.
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
from autotune.prediction.transfer import interval, speed_transfer

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
    exponents = {name: fit_exponents([pair for pair in pairs if pair.set != name]) for name in {p.set for p in pairs}}
    rows = [compare(pair, pairs, exponents[pair.set]) for pair in pairs]
    table(
        [
            {
                "set": name,
                "pairs": len(members),
                "error": statistics.fmean(abs(row["error"]) for row in members),
                "bias": statistics.fmean(row["error"] for row in members),
                "inside": statistics.fmean(row["inside"] for row in members),
                "calibrated": statistics.fmean(
                    [error for row in members for error in row["calibrated_errors"]] or [math.nan]
                ),
            }
            for name, members in by_set(rows).items()
        ],
        ["set", "pairs", "error", "bias", "inside", "calibrated"],
    )
    summary = summarize(rows) | {"exponents_of_all_sets": [round(float(value), 3) for value in fit_exponents(pairs)]}
    save("projection", None, summary, rows, args.out)
    print(summary)


def by_set(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [row for row in rows if row["set"] == name] for name in dict.fromkeys(row["set"] for row in rows)}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize all pairs, where large sets count most; `_of_sets` is the mean over sets, each of which counts once.

    The next user's method is a set of its own, unlike the pairs of a set: `_of_unseen_sets` also takes the exponents
    from the other sets.
    """
    errors = [abs(row["error"]) for row in rows]
    calibrated = [error for row in rows for error in row["calibrated_errors"]]
    inside = [inside for row in rows for inside in row["calibrated_inside"]]

    def of_sets(name: str) -> float:
        """The mean over sets of a column, whose cells are numbers or lists of numbers."""
        cells = [[row[name] for row in members] for members in by_set(rows).values()]
        flat = [
            [value for cell in of_set for value in (cell if isinstance(cell, list) else [cell])] for of_set in cells
        ]
        return statistics.fmean(statistics.fmean(map(abs, values)) for values in flat if values)

    return {
        "pairs": len(rows),
        "sets": len(by_set(rows)),
        "error_mean_uncalibrated": statistics.fmean(errors),
        "error_mean_of_sets_uncalibrated": of_sets("error"),
        "error_mean_of_unseen_sets": statistics.fmean(abs(row["unseen_error"]) for row in rows),
        "error_mean_of_sets_of_unseen_sets": of_sets("unseen_error"),
        "error_median_uncalibrated": statistics.median(errors),
        "error_max_uncalibrated": max(errors),
        "error_mean_calibrated": statistics.fmean(calibrated),
        "error_mean_of_sets_calibrated": of_sets("calibrated_errors"),
        "calibrations": len(calibrated),
        "coverage_80": statistics.fmean(row["inside"] for row in rows),
        "coverage_80_of_sets": of_sets("inside"),
        "coverage_80_of_unseen_sets": of_sets("unseen_inside"),
        "coverage_80_calibrated": statistics.fmean(inside),
        "coverage_80_of_sets_calibrated": of_sets("calibrated_inside"),
        "half_width_median": statistics.median(row["half_width"] for row in rows),
        "half_width_median_calibrated": statistics.median(row["half_width_calibrated"] for row in rows),
        "error_mean_by_geometric_mean": statistics.fmean(abs(row["geometric_mean_error"]) for row in rows),
        "error_mean_by_flops": statistics.fmean(abs(row["flops_error"]) for row in rows),
    }


def read() -> list[Pair]:
    """Read every pair of cards of every workload. The card with the better data sheet is the target."""
    pairs = []
    for published in load_yaml(PAIRS.read_text(encoding="utf-8"))["sets"]:
        workloads: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in published["rows"]:
            workloads[row["workload"]].append(row)
        for workload, rows in workloads.items():
            for first, second in itertools.combinations(rows, 2):
                precision = published["precision"] if published["precision"] == "fp8" else "bf16"
                expected = speed_transfer(
                    resolve_device(first["device"]), resolve_device(second["device"]), precision=precision
                )
                if expected is None:
                    continue
                if expected.ratio < 1:
                    first, second = second, first
                pairs.append(
                    Pair(
                        set=published["name"],
                        workload=workload,
                        precision=precision,
                        source=first["device"],
                        target=second["device"],
                        ratio=second["throughput"] / first["throughput"],
                    )
                )
    return pairs


def logs(pair: Pair) -> tuple[float, float]:
    """Logarithms of the ratios of peak throughput and of memory bandwidth, target over source."""
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    name = "fp8_tflops" if pair.precision == "fp8" else "fp16_tflops"
    peaks = getattr(target, name) / getattr(source, name)
    return math.log(peaks), math.log((target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan))


def fit_exponents(pairs: list[Pair]) -> Any:
    """Fit the two exponents by iteratively reweighted least squares."""
    counts = Counter((pair.set, pair.source, pair.target) for pair in pairs)
    weights = np.array([1 / counts[pair.set, pair.source, pair.target] for pair in pairs])
    inputs = np.array([logs(pair) for pair in pairs])
    targets = np.array([math.log(pair.ratio) for pair in pairs])
    scale = weights
    for _ in range(50):
        fit, *_ = np.linalg.lstsq(inputs * np.sqrt(scale)[:, None], targets * np.sqrt(scale), rcond=None)
        scale = weights / (np.abs(inputs @ fit - targets) + 1e-3)
    return fit


def compare(pair: Pair, pairs: list[Pair], exponents: Any) -> dict[str, Any]:
    """Compare projections with a published ratio: from data sheets, and calibrated by each similar row.

    `exponents` were fitted without the set of this pair (`unseen_`).
    """
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    alike = [
        other
        for other in pairs
        if other != pair and (other.set, other.source, other.target) == (pair.set, pair.source, pair.target)
    ]
    uncalibrated = speed_transfer(source, target, precision=pair.precision)
    assert uncalibrated is not None
    transfers = [speed_transfer(source, target, [other.ratio], precision=pair.precision) for other in alike]
    calibrated = [transfer for transfer in transfers if transfer is not None]
    example = calibrated[0] if calibrated else uncalibrated
    flops = (target.fp16_tflops or math.nan) / (source.fp16_tflops or math.nan)
    bandwidth = (target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan)
    low, high = uncalibrated.interval
    narrow = example.interval
    unseen = math.exp(float(exponents @ np.array(logs(pair))))
    low_unseen, high_unseen = interval(unseen, uncalibrated.error)
    return {
        "set": pair.set,
        "workload": pair.workload,
        "source": pair.source,
        "target": pair.target,
        "ratio": pair.ratio,
        "projected": uncalibrated.ratio,
        "error": uncalibrated.ratio / pair.ratio - 1,
        "inside": low <= pair.ratio <= high,
        "unseen_error": unseen / pair.ratio - 1,
        "unseen_inside": low_unseen <= pair.ratio <= high_unseen,
        "half_width": (high - low) / 2 / uncalibrated.ratio,
        "calibrated_errors": [abs(transfer.ratio / pair.ratio - 1) for transfer in calibrated],
        "calibrated_inside": [transfer.interval[0] <= pair.ratio <= transfer.interval[1] for transfer in calibrated],
        "half_width_calibrated": (narrow[1] - narrow[0]) / 2 / example.ratio,
        "geometric_mean_error": math.sqrt(flops * bandwidth) / pair.ratio - 1,
        "flops_error": flops / pair.ratio - 1,
    }


if __name__ == "__main__":
    main()

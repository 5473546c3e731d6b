"""Measure how well a speed on one card predicts the speed on another, with published pairs of measurements.

Uncalibrated projections use data sheets only. The published tables do not say which share of the time products take:
the same share on the reference card is assumed for all, and fitted with the exponents of peak and power, by least
absolute deviations in which each pair of cards of a set counts once. The benchmark repeats the fit with each set left
out and reports the error on that set. Calibrated projections also use one other row of the same set, and so of the same
method, on the same two cards. The benchmark needs no GPU.
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

from autotune.catalog import DeviceSpec, resolve_device
from autotune.core.files import load_yaml
from autotune.prediction.transfer import (
    OF_MEMORY,
    REFERENCE,
    USUAL_SHARE,
    SpeedTransfer,
    interval,
    peak_tflops,
    same_chip,
    speed_transfer,
)

EXPONENTS = [round(0.1 * step, 1) for step in range(11)]
SHARES = EXPONENTS[1:-1]
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
    predicted = grid(pairs)
    fits = {name: fit([pair.set != name for pair in pairs], pairs, predicted) for name in {pair.set for pair in pairs}}
    rows = [compare(pair, pairs, math.exp(predicted[fits[pair.set]][index])) for index, pair in enumerate(pairs)]
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
    *exponents, share = fit([True] * len(pairs), pairs, predicted)
    summary = summarize(rows) | {"exponents_of_all_sets": exponents, "share_of_all_sets": share}
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
                if expected.ratio(0.5) < 1:
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


def grid(pairs: list[Pair]) -> dict[tuple[float, ...], Any]:
    """The logarithms of the ratios by exponents of peak and power, and the share of products on the reference card."""
    at = [np.array([rates(pair, name) for pair in pairs]).T for name in ("source", "target")]
    alike = [same_chip(resolve_device(pair.source), resolve_device(pair.target)) for pair in pairs]
    at[1][2] = at[0][2] * (at[1][2] / at[0][2]) ** np.where(alike, OF_MEMORY, 1.0)
    found = {}
    for of_peak, of_power, share in itertools.product(EXPONENTS, EXPONENTS, SHARES):
        slow, fast = (share / (peak**of_peak * power**of_power) + (1 - share) / moved for peak, power, moved in at)
        found[of_peak, of_power, share] = np.log(slow / fast)
    return found


def rates(pair: Pair, name: str) -> tuple[float, float, float]:
    """Peak, power and bandwidth of a card, over those of the reference card."""
    card, reference = (
        [peak_tflops(device, pair.precision) or math.nan, device.tdp_w or math.nan, device.bandwidth_gb_s or math.nan]
        for device in (resolve_device(getattr(pair, name)), resolve_device(REFERENCE))
    )
    peak, power, bandwidth = (one / other for one, other in zip(card, reference, strict=True))
    return peak, power, bandwidth


def fit(chosen: list[bool], pairs: list[Pair], predicted: dict[tuple[float, ...], Any]) -> tuple[float, ...]:
    """The exponents and the share with the least absolute deviations from the chosen pairs."""
    counts = Counter((pair.set, pair.source, pair.target) for pair in pairs)
    weights = [one / counts[pair.set, pair.source, pair.target] for one, pair in zip(chosen, pairs, strict=True)]
    ratios = np.log([pair.ratio for pair in pairs])
    return min(predicted, key=lambda one: float(np.array(weights) @ np.abs(predicted[one] - ratios)))


def projected(transfer: SpeedTransfer, source: DeviceSpec, precision: str) -> float:
    """The ratio of speeds for work that spends the usual share of its time on the reference card in products."""
    on_source = speed_transfer(resolve_device(REFERENCE), source, precision=precision)
    assert on_source is not None
    products, rest = USUAL_SHARE / on_source.products, (1 - USUAL_SHARE) / on_source.bytes
    return transfer.ratio(products / (products + rest))


def compare(pair: Pair, pairs: list[Pair], unseen: float) -> dict[str, Any]:
    """Compare projections with a published ratio: from data sheets, and calibrated by each similar row.

    `unseen` is the ratio by a fit without the set of this pair.
    """
    source, target = resolve_device(pair.source), resolve_device(pair.target)
    alike = [
        other
        for other in pairs
        if other != pair and (other.set, other.source, other.target) == (pair.set, pair.source, pair.target)
    ]
    uncalibrated = speed_transfer(source, target, precision=pair.precision)
    assert uncalibrated is not None
    ratio = projected(uncalibrated, source, pair.precision)
    transfers = [speed_transfer(source, target, [other.ratio / ratio], precision=pair.precision) for other in alike]
    calibrated = [
        (projected(transfer, source, pair.precision), transfer.error) for transfer in transfers if transfer is not None
    ]
    flops = (target.fp16_tflops or math.nan) / (source.fp16_tflops or math.nan)
    bandwidth = (target.bandwidth_gb_s or math.nan) / (source.bandwidth_gb_s or math.nan)
    low, high = interval(ratio, uncalibrated.error)
    narrow = interval(1.0, calibrated[0][1] if calibrated else uncalibrated.error)
    low_unseen, high_unseen = interval(unseen, uncalibrated.error)
    return {
        "set": pair.set,
        "workload": pair.workload,
        "source": pair.source,
        "target": pair.target,
        "ratio": pair.ratio,
        "projected": ratio,
        "error": ratio / pair.ratio - 1,
        "inside": low <= pair.ratio <= high,
        "unseen_error": unseen / pair.ratio - 1,
        "unseen_inside": low_unseen <= pair.ratio <= high_unseen,
        "half_width": (high - low) / 2 / ratio,
        "calibrated_errors": [abs(value / pair.ratio - 1) for value, _ in calibrated],
        "calibrated_inside": [low <= pair.ratio <= high for low, high in itertools.starmap(interval, calibrated)],
        "half_width_calibrated": (narrow[1] - narrow[0]) / 2,
        "geometric_mean_error": math.sqrt(flops * bandwidth) / pair.ratio - 1,
        "flops_error": flops / pair.ratio - 1,
    }


if __name__ == "__main__":
    main()

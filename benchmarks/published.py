"""The estimates of memory and speed, compared with runs that others published."""

import statistics
from collections.abc import Iterator
from typing import Any

from bench import DATA, load

from autotune.catalog import resolve_device
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.core.probe_types import Outcome
from autotune.core.units import GIB
from autotune.planning.named_estimates import estimate_named_configs
from autotune.prediction.transfer import is_measured_kind
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.study_spec import NamedConfig, Published, StudySpec, make_spec, shipped_suites
from autotune.study.named_configs import SPEEDS, ConfigResult

RUNS = DATA / "published_2026.yaml"
LARGE = 0.15  # a relative error of memory whose cause is asked for
NEAR = 0.1  # the goal for most errors of memory on several GPUs
UNKNOWN_LENGTHS = "the source does not say how long its rows are"
WIDEST = 0.3  # half of an interval, relative to the speed
# The causes of wider intervals
NO_PAIR = "no published pair of speeds has a card of this kind, so data sheets alone give its speed"
UNKNOWN_OVERLAP = "how much of the communication overlaps with computation is not known"
CPU_BOUND = 0.1  # a larger share of the host says little about the GPU


def suite_rows() -> Iterator[dict[str, Any]]:
    """Yield the runs of the shipped suites that others published, with their estimates."""
    for name, path in shipped_suites().items():
        spec = make_spec(path, {})
        if "https://" not in (spec.source or ""):  # no reader could look up the numbers
            continue
        estimates = estimate_named_configs(spec, device=resolve_device(spec.gpu), counted=True)
        for found in estimates:
            model = found.case.model or spec.model
            yield compare(name.partition("-")[0], spec.gpu, model, found)


def run_rows() -> Iterator[dict[str, Any]]:
    """Yield the runs in `data/published_2026.yaml`, with their estimates."""
    for row in load(RUNS):
        excluded = row.get("excluded")
        gpu, model = row.get("gpu", "h100"), row.get("model", "llama-2-7b")
        case = NamedConfig(
            name=row["name"],
            model=model,
            model_overrides=row.get("model_overrides", {}),
            knobs=row.get("config", {"method": "lora"}),
            accumulation=row.get("accumulation", 1),
            trainer=OtherTrainer(**row.get("trainer", {})),
            published=_stated(row),
            excluded=excluded,
        )
        spec = StudySpec(
            model=model,
            gpu=gpu,
            objective=row.get("objective", "sft"),
            headroom=0.0,
            configs=(case,),
        )
        [found] = estimate_named_configs(spec, device=resolve_device(gpu), counted=True)
        cause = row.get("cause") or row.get("note")
        if cause is None and "lengths" in row:
            cause = UNKNOWN_LENGTHS
        compared = compare(_publisher(row["source"]), gpu, model, found, cause)
        if row.get("no_memory"):
            compared = {**compared, "verdict": None, "wrong": False, "no_memory": row["no_memory"]}
        yield compared


def _stated(row: dict[str, Any]) -> Published:
    """Return the published numbers of a run that say something about it."""
    kinds = {"allocated": "peak_gib", "reserved": "reserved_gib", "process": "process_gib"}
    numbers: dict[str, float] = {}
    if "peak" in row and not row.get("no_memory"):
        numbers[kinds[row["peak"]]] = row["peak_gib"]
    if "tokens_per_s" in row and not row.get("no_speed"):
        numbers["tokens_per_s"] = row["tokens_per_s"]
    return Published(**numbers)


def _publisher(source: str) -> str:
    """Return the name of the project that published a run."""
    names = ("fitcheck", "milabench", "ms-swift", "pytorch/ao", "xtuner", "Arctic")
    return next(name for name in names if name in source)


def compare(
    source: str, gpu: str, model: str, found: ConfigResult, cause: str | None = None
) -> dict[str, Any]:
    """Return one published run with its estimates.

    An error is the estimate divided by the published number, minus 1. A verdict is wrong if the
    opposite was observed. `cause` says what is uncertain about the run.
    """
    case = found.case
    row: dict[str, Any] = {"source": source, "name": case.name, "gpu": gpu, "model": model}
    row |= {"config": found.config.label(), "gpus": found.config.num_gpus}
    row |= {"excluded": case.excluded, "differs": case.differs}
    # What differs from a trainer that a count follows concerns the speed alone.
    row["cause"] = (case.differs if case.trainer == USUAL else None) or cause
    if row["excluded"] is None and found.outcome is Outcome.REFUSED:
        row["excluded"] = found.reason
    if row["excluded"] is not None:
        return row
    outcome = (case.published or Published()).outcome
    verdict = TIGHT if found.tight else FITS if found.outcome is Outcome.OK else OOM
    wrong = verdict == (FITS if outcome == "oom" else OOM)
    row |= {"outcome": outcome, "verdict": verdict, "wrong": wrong}
    return row | _memory(found) | _speed(gpu, found)


def _memory(found: ConfigResult) -> dict[str, Any]:
    """Compare the published memory, in GiB."""
    pairs = found.known_pairs()
    for name in ("whole GB", "whole GiB", "reserved GB", "reserved GiB", "peak GiB"):
        if name in pairs:
            unit = 1e9 / GIB if name.endswith("GB") else 1.0
            published, predicted = (float(number) * unit for number in pairs[name])
            error = predicted / published - 1
            return {"peak": name, "published_gib": published, "predicted_gib": predicted} | {
                "memory_error": error
            }
    return {}


def _speed(gpu: str, found: ConfigResult) -> dict[str, Any]:
    """Compare the published speed: `speed_error` is relative to it, whatever its unit."""
    pairs = {name: pair for name, pair in found.published.items() if name in SPEEDS}
    name, pair = next(iter(pairs.items()), (None, None))
    if name is None or pair is None or pair.ours is None or found.interval is None:
        return {}
    faster = float(pair.ours) / float(pair.theirs)
    if name.startswith("s/"):
        faster = 1 / faster
    assert found.tokens_per_s is not None and found.host_share is not None
    low, high = found.interval
    half_width = (high - low) / 2 / found.tokens_per_s
    return {
        "speed": name,
        "published_speed": pair.theirs,
        "predicted_speed": pair.ours,
        "speed_error": faster - 1,
        "half_width": half_width,
        "wide_because": _causes_of_width(gpu, found) if half_width > WIDEST else [],
        "inside": pair.inside,
        "gpu_bound": found.host_share < CPU_BOUND,
        "doubt": found.doubt,
    }


def _causes_of_width(gpu: str, found: ConfigResult) -> list[str]:
    """Return the reasons that the interval of a speed is wide."""
    measured = is_measured_kind(resolve_device(gpu))
    return [NO_PAIR] * (not measured) + [UNKNOWN_OVERLAP] * (found.config.num_gpus > 1)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the memory, the verdicts and the speeds of all runs that are not excluded.

    `by_source` has the largest error of memory of each source. `unexplained` counts the errors
    above 15 % without a known cause, and `wide_without_cause` the wide intervals without one. A
    verdict is dangerous if a run that was out of memory should fit. Speeds do not count if they
    cannot be right (`doubt`), or if the run computed in another way than its settings say
    (`differs`). `several_gpus_within_10` counts the errors of memory up to 10 % in runs on several
    GPUs.
    """
    compared = [row for row in rows if row["excluded"] is None]
    measured = [row for row in compared if row.get("memory_error") is not None]
    large = [row for row in measured if abs(row["memory_error"]) > LARGE]
    several = [row for row in measured if row["gpus"] > 1]
    verdicts = [row for row in compared if row["verdict"] is not None]
    speeds = [row for row in compared if "inside" in row]
    usual = [row for row in speeds if row["differs"] is None and row["doubt"] is None]
    bound = [row for row in usual if row["gpu_bound"]]
    return {
        "rows": len(rows),
        "excluded": len(rows) - len(compared),
        "memory_rows": len(measured),
        "memory_error_median": statistics.median(abs(row["memory_error"]) for row in measured),
        "memory_error_max": max(abs(row["memory_error"]) for row in measured),
        "memory_within_15": len(measured) - len(large),
        "several_gpus_memory_rows": len(several),
        "several_gpus_within_10": sum(abs(row["memory_error"]) <= NEAR for row in several),
        "unexplained": sum(row["cause"] is None for row in large),
        "by_source": {
            source: max(abs(row["memory_error"]) for row in measured if row["source"] == source)
            for source in dict.fromkeys(row["source"] for row in measured)
        },
        "verdicts": len(verdicts),
        "verdicts_wrong": sum(row["wrong"] for row in verdicts),
        "dangerous": sum(row["wrong"] and row["verdict"] == FITS for row in verdicts),
        "speeds": len(speeds),
        "usual_speeds": len(usual),
        "gpu_bound_speeds": len(bound),
        "gpu_bound_inside": sum(row["inside"] for row in bound),
        "gpu_bound_half_width_median": statistics.median(row["half_width"] for row in bound),
        "gpu_bound_half_width_max": max(row["half_width"] for row in bound),
        "wider_than_30": sum(row["half_width"] > WIDEST for row in bound),
        "wide_without_cause": sum(
            row["half_width"] > WIDEST and not row["wide_because"] for row in bound
        ),
    }

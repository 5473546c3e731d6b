"""What each figure and table of the report says, as plain values: StudySummary in, dataclasses out, no plotly.

Numbers stay numbers here and unknown ones None; `html` formats them and `figures` draws them.
"""

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from autotune.core.probe_types import Outcome, to_data
from autotune.core.train_config import KNOBS
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_seconds, fmt_usd
from autotune.problem.run_cost import CostProjection
from autotune.study.summary import Candidate, Recipe, StudySummary, TrialRecord

# More distinct values than this on one axis of the map are grouped by powers of two.
MAX_AXIS = 10
TERMS = ("weights", "adapters", "gradients", "optimizer", "activations and the rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One trial in a figure. `peak_gib` is reserved memory, or what was needed at least if it did not fit."""

    number: int
    label: str
    outcome: Outcome
    tokens_per_second: float | None
    peak_gib: float | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The winner or the baseline in the scatter."""

    name: str
    tokens_per_second: float
    peak_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterInfo:
    """Speed against memory. A point without a speed did not run to its end, one without memory is left out."""

    points: tuple[Point, ...]
    marked: tuple[Marked, ...]
    limit_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryInfo:
    """Trials in order, and (trial, best tokens/s so far) at each improvement and at the end."""

    points: tuple[Point, ...]
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """One micro batch x seq_len. `state`: fits, oom, refused, mixed (other knobs decide), failed, untried."""

    state: str
    num_tried: int = 0
    best_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MapInfo:
    """`cells[i][j]` is micro batch `rows[i]` at seq_len `columns[j]`; both are labels, ascending."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[MapCell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBar:
    """One candidate. `terms` in the order of TERMS; they sum to the allocated peak."""

    name: str
    terms: dict[str, float]
    reserved_gib: float
    limit_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One line of winner against baseline, ready to print. `ratio` is winner / baseline where that says something."""

    group: str
    name: str
    winner: str
    baseline: str
    changed: bool = False
    ratio: float | None = None


def scatter(summary: StudySummary) -> ScatterInfo:
    points = tuple(point for point in map(_point, summary.trials) if point.peak_gib is not None)
    return ScatterInfo(points=points, marked=_marked(summary.recipe), limit_gib=limit_gib(summary))


def limit_gib(summary: StudySummary) -> float | None:
    """The winner's memory limit; the median of the trials' where there is no winner."""
    if summary.recipe:
        return summary.recipe.winner.measurement.limit_gib
    limits = [row.limit_gib for row in summary.trials if row.limit_gib is not None]
    return statistics.median(limits) if limits else None


def history(summary: StudySummary) -> HistoryInfo:
    best: list[tuple[int, float]] = []
    for row in summary.trials:
        speed = row.tokens_per_second
        if row.outcome is Outcome.OK and speed is not None and (not best or speed > best[-1][1]):
            best.append((row.number, speed))
    if best and summary.trials[-1].number > best[-1][0]:
        best.append((summary.trials[-1].number, best[-1][1]))
    return HistoryInfo(points=tuple(map(_point, summary.trials)), best=tuple(best))


def importances(summary: StudySummary) -> tuple[tuple[str, float], ...]:
    """(knob, share), the largest first."""
    return tuple(sorted(summary.importances.items(), key=lambda item: (-item[1], item[0])))


def feasibility(summary: StudySummary) -> MapInfo:
    """Which micro batches and lengths were tried, and what became of them."""
    micro, micro_of = _axis({row.config.micro_batch_size for row in summary.trials})
    lengths, length_of = _axis({row.config.seq_len for row in summary.trials})
    groups: dict[tuple[str, str], list[TrialRecord]] = {}
    for row in summary.trials:
        key = (micro_of[row.config.micro_batch_size], length_of[row.config.seq_len])
        groups.setdefault(key, []).append(row)
    cells = tuple(tuple(_cell(groups.get((one, other), [])) for other in lengths) for one in micro)
    return MapInfo(rows=micro, columns=lengths, cells=cells)


def memory(summary: StudySummary) -> tuple[MemoryBar, ...]:
    """Winner and baseline; what no term names is activations, logits and the allocator's rest."""
    if summary.recipe is None:
        return ()
    return tuple(_bar(name, candidate) for name, candidate in _candidates(summary.recipe))


def compare(recipe: Recipe) -> tuple[CompareRow, ...]:
    """Knob by knob, then performance, memory and cost; the baseline's side is a dash where there is none."""
    winner, baseline = recipe.winner, recipe.baseline
    ours, theirs = winner.config.as_dict(), baseline.config.as_dict() if baseline else {}
    rows = [
        CompareRow(
            group="Configuration",
            name=knob,
            winner=value_text(ours.get(knob)),
            baseline=value_text(theirs.get(knob)),
            changed=baseline is not None and ours.get(knob) != theirs.get(knob),
        )
        for knob in KNOBS
        if knob in ours or knob in theirs
    ]
    accumulation = [str(recipe.accumulation), DASH]
    if baseline:
        accumulation[1] = str(recipe.workload.run_shape(baseline.config).accumulation)
    rows.append(
        CompareRow(
            group="Configuration",
            name="accumulation steps",
            winner=accumulation[0],
            baseline=accumulation[1],
            changed=baseline is not None and accumulation[0] != accumulation[1],
        )
    )
    others = _numbers(baseline) if baseline else {}
    for (group, name), (value, text) in _numbers(winner).items():
        other, other_text = others.get((group, name), (None, DASH))
        ratio = value / other if value is not None and other else None
        rows.append(CompareRow(group=group, name=name, winner=text, baseline=other_text, ratio=ratio))
    return tuple(rows)


def costs(recipe: Recipe) -> tuple[CostProjection, ...]:
    """The workload that was asked for and the table sizes, by size; equal ones once."""
    sizes = {one.examples: one for one in (*recipe.by_examples, recipe.winner.cost)}
    return tuple(sizes[examples] for examples in sorted(sizes))


def fingerprint(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """(field, value), packages one by one."""
    data: dict[str, Any] = to_data(recipe.fingerprint)
    packages: dict[str, str] = data.pop("packages")
    return tuple((name, value_text(value)) for name, value in (data | packages).items())


def in_words(recipe: Recipe) -> tuple[str, ...]:
    """The winner in plain words, one phrase a decision."""
    config, times = recipe.winner.config, recipe.accumulation
    kind = ("rs" if config.rslora else "") + ("DoRA" if config.dora else "LoRA")
    method = {
        "none": f"{kind} of rank {config.lora_rank}",
        "fp8": f"{kind} of rank {config.lora_rank} on a base that multiplies in 8-bit floats",
        "int8": f"{kind} of rank {config.lora_rank} on an 8-bit base",
        "nf4": f"Q{kind} of rank {config.lora_rank} on a 4-bit (NF4) base"
        + (", double quantised" * config.double_quant),
    }[config.quantization]
    every = config.checkpoint_every
    recomputed = {None: "no activation checkpointing", 1: "activation checkpointing in every layer"}
    if config.offloads:
        recomputed[1] += ", whose inputs wait in the host's memory"
    row = "row" if config.packing else "sequence"
    sequences = f"1 {row}" if config.micro_batch_size == 1 else f"{config.micro_batch_size} {row}s"
    return (
        "full fine-tuning" if config.method == "full" else method,
        f"{sequences} of {config.seq_len:,} tokens at a time"
        + (f", accumulated {times} times" if times > 1 else "")
        + (
            f": packed, a global batch of {recipe.shape.examples_per_step:.1f} examples on average"
            if config.packing
            else f": a global batch of {recipe.workload.global_batch}"
        ),
        recomputed.get(every, f"activation checkpointing in one layer of {every}"),
        {
            "bf16_mixed": "bf16 mixed precision, trained parameters kept in fp32",
            "bf16_pure": "everything in bf16, without fp32 master weights",
            "fp16_mixed": "fp16 mixed precision",
            "fp32": "fp32 throughout",
        }[config.precision],
        {
            "adamw_torch_fused": "fused AdamW",
            "adamw_torch": "AdamW",
            "adamw_8bit": "8-bit AdamW",
            "paged_adamw_8bit": "paged 8-bit AdamW",
            "adafactor": "Adafactor",
            "lion_8bit": "8-bit Lion",
        }[config.optimizer],
        {
            "sdpa": "PyTorch's fused attention (SDPA)",
            "sdpa_cudnn": "cuDNN's fused attention (SDPA)",
            "eager": "unfused (eager) attention",
            "flash_attention_2": "FlashAttention 2",
            "flex_attention": "FlexAttention",
        }[config.attention],
        "not compiled" if config.compile == "none" else "compiled layer by layer (torch.compile)",
        *(["head and cross-entropy in chunks of tokens"] if config.loss == "chunked" else []),
        *(["Liger's kernels for norms, rotary positions and MLPs"] if config.kernels == "liger" else []),
        *([f"batches made by {config.loader_workers} other processes"] if config.loader_workers else []),
    )


def value_text(value: Any) -> str:
    """A knob's or a field's value in a table."""
    if value is None:
        return DASH
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _point(row: TrialRecord) -> Point:
    peak = row.peak_reserved_gib
    if peak is None and row.margin is not None and row.limit_gib is not None:
        peak = row.limit_gib * (1.0 + row.margin)
    return Point(
        number=row.number,
        label=row.config.label(),
        outcome=row.outcome,
        tokens_per_second=row.tokens_per_second,
        peak_gib=peak,
        reason=row.reason,
    )


def _candidates(recipe: Recipe) -> list[tuple[str, Candidate]]:
    return [("winner", recipe.winner)] + ([("baseline", recipe.baseline)] if recipe.baseline else [])


def _marked(recipe: Recipe | None) -> tuple[Marked, ...]:
    if recipe is None:
        return ()
    return tuple(
        Marked(
            name=name,
            tokens_per_second=candidate.performance.tokens_per_second,
            peak_gib=candidate.measurement.peak_reserved_gib,
        )
        for name, candidate in _candidates(recipe)
    )


def _axis(values: set[int]) -> tuple[tuple[str, ...], dict[int, str]]:
    """Labels in order, and the label of each value."""
    if len(values) <= MAX_AXIS:
        names = {value: f"{value:,}" for value in sorted(values)}
    else:
        names = {}
        for value in sorted(values):
            low = 2 ** int(math.log2(value))
            names[value] = f"{low:,} to {2 * low - 1:,}" if low > 1 else "1"
    return tuple(dict.fromkeys(names.values())), names


def _cell(rows: list[TrialRecord]) -> MapCell:
    count = Counter(row.outcome for row in rows)
    fitting, not_fitting = count[Outcome.OK] + count[Outcome.SLOW], count[Outcome.OOM] + count[Outcome.REFUSED]
    if fitting and not_fitting:
        state = "mixed"
    elif fitting:
        state = "fits"
    elif count[Outcome.OOM]:
        state = "oom"
    elif count[Outcome.REFUSED]:
        state = "refused"
    else:
        state = "failed" if rows else "untried"
    speeds = [row.tokens_per_second for row in rows if row.outcome is Outcome.OK and row.tokens_per_second is not None]
    return MapCell(state=state, num_tried=len(rows), best_tokens_per_second=max(speeds, default=None))


def _bar(name: str, candidate: Candidate) -> MemoryBar:
    peak = candidate.measurement
    named = (peak.model_gib, peak.adapters_gib, peak.gradients_gib, peak.optimizer_gib)
    # Not everything is alive at the peak, so the named terms can exceed it; the rest is never negative.
    rest = max(0.0, peak.peak_allocated_gib - sum(named))
    return MemoryBar(
        name=name,
        terms=dict(zip(TERMS, (*named, rest), strict=True)),
        reserved_gib=peak.peak_reserved_gib,
        limit_gib=peak.limit_gib,
    )


def _numbers(candidate: Candidate) -> dict[tuple[str, str], tuple[float | None, str]]:
    """(group, name) -> (value, text)."""
    speed, peak, cost = candidate.performance, candidate.measurement, candidate.cost
    speed_group, memory_group, cost_group = "Performance", "Memory", "Cost of the full run"
    margin = peak.peak_reserved_gib / peak.limit_gib - 1.0
    return {
        (speed_group, "useful tokens/s"): (speed.tokens_per_second, fmt_count(speed.tokens_per_second)),
        (speed_group, "samples/s"): (speed.samples_per_second, fmt_count(speed.samples_per_second)),
        (speed_group, "optimizer step"): (speed.step_time_s, fmt_seconds(speed.step_time_s)),
        (speed_group, "MFU"): (speed.mfu, DASH if speed.mfu is None else f"{speed.mfu:.1%}"),
        (memory_group, "peak reserved"): (peak.peak_reserved_gib, fmt_gib(peak.peak_reserved_gib)),
        (memory_group, "peak allocated"): (peak.peak_allocated_gib, fmt_gib(peak.peak_allocated_gib)),
        (memory_group, "base weights"): (None, fmt_gib(peak.model_gib)),
        (memory_group, "free below the limit"): (None, f"{-margin:.0%} of {fmt_gib(peak.limit_gib)}"),
        (cost_group, "time"): (cost.full_run_hours, fmt_seconds(cost.full_run_hours * 3600)),
        (cost_group, "USD"): (cost.full_run_usd, fmt_usd(cost.full_run_usd)),
        (cost_group, "USD at the spot price"): (cost.spot_usd, fmt_usd(cost.spot_usd)),
        (cost_group, "USD for 1,000 samples"): (
            cost.cost_per_1000_samples_usd,
            fmt_usd(cost.cost_per_1000_samples_usd),
        ),
        (cost_group, "energy"): (cost.kwh, DASH if cost.kwh is None else f"{fmt_count(cost.kwh)} kWh"),
    }

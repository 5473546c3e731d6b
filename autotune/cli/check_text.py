"""What `autotune check` prints: the verdict on a run, what it needs, how long it takes, and what to change."""

import json
from collections.abc import Iterator
from datetime import date

from autotune.catalog import NO_PRICE, describe_price
from autotune.cli.plan_text import memory_terms, speed_text
from autotune.core.objective import Objective
from autotune.core.units import DASH, fmt_gib, fmt_hours, fmt_usd
from autotune.planning.device_estimate import how_known
from autotune.planning.foreign_config import FP32_BASE
from autotune.planning.run_check import VERDICTS, CheckReport, Faster
from autotune.planning.run_estimate import CheckedRun, Edits
from autotune.problem.run_cost import FITS, OOM, TIGHT


def lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    """(label, text) of each line, the verdict first."""
    checked, run = report.checked, report.checked.run
    yield "", verdict(report)
    batch = "one micro batch" if run.accumulation == 1 else f"{run.accumulation:,} micro batches"
    trains = f"{run.format}, {run.objective}" if run.objective is not Objective.SFT else run.format
    yield "file", f"{report.file.name} ({trains}): {run.model}, {run.config.label()}, {batch} a step"
    yield "memory", f"{memory_terms(checked.estimate)}; the peak is in the {checked.bounds.reported.phase} pass"
    if report.fix:
        needs = "fits, with" if report.fix.state == FITS else "may fit, with"
        text = f"then it {needs} {fmt_gib(report.fix.estimate.need_gib)}"
        yield "change", f"{edits_text(report.fix.edits)}: {text}{_truncation(report, report.fix)}"
    elif checked.state != FITS:
        yield "change", "nothing that was tried surely makes it fit"
    for fixed, saved in report.fixes:
        estimated = fixed.estimate
        text = f"saves {fmt_gib(saved)}, needs {fmt_gib(estimated.need_gib)}: {VERDICTS[estimated.state]}"
        yield "alone", f"{edits_text(fixed.edits)}: {text}{_truncation(report, fixed)}"
    if checked.state != FITS and checked.bounds.most is not None:
        card = report.smallest_card.name if report.smallest_card else "none of the catalogue"
        yield "card", f"the smallest on which it fits as it is: {card}"
    yield from _duration_lines(report)
    if report.faster:
        yield "faster", _faster_text(report, report.faster)
    for note in report.notes:
        yield "note", note
    yield (
        "how",
        how_known(
            report.context.task.calibration,
            report.context.device,
            counted=checked.bounds.reported.counted,
            objective=report.context.workload.objective,
            num_gpus=run.config.num_gpus,
        ),
    )


def verdict(report: CheckReport) -> str:
    """'out of memory: needs 27.3 of 20.6 GiB on a10, 6.7 GiB (33 %) too much'."""
    checked, limit, device = report.checked, report.context.limit_gib, report.context.device.label
    bounds, least = checked.bounds, checked.bounds.least.peak_reserved_gib
    peak = least if checked.state == OOM else checked.estimate.need_gib
    num_gpus = checked.run.num_gpus or 1
    place = f"each of {num_gpus} {device}" if num_gpus > 1 else device
    lower = ""
    if bounds.least != bounds.most:
        lower = f"{least:.1f} to " if bounds.most is not None and checked.state != OOM else "at least "
    needs = f"{VERDICTS[checked.state]}: needs {lower}{peak:.1f} of {limit:.1f} GiB on {place}"
    if lower and checked.state == TIGHT:
        return needs
    difference = f"{abs(peak - limit):.1f} GiB ({100 * abs(peak / limit - 1):.0f} %)"
    errs = f", and the estimate errs by up to {100 * bounds.reported.error:.2g} %" if checked.state == TIGHT else ""
    return f"{needs}, {difference} {'too much' if peak > limit else 'to spare'}{errs}"


def _truncation(report: CheckReport, fixed: CheckedRun) -> str:
    """What a shorter sequence cuts off."""
    truncated = report.context.workload.truncated
    before, after = truncated(report.checked.run.config.seq_len), truncated(fixed.run.config.seq_len)
    return f"; {after:.0%} of the tokens are cut off" if after > before else ""


def _duration_lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    if report.runnable is None:
        return
    estimated, run = report.runnable.estimate, report.checked.run
    cost, price, workload = estimated.cost, report.context.task.price, report.context.workload
    changed = ", with that change" if report.checked.state == OOM else ""
    if cost is None:
        yield "speed", f"unknown: no formula knows it{changed}"
        return
    each = " a GPU" if (run.num_gpus or 1) > 1 else ""
    yield "speed", f"{speed_text(estimated, f'useful tokens/s{each}')}, estimated{changed}"
    steps = f"{cost.num_steps:,} steps"
    if run.max_steps is None:
        assumed = " (assumed)" if workload.examples_assumed else ""
        steps = f"{workload.examples:,} examples{assumed} x {run.epochs:g}, {steps}"
    hours = " to ".join(map(fmt_hours, cost.interval_hours))
    yield "run", f"{fmt_hours(cost.full_run_hours)} ({hours}) for {steps}, estimated{changed}"
    if price is None or cost.interval_usd is None:
        yield "cost", f"{DASH} ({NO_PRICE}: --price USD_PER_HOUR)"
        return
    bounds = " to ".join(map(fmt_usd, cost.interval_usd))
    usd = f"{fmt_usd(cost.full_run_usd)} ({bounds}) at {describe_price(price, date.today())}{each}"
    yield "cost", f"{usd}, estimated; start-up, saves and evaluation aside"


def _faster_text(report: CheckReport, faster: Faster) -> str:
    runnable = report.runnable or report.checked
    new, old, full_rows = faster.config, runnable.run.config, report.context.workload.lengths.source == "assumed"
    names = ["micro_batch_size", "checkpointing", "compile", "loss", "kernels"]
    if not full_rows:
        names.append("packing")
    if "eager" in (new.attention, old.attention):
        names.append("attention")
    pairs = [(name, getattr(new, name), getattr(old, name)) for name in names]
    changes = [f"{name} {value} instead of {before}" for name, value, before in pairs if value != before]
    if FP32_BASE in runnable.run.notes:
        changes.append("the base in bfloat16")
    usd = runnable.estimate.cost.full_run_usd if runnable.estimate.cost else None
    cost = f", {fmt_usd(usd / faster.times)} instead of {fmt_usd(usd)}" if usd else ""
    rows = " on full rows" if full_rows else ""
    times = f"{faster.times:.1f} times as fast{rows}{cost}"
    return f"{times}, estimated: {', '.join(changes)}; to prove it: {faster.command}"


def edits_text(edits: Edits) -> str:
    """'gradient_checkpointing: true, micro_batch_size: 2', as YAML takes it."""
    texts = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in edits.items()}
    return ", ".join(f"{key}: {text}" for key, text in texts.items())

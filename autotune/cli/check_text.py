"""The text of `autotune check`: whether a run fits, its memory and time, and proposed changes."""

import json
from collections.abc import Iterator

from autotune.core.objective import Objective
from autotune.core.units import fmt_gib, fmt_usd
from autotune.export.keys import TOOLS
from autotune.problem.run_cost import FITS
from autotune.report.answers import check_answer, duration_lines, phases_text
from autotune.report.values.check import VERDICTS, CheckedRun, CheckReport, Edits, Faster

MORE = (
    "All numbers are estimated. --details shows their accuracy, each single change, and minor "
    "notes."
)


def lines(report: CheckReport, *, details: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the (label, text) of each line, the verdict first.

    With `details`, the lines include the single changes, the minor notes and the accuracy.
    """
    checked = report.checked
    run = checked.run
    answer = check_answer(report)
    yield "", answer.answer
    if run.ignored:
        yield "note", run.ignored
    yield "file", _run_text(report)
    yield "memory", answer.needs
    if report.phases:
        yield "phases", phases_text(report.bounds_of_phases)

    if report.fix:
        needs = "fits, with" if report.fix.state == FITS else "may fit, with"
        text = f"then it {needs} {fmt_gib(report.fix.estimate.need_gib)}"
        yield "change", f"{edits_text(report.fix.edits)}: {text}{_truncation(report, report.fix)}"
    elif checked.state != FITS:
        yield "change", "no change that was tried surely makes the run fit"
    if details:
        yield from _single_changes(report)

    if checked.state != FITS and checked.bounds.most is not None:
        card = report.smallest_card
        fits = "GPU that the run fits without a change"
        yield "GPU", f"the smallest {fits}: {card.name}" if card else f"the catalogue has no {fits}"
    yield from duration_lines(report)
    if report.faster:
        yield "faster", _faster_text(report, report.faster)

    for note in report.notes:
        if note != run.ignored and (details or note not in report.minor):
            yield "note", note
    yield ("how", answer.certainty) if details else ("", MORE)


def _run_text(report: CheckReport) -> str:
    """Describe the run as it was read: tool, model, configuration and accumulation."""
    run = report.checked.run
    batch = "one micro batch" if run.accumulation == 1 else f"{run.accumulation:,} micro batches"
    trains = f"{run.tool}, {run.objective}" if run.objective is not Objective.SFT else run.tool
    return f"{report.file.name} ({trains}): {run.model}, {run.config.label()}, {batch} a step"


def _single_changes(report: CheckReport) -> Iterator[tuple[str, str]]:
    for fixed, saved in report.fixes:
        estimated = fixed.estimate
        text = (
            f"saves {fmt_gib(saved)}, needs {fmt_gib(estimated.need_gib)}: "
            f"{VERDICTS[estimated.state]}"
        )
        yield "alone", f"{edits_text(fixed.edits)}: {text}{_truncation(report, fixed)}"


def _truncation(report: CheckReport, fixed: CheckedRun) -> str:
    """Return a phrase with the share of tokens that a shorter length truncates, or ""."""
    truncated = report.workload.truncated
    before = truncated(report.checked.run.config.seq_len)
    after = truncated(fixed.run.config.seq_len)
    return f"; {after:.0%} of the tokens are truncated" if after > before else ""


def _faster_text(report: CheckReport, faster: Faster) -> str:
    """Return the line that proposes a faster configuration."""
    runnable = report.runnable or report.checked
    tool = TOOLS.get(runnable.run.tool, runnable.run.tool)
    own = f"{', '.join(faster.own)} (autotune's word; {tool} has no key)" if faster.own else ""
    changes = ", ".join(filter(None, (edits_text(faster.edits), own))) or "settings of autotune"

    usd = runnable.estimate.cost.full_run_usd if runnable.estimate.cost else None
    cost = f", {fmt_usd(usd / faster.times)} instead of {fmt_usd(usd)}" if usd else ""
    rows = " on full sequences" if report.workload.lengths.source == "assumed" else ""
    times = f"{faster.times:.1f} times as fast{rows}{cost}"
    return f"{times}, estimated: {changes}; to measure it: {faster.command}"


def edits_text(edits: Edits) -> str:
    """Return edits of the file as YAML: 'gradient_checkpointing: true, micro_batch_size: 2'."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in edits.items()
    }
    return ", ".join(f"{key}: {text}" for key, text in texts.items())

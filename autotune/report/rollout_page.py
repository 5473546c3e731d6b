"""The page of a GRPO search: the phases of its layouts as a timeline and as memory."""

from typing import Any

from autotune.core.units import DASH, fmt_gib
from autotune.report import figures
from autotune.report.answer import Answer, Table
from autotune.report.answers import rollout_study_answer
from autotune.report.values.rollouts import RolloutStudy
from autotune.study.rollout_search import MeasuredLayout

SHOWN = 8  # layouts in a figure, the fastest first
COLUMNS = {
    "configuration": "left",
    "verdict": "left",
    "prompts/s": "right",
    "seconds": "right",
    "GPU memory": "right",
    "phase": "left",
}


def page_answer(study: RolloutStudy) -> Answer:
    """Return the answer of a search as sentences, a table of all layouts, and two figures."""
    said = rollout_study_answer(study)
    notes = [f"{name}: {text}." for name, text in said.lines().items() if text]
    return Answer(
        title=f"GRPO of {study.task.model.short} on {study.task.device.label}",
        found=(f"{said.answer}.",),
        notes=tuple(notes),
        tables=(Table(title="Layouts", columns=COLUMNS, rows=tuple(map(_row, _ordered(study)))),),
        drawings={
            "Seconds of a generation with its updates, by phase": lambda: figures.phase_seconds(
                _seconds(study)
            ),
            "Peak of the GPU's memory in each phase of the best layout": lambda: (
                figures.phase_memory(_memory(study), study.limit_gib)
            ),
        },
    )


def name_of(layout: MeasuredLayout) -> str:
    """Return the name of a layout in tables and figures."""
    sleep = ", asleep" if layout.sleeps else ""
    config = layout.config
    recomputed = ", recomputed" if config.checkpointing == "full" else ""
    return f"micro batch {config.micro_batch_size}, {config.precision}{recomputed}{sleep}"


def _ordered(study: RolloutStudy) -> list[MeasuredLayout]:
    """Return the layouts, each once, the fastest first and those that do not fit last."""
    latest = {(layout.config, layout.sleeps): layout for layout in study.layouts}
    return sorted(latest.values(), key=lambda layout: -layout.score)


def _row(layout: MeasuredLayout) -> tuple[str, ...]:
    step = layout.step
    peak = step.peak if step else None
    verdict = str(layout.state)
    if layout.breaks_at is not None:
        verdict = f"fits completions up to {layout.breaks_at - 1:,}"
    return (
        name_of(layout),
        verdict,
        f"{layout.score:.3g}" if layout.score else DASH,
        f"{step.seconds:.1f}" if step else DASH,
        fmt_gib(peak[1]) if peak else DASH,
        str(peak[0] if peak else layout.phase or DASH).replace("_", "-"),
    )


def _seconds(study: RolloutStudy) -> dict[str, dict[str, float]]:
    return {
        name_of(layout): _by_name(layout.step.phase_s)
        for layout in _ordered(study)[:SHOWN]
        if layout.step is not None and layout.score
    }


def _memory(study: RolloutStudy) -> dict[str, float]:
    step = study.best.step if study.best else None
    return {} if step is None else _by_name(step.phase_gib)


def _by_name(phases: dict[Any, float]) -> dict[str, float]:
    return {str(phase).replace("_", "-"): value for phase, value in phases.items()}

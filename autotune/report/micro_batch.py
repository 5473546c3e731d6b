"""What a profiled micro batch says, as tables and figures: by class of kernel, by part, at best, and the host."""

from collections.abc import Iterator
from functools import partial

from autotune.core.micro_profile import KernelClass, MicroBatchProfile, Part, Stage
from autotune.core.units import DASH, fmt_count, fmt_seconds
from autotune.report import figures
from autotune.report.answer import Answer, Table
from autotune.report.values.profile import HostNeed, ProfileReport

STAGES = (Stage.FORWARD, Stage.RECOMPUTED, Stage.BACKWARD)
HIDDEN = "unknown, in compiled layers"


def profile_answer(report: ProfileReport) -> Answer:
    """The tables, the longest rows first, with what they mean."""
    profile = report.profile
    what = "kernel" if profile.on_gpu else "operator"
    tables = [_by_class(profile, what), _by_part(profile), _at_best(report), _longest(profile, what)]
    return Answer(
        title=f"A micro batch of {report.study}",
        found=tuple(_found(report)),
        notes=tuple(_notes(report, what)),
        tables=(*tables, _host(report.needs)),
        drawings={f"Time of its {what}s by part of the model and stage": partial(figures.micro_batch, report)},
    )


def _found(report: ProfileReport) -> Iterator[str]:
    """Where most of the time goes, what is lost, and what of the machine is short."""
    yield f"It is of {report.config.label()}."
    work = report.profile.micro_work
    total = sum(one.seconds for one in work) or 1.0
    hidden = any(one.part is None for one in work)  # then kinds of kernels say more than parts of the model
    took: dict[str, float] = {}
    for one in work:
        of: str = one.kind if hidden or one.part is None else one.part
        took[of] = took.get(of, 0.0) + one.seconds
    most = sorted(took, key=lambda of: -took[of])[:2]
    yield f"What takes the most time: {', then '.join(f'{of} ({took[of] / total:.0%})' for of in most)}."
    lost = {one.work: one.lost_s for one in report.bounds} | (
        {"a GPU that waits": report.idle_s} if report.idle_s else {}
    )
    known = {where: seconds for where, seconds in lost.items() if seconds is not None}
    if len(known) == len(lost):
        where = max(known, key=lambda where: known[where])
        of = f"{fmt_seconds(known[where])} of a micro batch of {fmt_seconds(_whole_s(report))}"
        yield f"Where the most is lost against what this device reaches at best: {where}, {of}."
    if short := [need.part for need in report.needs if need.suffices is False]:
        yield f"The run needs more of the machine than is here: {', '.join(short)}."


def _whole_s(report: ProfileReport) -> float:
    """What shares of a micro batch are of: on a CPU, what it took while profiled."""
    return report.profile.micro_s if report.profile.on_gpu else report.profile.profiled_s


def _notes(report: ProfileReport, what: str) -> list[str]:
    profile, micro_s = report.profile, report.profile.micro_s
    notes = [
        f"{profile.rows} rows of {profile.length:,} tokens take {fmt_seconds(micro_s)} when they are not profiled, and "
        f"took {fmt_seconds(profile.profiled_s)} profiled{', which slows the host' * (profile.profiled_s > micro_s)}."
    ]
    if report.idle_s is None:
        notes.append("This is a CPU: what is divided are its operators, by the time that each took while profiled.")
    else:
        notes.append(
            f"The GPU runs kernels for {fmt_seconds(profile.busy_s)} of it. For the rest, {fmt_seconds(report.idle_s)} "
            f"({report.idle_s / micro_s:.0%}), it waits: for the host to issue work, or between two kernels."
        )
    step = f"The optimizer step after it takes {fmt_seconds(profile.optimizer_s)} of the device"
    notes.append(f"{step}, once in {report.accumulation} micro batches." if report.accumulation > 1 else f"{step}.")
    if any(one.part is None for one in profile.work):
        notes.append(
            "Layers are compiled: which part of a layer their kernels serve is not known, and what checkpointing "
            "computes again counts as backward."
        )
    if report.uncounted:
        notes.append(f"What a micro batch needs at best is not known: {report.uncounted}.")
    elif report.bounds[0].best_s is None:
        notes.append("Products of this precision were not measured here, so that their best time is not known.")
    notes.append(
        f"At best: what it computes and moves, counted without a GPU, by what this device reached just now in products "
        f"and copies. Chrome trace: {report.trace} (ui.perfetto.dev opens it)."
    )
    return notes


def _seconds(seconds: float | None) -> str:
    return fmt_seconds(seconds or None)


def _by_class(profile: MicroBatchProfile, what: str) -> Table:
    work, total = profile.micro_work, sum(one.seconds for one in profile.micro_work) or 1.0
    sums = {kind: sum(one.seconds for one in work if one.kind is kind) for kind in KernelClass}
    rows = tuple(
        (kind.value, fmt_seconds(took), f"{took / total:.1%}", f"{sum(w.count for w in work if w.kind is kind):,}")
        for kind, took in sorted(sums.items(), key=lambda item: -item[1])
        if took
    )
    columns = {f"{what}s": "left", "time": "right", "share": "right", "number": "right"}
    return Table(title=f"By what its {what}s do", columns=columns, rows=rows)


def _by_part(profile: MicroBatchProfile) -> Table:
    work, total = profile.micro_work, sum(one.seconds for one in profile.micro_work) or 1.0

    def took(part: Part | None, stages: tuple[Stage, ...]) -> float:
        return sum(one.seconds for one in work if one.part is part and one.stage in stages)

    parts = sorted({one.part for one in work}, key=lambda part: -took(part, STAGES))
    rows = tuple(
        (
            part or HIDDEN,
            *(_seconds(took(part, (stage,))) for stage in STAGES),
            fmt_seconds(took(part, STAGES)),
            f"{took(part, STAGES) / total:.1%}",
        )
        for part in parts
    )
    columns = {"part": "left"} | dict.fromkeys((*STAGES, "together", "share"), "right")
    return Table(title="By part of the model", columns=columns, rows=rows)


def _at_best(report: ProfileReport) -> Table:
    """With the share of the micro batch that is lost."""
    whole_s = _whole_s(report)
    columns = {"work": "left"} | dict.fromkeys(("took", "at best", "lost", "share", "TFLOP", "GB moved"), "right")
    rows = [
        (
            one.work,
            fmt_seconds(one.seconds),
            fmt_seconds(one.best_s),
            fmt_seconds(one.lost_s),
            DASH if one.lost_s is None else f"{one.lost_s / whole_s:.1%}",
            DASH if one.flops is None else f"{one.flops / 1e12:.3g}",
            DASH if one.moved_bytes is None else f"{one.moved_bytes / 1e9:.3g}",
        )
        for one in report.bounds
    ]
    if (idle_s := report.idle_s) is not None:
        waits = fmt_seconds(idle_s)
        rows.append(("the GPU waits", waits, fmt_seconds(0.0), waits, f"{idle_s / whole_s:.1%}", DASH, DASH))
    return Table(title="What this device could do at best", columns=columns, rows=tuple(rows))


def _longest(profile: MicroBatchProfile, what: str) -> Table:
    rows = tuple(
        (one.kind.value, fmt_seconds(one.seconds), f"{one.count:,}", ", ".join(one.fuses) or one.name)
        for one in profile.longest
    )
    columns = {"class": "left", "time": "right", "number": "right", f"{what}, or what it fuses": "left"}
    return Table(title=f"The {what}s that took longest", columns=columns, rows=rows)


def _host(needs: tuple[HostNeed, ...]) -> Table:
    answers = {True: "yes", False: "no", None: DASH}
    rows = tuple(
        (
            need.part,
            DASH if need.found is None else f"{fmt_count(need.found)} {need.unit}",
            f"{fmt_count(need.needed)} {need.unit}",
            answers[need.suffices],
            need.why,
        )
        for need in needs
    )
    columns = {"part": "left", "here": "right", "needed": "right", "enough": "left", "why": "left"}
    return Table(title="Whether the machine suffices for the run", columns=columns, rows=rows)

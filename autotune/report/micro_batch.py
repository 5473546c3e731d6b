"""Shows a profiled micro batch in tables and figures.

The tables show the time by class of kernel and by part of the model, the least possible time on
this device, and the run's needs for parts of the host.
"""

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
    """Return the tables, which list the longest times first, and sentences about these tables."""
    profile = report.profile
    unit = "kernel" if profile.on_gpu else "operator"
    caption = f"Time of the {unit}s by part of the model and stage"
    tables = (
        _class_table(profile, unit),
        _part_table(profile),
        _best_table(report),
        _longest_table(profile, unit),
        _host_table(report.needs),
    )

    return Answer(
        title=f"A micro batch of {report.study}",
        found=tuple(_findings(report)),
        notes=tuple(_notes(report, unit)),
        tables=tables,
        drawings={caption: partial(figures.micro_batch, report)},
    )


def _findings(report: ProfileReport) -> Iterator[str]:
    """Yield sentences on the work that takes the most time, on lost time, and on the machine.

    The sentence on the machine names the parts that are too slow or too small for the run.
    """
    yield f"The configuration is {report.config.label()}."

    # If layers are compiled, the parts of the model are unknown, so name the classes of kernels.
    work = report.profile.micro_work
    total = sum(one.seconds for one in work) or 1.0
    hidden = any(one.part is None for one in work)
    seconds_of: dict[str, float] = {}
    for one in work:
        name: str = one.kind if hidden or one.part is None else one.part
        seconds_of[name] = seconds_of.get(name, 0.0) + one.seconds
    longest = sorted(seconds_of, key=lambda name: -seconds_of[name])[:2]
    shares = ", then ".join(f"{name} ({seconds_of[name] / total:.0%})" for name in longest)
    yield f"Most of the time goes to: {shares}."

    losses = {one.work: one.lost_s for one in report.bounds}
    if report.idle_s:
        losses["a GPU that waits"] = report.idle_s
    known = {name: seconds for name, seconds in losses.items() if seconds is not None}
    if len(known) == len(losses):
        largest = max(known, key=lambda name: known[name])
        loss = f"{fmt_seconds(known[largest])} of a micro batch of {fmt_seconds(_whole_s(report))}"
        yield (
            "Most time is lost, compared with the least possible time on this device, in:"
            f" {largest}, {loss}."
        )

    if short := [need.part for need in report.needs if need.suffices is False]:
        yield f"This machine has too little for the run: {', '.join(short)}."


def _whole_s(report: ProfileReport) -> float:
    """Return the seconds of a micro batch; the tables show shares of these seconds.

    On a CPU, the seconds include the profiler's overhead.
    """
    return report.profile.micro_s if report.profile.on_gpu else report.profile.profiled_s


def _notes(report: ProfileReport, unit: str) -> list[str]:
    """Return sentences that say how the numbers in the tables were obtained."""
    profile = report.profile
    micro_s = profile.micro_s
    slower = ", which slows the host" * (profile.profiled_s > micro_s)
    notes = [
        f"{profile.rows} sequences of {profile.length:,} tokens take {fmt_seconds(micro_s)} "
        f"without the profiler, and {fmt_seconds(profile.profiled_s)} with the profiler{slower}."
    ]

    # Sentences on the use of time
    if report.idle_s is None:
        notes.append(
            "This is a CPU, so the tables show PyTorch's operators, "
            "with their times under the profiler."
        )
    else:
        notes.append(
            f"The GPU runs kernels for {fmt_seconds(profile.busy_s)} of a micro batch. "
            f"For the rest, {fmt_seconds(report.idle_s)} ({report.idle_s / micro_s:.0%}), "
            "it waits: for the host to issue work, or between two kernels."
        )
    step = f"The optimizer step takes {fmt_seconds(profile.optimizer_s)} on the device"
    notes.append(
        f"{step}, once in {report.accumulation} micro batches."
        if report.accumulation > 1
        else f"{step}."
    )
    if any(one.part is None for one in profile.work):
        notes.append(
            "Layers are compiled, so the part of a layer that a kernel serves is unknown, "
            "and recomputation by checkpointing counts as backward."
        )

    # Sentences on the least possible times and on the trace
    if report.uncounted:
        notes.append(f"The best time of a micro batch is unknown: {report.uncounted}.")
    elif report.bounds[0].best_s is None:
        notes.append(
            "Matrix products of this precision were not measured on this device, "
            "so their best time is unknown."
        )
    notes.append(
        "At best: the time for the arithmetic and the moved bytes of the micro batch (counted "
        "without a GPU) at the speeds that this device just reached in matrix products and copies. "
        f"Chrome trace: {report.trace} (ui.perfetto.dev opens it)."
    )
    return notes


def _seconds_or_dash(seconds: float | None) -> str:
    """Format seconds; zero becomes a dash."""
    return fmt_seconds(seconds or None)


def _class_table(profile: MicroBatchProfile, unit: str) -> Table:
    """Return the table of the classes of kernels."""
    work = profile.micro_work
    total = sum(one.seconds for one in work) or 1.0
    sums = {kind: sum(one.seconds for one in work if one.kind is kind) for kind in KernelClass}

    rows = tuple(
        (
            kind.value,
            fmt_seconds(seconds),
            f"{seconds / total:.1%}",
            f"{sum(one.count for one in work if one.kind is kind):,}",
        )
        for kind, seconds in sorted(sums.items(), key=lambda item: -item[1])
        if seconds
    )
    columns = {f"{unit}s": "left", "time": "right", "share": "right", "number": "right"}
    return Table(title=f"By kind of {unit}", columns=columns, rows=rows)


def _part_table(profile: MicroBatchProfile) -> Table:
    """Return the table of the parts of the model, with a column for each stage."""
    work = profile.micro_work
    total = sum(one.seconds for one in work) or 1.0

    def seconds(part: Part | None, stages: tuple[Stage, ...]) -> float:
        return sum(one.seconds for one in work if one.part is part and one.stage in stages)

    found = dict.fromkeys(one.part for one in work)  # unlike a set, in a fixed order
    parts = sorted(found, key=lambda part: -seconds(part, STAGES))
    rows = tuple(
        (
            part or HIDDEN,
            *(_seconds_or_dash(seconds(part, (stage,))) for stage in STAGES),
            fmt_seconds(seconds(part, STAGES)),
            f"{seconds(part, STAGES) / total:.1%}",
        )
        for part in parts
    )
    columns = {"part": "left"} | dict.fromkeys((*STAGES, "together", "share"), "right")
    return Table(title="By part of the model", columns=columns, rows=rows)


def _best_table(report: ProfileReport) -> Table:
    """Return the table of the least possible times, and of the time lost beyond them."""
    whole_s = _whole_s(report)
    columns = {"work": "left"} | dict.fromkeys(
        ("took", "at best", "lost", "share", "TFLOP", "GB moved"), "right"
    )

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
        idle = fmt_seconds(idle_s)
        rows.append(
            ("the GPU waits", idle, fmt_seconds(0.0), idle, f"{idle_s / whole_s:.1%}", DASH, DASH)
        )

    return Table(title="What this device could do at best", columns=columns, rows=tuple(rows))


def _longest_table(profile: MicroBatchProfile, unit: str) -> Table:
    """Return the table of the kernels with the longest times."""
    rows = tuple(
        (
            one.kind.value,
            fmt_seconds(one.seconds),
            f"{one.count:,}",
            ", ".join(one.fuses) or one.name,
        )
        for one in profile.longest
    )
    columns = {
        "class": "left",
        "time": "right",
        "number": "right",
        f"{unit}, or what it fuses": "left",
    }
    return Table(title=f"The {unit}s that took longest", columns=columns, rows=rows)


def _host_table(needs: tuple[HostNeed, ...]) -> Table:
    """Return the table that compares the run's needs with the parts of this machine."""
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

"""The text of `autotune plan --gpus`: the answer, and a table by GPU count and strategy."""

from collections.abc import Sequence

from autotune.cli.terminal import print_lines, print_table, print_text
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.problem.run_cost import FITS
from autotune.report.answers import gpu_answer
from autotune.report.describe import gpu_choices
from autotune.study.scaling import GpuPlan, RankPlan, fastest

NO_LINK = (
    "it is unknown how fast these GPUs exchange data: set link or link_gb_s in your own "
    "description of the GPU"
)
ALONE = "a host has only one of these GPUs"
COLUMNS = {
    "GPUs": "right",
    "strategy": "left",
    "GiB a GPU": "right",
    "verdict": "left",
    "tokens/s of all": "right",
    "range": "right",
    "efficiency": "right",
    "full run": "right",
    "USD": "right",
}
FEW_COLUMNS = tuple(name for name in COLUMNS if name not in ("verdict", "range", "efficiency"))
MORE = "--details shows every strategy, ranges, the accuracy, and the omitted settings."


def print_gpu_plan(gpu_plan: GpuPlan, *, details: bool = False) -> None:
    """Print the answer and the best strategy of each GPU count; with `details`, every row."""
    answer = gpu_answer(gpu_plan)
    print_text(answer.answer)
    print_lines(answer.lines())

    columns = tuple(COLUMNS) if details else FEW_COLUMNS
    rows = gpu_plan.rows if details else _best_rows(gpu_plan)
    print()
    print_table(
        None,
        {name: COLUMNS[name] for name in columns},
        [tuple(_cells(row)[name] for name in columns) for row in rows],
    )
    for pins in dict.fromkeys(row.ignored_pins for row in rows if row.ignored_pins):
        names = [_name(row) for row in rows if row.ignored_pins == pins]
        print_text(f"only for comparison, without {' and '.join(pins)}: {', '.join(names)}")
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        names = [_name(row) for row in rows if row.problem == problem]
        print_text(f"{', '.join(names)}: {problem}")
    if gpu_plan.needs_link:
        reason = ALONE if gpu_plan.task.device.is_alone else NO_LINK
        print_text(f"no speed for several GPUs: {reason}")
    for ends, bandwidth in gpu_plan.links.items():
        print_text(bandwidth, f"between {ends}: ")
    if details:
        _print_details(gpu_plan)
    else:
        print_text(MORE)


def _name(row: RankPlan) -> str:
    return "1 GPU" if row.num_gpus == 1 else f"{row.num_gpus} {row.parallelism.name}"


def _best_rows(gpu_plan: GpuPlan) -> Sequence[RankPlan]:
    """Return the fastest row that fits for each number of GPUs, or the first row if no row fits."""
    rows: list[RankPlan] = []
    for number in dict.fromkeys((row.hosts, row.num_gpus) for row in gpu_plan.rows):
        same = [row for row in gpu_plan.rows if (row.hosts, row.num_gpus) == number]
        same = [row for row in same if not row.ignored_pins] or same
        fitting = [row for row in same if row.state == FITS]
        rows += [best] if (best := fastest(fitting)) else same[:1]
    return rows


def _print_details(gpu_plan: GpuPlan) -> None:
    task = gpu_plan.task
    for row in gpu_plan.rows:
        if row.num_without_speed:
            print_text(
                f"{_name(row)}: {row.num_without_speed:,} more "
                "configurations fit, but no formula gives their speed: `autotune run` measures it"
            )

    for choice in gpu_choices(gpu_plan, gpu_plan.within_hours):
        print_text(choice)
    print_text(
        f"{fmt_gib(task.device.memory_gib)} on each GPU, {fmt_gib(gpu_plan.limit_gib)} of it for "
        f"tensors and NCCL; each process also takes {fmt_gib(gpu_plan.context_gib)} for its CUDA "
        "context"
    )
    print_text(
        f"{task.workload.trained:,} examples x {task.workload.epochs} epoch(s), global batch "
        f"{task.workload.global_batch}"
    )
    print_text(f"Every number is estimated, without a measurement here: {gpu_plan.how_sure}.")
    for removal in gpu_plan.left_out:
        print_text(removal, "left out: ")


def _cells(row: RankPlan) -> dict[str, str]:
    """Return the texts of a row by column."""
    estimated = row.estimate
    held = estimated.interval_gib or (estimated.held_gib,) if estimated else ()
    efficiency = row.efficiency
    return {
        "GPUs": str(row.num_gpus)
        if row.hosts == 1
        else f"{row.hosts} x {row.num_gpus // row.hosts}",
        "strategy": row.parallelism.name,
        "GiB a GPU": DASH
        if estimated is None
        else " to ".join(dict.fromkeys(f"{gib:.1f}" for gib in held)),
        "verdict": row.state or "impossible",
        "tokens/s of all": fmt_count(row.tokens_per_s),
        "range": DASH if row.interval is None else " to ".join(map(fmt_count, row.interval)),
        "efficiency": DASH if efficiency is None else f"{efficiency:.2f}",
        "full run": fmt_hours(row.hours),
        "USD": fmt_usd(row.usd),
    }

"""What `autotune plan --gpus` prints: a row for each strategy on each number of GPUs, and which of them to take."""

from datetime import date

from autotune.catalog import NO_PRICE, describe_price
from autotune.cli.terminal import print_table
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.planning.device_estimate import RANK_ACCURACY
from autotune.planning.several_gpus import NO_LINK, GpuPlan, RankPlan
from autotune.prediction.memory_formula import CONTEXT_GIB
from autotune.report import describe

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


def print_gpu_plan(made: GpuPlan) -> None:
    """Print the table, why rows are empty, and the cheapest and the fastest row."""
    task = made.task
    memory = f"{fmt_gib(task.device.memory_gib)} each, {fmt_gib(made.limit_gib)} of it for tensors and NCCL"
    hosts = "one host" if all(row.hosts == 1 for row in made.rows) else "hosts"
    print(f"{task.model.name} on {hosts} of {task.device.label}: {memory}")
    shape = f"{task.workload.trained:,} examples x {task.workload.epochs}, global batch {task.workload.global_batch}"
    print(f"{shape}. Every number is projected, nothing was measured here: {RANK_ACCURACY}.")
    print_table(None, COLUMNS, [_cells(made, row) for row in made.rows])
    for reason in dict.fromkeys(row.problem for row in made.rows if row.problem):
        rows = [f"{row.num_gpus} {row.parallelism.name}" for row in made.rows if row.problem == reason]
        print(f"{', '.join(rows)}: {reason}")
    for number, strategy, unknown in ((row.num_gpus, row.parallelism.name, row.num_without_speed) for row in made.rows):
        if unknown:
            print(f"{number} {strategy}: {unknown:,} more fit whose speed no formula knows: `autotune run` measures it")
    if task.device.link_gb_s is None and any(row.num_gpus > 1 and row.estimate and not row.step for row in made.rows):
        print(f"no speed for several: {NO_LINK}")
    price = describe_price(task.price, date.today()) if task.price else f"{NO_PRICE}: --price USD_PER_HOUR"
    print(
        f"price of a GPU: {price}; beside tensors and NCCL a process takes {fmt_gib(CONTEXT_GIB)} for its CUDA context"
    )
    print("\n".join(describe.gpu_choices(made.trainable, made.within_hours)))


def _cells(made: GpuPlan, row: RankPlan) -> tuple[str, ...]:
    estimated, efficiency = row.estimate, made.efficiency(row)
    bounds = DASH if row.interval is None else " to ".join(map(fmt_count, row.interval))
    return (
        str(row.num_gpus) if row.hosts == 1 else f"{row.hosts} x {row.num_gpus // row.hosts}",
        row.parallelism.name,
        DASH if estimated is None else f"{estimated.need_gib:.1f}",
        row.state or "impossible",
        fmt_count(row.tokens_per_s),
        bounds,
        DASH if efficiency is None else f"{efficiency:.2f}",
        fmt_hours(row.hours),
        fmt_usd(row.usd),
    )

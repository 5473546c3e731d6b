"""The text of `autotune plan --gpus`: a table by strategy and GPU count, and the best rows."""

from autotune.cli.terminal import print_table
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.report.answers import gpu_answer
from autotune.study.scaling import GpuPlan, RankPlan

NO_LINK = "it is unknown how fast these cards exchange data: set link_gb_s in your own card's data"
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


def print_gpu_plan(gpu_plan: GpuPlan) -> None:
    """Print the table, the reasons for rows without numbers, and the cheapest and fastest row."""
    task = gpu_plan.task
    answer = gpu_answer(gpu_plan)
    hosts = "one host" if all(row.hosts == 1 for row in gpu_plan.rows) else "hosts"
    print(f"{task.model.name} on {hosts} of {task.device.label}: {answer.needs}")
    shape = (
        f"{task.workload.trained:,} examples x {task.workload.epochs} epoch(s), global batch "
        f"{task.workload.global_batch}"
    )
    print(f"{shape}. {answer.certainty}.")

    print_table(None, COLUMNS, [_cells(row) for row in gpu_plan.rows])
    for reason in dict.fromkeys(row.problem for row in gpu_plan.rows if row.problem):
        rows = [
            f"{row.num_gpus} {row.parallelism.name}"
            for row in gpu_plan.rows
            if row.problem == reason
        ]
        print(f"{', '.join(rows)}: {reason}")

    for number, strategy, num_unknown in (
        (row.num_gpus, row.parallelism.name, row.num_without_speed) for row in gpu_plan.rows
    ):
        if num_unknown:
            print(
                f"{number} {strategy}: {num_unknown:,} more configurations fit, but no formula "
                "gives their speed: `autotune run` measures it"
            )

    if gpu_plan.needs_link:
        print(f"no speed for several GPUs: {NO_LINK}")
    beside = (
        f"besides tensors and NCCL, a process takes {fmt_gib(gpu_plan.context_gib)} for its CUDA "
        "context"
    )
    print(f"{answer.cost}; {beside}")
    print(answer.answer)


def _cells(row: RankPlan) -> tuple[str, ...]:
    estimated = row.estimate
    efficiency = row.efficiency
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

"""The text of `autotune plan` for one GPU: the best configuration, and tables of sizes that fit."""

from collections.abc import Sequence

from autotune.cli.terminal import print_table
from autotune.core.units import fmt_gib
from autotune.problem.run_cost import FITS, TIGHT
from autotune.report.answers import estimate_lines, plan_answer
from autotune.report.values.plan import Cell, Plan


def print_plan(study_plan: Plan) -> None:
    """Print the best configuration and the baseline, then tables of the sizes that fit."""
    task = study_plan.task

    memory = fmt_gib(task.device.memory_gib)
    print(
        f"{task.model.name} on {task.device.label}: {memory}, {fmt_gib(study_plan.limit_gib)} of "
        "it for tensors"
    )
    answer = plan_answer(study_plan)
    print(f"{answer.certainty}.\n")

    best = None if study_plan.best is study_plan.baseline else study_plan.best
    for name, estimated in (("best", best), ("guides", study_plan.baseline)):
        if estimated is not None:
            print(f"{name:>8}  {estimated.config.label()}")
            for label, text in estimate_lines(estimated, task).items():
                print(f"{label:>8}  {text}")
            print()

    if answer.reason:
        print(f"{'why':>8}  {answer.reason}\n")
    for name, cells in study_plan.what_fits.items():
        _print_table(name, cells, study_plan.limit_gib)


def _print_table(name: str, cells: Sequence[Cell], limit_gib: float) -> None:
    if not any(cell.chosen.state in (FITS, TIGHT) for cell in cells):
        least = min(cell.recomputed.need_gib for cell in cells)
        print(f"{name}: does not fit: it needs at least {fmt_gib(least)} of {fmt_gib(limit_gib)}")
        return

    print(
        f"{name}: GiB by row length and micro batch size (c: fits only if every layer is "
        "recomputed, ?: too close to tell)"
    )
    lengths = dict.fromkeys(cell.seq_len for cell in cells)
    print_table(
        None,
        {"seq_len": "right"} | {str(cell.micro_batch_size): "right" for cell in cells},
        [
            (str(length), *(_cell(cell) for cell in cells if cell.seq_len == length))
            for length in lengths
        ],
    )


def _cell(cell: Cell) -> str:
    """Return the text of a cell in a table of sizes: '31.2', '18.4 c', '22.0 c?' or 'OOM'.

    The number is the memory in GiB, `c` means activation checkpointing, and `?` that the
    configuration may not fit.
    """
    chosen = cell.chosen
    if chosen.state not in (FITS, TIGHT):
        return "OOM"
    recomputed = "c" if chosen.config.checkpointing == "full" else ""
    uncertain = "?" if chosen.state == TIGHT else ""
    return f"{chosen.need_gib:.1f} {recomputed}{uncertain}".strip()

"""The text of `autotune plan` for one GPU: the answer and, with `--details`, its basis."""

from collections.abc import Sequence

from autotune.cli.terminal import print_lines, print_table, print_text
from autotune.core.units import fmt_gib
from autotune.problem.run_cost import FITS, TIGHT
from autotune.report.answers import (
    estimate_lines,
    plan_answer,
    rollout_answer,
    rollout_study_answer,
)
from autotune.report.describe import estimate_basis
from autotune.report.values.plan import Cell, Plan
from autotune.report.values.rollouts import Layout, RolloutPlan, RolloutStudy

MORE = "--details shows the baseline, the accuracy, the omitted settings, and the sizes that fit."


def print_plan(study_plan: Plan, *, details: bool = False) -> None:
    """Print the answer. With `details`, also print its basis and tables of the sizes that fit."""
    answer = plan_answer(study_plan)
    print_text(answer.answer)
    print_lines(answer.lines())
    if details:
        _print_details(study_plan)
    else:
        print_text(MORE)


def print_rollout_plan(plan: RolloutPlan, *, details: bool = False) -> None:
    """Print the answer for a GRPO run. With `details`, also print its settings and its memory."""
    answer = rollout_answer(plan)
    print_text(answer.answer)
    print_lines(answer.lines())
    if not details:
        print_text("--details shows the settings for TRL, the assumed workload and the memory.")
        return

    chosen = plan.best or plan.leanest
    rollouts = chosen.rollouts
    print()
    print_text(
        f"workload: prompts {plan.task.workload.lengths}, longest {rollouts.prompt_tokens:,}; "
        f"completions {plan.completions}, cut off at {rollouts.completion_tokens:,}; "
        f"{rollouts.num_generations} to each prompt, {rollouts.sequences:,} in a generation"
    )
    print_lines({"layout": chosen.config.label()} | trl_settings(plan, chosen))
    for phase, bounds in chosen.phases.items():
        terms = bounds.reported.terms()
        listed = " + ".join(f"{name} {value:.1f}" for name, value in terms.items() if value >= 0.05)
        print_text(f"{str(phase).replace('_', '-')}: {listed}")


def print_rollout_study(study: RolloutStudy) -> None:
    """Print the answer of a search for a GRPO run."""
    answer = rollout_study_answer(study)
    print_text(answer.answer)
    print_lines({name: text for name, text in answer.lines().items() if text})


def trl_settings(plan: RolloutPlan, layout: Layout) -> dict[str, str]:
    """Return the settings of TRL for a layout."""
    config = layout.config
    rollouts = layout.rollouts
    engine = rollouts.engine
    steps = plan.task.workload.accumulation(config)
    settings = {
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": steps,
        "steps_per_generation": rollouts.sequences // config.micro_batch_size,
        "num_generations": rollouts.num_generations,
        "max_completion_length": rollouts.completion_tokens,
        "vllm_gpu_memory_utilization": engine.share,
        "vllm_max_model_length": engine.max_tokens,
        "vllm_enable_sleep_mode": engine.sleeps,
    }
    return {name: str(value).lower() for name, value in settings.items()}


def _print_details(study_plan: Plan) -> None:
    best = None if study_plan.best is study_plan.baseline else study_plan.best
    for name, estimated in (("best", best), ("baseline", study_plan.baseline)):
        if estimated is not None:
            print()
            lines = estimate_lines(estimated, study_plan.task)
            print_lines({name: estimated.config.label()} | lines)

    print()
    print_text(f"{estimate_basis(study_plan.how_sure, study_plan.calibrated)}.")
    for removal in study_plan.left_out:
        print_text(removal, "left out: ")
    for name, cells in study_plan.what_fits.items():
        print()
        _print_table(name, cells, study_plan.limit_gib)


def _print_table(name: str, cells: Sequence[Cell], limit_gib: float) -> None:
    if not any(cell.chosen.state in (FITS, TIGHT) for cell in cells):
        least = min(cell.recomputed.need_gib for cell in cells)
        print_text(
            f"{name}: does not fit: it needs at least {fmt_gib(least)} of {fmt_gib(limit_gib)}"
        )
        return

    print_text(
        f"{name}: GiB by sequence length and micro batch size, not compiled and without chunked "
        "loss (c: fits only if every layer is recomputed, ?: too close to tell)"
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

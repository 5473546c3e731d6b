"""The answers of commands in words: the answer, its needs and cost, how certain they are, and why.

Each is made from the frozen value of the command, once for all renderers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from autotune.catalog import NO_PRICE, describe_price
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.problem.run_cost import OOM, TIGHT
from autotune.problem.task import Task
from autotune.report import describe
from autotune.report.values.check import VERDICTS, CheckReport
from autotune.report.values.estimate import Estimate
from autotune.report.values.plan import LITTLE_KNOWN, Plan
from autotune.study.scaling import GpuPlan
from autotune.study.summary import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a command in words, in the order of a reader's questions. `details` is the whole value."""

    answer: str
    needs: str
    cost: str
    certainty: str
    reason: str
    details: Any


# --- plan


def plan_answer(made: Plan) -> Answer:
    """The best configuration on one card."""
    chosen = made.best or made.baseline
    lines = estimate_lines(chosen, made.task)

    reason = made.reason if made.reason in LITTLE_KNOWN or made.best is not None else ""
    if made.best is not None and made.reason not in LITTLE_KNOWN and made.num_estimated < made.space_size:
        of_all = f" (of the first {made.num_estimated:,} of {made.space_size:,} configurations)"
        reason += "" if made.counted else of_all

    return Answer(
        answer=made.best.config.label() if made.best else "no configuration is certain to fit",
        needs=lines["memory"],
        cost=lines.get("cost", DASH),
        certainty=describe.how_known(made.how_sure, made.calibrated),
        reason=reason,
        details=made,
    )


def estimate_lines(estimated: Estimate, task: Task) -> dict[str, str]:
    """The estimates of a configuration by label: memory, speed, run and cost."""
    need = f"{fmt_gib(estimated.need_gib)} of {fmt_gib(estimated.limit_gib)}, {estimated.state}"
    terms = memory_terms(estimated)
    cost, price = estimated.cost, task.price
    if estimated.interval is None or cost is None:
        return {"memory": f"{need}: {terms}"} | ({} if estimated.state == OOM else {"speed": "unknown"})
    hours = " to ".join(map(fmt_hours, cost.interval_hours))
    lines = {
        "memory": f"{need}: {terms}",
        "speed": speed_text(estimated),
        "run": f"{fmt_hours(cost.full_run_hours)} ({hours}) for {cost.examples:,} examples x {cost.epochs}",
        "cost": f"{DASH} ({NO_PRICE}: --price USD_PER_HOUR)",
    }
    if price is not None and cost.interval_usd is not None:
        bounds = " to ".join(map(fmt_usd, cost.interval_usd))
        spot = f", spot {fmt_usd(cost.spot_usd)}" if cost.spot_usd is not None else ""
        lines["cost"] = f"{fmt_usd(cost.full_run_usd)} ({bounds}){spot} at {describe_price(price, date.today())}"
    return lines


def memory_terms(estimated: Estimate) -> str:
    """'weights 13.5 + adapters 0.2 + ...': the terms of the memory that are large enough to show."""
    terms = estimated.memory.terms() if estimated.memory else {}
    return " + ".join(f"{name} {value:.1f}" for name, value in terms.items() if value >= 0.05)


def speed_text(estimated: Estimate, unit: str = "useful tokens/s") -> str:
    """'1,109 useful tokens/s (934 to 1,318, tightened by 2 measured on this card)', also with the calibrated parts."""
    low, high = map(fmt_count, estimated.interval or (None, None))
    count = estimated.num_observations
    tightened = f", tightened by {count} measured on this card" if count else ""
    tightened = ", no measurement of this kind of card" if estimated.is_guess else tightened
    tightened += f", {estimated.calibrated}" if estimated.calibrated else ""
    return f"{fmt_count(estimated.tokens_per_s)} {unit} ({low} to {high}{tightened})"


# --- plan --gpus


def gpu_answer(made: GpuPlan) -> Answer:
    """The cheapest and the fastest number of GPUs."""
    task, choices = made.task, describe.gpu_choices(made.trainable, made.within_hours)
    price = describe_price(task.price, date.today()) if task.price else f"{NO_PRICE}: --price USD_PER_HOUR"
    return Answer(
        answer="\n".join(choices),
        needs=f"{fmt_gib(task.device.memory_gib)} each, {fmt_gib(made.limit_gib)} of it for tensors and NCCL",
        cost=f"price of a GPU: {price}",
        certainty=f"Every number is projected, nothing was measured here: {made.how_sure}",
        reason=next((row.problem for row in made.rows if row.problem), ""),
        details=made,
    )


# --- check


def check_answer(report: CheckReport) -> Answer:
    """The verdict on another tool's run."""
    checked = report.checked
    return Answer(
        answer=verdict(report),
        needs=f"{memory_terms(checked.estimate)}; the peak is in the {checked.bounds.reported.phase} pass",
        cost=dict(duration_lines(report)).get("cost", DASH),
        certainty=describe.how_known(report.how_sure, report.calibrated),
        reason=" ".join(report.notes),
        details=report,
    )


def verdict(report: CheckReport) -> str:
    """'out of memory: needs 27.3 of 20.6 GiB on a10, 6.7 GiB (33 %) too much'."""
    checked, limit, device = report.checked, report.limit_gib, report.device.label
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


def duration_lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    """The speed, time and cost of the run, as (label, text) of each line."""
    if report.runnable is None:
        return
    estimated, run = report.runnable.estimate, report.checked.run
    cost, price, workload = estimated.cost, report.price, report.workload
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


# --- run, status, report


def study_answer(recipe: Recipe) -> Answer:
    """The winner of a study."""
    winner = recipe.winner
    number = {name: one.text for name, one in describe.numbers(winner).items()}
    of_example = "" if recipe.example_gib is None else f" on an example card of {fmt_gib(recipe.example_gib)}"
    return Answer(
        answer=winner.config.label(),
        needs=f"{number['peak reserved']} at the peak, {number['limit']} is the limit{of_example}",
        cost=_study_cost(recipe, number),
        certainty=f"{describe.evidence(winner)}. {describe.intervals(winner)}",
        reason=recipe.reason,
        details=recipe,
    )


def _study_cost(recipe: Recipe, number: dict[str, str]) -> str:
    """'$0.58 ($0.57 to $0.59) for the full run of 10 min (9 min 50 s to 10 min 5 s), 10,000 examples; $3.50/h, ...'."""
    cost = recipe.winner.cost
    run = f"{number['time']} ({describe.hours_range(cost)}), {describe.workload(recipe.workload)}"
    if recipe.price is None:
        return f"the full run takes {run}; {NO_PRICE} (--price USD_PER_HOUR)"
    price = describe_price(recipe.price, date.today())
    return f"{number['USD']} ({describe.usd_range(cost)}) for the full run of {run}; {price}"

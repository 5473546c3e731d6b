"""Puts the answers of commands into words: result, memory, cost, certainty and reason.

Each answer is created from the command's frozen value, once for all renderers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from autotune.catalog import NO_PRICE, describe_price
from autotune.core.probe_types import Phase
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.task import Task
from autotune.report import describe
from autotune.report.values.check import VERDICTS, CheckReport
from autotune.report.values.estimate import Estimate
from autotune.report.values.plan import LITTLE_KNOWN, Plan
from autotune.study.scaling import GpuPlan
from autotune.study.summary import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a command in words, in the order of a reader's questions.

    `needs` is about memory. `details` is the command's complete value.
    """

    answer: str
    needs: str
    cost: str
    certainty: str
    reason: str
    details: Any


# --- plan


def plan_answer(plan: Plan) -> Answer:
    """Return an answer with the best configuration on one card."""
    chosen = plan.best or plan.baseline
    lines = estimate_lines(chosen, plan.task)

    little_known = plan.reason in LITTLE_KNOWN
    reason = plan.reason if little_known or plan.best is not None else ""
    is_partial = plan.num_estimated < plan.space_size and not plan.counted
    if plan.best is not None and not little_known and is_partial:
        reason += f" (of the first {plan.num_estimated:,} of {plan.space_size:,} configurations)"

    return Answer(
        answer=plan.best.config.label() if plan.best else "no configuration is certain to fit",
        needs=lines["memory"],
        cost=lines.get("cost", DASH),
        certainty=describe.estimate_basis(plan.how_sure, plan.calibrated),
        reason=reason,
        details=plan,
    )


def estimate_lines(estimated: Estimate, task: Task) -> dict[str, str]:
    """Return the estimates of a configuration by label: memory, speed, run and cost."""
    need = f"{fmt_gib(estimated.need_gib)} of {fmt_gib(estimated.limit_gib)}, {estimated.state}"
    terms = memory_terms(estimated)
    cost = estimated.cost
    price = task.price
    if estimated.interval is None or cost is None:
        speed: dict[str, str] = {} if estimated.state == OOM else {"speed": "unknown"}
        return {"memory": f"{need}: {terms}"} | speed

    hours = " to ".join(map(fmt_hours, cost.interval_hours))
    lines = {
        "memory": f"{need}: {terms}",
        "speed": speed_text(estimated),
        "run": f"{fmt_hours(cost.full_run_hours)} ({hours}) "
        f"for {cost.examples:,} examples x {cost.epochs} epoch(s)",
        "cost": f"{DASH} ({NO_PRICE}: --price USD_PER_HOUR)",
    }
    if price is not None and cost.interval_usd is not None:
        bounds = " to ".join(map(fmt_usd, cost.interval_usd))
        spot = f", spot {fmt_usd(cost.spot_usd)}" if cost.spot_usd is not None else ""
        hourly = describe_price(price, date.today())
        lines["cost"] = f"{fmt_usd(cost.full_run_usd)} ({bounds}){spot} at {hourly}"
    return lines


def memory_terms(estimated: Estimate) -> str:
    """List the memory terms that are at least 0.05 GiB: 'weights 13.5 + adapters 0.2 + ...'."""
    terms = estimated.memory.terms() if estimated.memory else {}
    return " + ".join(f"{name} {value:.1f}" for name, value in terms.items() if value >= 0.05)


def speed_text(estimated: Estimate, unit: str = "useful tokens/s") -> str:
    """Format a speed with its interval and its basis.

    For example '1,109 useful tokens/s (934 to 1,318, narrowed by measurements on this card: 2)',
    with the calibrated parts of the estimate at the end.
    """
    low, high = map(fmt_count, estimated.interval or (None, None))
    count = estimated.num_observations
    basis = f", narrowed by measurements on this card: {count}" if count else ""
    basis = ", no measurement of this kind of card" if estimated.is_guess else basis
    basis += f", {estimated.calibrated}" if estimated.calibrated else ""
    return f"{fmt_count(estimated.tokens_per_s)} {unit} ({low} to {high}{basis})"


# --- plan --gpus


def gpu_answer(plan: GpuPlan) -> Answer:
    """Return an answer with the cheapest and the fastest number of GPUs."""
    task = plan.task
    choices = describe.gpu_choices(plan, plan.within_hours)
    price = f"{NO_PRICE}: --price USD_PER_HOUR"
    if task.price:
        price = describe_price(task.price, date.today())

    return Answer(
        answer="\n".join(choices),
        needs=f"{fmt_gib(task.device.memory_gib)} each, "
        f"{fmt_gib(plan.limit_gib)} of it for tensors and NCCL",
        cost=f"price of a GPU: {price}",
        certainty=f"Every number is projected, nothing was measured here: {plan.how_sure}",
        reason=next((row.problem for row in plan.rows if row.problem), ""),
        details=plan,
    )


# --- check


def check_answer(report: CheckReport) -> Answer:
    """Return an answer with the verdict on another tool's run."""
    checked = report.checked
    phase = checked.bounds.reported.phase
    return Answer(
        answer=verdict(report),
        needs=f"{memory_terms(checked.estimate)}; the peak is in {_moment(phase)}",
        cost=dict(duration_lines(report)).get("cost", DASH),
        certainty=describe.estimate_basis(report.how_sure, report.calibrated),
        reason=" ".join(report.notes),
        details=report,
    )


def _moment(phase: Phase) -> str:
    return "an evaluation" if phase is Phase.EVALUATE else f"the {phase} pass"


def verdict(report: CheckReport) -> str:
    """Return the verdict in words.

    For example 'out of memory: needs 27.3 of 20.6 GiB on a10, 6.7 GiB (33 %) too much'. If the
    needed memory is uncertain, the text has its lower bound or its range.
    """
    checked = report.checked
    bounds = checked.bounds
    limit = report.limit_gib
    device = report.device.label
    num_gpus = checked.run.num_gpus or 1
    place = f"each of {num_gpus} {device}" if num_gpus > 1 else device
    if checked.state != FITS and bounds.reported.phase is Phase.EVALUATE:
        place += " in an evaluation"

    # Describe the memory that the run needs, or its range.
    least = bounds.least.peak_reserved_gib
    peak = least if checked.state == OOM else checked.estimate.need_gib
    lower = ""
    if bounds.least != bounds.most:
        has_range = bounds.most is not None and checked.state != OOM
        lower = f"{least:.1f} to " if has_range else "at least "
    needs = f"{VERDICTS[checked.state]}: needs {lower}{peak:.1f} of {limit:.1f} GiB on {place}"
    if lower and checked.state == TIGHT:
        return needs

    # Describe the distance to the limit.
    difference = f"{abs(peak - limit):.1f} GiB ({100 * abs(peak / limit - 1):.0f} %)"
    direction = "too much" if peak > limit else "to spare"
    error = ""
    if checked.state == TIGHT:
        error = f", and the estimate errs by up to {100 * bounds.reported.error:.2g} %"
    return f"{needs}, {difference} {direction}{error}"


def duration_lines(report: CheckReport) -> Iterator[tuple[str, str]]:
    """Yield the speed, time and cost of the run, as (label, text) of each line."""
    if report.runnable is None:
        return

    estimated = report.runnable.estimate
    run = report.checked.run
    cost = estimated.cost
    change = ", with that change" if report.checked.state == OOM else ""
    if cost is None:
        yield "speed", f"unknown: no formula gives it{change}"
        return
    each = " a GPU" if (run.num_gpus or 1) > 1 else ""
    yield "speed", f"{speed_text(estimated, f'useful tokens/s{each}')}, estimated{change}"

    steps = f"{cost.num_steps:,} steps"
    if run.max_steps is None:
        assumed = " (assumed)" if report.workload.examples_assumed else ""
        steps = f"{report.workload.examples:,} examples{assumed} x {run.epochs:g} epoch(s), {steps}"
    hours = " to ".join(map(fmt_hours, cost.interval_hours))
    yield "run", f"{fmt_hours(cost.full_run_hours)} ({hours}) for {steps}, estimated{change}"

    price = report.price
    if price is None or cost.interval_usd is None:
        yield "cost", f"{DASH} ({NO_PRICE}: --price USD_PER_HOUR)"
        return
    bounds = " to ".join(map(fmt_usd, cost.interval_usd))
    usd = f"{fmt_usd(cost.full_run_usd)} ({bounds}) at {describe_price(price, date.today())}{each}"
    yield "cost", f"{usd}, estimated; without start-up, saves and evaluation"


# --- run, status, report


def study_answer(recipe: Recipe) -> Answer:
    """Return an answer with the winner of a study."""
    winner = recipe.winner
    number = {name: one.text for name, one in describe.numbers(winner).items()}
    card = ""
    if recipe.example_gib is not None:
        card = f" on an example card of {fmt_gib(recipe.example_gib)}"

    return Answer(
        answer=winner.config.label(),
        needs=f"{number['peak reserved']} at the peak, {number['limit']} is the limit{card}",
        cost=_study_cost(recipe, number),
        certainty=f"{describe.evidence(winner)}. {describe.intervals(winner)}",
        reason=recipe.reason,
        details=recipe,
    )


def _study_cost(recipe: Recipe, number: dict[str, str]) -> str:
    """Describe cost and time with their intervals, the workload, and the price of an hour."""
    cost = recipe.winner.cost
    run = f"{number['time']} ({describe.hours_range(cost)}), {describe.workload(recipe.workload)}"
    if recipe.price is None:
        return f"the full run takes {run}; {NO_PRICE} (--price USD_PER_HOUR)"
    price = describe_price(recipe.price, date.today())
    return f"{number['USD']} ({describe.usd_range(cost)}) for the full run of {run}; {price}"

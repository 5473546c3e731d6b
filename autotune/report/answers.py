"""Puts the answers of commands into words: result, memory, cost, certainty and reason.

Each answer is made once, from the frozen dataclass that the command returns, for all renderers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from autotune.catalog import NO_PRICE, DeviceSpec, describe_price
from autotune.core.knobs import FP32_ADAMW
from autotune.core.memory_budget import PINNED
from autotune.core.probe_types import Evidence, Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_many, fmt_seconds, fmt_usd
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.setup import WORTH_A_WARNING
from autotune.problem.task import Task
from autotune.report import describe
from autotune.report.values.check import VERDICTS, CheckReport
from autotune.report.values.estimate import Estimate
from autotune.report.values.longest import LongestAnswer, LongestRow
from autotune.report.values.plan import LITTLE_KNOWN, Plan
from autotune.report.values.rollouts import RolloutPlan, RolloutStudy
from autotune.report.values.trainable import METHODS, Entry, Trainable
from autotune.study.scaling import GpuPlan, RankPlan
from autotune.study.summary import Recipe

_METHODS = {"lora": "LoRA", "qlora": "QLoRA", "full": "full fine-tuning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a command in words, in the order of a reader's questions.

    `answer` is a verdict, or a name with its most important numbers. `needs` describes memory.
    `change` is the first change to make if nothing fits. `details` is the complete value that the
    command returns.
    """

    answer: str
    needs: str
    cost: str
    certainty: str
    reason: str
    details: Any
    change: str = ""

    def lines(self) -> dict[str, str]:
        """Return {label: text} for the texts after `answer`."""
        return {
            "needs": self.needs,
            "change": self.change,
            "cost": self.cost,
            "certainty": self.certainty,
            "why": self.reason,
        }


# --- one configuration, in the answers of several commands


def shape(config: TrainConfig) -> str:
    """Describe the method and the size of the micro batch, such as 'LoRA r16, 1 x 1,024'.

    In full fine-tuning, pure bf16 and an optimizer with a compact state are named, because they
    may learn differently.
    """
    kind = "full fine-tuning"
    if config.method == "full":
        kind += " in pure bf16" if config.precision == "bf16_pure" else ""
        kind += "" if config.optimizer in FP32_ADAMW else f" with {config.optimizer}"
    else:
        name = "QLoRA" if config.quantization == "nf4" else "LoRA"
        kind = f"{name} r{config.lora_rank}"
    base = "" if config.quantization in ("none", "nf4") else f" on {config.quantization}"
    return f"{kind}{base}, {config.micro_batch_size} x {config.seq_len:,}"


def run_numbers(estimated: Estimate, num_gpus: int = 1) -> str:
    """Return the speed, time and cost of the run, such as '1,069 tokens/s, 2 h 40 min, $3.44'."""
    cost = estimated.cost
    if estimated.tokens_per_s is None or cost is None:
        return f"{fmt_gib(estimated.need_gib)}, at an unknown speed"
    usd = [] if cost.full_run_usd is None else [fmt_usd(cost.full_run_usd)]
    speed = f"{fmt_count(num_gpus * estimated.tokens_per_s)} tokens/s"
    return ", ".join([speed, fmt_hours(cost.full_run_hours), *usd])


def held_text(estimated: Estimate) -> str:
    """Return the memory of a configuration, as an interval if the routing of tokens decides it."""
    bounds = estimated.interval_gib or (estimated.held_gib,)
    return " to ".join(dict.fromkeys(map(fmt_gib, bounds)))


def memory_text(estimated: Estimate, device: DeviceSpec, each: str = "") -> str:
    """Return the memory that a configuration takes, its limit, and the memory of the card.

    If torch keeps free blocks while the GPU has room, the memory without these blocks follows.
    `each` is ", on each GPU" if there are several.
    """
    card = f" (the GPU has {fmt_gib(device.memory_gib)})" if device.memory_gib else ""
    if device.memory_gib and device.unified_memory:
        card = f" (the GPU and its host share {fmt_gib(device.memory_gib)})"
    enough = ""
    if estimated.interval_gib is None and estimated.held_gib > estimated.need_gib:
        enough = f"; {fmt_gib(estimated.need_gib)} would be enough"
    limit = fmt_gib(estimated.limit_gib)
    return f"{held_text(estimated)} of {limit} for tensors{card}{each}{enough}"


def cost_text(estimated: Estimate, task: Task, at: str = "at") -> str:
    """Return the cost of the run with its interval, its price and its work.

    `at` is the text before the price. It is "each GPU at" if the run uses several GPUs.
    """
    cost = estimated.cost
    price = task.price
    if cost is None:
        return f"{DASH} (the speed is unknown)"
    work = task.workload
    assumed = " (assumed)" if work.examples_assumed else ""
    epochs = fmt_many(cost.epochs, "epoch")
    cut = _cut_text(estimated, task)
    at_length = f"{cut} at {estimated.config.seq_len:,}" if cut else ""
    run = f"{fmt_many(cost.examples, 'example')}{assumed} of {work.lengths}{at_length}, {epochs}"
    if price is None or cost.interval_usd is None:
        return f"{DASH} ({NO_PRICE}: --price USD_PER_HOUR), for {run}"
    spot = f", {fmt_usd(cost.spot_usd)} at spot" if cost.spot_usd is not None else ""
    bounds = " to ".join(map(fmt_usd, cost.interval_usd))
    return f"{bounds}{spot}, {at} {describe_price(price, date.today())}, for {run}"


def _cut_text(estimated: Estimate, task: Task) -> str:
    """Return ", 50 % of the tokens cut off", or "" if hardly any token is."""
    cut = task.workload.truncated(estimated.config.seq_len)
    return f", {100 * cut:.3g} % of the tokens cut off" if cut >= WORTH_A_WARNING else ""


def certainty(estimated: Estimate, num_gpus: int = 1) -> str:
    """Return the kind of evidence behind an estimate, and the interval of its speed."""
    basis = f"estimated, {estimated.calibrated or 'nothing was measured here'}"
    if estimated.interval is None:
        return basis
    low, high = (fmt_count(num_gpus * bound) for bound in estimated.interval)
    count = estimated.num_observations
    narrowed = f", narrowed by measurements on this GPU: {count}" if count else ""
    guess = ", a guess without a measurement of this kind of GPU" if estimated.is_guess else ""
    return f"{basis}; {low} to {high} tokens/s in 80 % of cases{narrowed}{guess}"


# --- plan


def plan_answer(plan: Plan) -> Answer:
    """Return an answer with the best configuration on one card."""
    chosen = plan.shown
    little_known = plan.reason in LITTLE_KNOWN
    reason = plan.reason if little_known or plan.best is not None else ""
    is_partial = plan.num_estimated < plan.space_size and not plan.counted
    if plan.best is not None and not little_known and is_partial:
        reason += f" (of the first {plan.num_estimated:,} of {plan.space_size:,} configurations)"

    return Answer(
        answer=_plan_verdict(plan),
        needs=memory_text(chosen, plan.task.device),
        cost=cost_text(chosen, plan.task) if plan.best else "",
        certainty=certainty(chosen),
        reason=reason,
        change=str(plan.change or ""),
        details=plan,
    )


def _plan_verdict(plan: Plan) -> str:
    model = plan.task.model.short
    card = plan.task.device.label
    if plan.best is not None:
        numbers = run_numbers(plan.best) + _cut_text(plan.best, plan.task)
        return f"{model} fits {card}: {shape(plan.best.config)}, {numbers} (estimated)"

    need = fmt_gib(plan.shown.need_gib)
    if plan.reason in LITTLE_KNOWN:
        verdict, need = "fits", f"it needs {need}"
    elif plan.shown is plan.baseline:
        verdict, need = "does not surely fit", f"the baseline needs {need}"
    else:
        verdict = "does not fit" if plan.shown.state == OOM else "does not surely fit"
        need = f"it needs at least {need}"
    speed = ", at an unknown speed" if plan.reason in LITTLE_KNOWN else ""
    return f"{model} {verdict} {card}{speed}: {need} of {fmt_gib(plan.limit_gib)} (estimated)"


def rollout_answer(plan: RolloutPlan) -> Answer:
    """Return an answer with the best layout of a GRPO run on one card."""
    chosen = plan.best or plan.leanest
    rollouts = chosen.rollouts
    engine = rollouts.engine
    model = plan.task.model.short
    card = plan.task.device.label
    sleep = ", asleep during updates" if engine.sleeps else ""
    layout = f"{shape(chosen.config)}, {engine.share:.0%} of the GPU for vLLM{sleep}"
    need = f"{fmt_gib(chosen.need_gib)} of {fmt_gib(plan.limit_gib)}"
    verdict = f"{model} fits {card} with grpo: {layout}, {need} (estimated)"
    if plan.best is None:
        state = "does not fit" if chosen.state == OOM else "does not surely fit"
        verdict = f"{model} {state} {card} with grpo: the leanest layout needs {need} (estimated)"

    change = f"{plan.change} makes it fit" if plan.change else ""
    if plan.fits_up_to:
        longest = f"{rollouts.completion_tokens:,}"
        cut = f"completions fit up to {plan.fits_up_to:,} of {longest} tokens"
        change = f"{change}; {cut}" if change else cut
    return Answer(
        answer=verdict,
        needs=phases_text(chosen.bounds_of_phases),
        cost="" if plan.best is None else f"{DASH} (the time to generate completions is unknown)",
        certainty=f"estimated, {plan.how_sure}",
        reason=plan.reason,
        change=change,
        details=plan,
    )


def rollout_study_answer(study: RolloutStudy) -> Answer:
    """Return an answer with the fastest layout of a GRPO run that was measured."""
    best = study.best
    model, card = study.task.model.short, study.task.device.label
    if best is None or best.step is None:
        long = [layout.breaks_at for layout in study.layouts if layout.breaks_at]
        failed = {str(layout.phase) for layout in study.layouts if layout.phase}
        return Answer(
            answer=f"{model} does not fit {card} with grpo (measured)",
            needs="",
            cost="",
            certainty=f"measured with {study.engine.engine}",
            reason=f"memory runs out in {' or '.join(sorted(failed))}" if failed else "",
            change=f"completions fit up to {max(long) - 1:,} tokens" if long else "",
            details=study,
        )
    sleep = ", asleep during updates" if best.sleeps else ""
    share = f", {best.share:.0%} of the GPU for vLLM{sleep}" if study.engine.weights_gib else ""
    _, peak_gib = best.step.peak
    seconds = best.step.seconds
    return Answer(
        answer=f"{model} trains {best.score:.3g} prompts/s with grpo on {card}: "
        f"{shape(best.config)}{share}, {fmt_gib(peak_gib)} of {fmt_gib(study.limit_gib)} "
        "(measured)",
        needs="; ".join(
            f"{str(name).replace('_', '-')} {fmt_gib(value)}"
            for name, value in best.step.phase_gib.items()
        ),
        cost=f"{seconds:.1f} s for a generation with its updates: "
        + ", ".join(
            f"{str(name).replace('_', '-')} {value:.1f} s"
            for name, value in best.step.phase_s.items()
        ),
        certainty=f"phases measured apart, with {study.engine.engine}; {_verified(study)}",
        reason=_two_gpus_text(study),
        details=study,
    )


def _verified(study: RolloutStudy) -> str:
    """Say how TRL's own run compares with the sum of the phases."""
    found = study.verification
    if found is None:
        return "their sum is not measured (--verify)"
    if found.problem is not None or found.step_error is None:
        return f"TRL's run failed after {found.steps} steps: {found.problem}"
    assert study.best is not None and study.best.step is not None
    took = describe.compared(found.predicted_step_s, found.step_s, "slower", "faster")
    peak_gib = max(found.phase_gib.values())
    memory = describe.compared(study.best.step.peak[1], peak_gib, "higher", "lower")
    return (
        f"TRL's run took {found.step_s:.1f} s for each of {found.steps} steps, {took}, and "
        f"{fmt_gib(peak_gib)}, {memory}"
    )


def _two_gpus_text(study: RolloutStudy) -> str:
    """Say which layout of two GPUs is faster, as far as it is predicted."""
    two = study.two_gpus
    speeds = {"both generate and train": two.colocated, "one generates, one trains": two.apart}
    known = [
        f"{one.step.prompts_per_s:.3g} prompts/s if {name}" for name, one in speeds.items() if one
    ]
    return f"two GPUs, predicted from these phases: {', '.join(known)}" if known else ""


def estimate_lines(estimated: Estimate, task: Task) -> dict[str, str]:
    """Return {label: text} for a configuration's estimates: memory, speed, run and cost."""
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
        f"for {fmt_many(cost.examples, 'example')} x {fmt_many(cost.epochs, 'epoch')}",
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
    basis = f", narrowed by measurements on this GPU: {count}" if count else ""
    basis = ", no measurement of this kind of GPU" if estimated.is_guess else basis
    basis += f", {estimated.calibrated}" if estimated.calibrated else ""
    return f"{fmt_count(estimated.tokens_per_s)} {unit} ({low} to {high}{basis})"


# --- plan --gpus


def gpu_answer(plan: GpuPlan) -> Answer:
    """Return an answer with the cheapest number of GPUs, within the deadline if there is one."""
    task = plan.task
    chosen = plan.cheapest if plan.within_hours is None else plan.cheapest_within
    shown = chosen or min(
        (row for row in plan.choices if row.estimate),
        key=lambda row: row.estimate.need_gib if row.estimate else 0.0,
        default=None,
    )
    estimated = shown.estimate if shown else None
    num_gpus = shown.num_gpus if shown else 1

    return Answer(
        answer=_gpus_verdict(plan, chosen, shown),
        needs=_gpus_needs(estimated, task, num_gpus) if estimated else "",
        cost=cost_text(estimated, task, "each GPU at" if num_gpus > 1 else "at")
        if estimated and chosen
        else "",
        certainty=certainty(estimated, num_gpus) if estimated else "",
        reason=_gpus_reason(plan, chosen),
        change=str(plan.change or ""),
        details=plan,
    )


def _gpus_needs(estimated: Estimate, task: Task, num_gpus: int) -> str:
    """Return the memory of each GPU, and the memory of the host if tensors are offloaded to it."""
    needs = memory_text(estimated, task.device, ", on each GPU")
    if estimated.memory is None or not estimated.memory.host:
        return needs
    host_gib = num_gpus * estimated.memory.host
    pinned = fmt_gib(PINNED * host_gib)
    return f"{needs}; {fmt_gib(host_gib)} of the host's memory, or up to {pinned} if it is pinned"


def _gpus_verdict(plan: GpuPlan, chosen: RankPlan | None, shown: RankPlan | None) -> str:
    model = plan.task.model.short
    card = plan.task.device.label
    deadline = "" if plan.within_hours is None else f" within {fmt_hours(plan.within_hours)}"
    pinned = f" with {plan.ignored_pins}" if plan.ignored_pins else ""
    if chosen is not None and chosen.estimate is not None:
        known = " (of the known speeds)" if plan.has_unknown_speed else ""
        numbers = run_numbers(chosen.estimate, chosen.num_gpus)
        config = shape(chosen.estimate.config)
        verb = "trains" if chosen.num_gpus == 1 else "train"
        who = f"{_layout(chosen, card)} {verb} {model} cheapest{deadline}{known}"
        return f"{who}: {config}, {numbers} (estimated)"

    if shown is None or shown.estimate is None:
        counts = {row.num_gpus for row in plan.rows}
        who = f"No number of {card} trains"
        if len(counts) == 1:
            who = f"{min(counts)} {card} cannot train"
        return f"{who} {model}{pinned}: 0 of {len(plan.choices)} plans are possible"
    need = f"{held_text(shown.estimate)} of {fmt_gib(plan.limit_gib)} on each GPU"
    if plan.fits:
        late = f", and no plan is known to end{deadline}" if deadline else ", at an unknown speed"
        return f"{model} fits {_layout(shown, card)}{late}: it needs {need} (estimated)"
    return f"{model} does not surely fit {_layout(shown, card)}: it needs {need} (estimated)"


def _layout(row: RankPlan, card: str) -> str:
    """Return '1 h100-sxm', '8 h100-sxm with fsdp2' or '16 h100-sxm with fsdp2 on 2 hosts'."""
    hosts = f" on {row.hosts} hosts" if row.hosts > 1 else ""
    strategy = f" with {row.parallelism.name}" if row.num_gpus > 1 else ""
    return f"{row.num_gpus} {card}{strategy}{hosts}"


def _gpus_reason(plan: GpuPlan, chosen: RankPlan | None) -> str:
    """Compare the cheapest plan with the fastest plan, or say that it may miss the deadline."""
    if any(row.parallelism.expert_parallel > 1 for row in plan.rows):
        return plan.how_sure
    if chosen is None or chosen.estimate is None or chosen.estimate.cost is None:
        return next((row.problem for row in plan.choices if row.problem), "")
    high = chosen.estimate.cost.interval_hours[1]
    if plan.within_hours is not None and high > plan.within_hours:
        return f"the cheapest in time; it may take {fmt_hours(high)}"

    fastest = plan.fastest
    pinned = f" with {plan.ignored_pins}" if plan.ignored_pins else ""
    if fastest is None or fastest == chosen:
        return f"it is the cheapest and the fastest{pinned}"
    usd = "" if fastest.usd is None else f", {fmt_usd(fastest.usd)}"
    layout = _layout(fastest, plan.task.device.label)
    return f"it is the cheapest{pinned}; the fastest is {layout}: {fmt_hours(fastest.hours)}{usd}"


# --- plan of a card, without a model


def card_answer(result: Trainable) -> Answer:
    """Return an answer that names the largest model that a card trains with each method."""
    largest = [entry for method in METHODS if (entry := result.largest(method))]
    card = result.device.label
    answer = f"{card} surely trains none of {len(result.models)} models of different sizes"
    if largest:
        answer = f"{card} trains models of up to {', '.join(map(_largest_text, largest))}"

    cost = ""
    if largest:
        entry = largest[0]
        price = describe_price(result.price, date.today())
        cost = f"{fmt_usd(entry.usd_per_1000)} for 1,000 examples of {result.lengths} with "
        cost += f"{entry.model.rpartition('/')[2]} and {_METHODS[entry.method]}, at {price}"
    guess = "; the speeds are guesses: no GPU of this kind was measured" * result.is_guess

    return Answer(
        answer=f"{answer} (estimated)",
        needs=f"{fmt_gib(result.limit_gib)} of {fmt_gib(result.device.memory_gib)} are for tensors",
        cost=cost,
        certainty=f"estimated, {result.calibrated or 'nothing was measured here'}{guess}",
        reason=f"of {len(result.models)} models, one of each size, these are the largest that "
        "surely fit without a setting that changes learning",
        details=result,
    )


def _largest_text(entry: Entry) -> str:
    """Return a text such as '8.03 billion parameters with LoRA (Llama-3.1-8B)'."""
    size = f"{entry.params / 1e9:.3g} billion parameters" if entry.params else "unknown size"
    return f"{size} with {_METHODS[entry.method]} ({entry.model.rpartition('/')[2]})"


# --- longest


def row_answer(found: LongestAnswer) -> Answer:
    """Return an answer with the longest training sequence (row) that any of the methods can fit."""
    longest = max(found.rows, key=lambda row: row.tokens or 0)
    model = found.model.rpartition("/")[2]
    if longest.tokens is None:
        problems = "; ".join(f"{row.method}: {row.problem}" for row in found.rows if row.problem)
        is_known = any(row.limited_by for row in found.rows)
        verdict = (
            f"no sequence of {model} fits"
            if is_known
            else f"the longest sequence of {model} is unknown"
        )
        limit = f"{fmt_gib(found.limit_gib)} for tensors"
        return Answer(
            answer=f"{found.device}, which has {limit}: {verdict}",
            needs="",
            cost="",
            certainty="",
            reason=problems,
            details=found,
        )

    about = "about " if longest.step_s_low != longest.step_s_high else ""
    speed = ""
    if longest.tokens_per_s is not None:
        speed = f", {about}{longest.tokens_per_s:,.0f} tokens/s"
    row = f"sequences of up to {longest.tokens:,} tokens of {model}"
    host = "" if longest.host_gib is None else f", and {fmt_gib(longest.host_gib)} of the host"
    times = dict.fromkeys((fmt_seconds(longest.step_s_low), fmt_seconds(longest.step_s_high)))
    method = _METHODS[longest.method]
    return Answer(
        answer=f"{found.device} trains {row} with {method}{speed} ({longest.evidence})",
        needs=f"{fmt_gib(longest.gpu_gib)} of {fmt_gib(found.limit_gib)} for tensors{host}",
        cost=f"{' to '.join(times)} for a step",
        certainty=_row_certainty(found, longest),
        reason=f"it is limited by {longest.limited_by}" if longest.limited_by else "",
        details=found,
    )


def _row_certainty(found: LongestAnswer, longest: LongestRow) -> str:
    """Say whether a step with this row was measured.

    If the row is longer than the rows that the model was trained for, say so, too.
    """
    basis = "a step with this sequence was measured"
    if longest.evidence is Evidence.ESTIMATED:
        basis = "estimated: memory was computed without a GPU"
    if found.positions and (longest.tokens or 0) > found.positions:
        basis += f"; the model was trained for {found.positions:,.0f} positions"
    return basis


# --- check


def check_answer(report: CheckReport) -> Answer:
    """Return an answer with the verdict on another tool's run."""
    checked = report.checked
    phase = checked.bounds.reported.phase
    needs = f"{memory_terms(checked.estimate)}; the peak is in {_moment(phase)}"
    held_gib, need_gib = checked.estimate.held_gib, checked.estimate.need_gib
    if held_gib > need_gib:
        needs += (
            f"; torch reports up to {fmt_gib(held_gib)}, because it keeps free blocks while the"
            " GPU has room"
        )
    return Answer(
        answer=verdict(report),
        needs=needs,
        cost=dict(duration_lines(report)).get("cost", DASH),
        certainty=describe.estimate_basis(report.how_sure, report.calibrated),
        reason=" ".join(report.notes),
        details=report,
    )


def _moment(phase: Phase) -> str:
    others = {
        Phase.EVALUATE: "an evaluation",
        Phase.ROLLOUT: "the rollout",
        Phase.LOG_PROBS: "the log-probabilities",
    }
    return others.get(phase, f"the {phase} pass")


def phases_text(phases: Mapping[str, tuple[float, float | None]]) -> str:
    """List the bounds of each phase's memory in GiB, such as 'rollout 33.1 to 34.7 GiB'."""
    texts = []
    for phase, (least, most) in phases.items():
        name = str(phase).replace("_", "-")
        name = name if phase in (Phase.ROLLOUT, Phase.LOG_PROBS) else "update"
        if most is None:
            texts.append(f"{name} at least {least:.1f} GiB")
        else:
            same = f"{least:.1f}" == f"{most:.1f}"
            texts.append(
                f"{name} {least:.1f} GiB" if same else f"{name} {least:.1f} to {most:.1f} GiB"
            )
    return ", ".join(texts)


def verdict(report: CheckReport) -> str:
    """Return the verdict in words.

    For example 'out of memory: needs 27.3 of 20.6 GiB on a10, 6.7 GiB (33 %) too much'. If the
    memory that the run needs is uncertain, the text has its lower bound or its range.
    """
    checked = report.checked
    bounds = checked.bounds
    limit = report.limit_gib
    device = report.device.label
    num_gpus = checked.run.num_gpus or 1
    place = f"each of {num_gpus} {device}" if num_gpus > 1 else device
    phase = bounds.reported.phase
    if checked.state != FITS and phase in (Phase.EVALUATE, Phase.ROLLOUT, Phase.LOG_PROBS):
        place += f" in {_moment(phase)}"

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

    steps = fmt_many(cost.num_steps, "step")
    if run.max_steps is None:
        assumed = " (assumed)" if report.workload.examples_assumed else ""
        examples = fmt_many(report.workload.examples, "example") + assumed
        steps = f"{examples} x {fmt_many(run.epochs or 1, 'epoch')}, {steps}"
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

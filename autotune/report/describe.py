"""Makes the texts that describe a study's results, so that each text is defined only once.

The texts cover outcomes, numbers, configurations, ablations and verifications. The terminal, the
report, the dashboard, `autotune status` and notebooks use these texts. Exported files have their
own header (`export.header`), because the package `export` does not import this package.
"""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import expanduser

from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Evidence, Outcome, weakest
from autotune.core.text import operands
from autotune.core.train_config import TrainConfig, learning_differences
from autotune.core.units import (
    DASH,
    fmt_count,
    fmt_gib,
    fmt_hours,
    fmt_many,
    fmt_seconds,
    fmt_usd,
)
from autotune.export import tool_file
from autotune.export.header import has_published_weights
from autotune.problem.run_cost import CostProjection
from autotune.problem.workload import Workload
from autotune.study.ablation import AblatedKnob, Ablation
from autotune.study.decomposition import Decomposition
from autotune.study.learning import Learning
from autotune.study.scaling import GpuPlan, RankPlan, Scaling, cheapest, fastest
from autotune.study.summary import (
    Candidate,
    Learned,
    Recipe,
    StudySummary,
    TrialRecord,
    Verification,
)

# The name of each outcome in texts for people.
LABELS = {
    Outcome.OK: "fits",
    Outcome.SLOW: "pruned as slow",
    Outcome.OOM: "out of memory",
    Outcome.REFUSED: "refused",
    Outcome.TIMEOUT: "timeout",
    Outcome.NUMERICS: "loss not finite",
    Outcome.CRASH: "crash",
}
NOT_MEASURED = "Nothing was measured here. Estimated"
SPEED = "Performance"
MEMORY = "Memory"
COST = "Cost of the full run"
LARGE = 2.0  # a deviation from a prediction by this factor is given as a factor, not in percent
SAME_GIB = 0.005  # two amounts of memory that differ by less than this many GiB count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number in the results of a candidate, such as its tokens/s.

    `value` is None if the number is unknown, or if the ratio of two candidates' numbers would have
    no meaning.
    """

    group: str
    value: float | None
    text: str


def numbers(candidate: Candidate) -> dict[str, Number]:
    """Return {name: number} for a candidate's measured and projected numbers, in report order."""
    speed = candidate.performance
    memory = candidate.measurement
    cost = candidate.cost

    free = 1.0 - memory.peak_reserved_gib / memory.limit_gib
    hours = cost.full_run_hours
    per_1000 = cost.cost_per_1000_samples_usd
    rows: list[tuple[str, str, float | None, str]] = [
        (SPEED, "useful tokens/s", speed.tokens_per_second, fmt_count(speed.tokens_per_second)),
        (SPEED, "samples/s", speed.samples_per_second, fmt_count(speed.samples_per_second)),
        (SPEED, "optimizer step", speed.step_time_s, fmt_seconds(speed.step_time_s)),
        (SPEED, "MFU", speed.mfu, DASH if speed.mfu is None else f"{speed.mfu:.1%}"),
        (MEMORY, "peak reserved", memory.peak_reserved_gib, fmt_gib(memory.peak_reserved_gib)),
        (MEMORY, "peak allocated", memory.peak_allocated_gib, fmt_gib(memory.peak_allocated_gib)),
        (MEMORY, "base weights", None, fmt_gib(memory.model_gib)),
        (MEMORY, "limit", None, fmt_gib(memory.limit_gib)),
        (MEMORY, "free below the limit", None, f"{free:.0%}"),
        (COST, "time", hours, fmt_seconds(hours * 3600)),
        (COST, "USD", cost.full_run_usd, fmt_usd(cost.full_run_usd)),
        (COST, "USD at the spot price", cost.spot_usd, fmt_usd(cost.spot_usd)),
        (COST, "USD for 1,000 samples", per_1000, fmt_usd(per_1000)),
        (COST, "energy", cost.kwh, DASH if cost.kwh is None else f"{fmt_count(cost.kwh)} kWh"),
    ]
    return {name: Number(group=group, value=value, text=text) for group, name, value, text in rows}


def candidate_line(candidate: Candidate) -> str:
    """Return a summary as '28,000 tokens/s, 53.3 GiB, full run 10 min 20 s, $0.584 [measured]'."""
    text = {name: number.text for name, number in numbers(candidate).items()}
    run = f"full run {text['time']}, {text['USD']}"
    return (
        f"{text['useful tokens/s']} tokens/s, {text['peak reserved']}, {run} [{candidate.evidence}]"
    )


def speed_up(recipe: Recipe) -> str:
    """Compare the winner's speed with the baseline's speed.

    If the difference is within the measurement error, the text has no ratio. If measurements of one
    configuration disagree, the text has the interval of the ratio. If either speed was extrapolated
    from a few layers, the ratio is labelled as extrapolated.
    """
    if recipe.baseline is None:
        return "no baseline was measured"
    if recipe.alone:
        return "the speed-up is unknown, because only the baseline was tried"
    if recipe.unsteady is not None:
        return f"the machine is too unsteady for a speed-up: {recipe.unsteady}"
    if recipe.config == recipe.baseline.config:
        return "the baseline is the best configuration"
    if not recipe.differs:
        return "no measurable difference in speed from the baseline"

    label = " (extrapolated)" if recipe.speedup_evidence is Evidence.EXTRAPOLATED else ""
    num_gpus = recipe.config.num_gpus
    baseline_gpus = recipe.baseline.config.num_gpus
    if num_gpus != baseline_gpus:
        winner_gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        label += f", on {winner_gpus} instead of {baseline_gpus}"

    low, high = speed_up_ends(recipe)
    if low >= 1.1:
        return f"{rounded(low, high, 1)} times the speed of the baseline{label}"
    direction = "faster" if low > 1 else "slower"
    near, far = sorted((abs(low - 1), abs(high - 1)))
    return f"{rounded(100 * near, 100 * far, 0)}% {direction} than the baseline{label}"


def speed_up_ends(recipe: Recipe) -> tuple[float, float]:
    """Return the ends of the stated speed-up, which are equal unless measurements disagree.

    Raises ValueError if the speed-up is unknown.
    """
    if recipe.speedup is None or recipe.speedup_interval is None:
        raise ValueError("the study has no speed-up")
    return recipe.speedup_interval if recipe.disagreement else (recipe.speedup, recipe.speedup)


def rounded(low: float, high: float, digits: int) -> str:
    """Format an interval, rounded outwards, such as '1.6 to 1.8'; or one number if both are equal.

    An interval that is rounded outwards still covers all measurements.
    """
    if low == high:
        return f"{low:.{digits}f}"
    scale = 10**digits
    ends = (math.floor(low * scale) / scale, math.ceil(high * scale) / scale)
    return " to ".join(f"{end:.{digits}f}" for end in ends)


def headline(summary: StudySummary) -> str:
    """Return the answer of a study in one line: the speed-up, the time and the cost of the run.

    If the winner's export failed its verification, the line says so instead.
    """
    recipe = summary.recipe
    if recipe is None:
        return f"No configuration has succeeded: {breakdown(summary)}"
    if broken := broken_promise(summary):
        return broken

    # If measurements disagree, the time and the cost are intervals, as the speed-up is.
    cost = recipe.winner.cost
    number = {name: one.text for name, one in numbers(recipe.winner).items()}
    time, usd = number["time"], number["USD"]
    if recipe.disagreement:
        time, usd = hours_range(cost), usd_range(cost)
    run = f"the full run takes {time}"
    if cost.full_run_usd is not None:
        run += f" and costs {usd}"
    subject = f"{recipe.model.name} on {recipe.device.label}"
    if recipe.differs:
        return f"{speed_up(recipe)}: {run} ({subject})"
    return f"{run[0].upper()}{run[1:]} ({subject}): {speed_up(recipe)}"


def savings(summary: StudySummary) -> str:
    """Compare the savings of one full run with the cost of the search.

    For example 'saves $0.57 per run; the search cost $0.065 (the savings are $0.55 to $0.59)'. If
    the savings are less than the cost, the text says that the run is too short for a search.
    """
    found = summary.savings
    spent = f"took {fmt_seconds(summary.wall_seconds)}"
    if summary.search_usd is not None:
        spent = f"cost {fmt_usd(summary.search_usd)}"
    if found is None:
        unknown = summary.recipe is None or summary.recipe.speedup is None
        return f"savings {'are unknown' if unknown else 'are not measurable'}; the search {spent}"

    # Format the savings in USD or, if no price is known, in time.
    saved, (low, high), fmt = found.hours, found.interval_hours, fmt_hours
    if found.usd is not None and found.interval_usd is not None:
        saved, (low, high), fmt = found.usd, found.interval_usd, fmt_usd
    if saved <= 0:
        sooner = f" and saves {fmt_hours(found.hours)}" if found.hours > 0 else ""
        verb = "costs" if found.usd is not None else "takes"
        return f"{verb} {fmt(-saved)} more per run{sooner}; the search {spent}"

    if found.pays is False:
        runs = f"{found.runs_to_pay:,} such runs pay for it"
        saved_text = f"saves {fmt(saved)} per run, and the search {spent}"
        return f"this run is too short to pay for a search: the winner {saved_text}, so {runs}"
    between = f"{fmt(low)} to {fmt(high)}"
    if low < 0:
        between = f"at most {fmt(high)}"
    return f"saves {fmt(saved)} per run; the search {spent} (the savings are {between})"


def gpus(config: TrainConfig) -> str:
    """Describe the GPUs as '1 GPU' or '8 GPUs, fsdp2'."""
    return "1 GPU" if config.num_gpus == 1 else f"{config.num_gpus} GPUs, {config.sharding}"


def speed_up_range(recipe: Recipe) -> str:
    """Describe the speed-up's interval as '2.07 to 2.15 times the baseline's 8,003 tokens/s'.

    Without a baseline, or if the baseline is the winner, the text is empty.
    """
    if (
        recipe.speedup_interval is None
        or recipe.baseline is None
        or recipe.config == recipe.baseline.config
    ):
        return ""
    speed = fmt_count(recipe.baseline.performance.tokens_per_second)
    return f"{rounded(*recipe.speedup_interval, 2)} times the baseline's {speed} tokens/s"


def factors(decomposition: Decomposition | None) -> str:
    """List the factors of the speed-up as 'padding or packing 3.10, compilation 1.22'.

    The speed-up is the product of its factors. Factors of 1.00 are left out.
    """
    parts: list[tuple[str, str]] = []
    if decomposition:
        parts = [(one.name, f"{one.factor:.2f}") for one in decomposition.factors]
    return ", ".join(f"{name} {factor}" for name, factor in parts if factor != "1.00")


def estimate_basis(how_sure: str, calibrated: str | None) -> str:
    """Describe the basis of estimates, as a sentence without the full stop."""
    return f"{f'Estimated, {calibrated}' if calibrated else NOT_MEASURED}: {how_sure}"


def gpu_choices(plan: GpuPlan | Scaling, within_hours: float | None) -> list[str]:
    """Describe the cheapest and the fastest row of a plan.

    Each row is one parallel strategy on one number of GPUs. With a deadline, also describe the
    cheapest row that meets the deadline. If a row that fits has an unknown speed, the text says
    that only rows with a known speed are compared.
    """
    rows = plan.trainable
    among = " of those with a known speed" if rows and plan.has_unknown_speed else ""
    lines = [
        _gpu_choice(f"cheapest{among}", cheapest(rows)),
        _gpu_choice(f"fastest{among}", fastest(rows)),
    ]
    if within_hours is not None:
        in_time = cheapest(rows, within_hours)
        name = f"cheapest within {fmt_hours(within_hours)}{among}"
        lines.append(_gpu_choice(name, in_time, within_hours))
    return lines


def _gpu_choice(name: str, row: RankPlan | None, deadline_hours: float | None = None) -> str:
    """Describe a row as 'fastest: 8 GPUs, fsdp2 (lora r16 ...), 6 h, $96'.

    The text also says if the run may miss the deadline.
    """
    if row is None or row.estimate is None or row.estimate.cost is None or row.hours is None:
        return f"{name}: none is known"

    layout = "1 GPU" if row.num_gpus == 1 else f"{row.num_gpus} GPUs, {row.parallelism.name}"
    layout += f" on {row.hosts} hosts" if row.hosts > 1 else ""
    high = row.estimate.cost.interval_hours[1]
    late = (
        f"; it may take {fmt_hours(high)}"
        if deadline_hours is not None and high > deadline_hours
        else ""
    )
    cost = f"{row.hours * row.num_gpus:.3g} GPU-hours" if row.usd is None else fmt_usd(row.usd)
    return f"{name}: {layout} ({row.label}), {fmt_hours(row.hours)}, {cost}{late}"


def intervals(candidate: Candidate) -> str:
    """Return a sentence that explains the intervals of the candidate's time and cost."""
    meanings = {
        Evidence.MEASURED: "cover the spread of the measured steps or, if larger, the difference "
        "between two probes; for the full run also a change in the host's speed",
        Evidence.EXTRAPOLATED: "cover the possible error of the extrapolation from a few layers",
        Evidence.PROJECTED: "cover 80% of the errors of the projection from another GPU, "
        "and the spread of the steps",
    }
    return f"Intervals {meanings.get(candidate.evidence, 'come from the formula')}."


def evidence(candidate: Candidate) -> str:
    """Return the evidence, such as 'measured' or, if it differs, 'speed ..., memory ...'."""
    if candidate.evidence is candidate.memory_evidence:
        return candidate.evidence.value
    return f"speed {candidate.evidence}, memory {candidate.memory_evidence}"


def workload(task: Workload) -> str:
    """Describe a workload as '10,000 examples (assumed), 500 of them held out, 1 epoch'."""
    examples = fmt_many(task.examples, "example") + (" (assumed)" if task.examples_assumed else "")
    examples += f", {held_out:,} of them held out" if (held_out := task.held_out()) else ""
    return f"{examples}, {fmt_many(task.epochs, 'epoch')}"


def pauses(cost: CostProjection) -> tuple[str, ...]:
    """List the pauses of a run: '3 evaluations in 2 min 5 s', '4 checkpoints in 1.2 s'.

    Pauses of unknown length are left out.
    """
    between = cost.pauses
    if between is None:
        return ()

    kinds = (
        (between.num_evaluations, "evaluation", between.evaluation_s),
        (between.num_checkpoints, "checkpoint", between.checkpoint_s),
    )
    return tuple(
        f"{number:,} {name}{'s' * (number > 1)} in {fmt_seconds(seconds)}"
        for number, name, seconds in kinds
        if number and seconds is not None
    )


def left_out(cost: CostProjection) -> str:
    """Return a sentence on the parts of a run that its time and cost leave out.

    For example 'They do not include start-up, checkpoint saves and evaluation.'
    """
    *others, last = cost.left_out
    return f"They do not include {', '.join(others)}{' and ' * bool(others)}{last}."


def hours_range(cost: CostProjection) -> str:
    """Format the interval of the time as '10 min 13 s to 10 min 26 s'."""
    return " to ".join(fmt_seconds(hours * 3600) for hours in cost.interval_hours)


def usd_range(cost: CostProjection) -> str:
    """Format the interval of the cost as '$0.578 to $0.589', or a dash without a price."""
    return DASH if cost.interval_usd is None else " to ".join(map(fmt_usd, cost.interval_usd))


def full_run(cost: CostProjection) -> str:
    """Describe a full run: intervals of time and cost, start-up, pauses and energy, if known."""
    text = hours_range(cost)
    if cost.startup_s is not None:
        text += f" after about {fmt_seconds(cost.startup_s)} to start"
    if between := pauses(cost):
        text += f", {' and '.join(between)} included"
    if cost.interval_usd is not None:
        text += f", {usd_range(cost)}, {fmt_usd(cost.cost_per_1000_samples_usd)} per 1,000 samples"
    if cost.kwh is not None:
        text += f", {cost.kwh:.3g} kWh"
    return text


def overrun(row: TrialRecord) -> str:
    """Describe an out-of-memory error as '20.5% over the limit in forward' (excess and phase)."""
    return f"{row.margin:.1%} over the limit" + (f" in {row.oom.phase}" if row.oom else "")


def memory_gib(row: TrialRecord) -> float | None:
    """Return a trial's peak reserved memory or, if it did not fit, the least memory it needs."""
    if row.peak_reserved_gib is None and row.margin is not None and row.limit_gib is not None:
        return row.limit_gib * (1.0 + row.margin)
    return row.peak_reserved_gib


def breakdown(summary: StudySummary) -> str:
    """Count the outcomes as '12 configurations: 8 fit, 2 out of memory, 2 refused'.

    A configuration that was proposed twice counts once.
    """
    labels = LABELS | {Outcome.OK: "fit"}
    configurations = summary.configurations
    counts = Counter(row.outcome for row in configurations)
    parts = [f"{counts[outcome]:,} {label}" for outcome, label in labels.items() if counts[outcome]]
    number = "1 configuration"
    if len(configurations) != 1:
        number = f"{len(configurations):,} configurations"
    return f"{number}: {', '.join(parts)}" if parts else "no trial has ended"


def configuration(recipe: Recipe) -> tuple[str, ...]:
    """Describe the winner's configuration, with a phrase for each setting."""
    config = recipe.config
    kind = ("rs" if config.rslora else "") + ("DoRA" if config.dora else "LoRA")
    base = {
        "none": "",
        "fp8": " on a base that is stored and multiplied in 8-bit floats",
        "int8": " on an 8-bit base",
        "nf4": " on a 4-bit (NF4) base" + (", double quantised" if config.double_quant else ""),
    }[config.quantization]
    quantized = "Q" if config.quantization == "nf4" else ""
    method = f"{quantized}{kind} of rank {config.lora_rank}{base}"
    if config.method == "full":
        method = "full fine-tuning"

    every = config.checkpoint_every
    recomputed = {None: "no activation checkpointing", 1: "activation checkpointing in every layer"}
    if config.activation_budget < 1:
        recomputed[None] = (
            f"compiled layers that keep up to {config.activation_budget:.0%} of their activations"
        )
    if config.offloads:
        recomputed[1] += ", with its inputs in host memory"

    # The usual values of `lora_targets` have a phrase in KNOBS; other targets are named.
    own_targets = config.lora_targets not in KNOBS["lora_targets"].choices
    values = {name: getattr(config, name) for name in KNOBS}
    return (
        method,
        *([f"adapters on {config.lora_targets}"] if own_targets else []),
        _batch(recipe),
        recomputed.get(every, f"activation checkpointing in one of every {every} layers"),
        *(
            knob.phrases[value]
            for name, knob in KNOBS.items()
            if (value := getattr(config, name)) in knob.phrases and knob.is_active(values)
        ),
    )


def training_commands(summary: StudySummary, recipe: Recipe, out_dir: str) -> dict[str, str]:
    """Return {purpose: shell command} for training with the exported files of the study."""
    if recipe.trainer == "trl":
        cd = shlex.join(["cd", *operands(f"{out_dir}/export")])
        file = tool_file.file_of(recipe, "trl")
        purpose = "start the full run"
        if recipe.data is None:
            purpose = f"name your dataset in export/{file}, then start the full run"
        return {purpose: f"{cd} && {tool_file.training_command(recipe, 'trl')}"}

    launch = shlex.join(["bash", *operands(f"{out_dir}/export/launch.sh")])
    several = f" on {recipe.config.num_gpus} GPUs" if recipe.config.num_gpus > 1 else ""
    commands = {f"try the exported run{several}": f"{launch} --random-weights --max-steps 5"}
    if has_published_weights(recipe):
        dataset = training_data(summary)
        purpose = (
            "start the full run"
            if dataset
            else "write your examples as lines of JSON, then start the full run"
        )
        commands[purpose] = f"{launch} {shlex.join(['--dataset', *(dataset or ['data.jsonl'])])}"
    return commands


def training_data(summary: StudySummary) -> list[str]:
    """Return the arguments for the study's dataset: its path, and the option for its split.

    The result is empty if the study has no dataset.
    """
    if summary.dataset is None:
        return []
    split = ["--split", summary.split] if summary.split else []
    return [expanduser(summary.dataset), *split]


def learned_text(finalist: Learned) -> str:
    """Describe the result of one finalist's training, or why the training failed."""
    if finalist.loss_before is None or finalist.loss_after is None:
        return f"failed: {finalist.reason}"
    return f"held-out loss {finalist.loss_before:.4f} to {finalist.loss_after:.4f}"


def verdict(result: Verification) -> str:
    """Return the result of a verification in one line: whether the prediction holds, with numbers.

    For example 'The prediction holds: 17,690 tokens/s (0.8% slower than predicted), 54.6 GiB (as
    predicted)'.
    """
    if result.tokens_per_s is None:
        return f"The exported run failed: {result.reason}"

    speed = f"{fmt_count(result.tokens_per_s)} tokens/s"
    # A soak test (a run of long and short sequences) has no predicted speed. A program that the
    # study did not probe has no prediction at all.
    if result.soak or not result.probed:
        reason = failed_verification(result)
        return f"The run {'succeeded' if result.holds else 'failed'}: {reason or speed}"

    slower = compared(result.promised_step_s, result.seconds_per_step, "slower", "faster")
    text = f"{speed} ({slower})"
    if result.reserved_gib is not None:
        larger = compared(result.promised_gib, result.reserved_gib, "larger", "smaller")
        text += f", {fmt_gib(result.reserved_gib)} ({larger})"
    holds = "holds" if result.holds and not result.better else "does not hold"
    return f"The prediction {holds}: {text}"


def verification(result: Verification) -> list[str]:
    """Compare the exported run with the prediction, with a line for each number."""
    if result.tokens_per_s is None:
        return [f"the exported run failed: {result.reason}"]

    run = f"{result.micro_steps} micro batches of {result.file}"
    if result.soak:
        lines = [
            f"{run}, sequences of {result.config.seq_len:,} tokens among short ones: succeeded"
        ]
    else:
        slower = compared(result.promised_step_s, result.seconds_per_step, "slower", "faster")
        speed = f"{fmt_count(result.tokens_per_s)} measured in {run} ({slower})"
        lines = [f"{fmt_count(result.promised_tokens_per_s)} tokens/s predicted, {speed}"]

    peak = "this device does not report its peak memory"
    if result.reserved_gib is not None:
        larger = compared(result.promised_gib, result.reserved_gib, "larger", "smaller")
        peak = f"{fmt_gib(result.reserved_gib)} reserved ({larger})"
    lines.append(f"{fmt_gib(result.promised_gib)} predicted, {peak}")

    if not result.probed:
        lines.append(
            f"{result.file} differs from the probed run: its speed and memory were not predicted"
        )
    if result.better:
        better = " and ".join(result.better)
        lines.append(
            f"a wrong prediction: the run is {better} than predicted by over {result.tolerance:.0%}"
        )
    if result.soak:
        lines.append(_memory_growth(result))
    return lines


def failed_verification(result: Verification) -> str | None:
    """Return why a verification failed, or None if the prediction holds.

    A verification fails if the run failed, if its memory grows, or if its speed or memory is worse
    than predicted by more than the tolerance.
    """
    if result.holds:
        return None
    if result.seconds_per_step is None:
        return f"the exported run failed: {result.reason}"
    if result.memory_growth_gib is not None:
        return _memory_growth(result)
    if result.worse == ("slower",) and result.seconds_per_step >= LARGE * result.promised_step_s:
        slower = compared(result.promised_step_s, result.seconds_per_step, "slower", "faster")
        return f"the run is {slower}"
    return f"the run is {' and '.join(result.worse)} than predicted by over {result.tolerance:.0%}"


def compared(predicted: float, measured: float | None, more: str, less: str) -> str:
    """Compare two numbers as '3.2% slower than predicted', or as '5.2 times slower than predicted'.

    The text has a factor instead of a percentage if the factor is at least LARGE. `more` is the
    word for a measured number above the prediction, and `less` is the word for a number below the
    prediction.
    """
    if not measured or not predicted:
        return "no prediction to compare with"
    ratio = max(measured, predicted) / min(measured, predicted)
    word = more if measured > predicted else less
    if ratio >= LARGE:
        return f"{ratio:.1f} times {word} than predicted"
    share = f"{abs(measured / predicted - 1):.1%}"
    return "as predicted" if share == "0.0%" else f"{share} {word} than predicted"


def broken_promise(summary: StudySummary) -> str | None:
    """Return how the winner's exported run failed its verification, for a report's first screen.

    Return None if the verification succeeded, or if this winner was not verified.
    """
    result = summary.verification
    if result is None or summary.recipe is None or result.config != summary.recipe.config:
        return None
    if (reason := failed_verification(result)) is None:
        return None
    return f"verify failed: {reason}"


def ablation_effect(result: Ablation, knob: AblatedKnob) -> str:
    """Describe how the winner's value of one knob (setting) changes the speed and the memory."""
    winner = result.winner
    if knob.evidence is Evidence.DISTURBED and knob.outcome is Outcome.OK:
        return "no comparison: other work disturbed the measurement"
    if knob.tokens_per_s is None or winner.tokens_per_s is None:
        if knob.outcome not in (Outcome.OOM, Outcome.REFUSED) or not knob.peak_gib:
            return f"without it: {knob.outcome.value}"
        need = f"{fmt_gib(knob.peak_gib)} of {fmt_gib(knob.limit_gib)}"
        return f"does not fit without it: needs at least {need}"

    ratio = winner.tokens_per_s / knob.tokens_per_s
    unclear = abs(ratio - 1) <= math.hypot(knob.error, winner.error)
    speed = "no clear difference in speed" if unclear else f"{ratio:.2f} times as fast"
    if knob.peak_gib is None or winner.peak_gib is None:
        return speed

    more = winner.peak_gib - knob.peak_gib
    if abs(more) < SAME_GIB:
        return f"{speed}, the same memory"
    return f"{speed}, {fmt_gib(abs(more))} {'more' if more > 0 else 'less'}"


def ablation(result: Ablation) -> list[str]:
    """Return a line for each knob, the most helpful first.

    Each line compares the winner with a configuration that differs from it only in this knob. The
    line ends with the weaker evidence of the two results, such as "extrapolated".
    """
    lines = []
    for knob in result.ranked():
        value = getattr(result.winner.config, knob.knob)
        other = getattr(knob.config, knob.knob)
        weaker = weakest(knob.evidence, result.winner.evidence)
        lines.append(
            f"{knob.knob} {value} instead of {other}: "
            f"{ablation_effect(result, knob)} [{weaker.value}]"
        )
    return lines


def _batch(recipe: Recipe) -> str:
    """Describe the micro batch, the accumulation and the global batch."""
    config = recipe.config
    size = config.micro_batch_size
    sequences = "1 sequence" if size == 1 else f"{size} sequences"
    text = f"{sequences} of {config.seq_len:,} tokens at a time"
    if recipe.accumulation > 1:
        text += f", accumulated {recipe.accumulation} times"
    if config.packing:
        examples = f"{recipe.shape.examples_per_step:.1f}"
        return f"{text}: packed, a global batch of {examples} examples on average"
    return f"{text}: a global batch of {recipe.workload.global_batch}"


def _memory_growth(result: Verification) -> str:
    """Say whether the memory grew in a soak test, which mixes long and short sequences."""
    if not result.peaks_gib:
        return "it is unknown if memory grows: the run does not report its peaks"
    if result.memory_growth_gib is None:
        peaks = " GiB, ".join(f"{peak:.2f}" for peak in result.peaks_gib)
        return f"memory does not grow: {peaks} GiB in the quarters of the run"
    before, after = result.memory_growth_gib
    return (
        f"memory grows from {fmt_gib(before)} in the second quarter of the steps "
        f"to {fmt_gib(after)} in the last ({after / before - 1:+.1%})"
    )


def learning(result: Learning) -> list[str]:
    """Describe the chosen learning rate, the loss with each rate, and how certain the choice is."""
    longest = result.last_round[0].steps
    trainings = f"{len(result.attempts)} trainings of {result.steps:,} steps"
    lines = [f"learning rate {result.learning_rate:.2g}, from {trainings}"]

    # List the learning rates of the last round first, then the rates that earlier rounds dropped.
    for rate, losses in result.losses().items():
        default = " (the default)" if rate == result.default else ""
        lines.append(
            f"  {rate:.2g}{default}: held-out loss {_losses(losses)} after {longest} steps"
        )
    dropped = sorted({attempt.learning_rate for attempt in result.attempts} - set(result.losses()))
    behind = ", ".join(f"{rate:.2g}" for rate in dropped)
    lines += [f"  dropped after fewer steps: {behind}"] if dropped else []

    for other in result.others:
        name = learning_differences(other.config, result.config) or other.config.label()
        lines.append(f"  {name}: held-out loss {_losses(other.losses)}: {result.difference(other)}")

    share = f"{result.steps / result.run_steps:.1%}"
    time = fmt_seconds(result.seconds)
    lines.append(f"it took {time}, and {share} of the full run's {result.run_steps:,} steps")
    return lines + result.notes()


def _losses(losses: Sequence[float]) -> str:
    """List losses as '1.2345, diverged'."""
    return ", ".join("diverged" if math.isinf(loss) else f"{loss:.4f}" for loss in losses)

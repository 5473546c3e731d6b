"""Checks a run that another tool's file describes: whether it fits, its time, and helpful changes.

The file's content is not executed.
"""

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, resolve_model
from autotune.catalog.model_names import quantised_copy
from autotune.catalog.models import find_model_shape
from autotune.core.errors import AutotuneError, UsageError
from autotune.core.fp16_overflow import fp16_warning
from autotune.core.knobs import KNOBS
from autotune.core.lora_targets import ALL_LINEAR
from autotune.core.memory_budget import PINNED
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib
from autotune.export.keys import key_of
from autotune.planning.counted_memory import no_count
from autotune.planning.device_estimate import (
    accuracy_text,
    device_limit_gib,
    is_unchecked,
    limit_of,
    planned_device,
    smallest_card,
)
from autotune.planning.fixes import FixSearch
from autotune.planning.foreign_config import adapt_to_model, locate_refusal, parse, read_file
from autotune.planning.foreign_dataset import absent_dataset, local_dataset, unread_datasets
from autotune.planning.foreign_file import MAX_COUNT, Refused
from autotune.planning.foreign_knobs import FUSED_LOSS
from autotune.planning.foreign_sharding import shard_run
from autotune.planning.foreign_swift import trl_as_swift
from autotune.planning.observations import Say, ignore_message
from autotune.planning.plan import plan_task
from autotune.planning.rollout_checks import engine_notes, refuse_engine, with_prompts
from autotune.planning.run_estimate import CheckContext, bounds_of, check_run, phases_of
from autotune.planning.tool_words import changes_to
from autotune.prediction.memory_formula import unsupported
from autotune.prediction.observed_speed import Observation
from autotune.prediction.transfer import calibrated_parts
from autotune.problem.gpu_counts import MOST_GPUS, counted_gpu, parse_gpus
from autotune.problem.length_distribution import SAYS, Lengths
from autotune.problem.run_cost import FITS, OOM
from autotune.problem.setup import DEFAULT_TOKENS, notes_of_checkpoint, set_up
from autotune.problem.study_spec import StudySpec, make_spec
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report.values.check import (
    FP32_BASE,
    SWIFT,
    CheckedRun,
    CheckReport,
    Faster,
    ForeignConfig,
)

MIN_SPEEDUP = 1.05  # a faster configuration is reported if it is at least this many times as fast
# The faster configuration has the run's values of these knobs, because other values would change
# the training's result.
SHARED = (
    "method",
    "lora_rank",
    "lora_targets",
    "modules_to_save",
    "rslora",
    "lora_dropout",
    "seq_len",
    "quantization",
    "double_quant",
    "quantize_experts",
    "kbit_preparation",
    "precision",
    "optimizer",
    "optimizer_in_backward",
    "fp8_products",
)
_LENGTH_OPTIONS = ("dataset", "lengths", "mean_tokens", "p99_tokens", "tokens_per_example")
_EXAMPLE_OPTIONS = (*_LENGTH_OPTIONS, "tokenizer")


def check(
    file: Path,
    options: Mapping[str, Any] | None = None,
    *,
    observations: Sequence[Observation] = (),
    say: Say = ignore_message,
) -> CheckReport:
    """Check the run that a YAML file of TRL, Axolotl or LLaMA-Factory describes.

    `options` are fields of StudySpec for the card, the number of GPUs, the model, the examples, the
    memory and the price. An option with the value None counts as absent.

    Raises UsageError if the file is unreadable, if the model or the card is unknown, or if the
    run's memory cannot be computed.
    """
    options = dict(options or {})
    run = read_file(file, options.get("objective"))
    gpus = options.pop("gpus", None)
    count, gpu = counted_gpu(options.get("gpu") or "auto", gpus)
    if count is not None:
        (gpus,) = parse_gpus(count, most=MAX_COUNT)
    device = planned_device(gpu)
    if options.get("gpu"):
        options["gpu"] = gpu
    name = options.get("model") or run.model
    model, assumption = find_model(name)
    try:
        run = shard_run(adapt_to_model(run, model), model, gpus)
    except Refused as refusal:
        raise locate_refusal(file, refusal, run.ignored) from None

    if options.get("objective") not in (None, run.objective):
        raise UsageError(
            f"{file} trains for {run.objective}, not {options['objective']}",
            remedy="leave --objective out",
        )
    options["objective"] = str(run.objective)
    spec = make_spec(
        None, options | {"gpu": device.option, "model": model.name if assumption else name}
    )

    spec, task, warnings = _task_of_examples(spec, device, file, run, say)
    context = CheckContext(
        task=replace(task, model=model, workload=_workload(task.workload, spec, run)),
        limit_gib=limit_of(spec, device),
        observations=tuple(observations),
    )

    if run.rollouts is not None:
        run = with_prompts(run, context.workload.lengths)
        try:
            refuse_engine(model, run, context.card_gib)
        except Refused as refusal:
            raise locate_refusal(file, refusal, run.ignored) from None

    if uncovered := unsupported(model, _similar_config(run.config)) or unsupported(
        model, run.config
    ):
        say(f"counting the run's memory, since there is no formula for {uncovered}")
    checked = check_run(context, run)
    if checked is None and run.config.loss == "chunked":
        # Some models cap or scale their logits after the head. The chunked loss of our trainer
        # cannot do that. So the dry probe computes the logits of all tokens, although the run may
        # never hold all of them at once.
        whole = adapt_to_model(parse(run.values | {FUSED_LOSS: True}, run.format), model)
        whole = replace(shard_run(whole, model, gpus), ignored=run.ignored)
        checked = check_run(context, whole)
        run = whole if checked else run
    if checked is None:
        raise UsageError(
            f"there is no formula for {uncovered}, and the run's memory cannot be counted: "
            f"{_no_count_reason(context, run)}",
            remedy="measure it with `autotune run`; if the GPU is too small, add --shallow-only",
        )

    fix, fixes = _changes(context, checked)
    if run.tool == SWIFT:
        fix = fix and _in_keys_of_swift(fix)
        fixes = tuple((_in_keys_of_swift(fixed), saved) for fixed, saved in fixes)
    smallest = None if checked.state == FITS else _smallest_card(context, checked, spec.headroom)
    runnable = fix if checked.state == OOM else checked
    padded = tuple(_padding_notes(context, run)) if run.rollouts is None else ()
    return CheckReport(
        file=file,
        model=model,
        device=device,
        limit_gib=context.limit_gib,
        workload=context.workload,
        price=task.price,
        checked=checked,
        fix=fix,
        fixes=fixes,
        smallest_card=smallest,
        runnable=runnable,
        faster=_find_faster(task, spec, context, runnable.run) if runnable else None,
        phases=phases_of(context, run) or {} if run.rollouts else {},
        notes=(
            *filter(None, (run.ignored,)),
            *_notes(context, checked, assumption),
            *padded,
            *warnings,
            *run.notes,
        ),
        minor=run.minor.union(padded),
        how_sure=accuracy_text(
            task,
            counted=checked.bounds.reported.counted,
            objective=context.workload.objective,
            num_gpus=run.config.num_gpus,
            link_by_rule=task.is_link_by_rule(Parallelism.of(run.config)),
            unchecked=is_unchecked(run.config, run.parallelism, checked.bounds.reported),
        ),
        calibrated=calibrated_parts(task.calibration, device),
    )


def _changes(
    context: CheckContext, checked: CheckedRun
) -> tuple[CheckedRun | None, tuple[tuple[CheckedRun, float], ...]]:
    """Return the run with changes that make it fit, and each single change that helps.

    The first value is None if no changes suffice. The second value has each helpful single change
    with the GiB that it saves. A run that already fits gets no changes.
    """
    if checked.state == FITS:
        return None, ()

    search = FixSearch(context=context, checked=checked)
    single_changes = tuple((fixed, search.saved_gib(fixed)) for fixed in search.each_alone())
    if checked.bounds.reported.counted:
        # Dry probes of all combinations of changes would take minutes, so only single changes are
        # tried.
        fitting = (fixed for fixed, _ in single_changes if fixed.state == FITS)
        return next(fitting, None), single_changes
    return search.best(), single_changes


def _in_keys_of_swift(fixed: CheckedRun) -> CheckedRun:
    return replace(fixed, edits=trl_as_swift(fixed.edits))


def _no_count_reason(context: CheckContext, run: ForeignConfig) -> str:
    """Return the reason why a dry probe cannot compute the run's memory."""
    return no_count(
        context.model,
        context.longest_row_config(run),
        min(run.accumulation, 2),
        run.objective,
    )


def find_model(name: str) -> tuple[ModelSpec, str | None]:
    """Return the model that a file names, and a sentence if a similar model is assumed.

    A copy of a known model is assumed to have the known model's shape. A copy may belong to another
    organization, be quantised, or have a path that does not exist here. A chat model tuned from a
    known model is assumed to have the known model's shape, too. Raises UsageError for an unknown
    model.
    """
    original, _ = quantised_copy(name)
    spec = None if os.path.isdir(os.path.expanduser(name)) else find_model_shape(original)
    if spec is not None and name.lower() not in map(str.lower, (spec.name, *spec.aliases)):
        return (
            spec,
            f"By its name, {name} is assumed to have the shape of {spec.name} (--model corrects "
            "this).",
        )

    try:
        return resolve_model(name), None
    except UsageError as error:
        raise UsageError(
            str(error),
            remedy="give --model with a model of the same shape from `autotune models`, or with a "
            "directory that has config.json",
        ) from None


def _task_of_examples(
    spec: StudySpec, device: DeviceSpec, file: Path, run: ForeignConfig, say: Say
) -> tuple[StudySpec, Task, tuple[str, ...]]:
    """Return the spec, the task and the notes of `_task`, for the examples of the run.

    If no option describes the examples, and the run names a file of examples that is on this
    machine, the spec gets this file.
    """
    is_described = any(getattr(spec, name) is not None for name in _LENGTH_OPTIONS)
    named = None if is_described else local_dataset(file, run)
    about = () if is_described else (absent_dataset(file, run), unread_datasets(file, run))
    unread: tuple[str, ...] = tuple(filter(None, about))
    if named is not None:
        own = replace(spec, dataset=str(named))
        try:
            task, warnings = _task(own, device, run, say)
        except AutotuneError as error:
            reason = str(error).removeprefix("--dataset: ")
            unread = (f"The examples of {named.name} could not be read: {reason}.",)
        else:
            source = SAYS[task.workload.lengths.source]
            read = f"The lengths of the examples are from {named.name}, {source}."
            return own, task, (read, *warnings)
    task, warnings = _task(spec, device, run, say)
    return spec, task, (*unread, *warnings)


def _task(
    spec: StudySpec, device: DeviceSpec, run: ForeignConfig, say: Say
) -> tuple[Task, tuple[str, ...]]:
    """Return the task for the run's examples and global batch, and warnings of truncated rows."""
    context = resolve_model(spec.model).max_seq_len or run.config.seq_len
    rows = run.accumulation * run.config.micro_batch_size
    pins = {"seq_len": min(run.config.seq_len, context)}
    spec = replace(spec, gpu=device.option, pins=pins, global_batch=rows)
    setup = set_up(spec, device, say, generates=True)
    is_assumed = setup.task.workload.lengths.source == "assumed"
    if is_assumed or setup.cut_off is None:
        return setup.task, ()
    return setup.task, (f"{setup.cut_off}.",)


def _workload(workload: Workload, spec: StudySpec, run: ForeignConfig) -> Workload:
    """Return the user's workload, with the examples of the file that the run trains on.

    The field `dealt` is false: unlike autotune, the other tools do not distribute a step's rows
    over its micro batches by length.
    """
    workload = replace(workload, dealt=False)
    if workload.lengths.source == "assumed":
        tokens = min(DEFAULT_TOKENS, run.config.seq_len)
        workload = replace(workload, lengths=Lengths.constant(tokens, "assumed"))
    is_given = spec.examples is not None or spec.tokens is not None
    if is_given or (workload.examples_assumed and run.max_examples is None):
        return workload

    examples = run.max_examples or workload.examples
    if not workload.examples_assumed:
        examples = min(workload.examples, examples)
    count = run.held_out if run.held_out >= 1 else run.held_out * examples
    trained = max(examples - math.ceil(count), 1)
    return replace(workload, examples=trained, examples_assumed=False)


def _smallest_card(
    context: CheckContext, checked: CheckedRun, headroom: float
) -> DeviceSpec | None:
    """Return the card with the least memory on which the unchanged run fits.

    A run on several GPUs gets no card of which a host has only one.
    """
    run = checked.run
    several = max(run.num_gpus or 1, run.config.num_gpus) > 1
    bf16 = run.config.precision.startswith("bf16")

    def fits(card: DeviceSpec) -> bool:
        if (bf16 and not card.supports_bf16) or (several and card.is_alone):
            return False
        bounds = checked.bounds
        if run.rollouts is not None:  # vLLM takes a share of the card
            on_card = replace(context, task=replace(context.task, device=card))
            bounds = bounds_of(on_card, run) or bounds
        return bounds.state(device_limit_gib(card, headroom)) == FITS

    return smallest_card(fits)


# --- a faster configuration


def _similar_config(config: TrainConfig) -> TrainConfig:
    """Return the default configuration with the run's method, precision and adapters' targets.

    An estimate needs a formula that covers these three values. All other knobs keep their defaults:
    if no formula covers the run's value of such a knob, the estimate uses a similar value.
    """
    return TrainConfig(
        method=config.method, precision=config.precision, lora_targets=config.lora_targets
    )


def _find_faster(
    task: Task, spec: StudySpec, context: CheckContext, run: ForeignConfig
) -> Faster | None:
    """Return the fastest configuration that fits and has the same training result, or None.

    If the lengths are unknown, every row is assumed to be full. The result is None if no formula
    covers the run's model, method, precision or adapters, because dry probes of a whole search
    space would take minutes. The result is also None for several GPUs, for objectives other than
    SFT, because their training loops differ from tool to tool, and for OFT, because its estimate is
    for LoRA.
    """
    config = run.config
    is_oft = run.values.get("finetuning_type") == "oft"
    workload = context.workload
    lengths_known = workload.lengths.source != "assumed"
    if not lengths_known:
        workload = replace(workload, lengths=Lengths.constant(config.seq_len, "assumed"))

    planned = replace(_similar_config(config), modules_to_save=config.modules_to_save)
    by_formula = not unsupported(context.model, planned)
    if config.num_gpus > 1 or run.objective is not Objective.SFT or is_oft or not by_formula:
        return None

    checked = check_run(replace(context, task=replace(context.task, workload=workload)), run)
    tokens_per_s = checked.estimate.tokens_per_s if checked else None
    no_bf16 = config.precision.startswith("bf16") and not context.device.supports_bf16
    if (
        tokens_per_s is None
        or no_bf16
        or config.seq_len > (context.model.max_seq_len or config.seq_len)
    ):
        return None

    # Pin the knobs that affect the training's result.
    pins = {knob: getattr(config, knob) for knob in SHARED}
    if config.packing or not lengths_known:
        pins["packing"] = config.packing and lengths_known
    space = task.space
    for knob, value in pins.items():
        space = space if value is None else space.pin(knob, value)

    batch = max(
        1, round(workload.run_shape(config, accumulation=run.accumulation).examples_per_step)
    )
    space, _ = space.narrow(
        "micro_batch_size", lambda size: batch % size == 0, "it does not divide the global batch"
    )
    workload_for_plan = replace(workload, global_batch=batch, dealt=task.workload.dealt)
    study = replace(task, model=context.model, space=space, workload=workload_for_plan)

    best = plan_task(study, context.limit_gib, context.observations).best
    times = (best.tokens_per_s or 0.0) / tokens_per_s if best else 0.0
    if best is None or times < MIN_SPEEDUP:
        return None
    accumulation = workload_for_plan.accumulation(best.config)
    changes = changes_to(run, best.config, accumulation, packing=lengths_known)
    return Faster(
        config=best.config,
        times=times,
        command=_run_command(spec, run, workload, batch),
        edits=trl_as_swift(changes.edits) if run.tool == SWIFT else changes.edits,
        own=changes.own,
    )


def _run_command(spec: StudySpec, run: ForeignConfig, workload: Workload, global_batch: int) -> str:
    """Return the `autotune run` command for configurations with the same training result."""
    config = run.config
    values = {
        name: getattr(spec, name)
        for name in ("model", "gpu", *_EXAMPLE_OPTIONS, "tokens", "examples")
    }
    options = {name: value for name, value in values.items() if value is not None}
    if config.method == "full":
        options["space"] = "full"
    else:
        options["rank"] = config.lora_rank
    options |= {"seq_len": config.seq_len, "global_batch": global_batch}
    if workload.lengths.source == "assumed":
        options["tokens_per_example"] = config.seq_len
    if not {"examples", "tokens", "dataset", "lengths"} & set(options):
        options["examples"] = workload.examples
    if run.epochs and run.epochs.is_integer() and run.epochs > 1:  # `run` has whole epochs
        options["epochs"] = int(run.epochs)

    words = ["autotune", "run"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for knob in SHARED:
        value = getattr(config, knob)
        is_default = value in (False, "none", ALL_LINEAR)
        if knob not in ("method", "lora_rank", "seq_len") and not is_default:
            words += ["--set", f"{knob}={value}"]
    return shlex.join(words)


# --- notes about the facts that the verdict leaves out


def _notes(context: CheckContext, checked: CheckedRun, assumption: str | None) -> Iterator[str]:
    """Yield a sentence for each fact that the estimate leaves out or assumes."""
    run = checked.run
    config = run.config
    device = context.device
    if assumption:
        yield assumption
    yield from (f"{note[0].upper()}{note[1:]}." for note in notes_of_checkpoint(context.model))
    if not device.supports_bf16 and config.precision.startswith("bf16"):
        yield (
            f"{device.name} has no bf16: torch emulates it slowly, and older versions refuse the "
            "run at its start. fp16 takes the same memory."
        )
    in_fp16 = config.precision.startswith("fp16") or not device.supports_bf16
    if in_fp16 and config.precision != "fp32":
        overflow = fp16_warning(context.model.text_type)
        yield from (f"{warning}." for warning in (overflow,) if warning)
    max_seq_len = context.model.max_seq_len
    if max_seq_len and config.seq_len > max_seq_len and not assumption:
        yield (
            f"Sequences of {config.seq_len:,} tokens are longer than the model's context of "
            f"{max_seq_len:,}."
        )

    if config.dora:
        yield (
            "The memory that DoRA takes besides its adapters is unknown: the run needs more than "
            "the estimate."
        )
    elif checked.bounds.reported.counted and FP32_BASE in run.notes:
        yield (
            "The memory that casts of a float32 base take is unknown: the run needs more than the "
            "estimate."
        )
    elif run.uncounted is not None:
        causes = " and ".join(run.uncounted.causes)
        yield (
            f"The memory need is a range, because no formula covers {causes}. At the lower end, "
            "everything possible is sharded and offloaded; at the upper end, each GPU keeps the "
            "whole model."
        )
    elif config.offloads and checked.bounds.most is not None:
        between = "between none and all of it"
        yield (
            f"No formula covers the offloaded memory: {between} stays on the GPU. The reported "
            "need assumes that all of it stays."
        )
    if config.quantization == "int8":
        yield (
            "The memory of an 8-bit base is computed without outliers: bitsandbytes stores inputs "
            "of 6 or more twice, so probes needed up to 9 % more memory."
            if checked.bounds.reported.counted
            else "An 8-bit base could not be counted: the run needs more than the reported memory, "
            "which is for a 4-bit base."
        )

    yield from engine_notes(context.model, run, context.card_gib)
    yield from _evaluation_notes(context, checked)
    yield from _gpu_notes(checked)
    yield from _length_notes(context, checked)
    longest = context.longest_row_config(run).seq_len
    if longest < config.seq_len and run.rollouts is None:  # a completion follows each prompt
        lengths = context.workload.lengths
        by_bytes = "" if lengths.exact else ", even with one token for each byte"
        evaluated = " The evaluation is assumed to have no longer ones." if run.evaluation else ""
        yield (
            f"Memory is estimated for sequences of {longest:,} tokens, not {config.seq_len:,}: no "
            f"example is longer{by_bytes}.{evaluated}"
        )


def _padding_notes(context: CheckContext, run: ForeignConfig) -> Iterator[str]:
    """Yield a sentence if sequences may have the run's whole length, but have less on average."""
    longest = context.longest_row_config(run).seq_len
    if longest == run.config.seq_len and run.config.padding == "longest":
        yield (
            f"Memory is estimated for a micro batch with a sequence of {longest:,} "
            "tokens, and speed for sequences padded to the longest of their micro batch."
        )


def _length_notes(context: CheckContext, checked: CheckedRun) -> Iterator[str]:
    """Yield a sentence if the lengths of the examples are assumed; GRPO has its own sentence."""
    if context.workload.lengths.source == "assumed" and checked.run.rollouts is None:
        lengths = context.workload.lengths
        yield (
            f"The length of the examples was not given: {lengths} "
            "(--dataset, --lengths, --mean-tokens)."
        )


def _evaluation_notes(context: CheckContext, checked: CheckedRun) -> Iterator[str]:
    """Yield a sentence if the run's memory peak is in an evaluation, not in a training step.

    The sentence also says how much memory a training step needs.
    """
    run = checked.run
    evaluation = run.evaluation
    if evaluation is None or checked.bounds.reported.phase is not Phase.EVALUATE:
        return

    step = bounds_of(context, replace(run, evaluation=None))
    assert step is not None  # the bounds of the run include the bounds of a step
    key = key_of(run.format, "eval_batch")
    rows = evaluation.batch_of(run.config).micro_batch_size
    source = key if key in run.values else f"{key}, by default"
    logits = ", with the logits of all tokens" if evaluation.loss == "full" else ""
    logits += " that count in the loss" * evaluation.answers_only
    yield (
        f"The evaluation, not the training, sets the memory peak: {rows:,} examples at a time "
        f"({source}){logits}. A training step needs {fmt_gib(step.reported.peak_reserved_gib)}."
    )


def _gpu_notes(checked: CheckedRun) -> Iterator[str]:
    """Yield sentences about the number of GPUs that the estimate assumes."""
    run = checked.run
    config = run.config
    host_gib = run.parallelism.num_gpus * checked.bounds.reported.host
    if host_gib:
        yield (
            f"The offloaded tensors take {fmt_gib(host_gib)} of the host's memory or, if it is "
            f"pinned, up to {fmt_gib(PINNED * host_gib)}."
        )
    if config.num_gpus > 1:
        shared = KNOBS["sharding"].phrases[config.sharding]
        if config.num_gpus > MOST_GPUS or run.values.get("num_machines"):
            yield (
                f"The estimate is for each of {run.num_gpus} GPUs of several hosts: {shared}. Its "
                "speed takes the network to be as fast as the link within a host."
            )
        else:
            yield f"The estimate is for each of {run.num_gpus} GPUs of one host: {shared}."
    elif run.num_gpus is None:
        yield (
            "The file does not give the number of GPUs: one GPU without sharding is assumed "
            "(--gpus N)."
        )
    elif run.num_gpus > 1 and not (run.uncounted is not None and run.uncounted.shared):
        gradients_text = fmt_gib(
            checked.bounds.reported.gradients or checked.bounds.reported.adapters
        )
        yield (
            f"The estimate is for each of {run.num_gpus} data parallel GPUs: each GPU holds the "
            "whole model, and sharding is not modelled."
        )
        yield (
            "The estimate leaves out the communication between the GPUs, and the second copy of "
            f"the gradients that torch holds for it ({gradients_text} more)."
        )

"""Convert a StudySpec to a Task: resolve names, and narrow the search space to possible values.

The conversion needs neither a GPU nor torch. The Setup has a reason for each removed value.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from os.path import expanduser
from pathlib import Path

from autotune.catalog import (
    DeviceSpec,
    ModelSpec,
    Price,
    example_card,
    find_price,
    load_prices,
    resolve_model,
)
from autotune.catalog.model_sizes import Sizes
from autotune.core.errors import UsageError
from autotune.core.fp16_overflow import fp16_warning
from autotune.core.images import IMAGE_FAMILIES, Picture, picture_of
from autotune.core.objective import Objective
from autotune.core.parallelism import PROBED
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, gib
from autotune.core.untested import untested
from autotune.problem import constraints
from autotune.problem.calibration import Calibration, read_calibration
from autotune.problem.constraints import Floors, Narrowing
from autotune.problem.dataset import (
    check_exists,
    dataset_lengths,
    form_of,
    has_images,
    image_lengths,
)
from autotune.problem.demo import is_demo, with_weights
from autotune.problem.images import LEAST_TEXT, Pictured, num_image_tokens
from autotune.problem.length_distribution import Lengths, read_lengths
from autotune.problem.search_space import Removal, SearchSpace
from autotune.problem.study_spec import DEFAULT_IMAGE, LENGTH_KEYS, MAX_COUNT, StudySpec
from autotune.problem.target import Target, kept_calibration
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.trainer.settings import DEQUANTISED

DEFAULT_TOKENS = 1024
# The default number of text tokens in an example with an image. With the image tokens of Qwen2.5-VL
# for the default image size, an example has 1,024 tokens.
DEFAULT_TEXT = 254
DEFAULT_EXAMPLES = 10_000
DEFAULT_GLOBAL_BATCH = 32  # examples
# If the user gives the global batch in tokens, the number of examples may deviate by this fraction,
# so that more micro batch sizes divide the number of examples.
OFF_TOKENS = 0.1
# The user is warned if even the longest seq_len truncates at least this share of the tokens.
WORTH_A_WARNING = 0.005
# The user is warned if more than this share of the parameters gets no adapters or is not quantised.
OUT_OF_REACH = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The task of a study, the reserve space, the values removed from the space, and the warnings.

    The reserve is a wider space, which is searched if no configuration of the task's space fits.
    `cut_off` is the warning about tokens that are cut off, or None. `warnings` includes this
    warning. `pins` are the knobs that the user fixed.
    """

    task: Task
    reserve: SearchSpace
    removals: tuple[Removal, ...]
    warnings: tuple[str, ...] = ()
    cut_off: str | None = None
    pins: tuple[str, ...] = ()

    @property
    def reserved(self) -> str:
        """A list in words of the values that only the reserve has; empty if there are none."""
        space = self.task.space
        return "; ".join(
            f"{knob.name} {' or '.join(map(str, values))}"
            for knob in self.reserve.knobs
            if (
                values := [
                    value for value in knob.choices() if value not in space.choices(knob.name)
                ]
            )
        )


def set_up(
    spec: StudySpec,
    target: Target | DeviceSpec,
    say: Callable[[str], None] = lambda text: None,
    *,
    generates: bool = False,
) -> Setup:
    """Resolve the names of a spec and narrow its space.

    If `target` is a Target, probes run on this machine. Values that need a missing package are
    removed. A worker later reports which features the model's layers support (`adapt_to_layers`).
    If `target` is a DeviceSpec, the study is only estimated, and the catalogue gives the features
    of the layers. `say` gets progress messages while examples are read. `generates` says that the
    caller can handle an objective for which the model generates answers.

    Raises:
        UsageError: for an unknown name, an unreadable file, for such an objective without
            `generates`, or a knob without a possible value.
        EnvironmentProblem: if a package is missing that every probe needs.
    """
    refuse_untrainable(spec, allowed=generates)
    probes_run_here = isinstance(target, Target)
    model = resolve_model(spec.model)
    if probes_run_here and spec.dataset is not None and spec.tokenizer is None and is_demo(model):
        check_exists(Path(expanduser(spec.dataset)), spec.split)
        model = with_weights(model, say)
    with_images = _with_images(spec, model)
    if with_images and not probes_run_here:
        raise UsageError(
            f"no formula covers the images of {model.short}: only probes can measure them",
            remedy="use `autotune run` on a machine with the GPU, or with a larger one",
        )
    target = target if isinstance(target, Target) else Target(device=target)
    space = _space_of(spec, target.device)

    if with_images:
        lengths, pictured, end = _rows_with_images(spec, model, say)
    else:
        lengths = _lengths(spec, model, space, say)
        pictured = ()
        end = 0

    space = _with_gpus(_with_pins(space, spec), spec, target)
    if with_images:
        _refuse_untested_with_images(spec, space)
    global_batch = _global_batch(spec, space, model, lengths)

    # Each of the following rules removes impossible values. The order matters, because each rule
    # reads the space that the earlier rules narrowed.
    narrowing = _narrowed_to_pins(space, spec)
    constraints.narrow_to_sharing(narrowing)
    constraints.narrow_to_device(narrowing, target.device)
    if target.measured_on is not None and not target.measured_on.supports_fp8:
        constraints.remove_fp8(narrowing, f"{target.measured_on.name} cannot try it")
    if probes_run_here:
        constraints.narrow_to_packages(narrowing)

    workload = _workload(spec, lengths, global_batch)
    if with_images:
        workload = replace(
            workload, pictured=pictured, images_end=end, vision=spec.vision, dealt=False
        )
        constraints.narrow_to_images(narrowing, workload)
    others = _attentions_without_sdpa(model, workload, target.device)
    constraints.narrow_to_model(narrowing, model, workload, others)
    if spec.trained_by == "trl":
        constraints.narrow_to_trl(
            narrowing, installed=probes_run_here, objective=workload.objective
        )
    constraints.narrow_to_objective(narrowing, workload.objective)

    floors = Floors(**{item.name: getattr(spec, item.name) for item in fields(Floors)})
    constraints.apply_floors(narrowing, workload, floors)
    constraints.narrow_packing(narrowing, workload)
    constraints.narrow_padding(narrowing, workload)
    constraints.narrow_checkpointing(narrowing)

    constraints.keep_pins(narrowing)  # some rules add conditions to knobs
    cut_off = _cut_off(narrowing.space, workload)
    warnings = (
        *notes_of_checkpoint(model),
        *_notes_of_kernels(model, target.device, probes_run_here),
        *_notes_of_images(spec, workload),
        *((cut_off + _keeps(narrowing.space, workload, model),) if cut_off else ()),
        *_warnings(spec, narrowing, workload, model.text_type),
    )
    calibration = calibration_of(spec, target.measured_on or target.device, say)
    task = Task(
        study=spec.study or _study_name(target, model, space),
        model=model,
        device=target.device,
        price=_price(spec, model, target.device),
        workload=workload,
        floors=floors,
        space=narrowing.space,
        trainer=spec.trained_by,
        measured_on=target.measured_on,
        run_options=spec.run_options,
        calibration=calibration,
        within_hours=spec.within_hours,
        example_gib=_example_gib(spec, model, target.device),
    )

    setup = Setup(
        task=task,
        reserve=narrowing.reserve,
        removals=tuple(narrowing.removals),
        warnings=warnings,
        cut_off=cut_off,
        pins=narrowing.pins,
    )
    shape = None if probes_run_here else known_shape(model)
    return setup if shape is None else adapt_to_layers(setup, shape)


def refuse_untrainable(spec: StudySpec, *, allowed: bool = False) -> None:
    """Raise UsageError if the trainer cannot run the study.

    `allowed` says that the model may generate answers.
    """
    if spec.expert_parallel > 1:
        raise UsageError(
            "autotune cannot train with expert_parallel, because its trainer sends no tokens to"
            " experts on another GPU",
            remedy="leave it out, or estimate the memory with `autotune plan --gpus`",
        )
    if Objective(spec.objective).generates and not allowed:
        raise UsageError(
            f"{spec.objective} trains on generated answers, and this search generates none",
            remedy=f"`autotune run --objective {spec.objective}` measures a run, and "
            f"`autotune plan --objective {spec.objective}` estimates its memory",
        )


def _space_of(spec: StudySpec, device: DeviceSpec) -> SearchSpace:
    if isinstance(spec.space, SearchSpace):
        return spec.space
    return SearchSpace.load(spec.space or ("cpu" if device.kind == "cpu" else "default"))


def _study_name(target: Target, model: ModelSpec, space: SearchSpace) -> str:
    proxy = f"-by-{target.measured_on.name}" if target.measured_on else ""
    return f"{target.device.name}{proxy}-{model.short}-{space.name}".lower()


def _example_gib(spec: StudySpec, model: ModelSpec, device: DeviceSpec) -> float | None:
    """Return the GiB of the made-up example card, if the device is a CPU that represents it.

    The result is None if there is no example card for the model, or if the user gives the memory.
    """
    example = example_card(model, device)
    return example.memory_gib if example and spec.memory_gib is None else None


def _with_images(spec: StudySpec, model: ModelSpec) -> bool:
    """Return whether the examples of the run have images.

    The examples have images if an option says so, or if a row of the dataset refers to an image.
    Raises UsageError if an option asks for images, but autotune has no image rules for the model.
    """
    is_asked = spec.image_size is not None or spec.vision != "frozen"
    if is_asked and not model.sees_images:
        raise UsageError(
            f"{model.short} can be trained on text, but not on images",
            remedy="leave image_size and vision out,"
            f" or take a model of another family: {', '.join(IMAGE_FAMILIES)}",
        )
    reads_images = model.sees_images and Objective(spec.objective) is Objective.SFT
    if spec.dataset is None or not reads_images:
        return is_asked
    return has_images(Path(expanduser(spec.dataset)), spec.split)


def _refuse_untested_with_images(spec: StudySpec, space: SearchSpace) -> None:
    """Raise UsageError if an option that is untested with images is used."""
    options = {
        "objective": spec.objective,
        "trainer": spec.trained_by,
        "quality": spec.quality,
        "eval_share": spec.eval_share > 0,
        "gpus": space.choices("num_gpus") != (1,),
    }
    for option, value in options.items():
        if reason := untested(option, value, "images"):
            raise UsageError(reason, remedy=f"leave {option} out")


def _with_pins(space: SearchSpace, spec: StudySpec) -> SearchSpace:
    """Return the space with the values that the spec fixes, and with micro_batch_size and seq_len.

    Later rules remove values of these two knobs, so the space must have both.
    """
    for knob, value in spec.pins.items():
        space = space.pin(knob, value)
    for name in ("micro_batch_size", "seq_len"):
        if space.knob(name) is None:
            space = space.pin(name, getattr(TrainConfig(), name))
    return space


def _narrowed_to_pins(space: SearchSpace, spec: StudySpec) -> Narrowing:
    """Return the narrowing of a space, which first makes sure that all pins have an effect."""
    pins = (*spec.pins, *(("num_gpus",) if spec.numbers_of_gpus else ()))
    narrowing = Narrowing(space=space, reserve=space, pins=pins)
    constraints.keep_pins(narrowing)
    return narrowing


def _with_gpus(space: SearchSpace, spec: StudySpec, target: Target) -> SearchSpace:
    """Return the space with the GPU counts that the spec has, and a knob for the sharding strategy.

    Raises UsageError for a combination that cannot be probed on several GPUs.
    """
    for number in spec.numbers_of_gpus or ():
        space = space.pin("num_gpus", number)  # `pin` raises UsageError for an impossible count
    if spec.numbers_of_gpus:
        space = space.offer("num_gpus", spec.numbers_of_gpus)
    numbers = space.choices("num_gpus")
    if numbers == (1,):
        return space

    if target.measured_on is not None:
        proxy = target.measured_on.name
        reason = f"{proxy} can stand in for one {target.device.name}, but not for several"
        listed = ",".join(map(str, numbers))
        raise UsageError(
            f"--gpus {listed}: {reason}", remedy="give --gpu auto, or leave --gpus out"
        )
    for option, value in (("objective", spec.objective), ("trainer", spec.trained_by)):
        if problem := untested(option, value, "several_gpus"):
            raise UsageError(problem, remedy=f"leave --gpus or --{option} out")
    space = space if space.knob("sharding") else space.offer("sharding", PROBED)
    return space.condition(
        "sharding", "num_gpus", tuple(number for number in numbers if number > 1)
    )


def calibration_of(
    spec: StudySpec, device: DeviceSpec, say: Callable[[str], None] = lambda text: None
) -> Calibration | None:
    """Return the calibration that the spec names, or else the cached calibration of `device`.

    The cached calibration is used only if the device is in this machine. Raises UsageError if the
    file that the spec names is not a calibration.
    """
    if spec.calibration is not None:
        return read_calibration(Path(expanduser(spec.calibration)))
    return kept_calibration(device, say)


def known_shape(model: ModelSpec) -> ModelShape | None:
    """Return the ModelShape that a worker would report, but without the repeating layer pattern.

    The result is None for a model family without a formula.
    """
    sizes = Sizes.of(model)
    if sizes is None:
        return None
    return ModelShape(
        num_layers=sizes.layers,
        prefix=0,
        period=None,
        plain_head=not sizes.capped,
        liger=True,
        sdpa=not model.lacks("sdpa"),
        flex=not model.lacks("flex_attention"),
        linear_layers=tuple(sorted(map(_path, sizes.matrices))),
    )


def _path(matrix: str) -> str:
    in_attention = matrix in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
    return f"{'self_attn' if in_attention else 'mlp'}.{matrix}"


def adapt_to_layers(setup: Setup, shape: ModelShape | None) -> Setup:
    """Return the study with only the knob values that layers of this shape support.

    `shape` is None if it is unknown. Raises UsageError if a knob has no value left.
    """
    task = setup.task
    objective = setup.task.workload.objective
    if objective.num_labels is not None and shape is not None and not shape.has_labels:
        raise UsageError(
            f"--objective {objective}: transformers has no head over labels for"
            f" {task.model.config['model_type']}",
            remedy="take a model of another type; `autotune models` lists them",
        )

    narrowing = Narrowing(
        space=task.space, reserve=setup.reserve, removals=list(setup.removals), pins=setup.pins
    )
    warnings = _warnings_of_layers(narrowing.space, shape)
    others = _attentions_without_sdpa(
        task.model, task.workload, task.device, has_flex=shape is not None and shape.flex
    )
    constraints.narrow_to_layers(narrowing, task.model, task.trainer, shape, others)
    constraints.keep_pins(narrowing)
    return replace(
        setup,
        task=replace(task, space=narrowing.space),
        reserve=narrowing.reserve,
        removals=tuple(narrowing.removals),
        warnings=(*setup.warnings, *warnings),
    )


def _attentions_without_sdpa(
    model: ModelSpec, workload: Workload, device: DeviceSpec, *, has_flex: bool = True
) -> tuple[str, ...]:
    """Return the attention implementations to search if the model has no SDPA attention."""
    if untested("attention", "flex_attention", "images") and workload.pictured:
        return ("eager",)
    return constraints.attentions_without_sdpa(model, device, has_flex=has_flex)


def open_reserve(setup: Setup) -> Setup:
    """Return the study with its reserve as the space to search.

    Unlike the normal space, the reserve may have quantised bases, optimizers other than AdamW, and
    full fine-tuning in pure bf16.
    """
    return replace(setup, task=replace(setup.task, space=setup.reserve))


def _global_batch(spec: StudySpec, space: SearchSpace, model: ModelSpec, lengths: Lengths) -> int:
    """Return the number of examples in an optimizer step.

    If the user gives the batch in tokens, several numbers of examples are close to that batch. The
    result is the one of these numbers that is divisible by the most micro batch sizes. Raises
    UsageError if the batch is smaller than an example.
    """
    if spec.global_batch_tokens is None:
        return spec.global_batch or DEFAULT_GLOBAL_BATCH

    longest = min(max(space.choices("seq_len")), model.max_seq_len or MAX_COUNT)
    wanted = spec.global_batch_tokens * lengths.number / lengths.tokens_within(longest)
    if wanted < 1 - OFF_TOKENS:
        mean = math.ceil(lengths.tokens_within(longest) / lengths.number)
        raise UsageError(
            f"global_batch_tokens {spec.global_batch_tokens:,} is less than an example, which has "
            f"{mean:,} tokens on average",
            remedy=f"give at least {mean}, or the number of examples (--global-batch)",
        )
    sizes = space.choices("micro_batch_size")
    nearest: int = max(1, round(wanted))
    if not any(nearest % size == 0 for size in sizes):
        nearest = max(1, round(wanted / min(sizes))) * min(sizes)
    multiples: set[int] = {round(wanted / size) * size for size in sizes}
    near_batches = [batch for batch in multiples if batch and abs(batch / wanted - 1) <= OFF_TOKENS]

    return max(
        [nearest, *near_batches],
        key=lambda batch: (sum(batch % size == 0 for size in sizes), -abs(batch - wanted)),
    )


def _workload(spec: StudySpec, lengths: Lengths, global_batch: int) -> Workload:
    examples = spec.examples
    objective = Objective(spec.objective)
    if spec.tokens is not None:
        examples = math.ceil(spec.tokens / lengths.mean)
    elif examples is None and (spec.dataset or spec.lengths):
        examples = lengths.number

    return Workload(
        examples=examples or DEFAULT_EXAMPLES,
        epochs=spec.epochs,
        lengths=lengths,
        examples_assumed=examples is None,
        global_batch=global_batch,
        eval_share=spec.eval_share,
        loss_on=spec.loss_on,
        form=form_of(Path(expanduser(spec.dataset)), spec.split, objective)
        if spec.dataset
        else "unknown",
        objective=objective,
        dealt=spec.trained_by == "transformers",
    )


def _warnings(
    spec: StudySpec, narrowing: Narrowing, workload: Workload, model_type: str
) -> tuple[str, ...]:
    """Return warnings of too few examples, of overflow in fp16, and of options without effect."""
    space = narrowing.space
    warnings = []
    overflow = fp16_warning(model_type)
    if overflow and "fp16_mixed" in space.choices("precision"):
        warnings.append(overflow)
    for name in spec.pins:
        if need := space.idle(name):
            unless = "" if narrowing.reserve.idle(name) else " unless nothing else fits"
            warnings.append(f"{name} has no effect{unless}: it needs {need}")
    if spec.min_rank is not None and "lora" not in space.choices("method"):
        warnings.append("--min-rank has no effect: it needs method lora")
    for name, (floor, may_win, _) in constraints.NEEDS_CONSENT.items():
        if getattr(spec, floor) and all(map(may_win, space.choices(name))):
            warnings.append(
                f"--{floor.replace('_', '-')} has no effect:"
                f" no value of {name} in the space needs it"
            )

    if workload.trained < workload.global_batch:
        fewer = (
            f"{workload.trained} examples do not fill a global batch of"
            f" {workload.global_batch} (--global-batch)"
        )
        warnings.append(f"{fewer}: a pass over them is one step with fewer micro batches")

    return tuple(warnings)


def _cut_off(space: SearchSpace, workload: Workload) -> str | None:
    """Return a warning about tokens that even the longest rows of the space cut off, or None."""
    longest = max(space.choices("seq_len"))
    cut = workload.truncated(longest)
    if cut < WORTH_A_WARNING:
        return None
    return (
        f"{workload.lengths.longer(longest):.0%} of the examples are longer than every seq_len of"
        f" the space ({longest}): {cut:.0%} of the tokens will be cut off"
    )


def _keeps(space: SearchSpace, workload: Workload, model: ModelSpec) -> str:
    """Return the length that cuts off fewer tokens than the space's lengths, or "" without one."""
    longer = min(workload.lengths.longest, model.max_seq_len or MAX_COUNT)
    if longer <= max(space.choices("seq_len")):
        return ""
    return f"; --seq-len {longer} keeps {'more of them' if workload.truncated(longer) else 'them'}"


def _warnings_of_layers(space: SearchSpace, shape: ModelShape | None) -> list[str]:
    """Return warnings about layer parameters that get no adapters or are not quantised."""
    if shape is None or space.choices("method") == ("full",):
        return []

    warnings = []
    if shape.untrained > OUT_OF_REACH:
        experts = f"{shape.untrained:.0%} of the parameters are fused experts of a mixture"
        warnings.append(f"{experts}: adapters on linear layers do not train them")
    if shape.unquantized > OUT_OF_REACH and space.choices("quantization") != ("none",):
        share = f"{shape.unquantized:.0%} of the parameters are fused experts"
        if shape.experts and True in space.choices("quantize_experts"):
            warnings.append(f"{share}: only quantize_experts stores them in fewer bits (nf4)")
        else:
            warnings.append(f"{share}: they are never quantised")
    return warnings


def _lengths(
    spec: StudySpec, model: ModelSpec, space: SearchSpace, say: Callable[[str], None]
) -> Lengths:
    """Return the lengths of the examples.

    If the lengths are unknown, every example gets the same usual length, which the space allows.
    """
    if spec.dataset is not None:
        path = Path(expanduser(spec.dataset))
        tokenizer = expanduser(spec.tokenizer or "") or model.tokenizer
        objective = Objective(spec.objective)
        return dataset_lengths(
            path, tokenizer, split=spec.split, loss_on=spec.loss_on, objective=objective, say=say
        )
    if spec.lengths is not None:
        return read_lengths(Path(expanduser(spec.lengths)))
    if spec.mean_tokens is not None and spec.p99_tokens is not None:
        try:
            return Lengths.from_summary(spec.mean_tokens, spec.p99_tokens)
        except ValueError as error:
            raise UsageError(
                f"--mean-tokens, --p99-tokens: {error}", remedy="give --lengths FILE instead"
            ) from None

    if spec.tokens_per_example is not None:
        return Lengths.constant(spec.tokens_per_example, "given")
    return Lengths.constant(min(DEFAULT_TOKENS, max(space.choices("seq_len"))), "assumed")


def _rows_with_images(
    spec: StudySpec, model: ModelSpec, say: Callable[[str], None]
) -> tuple[Lengths, tuple[Pictured, ...], int]:
    """Return lengths of examples with images, images by length, and the last image position.

    The last image position is the largest number of tokens from a row's start to an image's end, or
    0 if unknown. Without a dataset, each example is assumed to have one image. Lengths that the
    user gives are assumed to include the image's tokens. Examples that are too short for an image
    have only text. Raises UsageError if all examples are too short.
    """

    def picture(width: int, height: int) -> Picture:
        return picture_of(model.config, width, height, model.processor)

    if spec.dataset is not None:
        path = Path(expanduser(spec.dataset))
        tokenizer = expanduser(spec.tokenizer or "") or model.tokenizer
        return image_lengths(
            path, tokenizer, picture, split=spec.split, loss_on=spec.loss_on, say=say
        )

    one = (picture(*spec.image),)
    least = num_image_tokens(one) + LEAST_TEXT
    if all(getattr(spec, name) is None for name in LENGTH_KEYS):
        return (
            Lengths.constant(num_image_tokens(one) + DEFAULT_TEXT, "assumed"),
            ((num_image_tokens(one) + DEFAULT_TEXT, one),),
            0,
        )

    lengths = _lengths(spec, model, SearchSpace.load("default"), say)
    if lengths.longest < least:
        raise UsageError(
            f"an example of {lengths.longest} tokens has no room for its image of"
            f" {num_image_tokens(one)} tokens (image_size)",
            remedy="count the tokens of images in the lengths of examples,"
            " or give a --dataset with images",
        )
    return lengths, ((lengths.longest, one),), 0


def notes_of_checkpoint(model: ModelSpec) -> list[str]:
    """Return notes about a checkpoint: its format, the layers that are not loaded, and damage."""
    notes = []
    files = model.checkpoint
    sizes = files.stored if files is not None else ()
    parts = ", ".join(f"{fmt_gib(gib(size))} of {dtype}" for dtype, size in sizes)
    stored = f"the checkpoint is stored in {model.stored_as}" + (f" ({parts})" if parts else "")
    if model.stored_as in DEQUANTISED:
        notes.append(
            f"{stored}, and transformers trains it in 16 bits: all memory numbers are for the"
            " dequantised weights"
        )
    elif model.stored_as is not None and parts:
        notes.append(f"{stored}, and stays in this format: only adapters are trained")

    if model.mtp_layers or (files is not None and files.mtp_params):
        about = []
        if model.mtp_layers:
            about.append(f"{model.mtp_layers} layer{'s' if model.mtp_layers > 1 else ''}")
        if files is not None and files.mtp_params:
            about.append(f"{files.mtp_params / 1e9:.3g} billion parameters")
        notes.append(
            f"the checkpoint has a head for multi-token prediction ({', '.join(about)}), which"
            " transformers does not load for training: it is neither counted nor trained"
        )
    if files is not None and files.fault is not None:
        notes.append(files.fault)
    return notes


def _notes_of_kernels(model: ModelSpec, device: DeviceSpec, probes_run_here: bool) -> list[str]:
    """Return notes about the fast kernels for some of the model's layers.

    The notes name the missing packages, and the kernels for which the study's numbers are valid.
    """
    from autotune.catalog.fast_kernels import (
        TILELANG,
        counted_packages,
        is_installed,
        lacks_tilelang,
    )

    needed = model.kernel_packages
    with_kernels = counted_packages(needed)
    without = [name for name in needed if name not in with_kernels]
    slow = "transformers computes some layers of this model slowly and with more memory"
    notes = []

    if probes_run_here:
        refused = "fla" in needed and lacks_tilelang(device)
        if missing := _join_packages(model, [name for name in without if not is_installed(name)]):
            also = f" {TILELANG}" if refused and not is_installed("fla") else ""
            notes.append(f"{slow}; for fast kernels: pip install {missing}{also}")
        if refused and is_installed("fla"):
            notes.append(
                "flash-linear-attention refuses this machine's version of Triton on Hopper GPUs:"
                f" pip install {TILELANG}"
            )
        if uncounted := _join_packages(model, [name for name in without if is_installed(name)]):
            notes.append(
                f"probes measure the fast kernels of {uncounted}, but estimates do not count them:"
                " the estimated memory and time of some layers are too high"
            )
        return notes

    if packages := _join_packages(model, without):
        notes.append(f"{slow} without fast kernels ({packages}); all numbers here are without them")
    if packages := _join_packages(model, with_kernels):
        notes.append(
            f"all numbers here are with the fast kernels of {packages}, as on this machine;"
            " install the package where you train"
        )
    return notes


def _join_packages(model: ModelSpec, names: Iterable[str]) -> str:
    return " ".join(model.kernel_packages[name] for name in names)


def _notes_of_images(spec: StudySpec, workload: Workload) -> list[str]:
    """Return warnings about the assumed images of a study without a dataset."""
    if not workload.pictured or spec.dataset is not None:
        return []
    notes = []
    least = workload.image_tokens + LEAST_TEXT
    if spec.image_size is None:
        notes.append(
            f"an image of {DEFAULT_IMAGE} in each example is assumed (--set image_size=WxH)"
        )
    if short := 1 - workload.lengths.longer(least - 1):
        room = f"have no room for an image of {workload.image_tokens} tokens"
        notes.append(f"{short:.1%} of the examples {room} (image_size): they count as text only")
    return notes


def _price(spec: StudySpec, model: ModelSpec, device: DeviceSpec) -> Price | None:
    if spec.price is None:
        known = find_price(
            device.name, load_prices(Path(expanduser(spec.prices))) if spec.prices else ()
        )
        example = example_card(model, device)
        return example.price(device.name) if known is None and example else known
    return Price(
        provider="given by --price",
        device=device.name,
        usd_per_hour=spec.price,
        spot_usd_per_hour=None,
        count=1,
        as_of=None,
        source="--price",
    )

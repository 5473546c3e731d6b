"""From a StudySpec to a Subject: names resolved, the device looked for, the space narrowed to what can be.

No GPU time and no torch. Everything that is taken out of the space is told with its reason.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path

from autotune.catalog import DeviceSpec, ModelSpec, Price, find_price, load_prices, resolve_model
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig, checkpoints_some
from autotune.problem.constraints import Floors, apply_floors, packable
from autotune.problem.dataset import dataset_lengths
from autotune.problem.length_distribution import Lengths, read_lengths
from autotune.problem.search_space import Removal, SearchSpace, load_space
from autotune.problem.study_spec import MAX_COUNT, StudySpec
from autotune.problem.target import Target
from autotune.problem.task import Task
from autotune.problem.workload import Workload

DEFAULT_TOKENS = 1024
GLOBAL_BATCH = 32  # examples
OFF_TOKENS = 0.1  # that a global batch asked for in tokens may be off, where more micro batches divide it then
NO_SDPA = {"gemma2", "gpt_oss"}  # transformers refuses SDPA for them
TOLD = 0.005  # share of the tokens from which on it is told that no seq_len keeps them
OUT_OF_REACH = 0.02  # share of the parameters from which on it is told that adapters or quantisation do not reach them


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The subject of a study, its space with the reserve opened, and what was taken out of the space."""

    task: Task
    reserve: SearchSpace
    removals: tuple[Removal, ...]
    warnings: tuple[str, ...] = ()


def set_up(spec: StudySpec, target: Target | DeviceSpec, say: Callable[[str], None] = lambda text: None) -> Setup:
    """Resolve and narrow. `say` is told while examples are read. Raises UsageError for what cannot be."""
    target = target if isinstance(target, Target) else Target(device=target)
    device = target.device
    model = resolve_model(spec.model)
    space = spec.space or ("cpu" if device.kind == "cpu" else "default")
    if not isinstance(space, SearchSpace):
        space = load_space(space)
    lengths = space.knob("seq_len")
    usual = min(DEFAULT_TOKENS, max(lengths.choices())) if lengths else DEFAULT_TOKENS
    for knob, value in spec.pins.items():
        space = space.pin(knob, value)
    for name in ("micro_batch_size", "seq_len"):  # what must suit the batch and the model has to be there
        if space.knob(name) is None:
            space = space.pin(name, getattr(TrainConfig(), name))
    removals: list[Removal] = []
    known = _lengths(spec, model, usual, say)
    global_batch = _global_batch(spec, space, model, known)
    space, removed = _possible(space, device, model, global_batch)
    removals += removed
    if target.here is not None and not target.here.supports_fp8:
        space, removed = space.narrow("quantization", lambda base: base != "fp8", f"{target.here.name} cannot try it")
        removals += removed
    if spec.trainer == "trl":
        space, removed = _in_trl(space)
        removals += removed
    workload, warnings = _workload(spec, space, known, global_batch)
    warnings += [f"{knob} has no effect: it needs {need}" for knob in spec.pins if (need := space.idle(knob))]
    floors = Floors(
        min_rank=spec.min_rank,
        max_truncated=spec.max_truncated,
        allow_quantized=spec.allow_quantized,
        allow_pure_bf16=spec.allow_pure_bf16,
        allow_any_optimizer=spec.allow_any_optimizer,
        slack=spec.slack,
    )
    opened = replace(floors, allow_quantized=True, allow_pure_bf16=True, allow_any_optimizer=True)
    reserve, _ = apply_floors(space, workload, opened)
    bases = reserve.knob("quantization")
    if not spec.allow_quantized and bases and "none" in bases.choices():
        reserve, _ = reserve.narrow("quantization", lambda value: value != "fp8", "it saves no memory")
    space, removed = apply_floors(space, workload, floors)
    removals += removed
    space, removed = packable(space, workload, model.config["model_type"])
    removals += removed
    reserve, _ = packable(reserve, workload, model.config["model_type"])
    task = Task(
        study=spec.study or f"{_where(target)}-{model.short}-{space.name}".lower(),
        model=model,
        device=device,
        price=_price(spec, device),
        workload=workload,
        floors=floors,
        space=space,
        trainer=spec.trainer,
        measured_on=target.here,
        carried=target.carried,
    )
    return Setup(task=task, reserve=reserve, removals=tuple(removals), warnings=tuple(warnings))


def suit(setup: Setup, shape: ModelShape | None) -> Setup:
    """The same study of a model whose layers are like this: what they cannot do is taken out, what they lack is told.

    Raises UsageError where nothing is left.
    """
    if setup.task.trainer == "transformers" and (shape is None or not shape.plain_head):
        reason = "the model changes its logits after its head, which cannot be done in chunks"
        if shape is None:
            reason = "whether the model changes its logits after its head is not known"
        setup = _without(setup, "loss", "chunked", reason)
    if shape is None or not shape.liger:
        setup = _without(setup, "kernels", "liger", "Liger has no kernels for this model")
    methods = knob.choices() if (knob := setup.task.space.knob("method")) else ("lora",)
    if shape is None or methods == ("full",):
        return setup
    warnings = list(setup.warnings)
    if shape.untrained > OUT_OF_REACH:
        warnings.append(
            f"{shape.untrained:.0%} of the parameters are fused experts of a mixture: adapters on linear layers do not "
            "train them"
        )
    quantized = setup.task.space.knob("quantization")
    if shape.unquantized > OUT_OF_REACH and quantized and quantized.choices() != ("none",):
        warnings.append(f"{shape.unquantized:.0%} of the parameters are fused experts: they are never quantised")
    setup = replace(setup, warnings=tuple(warnings))
    if not shape.parametrized:
        return setup
    reason = "adapters on fused experts replace whole weights in each forward pass, which does not compile"
    return _without(setup, "compile", "per_layer", reason)


def _without(setup: Setup, name: str, value: str, reason: str) -> Setup:
    """The study without one value of a knob, told with its reason. Raises UsageError where no other is left."""
    space, removed = setup.task.space.narrow(name, lambda one: one != value, reason)
    reserve, _ = setup.reserve.narrow(name, lambda one: one != value, reason)
    task = replace(setup.task, space=space)
    return replace(setup, task=task, reserve=reserve, removals=(*setup.removals, *removed))


def open_reserve(setup: Setup) -> Setup:
    """The same study with quantised bases and other optimizers allowed."""
    return replace(setup, task=replace(setup.task, space=setup.reserve))


def slug(study: str) -> str:
    """A directory name for a study: readable, and never a path. Names that had to be changed end in a hash.

    So does a name that looks as if it ended in one, so that no two names share a directory.
    """
    plain = re.sub(r"[^a-z0-9._-]+", "-", study.lower()).strip("-.")[:80]
    if plain == study and plain and not re.search(r"-[0-9a-f]{8}$", plain):
        return plain
    return f"{plain or 'study'}-{hashlib.sha256(study.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _possible(
    space: SearchSpace, device: DeviceSpec, model: ModelSpec, global_batch: int
) -> tuple[SearchSpace, list[Removal]]:
    """The space without what cannot be on this device, for this model and this global batch."""
    from importlib.util import find_spec

    removals: list[Removal] = []

    def narrow(name: str, impossible: set[object], reason: str) -> None:
        nonlocal space
        space, removed = space.narrow(name, lambda value: value not in impossible, reason)
        removals.extend(removed)

    sizes = space.knob("micro_batch_size")
    if sizes:
        uneven = {size for size in sizes.choices() if global_batch % size}
        narrow("micro_batch_size", uneven, f"does not divide the global batch of {global_batch} (--global-batch)")
    lengths = space.knob("seq_len")
    if lengths and model.max_seq_len:
        longer = {length for length in lengths.choices() if length > model.max_seq_len}
        narrow("seq_len", longer, f"longer than the model's context of {model.max_seq_len}")
    if not device.supports_bf16:
        narrow("precision", {"bf16_mixed", "bf16_pure"}, f"{device.name} has no bf16")
    elif space.knob("precision"):
        # bf16 does what fp16 does, without its loss scaling.
        choices = space.knob("precision").choices()  # type: ignore[union-attr]
        if "bf16_mixed" in choices and len(choices) > 1:
            narrow("precision", {"fp16_mixed"}, f"{device.name} has bf16, which needs no loss scaling")
    if (recomputed := space.knob("checkpointing")) and "offload" in recomputed.choices():
        compiled = tuple(value for value in recomputed.choices() if value != "offload")
        if compiled:
            space = space.condition("compile", "checkpointing", compiled)
        else:
            narrow("compile", {"per_layer"}, "layers whose checkpoints are offloaded do not compile")
    if device.kind != "cpu" and not device.supports_bf16:  # compute capability 8.0, as cuDNN's attention
        narrow("attention", {"sdpa_cudnn"}, f"{device.name} is too old for it")
    if find_spec("flash_attn") is None:
        narrow("attention", {"flash_attention_2"}, "flash-attn is not installed")
    if find_spec("bitsandbytes") is None:
        narrow("quantization", {"int8", "nf4"}, "bitsandbytes is not installed")
        narrow("optimizer", {"adamw_8bit", "paged_adamw_8bit", "lion_8bit"}, "bitsandbytes is not installed")
    if find_spec("liger_kernel") is None:
        narrow("kernels", {"liger"}, "liger-kernel is not installed")
    if find_spec("torchao") is None:
        narrow("quantization", {"fp8"}, "torchao is not installed")
    if not device.supports_fp8:
        narrow("quantization", {"fp8"}, f"{device.name} does not multiply 8-bit floats")
    if model.config["model_type"] in NO_SDPA:
        narrow("attention", {"sdpa_cudnn"}, f"{model.config['model_type']} has no SDPA attention")
        knob = space.knob("attention")
        reason = f"{model.config['model_type']} has no SDPA attention; eager in its place"
        if knob is None or knob.choices() == ("sdpa",):
            space = space.pin("attention", "eager")
            removals.append(Removal(knob="attention", values=("sdpa",), reason=reason))
        else:
            narrow("attention", {"sdpa"}, f"{model.config['model_type']} has no SDPA attention")
    if device.kind == "cpu":
        narrow("precision", {"fp16_mixed"}, "fp16 does not train on a CPU")
        narrow("optimizer", {"lion_8bit"}, "has no CPU kernel")
        narrow("attention", {"flash_attention_2", "flex_attention", "sdpa_cudnn"}, "needs a GPU")
        narrow("kernels", {"liger"}, "needs a GPU")
        narrow("checkpointing", {"offload"}, "there is no other memory to offload to")
    return space, removals


def _in_trl(space: SearchSpace) -> tuple[SearchSpace, list[Removal]]:
    """What SFTTrainer can do of the space, as it does it. Raises EnvironmentProblem where TRL is not installed."""
    from importlib.metadata import version
    from importlib.util import find_spec

    if find_spec("trl") is None:
        raise EnvironmentProblem("--trainer trl: TRL is not installed", remedy="pip install trl")
    removals: list[Removal] = []

    def narrow(name: str, possible: Callable[[object], bool], reason: str) -> None:
        nonlocal space
        space, removed = space.narrow(name, possible, reason)
        removals.extend(removed)

    if space.knob("loss"):
        narrow("loss", lambda value: value == "chunked", "TRL has a chunked loss of its own, and no other")
    else:
        space = space.pin("loss", "chunked")
    narrow("packing", lambda value: not value, "TRL lays packed rows out as one, which is not probed yet")
    narrow("quantization", lambda value: value != "fp8", "TRL has no fp8 base")
    narrow("attention", lambda value: value != "sdpa_cudnn", "a name that TRL does not know")
    methods, bases = space.knob("method"), space.knob("quantization")
    if (methods is None or "lora" in methods.choices()) and (bases is None or "none" in bases.choices()):
        reason = "TRL keeps adapters on an unquantised base in fp32"
        narrow("precision", lambda value: value != "bf16_pure", reason)
    if not checkpoints_some(version("transformers")):
        reason = "TrainingArguments before transformers 5.23 recomputes every layer or none"
        narrow("checkpointing", lambda value: value in ("none", "full"), reason)
    return space, removals


def _global_batch(spec: StudySpec, space: SearchSpace, model: ModelSpec, lengths: Lengths) -> int:
    """Examples an optimizer step. Of those that hold about the tokens asked for, what most micro batches divide."""
    if spec.global_batch_tokens is None:
        return spec.global_batch or GLOBAL_BATCH
    rows, knob = space.knob("seq_len"), space.knob("micro_batch_size")
    longest = min(max(rows.choices()) if rows else DEFAULT_TOKENS, model.max_seq_len or MAX_COUNT)
    wanted = spec.global_batch_tokens * lengths.number / lengths.kept(longest)
    sizes = knob.choices() if knob else ()
    nearest: int = max(1, round(wanted))
    if sizes and not any(nearest % size == 0 for size in sizes):
        nearest = max(1, round(wanted / min(sizes))) * min(sizes)
    found: set[int] = {round(wanted / size) * size for size in sizes}
    near = [batch for batch in found if batch and abs(batch / wanted - 1) <= OFF_TOKENS]
    return max([nearest, *near], key=lambda batch: (sum(batch % size == 0 for size in sizes), -abs(batch - wanted)))


def _workload(spec: StudySpec, space: SearchSpace, lengths: Lengths, global_batch: int) -> tuple[Workload, list[str]]:
    """The full run, and what is odd about it."""
    knob = space.knob("seq_len")
    longest = max(knob.choices()) if knob else DEFAULT_TOKENS
    warnings = []
    cut = 1 - lengths.kept(longest) / lengths.total
    if cut >= TOLD:
        warnings.append(
            f"{lengths.longer(longest):.0%} of the examples are longer than every seq_len of the space ({longest}): "
            f"{cut:.0%} of the tokens will be cut off"
        )
    examples = spec.examples
    if spec.tokens is not None:
        examples = math.ceil(spec.tokens / lengths.mean)
    elif examples is None and (spec.dataset or spec.lengths):
        examples = lengths.number
    workload = Workload(
        examples=examples or 10_000,
        epochs=spec.epochs,
        lengths=lengths,
        examples_assumed=examples is None,
        global_batch=global_batch,
    )
    return workload, warnings


def _lengths(spec: StudySpec, model: ModelSpec, usual: int, say: Callable[[str], None]) -> Lengths:
    """Of the examples: `usual` tokens where nobody says otherwise."""
    if spec.dataset is not None:
        return dataset_lengths(Path(expanduser(spec.dataset)), expanduser(spec.tokenizer or "") or model.tokenizer, say)
    if spec.lengths is not None:
        return read_lengths(Path(expanduser(spec.lengths)))
    if spec.mean_tokens is not None and spec.p99_tokens is not None:
        try:
            return Lengths.described(spec.mean_tokens, spec.p99_tokens)
        except ValueError as error:
            raise UsageError(f"--mean-tokens, --p99-tokens: {error}", remedy="give --lengths FILE instead") from None
    given = spec.tokens_per_example
    return Lengths.constant(given, "given") if given else Lengths.constant(usual, "assumed")


def _where(target: Target) -> str:
    return target.device.name if target.here is None else f"{target.device.name}-by-{target.here.name}"


def _price(spec: StudySpec, device: DeviceSpec) -> Price | None:
    if spec.price is None:
        return find_price(device.name, load_prices(Path(expanduser(spec.prices))) if spec.prices else ())
    return Price(
        provider="given by --price",
        device=device.name,
        usd_per_hour=spec.price,
        spot_usd_per_hour=None,
        count=1,
        as_of=None,
        source="--price",
    )

"""Narrow a search space to the values that the device, the model and the quality limits allow.

All rules are applied before the study begins, so that the search proposes no impossible value. Each
removed value is recorded with the reason for its removal.
"""

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.knobs import ADAMW, KNOBS, SELECTIVE
from autotune.core.lora_targets import (
    ALL_LINEAR,
    ATTENTION_EXPERTS,
    has_own_names,
    target_modules,
)
from autotune.core.objective import Objective
from autotune.core.parallelism import SHARDING_KNOBS, STRATEGIES, ZERO, Parallelism
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig, checkpoints_some
from autotune.core.untested import untested, untested_in
from autotune.problem.images import LEAST_TEXT
from autotune.problem.search_space import Knob, Removal, SearchSpace
from autotune.problem.workload import Workload
from autotune.trainer.settings import DEQUANTISED, EXPERT_PARAMETERS, is_expert_parameter

LARGEST_HEAD = 256  # the largest head dimension that the varlen attention kernel supports
HEAD_MULTIPLE = 8
# The largest accepted relative difference between the number of examples in a step of packed rows
# and the global batch
OFF_BATCH = 0.25
# By default, packing is tried only if a row holds at least this number of examples on average
WORTH_PACKING = 1.05
# If the space has more values of seq_len than this, packing is refused, because all examples would
# have to be packed once for each value.
MOST_LENGTHS = 16
NO_SDPA = "transformers has no SDPA attention for this model"
FP8_PRODUCTS = {"tensorwise", "rowwise"}
MIN_RANK = 16
OTHER_EXPERTS = "the model's experts do not use transformers' interface for experts"
MAX_TRUNCATED = 0.01
# For each of these knobs: the option that allows all its values, a test that is true for the values
# that are allowed without this option, and a description of the values that need the option.
NEEDS_CONSENT: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "quantization": (
        "allow_quantized",
        lambda value: value == "none",
        "a quantised base learns differently",
    ),
    "fp8_products": (
        "allow_fp8",
        lambda value: value == "none",
        "products in 8-bit floats learn differently",
    ),
    "optimizer": ("allow_any_optimizer", lambda value: value in ADAMW, "not AdamW"),
    "precision": ("allow_pure_bf16", lambda value: value != "bf16_pure", "no fp32 master weights"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Limits on the loss of quality that the search may accept for speed.

    If a field `allow_...` is true, the user consents to values that are otherwise removed. Without
    consent, some of these values are tried only if no other configuration fits. If `min_rank` or
    `max_truncated` is None, MIN_RANK or MAX_TRUNCATED applies, unless this limit would remove all
    values of the knob.
    """

    min_rank: int | None = None
    max_truncated: float | None = None
    allow_quantized: bool = False
    allow_fp8: bool = False
    allow_pure_bf16: bool = False
    allow_any_optimizer: bool = False
    slack: float = 0.05


@dataclass(slots=True)
class Narrowing:
    """A search space, which rules narrow by removing values, and the values removed so far.

    `reserve` is the space to search if no configuration of `space` fits. Impossible values are
    removed from both spaces. Values that only a quality limit (a floor) forbids are removed from
    `space`, but may stay in `reserve`. `removals` has only the values that were removed from
    `space`. `pins` are the knobs that the user fixed to one value. `needed_by` maps each knob that
    was narrowed for a pin to this pin (see `keep_pins`).
    """

    space: SearchSpace
    reserve: SearchSpace
    removals: list[Removal] = field(default_factory=list)
    pins: tuple[str, ...] = ()
    needed_by: dict[str, str] = field(default_factory=dict)

    def keep(
        self, name: str, possible: Callable[[Any], bool], reason: str, *, reserve: bool = True
    ) -> None:
        """Remove a knob's impossible values from the space and, if `reserve`, from the reserve.

        Raises UsageError if no value is left.
        """
        try:
            self.space, removed = self.space.narrow(name, possible, reason)
        except UsageError as error:
            if name not in self.needed_by:
                raise
            raise UsageError(
                f"{error}; {self.needed_by[name]} excludes the other values",
                remedy=error.remedy,
            ) from None
        self.removals += removed
        if reserve:
            self.reserve, _ = self.reserve.narrow(name, possible, reason)

    def remove(self, name: str, impossible: Container[Any], reason: str) -> None:
        """Remove these values of a knob. Raises UsageError if no value is left."""
        self.keep(name, lambda value: value not in impossible, reason)

    def remove_untested(self, context: str, member: str = "") -> None:
        """Remove all values of knobs that are untested in a context (see `core.untested`).

        Raises UsageError if no value is left.
        """
        for pair in untested_in(context, member):
            self.remove(pair.setting, pair.values, pair.sentence(member))

    def prefer(
        self, name: str, allowed: Callable[[Any], bool], reason: str, *, reserve: bool = False
    ) -> None:
        """Keep only the allowed values.

        All values stay if no value is allowed, or if the knob has a single value.
        """
        choices = self.space.choices(name)
        if len(choices) > 1 and any(map(allowed, choices)):
            self.keep(name, allowed, reason, reserve=reserve)

    def only_with(self, name: str, other: str, allowed: tuple[Any, ...]) -> None:
        """Vary the knob `name` only if the knob `other` has one of the `allowed` values."""
        self.space = self.space.condition(name, other, allowed)
        self.reserve = self.reserve.condition(name, other, allowed)

    def divide(self, batch: int) -> None:
        """Allow only micro batch sizes whose product with the GPU count divides `batch`."""
        self.space = self.space.divide(batch)
        self.reserve = self.reserve.divide(batch)

    def offer(self, name: str, values: tuple[Any, ...]) -> None:
        """Give a knob these values, in the space and in the reserve."""
        self.space = self.space.offer(name, values)
        self.reserve = self.reserve.offer(name, values)

    def leave_out(self, name: str, value: Any, reason: str) -> None:
        """Remove a value without telling the user.

        If only the knob's default is left, the knob is removed, too. Raises UsageError if no
        value is left.
        """
        self.space, removed = self.space.narrow(name, lambda other: other != value, reason)
        self.reserve, _ = self.reserve.narrow(name, lambda other: other != value, reason)
        if removed and self.space.choices(name) == (KNOBS[name].default,):
            self.space = self.space.without(name)
            self.reserve = self.reserve.without(name)

    def pin(self, name: str, value: Any) -> None:
        """Fix a knob to one value, even if the space does not have the knob."""
        self.space = self.space.pin(name, value)
        self.reserve = self.reserve.pin(name, value)


def attentions_without_sdpa(
    model: ModelSpec, device: DeviceSpec, *, has_flex: bool
) -> tuple[str, ...]:
    """Return the attention implementations to search for a model without SDPA attention.

    transformers may have no SDPA attention for a model. Its default for such a model is eager
    attention, which comes first, because the baseline takes the first value. The fastest
    implementation comes last. Eager attention stores the scores of all pairs of tokens.
    FlexAttention does not store scores, so it is faster and needs less memory. FlexAttention runs
    on the same GPUs as flash attention.
    """
    runs_flex = device.kind != "cpu" and device.has_flash
    if runs_flex and has_flex and no_flex(model) is None:
        return "eager", "flex_attention"
    return ("eager",)


def narrow_to_model(
    narrowing: Narrowing,
    model: ModelSpec,
    workload: Workload,
    without_sdpa: tuple[str, ...] = ("eager",),
) -> None:
    """Remove values that the model, the global batch or the number of examples makes impossible.

    `without_sdpa` has the attention implementations to search if the model has no SDPA attention.
    """
    batch = workload.global_batch
    examples = workload.trained
    _narrow_to_even_batches(narrowing, batch)
    # If a micro batch had more rows than the dataset has examples, some rows would always be blank.
    if not workload.examples_assumed:
        narrowing.keep(
            "micro_batch_size",
            lambda size: size <= examples,
            f"more sequences than examples ({examples})",
        )

    context = model.max_seq_len
    if context:
        narrowing.keep(
            "seq_len",
            lambda length: length <= context,
            f"longer than the model's context of {context}",
        )

    _narrow_to_checkpoint(narrowing, model.stored_as)
    if not model.has_experts:
        narrowing.leave_out("quantize_experts", True, "the model has no experts")
        narrowing.leave_out("lora_kernels", "grouped", "there are no adapters on experts")
    kind = model.text_type
    narrowing.keep(
        "lora_targets",
        lambda targets: target_modules(kind, targets) != [],
        "the model has no attention",
    )
    if model.lacks("flash_attention_2"):
        narrowing.remove(
            "attention",
            {"flash_attention_2"},
            "transformers has no FlashAttention 2 for this model",
        )
    if reason := no_flex(model):
        narrowing.remove("attention", {"flex_attention"}, reason)
    if model.lacks("sdpa"):
        _narrow_to_other_attention(narrowing, without_sdpa)

    # Some values were tested only with models for text, not with models that also read images.
    narrowing.remove_untested("model_type", model.config["model_type"])
    _narrow_tiling(narrowing)
    _remove_without_effect(narrowing, "cuda_graphs", "micro_batch")
    _remove_without_effect(narrowing, "lora_kernels", "joined")

    if reason := no_varlen(model.config):
        narrowing.remove("packed_attention", {"varlen"}, reason)

    checkpoints = narrowing.space.choices("checkpointing")
    if checkpoints == ("offload",):
        narrowing.remove(
            "compile", {"per_layer"}, "layers whose checkpoints are offloaded do not compile"
        )
    elif "offload" in checkpoints:
        narrowing.only_with(
            "compile", "checkpointing", tuple(value for value in checkpoints if value != "offload")
        )


def _narrow_tiling(narrowing: Narrowing) -> None:
    """Remove the tiling of layers if it has no effect with any values of the other knobs."""
    if narrowing.space.choices("checkpointing") == ("none",):
        narrowing.remove("tiling", {"tokens"}, "without recomputed layers there is nothing to tile")
    _remove_without_effect(narrowing, "tiling", "tokens")


def _remove_without_effect(narrowing: Narrowing, name: str, value: str) -> None:
    """Remove a knob's value if it works only with values of another knob that the space lacks."""
    needed = {other: _listed(wanted) for other, wanted in KNOBS[name].active_when.items()}
    for other, excluded in KNOBS[name].impossible_with.get(value, {}).items():
        possible = (*KNOBS[other].choices, *narrowing.space.choices(other))
        needed[other] = [one for one in dict.fromkeys(possible) if one not in _listed(excluded)]

    for other, values in needed.items():
        if not set(values) & set(narrowing.space.choices(other)):
            reason = f"works only with {KNOBS[other].label} {' or '.join(map(str, values))}"
            narrowing.remove(name, {value}, reason)


def keep_pins(narrowing: Narrowing) -> None:
    """Remove the values of other knobs with which a pinned knob would lose its value.

    A knob that has no effect, or whose value is impossible, gets another value. So the knobs in a
    pin's conditions keep only the values that let the pin have its value. If such a knob then no
    longer has its value for "no effect", its own conditions apply, too. Only one sharding knob,
    `offload`, narrows the number of GPUs: one GPU has nothing to shard, but it would hold tensors
    that belong to the host (`narrow_to_sharing` checks the number of copies).

    Raises UsageError if no value of another knob is left.
    """
    for pin in narrowing.pins:
        pinned = f"{pin} {_text(narrowing.space.choices(pin))}"
        names = [pin]
        while names:
            name = names.pop()
            subject = f"{name} {_text(narrowing.space.choices(name))}"
            because = "" if name == pin else f" (because of {pinned})"
            for other, allowed, need in _needs(narrowing.space, name):
                choices = narrowing.space.choices(other)
                is_possible = any(map(allowed, choices))
                shards = name in SHARDING_KNOBS and pin != "offload"
                if other == "num_gpus" and (name == "copies" or (shards and is_possible)):
                    continue
                if not is_possible:
                    raise _no_effect(narrowing, pin, other, need)
                narrowing.keep(other, allowed, f"{subject} needs {need}{because}")
                if narrowing.space.choices(other) != choices:
                    narrowing.needed_by.setdefault(other, pinned)
                    names.append(other)


def _needs(space: SearchSpace, name: str) -> Iterator[tuple[str, Callable[[Any], bool], str]]:
    """Yield the conditions under which a knob has one of its values in the space.

    Each condition is (another knob, a test that is true for its allowed values, the condition in
    words). The rank of adapters has no conditions here: --rank is also for comparisons of LoRA with
    full fine-tuning.
    """
    values = space.choices(name)
    knob = KNOBS[name]
    if knob.inactive_value not in (None, *values):
        conditions = (space.knob(name) or Knob(name=name)).conditions()
        for other, wanted in conditions.items():
            yield other, _listed(wanted).__contains__, f"{other} {_text(_listed(wanted))}"
        for other, value in knob.never_with.items():
            yield other, _not_in([value]), f"{other} other than {_text([value])}"

    # A value of another knob is excluded if it makes all values of this knob impossible.
    excluded_by = [knob.impossible_with.get(value, {}) for value in values]
    for other, wanted in excluded_by[0].items():
        excluded = [
            value
            for value in _listed(wanted)
            if all(value in _listed(each.get(other, [])) for each in excluded_by)
        ]
        if excluded:
            # Only values that the space has are named, if there are any.
            named = [value for value in excluded if value in space.choices(other)] or excluded
            yield other, _not_in(excluded), f"{other} other than {_text(named)}"


def _not_in(excluded: Container[Any]) -> Callable[[Any], bool]:
    return lambda value: value not in excluded


def _no_effect(narrowing: Narrowing, pin: str, other: str, need: str) -> UsageError:
    """Return the error for a pin that needs a value of another knob which the space lacks."""
    where = "in this space"
    remedy = f"take a space with {need}"
    if other in narrowing.pins:
        where = f"with {other} {_text(narrowing.space.choices(other))}"
        remedy = f"change {'--gpus' if other == 'num_gpus' else other}"
    elif other in narrowing.needed_by:
        where = f"with {narrowing.needed_by[other]}"
        remedy = "leave the other setting out"
    elif pin in SHARDING_KNOBS:
        remedy = "give several GPUs with --gpus"
    elif need in ("method lora", "method full"):
        kind, space = ("adapters", "lora") if need == "method lora" else ("no adapters", "full")
        remedy = f"take a space with {kind}: --space {space}"
    return UsageError(
        f"{pin} {_text(narrowing.space.choices(pin))} has no effect {where}: it needs {need}",
        remedy=f"leave --set {pin} out, or {remedy}",
    )


def _text(values: Collection[Any]) -> str:
    """Return values as in `--set`, joined by "or"."""
    return " or ".join(
        str(value).lower() if isinstance(value, bool) else str(value) for value in values
    )


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _narrow_to_even_batches(narrowing: Narrowing, batch: int) -> None:
    """Remove micro batch sizes and GPU counts whose products never divide the global batch."""
    numbers = narrowing.space.choices("num_gpus")
    sizes = narrowing.space.choices("micro_batch_size")
    fewest = min(numbers)
    each = f" on each of {fewest} GPUs" if fewest > 1 else ""
    uneven_sizes = {size for size in sizes if all(batch % (number * size) for number in numbers)}
    narrowing.remove(
        "micro_batch_size",
        uneven_sizes,
        f"does not divide the global batch of {batch}{each} (--global-batch)",
    )

    if len(numbers) > 1:
        uneven_counts = {
            number for number in numbers if all(batch % (number * size) for size in sizes)
        }
        narrowing.remove(
            "num_gpus", uneven_counts, f"do not divide the global batch of {batch} (--global-batch)"
        )
        narrowing.divide(batch)
    # An optimizer that steps during the backward pass cannot accumulate gradients, so a GPU's whole
    # share of the global batch must be one micro batch.
    narrowing.only_with("optimizer_in_backward", "micro_batch_size", (batch // fewest,))


def _holds_copies(num_gpus: int, copies: int) -> bool:
    return TrainConfig(num_gpus=num_gpus, sharding="fsdp2", copies=copies).copies == copies


def narrow_to_sharing(narrowing: Narrowing) -> None:
    """Remove values that no combination of GPU count and sharding strategy supports."""
    space = narrowing.space
    uneven_copies = {
        copies
        for copies in space.choices("copies")
        if not any(_holds_copies(number, copies) for number in space.choices("num_gpus"))
    }
    narrowing.remove(
        "copies",
        uneven_copies - {1},
        "each copy of the model needs at least two GPUs, and all copies need the same number",
    )

    if "copies" in narrowing.pins:
        narrowing.keep(
            "num_gpus",
            lambda number: _holds_copies(number, *space.choices("copies")),
            f"cannot hold {_text(space.choices('copies'))} equal copies of the model",
        )

    _remove_refused(
        narrowing,
        [
            Parallelism(num_gpus=number, strategy=strategy if number > 1 else "none")
            for number in space.choices("num_gpus")
            for strategy in space.choices("sharding")
        ],
    )


def space_of_rank(space: SearchSpace, way: Parallelism, batch: int) -> SearchSpace:
    """Return the values of a space for one GPU with which each GPU of `way` can train.

    `batch` is the global batch. Raises UsageError if a knob has no value left.
    """
    narrowing = Narrowing(space=space, reserve=space)
    narrowing.keep(
        "micro_batch_size",
        lambda size: batch % (way.num_gpus * size) == 0,
        f"does not divide the global batch of {batch} on each of {way.num_gpus} GPUs"
        " (--global-batch)",
    )
    _remove_refused(narrowing, [way])
    return narrowing.space


def _remove_refused(narrowing: Narrowing, ways: Sequence[Parallelism]) -> None:
    """Remove the values that every combination of GPU count and strategy refuses."""
    for knob in narrowing.space.knobs:
        for value in knob.choices():
            config = TrainConfig(**{knob.name: value})
            reasons = [way.refusal(config) for way in ways]
            if all(reasons):
                narrowing.remove(knob.name, {value}, reasons[0] or "")


def _narrow_to_checkpoint(narrowing: Narrowing, stored_as: str | None) -> None:
    """Keep only the values that can train a checkpoint whose stored weights are quantised."""
    if stored_as is None:
        return
    reason = f"the checkpoint is stored in {stored_as}"
    if stored_as in DEQUANTISED:
        narrowing.remove(
            "quantization", {"int8", "nf4"}, f"{reason}; bitsandbytes cannot quantise it"
        )
        return

    name, _, double = stored_as.partition("-")
    wanted: dict[str, Any] = {"method": "lora", "quantization": name}
    if name == "nf4":
        wanted["double_quant"] = bool(double)
    for knob, value in wanted.items():
        if narrowing.space.knob(knob) is None:
            narrowing.pin(knob, value)
        narrowing.keep(knob, (value,).__contains__, reason)


def _narrow_to_other_attention(narrowing: Narrowing, others: tuple[str, ...]) -> None:
    """Remove SDPA attention; if the space has no other attention, search `others` instead."""
    narrowing.remove("attention", {"sdpa_cudnn"}, NO_SDPA)
    if narrowing.space.choices("attention") == ("sdpa",):
        narrowing.offer("attention", others)
        verb = "are" if len(others) > 1 else "is"
        reason = f"{NO_SDPA}; {' and '.join(others)} {verb} used instead"
        narrowing.removals.append(Removal(knob="attention", values=("sdpa",), reason=reason))
    else:
        narrowing.remove("attention", {"sdpa"}, NO_SDPA)


def remove_fp8(narrowing: Narrowing, reason: str) -> None:
    """Remove all values with products in 8-bit floats."""
    narrowing.remove("quantization", {"fp8"}, reason)
    narrowing.remove("fp8_products", FP8_PRODUCTS, reason)


def narrow_to_device(narrowing: Narrowing, device: DeviceSpec) -> None:
    """Remove values that the target device does not support."""
    if device.kind == "cpu" and max(narrowing.space.choices("num_gpus")) > 1:
        narrowing.remove(
            "sharding", set(STRATEGIES) - {"ddp"}, "accelerate shards models only across GPUs"
        )

    _narrow_precision(narrowing, device)
    if not device.supports_fp8:
        remove_fp8(narrowing, f"{device.name} does not multiply 8-bit floats")

    if device.kind == "cpu" or device.unified_memory:
        reason = "there is no other memory to offload to"
        narrowing.remove("checkpointing", {"offload"}, reason)
        narrowing.remove("offload", {True}, reason)

    if device.kind == "cpu" or device.vendor != "nvidia":
        narrowing.remove("cuda_graphs", {"micro_batch"}, "needs an NVIDIA GPU")

    if device.kind == "cpu":
        narrowing.remove("optimizer", {"lion_8bit"}, "has no CPU kernel")
        narrowing.remove(
            "attention", {"flash_attention_2", "flex_attention", "sdpa_cudnn"}, "needs a GPU"
        )
        narrowing.remove("packed_attention", {"varlen"}, "needs a GPU")
        narrowing.remove("kernels", {"liger"}, "needs a GPU")
    elif not device.has_flash:
        reason = f"{device.name} is too old for this attention"
        narrowing.remove("attention", {"sdpa_cudnn", "flash_attention_2"}, reason)
        narrowing.remove("packed_attention", {"varlen"}, reason)


def _narrow_precision(narrowing: Narrowing, device: DeviceSpec) -> None:
    """Remove precisions in which the device cannot train, or trains slowly.

    A CPU without fast bf16 trains in fp32, even if fp32 is not in the space. If the device has no
    bf16, and the space does not have the knob `precision`, the device's usual precision is added to
    the space. If the space has only one precision, it is never replaced. An error is raised if the
    device does not support this precision.
    """
    if narrowing.space.knob("precision") is None and not device.supports_bf16:
        narrowing.pin("precision", device.usual_precision)

    choices = narrowing.space.choices("precision")
    bf16 = {"bf16_mixed", "bf16_pure"}
    reason = f"{device.name} has no bf16"

    if device.kind == "cpu":
        reason = "this processor multiplies bf16 far slower than fp32 (it lacks AVX-512)"
        if not device.supports_bf16 and len(choices) > 1 and set(choices) <= {*bf16, "fp16_mixed"}:
            narrowing.offer("precision", (*choices, "fp32"))
            reason += "; fp32 takes its place"

    if not device.supports_bf16:
        narrowing.remove("precision", bf16, reason)
    elif "bf16_mixed" in choices:
        reason = f"{device.name} has bf16, which needs no loss scaling"
        narrowing.remove("precision", {"fp16_mixed"}, reason)

    if device.kind == "cpu":
        narrowing.remove("precision", {"fp16_mixed"}, "fp16 does not train on a CPU")


def narrow_to_packages(narrowing: Narrowing) -> None:
    """Remove values that need a package, if this machine lacks the package."""
    from importlib.util import find_spec

    if find_spec("flash_attn") is None:
        narrowing.remove("attention", {"flash_attention_2"}, "flash-attn is not installed")
    if find_spec("bitsandbytes") is None:
        reason = "bitsandbytes is not installed"
        narrowing.remove("quantization", {"int8", "nf4"}, reason)
        narrowing.remove("optimizer", {"adamw_8bit", "paged_adamw_8bit", "lion_8bit"}, reason)
    if find_spec("liger_kernel") is None:
        narrowing.remove("kernels", {"liger"}, "liger-kernel is not installed")
    if find_spec("deepspeed") is None:
        narrowing.remove("sharding", set(ZERO), "DeepSpeed is not installed")


def narrow_to_trl(
    narrowing: Narrowing, *, installed: bool, objective: Objective = Objective.SFT
) -> None:
    """Remove values that TRL's trainers do not support.

    If `installed` is true, values that this machine's packages do not support are removed too, and
    EnvironmentProblem is raised if TRL is missing.
    """
    if installed:
        from importlib.metadata import version
        from importlib.util import find_spec

        if find_spec("trl") is None:
            raise EnvironmentProblem(
                "--trainer trl: TRL is not installed", remedy="pip install trl"
            )
        if not checkpoints_some(version("transformers")):
            reason = "TrainingArguments before transformers 5.23 recomputes every layer or none"
            narrowing.keep("checkpointing", lambda value: value in ("none", "full"), reason)

    if objective.num_labels is None:
        narrowing.keep(
            "loss",
            lambda value: value == "chunked",
            "TRL supports only its own chunked loss",
        )
        narrowing.pin("loss", "chunked")

    narrowing.remove_untested("trainer", "trl")
    _narrow_padding_to_trl(narrowing)
    narrowing.remove("quantization", {"fp8"}, "TRL has no fp8 base")
    narrowing.remove("fp8_products", FP8_PRODUCTS, "TRL multiplies in 16 bits")
    narrowing.remove(
        "optimizer_in_backward", {True}, "TRL's optimizer steps only after the backward pass"
    )
    narrowing.remove("attention", {"sdpa_cudnn"}, "TRL has no attention of this name")
    narrowing.remove("tiling", {"tokens"}, "TRL does not compute layers in tiles")
    narrowing.remove(
        "cuda_graphs",
        {"micro_batch"},
        "TRL's step reads values on the host, which is impossible in a CUDA graph",
    )
    narrowing.remove("lora_kernels", {"joined", "grouped"}, "TRL computes adapters as PEFT does")
    narrowing.remove("quantize_experts", {True}, "TRL leaves the experts in 16 bits")
    narrowing.remove(
        "checkpointing",
        SELECTIVE,
        "TRL's configuration has no key for the compiler's activation budget",
    )
    if "lora" in narrowing.space.choices("method") and "none" in narrowing.space.choices(
        "quantization"
    ):
        narrowing.remove(
            "precision", {"bf16_pure"}, "TRL keeps adapters on an unquantised base in fp32"
        )


def narrow_to_objective(narrowing: Narrowing, objective: Objective) -> None:
    """Remove values that are impossible or untested with an objective."""
    narrowing.remove_untested("objective", objective)
    if objective.num_labels is not None:
        narrowing.remove(
            "loss",
            {"chunked"},
            "the model predicts one value per sequence, so there are no token logits to chunk",
        )
    if objective is Objective.CLASSIFICATION:
        narrowing.remove("packing", {True}, "each sequence has one label")

    if objective.has_reference:
        reason = "TRL switches recomputation off for all layers while the reference model computes"
        narrowing.keep("checkpointing", lambda value: value in ("none", "full"), reason)
    if objective is Objective.KTO:
        reason = "KTO compares each answer with answers to other prompts of the same micro batch"
        narrowing.remove("micro_batch_size", {1}, reason)


def narrow_to_images(narrowing: Narrowing, workload: Workload) -> None:
    """Remove values that are impossible or untested with images."""
    tokens = workload.image_tokens
    if tokens:
        least = max(tokens + LEAST_TEXT, workload.images_end)
        room = f"the images of an example take {tokens} tokens, which are never truncated"
        room += f", and the last image ends at token {least}" if least > tokens + LEAST_TEXT else ""
        narrowing.keep("seq_len", lambda length: length >= least, room)

    narrowing.remove("packing", {True}, "sequences with images are not packed")
    narrowing.remove(
        "group_by_length",
        {True},
        "images are read only when a micro batch is made, so sequence lengths are unknown before",
    )
    narrowing.remove(
        "cuda_graphs",
        {"micro_batch"},
        "image sizes are read on the host, which is impossible in a CUDA graph",
    )
    narrowing.remove_untested("images")


def _narrow_padding_to_trl(narrowing: Narrowing) -> None:
    """Keep only TRL's modes of padding: to the longest row of a micro batch, or to `seq_len`.

    With compiled layers, rows are padded to `seq_len`.
    """
    knob = narrowing.space.knob("padding")
    alike = knob is None or {"bucket", "max_length"} & set(knob.choices())
    narrowing.remove(
        "padding",
        {"bucket"},
        "TRL pads to the longest sequence of a micro batch, or all sequences to one length",
    )
    narrowing.remove(
        "padding", {"masked"}, "TRL gives all sequences a mask, even with the padding `longest`"
    )

    if (
        alike
        and "longest" in narrowing.space.choices("padding")
        and narrowing.space.choices("compile") != ("none",)
    ):
        narrowing.pin("padding", "max_length")
        narrowing.only_with("padding", "compile", ("per_layer",))


def narrow_padding(narrowing: Narrowing, workload: Workload) -> None:
    """Allow compilation only with packing if unpacked rows have too many lengths to compile for.

    Unpacked rows have too many lengths if the only allowed padding is to the longest row of each
    micro batch. If all examples have the same length, no row has padding, and the value "masked" of
    `padding` is removed.
    """
    padding = narrowing.space.knob("padding")
    if padding is None:
        return

    others = set(padding.choices()) - {"masked"}
    if others and len(workload.lengths.counts) == 1:
        narrowing.space, _ = narrowing.space.narrow(
            "padding", others.__contains__, "no sequence has padding"
        )
        narrowing.reserve, _ = narrowing.reserve.narrow(
            "padding", others.__contains__, "no sequence has padding"
        )
    if others - {"longest"}:
        return
    reason = (
        "sequences padded to the longest of each micro batch have too many lengths to compile for"
    )
    if True in narrowing.space.choices("packing") and "per_layer" in narrowing.space.choices(
        "compile"
    ):
        narrowing.only_with("compile", "packing", (True,))
        narrowing.removals.append(
            Removal(knob="compile", values=("per_layer",), reason=f"without packing: {reason}")
        )
    else:
        narrowing.remove("compile", {"per_layer"}, reason)


def narrow_checkpointing(narrowing: Narrowing) -> None:
    """Remove selective recomputation if some values of other knobs exclude compiled layers."""
    compiled = narrowing.space.knob("compile")
    if compiled is None or "per_layer" not in compiled.choices():
        reason = "it needs compiled layers, because the compiler chooses the recomputed tensors"
        narrowing.remove("checkpointing", SELECTIVE, reason)
    elif others := set(compiled.when or {}) - {"checkpointing"}:
        reason = f"the layers are compiled only with some values of {', '.join(sorted(others))}"
        narrowing.remove("checkpointing", SELECTIVE, reason)


def narrow_to_layers(
    narrowing: Narrowing,
    model: ModelSpec,
    trainer: str,
    shape: ModelShape | None,
    without_sdpa: tuple[str, ...] = ("eager",),
) -> None:
    """Remove values that the model's layers do not support; `shape` is None if unknown.

    `without_sdpa` has the attention implementations to search if the model has no SDPA attention.
    Raises UsageError if no value is left.
    """
    if shape is not None and shape.no_adapters:
        _narrow_to_other_adapters(narrowing, shape)
    if shape is not None and shape.linear_layers:
        _narrow_to_named_layers(narrowing, model, (*shape.linear_layers, *shape.experts))
    if shape is not None and not shape.sdpa:
        _narrow_to_other_attention(narrowing, without_sdpa)
    if shape is not None and not shape.tileable:
        narrowing.remove(
            "tiling", {"tokens"}, "the model's layers have no attention and MLP of the usual form"
        )

    if trainer == "transformers" and (shape is None or not shape.plain_head):
        reason = "the model changes its logits after its head, which cannot be done in chunks"
        if shape is None:
            reason = "whether the model changes its logits after its head is not known"
        narrowing.remove("loss", {"chunked"}, reason)

    if shape is None or not shape.liger:
        narrowing.remove("kernels", {"liger"}, "Liger has no kernels for this model")

    _narrow_to_experts(narrowing, model, shape)


def _narrow_to_experts(narrowing: Narrowing, model: ModelSpec, shape: ModelShape | None) -> None:
    """Allow grouped matrix products (one kernel for all experts) only for adapters on experts.

    If the experts have adapters, layers can be compiled only with grouped matrix products.
    """

    def on_experts(targets: str) -> bool:
        if targets == ALL_LINEAR:
            return shape is not None and shape.parametrized
        return any(map(is_expert_parameter, target_modules(model.text_type, targets) or []))

    # If the adapters have other targets, the registry of knobs already excludes grouped products
    # (`impossible_with`).
    excluded = KNOBS["lora_kernels"].impossible_with["grouped"]["lora_targets"]
    named = set(narrowing.space.choices("lora_targets")) - set(excluded)
    with_experts = set(filter(on_experts, named))
    if not with_experts or with_experts != named:
        # Most models have no experts, so this removal is not reported.
        narrowing.leave_out("lora_kernels", "grouped", "there are no adapters on experts")
    elif shape is None or not shape.experts:
        narrowing.remove("lora_kernels", {"grouped"}, OTHER_EXPERTS)
    if shape is None or not shape.experts:
        narrowing.remove("quantize_experts", {True}, OTHER_EXPERTS)
    if not with_experts or "lora" not in narrowing.space.choices("method"):
        return
    _remove_without_effect(narrowing, "lora_kernels", "grouped")

    kernels = narrowing.space.choices("lora_kernels")
    if "grouped" not in kernels:
        reason = (
            "adapters on fused experts replace whole weights in each forward pass, which does not"
            " compile"
        )
        narrowing.remove("compile", {"per_layer"}, reason)
        narrow_checkpointing(narrowing)
    elif kernels != ("grouped",):
        narrowing.only_with("compile", "lora_kernels", ("grouped",))
        narrow_checkpointing(narrowing)


def _narrow_to_named_layers(
    narrowing: Narrowing, model: ModelSpec, layers: tuple[str, ...]
) -> None:
    """Remove values of `lora_targets` that name modules which the model lacks.

    A value stays if the model has all modules that the value names. If lora_targets.yaml has the
    module names of this model type, a value stays if the model has at least one of the modules. The
    value `attention_experts` stays only if the model also has a parameter of experts. One of
    EXPERT_PARAMETERS is enough, because no model family has all of these parameters.
    """

    def is_present(name: str) -> bool:
        return any(f".{path}".endswith(f".{name}") for path in layers)

    def has_layers(targets: str) -> bool:
        names = target_modules(model.text_type, targets) or []
        if targets == ATTENTION_EXPERTS:
            if not any(map(is_present, EXPERT_PARAMETERS)):
                return False
            names = [name for name in names if name not in EXPERT_PARAMETERS]

        matches = [is_present(name) for name in names]
        return all(matches) or (any(matches) and has_own_names(model.text_type))

    names = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in layers))
    narrowing.keep(
        "lora_targets", has_layers, f"the model's linear layers have only these names: {names}"
    )


def _narrow_to_other_adapters(narrowing: Narrowing, shape: ModelShape) -> None:
    """Remove ALL_LINEAR from `lora_targets`, because PEFT refuses some linear layers of this model.

    If the space has no other value of `lora_targets`, remove LoRA.
    """
    if set(narrowing.space.choices("lora_targets")) - {ALL_LINEAR}:
        reason = f"PEFT refuses adapters on some of the model's layers: {shape.no_adapters}"
        narrowing.remove("lora_targets", {ALL_LINEAR}, reason)
        return

    if narrowing.space.knob("method") is None:
        narrowing.pin("method", "lora")
    has_attention = any("attn." in path or "attention." in path for path in shape.linear_layers)
    other = "; --set lora_targets=attention may be possible" if has_attention else ""
    narrowing.remove(
        "method",
        {"lora"},
        f"PEFT refuses adapters on the model's layers: {shape.no_adapters}{other}",
    )


def refusal(
    config: TrainConfig,
    model: ModelSpec,
    trainer: str,
    shape: ModelShape | None,
    device: DeviceSpec,
) -> str | None:
    """Return why the layers or the device cannot run a configuration, or None if they can."""
    space = SearchSpace.of(
        **{name: value for name, value in config.as_dict().items() if value is not None}
    )

    narrowing = Narrowing(space=space, reserve=space)
    try:
        narrow_to_device(narrowing, device)
        narrow_to_layers(narrowing, model, trainer, shape)
    except UsageError as error:
        return str(error).partition(": ")[2]
    return next(map(str, narrowing.removals), None)


def apply_floors(narrowing: Narrowing, workload: Workload, floors: Floors) -> None:
    """Remove values that the quality limits (`floors`) forbid, but never the only value of a knob.

    Raises UsageError if the user asked for a rank or a length that the space does not have.
    """
    _apply_floor_of_length(narrowing, workload, floors.max_truncated)
    largest = max(narrowing.space.choices("lora_rank"))
    if (
        floors.min_rank is not None
        and floors.min_rank > largest
        and "lora" in narrowing.space.choices("method")
    ):
        remedy = f"give {largest} at most, or pin a rank with --rank"
        raise UsageError(
            f"--min-rank {floors.min_rank}: the largest rank of the space is {largest}",
            remedy=remedy,
        )

    min_rank = floors.min_rank or MIN_RANK
    reason = f"below the smallest rank of {min_rank} (--min-rank)"
    narrowing.prefer("lora_rank", lambda rank: rank >= min_rank, reason, reserve=True)

    for name, (floor, may_win, what) in NEEDS_CONSENT.items():
        if not getattr(floors, floor):
            # In full fine-tuning, pure bf16 saves much memory, so it stays in the reserve, which is
            # tried if nothing else fits. With adapters, pure bf16 saves little memory. Products in
            # 8-bit floats save little memory too.
            in_reserve = name != "fp8_products" and (
                name != "precision" or "full" in narrowing.space.choices("method")
            )
            when = "if no other value fits" if in_reserve else "on request"
            reason = f"{what}: used only {when} (--{floor.replace('_', '-')})"
            narrowing.prefer(name, may_win, reason, reserve=not in_reserve)


def _apply_floor_of_length(
    narrowing: Narrowing, workload: Workload, max_truncated: float | None
) -> None:
    """Remove values of seq_len that truncate too many tokens, or that are longer than needed.

    A value is longer than needed if a shorter value truncates no example.
    """
    largest = max(narrowing.space.choices("seq_len"))
    least = workload.truncated(largest)
    if max_truncated is not None and least > max_truncated + 1e-9:
        raise UsageError(
            f"--max-truncated {max_truncated}: even sequences of {largest} tokens truncate"
            f" {least:.2%} of the tokens",
            remedy=f"give {math.ceil(least * 1000) / 1000} or more,"
            " or pin a longer seq_len with --seq-len",
        )

    limit = max(MAX_TRUNCATED if max_truncated is None else max_truncated, least)
    reason = f"would truncate more than {100 * limit:.3g}% of the tokens (--max-truncated)"
    narrowing.prefer(
        "seq_len", lambda length: workload.truncated(length) <= limit + 1e-9, reason, reserve=True
    )

    longest = workload.lengths.longest
    shortest = min(
        (length for length in narrowing.space.choices("seq_len") if length >= longest),
        default=math.inf,
    )
    reason = f"no example is longer than {longest} tokens, so longer sequences would end in padding"
    narrowing.prefer("seq_len", lambda length: length <= shortest, reason, reserve=True)


def narrow_packing(narrowing: Narrowing, workload: Workload) -> None:
    """Allow packing only together with compatible values of other knobs.

    Raises UsageError if the user asked for packing but packing is impossible.
    """
    if True not in narrowing.space.choices("packing"):
        return
    asked_for = narrowing.space.choices("packing") == (True,)
    conditions = _packing_conditions(narrowing, workload, asked_for)
    if isinstance(conditions, str):
        if asked_for:
            remedy = "leave packing out, or change the setting that this error names"
            raise UsageError(f"packing was asked for, but {conditions}", remedy=remedy)
        narrowing.remove("packing", {True}, conditions)
        return

    for name, (allowed, reason) in conditions.items():
        excluded = tuple(value for value in narrowing.space.choices(name) if value not in allowed)
        if excluded and asked_for:
            narrowing.remove(name, excluded, reason)
        elif excluded:
            narrowing.only_with("packing", name, allowed)
            reason = f"not with {name} {', '.join(map(str, excluded))}: {reason}"
            narrowing.removals.append(Removal(knob="packing", values=(True,), reason=reason))


def no_packed_completions(model: ModelSpec, device: DeviceSpec) -> str | None:
    """Return why completions of a GRPO run cannot be packed, or None if they can."""
    if not device.has_flash:
        return f"{device.name} is too old for varlen attention"
    kind = model.config["model_type"]
    return no_varlen(model.config) or untested("packed_attention", "varlen", "model_type", kind)


def no_varlen(shape: Mapping[str, Any]) -> str | None:
    """Return why a model with the config `shape` cannot use varlen attention, or None if it can."""
    if shape.get("attention_dropout"):
        return "varlen attention has no dropout, but the model's attention has"

    width, heads, size = (
        shape.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if not size and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        size = width // heads

    if not isinstance(size, int):
        return "the size of the model's heads is not known"
    if size > LARGEST_HEAD or size % HEAD_MULTIPLE:
        return (
            f"varlen attention needs heads of at most {LARGEST_HEAD} values, in multiples of"
            f" {HEAD_MULTIPLE}; the model's heads have {size}"
        )
    return None


def no_flex(model: ModelSpec) -> str | None:
    """Return why a model cannot use FlexAttention, or None if it can."""
    if model.lacks("flex_attention"):
        return "transformers has no FlexAttention for this model"
    if model.config.get("attention_dropout"):
        return "FlexAttention supports no dropout, but the model's attention has dropout"
    return None


def _packing_conditions(
    narrowing: Narrowing, workload: Workload, asked_for: bool
) -> dict[str, tuple[tuple[Any, ...], str]] | str:
    """Return {knob: (values that allow packing, the reason why other values do not)}.

    If packing is impossible, the result is the reason, which is a string.
    """
    if workload.lengths.source == "assumed" and not asked_for:
        return "the lengths of the examples were not given (--dataset, --lengths)"

    # An attention implementation is allowed if packing was tested with it. With flash_attention_2,
    # transformers separates the examples of packed rows only if a micro batch has a single row.
    reasons = {
        value: untested("packing", True, "attention", value)
        for value in narrowing.space.choices("attention")
    }
    attentions = tuple(value for value, reason in reasons.items() if reason is None)
    untested_attentions = "; ".join(filter(None, reasons.values()))
    if not attentions:
        return untested_attentions

    lengths = narrowing.space.choices("seq_len")
    sizes = narrowing.space.choices("micro_batch_size")
    if len(lengths) > MOST_LENGTHS:
        return f"the space has more than {MOST_LENGTHS} values of seq_len (--seq-len)"

    rows = {length: TrainConfig(seq_len=length, packing=True) for length in lengths}
    examples_per_row = {length: workload.examples_per_row(row) for length, row in rows.items()}
    if max(examples_per_row.values()) < WORTH_PACKING and not asked_for:
        return "no sequence has room for a second example"

    def is_near_batch(length: int, size: int) -> bool:
        step = workload.run_shape(replace(rows[length], micro_batch_size=size)).examples_per_step
        near = abs(step / workload.global_batch - 1) <= OFF_BATCH
        return near and step <= max(workload.trained, examples_per_row[length])

    # Each allowed micro batch size must be possible with each allowed length. The shortest length
    # allows the most sizes. A longer length may exclude some of these sizes. If a length would
    # exclude all remaining sizes, the length is excluded instead.
    allowed_sizes = set(sizes)
    allowed_lengths = []
    for length in sorted(lengths):
        common = {size for size in allowed_sizes if is_near_batch(length, size)}
        if common:
            allowed_sizes = common
            allowed_lengths.append(length)

    reason = (
        f"a step's number of examples would differ by over {OFF_BATCH:.0%} from the global batch of"
        f" {workload.global_batch} (--global-batch)"
    )
    if not allowed_lengths:
        return f"{reason}: a sequence holds {min(examples_per_row.values()):.1f} examples"
    return {
        "attention": (attentions, untested_attentions),
        "seq_len": (tuple(allowed_lengths), reason),
        "micro_batch_size": (tuple(size for size in sizes if size in allowed_sizes), reason),
    }

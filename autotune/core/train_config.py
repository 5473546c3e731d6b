"""TrainConfig: one candidate configuration of a training run, which all packages use.

A TrainConfig is canonical: a knob without effect always has the same value, so configurations that
behave equally have equal digests. A TrainConfig does not include the global batch size, which the
user chooses for all candidates (`problem.workload`).
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.core.knobs import KNOBS, SELECTIVE, checkpoint_every

# If alpha is the same for all ranks, the best learning rate hardly depends on the rank.
LORA_ALPHA = 32
# rsLoRA divides alpha by the square root of the rank. At rank 16, its scale 8 / 4 equals LoRA's
# scale 32 / 16.
RSLORA_ALPHA = 8

# For each knob: its name, the knob, and the default. If another knob can force this knob away from
# its default, the default is replaced by an object that equals no value.
_ROWS = tuple(
    (name, knob, knob.default if knob.default_stays else object()) for name, knob in KNOBS.items()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One configuration, with a field for each knob.

    `knobs.yaml` describes the values and the meaning of each knob.

    Raises ValueError for a value that its knob cannot have.
    """

    JSON: ClassVar = "as_dict()"

    method: str = KNOBS["method"].default
    micro_batch_size: int = KNOBS["micro_batch_size"].default
    seq_len: int = KNOBS["seq_len"].default
    lora_rank: int | None = KNOBS["lora_rank"].default
    lora_targets: str = KNOBS["lora_targets"].default
    modules_to_save: str = KNOBS["modules_to_save"].default
    optimizer: str = KNOBS["optimizer"].default
    precision: str = KNOBS["precision"].default
    optimizer_in_backward: bool = KNOBS["optimizer_in_backward"].default
    quantization: str = KNOBS["quantization"].default
    double_quant: bool = KNOBS["double_quant"].default
    kbit_preparation: bool = KNOBS["kbit_preparation"].default
    checkpointing: str = KNOBS["checkpointing"].default
    attention: str = KNOBS["attention"].default
    compile: str = KNOBS["compile"].default
    fp8_products: str = KNOBS["fp8_products"].default
    loss: str = KNOBS["loss"].default
    kernels: str = KNOBS["kernels"].default
    packing: bool = KNOBS["packing"].default
    packed_attention: str = KNOBS["packed_attention"].default
    padding: str = KNOBS["padding"].default
    group_by_length: bool = KNOBS["group_by_length"].default
    dora: bool = KNOBS["dora"].default
    lora_dropout: float = KNOBS["lora_dropout"].default
    rslora: bool = KNOBS["rslora"].default
    loader_workers: int = KNOBS["loader_workers"].default
    allocator: str = KNOBS["allocator"].default
    num_gpus: int = KNOBS["num_gpus"].default
    tiling: str = KNOBS["tiling"].default
    cuda_graphs: str = KNOBS["cuda_graphs"].default
    quantize_experts: bool = KNOBS["quantize_experts"].default
    sharding: str = KNOBS["sharding"].default
    copies: int = KNOBS["copies"].default
    sync_each_batch: bool = KNOBS["sync_each_batch"].default
    offload: bool = KNOBS["offload"].default
    lora_kernels: str = KNOBS["lora_kernels"].default

    def __post_init__(self) -> None:
        # In KNOBS, a knob comes after the knobs that decide whether it has an effect, so one pass
        # over all knobs is enough.
        values = {name: getattr(self, name) for name in KNOBS}

        for name, knob, staying in _ROWS:
            # Nearly every knob is at a default that no other knob can change. Such a knob needs no
            # further check. This shortcut matters, because the program makes thousands of
            # configurations.
            if values[name] is staying:
                continue

            if not knob.is_active(values):
                values[name] = knob.inactive_value
                object.__setattr__(self, name, knob.inactive_value)
            elif knob.required and values[name] is None:
                raise ValueError(knob.required)
            else:
                # The knob may still have its value for "no effect", although a new value of another
                # knob now gives the knob an effect.
                if values[name] == knob.inactive and knob.inactive not in (None, *knob.choices):
                    values[name] = knob.choices[0]
                knob.check(values[name])
                values[name] = knob.possible(values[name], values)
                object.__setattr__(self, name, values[name])

    @property
    def tokens(self) -> int:
        """Tokens in a micro batch of full rows."""
        return self.micro_batch_size * self.seq_len

    @property
    def checkpoint_every(self) -> int | None:
        """The number k if every k-th layer is recomputed in the backward pass, otherwise None."""
        return checkpoint_every(self.checkpointing)

    @property
    def activation_budget(self) -> float:
        """The share of its activations that a compiled layer may keep; it recomputes all others."""
        return SELECTIVE.get(self.checkpointing, 1.0)

    @property
    def knows_ends(self) -> bool:
        """Whether the attention kernel knows where each example of a packed row ends."""
        return self.attention == "flash_attention_2" or self.packed_attention == "varlen"

    @property
    def offloads(self) -> bool:
        """Whether the inputs of recomputed layers are offloaded to the host's memory."""
        return self.checkpointing == "offload"

    @property
    def has_mask(self) -> bool:
        """Whether attention gets a mask, which separates packed examples or hides padding.

        A micro batch of one row has no padding.
        """
        if self.packing:
            return self.packed_attention == "mask"
        return self.padding == "masked" and self.micro_batch_size > 1

    @property
    def attention_implementation(self) -> str:
        """The value of transformers' `attn_implementation`."""
        return "varlen" if self.packed_attention == "varlen" else self.attention

    @property
    def multiplies_in_fp8(self) -> bool:
        """Whether the linear layers multiply 8-bit floats, trained or frozen."""
        return self.quantization == "fp8" or self.fp8_products != "none"

    @property
    def widens_base(self) -> bool:
        """Whether joined adapters are part of the base's matrices, as on any base but fp8."""
        return self.lora_kernels == "joined" and self.quantization != "fp8"

    @property
    def has_any_length(self) -> bool:
        """Whether a micro batch is padded to its longest example, so it may have any length."""
        return self.padding in ("longest", "masked")

    @property
    def lora_alpha(self) -> int | None:
        """The numerator of LoRA's scale.

        The numerator is the same for all LoRA ranks, so one learning rate suits all LoRA ranks.
        """
        if self.lora_rank is None:
            return None
        return RSLORA_ALPHA if self.rslora else LORA_ALPHA

    @property
    def base_dtype(self) -> str:
        """The dtype of the base weights, by torch's name.

        In full fine-tuning, the weights are fp32 unless the precision is pure bf16.
        """
        if self.precision == "bf16_pure" or (
            self.method == "lora" and self.precision == "bf16_mixed"
        ):
            return "bfloat16"
        if self.method == "lora" and self.precision == "fp16_mixed":
            return "float16"
        return "float32"

    @property
    def learning_rate(self) -> float:
        """The learning rate of probes. Probes are too short to compare learning rates."""
        return 2e-4 if self.method == "lora" else 1e-5

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal for equal configurations."""
        return digest_of(self.as_dict())

    @property
    def capability(self) -> tuple[float, ...]:
        """A tuple that is larger if the configuration can learn more.

        Knobs are compared in the order of `capability_priority`.
        """
        return tuple(
            KNOBS[name].capability_rank(getattr(self, name)) for name in _capability_knobs()
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the values by knob, without knobs that have no effect.

        A knob with `listed_at_default` off is left out if it has its default value.
        """
        values = {name: getattr(self, name) for name in KNOBS}
        return {name: values[name] for name, knob in KNOBS.items() if knob.is_listed(values)}

    def label(self) -> str:
        """Return one short line: 'lora r16 4x1024 bf16_mixed ckpt-full adamw_torch_fused'."""
        values = {name: getattr(self, name) for name in KNOBS}
        variant = ("rs" if self.rslora else "") + ("dora" if self.dora else "lora")
        parts = [f"{variant} r{self.lora_rank}" if self.method == "lora" else "full"]
        if self.quantization != "none":
            parts.append(self.quantization + ("-double" if self.double_quant else ""))

        size = f"{self.micro_batch_size}x{self.seq_len}"
        parts += [size, self.precision, f"ckpt-{self.checkpointing}", self.optimizer]

        for knob in sorted(KNOBS.values(), key=lambda knob: knob.tag_order):
            value = values[knob.name]
            if knob.tag and value != knob.possible(knob.default, values) and knob.is_active(values):
                parts.append(knob.tag.format(value))
        return " ".join(parts)


def learning_differences(config: TrainConfig, other: TrainConfig) -> str:
    """Describe the differences that affect learning, such as 'lora_rank 64 instead of 16'."""
    return ", ".join(
        f"{name} {getattr(config, name)} instead of {getattr(other, name)}"
        for name in _capability_knobs()
        if getattr(config, name) != getattr(other, name)
    )


def checkpoints_some(transformers: str) -> bool:
    """Return whether TrainingArguments can checkpoint only some layers, or offload checkpoints.

    `transformers` is a version of transformers, such as "5.23.0".
    """
    major, minor, *_ = (*transformers.split("."), "", "")
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= (5, 23)


def digest_of(data: Any) -> str:
    """Return twelve hex digits over the canonical JSON of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _capability_knobs() -> list[str]:
    """Return the knobs that affect how much a model can learn, the most important first."""
    ranked = [knob for knob in KNOBS.values() if knob.capability_priority is not None]
    return [knob.name for knob in sorted(ranked, key=lambda knob: knob.capability_priority or 0)]

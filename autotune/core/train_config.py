"""TrainConfig: one candidate configuration, the value that travels through the whole program.

It is canonical: ineffective knobs have a fixed value, so equal configurations have equal digests.
It does not include the global batch, which the user chooses for all candidates
(`problem.workload`).
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.core.knobs import KNOBS, SELECTIVE, checkpoint_every

LORA_ALPHA = 32  # the same for all ranks: the best learning rate then hardly depends on the rank
RSLORA_ALPHA = 8  # divided by the root of rank 16 it gives 2, LoRA's scale at rank 16

# Each knob with its default, or with a sentinel if another knob can change its value.
_ROWS = tuple(
    (name, knob, knob.default if knob.default_stays else object()) for name, knob in KNOBS.items()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One configuration, with a field for each knob. `knobs.yaml` describes values and meaning.

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
    lora_kernels: str = KNOBS["lora_kernels"].default
    sharding: str = KNOBS["sharding"].default
    copies: int = KNOBS["copies"].default
    sync_each_batch: bool = KNOBS["sync_each_batch"].default
    offload: bool = KNOBS["offload"].default

    def __post_init__(self) -> None:
        # A knob comes after the knobs that decide whether it is active, so one pass is enough.
        values = {name: getattr(self, name) for name in KNOBS}

        for name, knob, staying in _ROWS:
            # This shortcut skips nearly every value, in each of thousands of configurations.
            if values[name] is staying:
                continue

            if not knob.is_active(values):
                values[name] = knob.inactive_value
                object.__setattr__(self, name, knob.inactive_value)
            elif knob.required and values[name] is None:
                raise ValueError(knob.required)
            else:
                # A new value of another knob may have made this knob active.
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
        """The number k if every k-th layer is recomputed as a whole, otherwise None."""
        return checkpoint_every(self.checkpointing)

    @property
    def activation_budget(self) -> float:
        """The share of its activations that a compiled layer may keep; it recomputes the rest."""
        return SELECTIVE.get(self.checkpointing, 1.0)

    @property
    def knows_ends(self) -> bool:
        """Whether packed attention gets the ends of examples, and computes only within examples."""
        return self.attention == "flash_attention_2" or self.packed_attention == "varlen"

    @property
    def offloads(self) -> bool:
        """Whether the inputs of recomputed layers are kept in the host's memory."""
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
        """The name of the attention in transformers (`attn_implementation`)."""
        return "varlen" if self.packed_attention == "varlen" else self.attention

    @property
    def has_any_length(self) -> bool:
        """Whether a micro batch is exactly as long as its longest example."""
        return self.padding in ("longest", "masked")

    @property
    def lora_alpha(self) -> int | None:
        """The numerator of LoRA's scale, the same for all ranks, so one learning rate fits all."""
        if self.lora_rank is None:
            return None
        return RSLORA_ALPHA if self.rslora else LORA_ALPHA

    @property
    def base_dtype(self) -> str:
        """The dtype of the base weights, by torch's name.

        Full fine-tuning trains fp32 weights, except in pure bf16.
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
        """A common default for probes, which are too short to compare rates."""
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
        return tuple(KNOBS[name].capability_rank(getattr(self, name)) for name in _by_capability())

    def as_dict(self) -> dict[str, Any]:
        """Return the knobs that have an effect, by name, without some knobs at their default."""
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
    """Describe the differences in learning capability, such as 'lora_rank 64 instead of 16'."""
    return ", ".join(
        f"{name} {getattr(config, name)} instead of {getattr(other, name)}"
        for name in _by_capability()
        if getattr(config, name) != getattr(other, name)
    )


def checkpoints_some(transformers: str) -> bool:
    """Return whether TrainingArguments can checkpoint only some layers, or offload checkpoints.

    `transformers` is the version of transformers.
    """
    major, minor, *_ = (*transformers.split("."), "", "")
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= (5, 23)


def digest_of(data: Any) -> str:
    """Return twelve hex digits over the canonical JSON of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _by_capability() -> list[str]:
    """Return the knobs that are compared in capability, the most important first."""
    ranked = [knob for knob in KNOBS.values() if knob.capability_priority is not None]
    return [knob.name for knob in sorted(ranked, key=lambda knob: knob.capability_priority or 0)]

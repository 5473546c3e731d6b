"""TrainConfig: one candidate fine-tuning configuration, the value that travels through the whole program.

Canonical: knobs that have no effect beside the others are dropped, so that equal configurations have equal digests.
The global batch is not here: it is the user's, and the same for every candidate (`workload.Workload`).
"""

import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("full", "lora")
PRECISIONS = ("bf16_mixed", "bf16_pure", "fp16_mixed", "fp32")
QUANTIZATIONS = ("none", "fp8", "int8", "nf4")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor", "lion_8bit")
ATTENTIONS = ("sdpa", "sdpa_cudnn", "eager", "flash_attention_2", "flex_attention")
COMPILES = ("none", "per_layer")
LOSSES = ("full", "chunked")
KERNELS = ("torch", "liger")
LOADER_WORKERS = (0, 2, 4, 8)

CHOICES: dict[str, tuple[Any, ...]] = {
    "method": METHODS,
    "precision": PRECISIONS,
    "quantization": QUANTIZATIONS,
    "double_quant": (True, False),
    "optimizer": OPTIMIZERS,
    "attention": ATTENTIONS,
    "compile": COMPILES,
    "loss": LOSSES,
    "kernels": KERNELS,
    "loader_workers": LOADER_WORKERS,
    "packing": (True, False),
    "dora": (True, False),
    "rslora": (True, False),
}
INTEGERS = ("micro_batch_size", "seq_len", "lora_rank")
BOOLEANS = ("double_quant", "packing", "dora", "rslora")
RSLORA_ALPHA = 8  # over the root of rank 16 it is 2, LoRA's scale here at any rank

# What a knob needs of the others to have any effect; a knob that has none is dropped from the configuration.
ACTIVE_WHEN: dict[str, dict[str, Any]] = {
    "lora_rank": {"method": "lora"},
    "quantization": {"method": "lora"},
    "dora": {"method": "lora"},
    "rslora": {"method": "lora"},
    "double_quant": {"quantization": "nf4"},
    "kernels": {"compile": "none"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One configuration.

    `micro_batch_size` counts rows a forward pass on one GPU, `seq_len` tokens a row, `lora_rank` is None in full
    fine-tuning. `checkpointing` is `none`, `full`, `every_K` (each K-th layer recomputed) or `offload` (every layer,
    and what it is recomputed from waits in the host's memory). `precision`: `bf16_mixed` keeps trained parameters in
    fp32 under autocast, `bf16_pure` keeps everything in bf16. `quantization` is of the frozen base: `int8` and `nf4`
    store it in fewer bits, `fp8` only multiplies in 8-bit floats. `loss` holds the logits of a whole micro batch, or
    computes head, cross-entropy and their gradients in chunks of tokens. `packing` puts as many whole examples into a
    row as it holds, each attending to itself alone. `dora` trains a magnitude for each output of a layer beside its
    adapters, `rslora` scales these by the root of the rank instead of the rank.
    `kernels` of norms, rotary positions and MLPs are torch's or Liger's; layers that are compiled have Inductor's.
    `loader_workers` processes make batches beside the one that trains; with 0 it makes them itself.
    """

    method: str = "lora"
    micro_batch_size: int = 8
    seq_len: int = 1024
    lora_rank: int | None = 16
    optimizer: str = "adamw_torch_fused"
    precision: str = "bf16_mixed"
    quantization: str = "none"
    double_quant: bool = False
    checkpointing: str = "full"
    attention: str = "sdpa"
    compile: str = "none"
    loss: str = "full"
    kernels: str = "torch"
    packing: bool = False
    dora: bool = False
    rslora: bool = False
    loader_workers: int = 0

    def __post_init__(self) -> None:
        if self.method == "full":
            for name, value in {"lora_rank": None, "quantization": "none", "dora": False, "rslora": False}.items():
                object.__setattr__(self, name, value)
        elif self.lora_rank is None:
            raise ValueError("lora_rank is needed with method lora")
        if self.quantization != "nf4":
            object.__setattr__(self, "double_quant", False)
        if self.offloads:  # Dynamo does not follow the hooks that offload, and would leave the whole layer as it is
            object.__setattr__(self, "compile", "none")
        if self.compile != "none":
            object.__setattr__(self, "kernels", "torch")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "lora_rank":
                check_value(field.name, value)

    @property
    def tokens(self) -> int:
        """Tokens a micro batch, padding included."""
        return self.micro_batch_size * self.seq_len

    @property
    def checkpoint_every(self) -> int | None:
        """1 recomputes every layer, k each k-th; None recomputes nothing."""
        return checkpoint_every(self.checkpointing)

    @property
    def offloads(self) -> bool:
        """Whether what layers are recomputed from waits in the host's memory."""
        return self.checkpointing == "offload"

    @property
    def kept(self) -> float:
        """The share of layers whose activations are kept for the backward pass."""
        every = self.checkpoint_every
        return 1.0 if every is None else 1.0 - 1.0 / every

    @property
    def lora_alpha(self) -> int | None:
        """Scaling numerator: twice the rank, the common default, so that rank alone is compared; fixed for rsLoRA."""
        if self.lora_rank is None:
            return None
        return RSLORA_ALPHA if self.rslora else 2 * self.lora_rank

    @property
    def base_dtype(self) -> str:
        """Dtype of the base weights, by torch's name: full fine-tuning trains fp32 weights unless it is pure bf16."""
        if self.precision == "bf16_pure" or (self.method == "lora" and self.precision == "bf16_mixed"):
            return "bfloat16"
        if self.method == "lora" and self.precision == "fp16_mixed":
            return "float16"
        return "float32"

    @property
    def learning_rate(self) -> float:
        """A common default. It is not tuned: no probe is long enough for that."""
        return 2e-4 if self.method == "lora" else 1e-5

    @property
    def digest(self) -> str:
        return digest_of(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Every knob that has an effect, by name."""
        values = {name: getattr(self, name) for name in _KNOBS}
        if self.method == "full":
            del values["lora_rank"], values["quantization"], values["dora"], values["rslora"]
        if self.quantization != "nf4":
            del values["double_quant"]
        return values

    def label(self) -> str:
        """One short line: 'lora r16 4x1024 bf16_mixed ckpt-full adamw_torch_fused'."""
        kind = ("rs" if self.rslora else "") + ("dora" if self.dora else "lora")
        parts = [f"{kind} r{self.lora_rank}" if self.method == "lora" else "full"]
        if self.quantization != "none":
            parts.append(self.quantization + ("-double" if self.double_quant else ""))
        parts += [
            f"{self.micro_batch_size}x{self.seq_len}",
            self.precision,
            f"ckpt-{self.checkpointing}",
            self.optimizer,
        ]
        if self.compile != "none":
            parts.append("compiled")
        if self.attention != "sdpa":
            parts.append(self.attention)
        if self.kernels != "torch":
            parts.append(self.kernels)
        if self.loss != "full":
            parts.append("chunked-loss")
        if self.packing:
            parts.append("packed")
        if self.loader_workers:
            parts.append(f"loader-{self.loader_workers}")
        return " ".join(parts)


KNOBS = tuple(field.name for field in fields(TrainConfig))


def checkpoint_every(checkpointing: str) -> int | None:
    """'none' -> None, 'full' and 'offload' -> 1, 'every_3' -> 3. Raises ValueError on anything else."""
    if checkpointing == "none":
        return None
    if checkpointing in ("full", "offload"):
        return 1
    match = re.fullmatch(r"every_([2-9]|[1-9][0-9]{1,3})", checkpointing) if isinstance(checkpointing, str) else None
    if match is None:
        raise ValueError(f"checkpointing is none, full, offload or every_K with K of 2 or more, not {checkpointing!r}")
    return int(match.group(1))


def checkpoints_some(transformers: str) -> bool:
    """Whether TrainingArguments of this version of transformers can recompute some layers only, or offload."""
    major, minor, *_ = (*transformers.split("."), "", "")
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= (5, 23)


def check_value(knob: str, value: Any) -> None:
    """Raise ValueError when `value` cannot be a value of `knob`."""
    if knob not in KNOBS:
        raise ValueError(f"there is no knob {knob!r}")
    if knob == "checkpointing":
        checkpoint_every(value)
    elif knob in INTEGERS:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24:
            raise ValueError(f"{knob} is a positive integer, not {value!r}")
    elif knob in BOOLEANS:
        if not isinstance(value, bool):
            raise ValueError(f"{knob} is true or false, not {value!r}")
    elif value not in CHOICES[knob] or isinstance(value, bool):
        raise ValueError(f"{knob} is one of {', '.join(map(str, CHOICES[knob]))}, not {value!r}")


_KNOBS = tuple(field.name for field in fields(TrainConfig))


def digest_of(data: Any) -> str:
    """Twelve hex digits over the canonical JSON of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]

"""What a configuration needs in memory, by formula: from the shape of the model alone, without a GPU and without torch.

The peaks of a training step are affine in the tokens of a micro batch, with coefficients that are sums of the model's
sizes. What a layer keeps for its backward pass is in the autograd graph, where `tests/probe/test_kept_activations.py`
counts it; the head, what comes and goes, and what Inductor keeps were read off whole models on an H200
(`benchmarks/plan_memory.py`). Families and ways of computing that nobody looked at are None.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.probe_types import Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import MIB, gib
from autotune.prediction.memory_predictor import HEAD_CHUNK

CONTEXT_GIB = 0.81  # the CUDA context of a worker: 0.74 to 0.81 on an H200 with CUDA 13
WORKSPACE = 64.2 * MIB  # cuBLAS's, twice 32 MiB on Hopper; less on older cards
# Relative error of an estimated peak, about two standard deviations (`benchmarks/plan_memory.py`).
ERROR = 0.04
_BLOCK = 256  # values of 8-bit optimizer state to a scale of 4 bytes
NF4_STATISTICS = {False: 4 / 64, True: (1 + 4 / 256) / 64}  # bytes a weight, by double_quant: a scale for each 64

# Bytes that a layer keeps of a token, for each of hidden size, intermediate size, width of the queries, of the keys.
# "mixed" is fp32 adapters or master weights under autocast; a quantised base is computed like a pure one.
_Kept = dict[str, tuple[int, int, int, int]]
_LLAMA: _Kept = {
    "lora_mixed": (18, 8, 6, 4),
    "lora_pure": (12, 8, 4, 4),
    "full_mixed": (26, 8, 4, 4),
    "full_pure": (16, 8, 4, 4),
}
_QWEN3 = _LLAMA | {
    "lora_mixed": (18, 8, 10, 8),
    "lora_pure": (12, 8, 8, 8),
    "full_mixed": (26, 8, 10, 10),
    "full_pure": (16, 8, 10, 10),
}
_GEMMA2 = {
    "lora_mixed": (26, 8, 8, 0),
    "lora_pure": (20, 8, 8, 0),
    "full_mixed": (42, 8, 8, 0),
    "full_pure": (36, 8, 8, 0),
}
_PHI3 = {
    "lora_mixed": (10, 8, 10, 6),
    "lora_pure": (10, 8, 10, 6),
    "full_mixed": (14, 8, 14, 6),
    "full_pure": (12, 8, 12, 6),
}
EAGER: dict[str, _Kept] = {
    "gemma": _LLAMA | {"full_pure": (20, 8, 4, 4)},
    "gemma2": _GEMMA2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": _PHI3,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
}
# Inductor keeps the inputs of what is cheap in place of its outputs. Full fine-tuning was measured with one model only.
_COMPILED: _Kept = {
    "lora_mixed": (10, 6, 4, 4),
    "lora_pure": (8, 6, 4, 4),
    "full_mixed": (14, 6, 4, 4),
    "full_pure": (10, 6, 4, 4),
}
COMPILED: dict[str, _Kept] = dict.fromkeys(EAGER, _COMPILED) | {
    "gemma2": {way: (kept[0] + 4, *kept[1:]) for way, kept in _COMPILED.items()},
    "phi3": dict.fromkeys(_COMPILED, (10, 6, 4, 6)),
}
SCORES = {"gemma2": 8}  # bytes a token and head for each token it is held against, where the scores are there at all
SCORES_ELSEWHERE, SCORES_COMPILED = 6, 4
QWEN3_EAGER = {"lora": (12, 4), "full": (14, 6)}
_NORMS = {"gemma2": 4}  # of a layer; 2 elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model that memory follows from."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocab: int
    tied: bool
    params: int = 0

    @classmethod
    def of(cls, model: ModelSpec) -> "Sizes | None":
        """None for a family that has no formula."""
        config: dict[str, Any] = model.config
        family, heads = config["model_type"], model.size("num_attention_heads")
        intermediate = model.size("intermediate_size")
        if family not in EAGER or heads is None or intermediate is None:
            return None
        sizes = cls(
            family=family,
            layers=model.num_layers,
            hidden=model.hidden_size,
            intermediate=intermediate,
            heads=heads,
            key_heads=model.size("num_key_value_heads") or heads,
            head_dim=model.size("head_dim") or model.hidden_size // heads,
            vocab=model.vocab_size,
            tied=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
        )
        ends = sizes.embedding * (1 if sizes.tied else 2)
        return replace(sizes, params=model.params or ends + sizes.linear_params)

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.vocab * self.hidden

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """The (in, out) of each matrix of a layer."""
        hidden, inner, queries, keys = self.hidden, self.intermediate, self.queries, self.keys
        if self.family == "phi3":  # queries, keys and values in one matrix, both halves of the MLP in another
            return ((hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden))
        attention = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden))
        return (*attention, (hidden, inner), (hidden, inner), (inner, hidden))

    @property
    def linear_params(self) -> int:
        """Of all layers together."""
        return self.layers * sum(fan_in * fan_out for fan_in, fan_out in self.linears)

    def adapter_params(self, rank: int) -> int:
        """With adapters on every matrix of every layer."""
        return self.layers * rank * sum(map(sum, self.linears))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Memory by named term, in GiB, at the peak of a step; without the CUDA context.

    `activations` are what layers keep or are recomputed from, and what comes and goes with them, `logits` what the head
    makes of them, `reserved` what the allocator holds beyond what is used.
    """

    weights: float
    adapters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float
    reserved: float
    phase: Phase

    @property
    def peak_gib(self) -> float:
        """Allocated at the peak."""
        held = self.weights + self.adapters + self.gradients + self.optimizer
        return held + self.activations + self.logits + self.workspace

    @property
    def peak_reserved_gib(self) -> float:
        return self.peak_gib + self.reserved

    def terms(self) -> dict[str, float]:
        """By name, without what is nothing; they sum to `peak_reserved_gib`."""
        named = {name: getattr(self, name) for name in self.__slots__ if name != "phase"}
        return {name: value for name, value in named.items() if value}


def memory_breakdown(model: ModelSpec, config: TrainConfig, micro_steps: int = 2) -> MemoryBreakdown | None:
    """By formula; None for families, quantisations and ways that it does not know.

    With `micro_steps` of 1 no gradients wait while activations are alive.
    """
    sizes = Sizes.of(model)
    if sizes is None or config.quantization == "int8" or config.precision == "fp32" or config.dora or config.offloads:
        return None
    full, tokens = config.method == "full", config.tokens
    pure = config.precision == "bf16_pure"
    wide = 4 if full and not pure else 2  # bytes of what is not quantised
    weights = _weights(sizes, config, wide)
    trained = sizes.params if full else sizes.adapter_params(config.lora_rank or 1)
    trained_bytes = trained * (wide if full else 2 if pure else 4)
    adapters = 0.0 if full else trained_bytes
    optimizer = _state(sizes, config, trained, trained_bytes)

    keep, moving = kept_bytes(sizes, config), moving_bytes(sizes, config)
    every = config.checkpoint_every
    recomputed = 0 if every is None else math.ceil(sizes.layers / every)
    body = tokens * ((sizes.layers - recomputed) * keep + recomputed * wide * sizes.hidden)
    # Autocast keeps what it has cast: for a whole forward pass, and what is saved for the backward pass for longer.
    casts = 0.0 if pure else 2.0 * trained
    kept_casts = casts * (1 - recomputed / sizes.layers)
    if config.compile != "none":
        casts = kept_casts
    capped = 2 if sizes.family == "gemma2" else 0
    logits = (min(tokens, HEAD_CHUNK) if config.loss == "chunked" else tokens) * sizes.vocab
    norm = tokens * sizes.hidden * (6 if wide == 2 else 20)
    waiting = trained_bytes if micro_steps > 1 else 0.0
    embedding = float(wide * sizes.embedding) if full else 0.0
    moments = {  # (gradients, activations, logits)
        "forward": (waiting, body + norm + casts, logits * (10 + capped)),
        "head": (waiting, body + norm - 2 * tokens * sizes.hidden + kept_casts, logits * (12 + capped)),
        "layers": (waiting, body + tokens * ((keep if recomputed else 0) + moving) + kept_casts, 0.0),
        # The first layer comes last, beside the gradients of all others.
        "first": (trained_bytes - embedding, tokens * ((keep if recomputed else 0) + moving), 0.0),
        # The gradient of the embedding is made whole, and added to the one that waits.
        "inputs": (trained_bytes, embedding, 0.0),
        # torch's own AdamW that is not fused makes a root of the second moment.
        "optimizer": (trained_bytes, trained_bytes if config.optimizer == "adamw_torch" else 0.0, 0.0),
    }
    where, (gradients, activations, head) = max(moments.items(), key=lambda one: sum(one[1]))
    beyond = 2.4 * logits + (0.010 if config.compile == "none" else 0.034) * (activations + head) + 42 * MIB
    return MemoryBreakdown(
        weights=gib(weights),
        adapters=gib(adapters),
        gradients=gib(gradients),
        optimizer=gib(optimizer),
        activations=gib(activations),
        logits=gib(head),
        workspace=gib(WORKSPACE),
        reserved=gib(beyond),
        phase={"forward": Phase.FORWARD, "optimizer": Phase.OPTIMIZER}.get(where, Phase.BACKWARD),
    )


def _weights(sizes: Sizes, config: TrainConfig, wide: int) -> float:
    linear = sizes.linear_params
    if config.quantization == "nf4":
        return linear * (0.5 + NF4_STATISTICS[config.double_quant]) + (sizes.params - linear) * wide
    return sizes.params * wide


def _state(sizes: Sizes, config: TrainConfig, trained: int, trained_bytes: float) -> float:
    """Optimizer state. bitsandbytes keeps that of embeddings in 32 bits."""
    moments = {"adamw_8bit": 2, "paged_adamw_8bit": 2, "lion_8bit": 1}.get(config.optimizer)
    if moments is None:
        return 0.0 if config.optimizer == "adafactor" else 2 * trained_bytes
    in_32_bits = sizes.embedding if config.method == "full" else 0
    return moments * ((trained - in_32_bits) * (1 + 4 / _BLOCK) + in_32_bits * 4)


def kept_bytes(sizes: Sizes, config: TrainConfig) -> float:
    """Bytes of a token that a layer keeps for its backward pass, unless it is recomputed."""
    compiled = config.compile != "none"
    pure = config.precision == "bf16_pure" or config.quantization == "nf4"
    way = f"{config.method}_{'pure' if pure else 'mixed'}"
    table = (COMPILED if compiled or config.kernels == "liger" else EAGER)[sizes.family]
    of_hidden, of_inner, of_queries, of_keys = table[way]
    if config.kernels == "liger" and not pure:  # norms and MLPs keep what Inductor's do; adapters cast as ever
        alone = way.replace("mixed", "pure")
        eager, casting = EAGER[sizes.family][alone], EAGER[sizes.family][way]
        kept = (one + more - less for one, more, less in zip(table[alone], casting, eager, strict=True))
        of_hidden, of_inner, of_queries, of_keys = kept
    if config.attention == "eager":  # it repeats keys and values, and keeps the scores
        other = {"gemma2": (of_queries, of_keys), "phi3": (of_queries, 0), "qwen3": QWEN3_EAGER[config.method]}
        of_queries, of_keys = other.get(sizes.family, (8, 0))
    keep = of_hidden * sizes.hidden + of_inner * sizes.intermediate
    keep += of_queries * sizes.queries + of_keys * sizes.keys + 4 * _NORMS.get(sizes.family, 2)
    if config.attention == "eager":
        scores = SCORES_COMPILED if compiled else SCORES.get(sizes.family, SCORES_ELSEWHERE)
        keep += scores * sizes.heads * config.seq_len
    else:
        keep += 4 * sizes.heads
        if config.packing and config.attention.startswith("sdpa"):
            # What keeps examples apart is a mask, with which keys and values are repeated for each query head.
            # Phi 3 keeps less of them in turn: they are parts of one matrix product.
            keep += 2 * config.seq_len + (0 if sizes.family == "phi3" else 4 * (sizes.queries - sizes.keys))
    if sizes.family == "qwen3":  # it normalises queries and keys of each head
        keep += 4 * (sizes.heads + sizes.key_heads)
    if config.method == "lora":
        keep += 2 * (config.lora_rank or 1) * len(sizes.linears)
    return keep


def moving_bytes(sizes: Sizes, config: TrainConfig) -> float:
    """Bytes of a token that come and go in the backward pass of a layer."""
    if config.compile != "none":
        return 8 * sizes.intermediate + 6 * sizes.hidden
    pure = config.precision == "bf16_pure" or config.quantization == "nf4"
    return (4 if pure else 8) * sizes.intermediate + 3 * sizes.hidden

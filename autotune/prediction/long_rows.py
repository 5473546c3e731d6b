"""A formula for the memory of training on one long row, for machines that cannot run a dry probe.

The formula assumes that layers are computed in tiles of tokens, that the loss is computed in
chunks, and that the inputs of recomputed layers are offloaded to the host's memory
(docs/longest.md). A dry probe runs a training step without a GPU and computes its memory. The
factors below were fitted to the memory that dry probes computed. The dry probes ran 37 rows of
8,192 to 158,720 tokens, with 11 models. The formula's results differ from the dry probes' results
by at most 2.7 %, and in the median by 0.06 % (`tests/unit/prediction/test_long_rows.py`).
"""

from dataclasses import replace

from autotune.catalog import ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.probe_types import Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB, gib
from autotune.prediction.memory_formula import (
    MemoryBreakdown,
    allocator_overhead_gib,
    live_logits,
    memory_breakdown,
    moving_bytes,
    with_tiles,
)

FAMILIES = {
    "lora": frozenset({"llama", "mistral", "phi3", "qwen2", "qwen3"}),
    "full": frozenset({"llama", "mistral", "qwen2", "qwen3"}),
}
# This number is also in `trainer.tiles`, which cannot be imported here because it needs torch
TILE_TOKENS = 4096
# The knobs that the formula covers only with these values
NEEDED = {
    "attention": "sdpa",
    "checkpointing": "offload",
    "compile": "none",
    "kernels": "torch",
    "lora_dropout": 0.0,
    "lora_kernels": "peft",
    "loss": "chunked",
    "packing": False,
    "precision": "bf16_mixed",
    "tiling": "tokens",
}
LOGIT_BYTES = 12.0  # for each logit of a chunk while the loss is computed
# At the peak of full fine-tuning, 0.26 to 0.52 GiB are allocated in addition to the tensors of the
# row.
FULL_BYTES = 0.5 * GIB


def long_row_breakdown(model: ModelSpec, config: TrainConfig) -> MemoryBreakdown | None:
    """Return the memory at the peak of a step with one row, or None if no formula covers it."""
    sizes = Sizes.of(model)
    if sizes is None or sizes.family not in FAMILIES[config.method] or config.has_mask:
        return None
    if any(getattr(config, knob) != value for knob, value in NEEDED.items()):
        return None
    static = memory_breakdown(model, replace(config, checkpointing="full", tiling="none"), 1)
    if static is None:
        return None

    logits = live_logits(config, sizes.vocab)
    if config.method == "full":
        gradients = static.weights  # both in 32 bits
        layer = config.tokens * _full_token_bytes(sizes) + FULL_BYTES
        head = 0.0
    else:
        gradients = static.adapters  # both in 32 bits
        layer = _adapted_layer_bytes(sizes, config)
        head = config.tokens * (8 * sizes.hidden + _row_bytes(sizes)) + LOGIT_BYTES * logits

    # The head runs before the first gradient exists.
    in_head = gib(head) > gradients + gib(layer)
    activations = gib(head if in_head else layer)
    memory = replace(
        static,
        activations=activations,
        logits=0.0,
        gradients=0.0 if in_head else gradients,
        reserved=allocator_overhead_gib(config, logits, activations, activations),
        phase=Phase.FORWARD if in_head else Phase.BACKWARD,
    )
    return with_tiles(memory, config)


def _row_bytes(sizes: Sizes) -> int:
    """Return the bytes of a token's id, its label, and the cosine and sine of its position."""
    return 16 + 4 * sizes.head_dim


def _adapted_layer_bytes(sizes: Sizes, config: TrainConfig) -> float:
    """Return the bytes at the peak of a layer's backward pass, in the attention or in the MLP."""
    # During attention, the layer's input, the normalised input and a gradient exist. Queries, keys,
    # values and the attention's output each exist with their gradients. The row sums of flash
    # attention and the gradients of queries have 32 bits. The gradients of keys and values are
    # repeated for each query head.
    attention = 6 * sizes.hidden + 16 * sizes.queries + 8 * sizes.keys + 8 * sizes.heads
    if sizes.family == "qwen3":  # Qwen3 normalises queries and keys
        attention += max(2 * (sizes.queries + sizes.keys), 8 * sizes.keys)

    # A tile of the MLP holds the outputs of the gate and of the up projection, the activation, and
    # the product of activation and up projection.
    mlp = 14 * sizes.hidden + 4 * (sizes.queries + sizes.keys)
    tile = TILE_TOKENS * (8 * sizes.intermediate + moving_bytes(sizes, config))

    row = _row_bytes(sizes)
    return max(config.tokens * (attention + row), config.tokens * (mlp + row) + tile)


def _full_token_bytes(sizes: Sizes) -> int:
    """Return the bytes for each token in full fine-tuning, where hidden states have 32 bits."""
    attention = 12 * sizes.hidden + 18 * sizes.queries + 4 * sizes.keys + 4 * sizes.heads
    if sizes.family == "qwen3":
        attention += sizes.queries + sizes.keys
    return attention + 16 + 8 * sizes.head_dim

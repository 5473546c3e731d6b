"""Necessary floating point operations of a training step, the numerator of model FLOPs utilisation (MFU).

After PaLM, appendix B: what the mathematics of the step needs, so nothing that checkpointing computes again. Left
out are LoRA's own matrices (0.9 % of the step at rank 16 on all linear layers of a 7B); norms and biases, far less, are
counted as if they were matrices.
"""

from typing import Any

# A multiply-add is 2 FLOPs. A parameter costs 2 forward, 2 for its input's gradient and 2 for its own; a
# frozen one has no third part.
FLOPS_PER_PARAMETER = {"lora": 4, "full": 6}

# The families whose matrix products are known, by whether their head is tied to the embedding by default.
_TIED = ("gemma", "gemma2", "gpt2")
_UNTIED = ("gpt_neox", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")


def flops_per_token(config: dict[str, Any], params: int, method: str, seq_len: int) -> float | None:
    """FLOPs a token of a training step at `seq_len`; None for a family that is not known here.

    Causal attention: a token meets c others on average; each costs 2 FLOPs a head dimension in QK^T and 2 in PV. The
    backward pass costs twice the forward, under LoRA too, whose adapters below need the gradients of q, k and v. That
    is 12 c heads head_dim a layer; over the causal half of the square c = seq_len / 2, so 6 seq_len heads head_dim.
    """
    if config.get("model_type") not in _TIED + _UNTIED:
        return None
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    head_dim = config.get("head_dim") or hidden // heads
    context = sum(_mean_context(seq_len, window) for window in _windows(config))
    return float(FLOPS_PER_PARAMETER[method] * _multiplied(config, params) + 12 * context * heads * head_dim)


def _multiplied(config: dict[str, Any], params: int) -> int:
    """Parameters that a token is multiplied by. An embedding is looked up; tied to the head, it is multiplied there."""
    family = config["model_type"]
    if not config.get("tie_word_embeddings", family in _TIED):
        params -= config["vocab_size"] * config["hidden_size"]
    if family == "gpt2":
        params -= config["n_positions"] * config["n_embd"]
    if family == "mixtral":
        params -= _idle(config, config["num_hidden_layers"], "num_local_experts", "intermediate_size")
    if family == "qwen3_moe":
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        layers = [i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]
        params -= _idle(config, len(layers), "num_experts", "moe_intermediate_size")
    return params


def _idle(config: dict[str, Any], layers: int, experts: str, width: str) -> int:
    """Parameters of the experts a token does not visit; an expert is three matrices."""
    idle = config[experts] - config["num_experts_per_tok"]
    return int(layers * idle * 3 * config["hidden_size"] * config[width])


def _mean_context(seq_len: int, window: int | None) -> float:
    """Tokens that a token attends to, on average over a sequence: half of it, or less with a window."""
    reach = seq_len if window is None else min(window, seq_len)
    return reach * (1 - reach / (2 * seq_len))


def _windows(config: dict[str, Any]) -> list[int | None]:
    """The sliding window of each layer, None for full attention; the rules are those of the transformers configs."""
    family = config["model_type"]
    layers = range(config.get("num_hidden_layers") or config["n_layer"])
    window = config.get("sliding_window", 4096 if family == "gemma2" else None)
    if window is None or not config.get("use_sliding_window", not family.startswith("qwen")):
        return [None for _ in layers]
    if "layer_types" in config:
        return [window if config["layer_types"][i] == "sliding_attention" else None for i in layers]
    if family == "gemma2":  # every other layer, the first one included
        return [window if i % 2 == 0 else None for i in layers]
    if family.startswith("qwen"):
        return [window if i >= config.get("max_window_layers", 28) else None for i in layers]
    return [window for _ in layers]

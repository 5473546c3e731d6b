"""The parts of torchtune 0.6.1 for a model: the builder of its family with the sizes, tokenizer and checkpoint.

`obstacle` says why no builder makes a model; nothing is guessed.
"""

from typing import Any

from autotune.study.summary import Recipe

# Families by model type and vocabulary: torchtune has a tokenizer for each, and none that reads tokenizer.json.
FAMILIES = {
    ("llama", 32000): "llama2",
    ("llama", 128256): "llama3",
    ("mistral", 32000): "mistral",
    ("mistral", 32768): "mistral",
    ("gemma", 256000): "gemma",
    ("phi3", 32064): "phi3",
    ("phi3", 100352): "phi4",
    ("qwen2", 151936): "qwen2",
    ("qwen2", 152064): "qwen2",
}
# Its logits from the weights of a small Gemma 2 are not those of transformers; those of the other families are.
WRONG = {"gemma2": "its Gemma 2 exchanges the norms around the MLP, and caps hidden states instead of logits"}
_SENTENCEPIECE = {"path": "tokenizer.model"}
_TIKTOKEN = {"path": "original/tokenizer.model"}
_MERGES = {"path": "vocab.json", "merges_file": "merges.txt"}
TOKENIZERS: dict[str, tuple[str, dict[str, str]]] = {
    "llama2": ("llama2.llama2_tokenizer", _SENTENCEPIECE),
    "llama3": ("llama3.llama3_tokenizer", _TIKTOKEN),
    "llama3_1": ("llama3.llama3_tokenizer", _TIKTOKEN),
    "llama3_2": ("llama3.llama3_tokenizer", _TIKTOKEN),
    "mistral": ("mistral.mistral_tokenizer", _SENTENCEPIECE),
    "gemma": ("gemma.gemma_tokenizer", _SENTENCEPIECE),
    "phi3": ("phi3.phi3_mini_tokenizer", _SENTENCEPIECE),
    "phi4": ("phi4.phi4_tokenizer", {"vocab_path": "vocab.json", "merges_path": "merges.txt"}),
    "qwen2": ("qwen2.qwen2_tokenizer", _MERGES),
    "qwen2_5": ("qwen2_5.qwen2_5_tokenizer", _MERGES),
}
BUILDERS = {"phi4": "phi3", "qwen2_5": "qwen2"}  # where a family has no builder that takes sizes
CHECKPOINTS = {"llama3_1": "LLAMA3", "phi3": "PHI3_MINI", "qwen2_5": "QWEN2"}  # else the family's own name
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def obstacle(recipe: Recipe) -> str:
    """Why torchtune cannot make this model; "" where it can."""
    model, shape = recipe.model, recipe.model.config
    family = FAMILIES.get((shape["model_type"], model.vocab_size))
    if family is None:
        unknown = f"no builder for model_type {shape['model_type']} with a vocabulary of {model.vocab_size:,}"
        return WRONG.get(shape["model_type"], unknown)
    if None in _sizes(recipe).values() or "rms_norm_eps" not in shape:
        return "its config leaves out sizes"
    own_heads = shape.get("head_dim") not in (None, model.hidden_size // (model.size("num_attention_heads") or 1))
    odd = {
        "heads of a size of their own": own_heads and family != "gemma",
        "another activation": shape.get("hidden_act", "silu") != "silu" and family != "gemma",
        "biases": bool(shape.get("attention_bias") or shape.get("mlp_bias")),
        "rotary positions of its own": not _turns(family, _rope(shape)),
        "embeddings tied, or not, as here": not _ties(family, shape),
    }
    if oddities := ", ".join(name for name, is_so in odd.items() if is_so):
        return f"no builder for {oddities}"
    return ""


def leaves_out_window(recipe: Recipe) -> bool:
    """Whether the model looks back over less than a row, which no builder does."""
    shape = recipe.model.config
    window = recipe.model.size("sliding_window") if shape.get("use_sliding_window", True) else None
    return window is not None and window < recipe.config.seq_len


def family_of(recipe: Recipe) -> str | None:
    """The package of torchtune's models, None where none has this model."""
    if obstacle(recipe):
        return None
    shape = recipe.model.config
    family = FAMILIES[shape["model_type"], recipe.model.vocab_size]
    if family == "llama3" and _scaled(_rope(shape)):
        return "llama3_2" if shape.get("tie_word_embeddings") else "llama3_1"
    if family == "qwen2" and "2.5" in recipe.model.name:  # its tokenizer has more special tokens
        return "qwen2_5"
    return family


def builder(recipe: Recipe) -> dict[str, Any]:
    """The component that makes the model and its sizes, without those of adapters; {} where there is none."""
    shape, family = recipe.model.config, family_of(recipe)
    if family is None:
        return {}
    name, rope = BUILDERS.get(family, family), _rope(shape)
    prefix = "lora_" if recipe.config.method == "lora" else ""
    values = {"_component_": f"torchtune.models.{name}.{prefix}{name}", **_sizes(recipe)}
    values["norm_eps"] = shape["rms_norm_eps"]
    if name != "llama2":  # its builder of adapters has no such argument
        values["rope_base"] = rope["rope_theta"]
    if name in ("llama3_1", "llama3_2"):
        values["scale_factor"] = rope["factor"]
    if name == "qwen2":
        values["tie_word_embeddings"] = bool(shape.get("tie_word_embeddings"))
    if name == "gemma":
        values["head_dim"] = shape.get("head_dim", 256)
    return values


def tokenizer(recipe: Recipe, directory: str) -> dict[str, Any]:
    """The component that reads the tokenizer's files in `directory`; {} where there is none."""
    family = family_of(recipe)
    if family is None:
        return {}
    component, files = TOKENIZERS[family]
    paths = {argument: f"{directory}/{file}" for argument, file in files.items()}
    return {"_component_": f"torchtune.models.{component}", **paths}


def checkpoint(recipe: Recipe) -> dict[str, str]:
    """The model type by which the checkpointer reads the weights; {} where there is no builder."""
    family = family_of(recipe)
    return {} if family is None else {"model_type": CHECKPOINTS.get(family, family.upper())}


def _sizes(recipe: Recipe) -> dict[str, int | None]:
    """The builder's sizes. `max_seq_len` is the length of rows: each layer holds a table of so many positions."""
    model = recipe.model
    heads = model.size("num_attention_heads")
    return {
        "vocab_size": model.vocab_size,
        "num_layers": model.num_layers,
        "num_heads": heads,
        "num_kv_heads": model.size("num_key_value_heads") or heads,
        "embed_dim": model.hidden_size,
        "intermediate_dim": model.size("intermediate_size"),
        "max_seq_len": recipe.config.seq_len,
    }


def _rope(shape: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, in the spelling of transformers 5 or the one before."""
    rope: dict[str, Any] = {"rope_theta": shape.get("rope_theta", 10_000.0)}
    return rope | (shape.get("rope_scaling") or {}) | (shape.get("rope_parameters") or {})


def _scaled(rope: dict[str, Any]) -> bool:
    return bool(rope.get("rope_type", rope.get("type", "default")) != "default")


def _turns(family: str, rope: dict[str, Any]) -> bool:
    """Whether the family's builder has these rotary positions."""
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or (family == "llama2" and rope["rope_theta"] != 10_000.0):
        return False
    return not _scaled(rope) or (family == "llama3" and "factor" in rope and rope.items() >= LLAMA3_ROPE.items())


def _ties(family: str, shape: dict[str, Any]) -> bool:
    """Whether the family's builder ties the LM head to the embedding, or not, as this model does."""
    if shape.get("tie_word_embeddings", family == "gemma"):
        return family in ("gemma", "qwen2") or (family == "llama3" and _scaled(_rope(shape)))
    return family != "gemma"

"""torchtune.yaml: what `tune run` takes (torchtune's recipes for one GPU), with the components for the model.

`torchtune.yaml` next to this file has the families that torchtune has a builder for. `obstacle` says why no builder
makes a model; nothing is guessed.
"""

from typing import Any

from autotune.core.files import load_data
from autotune.export import keys, tool_file
from autotune.study.summary import Recipe


def export(recipe: Recipe) -> dict[str, str]:
    """`torchtune.yaml`, with the commands to run it in its head."""
    reason = obstacle(recipe)
    family = {} if reason else _families()[_family_of(recipe)]
    # Where the weights are to be. OmegaConf would fill in what stands in ${...}: such a path is not written.
    weights = recipe.model.weights
    directory = weights if weights and "${" not in weights else "model"
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": directory,
        "checkpoint_files": ["model.safetensors"],
        "output_dir": "out",
    }
    model, tokenizer = {}, {}
    if family:
        model = _model(recipe, family["builder"])
        paths = {argument: f"{directory}/{file}" for argument, file in family["files"].items()}
        tokenizer = {"_component_": f"torchtune.models.{family['tokenizer']}", **paths}
        checkpointer["model_type"] = family["checkpoint"]
    sections = {
        "model": {"model": model | keys.write("torchtune", "adapters", recipe)},
        "tokenizer": {"tokenizer": tokenizer | keys.write("torchtune", "tokenizer", recipe)},
        "checkpointer": {"checkpointer": checkpointer},
        "adapters": {},
    }
    settings = {"has_builder": not reason, "obstacle": reason, "looks_back_less": _looks_back_less(recipe)}
    return tool_file.export(recipe, "torchtune", sections=sections, settings=settings)


def obstacle(recipe: Recipe) -> str:
    """Why torchtune cannot make this model; "" where it can."""
    model, shape = recipe.model, recipe.model.config
    family = _family_by_vocabulary(recipe)
    if family is None:
        unknown = f"no builder for model_type {shape['model_type']} with a vocabulary of {model.vocab_size:,}"
        return str(load_data("autotune.export", "torchtune")["wrong"].get(shape["model_type"], unknown))
    if None in _sizes(recipe).values() or "rms_norm_eps" not in shape:
        return "its config leaves out sizes"
    own_heads = shape.get("head_dim") not in (None, model.hidden_size // (model.size("num_attention_heads") or 1))
    odd = {
        "heads of a size of their own": own_heads and family != "gemma",
        "another activation": shape.get("hidden_act", "silu") != "silu" and family != "gemma",
        "biases": bool(shape.get("attention_bias") or shape.get("mlp_bias")),
        "rotary positions of its own": not _has_rope(family, _rope(shape)),
        "embeddings tied, or not, as here": not _has_ties(family, shape),
    }
    if oddities := ", ".join(name for name, is_so in odd.items() if is_so):
        return f"no builder for {oddities}"
    return ""


def _families() -> dict[str, dict[str, Any]]:
    families: dict[str, dict[str, Any]] = load_data("autotune.export", "torchtune")["families"]
    return families


def _family_by_vocabulary(recipe: Recipe) -> str | None:
    """The first family of this model type and vocabulary, None if there is none."""
    size, model_type = recipe.model.vocab_size, recipe.model.config["model_type"]
    names = (name for name, row in _families().items() if size in row.get("vocabularies", {}).get(model_type, ()))
    return next(names, None)


def _family_of(recipe: Recipe) -> str:
    """The family of a model that has no obstacle."""
    shape = recipe.model.config
    family = _family_by_vocabulary(recipe)
    assert family is not None
    if family == "llama3" and _is_scaled(_rope(shape)):
        return "llama3_2" if shape.get("tie_word_embeddings") else "llama3_1"
    if family == "qwen2" and "2.5" in recipe.model.name:  # its tokenizer has more special tokens
        return "qwen2_5"
    return family


def _looks_back_less(recipe: Recipe) -> bool:
    """Whether the model looks back over less than a row, which no builder does."""
    shape = recipe.model.config
    window = recipe.model.size("sliding_window") if shape.get("use_sliding_window", True) else None
    return window is not None and window < recipe.config.seq_len


def _model(recipe: Recipe, builder: str) -> dict[str, Any]:
    """The component that makes the model and its sizes, without those of adapters."""
    shape, rope = recipe.model.config, _rope(recipe.model.config)
    prefix = "lora_" if recipe.config.method == "lora" else ""
    values = {"_component_": f"torchtune.models.{builder}.{prefix}{builder}", **_sizes(recipe)}
    values["norm_eps"] = shape["rms_norm_eps"]
    if builder != "llama2":  # its builder of adapters has no such argument
        values["rope_base"] = rope["rope_theta"]
    if builder in ("llama3_1", "llama3_2"):
        values["scale_factor"] = rope["factor"]
    if builder == "qwen2":
        values["tie_word_embeddings"] = bool(shape.get("tie_word_embeddings"))
    if builder == "gemma":
        values["head_dim"] = shape.get("head_dim", 256)
    return values


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


def _is_scaled(rope: dict[str, Any]) -> bool:
    return bool(rope.get("rope_type", rope.get("type", "default")) != "default")


def _has_rope(family: str, rope: dict[str, Any]) -> bool:
    """Whether the family's builder has these rotary positions."""
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or (family == "llama2" and rope["rope_theta"] != 10_000.0):
        return False
    if not _is_scaled(rope):
        return True
    scaled = load_data("autotune.export", "torchtune")["llama3_rope"]
    return bool(family == "llama3" and "factor" in rope and rope.items() >= scaled.items())


def _has_ties(family: str, shape: dict[str, Any]) -> bool:
    """Whether the family's builder ties the LM head to the embedding, or not, as this model does."""
    if shape.get("tie_word_embeddings", family == "gemma"):
        return family in ("gemma", "qwen2") or (family == "llama3" and _is_scaled(_rope(shape)))
    return family != "gemma"

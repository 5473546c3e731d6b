"""Writes two files in autotune/catalog/data about the model types of transformers.

`default_sizes.yaml` has the sizes that transformers assumes for each type, and `attentions.yaml`
the types that lack an attention implementation. Run it after an update of transformers:
python -m tests.helpers.refresh_model_types
"""

from pathlib import Path

import transformers
import yaml
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

DATA = Path(__file__).parents[2] / "autotune/catalog/data"
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
SIZES_HEAD = """\
# For each model type: the sizes that apply if a config.json leaves them out. They come from the
# text part of transformers' default config. tests/helpers/refresh_model_types.py writes this file.
"""
ATTENTIONS_HEAD = """\
# For each attention implementation: the model types that transformers cannot build with it.
# tests/helpers/refresh_model_types.py writes this file.
"""
# FlashAttention 2 lacks the attention sinks of gpt-oss; only other versions support them.
NO_SINKS = {"gpt_oss"}


def model_types() -> list[str]:
    """Return the types of causal language models and of models of text and images or sound."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def default_sizes() -> dict[str, dict[str, int]]:
    """Return the known sizes of the text part of each type of model, by their keys in a config."""
    found: dict[str, dict[str, int]] = {}
    for name in model_types():
        try:
            text = CONFIG_MAPPING[name]().get_text_config(decoder=True)
        except Exception:  # the default config of a few types is invalid
            continue
        sizes = {key: getattr(text, key, None) for key in SIZES}
        found[name] = {key: size for key, size in sizes.items() if isinstance(size, int)}
        found.setdefault(text.model_type, found[name])
    return dict(sorted(found.items()))


def lacking_attentions() -> dict[str, list[str]]:
    """Return the types that lack an attention implementation, by the implementation's name."""
    sdpa: list[str] = []
    flash: list[str] = []
    flex: list[str] = []
    for name in model_types():
        config = CONFIG_MAPPING[name]
        built = MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None)
        built = built or MODEL_FOR_MULTIMODAL_LM_MAPPING.get(config, None)
        if isinstance(built, tuple):
            built = built[0]
        if built is None:  # transformers lists the type, but not its class
            continue
        if not built._supports_sdpa:
            sdpa.append(name)
        if not built._supports_flash_attn or name in NO_SINKS:
            flash.append(name)
        if not built._supports_flex_attn:
            flex.append(name)
    return {"sdpa": sdpa, "flash_attention_2": flash, "flex_attention": flex}


def main() -> None:
    """Write both files."""
    source = f"source: transformers {transformers.__version__}\n"
    text = SIZES_HEAD + source + "sizes:\n"
    for name, sizes in default_sizes().items():
        row = yaml.safe_dump(sizes, default_flow_style=True, width=200, sort_keys=False)
        text += f"  {name}: {row}"
    (DATA / "default_sizes.yaml").write_text(text, encoding="utf-8")

    lacking = yaml.safe_dump({"lacking": lacking_attentions()}, width=100, sort_keys=False)
    (DATA / "attentions.yaml").write_text(ATTENTIONS_HEAD + source + lacking, encoding="utf-8")


if __name__ == "__main__":
    main()

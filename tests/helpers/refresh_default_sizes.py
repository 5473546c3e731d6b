"""Writes autotune/catalog/data/default_sizes.yaml: the sizes that transformers assumes for each
type.

Run it after an update of transformers: python -m tests.helpers.refresh_default_sizes
"""

from pathlib import Path

import transformers
import yaml
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

FILE = Path(__file__).parents[2] / "autotune/catalog/data/default_sizes.yaml"
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
HEAD = """\
# For each model type: the sizes that apply if a config.json leaves them out. They come from the
# text part of transformers' default config. The program tests/helpers/refresh_default_sizes.py
# writes this file.
"""


def default_sizes() -> dict[str, dict[str, int]]:
    """Return the known sizes of the text part of each type of model, by their keys in a config."""
    found: dict[str, dict[str, int]] = {}
    for name in sorted(
        {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    ):
        try:
            text = CONFIG_MAPPING[name]().get_text_config(decoder=True)
        except Exception:  # the default config of a few types is invalid
            continue
        sizes = {key: getattr(text, key, None) for key in SIZES}
        found[name] = {key: size for key, size in sizes.items() if isinstance(size, int)}
        found.setdefault(text.model_type, found[name])
    return dict(sorted(found.items()))


def main() -> None:
    """Write the file."""
    text = HEAD + f"source: transformers {transformers.__version__}\nsizes:\n"
    for name, sizes in default_sizes().items():
        row = yaml.safe_dump(sizes, default_flow_style=True, width=200, sort_keys=False)
        text += f"  {name}: {row}"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes autotune/catalog/data/fast_kernels.yaml: the packages with fast kernels, by type of model.

Run it after an update of transformers: python -m tests.helpers.refresh_fast_kernels
"""

import importlib
import inspect
import re
from pathlib import Path

import transformers
import yaml
from transformers import CONFIG_MAPPING
from transformers.integrations.hub_kernels import _PACKAGE_TO_DISTRIBUTION
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

FILE = Path(__file__).parents[2] / "autotune/catalog/data/fast_kernels.yaml"
HEAD = """\
# For each type of text model: the packages with fast kernels that transformers' code for the model
# imports, by import name. tests/helpers/refresh_fast_kernels.py writes this file.
"""
NAMED = re.compile(r'@use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"')


def imports() -> dict[str, list[str]]:
    """Return the packages that the code of each text model imports for its kernels."""
    found = {}
    for name in sorted(
        {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    ):
        try:
            text = CONFIG_MAPPING[name]().get_text_config(decoder=True)
        except Exception:  # the default config of a few types is invalid
            continue
        module = type(text).__module__.replace("configuration_", "modeling_")
        try:
            source = inspect.getsource(importlib.import_module(module))
        except ImportError:  # of a package that is not installed, such as timm
            continue
        if packages := sorted(set(NAMED.findall(source))):
            found[name] = found[text.model_type] = packages
    return dict(sorted(found.items()))


def main() -> None:
    """Write the file."""
    found = imports()
    used = sorted({package for packages in found.values() for package in packages})
    names = {
        package: _PACKAGE_TO_DISTRIBUTION.get(package, package).replace("_", "-")
        for package in used
    }
    text = HEAD + f"source: transformers {transformers.__version__}\n"
    text += yaml.safe_dump({"distributions": names}, sort_keys=False) + "imports:\n"
    for name, packages in found.items():
        text += f"  {name}: [{', '.join(packages)}]\n"
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The packages that layers other than attention need for their fast kernels.

Without its packages, transformers computes a gated delta net, a short convolution or a state space
with operations of torch, which are much slower and hold more memory.
"""

from typing import Any

from autotune.core.files import load_data

# Values of a config's `layer_types` for layers that need no package with fast kernels.
_USUAL_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"} | {
    "mlp",
    "moe",
}


def kernel_packages(config: dict[str, Any], text_type: str) -> dict[str, str]:
    """Return the packages with fast kernels for a model's layers.

    A key is the name in an import, and its value is the package's name on PyPI.
    """
    data = load_data("autotune.catalog", "data/fast_kernels")
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("layer_types")
    if isinstance(layers, list) and _USUAL_LAYERS.issuperset(map(str, layers)):
        return {}
    return {name: data["distributions"][name] for name in data["imports"].get(text_type, ())}

"""Lists the packages that layers other than attention need for their fast kernels.

Such layers are gated delta nets, short convolutions and state-space layers. Without these packages,
transformers computes these layers with torch operations, which are much slower and take more
memory.
"""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from autotune.catalog.devices import DeviceSpec
from autotune.core.files import load_data

# Values of a config's `layer_types` for layers that need no package with fast kernels.
_USUAL_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"} | {
    "mlp",
    "moe",
}

# A dry probe computes a training step on torch's meta device, without a GPU. There, it imitates the
# kernels of these packages (`dry/fast_kernels`).
_COUNTED = ("fla",)

# These versions of Triton compile gated delta nets wrongly for Hopper GPUs, so
# flash-linear-attention 0.6 refuses to train with them unless tilelang is installed.
_WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))  # from the first, up to before the second
TILELANG = "tilelang"


def kernel_packages(config: dict[str, Any], text_type: str) -> dict[str, str]:
    """Return the packages with fast kernels for a model's layers.

    Each key is the name in an import statement, and its value the package's name on PyPI.
    """
    data = load_data("autotune.catalog", "data/fast_kernels")
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("layer_types")
    if isinstance(layers, list) and _USUAL_LAYERS.issuperset(map(str, layers)):
        return {}
    return {name: data["distributions"][name] for name in data["imports"].get(text_type, ())}


def is_installed(package: str) -> bool:
    """Whether Python can import the package. A folder of this name without code does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def lacks_tilelang(device: DeviceSpec) -> bool:
    """Whether flash-linear-attention would refuse this GPU with this machine's packages."""
    from importlib.metadata import PackageNotFoundError, version

    if not (device.compute_capability or "").startswith("9.") or is_installed(TILELANG):
        return False
    try:
        triton = tuple(map(int, re.findall(r"\d+", version("triton"))[:3]))
    except PackageNotFoundError:
        return False
    first, mended = _WRONG_ON_HOPPER
    return first <= triton < mended


def counted_packages(packages: Iterable[str] = _COUNTED) -> tuple[str, ...]:
    """Return the installed packages whose kernels dry probes imitate on the meta device.

    Dry probes count a layer that needs any other package as if the package were missing: with the
    torch operations that transformers then uses.
    """
    return tuple(name for name in packages if name in _COUNTED and is_installed(name))

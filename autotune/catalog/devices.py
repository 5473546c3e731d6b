"""DeviceSpec: what a GPU product can do by its data sheet, and which product a name means.

`core.nvml` reads the state of the cards of this machine; this module only matches their names.
"""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

from autotune.catalog.own_devices import EXAMPLE, is_own, own_row
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import load_data
from autotune.core.machine import multiplies_bf16

# For cards whose total in nvidia-smi is unknown. The known totals, of cards whose ECC takes no memory, are 0.995 to 1.0
# of the marketed GB taken as GiB (H100 0.9956, H200 0.9957, A100 1.0).
GIB_PER_MARKETED_GB = 0.99

# The share of nvidia-smi's total that a process can use: 0.996 on an H200, 0.97 to 0.98 on a T4, an L4 and an A10.
USABLE = 0.98

# How far the memory of a product may differ from what was read: torch sees 3 % less than nvidia-smi (14.6 of a T4's
# 15.0).
MEMORY_TOLERANCE = 0.1

_VENDOR_WORDS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One product. Rates are dense peaks in TFLOP/s with fp32 accumulation; None is not known, or not in hardware.

    `link_gb_s` is what collectives reach between the cards of one host. `given` is what `--gpu` said of a card of the
    user's own, None for one of the catalogue.
    """

    name: str
    vendor: str
    arch: str = "unknown"
    compute_capability: str | None
    memory_gib: float | None = None
    memory_source: str | None = None
    bandwidth_gb_s: float | None = None
    link_gb_s: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    fp32_tflops: float | None = None
    tdp_w: float | None = None
    nvml_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    source: str
    as_of: str | None = None
    given: str | None = None

    @property
    def label(self) -> str:
        """The name as it is shown: it says of a card of the user's own that it is one."""
        return self.name if self.given is None else f"{self.name} (as you described it)"

    @property
    def option(self) -> str:
        """What `--gpu` takes for this card."""
        return self.given or self.name

    @property
    def kind(self) -> str:
        """`cpu`, or `cuda` for every GPU (torch's ROCm build says cuda too)."""
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def usable_gib(self) -> float | None:
        """The memory for tensors, CUDA context and reserve together; None if unknown."""
        return None if self.memory_gib is None else self.memory_gib * USABLE

    @property
    def has_rates(self) -> bool:
        """Whether its peak and its bandwidth are known, without which no speed is estimated."""
        return bool((self.bf16_tflops or self.fp16_tflops) and self.bandwidth_gb_s)

    @property
    def supports_bf16(self) -> bool:
        """Multiplies bf16 at speed: NVIDIA from compute capability 8.0 on; a CPU is the one of this machine."""
        if self.kind == "cpu":
            return multiplies_bf16()
        return self.bf16_tflops is not None or self._at_least(8, 0)

    @property
    def has_flash(self) -> bool:
        """Has fast kernels of torch's own attention: NVIDIA from compute capability 8.0 on, as bf16; a CPU its own."""
        return self.kind == "cpu" or self.supports_bf16

    @property
    def usual_precision(self) -> str:
        """What a training on it computes in where nothing else is asked for."""
        if self.supports_bf16:
            return "bf16_mixed"
        return "fp32" if self.kind == "cpu" else "fp16_mixed"

    @property
    def supports_fp8(self) -> bool:
        """Multiplies 8-bit floats: NVIDIA from compute capability 8.9 on."""
        return self.kind != "cpu" and (self.fp8_tflops is not None or self._at_least(8, 9))

    def has_memory(self, memory_gib: float | None) -> bool:
        """Whether the product may have this memory; true where either is unknown."""
        if memory_gib is None or self.memory_gib is None:
            return True
        return abs(memory_gib - self.memory_gib) <= MEMORY_TOLERANCE * self.memory_gib

    def _at_least(self, *wanted: int) -> bool:
        """NVIDIA's compute capability; False where it is not known."""
        major, _, minor = (self.compute_capability or "").partition(".")
        return major.isdigit() and (int(major), int(minor or 0)) >= wanted


@functools.cache
def list_devices() -> tuple[DeviceSpec, ...]:
    """Every product of the catalogue."""
    return tuple(_device(row) for row in load_data("autotune.catalog", "data/gpus"))


def resolve_device(name: str) -> DeviceSpec:
    """The product that a user's `name` means: catalogue name, alias or NVML name, in any case, with - or _ or space.

    A file of YAML, or keys with values (`memory=24,...`), is a card of the user's own; see `own_devices`. Raises
    UsageError for an unknown name, and for a card that is not described as it must be.
    """
    if not is_own(name):
        return catalogued_device(name)
    device = replace(_device(own_row(name)), given=name.strip())
    if (
        known := _by_name().get(_normal(device.name))
    ) is not None:  # whose prices and measurements it would get
        raise UsageError(
            f"--gpu {device.given}: the catalogue has a card named {device.name}",
            remedy=f"give yours another name, such as my-{device.name}, or take that one: --gpu {known.name}",
        )
    return device


def catalogued_device(name: str) -> DeviceSpec:
    """The product of the catalogue that a name means. Raises UsageError for an unknown one."""
    known = _by_name()
    found = known.get(_normal(name))
    if found is None:
        raise UsageError(
            f"unknown gpu {name!r}{did_you_mean(_normal(name), known)}",
            remedy=f"autotune gpus lists them; for any other: --gpu {EXAMPLE}, or a file of YAML with these keys",
        )
    return found


def match_device(nvml_name: str, memory_gib: float | None = None) -> DeviceSpec | None:
    """The product that NVML or the driver calls `nvml_name`; None when it is not catalogued or could be several.

    Every word of the name must be accounted for, so that an A10G, a MIG slice, a laptop or a SUPER variant is never
    taken for the card whose name it contains. `memory_gib` decides between sizes of one product: the driver calls an
    RTX 3060 with 8 GB as it calls one with 12 GB.
    """
    for device in list_devices():
        if nvml_name.casefold() in (
            known.casefold() for known in device.nvml_names
        ) and device.has_memory(memory_gib):
            return device
    words, size = _words(nvml_name)
    found = [
        device
        for device in list_devices()
        if device.kind == "cuda"
        and _same_product(device, words, size)
        and device.has_memory(memory_gib)
    ]
    return found[0] if len(found) == 1 else None


@functools.cache
def _by_name() -> dict[str, DeviceSpec]:
    return {
        _normal(name): device
        for device in list_devices()
        for name in (device.name, *device.aliases, *device.nvml_names)
    }


def _normal(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def _words(name: str) -> tuple[frozenset[str], str | None]:
    """'NVIDIA A100-SXM4-40GB' -> ({'a100', 'sxm'}, '40gb'): the words of a name without vendor, and the size in it."""
    words = {re.sub(r"^sxm\d$", "sxm", word) for word in _normal(name).split("-")} - _VENDOR_WORDS
    sizes = sorted(word for word in words if re.fullmatch(r"\d+gb", word))
    return frozenset(words.difference(sizes)), sizes[0] if sizes else None


def _same_product(device: DeviceSpec, words: frozenset[str], size: str | None) -> bool:
    for name in (device.name, *device.nvml_names):
        known_words, known_size = _words(name)
        if words == known_words and (size is None or known_size is None or size == known_size):
            return True
    return False


def _device(row: dict[str, Any]) -> DeviceSpec:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
    }
    mib, marketed = values.pop("memory_mib", None), values.pop("marketed_gb", None)
    if mib is not None:
        values = (
            {"memory_source": "total of nvidia-smi, recalled"} | values | {"memory_gib": mib / 1024}
        )
    elif marketed is not None:
        values["memory_gib"] = marketed * GIB_PER_MARKETED_GB
        values["memory_source"] = f"estimate: {GIB_PER_MARKETED_GB} of the marketed GB"
    return DeviceSpec(**values)

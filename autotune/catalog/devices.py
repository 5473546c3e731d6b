"""Defines DeviceSpec, the data sheet of a GPU product, and finds a product by its name.

`core.nvml` reads the state of this machine's cards; this module only matches their names.
"""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

from autotune.catalog.links import NO_LINK, link_rate
from autotune.catalog.not_gpus import refuse_other_names
from autotune.catalog.own_devices import EXAMPLE, is_own, own_row
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import load_data
from autotune.core.machine import multiplies_bf16
from autotune.core.text import split_count

# The memory in GiB that nvidia-smi shows, divided by the GB in the product's name. This ratio is
# assumed for cards whose total in nvidia-smi is unknown. Known ratios are 0.995 to 1.0 (H100
# 0.9956, H200 0.9957, A100 1.0). On these three cards, ECC takes no memory.
GIB_PER_MARKETED_GB = 0.99

# The share of nvidia-smi's total that a process can use: 0.996 on an H200, 0.97 to 0.98 on a T4, an
# L4 and an A10.
USABLE = 0.98

# The same share if the GPU has no memory of its own, but shares the host's memory with the system
# and the process. Users of a DGX Spark report that 0.85 to 0.87 are safe, and 0.9 is not.
USABLE_OF_UNIFIED = 0.85

# The measured memory of a card may differ from the product's by at most this share. For example,
# torch reports 3 % less than nvidia-smi (14.6 instead of 15.0 GiB on a T4).
MEMORY_TOLERANCE = 0.1

_VENDOR_WORDS = frozenset({"nvidia", "tesla", "geforce", "amd", "instinct"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A GPU product or a CPU. Rates are dense peaks in TFLOP/s with fp32 accumulation.

    A rate is None if it is unknown or if the hardware lacks the number format. `link` names the
    interconnect between the cards of one host (`links`), and `link_gb_s` is the bandwidth of NCCL's
    collectives over all links of a card. If each pair of cards has links of its own, `pair_gb_s` is
    the bandwidth of a pair. With `link_by_rule`, these bandwidths were computed from `link`, not
    measured. With `unified_memory`, the GPU and its host share one memory, so memory of the host is
    also memory of the GPU. `given` is the value of `--gpu` if the user described the card, or None
    for a card of the catalogue.
    """

    name: str
    vendor: str
    arch: str = "unknown"
    compute_capability: str | None
    memory_gib: float | None = None
    memory_source: str | None = None
    unified_memory: bool = False
    bandwidth_gb_s: float | None = None
    link: str | None = None
    link_gb_s: float | None = None
    pair_gb_s: float | None = None
    link_by_rule: bool = False
    link_source: str | None = None
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
        """The displayed name, with a remark if the user described the card with `--gpu`."""
        return self.name if self.given is None else f"{self.name} (as you described it)"

    @property
    def option(self) -> str:
        """The value of `--gpu` for this card."""
        return self.given or self.name

    @property
    def kind(self) -> str:
        """`cpu`, or `cuda` for every GPU (torch's build for ROCm also calls its device cuda)."""
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def usable_gib(self) -> float | None:
        """The GiB that tensors, CUDA context and headroom share, or None for unknown memory."""
        if self.memory_gib is None:
            return None
        return self.memory_gib * (USABLE_OF_UNIFIED if self.unified_memory else USABLE)

    @property
    def has_rates(self) -> bool:
        """Whether peak FLOP/s and memory bandwidth are known; a speed estimate needs both."""
        return bool((self.bf16_tflops or self.fp16_tflops) and self.bandwidth_gb_s)

    @property
    def supports_bf16(self) -> bool:
        """Whether the device multiplies bf16 fast: NVIDIA cards do from compute capability 8.0 on.

        For the device `cpu`, the answer is for this machine's CPU.
        """
        if self.kind == "cpu":
            return multiplies_bf16()
        return self.bf16_tflops is not None or self._at_least(8, 0)

    @property
    def has_flash(self) -> bool:
        """Whether torch's built-in attention (SDPA) has fast kernels for the device.

        NVIDIA cards that multiply bf16 fast have these kernels, and CPUs have other fast kernels.
        """
        return self.kind == "cpu" or self.supports_bf16

    @property
    def usual_precision(self) -> str:
        """The default precision of training on this device."""
        if self.supports_bf16:
            return "bf16_mixed"
        return "fp32" if self.kind == "cpu" else "fp16_mixed"

    @property
    def supports_fp8(self) -> bool:
        """Whether the device multiplies 8-bit floats (NVIDIA: from compute capability 8.9 on)."""
        return self.kind != "cpu" and (self.fp8_tflops is not None or self._at_least(8, 9))

    @property
    def is_alone(self) -> bool:
        """Whether a host has only one such device."""
        return self.link == NO_LINK

    @property
    def link_text(self) -> str | None:
        """The bandwidth of the link and its evidence in words, or None if it is unknown."""
        if self.link_gb_s is None:
            return None
        text = f"{self.link_gb_s:,.4g} GB/s"
        if self.pair_gb_s is not None:
            text = f"{self.pair_gb_s:,.4g} GB/s between two GPUs, and at most {text}"
        if self.link:
            text += f" over {self.link}"
        return f"about {text}, from the data sheet, not measured" if self.link_by_rule else text

    def link_between(self, num_gpus: int) -> float | None:
        """Return the bandwidth of collectives between `num_gpus` cards of one host.

        If each pair has links of its own, fewer cards can use only some links of a card.
        """
        if self.link_gb_s is None or self.pair_gb_s is None:
            return self.link_gb_s
        return min(self.link_gb_s, (num_gpus - 1) * self.pair_gb_s)

    def has_memory(self, memory_gib: float | None) -> bool:
        """Return whether `memory_gib` is about the product's memory; true if either is unknown."""
        if memory_gib is None or self.memory_gib is None:
            return True
        return abs(memory_gib - self.memory_gib) <= MEMORY_TOLERANCE * self.memory_gib

    def _at_least(self, *wanted: int) -> bool:
        """Return whether the compute capability is at least `wanted`; false if it is unknown."""
        major, _, minor = (self.compute_capability or "").partition(".")
        return major.isdigit() and (int(major), int(minor or 0)) >= wanted


@functools.cache
def list_devices() -> tuple[DeviceSpec, ...]:
    """Return every product of the catalogue."""
    return tuple(_device(row) for row in load_data("autotune.catalog", "data/gpus"))


def resolve_device(name: str) -> DeviceSpec:
    """Return the product for a user's `name`, in any spelling that `catalogued_device` knows.

    A YAML file or keys with values (`memory=24,...`) describe a user's own card; see
    `own_devices`. Raises UsageError for an unknown name or a wrong description.
    """
    if not is_own(name):
        return catalogued_device(name)

    device = replace(_device(own_row(name)), given=name.strip())
    # If a described card had the name of a catalogued card, it would get that card's prices and
    # measurements.
    if (known := _devices_by_name().get(_normalize(device.name))) is not None:
        raise UsageError(
            f"--gpu {device.given}: the catalogue has a GPU named {device.name}",
            remedy=f"give your GPU another name, such as my-{device.name},"
            f" or use the catalogue's GPU: --gpu {known.name}",
        )
    return device


def catalogued_device(name: str) -> DeviceSpec:
    """Return the catalogue's product with this catalogue name, alias or NVML name.

    Case is ignored. Dashes, underscores, spaces and the vendor may be left out, and the memory size
    may be added: rtx4090, NVIDIA H100, A100 80GB, rtx-4090-24gb. Raises UsageError for an unknown
    name.
    """
    device = named_device(name) or _respelled_device(name)
    if device is None:
        refuse_other_names(name)
        count, one = split_count(name)
        if count is not None:
            raise UsageError(
                f"--gpu {name}: this command is for one GPU", remedy=f"name the GPU: --gpu {one}"
            )
        known = _devices_by_name()
        raise UsageError(
            f"unknown gpu {name!r}{did_you_mean(_normalize(name), known)}",
            remedy="`autotune gpus` lists the known ones; describe any other GPU:"
            f" --gpu {EXAMPLE}, or a YAML file with these keys",
        )
    return device


def named_device(name: str) -> DeviceSpec | None:
    """Return the product with exactly this name, alias or NVML name, or None.

    Case is ignored, and dashes, underscores and spaces count as the same character.
    """
    return _devices_by_name().get(_normalize(name))


def _respelled_device(name: str) -> DeviceSpec | None:
    """Return the product whose name differs from this name only in spelling, or None."""
    known = _devices_by_spelling()
    if (device := known.get(_spelling(name))) is not None:
        return device

    sized = re.fullmatch(r"(.+?)[\s_-]*\b([0-9]{1,3})\s*(?:g|gb|gib)?", name.strip().lower())
    if sized is None:
        return None
    if (device := known.get(_spelling(f"{sized[1]}-{sized[2]}gb"))) is not None:
        return device
    device = known.get(_spelling(sized[1]))
    return device if device and device.has_memory(float(sized[2])) else None


def match_device(nvml_name: str, memory_gib: float | None = None) -> DeviceSpec | None:
    """Return the product that NVML or the driver calls `nvml_name`.

    The result is None if the product is not in the catalogue or the name is ambiguous. Every word
    of the name must match. The names of an A10G, a MIG slice, a laptop or a SUPER variant contain
    the name of another card, but never match that card. `memory_gib` selects the product with this
    amount of memory, because the driver gives the RTX 3060 the same name with 8 GB and with 12 GB.
    """
    for device in list_devices():
        names = (known.casefold() for known in device.nvml_names)
        if nvml_name.casefold() in names and device.has_memory(memory_gib):
            return device

    words, size = _words(nvml_name)
    matches = [
        device
        for device in list_devices()
        if device.kind == "cuda"
        and _same_product(device, words, size)
        and device.has_memory(memory_gib)
    ]
    return matches[0] if len(matches) == 1 else None


@functools.cache
def _devices_by_name() -> dict[str, DeviceSpec]:
    return {
        _normalize(name): device
        for device in list_devices()
        for name in (device.name, *device.aliases, *device.nvml_names)
    }


@functools.cache
def _devices_by_spelling() -> dict[str, DeviceSpec]:
    return {_spelling(name): device for name, device in _devices_by_name().items()}


def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def _spelling(name: str) -> str:
    """Return the name without the vendor, and without dashes except those between two digits.

    'NVIDIA GeForce RTX 4090' -> 'rtx4090', 'a100-80gb' -> 'a100-80gb'.
    """
    words = (word for word in _normalize(name).split("-") if word not in _VENDOR_WORDS)
    return re.sub(r"(?<![0-9])-|-(?![0-9])", "", "-".join(words))


def _words(name: str) -> tuple[frozenset[str], str | None]:
    """Return the words of a name without the vendor, and the memory size in the name.

    'NVIDIA A100-SXM4-40GB' -> ({'a100', 'sxm'}, '40gb').
    """
    parts = _normalize(name).split("-")
    words = {re.sub(r"^sxm\d$", "sxm", word) for word in parts} - _VENDOR_WORDS
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
    mib = values.pop("memory_mib", None)
    marketed = values.pop("marketed_gb", None)

    if mib is not None:
        values = (
            {"memory_source": "total of nvidia-smi, not checked"}
            | values
            | {"memory_gib": mib / 1024}
        )
    elif marketed is not None:
        values["memory_gib"] = marketed * GIB_PER_MARKETED_GB
        values["memory_source"] = (
            f"estimate: {GIB_PER_MARKETED_GB} GiB for each GB on the data sheet"
        )

    link = values.get("link")
    if link is not None and (rate := link_rate(link)) is not None:
        values["pair_gb_s"] = rate.pair_gb_s
        if values.get("link_gb_s") is None:
            values |= {"link_gb_s": rate.gb_s, "link_by_rule": True}
    return DeviceSpec(**values)

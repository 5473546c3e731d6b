"""The catalogue of devices: every name means one product, and similar names do not mix."""

import subprocess
import sys
from dataclasses import replace

import pytest

from autotune.catalog import DeviceSpec, list_devices, match_device, resolve_device
from autotune.catalog.devices import _device
from autotune.core.errors import UsageError


def test_light_import():
    code = "import sys, autotune.catalog, autotune.cli.commands.catalogs as c; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "pandas", "pydantic", "rich", "huggingface_hub"} & set(loaded)


def test_every_device_name_means_one_device():
    names = [name for device in list_devices() for name in (device.name, *device.aliases, *device.nvml_names)]
    assert len({name.lower().replace(" ", "-") for name in names}) == len(names)
    for device in list_devices():
        for name in (device.name, device.name.upper().replace("-", "_"), *device.aliases, *device.nvml_names):
            assert resolve_device(name) is device
        for name in device.nvml_names:
            assert match_device(name) is device
            assert match_device(name.upper(), device.memory_gib) is device


@pytest.mark.parametrize(
    ("alias", "name"),
    [("h100", "h100-sxm"), ("H200", "h200-sxm"), ("a100_80GB", "a100-80gb-sxm"), ("a100-40gb", "a100-40gb-sxm"),
     ("4090", "rtx-4090"), ("v100", "v100-sxm2-16gb"), (" NVIDIA H200 ", "h200-sxm"), ("cpu", "cpu")],
)  # fmt: skip
def test_aliases(alias, name):
    assert resolve_device(alias).name == name


def test_unknown_device_suggests_a_near_name():
    with pytest.raises(UsageError, match=r"unknown gpu 'a10x'; did you mean .*'a10'") as caught:
        resolve_device("a10x")
    assert caught.value.remedy == "autotune gpus lists them"
    with pytest.raises(UsageError, match=r"unknown gpu 'zzzzzz'$"):
        resolve_device("zzzzzz")


@pytest.mark.parametrize(
    ("nvml_name", "memory_gib", "name"),
    [
        ("NVIDIA A10", 22.5, "a10"),
        ("NVIDIA A10G", 22.5, "a10g"),
        ("NVIDIA A100-SXM4-40GB", None, "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb-sxm"),
        ("A100-SXM-80GB", None, "a100-80gb-sxm"),  # older drivers print no vendor
        ("GeForce RTX 3090", None, "rtx-3090"),
        ("NVIDIA A100-SXM4", 39.6, "a100-40gb-sxm"),
        ("NVIDIA A100-SXM4", 79.2, "a100-80gb-sxm"),
        ("Tesla V100-SXM2", 31.7, "v100-sxm2-32gb"),
        ("AMD Instinct MI300X", 192.0, "mi300x"),
        ("NVIDIA A100-SXM4", None, None),  # two sizes
        ("NVIDIA A100", 80.0, None),  # form unknown
        ("NVIDIA A100-SXM4-64GB", 63.4, None),  # a custom part
        ("NVIDIA H100", None, None),
        ("NVIDIA H20", None, None),
        ("NVIDIA A10-24Q", 24.0, None),  # a vGPU
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, None),
        ("NVIDIA GeForce RTX 4090 D", 24.0, None),
        ("NVIDIA GeForce RTX 4080 SUPER", 16.0, None),
        ("cpu", None, None),
        ("", None, None),
    ],
)
def test_match_device(nvml_name, memory_gib, name):
    found = match_device(nvml_name, memory_gib)
    assert (found and found.name) == name


def test_device_facts():
    h200, t4, cpu = resolve_device("h200"), resolve_device("t4"), resolve_device("cpu")
    assert h200.memory_gib == pytest.approx(140.4, abs=0.01)
    assert "estimate" in (resolve_device("b200").memory_source or "")
    assert (h200.kind, cpu.kind) == ("cuda", "cpu")
    assert (h200.supports_bf16, t4.supports_bf16, cpu.supports_bf16) == (True, False, True)
    assert cpu.memory_gib is None and cpu.bf16_tflops is None
    for device in list_devices():
        if device.compute_capability:
            assert device.supports_bf16 == (float(device.compute_capability) >= 8.0)
        assert device.source and (device.as_of is None or isinstance(device.as_of, str))


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8"),
    [
        ("7.5", 0, 0),
        ("8.0", 1, 0),
        ("8.6", 1, 0),
        ("8.9", 1, 1),
        ("9.0", 1, 1),
        ("12.0", 1, 1),
        ("8", 1, 0),
        (None, 0, 0),
        ("", 0, 0),
        ("gfx942", 0, 0),
    ],
)
def test_number_formats_by_compute_capability(capability, bf16, fp8):
    card = DeviceSpec(name="x", vendor="nvidia", compute_capability=capability, source="made up")
    assert (card.supports_bf16, card.supports_fp8) == (bf16, fp8)
    rated = replace(card, compute_capability=None, bf16_tflops=1.0, fp8_tflops=1.0)  # by the data sheet, of any vendor
    assert rated.supports_bf16 and rated.supports_fp8
    assert not replace(rated, name="cpu").supports_fp8


def test_a_memory_within_a_tenth_is_that_of_the_product():
    card = DeviceSpec(name="x", vendor="nvidia", compute_capability=None, memory_gib=100.0, source="made up")
    sizes = {None: True, 89.9: False, 90.1: True, 110.0: True, 110.1: False}
    assert {size: card.has_memory(size) for size in sizes} == sizes
    assert replace(card, memory_gib=None).has_memory(1.0)
    assert card.usable_gib == pytest.approx(98.0) and replace(card, memory_gib=None).usable_gib is None


def test_memory_that_is_only_marketed_is_one_percent_less_in_gib():
    b200 = resolve_device("b200")
    assert b200.memory_gib == pytest.approx(180 * 0.99) and "0.99" in (b200.memory_source or "")


ROW = {"name": "x", "vendor": "nvidia", "compute_capability": None, "source": "made up"}


@pytest.mark.parametrize(
    ("sizes", "memory_gib", "source"),
    [
        ({}, None, None),
        ({"memory_mib": 2560}, 2.5, "total of nvidia-smi, recalled"),
        ({"memory_mib": 2560, "memory_source": "read"}, 2.5, "read"),
        ({"marketed_gb": 50}, 49.5, "estimate: 0.99 of the marketed GB"),
        ({"memory_mib": 1024, "marketed_gb": 50}, 1.0, "total of nvidia-smi, recalled"),
    ],
    ids=str,
)
def test_the_memory_of_a_row(sizes, memory_gib, source):
    made = _device(ROW | sizes | {"aliases": ["y", "z"]})
    assert (made.memory_gib, made.memory_source, made.aliases) == (memory_gib, source, ("y", "z"))

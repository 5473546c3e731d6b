"""The catalogue of devices: every name means one product, and similar names do not mix."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from autotune.catalog import DeviceSpec, list_devices, match_device, resolve_device
from autotune.catalog.devices import _device, _devices_by_name, _spelling
from autotune.core.errors import UsageError


def test_light_import():
    code = "import sys, autotune.catalog, autotune.cli.commands.catalogs as c; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {
        "torch",
        "transformers",
        "numpy",
        "pandas",
        "pydantic",
        "rich",
        "huggingface_hub",
    } & set(loaded)


def test_every_device_name_means_one_device():
    names = [
        name
        for device in list_devices()
        for name in (device.name, *device.aliases, *device.nvml_names)
    ]
    assert len({name.lower().replace(" ", "-") for name in names}) == len(names)
    for device in list_devices():
        for name in (
            device.name,
            device.name.upper().replace("-", "_"),
            *device.aliases,
            *device.nvml_names,
        ):
            assert resolve_device(name) is device
        for name in device.nvml_names:
            assert match_device(name) is device
            assert match_device(name.upper(), device.memory_gib) is device


@pytest.mark.parametrize(
    ("alias", "name"),
    [("h100", "h100-sxm"), ("H200", "h200-sxm"), ("a100_80GB", "a100-80gb-sxm"), ("a100-40gb",
     "a100-40gb-sxm"),
     ("4090", "rtx-4090"), ("RTX 3080", "rtx-3080-10gb"),
     ("rtx-3060", "rtx-3060-12gb"), ("b300", "b300-sxm"),
     ("dgx-spark", "gb10"), ("rtx-pro-4500", "rtx-pro-4500-blackwell"),
     ("rtx-pro-5000", "rtx-pro-5000-blackwell"), ("amd-mi355x", "mi355x"),
     ("v100", "v100-sxm2-16gb"), (" NVIDIA H200 ", "h200-sxm"), ("cpu", "cpu")],
)  # fmt: skip
def test_aliases(alias, name):
    assert resolve_device(alias).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("rtx4090", "rtx-4090"), ("RTX-4090", "rtx-4090"), ("GeForce RTX 4090 24GB", "rtx-4090"),
     ("rtx3090ti", "rtx-3090-ti"), ("RTXA6000", "rtx-a6000"), ("A100 80GB", "a100-80gb-sxm"),
     ("a100-40", "a100-40gb-sxm"), ("V100 32G", "v100-sxm2-32gb"), ("NVIDIA H100", "h100-sxm"),
     ("h100sxm", "h100-sxm"), ("H100 PCIe 80GB", "h100-pcie"), ("l40s 48gb", "l40s"),
     ("DGX Spark", "gb10"), ("nvidia gb10 128gb", "gb10"), ("AMD Instinct MI325X", "mi325x"),
     ("MI355X 288GB", "mi355x"), ("RTX PRO 4500", "rtx-pro-4500-blackwell"),
     ("rtxpro5000", "rtx-pro-5000-blackwell"), ("gb300 279gb", "gb300"),
     ("4060ti 16gb", "rtx-4060-ti-16gb"), ("rtx 6000ada", "rtx-6000-ada")],
)  # fmt: skip
def test_common_spellings(spelling, name):
    assert resolve_device(spelling).name == name


@pytest.mark.parametrize(
    "name", ["l40", "a10x", "h100-96gb", "rtx-3060-8gb", "rtx 4060 ti", "24gb", "nvidia-24gb", "-"]
)
def test_another_product_is_no_spelling(name):
    with pytest.raises(UsageError, match="unknown gpu"):
        resolve_device(name)


def test_every_spelling_means_one_device():
    spellings = {}
    for name, device in _devices_by_name().items():
        assert spellings.setdefault(_spelling(name), device) is device, name
        assert resolve_device(name.replace("-", " ").upper()) is device


@pytest.mark.parametrize(
    ("instance", "gpu", "count"),
    [("g4dn.xlarge", "t4", 1), ("g5.xlarge", "a10g", 1), ("ml.g5.12xlarge", "a10g", 4),
     ("g6.48xlarge", "l4", 8), ("g6e.2xlarge", "l40s", 1), ("p3.8xlarge", "v100-16gb", 4),
     ("p3dn.24xlarge", "v100-32gb", 8), ("p4d.24xlarge", "a100-40gb", 8), ("P4d", "a100-40gb", 1),
     ("p4de.24xlarge", "a100-80gb", 8), ("p5.48xlarge", "h100", 8), ("p5e.48xlarge", "h200", 8),
     ("p5en.48xlarge", "h200", 8), ("a2-highgpu-1g", "a100-40gb", 1),
     ("a2-ultragpu-4g", "a100-80gb", 4), ("a3-highgpu-8g", "h100", 8), ("g2-standard-4", "l4", 1),
     ("g2-standard-24", "l4", 2), ("Standard_NC24ads_A100_v4", "a100-80gb-pcie", 1),
     ("NC96ads_A100_v4", "a100-80gb-pcie", 4), ("NC40ads_H100_v5", "h100-nvl", 1),
     ("Standard_NC80adis_H100_v5", "h100-nvl", 2), ("ND96isr_H100_v5", "h100", 8)],
)  # fmt: skip
def test_a_cloud_instance_leads_to_its_gpu(instance, gpu, count):
    with pytest.raises(UsageError, match="is a cloud instance") as caught:
        resolve_device(instance)
    flags = f"--gpu {gpu}" + (f" --gpus {count}" if count > 1 else "")
    assert caught.value.remedy == (f"name its GPU: {flags}; `autotune compare` takes --gpus {gpu}")
    product = re.search(r"(?:GPU is the|of the type) (\S+)", str(caught.value))
    assert product and resolve_device(gpu).name.startswith(product[1].lower())


@pytest.mark.parametrize("name", ["mps", "MPS", "m2", "M3 Max", "Apple M1 Pro", "apple"])
def test_an_apple_gpu_leads_to_what_works(name):
    with pytest.raises(UsageError, match="Apple GPUs are not supported") as caught:
        resolve_device(name)
    assert "--gpu cpu --model demo-3m" in caught.value.remedy


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "GPU", "nvidia"])
def test_any_gpu_leads_to_this_machines(name):
    with pytest.raises(UsageError, match="is not the name of a GPU product") as caught:
        resolve_device(name)
    assert "--gpu auto" in caught.value.remedy


def test_a_count_is_refused_where_one_gpu_is_needed():
    with pytest.raises(UsageError, match="--gpu 2xh100: this command is for one GPU") as caught:
        resolve_device("2xh100")
    assert caught.value.remedy == "name the GPU: --gpu h100"


def test_a_name_that_was_cut_short_is_completed():
    with pytest.raises(UsageError, match="did you mean 'rtx-4060-ti-16gb' or 'rtx-4060-ti-8gb'"):
        resolve_device("rtx 4060 ti")


def test_unknown_device_suggests_a_near_name():
    with pytest.raises(UsageError, match=r"unknown gpu 'a10x'; did you mean .*'a10'") as caught:
        resolve_device("a10x")
    assert caught.value.remedy and caught.value.remedy.startswith(
        "`autotune gpus` lists the known ones; describe any other GPU: --gpu mem"
    )
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
        ("NVIDIA H20", None, "h20"),
        ("NVIDIA H20", 139.8, None),  # the version with 141 GB
        ("NVIDIA H20-3e", 139.8, None),
        ("NVIDIA GeForce RTX 3060", 12.0, "rtx-3060-12gb"),
        # the driver's name is that of the version with 12 GB
        ("NVIDIA GeForce RTX 3060", 8.0, None),
        ("NVIDIA GeForce RTX 3080", 10.0, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12.0, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3080", None, None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16.0, "rtx-3080-laptop-16gb"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 8.0, None),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16.0, None),
        ("NVIDIA GeForce RTX 4060 Ti", 16.0, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8.0, "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 5060 Ti", 15.9, "rtx-5060-ti-16gb"),
        ("NVIDIA RTX A5000", 24.0, "rtx-a5000"),
        ("NVIDIA RTX A5000 Laptop GPU", 16.0, None),
        ("NVIDIA RTX 5000 Ada Generation", 32.0, "rtx-5000-ada"),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", 16.0, None),
        ("NVIDIA A2", 15.0, "a2"),
        ("NVIDIA A2-2Q", 2.0, None),
        ("NVIDIA L20", 45.0, "l20"),
        ("NVIDIA B300 SXM6 AC", 268.6, "b300-sxm"),
        ("NVIDIA GB300", 277.5, "gb300"),
        ("NVIDIA GB10", 121.6, "gb10"),
        ("NVIDIA RTX PRO 4500 Blackwell", 31.8, "rtx-pro-4500-blackwell"),
        ("NVIDIA RTX PRO 4500 Blackwell Server Edition", 31.8, None),  # of 165 W
        ("NVIDIA RTX PRO 5000 Blackwell", 47.8, "rtx-pro-5000-blackwell"),
        ("NVIDIA RTX PRO 5000 Blackwell", 71.6, None),  # the version with 72 GB
        ("AMD Instinct MI325X", 256.0, "mi325x"),
        ("AMD Instinct MI355X", 288.0, "mi355x"),
        ("NVIDIA A10-24Q", 24.0, None),  # a vGPU
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4090 D", 24.0, None),
        ("NVIDIA GeForce RTX 4080 SUPER", 16.0, "rtx-4080-super"),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", 12.0, None),
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
    assert (h200.supports_bf16, t4.supports_bf16) == (True, False)
    assert (h200.usual_precision, t4.usual_precision) == ("bf16_mixed", "fp16_mixed")
    assert cpu.memory_gib is None and cpu.bf16_tflops is None
    for device in list_devices():
        if device.compute_capability:
            assert device.supports_bf16 == (float(device.compute_capability) >= 8.0)
        assert device.source and (device.as_of is None or isinstance(device.as_of, str))


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16_mixed"), (False, "fp32")])
def test_the_processor_of_this_machine_decides_what_a_cpu_trains_in(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, precision: str
) -> None:
    monkeypatch.setattr("autotune.catalog.devices.multiplies_bf16", lambda: bf16)
    cpu = resolve_device("cpu")
    assert (cpu.supports_bf16, cpu.usual_precision) == (bf16, precision)


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
    # by the data sheet, of any vendor
    rated = replace(card, compute_capability=None, bf16_tflops=1.0, fp8_tflops=1.0)
    assert rated.supports_bf16 and rated.supports_fp8
    assert not replace(rated, name="cpu").supports_fp8


def test_a_memory_within_a_tenth_is_that_of_the_product():
    card = DeviceSpec(
        name="x", vendor="nvidia", compute_capability=None, memory_gib=100.0, source="made up"
    )
    sizes = {None: True, 89.9: False, 90.1: True, 110.0: True, 110.1: False}
    assert {size: card.has_memory(size) for size in sizes} == sizes
    assert replace(card, memory_gib=None).has_memory(1.0)
    assert (
        card.usable_gib == pytest.approx(98.0) and replace(card, memory_gib=None).usable_gib is None
    )


def test_a_gpu_that_shares_its_hosts_memory_leaves_more_of_it_to_others():
    card = DeviceSpec(
        name="x", vendor="nvidia", compute_capability=None, memory_gib=100.0, source="made up"
    )
    shared = replace(card, unified_memory=True)
    assert (card.usable_gib, shared.usable_gib) == (pytest.approx(98.0), pytest.approx(85.0))
    assert [device.name for device in list_devices() if device.unified_memory] == ["gb10"]
    described = resolve_device("memory=128,bf16_tflops=119,unified_memory=true")
    assert described.unified_memory and not resolve_device("memory=24,bf16_tflops=9").unified_memory


def test_a_size_that_nobody_named_is_not_chosen():
    for name in ("rtx-4060-ti", "rtx-5060-ti"):
        with pytest.raises(UsageError, match=rf"did you mean .*'{name}-(8|16)gb'"):
            resolve_device(name)


# SMs, boost clock in GHz, and what an SM multiplies in a clock: 512 FLOP of a GeForce, whose
# accumulation in fp32 is half as fast, 1024 of other cards with the same SM, 2048 of GA100.
CLOCKS = {
    "rtx-3090": (82, 1.695, 512),
    "rtx-3080-12gb": (70, 1.710, 512),
    "rtx-4090": (128, 2.520, 512),
    "rtx-4070-ti-super": (66, 2.610, 512),
    "rtx-5080": (84, 2.617, 512),
    "rtx-a5000": (64, 1.695, 1024),
    "rtx-4500-ada": (60, 2.580, 1024),
    "rtx-pro-4500-blackwell": (82, 2.617, 1024),
    "rtx-pro-5000-blackwell": (110, 2.377, 1024),
    "gb10": (48, 2.418, 1024),
    "mi355x": (256, 2.4, 4096),
    "a30": (56, 1.440, 2048),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_dense_peaks_by_arithmetic(name):
    card, (sms, ghz, flop) = resolve_device(name), CLOCKS[name]
    assert card.bf16_tflops == pytest.approx(sms * ghz * flop / 1000, rel=0.005) == card.fp16_tflops
    if card.arch != "ampere":
        assert card.fp8_tflops == pytest.approx(2 * card.bf16_tflops, rel=0.005)


def test_peaks_are_neither_sparse_nor_of_another_unit():
    """The rates of a card are in proportion: no row has one with sparsity, or of fp4, among the
    others.
    """
    for card in list_devices():
        if card.bf16_tflops is None or card.vendor != "nvidia":
            continue
        assert card.fp16_tflops == card.bf16_tflops
        if card.fp8_tflops is not None:
            assert 1.9 < card.fp8_tflops / card.bf16_tflops < 2.1
        if "GeForce" in "".join(card.nvml_names) and card.fp32_tflops:
            assert 1.9 < card.bf16_tflops / card.fp32_tflops < 2.1


def test_memory_that_is_only_marketed_is_one_percent_less_in_gib():
    b200 = resolve_device("b200")
    assert b200.memory_gib == pytest.approx(180 * 0.99) and "0.99" in (b200.memory_source or "")


ROW = {"name": "x", "vendor": "nvidia", "compute_capability": None, "source": "made up"}


@pytest.mark.parametrize(
    ("sizes", "memory_gib", "source"),
    [
        ({}, None, None),
        ({"memory_mib": 2560}, 2.5, "total of nvidia-smi, not checked"),
        ({"memory_mib": 2560, "memory_source": "read"}, 2.5, "read"),
        ({"marketed_gb": 50}, 49.5, "estimate: 0.99 GiB for each GB on the data sheet"),
        ({"memory_mib": 1024, "marketed_gb": 50}, 1.0, "total of nvidia-smi, not checked"),
    ],
    ids=str,
)
def test_the_memory_of_a_row(sizes, memory_gib, source):
    made = _device(ROW | sizes | {"aliases": ["y", "z"]})
    assert (made.memory_gib, made.memory_source, made.aliases) == (memory_gib, source, ("y", "z"))

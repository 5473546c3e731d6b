"""The links between the GPUs of a host: each GPU has one with its source, and a rule turns a link
into the bandwidth of collectives.
"""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.catalog import DeviceSpec, list_devices, resolve_device
from autotune.catalog.links import LANE_GB_S, LinkRate, link_rate
from autotune.core.errors import UsageError

GPUS = [device for device in list_devices() if device.kind != "cpu"]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_every_gpu_has_a_link_with_its_source(device: DeviceSpec) -> None:
    assert device.link and device.link_source
    is_computer = "laptop" in device.name or device.unified_memory
    assert device.is_alone == (device.link_gb_s is None) == is_computer


def test_unknown_links_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    catalogue = importlib.import_module("catalogue")
    assert [device.name for device in list_devices() if catalogue.has_unknown_link(device)] == []
    card = resolve_device("a10")
    for missing in ({"link": None}, {"link_source": None}, {"link_gb_s": None}):
        assert catalogue.has_unknown_link(replace(card, **missing))
    assert catalogue.summary([])["links_unknown"] == 0


@pytest.mark.parametrize(
    ("link", "gb_s", "pair_gb_s"),
    [
        ("PCIe 3.0 x16", 11, None),
        ("PCIe 4.0 x8", 11, None),
        ("PCIe 4.0 x16", 22, None),
        ("PCIe 5.0 x16", 43, None),
        ("PCIe 4.0 x8 (no peer access)", 7, None),
        ("PCIe 4.0 x16 (no peer access)", 15, None),
        ("PCIe 5.0 x16 (no peer access)", 30, None),
        ("NVLink 2 x6 (2 per pair)", 120, 40),
        ("NVLink 4 x18", 371, None),
        ("NVLink 5 x18", 722, None),
        ("Infinity Fabric x7 (1 per pair)", 336, 48),
        ("Infinity Fabric 4 x7 (1 per pair)", 403, 58),
    ],
)
def test_the_rule(link: str, gb_s: float, pair_gb_s: float | None) -> None:
    assert link_rate(link) == LinkRate(gb_s=gb_s, pair_gb_s=pair_gb_s)
    assert link_rate("none") is None


@pytest.mark.parametrize(
    "link", ["", "None", "PCIe 4.0", "PCIe 4.0 x0", "PCIe 9.0 x16", "NVLink 4 x18 (2)", "SLI x2"]
)
def test_another_form_is_refused(link: str) -> None:
    with pytest.raises(ValueError, match="is not a link: give PCIe"):
        link_rate(link)


def test_a_published_bandwidth_beats_the_rule() -> None:
    """The rule is near all published bandwidths, which are the rows' own."""
    published = [device for device in GPUS if device.link_gb_s and not device.link_by_rule]
    assert {device.name for device in published} == {
        *("a100-40gb-sxm", "a100-80gb-sxm", "h100-sxm", "h200-sxm", "rtx-5090"),
        *(f"rtx-pro-6000-blackwell-{edition}" for edition in ("maxq", "server", "ws")),
    }
    for device in published:
        rate = link_rate(device.link or "")
        assert rate and rate.gb_s == pytest.approx(device.link_gb_s, rel=0.12)


def test_geforce_cards_have_no_peer_access_and_other_cards_have() -> None:
    for device in GPUS:
        if (device.link or "").startswith("PCIe"):
            is_geforce = device.name.startswith(("rtx-3", "rtx-40", "rtx-50")) and not (
                device.name.endswith("-ada")
            )
            assert ("no peer access" in (device.link or "")) == is_geforce, device.name


def test_pairs_with_links_of_their_own() -> None:
    mi300x, h100 = resolve_device("mi300x"), resolve_device("h100")
    assert [mi300x.link_between(number) for number in (2, 4, 8)] == [48, 144, 336]
    assert [h100.link_between(number) for number in (2, 8)] == [370, 370]
    assert mi300x.link_text == (
        "about 48 GB/s between two GPUs, and at most 336 GB/s over Infinity Fabric x7 (1 per pair),"
        " from the data sheet, not measured"
    )
    assert h100.link_text == "370 GB/s over NVLink 4 x18"
    assert resolve_device("rtx-4090-laptop").link_text is None
    assert set(LANE_GB_S) >= {(device.link or "").partition(" x")[0] for device in GPUS} - {"none"}


def test_the_link_of_a_described_card() -> None:
    card = "memory=24,bf16_tflops=165,"
    by_rule = resolve_device(f"{card}link=PCIe 4.0 x16 (no peer access)")
    assert (by_rule.link_gb_s, by_rule.link_by_rule) == (15, True)
    measured = resolve_device(f"{card}link=PCIe 4.0 x16,link_gb_s=12.5")
    assert (measured.link_gb_s, measured.link_by_rule) == (12.5, False)
    assert measured.link_text == "12.5 GB/s over PCIe 4.0 x16"
    assert resolve_device(f"{card}link_gb_s=12").link_text == "12 GB/s"
    assert resolve_device(f"{card}link=none").is_alone
    with pytest.raises(UsageError, match="'PCIe 4' is not a link: give PCIe"):
        resolve_device(f"{card}link=PCIe 4")

"""Prices: how old they are, the user's own file, today's live_prices, and the command that prints
them.
"""

import json
import logging
import socket
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.catalog import list_devices, list_prices, live_prices, resolve_device
from autotune.catalog.prices import Price, age, find_price, load_prices, prices_of
from autotune.cli.commands.catalogs import prices
from autotune.core.errors import EnvironmentProblem, UsageError

TODAY = date(2026, 11, 22)


# --- age


@pytest.mark.parametrize(
    ("as_of", "said"),
    [
        (None, "undated"),
        ("2026-11-22", "of today"),
        ("2026-11-21", "1 day old"),
        ("2026-10-23", "30 days old"),
        ("2026-10-22", "1 month old"),
        ("2026-07-01", "4 months old"),
        ("2024-11-23", "23 months old"),
        ("2024-11-22", "2 years old"),
        ("2026-11", "of this month"),
        ("2026-01", "10 months old"),
        ("2026", "of this year"),
        ("2025", "1 year old"),
        ("2024", "2 years old"),
        ("2026-11-23", "dated in the future (2026-11-23)"),
        ("2026-12", "dated in the future (2026-12)"),
        ("2027", "dated in the future (2027)"),
        ("2026-02-30", "of an unreadable date (2026-02-30)"),
        ("2026-13", "of an unreadable date (2026-13)"),
        ("0000", "of an unreadable date (0000)"),
        ("soon", "of an unreadable date (soon)"),
        ("٢٠٢٦", "of an unreadable date (٢٠٢٦)"),
        ("", "of an unreadable date ()"),
    ],
)
def test_age(as_of: str | None, said: str) -> None:
    assert age(as_of, TODAY) == said


def test_every_shipped_price_has_an_age() -> None:
    ages = {age(price.as_of, TODAY) for price in list_prices()}
    assert "undated" in ages and "1 month old" in ages
    assert not [one for one in ages if "(" in one]


# --- the user's own


MINE = """\
- {provider: mine, device: NVIDIA A10, usd: 0.8, count: 2, spot_usd: 0.4,
   as_of: 2026-11-01, source: "my bill [/x]"}
- provider: mine
  device: h100
  usd: 3
  as_of: 2026-10
- {provider: ours, device: a10, usd: 0, as_of: 2026}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "prices.yaml"
        path.write_text(text)
        return path

    return write


def test_a_file_of_ones_own(write: Callable[[str], Path]) -> None:
    own = load_prices(write(MINE))
    assert own[0] == Price(
        provider="mine",
        device="a10",
        usd_per_hour=0.4,
        spot_usd_per_hour=0.2,
        count=2,
        as_of="2026-11-01",
        source="my bill [/x]",
    )
    assert (own[1].device, own[1].as_of, own[1].source) == ("h100-sxm", "2026-10", "prices.yaml")
    assert (own[2].usd_per_hour, own[2].as_of) == (0, "2026")
    assert own[1].count == 1 and own[1].quotable and own[1].spot_usd_per_hour is None


@pytest.mark.parametrize(
    ("key", "fitting", "beyond"),
    [
        ("count", "1024", "1025"),
        ("count", "1", "0"),
        ("usd", "1000000", "1000001"),
        ("usd", "0", "-1"),
        ("spot_usd", "1000000", "1000001"),
        ("spot_usd", "0", "-1"),
        ("provider", "p" * 100, "p" * 101),
        ("provider", "p", "''"),
        ("source", "s" * 300, "s" * 301),
        ("source", "s", "''"),
    ],
)
def test_the_ends_of_what_a_price_may_say(
    write: Callable[[str], Path], key: str, fitting: str, beyond: str
) -> None:
    row = {"provider": "mine", "device": "a10", "usd": "1"}
    for value, fits in ((fitting, True), (beyond, False)):
        text = (
            "- {"
            + ", ".join(f"{name}: {each}" for name, each in (row | {key: value}).items())
            + "}\n"
        )
        if fits:
            assert len(load_prices(write(text))) == 1
        else:
            with pytest.raises(UsageError, match=f"0.{key}: "):
                load_prices(write(text))


def test_ones_own_goes_before_all_others(write: Callable[[str], Path]) -> None:
    own = load_prices(write(MINE))
    # Their own is dearer than what is shipped, and one GPU goes before half of two.
    assert [price.provider for price in prices_of("a10", own)] == ["ours", "mine", "lambda"]
    assert find_price("h100-sxm", own) == own[1] and find_price("h100-sxm") != own[1]
    assert find_price("a2", own) is None
    shipped = prices_of("a100-80gb-sxm")
    assert (
        shipped[0] == find_price("a100-80gb-sxm")
        and [one.count for one in shipped] == [1] * 4 + [8] * 3
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("provider: mine", ":1: the file: Input should be a valid list"),
        ("", ":1: the file: Input should be a valid list"),
        ("- {provider: mine, device: a10}", ":1: 0.usd: Field required"),
        ("- provider: mine\n  device: a10\n  usd: -1", ":3: 0.usd: Input should be greater"),
        (
            "- provider: mine\n  device: a10\n  usd: .nan",
            ":3: 0.usd: Input should be a finite number",
        ),
        (
            "- provider: mine\n  device: a10\n  usd: yes",
            ":3: 0.usd: Input should be a valid number",
        ),
        (
            "- provider: mine\n  device: a10\n  usd: '1'",
            ":3: 0.usd: Input should be a valid number",
        ),
        ("- provider: mine\n  device: a10\n  usd: 1e999", ":3: 0.usd: Input should be"),
        (
            "- provider: mine\n  device: a11\n  usd: 1",
            ":2: 0.device: unknown gpu 'a11'; did you mean",
        ),
        (
            "- {provider: mine, device: a10, usd: 1}\n- device: a10\n  usd: 1\n  provider: ''",
            ":4: 1.provider: ",
        ),
        (
            "- provider: mine\n  device: a10\n  usd: 1\n  count: 0",
            ":4: 0.count: Input should be greater",
        ),
        (
            "- provider: mine\n  device: a10\n  usd: 1\n  spott: 1",
            ":4: 0.spott: there is no such key",
        ),
        (
            "- provider: mine\n  device: a10\n  usd: 1\n  as_of: soon",
            ":4: 0.as_of: a date is a day, a month or",
        ),
        (
            "- provider: mine\n  device: a10\n  usd: 1\n  as_of: 2026-02-30",
            "not valid YAML: day is out of range",
        ),
        (
            "- provider: mine\n  device: a10\n  usd: 1\n  as_of: '2026-02-30'",
            ":4: 0.as_of: day is out of range",
        ),
        ("- provider: mine\n  device: a10\n  usd: 1\n  as_of: 202611", ":4: 0.as_of: a date is"),
        (
            '- provider: "\\e[31m"\n  device: a10\n  usd: 1',
            ":1: 0.provider: a character that cannot be printed",
        ),
    ],
)
def test_a_wrong_file_is_reported_with_its_line(
    write: Callable[[str], Path], text: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_prices(write(text))
    assert said in str(caught.value) and caught.value.remedy


def test_no_file() -> None:
    with pytest.raises(UsageError, match=r"cannot read nowhere\.yaml"):
        load_prices(Path("nowhere.yaml"))


# --- today's offers


def item(gpu: str | None, memory: float | None, price: float, **changes: Any) -> Any:
    """As gpuhunt's `CatalogItem` is."""
    values = {
        "provider": "aws",
        "instance_name": "x1.large",
        "location": "us-1",
        "gpu_count": 1,
        "spot": False,
    }
    return SimpleNamespace(
        **(values | {"gpu_name": gpu, "gpu_memory": memory, "price": price, "flags": []} | changes)
    )


def real_item(gpu: str | None, memory: float | None, price: float, **changes: Any) -> Any:
    gpuhunt = pytest.importorskip("gpuhunt", reason="gpuhunt (live prices) is not installed")
    values = vars(item(gpu, memory, price, **changes))
    more = {
        "gpu_vendor": gpuhunt.AcceleratorVendor.NVIDIA,
        "cpu": 8,
        "memory": 64.0,
        "disk_size": None,
    }
    return gpuhunt.CatalogItem(**(values | more))


@pytest.mark.parametrize("make", [item, real_item])
def test_offers_become_prices(make: Callable[..., Any]) -> None:
    items = [
        make("H100", 80.0, 3.0, location="dear"),
        make("H100", 80.0, 2.0, location="us-\x1b[31m2"),
        make("H100", 80.0, 1.5, spot=True, location="elsewhere"),
        make("H100", 80.0, 16.0, gpu_count=8, instance_name="p5"),
        make("H100", 80.0, 0.5, flags=["runpod-cluster"]),
        make("A10", 24.0, 0.2, spot=True),  # as spot alone
        make("A10", 24.0, float("nan")),
        make("L4", 24.0, 0.0),
        make("L4", None, 1.0),
        make(None, None, 0.1, gpu_count=0),
    ]
    assert live_prices.to_prices(items, "9.9", TODAY) == [
        Price(
            provider="aws",
            device="h100-sxm",
            usd_per_hour=2.0,
            spot_usd_per_hour=1.5,
            as_of="2026-11-22",
            source="gpuhunt 9.9, x1.large in us- [31m2",
        ),
        Price(
            provider="aws",
            device="h100-sxm",
            usd_per_hour=2.0,
            count=8,
            as_of="2026-11-22",
            source="gpuhunt 9.9, p5 in us-1",
        ),
    ]


def test_what_an_offer_must_say() -> None:
    """Its price may be small, and of two that are equal the first is named."""
    broken = [
        {"gpu_count": 0},
        {"gpu_name": None},
        {"gpu_memory": None},
        {"price": float("inf")},
        {"price": 0.0},
    ]
    items = [SimpleNamespace(**vars(item("A10", 24.0, 0.25)) | one) for one in broken]
    items += [item("L4", 24.0, 0.5, location="first"), item("L4", 24.0, 0.5, location="second")]
    (price,) = live_prices.to_prices(items, "9.9", TODAY)
    assert price.usd_per_hour == 0.5 and price.source.endswith("in first")


def test_what_a_server_sent_is_cut() -> None:
    assert live_prices._one_line("a\n" * 150) == "a " * 100


def test_every_offer_of_a_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def query(**options: Any) -> list[Any]:
        asked.append(options)
        return ["offer"]

    catalog = SimpleNamespace(query=query)
    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(Catalog=lambda: catalog))
    monkeypatch.setattr("importlib.metadata.version", {"gpuhunt": "9.9"}.__getitem__)
    assert live_prices._fetch() == (["offer"], "9.9") and asked == [{"min_gpu_count": 1}]


@pytest.mark.parametrize(
    ("gpu", "memory", "instance", "device"),
    [
        ("A10", 24, "g", "a10"),
        ("A10G", 24, "g5.xlarge", "a10g"),
        ("A10", 8, "Standard_NV12ads_A10_v5", None),  # a third of one
        ("A100", 40, "p4d.24xlarge", "a100-40gb-sxm"),
        ("A100", 80, "p4de.24xlarge", "a100-80gb-sxm"),
        ("A100", 64, "x", None),
        ("A100", 40, "gpu_1x_a100_pcie", "a100-40gb-pcie"),
        ("A100", 80, "NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("H100", 80, "NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100", 80, "gpu_1x_h100_pcie", "h100-pcie"),
        ("H100", 80, "gpu_8x_h100_sxm5", "h100-sxm"),
        ("H100NVL", 94, "Standard_NC40ads_H100_v5", "h100-nvl"),
        ("H200", 141, "gpu-h200-sxm 8gpu-128vcpu-1600gb", "h200-sxm"),
        ("H200", 141, "an-h200-pcie", None),  # there is none; and it is not the SXM
        ("V100", 16, "p3.2xlarge", "v100-sxm2-16gb"),
        ("V100", 32, "p3dn.24xlarge", "v100-sxm2-32gb"),
        ("T4", 16, "g4dn", "t4"),
        ("L40S", 48, "gpu-l40s-pcie", "l40s"),
        ("L40", 48, "x", None),
        ("A6000", 48, "gpu_1x_a6000", "rtx-a6000"),
        ("RTX4090", 24, "x", "rtx-4090"),
        ("RTX4080SUPER", 16, "x", "rtx-4080-super"),
        ("RTX4070TiSUPER", 16, "x", "rtx-4070-ti-super"),
        ("RTX3060Ti", 8, "x", "rtx-3060-ti"),
        ("RTX3060", 8, "x", None),
        ("RTX4060Ti", 16, "x", "rtx-4060-ti-16gb"),
        ("RTX4060Ti", 8, "x", "rtx-4060-ti-8gb"),
        ("B300", 270, "x", "b300-sxm"),
        ("RTX6000", 24, "gpu_1x_rtx6000", None),  # of 2018
        ("RTX6000Ada", 48, "x", "rtx-6000-ada"),
        ("RTXPRO6000", 96, "g7e.2xlarge", "rtx-pro-6000-blackwell-server"),
        (
            "RTXPRO6000",
            96,
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "rtx-pro-6000-blackwell-ws",
        ),
        ("B200", 180, "x", "b200-sxm"),
        ("MI300X", 192, "x", "mi300x"),
        ("Gaudi2", 96, "x", None),
    ],
)
def test_which_product_is_offered(
    gpu: str, memory: float, instance: str, device: str | None
) -> None:
    found = live_prices.match_product(gpu, memory, instance)
    assert (found and found.name) == device


def test_what_gpuhunt_and_the_catalogue_both_know_is_recognised() -> None:
    gpuhunt = pytest.importorskip("gpuhunt", reason="gpuhunt (live prices) is not installed")
    found = {
        device.name
        for gpu in gpuhunt.KNOWN_ACCELERATORS
        for form in ("x", "pcie", "sxm4")
        if (device := live_prices.match_product(gpu.name, gpu.memory, form))
    }
    # The other editions of the RTX PRO 6000 are known by the instance's name alone. What the clouds
    # of gpuhunt do not rent is not known to it.
    not_rented = {"a2", "a30", "h20", "l20", "rtx-3080-12gb", "rtx-a5500"}
    not_rented |= {"rtx-4000-sff-ada", "rtx-4500-ada", "rtx-5000-ada"}
    not_rented |= {"rtx-pro-5000-blackwell", "mi325x", "gb10"}
    others = {"cpu", "rtx-pro-6000-blackwell-ws", "rtx-pro-6000-blackwell-maxq"} | not_rented
    missing = {device.name for device in list_devices() if "laptop" not in device.name} - found
    assert missing == others


@pytest.fixture
def fresh() -> Any:
    live_prices._all.cache_clear()
    yield
    live_prices._all.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_live_prices_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        item("A10G", 24.0, 1.0),
        item("A10", 24.0, 4.0, gpu_count=4),
        item("A10", 24.0, 2.0, provider="oci"),
    ]
    monkeypatch.setattr(live_prices, "_fetch", lambda: (found, "9.9"))
    assert [
        price.provider for price in live_prices.live_prices(resolve_device("a10"), today=TODAY)
    ] == ["oci", "aws"]


@pytest.mark.usefixtures("fresh")
def test_without_gpuhunt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(EnvironmentProblem, match="not installed") as caught:
        live_prices.live_prices(resolve_device("a10"))
    assert caught.value.remedy == "pip install gpuhunt"


@pytest.mark.usefixtures("fresh")
def test_without_a_network(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gpuhunt = pytest.importorskip("gpuhunt", reason="gpuhunt (live prices) is not installed")
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", "http://127.0.0.1:1")
    logger = logging.getLogger("gpuhunt")
    asked: list[tuple[float | None, bool]] = []

    class Catalog(gpuhunt.Catalog):  # type: ignore[misc]
        def query(self, **options: Any) -> Any:
            asked.append((socket.getdefaulttimeout(), logger.isEnabledFor(logging.CRITICAL)))
            return super().query(**options)

    monkeypatch.setattr(gpuhunt, "Catalog", Catalog)
    before = socket.getdefaulttimeout(), logger.level
    with pytest.raises(EnvironmentProblem, match="could not be fetched") as caught:
        live_prices.live_prices(resolve_device("a10"))
    assert "--live" in (caught.value.remedy or "")
    assert capfd.readouterr().err == ""
    assert asked == [(live_prices.TIMEOUT_S, False)]
    assert (socket.getdefaulttimeout(), logger.level) == before


@pytest.mark.usefixtures("fresh")
def test_a_catalogue_that_gpuhunt_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through gpuhunt's own reader, from a mirror on disk."""
    gpuhunt = pytest.importorskip("gpuhunt", reason="gpuhunt (live prices) is not installed")
    import zipfile

    row = "p4d,us-1,{},96,1152,8,A100,40,{},,nvidia,,x86,{{}}"
    head = (
        "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,"
        "gpu_vendor,flags"
    )
    table = "\n".join(
        [f"{head},cpu_arch,provider_data", row.format(32, False), row.format(8, True)]
    )
    (tmp_path / "aws" / "1").mkdir(parents=True)
    (tmp_path / "aws" / "version").write_text("1")
    with zipfile.ZipFile(tmp_path / "aws" / "1" / "catalog.zip", "w") as archive:
        archive.writestr("aws.csv", table)
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", tmp_path.as_uri())
    (price,) = live_prices.live_prices(resolve_device("a100-40gb"))
    assert (price.usd_per_hour, price.spot_usd_per_hour, price.count) == (4.0, 1.0, 8)
    assert price.as_of == date.today().isoformat() and gpuhunt.__name__ in price.source
    assert live_prices.live_prices(resolve_device("a100-80gb")) == ()


# --- the command


def test_the_table(capsys: pytest.CaptureFixture[str], write: Callable[[str], Path]) -> None:
    prices("A10", write(MINE), live=False, json_=False, details=True)
    lines = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in capsys.readouterr().out.splitlines()
    ]
    rows = [cells for cells in lines if cells[0] == "a10"]
    assert [cells[1] for cells in rows] == ["ours", "mine", "lambda"]
    assert (
        rows[1][2:7] == ["2", "$0.40", "$9.60", "$67.20", "$0.20"] and rows[1][8] == "my bill [/x]"
    )
    assert rows[1][7].endswith(" old")


def test_every_price_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    prices(None, None, live=False, json_=True)
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(list_prices())
    assert {row["age"] for row in rows if row["as_of"] is None} == {"undated"}


@pytest.mark.usefixtures("fresh")
def test_live_ones_stand_between_ones_own_and_the_seeds(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[str], Path],
) -> None:
    monkeypatch.setattr(live_prices, "_fetch", lambda: ([item("A10", 24.0, 9.0)], "9.9"))
    prices("a10", write(MINE), live=True, json_=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["provider"] for row in rows] == ["ours", "mine", "aws", "lambda"]
    assert rows[2]["age"] == "of today"


def test_no_price_and_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    prices("a2", None, live=False, json_=False)
    assert "no price of a2 is known" in capsys.readouterr().out
    prices(None, None, live=False, json_=False)
    text = capsys.readouterr().out
    priced = [line for line in text.splitlines() if line.startswith("│ ")]
    usd = [float(line.split("│")[2].strip(" $")) for line in priced]
    names = {line.split("│")[1].strip() for line in priced}
    assert usd == sorted(usd) and len(names) == len(usd) and ", no quote " in priced[0]
    assert text.startswith(f"{priced[0].split()[1]} is the cheapest GPU: {priced[0].split()[3]}/h")
    unpriced = {device.name for device in list_devices() if find_price(device.name) is None} - {
        "cpu"
    }
    said = text.splitlines()[-2]
    assert set(said.removeprefix("no price is known for ").split(", ")) == unpriced
    prices(None, None, live=False, json_=False, details=True)
    assert "(a reference, not a quote)" in capsys.readouterr().out
    with pytest.raises(UsageError, match="unknown gpu 'a11'"):
        prices("a11", None, live=False, json_=False)


def test_gpuhunt_is_silent_and_quick_only_while_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("gpuhunt")
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(7.0)
    try:
        with live_prices._quick_and_quiet():
            assert not logger.isEnabledFor(logging.CRITICAL) and socket.getdefaulttimeout() == 20.0
        assert logger.level == logging.DEBUG and socket.getdefaulttimeout() == 7.0
        with pytest.raises(KeyError), live_prices._quick_and_quiet():
            raise KeyError
        assert logger.level == logging.DEBUG and socket.getdefaulttimeout() == 7.0
    finally:
        socket.setdefaulttimeout(before)

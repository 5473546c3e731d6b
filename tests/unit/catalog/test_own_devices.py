"""Cards of the user's own: a file or a text that describes one, held to its form."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.catalog import live_prices, prices, resolve_device
from autotune.catalog.devices import GIB_PER_MARKETED_GB
from autotune.catalog.own_devices import EXAMPLE, split_names
from autotune.core.errors import UsageError

WHOLE = """\
- {name: rtx-7090, aliases: [], vendor: nvidia, arch: blackwell,
   compute_capability: 12.0, memory_mib: 32607, bandwidth_gb_s: 2000, tdp_w: 600,
   bf16_tflops: 300, fp16_tflops: 300, fp8_tflops: 600, fp32_tflops: 150,
   nvml_names: [NVIDIA GeForce RTX 7090],
   as_of: 2026-11-24, source: a rumour}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "my card.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_card_in_words():
    card = resolve_device(" memory=24, bf16_tflops=165,bandwidth_gb_s=1008 ")
    assert (card.name, card.bf16_tflops, card.bandwidth_gb_s, card.tdp_w) == (
        "card-24gb",
        165,
        1008,
        None,
    )
    assert card.memory_gib == pytest.approx(24 * GIB_PER_MARKETED_GB) and "estimate" in (
        card.memory_source or ""
    )
    assert (card.vendor, card.arch, card.kind, card.source) == (
        "nvidia",
        "unknown",
        "cuda",
        "given by --gpu",
    )
    assert card.supports_bf16 and not card.supports_fp8
    assert card.given == card.option == "memory=24, bf16_tflops=165,bandwidth_gb_s=1008"
    assert card.label == "card-24gb (as you described it)"
    exact = resolve_device(
        "memory_mib=24564,fp16_tflops=65,compute_capability=7.5,name=old,vendor=nvidia,arch=turing"
    )
    assert (exact.memory_gib, exact.name, exact.arch, exact.supports_bf16) == (
        24564 / 1024,
        "old",
        "turing",
        False,
    )


def test_a_card_of_the_catalogue_is_shown_by_its_name():
    card = resolve_device("a10")
    assert card.given is None and card.label == card.option == card.name


def test_a_card_in_a_file(write, monkeypatch, tmp_path):
    card = resolve_device(write(WHOLE))
    assert (card.name, card.memory_gib, card.compute_capability) == (
        "rtx-7090",
        32607 / 1024,
        "12.0",
    )
    assert (card.nvml_names, card.as_of, card.source) == (
        ("NVIDIA GeForce RTX 7090",),
        "2026-11-24",
        "a rumour",
    )
    plain = resolve_device(
        write("# mine\nmemory: 12\nbf16_tflops: 50\nbandwidth_gb_s: 300\n", "Small Card.YML")
    )
    assert (plain.name, plain.memory_gib) == ("small-card", pytest.approx(12 * GIB_PER_MARKETED_GB))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_device("~/my card.yaml").name == "rtx-7090"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory=24", "say how fast the GPU multiplies: bf16_tflops"),
        ("bf16_tflops=165", "say how much memory the GPU has, with one key"),
        (
            "memory=24,memory_mib=24564,bf16_tflops=165",
            "say how much memory the GPU has, with one key",
        ),
        ("memory=24,memory=25,bf16_tflops=165", "memory is given twice"),
        ("memory=24,bf16_tflops", "'bf16_tflops' is not of the form key=value"),
        (
            "memory=24,bf16_tflop=165",
            "bf16_tflop: there is no such key; did you mean .*'bf16_tflops'",
        ),
        ("memory=0,bf16_tflops=165", "memory: Input should be greater than 0"),
        ("memory=-24,bf16_tflops=165", "memory: Input should be greater than 0"),
        ("memory=inf,bf16_tflops=165", "memory: Input should be"),
        ("memory=nan,bf16_tflops=165", "memory: Input should be"),
        ("memory=24 GB,bf16_tflops=165", "memory: Input should be a valid number"),
        ("memory=1000001,bf16_tflops=165", "memory: Input should be less than or equal to 1000000"),
        ("memory=24,bf16_tflops=165,tdp_w=0", "tdp_w: Input should be greater than 0"),
        ("memory=24,compute_capability=sm_89", "compute_capability: "),
        ("memory=24,bf16_tflops=165,vendor=intel", "vendor: Input should be 'nvidia' or 'amd'"),
        ("memory=24,bf16_tflops=165,name=../x", "name: String should match"),
        ("memory=24,bf16_tflops=165,name=RTX", "name: String should match"),
        ("memory=24,bf16_tflops=165,name=rtx-4090", "the catalogue has a GPU named rtx-4090"),
        ("memory=24,bf16_tflops=165,name=4090", "the catalogue has a GPU named 4090"),
        ("memory=24,bf16_tflops=165,name=cpu", "the catalogue has a GPU named cpu"),
        ("=", "there is no such key"),
        ("memory=24\x1b[31m,bf16_tflops=1", r"memory: Input should be a valid number"),
    ],
)
def test_a_text_that_describes_no_card(text, said):
    with pytest.raises(UsageError, match=said) as caught:
        resolve_device(text)
    assert caught.value.exit_code == 2 and caught.value.remedy
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory: 24\nbf16_tflops: .inf", ":2: bf16_tflops: Input should be a finite number"),
        ("memory: true\nbf16_tflops: 1", ":1: memory: Input should be a valid number"),
        ("memory: '24'\nbf16_tflops: 1", ":1: memory: Input should be a valid number"),
        (
            "memory: 24\nbandwith_gb_s: 3\nbf16_tflops: 1",
            ":2: bandwith_gb_s: there is no such key; did you mean 'bandwidth_gb_s'",
        ),
        ("memory: 24\nmemory: 48\nbf16_tflops: 1", "'memory' occurs twice"),
        ("memory: 24", "say how fast the GPU multiplies"),
        (f"{WHOLE}{WHOLE}", "List should have at most 1 item"),
        ("[]", "Input should be a valid dictionary"),
        ("", "Input should be a valid dictionary"),
        ("- {memory: 24,\n   bf16: 3}", ":2: 0.bf16: there is no such key"),
        ("!!python/object/apply:os.system [touch x]", "not valid YAML"),
        ('memory: 24\nbf16_tflops: 1\nsource: "a\\x1bb"', ":3: source: String should match"),
        ("memory: [1", "not valid YAML"),
    ],
)
def test_a_file_that_describes_no_card(write, text, said):
    with pytest.raises(UsageError, match=said) as caught:
        resolve_device(write(text))
    assert caught.value.exit_code == 2 and caught.value.remedy


def test_a_file_that_cannot_be_read(tmp_path):
    for name in ("none.yaml", "folder.yaml"):
        (tmp_path / "folder.yaml").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="cannot read"):
            resolve_device(str(tmp_path / name))


def test_only_what_the_user_says_is_read_as_a_file(write):
    """The names in a price file, and those that a server sends, mean cards of the catalogue."""
    path = write("memory: 24\nbf16_tflops: 1\n")
    with pytest.raises(UsageError, match="unknown gpu"):
        prices.load_prices(
            Path(write(f"- {{provider: p, device: {path!r}, usd: 1}}", "prices.yaml"))
        )
    assert live_prices.match_product(path, 24, "x") is None


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("a10,l4", ["a10", "l4"]),
        (" a10 ,, h100", ["a10", "h100"]),
        ("a10,memory=24,tdp_w=450,h100", ["a10", "memory=24,tdp_w=450", "h100"]),
        ("memory=24,tdp_w=450,memory=48,tdp_w=300", ["memory=24,tdp_w=450", "memory=48,tdp_w=300"]),
        ("memory=24,a10,tdp_w=450", ["memory=24", "a10", "tdp_w=450"]),
        ("x.yaml,memory=24", ["x.yaml", "memory=24"]),
        ("", []),
    ],
)
def test_the_cards_of_a_list(text, cards):
    assert split_names(text) == cards


@given(st.floats(min_value=1e-3, max_value=1e6), st.floats(min_value=1e-3, max_value=1e6))
def test_every_positive_size_is_one(memory, rate):
    card = resolve_device(f"memory={memory!r},bf16_tflops={rate!r}")
    assert (card.memory_gib, card.bf16_tflops) == (
        pytest.approx(memory * GIB_PER_MARKETED_GB),
        rate,
    )


def test_the_example_of_messages_is_a_card():
    assert resolve_device(EXAMPLE).tdp_w == 450


def test_a_name_of_the_catalogue_needs_no_pydantic():
    code = (
        "import sys; from autotune.catalog import resolve_device; resolve_device('a10');"
        " print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "pydantic" not in loaded

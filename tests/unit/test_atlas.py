"""The atlas: one command writes what each model needs on each card, and the pages that are stored
have every model.
"""

import importlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autotune.core.probe_types import DryCount
from autotune.dry.prober import DryAnswer
from autotune.planning import counted_memory

ROOT = Path(__file__).parents[2]
COUNT = DryCount(
    model_gib=10.0,
    adapters_gib=0.0,
    gradients_gib=1.0,
    optimizer_gib=1.0,
    segment_peak_gib={"backward_layer": 15.0},
    peak_allocated_gib=15.0,
    trainable_params=10,
    total_params=100,
    flops={"mm": 10**14},
    moved_bytes={"other": 10**11},
    operations=2000,
)


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, in threads of this process, with dry probes that refuse adapters and count the
    same of all else.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("atlas")
    refused = DryAnswer(refused="PEFT has no <adapters> for it.")
    monkeypatch.setattr(
        counted_memory,
        "dry_count",
        lambda model, config, *_, **__: (
            refused if config.quantization == "nf4" else DryAnswer(count=COUNT)
        ),
    )
    monkeypatch.setattr(
        module, "ProcessPoolExecutor", lambda number, mp_context: ThreadPoolExecutor(number)
    )
    return module


def table(page: str, title: str) -> list[list[str]]:
    """The rows of the table below this heading."""
    part = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", part, re.MULTILINE)
    return [row.split(" | ") for row in rows]


def test_one_command_writes_both_pages(
    atlas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--models", "mistral-7b", "gpt2", "--cards", "rtx-3090", "h100", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", ["atlas", *options, "--out", str(tmp_path)])
    atlas.main()
    assert re.search(
        r"^  1 of 2, .* s: openai-community/gpt2$", capsys.readouterr().out, re.MULTILINE
    )

    page = (tmp_path / "atlas.md").read_text(encoding="utf-8")
    head, gpt2, mistral = table(page, "LoRA")
    assert head == ["model", "billion", "GiB", "by", "rtx-3090", "h100-sxm"]
    assert gpt2[:4] == ["gpt2", "0.124", "15.1", "counted"] and mistral[:2] == [
        "Mistral-7B-v0.3",
        "7.25",
    ]
    assert mistral[3] == "formula" and re.fullmatch(r"[\d,]+ · \$0\.\d+", mistral[4])
    assert re.fullmatch(r"[\d,]+ · \$0\.\d+", mistral[5])
    assert table(page, "Full fine-tuning")[2][4:] == ["–", mistral_full(atlas)]
    assert table(page, "QLoRA (nf4)")[1][2:] == ["–", "–", "refused", "refused"]
    assert "cannot be counted: PEFT has no <adapters> for it.\n" in page

    page = (tmp_path / "atlas.html").read_text(encoding="utf-8")
    data = json.loads(
        re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)[0]
    )
    assert data["cards"] == ["rtx-3090", "h100-sxm"] and [name for name, _ in data["models"]] == [
        gpt2[0],
        mistral[0],
    ]
    least_gib, by, (small, large), problem = data["rows"]["lora"][1]
    assert (by, problem) == ("formula", None) and small[0] == "fits" and 0.01 < small[-1] < 0.1
    assert (
        least_gib < small[1]
        and f"{small[3]:,}"[:3] == mistral[4][:3]
        and small[4] < small[3] < small[5]
    )
    assert data["configs"][large[2]].startswith("lora r") and 0 < large[6] < 1
    assert data["rows"]["full"][1][2][0] == [] and data["rows"]["qlora"][0][3].endswith(
        "PEFT has no <adapters> for it"
    )
    assert "__" not in page and "<adapters>" not in page


def mistral_full(atlas: Any) -> str:
    """What full fine-tuning of a 7B is on an H100: something that learns differently, at a speed
    and a cost.
    """
    (entry,) = (one for one in atlas.entries_of("mistral-7b", ["h100"]) if one.method == "full")
    assert entry.learns_differently is ("bf16_pure" in entry.config) and entry.usd_per_1000
    return str(atlas.cell(entry))


def test_what_is_not_known_stays_unknown(atlas: Any) -> None:
    entry = atlas.Entry(
        model="m",
        method="lora",
        card="a10",
        state="fits",
        need_gib=9.0,
        least_gib=8.0,
        memory_by="counted",
        config="c",
    )
    assert atlas.cell(entry) == "fits, ?" and atlas.cell_data(entry, {"c": 0}) == ["fits", 9, 0]
    assert atlas.least([]) == "–"


def test_a_model_without_any_peak_is_an_error(
    atlas: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_memory, "dry_count", lambda *asked, **_: DryAnswer(refused="no"))
    options = [
        "--models",
        "gpt2",
        "smollm2-135m",
        "--cards",
        "a10",
        "--processes",
        "1",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["atlas", *options])
    with pytest.raises(SystemExit, match=r"^no peak is known of openai-community/gpt2$"):
        atlas.main()


def test_each_model_with_a_formula_or_stored_counts_has_a_peak_in_the_stored_page(
    atlas: Any,
) -> None:
    page = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    tables = [table(page, title) for title in atlas.METHODS.values()]
    names = {model.short for model in atlas.models_of_pages()}
    for rows in tables:
        assert rows[0][4:] == list(atlas.CARDS) and {row[0] for row in rows[1:]} == names
    with_peak = {
        row[0]
        for rows in tables
        for row in rows[1:]
        if row[2] != "–" and row[3] in ("formula", "counted")
    }
    assert with_peak == names
    for name in ("atlas.md", "atlas.html"):
        assert (ROOT / "docs" / name).stat().st_size < 150_000

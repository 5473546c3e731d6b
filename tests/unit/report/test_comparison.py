"""A comparison as a page, a document, a spreadsheet and data: names stay text in each form."""

import csv
import html
import io
import json
from dataclasses import replace

from autotune.catalog import Price
from autotune.problem.run_cost import FITS, OOM
from autotune.report.comparison import COLUMNS, FORMATS, as_csv
from autotune.report.values.comparison import Budget, Comparison, Owned
from tests.unit.planning.test_compare import RTX, TODAY, comparison, entry, group, too_large

HOSTILE = "<script>|=cmd`*[x](y)$1$"


def hostile() -> Comparison:
    price = Price(provider="=1+1|<b>", device="a10", usd_per_hour=1.0, source="x")
    return Comparison(groups=(group(entry("a10", price=price), model=HOSTILE),))


def test_a_hostile_name_is_text_on_a_page() -> None:
    page = FORMATS["html"](hostile(), TODAY)
    assert "<script>|" not in page and page.count("<script") == 1 and "<b>" not in page
    assert HOSTILE in html.unescape(page) and "=1+1|<b>" in html.unescape(page)
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched


def test_a_hostile_name_is_text_in_a_document() -> None:
    text = FORMATS["markdown"](hostile(), TODAY)
    assert "<script>" not in text and "<b>" not in text
    assert "## &lt;script&gt;\\|=cmd\\`\\*\\[x\\](y)\\$1\\$: lora" in text
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in rows] == [len(COLUMNS) + 1] * 3


def test_a_spreadsheet_calculates_nothing() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(hostile(), TODAY))))
    assert rows[0]["model"] == HOSTILE and rows[0]["provider"] == "'=1+1|<b>"
    for start in "=+-@":
        held = replace(hostile(), groups=(group(entry("a10"), model=f"{start}1"),))
        assert next(csv.DictReader(io.StringIO(as_csv(held, TODAY))))["model"] == f"'{start}1"
    assert float(rows[0]["usd"]) == 1.0 and rows[0]["usd_spot"] == ""
    below = as_csv(comparison(entry("a10", -1.0)), TODAY)
    assert next(csv.DictReader(io.StringIO(below)))["hours"] == "-1.0"


def test_a_hostile_name_is_text_to_a_program_and_on_a_terminal() -> None:
    assert json.loads(FORMATS["json"](hostile(), TODAY))["groups"][0]["model"] == HOSTILE


def test_json_has_it_all() -> None:
    cards = (entry("rtx-4090", 4, None), entry("h100", 1, 3.0), too_large("t4"))
    made = comparison(*cards, budget=Budget(max_usd=9), owned=Owned(device=RTX, usd=1800))
    reported = json.loads(FORMATS["json"](made, TODAY))
    first = reported["groups"][0]
    assert reported["owned"] == {
        "device": "rtx-4090",
        "usd": 1800,
        "hours": 10_000.0,
        "usd_per_kwh": 0.3,
    }
    assert first["cheapest"] == first["fastest"] == first["own_run"]["rented"] == "h100-sxm"
    assert [one["state"] for one in first["cards"]] == [FITS, FITS, OOM] and first["advice"][
        "chosen"
    ]["usd"] < 3
    assert (
        first["cards"][2]["need_gib"] > first["cards"][2]["limit_gib"]
        and first["cards"][2]["hours"] is None
    )

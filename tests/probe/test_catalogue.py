"""Rows of the catalogue build to the totals that are stored for all of them."""

import importlib
import json
from pathlib import Path

import pytest

from autotune.catalog import resolve_model

pytestmark = pytest.mark.probe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["gpt2", "gemma-3-270m", "smolvlm"])
def test_a_row_counted_now_is_the_stored_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = json.loads((BENCHMARKS / "results" / "catalogue.json").read_text())["rows"]
    now = importlib.import_module("catalogue").row_of(resolve_model(name))
    assert now in rows

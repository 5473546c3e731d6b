"""Mutated datasets and files have an answer or a refusal in plain words; `benchmarks/robustness.py`
tries 3,000.
"""

from pathlib import Path

import pytest

from autotune.core.errors import UsageError
from autotune.trainer.reading import BadDataset
from tests.helpers.mutations import fuzzed, is_plain

pytest.importorskip("trl")
INPUTS = 200


def test_mutated_inputs_have_no_faults(tmp_path: Path) -> None:
    rows = list(fuzzed(INPUTS, seed=0, folder=tmp_path))
    assert [row for row in rows if row["outcome"] == "fault"] == []
    assert {row["outcome"] for row in rows} == {"answered", "refused"}


@pytest.mark.parametrize(
    ("error", "plain"),
    [
        (BadDataset("rows.jsonl:1: text is 5, which is not text"), True),
        (UsageError("lora_r: 'x' is not a whole number"), True),
        (ValueError("text is 5"), True),
        (BadDataset(""), False),
        (KeyError("text"), False),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "y"), False),
        (BadDataset("rows.jsonl:1: 'dict object' has no attribute 'name'"), False),
        (UsageError("'NoneType' object is not subscriptable"), False),
        (UsageError("unexpected KeyError: 3"), False),
    ],
)
def test_errors_of_python_are_no_reasons(error: Exception, plain: bool) -> None:
    assert is_plain(error) is plain

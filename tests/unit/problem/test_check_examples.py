"""Examples are checked before a model is loaded: rows, number and lengths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.errors import UsageError
from autotune.core.train_config import TrainConfig
from autotune.problem.dataset import check_examples
from autotune.problem.images import Pictured
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload

WORKLOAD = Workload(lengths=Lengths.constant(100), global_batch=4)
CONFIG = TrainConfig(micro_batch_size=2, seq_len=128)


def checked(
    tmp_path: Path, *rows: object, workload: Workload = WORKLOAD, config: TrainConfig = CONFIG
) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return check_examples(file, None, None, workload, config)


def text(tokens: int) -> dict[str, str]:
    """A row of about this number of tokens, of four characters each."""
    return {"text": "abc " * tokens}


def test_usual_examples_pass_without_a_note(tmp_path: Path) -> None:
    assert checked(tmp_path, *[text(100)] * 4) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([text(9), {"question": "a"}], r"rows.jsonl:2: an example needs .*; its columns: question"),
        ([text(9), 5], r"rows.jsonl:2: not a JSON object"),
        ([], "rows.jsonl has no examples"),
        ([{"prompt": "abcdefgh", "completion": ""}] * 2, "no tokens to train on"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(
    rows: list[object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        checked(tmp_path, *rows)


def test_other_lengths_than_in_the_study_are_noted(tmp_path: Path) -> None:
    cut, other = checked(tmp_path, *[text(200)] * 4)
    assert "100% of the examples are longer than 128 tokens (seq_len): 36% of all" in cut
    assert "200 tokens on average, and the study's examples had 100" in other
    (other,) = checked(tmp_path, *[text(50)] * 4)
    assert "50 tokens on average" in other


def test_rows_with_images_are_read_too(tmp_path: Path) -> None:
    pictured: tuple[Pictured, ...] = ((300, ()),)
    workload = replace(WORKLOAD, pictured=pictured)
    with pytest.raises(UsageError, match="an example with images needs messages"):
        checked(tmp_path, {"text": "a", "image": "a.png"}, workload=workload)

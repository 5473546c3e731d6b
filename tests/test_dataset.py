"""The user's own file, in each of its forms, counted as the exported script counts it."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.dataset import dataset_lengths
from autotune.errors import UsageError
from autotune.lengths import Lengths
from autotune.setup import set_up
from autotune.spec import StudySpec

CHAT = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
FORMS: list[tuple[dict[str, Any], int, int]] = [  # a row, its words with what ends it, its characters
    ({"text": "one two three"}, 4, 13),
    ({"prompt": "one two ", "completion": "three four five"}, 6, 23),
    ({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]}, 7, 25),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer that makes a token of each word, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="</s>")
    fast.chat_template = CHAT
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(str(folder))
    return str(folder)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pandas

        frame = pandas.DataFrame(rows)
        frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ".csv"])
@pytest.mark.parametrize(("row", "words", "characters"), FORMS, ids=["text", "prompt", "messages"])
def test_each_form_in_each_kind_of_file(
    tmp_path: Path, tokenizer: str, kind: str, row: dict[str, Any], words: int, characters: int
) -> None:
    if kind == ".csv" and "messages" in row:
        pytest.skip("a cell of CSV holds no list")
    file = written(tmp_path / f"data{kind}", [row] * 3)
    assert dataset_lengths(file, tokenizer) == Lengths(counts=((words, 3),), source="counted")
    estimated = dataset_lengths(file, None)
    assert estimated == Lengths(counts=((round(characters / 4), 3),), source="characters")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "fine"}, {"text": None}], "row 2"),
        ([{"question": "what?"}], "row 1.*its columns: question"),
        ([{"messages": [{"role": "user"}]}], "row 1"),
        ([], "no rows"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataset_lengths(written(tmp_path / "data.jsonl", rows), None)


def test_files_that_cannot_be_used(tmp_path: Path, tokenizer: str) -> None:
    broken = tmp_path / "data.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": \n')
    for file, message in (
        (broken, "cannot read"),
        (tmp_path / "none.jsonl", "no file"),
        (tmp_path / "data.xlsx", "none of .jsonl"),
    ):
        with pytest.raises(UsageError, match=message):
            dataset_lengths(file, None)
    with pytest.raises(UsageError, match="tokenizer"):
        dataset_lengths(written(tmp_path / "fine.jsonl", [{"text": "a"}]), str(tmp_path))


def test_a_study_takes_its_examples_from_the_file(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "word " * length} for length in (100, 200, 900)]
    file = str(written(tmp_path / "data.jsonl", rows))
    spec = StudySpec(model="mistral-7b", dataset=file, tokenizer=tokenizer, max_truncated=0.2)
    setup = set_up(spec, resolve_device("h200"))
    workload = setup.subject.workload
    assert (workload.examples, workload.examples_assumed) == (3, False)
    assert workload.lengths == Lengths.of([101, 201, 901], "counted")
    # 512 keep all but 389 of 1,203 tokens, which is too few; no example needs more than 1,024.
    assert setup.subject.space.knob("seq_len").choices() == (1024,)
    fewer = set_up(StudySpec(model="mistral-7b", dataset=file, examples=50), resolve_device("h200"))
    assert fewer.subject.workload.examples == 50
    assert fewer.subject.workload.lengths.source == "characters"

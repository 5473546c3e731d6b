"""The rows that the exported script trains on, which are those of the probe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.probe.runtime import rows
from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import packed_rows


def test_rows_are_packed_as_the_workload_counts_them() -> None:
    lengths = [3, 60, 100, 7, 7, 41, 12, 99, 1, 64] * 30
    packed = rows.pack([torch.full((length,), length) for length in lengths], 100)
    planned = [row.examples for row in packed_rows(Lengths.of(lengths, "counted"), 100) for _ in range(row.number)]
    assert sorted(tuple(map(len, row)) for row in packed) == sorted(planned)


def test_a_packed_batch_has_each_token_in_its_place() -> None:
    batch = rows.collate([[torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [torch.arange(1, 7)]], 6, True)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 0], [1, 2, 3, 4, 5, 6]],
        "labels": [[-100, 6, 7, -100, 9, -100], [-100, 2, 3, 4, 5, 6]],
        "position_ids": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]],
    }


def test_a_batch_that_is_not_packed_has_no_positions() -> None:
    batch = rows.collate([[torch.tensor([5, 6])]], 4, False)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 6, 0, 0]],
        "labels": [[-100, 6, -100, -100]],
    }


def test_lengths_are_read_from_a_file_and_cut(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("7\n\n300\n")
    assert rows.read_lengths(str(tmp_path / "lengths"), 100) == [7, 100]
    for wrong in ("", "5\nx\n", "0\n"):
        (tmp_path / "lengths").write_text(wrong)
        with pytest.raises(SystemExit, match="lengths: "):
            rows.read_lengths(str(tmp_path / "lengths"), 100)


def test_an_example_that_predicts_nothing_is_not_held_out() -> None:
    """A single token has no loss: with one of them the mean of all would not be a number."""
    examples = [torch.arange(length) for length in (9, 9, 1, 5)]
    trained, held_out = rows.split(examples, 4, 2, 3)
    assert [len(example) for example in trained] == [4, 4]
    assert [[len(example) for example in row] for row in held_out] == [[3]]
    for number, tokens in ((4, 3), (-1, 3), (2, 1)):
        with pytest.raises(SystemExit, match="cannot be held out"):
            rows.split(examples, 4, number, tokens)


@pytest.fixture
def tokenizer() -> Any:
    """Of a few words, with <s> before each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "a", "b", "c", "user:", "?"]
    by_word = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    by_word.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=by_word, unk_token="?", eos_token="</s>")
    made.chat_template = "<s> {% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    return made


def written(folder: Path, *examples: Any, between: str = "\n") -> str:
    (folder / "rows.jsonl").write_text(between.join(map(json.dumps, examples)), encoding="utf-8-sig")
    return str(folder / "rows.jsonl")


def test_examples_are_read_from_each_kind_of_line(tokenizer: Any, tmp_path: Path) -> None:
    """A byte order mark and blank lines are no examples; a chat's template writes its own first token."""
    file = written(
        tmp_path,
        {"text": "a b"},
        {"prompt": "a", "completion": " b c", "text": None},
        {"messages": [{"role": "user", "content": "c"}], "text": "a"},
        {"text": "a a a a a a a"},
        between="\n\n",
    )
    assert [example.tolist() for example in rows.read(file, tokenizer, 6)] == [
        [0, 2, 3, 1],
        [0, 2, 3, 4, 1],
        [0, 5, 4],
        [0, 2, 2, 2, 2, 2],
    ]
    tokenizer.eos_token = None
    assert [example.tolist() for example in rows.read(file, tokenizer, 100)][1] == [0, 2, 3, 4]


@pytest.mark.parametrize("wrong", [{"words": "a"}, {"prompt": "a"}, {"text": 3}, [], "text", {"messages": "a"}])
def test_a_line_that_is_no_example_is_named(wrong: Any, tokenizer: Any, tmp_path: Path) -> None:
    file = written(tmp_path, {"text": "a"}, wrong, between="\n\n")
    with pytest.raises(SystemExit, match=r"rows\.jsonl:3: needs text, prompt and completion, or messages: "):
        rows.read(file, tokenizer, 6)


def test_held_out_rows_may_be_longer_than_those_to_train_on() -> None:
    batch = rows.collate([[torch.arange(1, 6)], [torch.tensor([7])]], 2, False)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [7, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, 4, 5], [-100] * 5]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_what_can_be_held_out() -> None:
    examples = [torch.arange(length) for length in (2, 1, 2, 2)]
    everything, nothing = rows.split(examples, 8, 0, 0)
    assert [len(one) for one in everything] == [2, 1, 2, 2] and nothing == []
    trained, held_out = rows.split(examples, 8, 3, 2)
    assert [len(one) for one in trained] == [2] and [len(row[0]) for row in held_out] == [2, 2]


def test_a_length_of_one_is_a_length(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("1")
    assert rows.read_lengths(str(tmp_path / "lengths"), 100) == [1]


def test_the_same_share_of_the_examples_is_held_out_at_each_start() -> None:
    """A resumed run must not have trained on them. One token predicts nothing."""
    examples = [torch.arange(index + 2) for index in range(100)]
    trained, held_out = rows.hold_out(examples, 0.1)
    torch.manual_seed(5)
    assert [len(example) for example in rows.hold_out(examples, 0.1)[1]] == [len(example) for example in held_out]
    lengths = [len(example) for example in trained], [len(example) for example in held_out]
    assert len(held_out) == 10 and sorted([*lengths[0], *lengths[1]]) == [*range(2, 102)]
    assert all(part == sorted(part) for part in lengths) and lengths[1] != [*range(92, 102)]
    assert rows.hold_out(examples, 0.0) == (examples, [])
    assert [len(rows.hold_out([torch.arange(1)] * number, 0.5)[0]) for number in (1, 2, 3)] == [1, 1, 1]
    assert rows.hold_out([torch.arange(1)] * 3, 0.5)[1] == []

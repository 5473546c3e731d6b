"""The rows that the exported script trains on, which are those of the probe."""

from array import array
from pathlib import Path

import pytest
import torch

from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import packed_rows
from autotune.trainer import rows


def test_rows_are_packed_as_the_workload_counts_them() -> None:
    lengths = [3, 60, 100, 7, 7, 41, 12, 99, 1, 64] * 30
    packed = rows.pack(lengths, 100)
    planned = [
        row.examples
        for row in packed_rows(Lengths.of(lengths, "counted"), 100)
        for _ in range(row.number)
    ]
    assert sorted(tuple(lengths[index] for index in row) for row in packed) == sorted(planned)
    assert sorted(index for row in packed for index in row) == list(range(len(lengths)))


def test_a_packed_batch_has_each_token_in_its_place() -> None:
    batch = rows.collate(
        [[torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [torch.arange(1, 7)]], [6], True
    )
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 0], [1, 2, 3, 4, 5, 6]],
        "labels": [[-100, 6, 7, -100, 9, -100], [-100, 2, 3, 4, 5, 6]],
        "position_ids": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]],
    }


def test_a_batch_that_is_not_packed_has_no_positions() -> None:
    batch = rows.collate([[torch.tensor([5, 6])]], [4], False)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 6, 0, 0]],
        "labels": [[-100, 6, -100, -100]],
    }


def test_a_mask_hides_padding() -> None:
    batch = rows.collate([[torch.tensor([5, -7])], [torch.tensor([8])]], [3], False, masked=True)
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch["attention_mask"].dtype == torch.int64
    assert batch.keys() == {"input_ids", "labels", "attention_mask"}


def test_lengths_are_read_from_a_file_and_cut(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("7\n\n300\n")
    assert rows.read_lengths(str(tmp_path / "lengths"), 100) == [7, 100]
    for wrong in ("", "5\nx\n", "0\n", "5\n0\n"):
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


def test_held_out_rows_may_be_longer_than_those_to_train_on() -> None:
    batch = rows.collate([[torch.arange(1, 6)], [torch.tensor([7])]], [2], False)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [7, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, 4, 5], [-100] * 5]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_what_can_be_held_out() -> None:
    examples = [torch.arange(length) for length in (2, 1, 2, 2)]
    everything, nothing = rows.split(examples, 8, 0, 0)
    assert [len(one) for one in everything] == [2, 2, 2] and len(nothing) == 0
    trained, held_out = rows.split(examples, 8, 3, 2)
    assert [len(one) for one in trained] == [2] and [len(row[0]) for row in held_out] == [2, 2]


def test_a_length_of_one_is_a_length(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("1")
    assert rows.read_lengths(str(tmp_path / "lengths"), 100) == [1]


def test_the_same_share_of_the_examples_is_held_out_at_each_start() -> None:
    """A resumed run must not have trained on them. One token predicts nothing."""
    examples = [torch.arange(index + 2) for index in range(100)]
    trained, held_out = rows.hold_out(examples, 0.1, 200)
    torch.manual_seed(5)
    assert [len(example) for example in rows.hold_out(examples, 0.1, 200)[1]] == [
        len(example) for example in held_out
    ]
    assert max(len(example) for example in rows.hold_out(examples, 0.1, 20)[1]) == 20
    lengths = [len(example) for example in trained], [len(example) for example in held_out]
    assert len(held_out) == 10 and sorted([*lengths[0], *lengths[1]]) == [*range(2, 102)]
    assert all(part == sorted(part) for part in lengths) and lengths[1] != [*range(92, 102)]
    assert [len(part) for part in rows.hold_out(examples, 0.0, 9)] == [100, 0]
    assert [len(rows.hold_out([torch.arange(1)] * number, 0.5, 9)[0]) for number in (1, 2, 3)] == [
        1,
        1,
        1,
    ]
    assert len(rows.hold_out([torch.arange(1)] * 3, 0.5, 9)[1]) == 0


def test_what_is_only_read_has_no_label() -> None:
    """Not even the token 0, whose complement is -1."""
    batch = rows.collate([[torch.tensor([-6, -1, 7, 0]), torch.tensor([3, -5, 9])]], [8], True)
    assert batch["input_ids"].tolist() == [[5, 0, 7, 0, 3, 4, 9, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 0, -100, -100, 9, -100]]


def test_stored_examples_are_mapped_and_cut(tmp_path: Path) -> None:
    with (tmp_path / "tokens").open("wb") as tokens, (tmp_path / "ends").open("wb") as ends:
        array("i", [5, -7, 8, 9, 1, 2]).tofile(tokens)
        array("q", [4, 6]).tofile(ends)
    stored = rows.StoredExamples(tmp_path)
    assert [example.tolist() for example in stored] == [[5, -7, 8, 9], [1, 2]] and len(stored) == 2
    both = rows.Rows(rows.Selection(stored, [1, 0], 3), [[0, 1]])
    assert [[example.tolist() for example in row] for row in both] == [[[1, 2], [5, -7, 8]]]
    assert rows.collate([both[0]], [6], True)["labels"].tolist() == [[-100, 2, -100, -100, 8, -100]]


def test_an_example_without_a_target_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Its loss would not be a number. One whose answer is cut off has none."""
    examples = [
        torch.tensor(tokens) for tokens in ([5, 6], [5, -7, -8, 9], [5, -1], [3, 4], [8, -9, 1])
    ]
    trained, held_out = rows.split(examples, 3, 2, 2)
    assert [example.tolist() for example in trained] == [[5, 6]]
    assert [[example.tolist() for example in row] for row in held_out] == [[[3, 4]]]
    assert (
        "2 of 3 examples have no token to train on in their first 3 tokens"
        in capsys.readouterr().err
    )


def test_random_examples_have_a_prompt_of_the_usual_share() -> None:
    assert rows.mask_prompt(torch.tensor([1, 2, 3, 4]), 0.5).tolist() == [-2, -3, 3, 4]
    assert rows.mask_prompt(torch.tensor([1, 2, 3]), 1.0).tolist() == [1, 2, 3]
    # short ones have a loss too
    assert rows.mask_prompt(torch.tensor([1, 2, 3]), 0.01).tolist() == [-2, -3, 3]


def test_a_row_that_fills_one_of_the_lengths_needs_no_longer_one() -> None:
    batches = [
        rows.collate([[torch.arange(length)]], [4, 8], False)["input_ids"].shape
        for length in (3, 4, 5, 9)
    ]
    assert batches == [(1, 4), (1, 4), (1, 8), (1, 9)]


def test_tokens_are_whole_numbers_however_large() -> None:
    batch = rows.collate([[torch.tensor([1, 2**24 + 1], dtype=torch.int32)]], [3], False)
    assert batch["input_ids"].tolist() == [[1, 2**24 + 1, 0]] and batch["labels"].tolist() == [
        [-100, 2**24 + 1, -100]
    ]


def test_the_token_0_is_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows.num_targets(torch.tensor([5, 0, -1, 3])) == 2
    rows.split([torch.tensor([5, 0])] * 3, 4, 1, 2)
    assert capsys.readouterr().err == ""  # nothing was left out


def test_which_examples_are_held_out_never_changes() -> None:
    """A run that continues after an update must not train on them either."""
    held_out = rows.hold_out([torch.tensor([index, 1]) for index in range(10)], 0.3, 9)[1]
    assert [int(example[0]) for example in held_out] == [1, 4, 7]

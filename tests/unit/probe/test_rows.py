"""The rows that the exported script trains on, which are those of the probe."""

from pathlib import Path

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

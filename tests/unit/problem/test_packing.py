"""Packing finds as few rows as best-fit decreasing, and keeps every example."""

import random

import pytest

from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import packed_rows

# Cut at 10, the longest first: 10; 7 + 3; 6 + 3 (1 is left); 5 + 5; 5 + 2 (3 are left); 1 goes
# where 1 is left.
BY_HAND = Lengths.of([7, 6, 5, 5, 5, 3, 3, 2, 1, 12], "counted")


def rows_of(lengths: Lengths, seq_len: int) -> list[tuple[int, ...]]:
    return sorted(row.examples for row in packed_rows(lengths, seq_len) for _ in range(row.number))


def best_fit(examples: list[int], seq_len: int) -> list[list[int]]:
    """As the textbook has it, one example after the other."""
    rows: list[list[int]] = []
    for tokens in sorted(examples, reverse=True):
        having_room = [row for row in rows if sum(row) + tokens <= seq_len]
        if having_room:
            max(having_room, key=sum).append(tokens)
        else:
            rows.append([tokens])
    return rows


def test_rows_by_hand() -> None:
    assert rows_of(BY_HAND, 10) == [(5, 2), (5, 5), (6, 3, 1), (7, 3), (10,)]


@pytest.mark.parametrize("seed", range(40))
def test_as_many_rows_as_best_fit_decreasing_and_every_example_once(seed: int) -> None:
    drawn = random.Random(seed)
    seq_len = drawn.choice([8, 17, 64, 500])
    examples = [
        drawn.randint(1, drawn.choice([seq_len // 4, seq_len + 5]))
        for _ in range(drawn.randint(1, 120))
    ]
    rows = rows_of(Lengths.of(examples, "counted"), seq_len)
    cut = [min(tokens, seq_len) for tokens in examples]
    assert len(rows) == len(best_fit(cut, seq_len))
    assert sorted(tokens for row in rows for tokens in row) == sorted(cut)
    assert max(map(sum, rows)) <= seq_len


def test_each_example_may_be_there_several_times() -> None:
    """Three of 6 and three of 4 tokens fill three rows of 10; of two of 3 tokens each, three fit
    into one of 10.
    """
    both = Lengths.of([6, 4], "counted")
    assert [(row.number, row.examples) for row in packed_rows(both, 10, 3)] == [(3, (6, 4))]
    rows = packed_rows(Lengths.of([3, 3], "counted"), 10, 4)
    assert sorted((row.number, row.examples) for row in rows) == [(1, (3, 3)), (2, (3, 3, 3))]


def test_full_rows_come_first_and_then_those_with_less_room() -> None:
    rows = packed_rows(Lengths.of([10, 9, 7, 7, 12], "counted"), 10)
    assert [(row.number, row.examples) for row in rows] == [(2, (10,)), (1, (9,)), (2, (7,))]


def test_of_equal_rows_only_those_that_are_needed_get_an_example() -> None:
    """Five rows of 6 have room for one of 4 tokens each, and there are two."""
    rows = packed_rows(Lengths.of([6] * 5 + [4] * 2, "counted"), 10)
    assert [(row.number, row.examples) for row in rows] == [(2, (6, 4)), (3, (6,))]
    last = packed_rows(Lengths.of([6] * 2 + [2], "counted"), 10)
    assert sorted((row.number, row.examples) for row in last) == [(1, (6,)), (1, (6, 2))]

"""The order in which the micro batches of a step are dealt out to ranks."""

import itertools
import random

import pytest

from autotune.trainer.dealing import balance_rows, deal


def test_the_longest_of_neighbours_is_for_the_rank_with_the_least_until_then() -> None:
    """The first rank has 9, and takes the 6 beside which the other takes the 7."""
    assert deal([9, 8, 7, 6], 2) == [0, 1, 3, 2]
    assert deal([9, 8, 7, 6, 5], 2) == [0, 1, 3, 2, 4]
    assert deal([9, 8, 7], 1) == [0, 1, 2]
    assert deal([9, 1, 1, 1], 2) == [0, 1, 3, 2]
    assert deal([], 4) == []


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (1, 4), (2, 2), (4, 4), (3, 8)])
def test_each_row_is_dealt_out_once_beside_its_neighbours(size: int, ranks: int) -> None:
    lengths = [random.Random(5).randint(1, 1000) for _ in range(96)]
    order = balance_rows(lengths, size, ranks)
    assert sorted(order) == list(range(96))
    at_once = size * ranks
    rounds = [
        sorted(lengths[place] for place in order[at : at + at_once]) for at in range(0, 96, at_once)
    ]
    assert list(itertools.chain(*reversed(rounds))) == sorted(lengths)
    for at in range(0, 96, size):
        micro_batch = [lengths[place] for place in order[at : at + size]]
        assert micro_batch == sorted(micro_batch, reverse=True)

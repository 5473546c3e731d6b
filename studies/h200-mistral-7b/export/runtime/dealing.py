# -*- coding: utf-8 -*-
"""Orders the rows of an optimizer step so that all ranks get equal work. Does not import torch."""

from collections.abc import Sequence


def balance_rows(lengths: Sequence[int], size: int, ranks: int) -> list[int]:
    """Return the indices of a step's rows in the order in which the micro batches take them.

    `lengths` are in tokens, and each micro batch takes `size` rows. Rows of similar length share a
    micro batch, which keeps padding small. At any time, all ranks compute micro batches of similar
    length, so that ranks wait little for each other. The order does not change the sum of the
    step's gradients.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    micro_batches = [order[start : start + size] for start in range(0, len(order), size)]
    dealt = deal([lengths[rows[0]] for rows in micro_batches], ranks)
    return [row for index in dealt for row in micro_batches[index]]


def deal(longest: Sequence[int], ranks: int) -> list[int]:
    """Return the indices of micro batches in the order in which the ranks take them.

    The ranks take turns: rank 0 takes the first micro batch, rank 1 the second, and so on.
    `longest` holds the length of each micro batch, in descending order. Each rank gets one of every
    `ranks` consecutive micro batches, and the longest of these goes to the rank with the fewest
    tokens so far.
    """
    taken_by = ranks_of(longest, ranks)
    return sorted(range(len(longest)), key=lambda index: (index // ranks, taken_by[index]))


def ranks_of(longest: Sequence[int], ranks: int) -> list[int]:
    """Return, for each micro batch, the rank that computes it. `deal` uses this distribution."""
    totals = [0] * ranks
    taken_by: list[int] = []
    for first in range(0, len(longest), ranks):
        by_total = sorted(range(ranks), key=totals.__getitem__)
        for rank, length in zip(by_total, longest[first : first + ranks], strict=False):
            totals[rank] += length
            taken_by.append(rank)
    return taken_by

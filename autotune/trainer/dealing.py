"""The order in which the micro batches of an optimizer step are dealt out to ranks. No torch here."""

from collections.abc import Sequence


def by_length(lengths: Sequence[int], size: int, ranks: int) -> list[int]:
    """The rows of a step, by their places in `lengths` (tokens), as micro batches of `size` rows take them in turn.

    Rows of nearly the same length share a micro batch, so that little is padded, and ranks have micro batches of nearly
    the same length at once, so that none waits long. The step learns what it learns in any other order.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    micro_batches = [order[place : place + size] for place in range(0, len(order), size)]
    dealt = deal([lengths[rows[0]] for rows in micro_batches], ranks)
    return [row for place in dealt for row in micro_batches[place]]


def deal(longest: Sequence[int], ranks: int) -> list[int]:
    """The places of micro batches of these lengths, the longest first, in the order in which ranks take one in turn.

    Each rank takes one of `ranks` neighbours, the longest of them the rank with the least until then.
    """
    totals, dealt = [0] * ranks, []
    for first in range(0, len(longest), ranks):
        places = range(first, min(first + ranks, len(longest)))
        for rank, place in sorted(zip(sorted(range(ranks), key=totals.__getitem__), places, strict=False)):
            totals[rank] += longest[place]
            dealt.append(place)
    return dealt

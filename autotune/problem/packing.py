"""Pack examples into rows by best-fit decreasing, in milliseconds for millions of examples."""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from autotune.problem.length_distribution import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`number` equal rows. Each row consists of examples whose lengths in tokens are `examples`."""

    number: int
    examples: tuple[int, ...]


@dataclass(slots=True)
class _OpenRows:
    """The rows during packing: full rows, and rows that have room for more tokens."""

    seq_len: int
    full: list[Rows] = field(default_factory=list)
    by_room: dict[int, list[Rows]] = field(default_factory=dict)
    rooms: list[int] = field(default_factory=list)  # the sorted keys of `by_room`

    def put(self, rows: Rows) -> None:
        room = self.seq_len - sum(rows.examples)
        if not room:
            self.full.append(rows)
            return
        if room not in self.by_room:
            insort(self.rooms, room)
        self.by_room.setdefault(room, []).append(rows)

    def take_fullest(self, tokens: int) -> Rows | None:
        """Remove and return the fullest rows with room for `tokens` more tokens, or return None."""
        place = bisect_left(self.rooms, tokens)
        if place == len(self.rooms):
            return None

        rows = self.by_room[self.rooms[place]].pop()
        if not self.by_room[self.rooms[place]]:
            del self.by_room[self.rooms.pop(place)]
        return rows


@lru_cache(maxsize=64)
def packed_rows(lengths: Lengths, seq_len: int, times: int = 1) -> tuple[Rows, ...]:
    """Pack `times` copies of all examples, truncated to `seq_len`, into rows.

    The longest example is placed first. Each example goes into the fullest row that has room for
    it. Examples of equal length are placed together.
    """
    examples = Counter[int]()
    for tokens, number in lengths.counts:
        examples[min(tokens, seq_len)] += number * times

    rows = _OpenRows(seq_len)
    for tokens in sorted(examples, reverse=True):
        remaining = examples[tokens]
        while remaining:
            remaining = _place(rows, tokens, remaining)
    return (*rows.full, *(group for room in rows.rooms for group in rows.by_room[room]))


@lru_cache(maxsize=64)
def examples_per_row(lengths: Lengths, seq_len: int, times: int = 1) -> float:
    """Return the mean number of examples in the rows of `packed_rows`.

    The result is cached, because thousands of configurations have the same packed rows.
    """
    rows = packed_rows(lengths, seq_len, times)
    examples = sum(group.number * len(group.examples) for group in rows)
    return examples / sum(group.number for group in rows)


def _place(rows: _OpenRows, tokens: int, number: int) -> int:
    """Put examples of one length into the fullest group of equal rows that has room for them.

    Return the number of examples that are not placed yet.
    """
    fullest = rows.take_fullest(tokens)
    target = fullest or Rows(number=number, examples=())

    # A row that just got an example is now the fullest row with room. So the next examples of the
    # same length go into this row, until it has no room for another one.
    per_row = (rows.seq_len - sum(target.examples)) // tokens
    filled = min(target.number, number // per_row)

    if filled:
        rows.put(Rows(number=filled, examples=target.examples + (tokens,) * per_row))
        untouched = target.number - filled
        remaining = number - filled * per_row
    else:
        rows.put(Rows(number=1, examples=target.examples + (tokens,) * number))
        untouched = target.number - 1
        remaining = 0

    if untouched and fullest:
        rows.put(Rows(number=untouched, examples=fullest.examples))
    return remaining

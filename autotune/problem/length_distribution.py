"""How long the examples are, in tokens: counted, estimated from their characters, or described by two numbers."""

import hashlib
import math
import random
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from autotune.core.errors import UsageError

Source = Literal["assumed", "given", "counted", "characters", "summary"]
P99 = NormalDist().inv_cdf(0.99)
BINS = 1000  # that a described distribution is drawn in

SAYS: dict[Source, str] = {
    "assumed": "assumed",
    "given": "as given",
    "counted": "counted",
    "characters": "estimated from their characters",
    "summary": "log-normal, from mean and 99th percentile",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution: (tokens, number of examples), ascending. Where it came from says how far to trust it."""

    counts: tuple[tuple[int, int], ...]
    source: Source
    _hash: int = field(init=False, repr=False, compare=False)  # of thousands of counts, which are asked for often

    def __post_init__(self) -> None:
        if not self.counts or self.counts[0][0] < 1 or any(number < 1 for _, number in self.counts):
            raise ValueError("tokens_per_example must be at least 1")
        object.__setattr__(self, "_hash", hash((self.counts, self.source)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def constant(cls, tokens: int, source: Source = "given") -> "Lengths":
        """Every example has as many tokens. Raises ValueError below 1."""
        return cls(counts=((tokens, 1),), source=source)

    @classmethod
    def of(cls, lengths: Iterable[int], source: Source) -> "Lengths":
        """Of each example's length; raises ValueError if there is none, or one below 1."""
        return cls(counts=tuple(sorted(Counter(lengths).items())), source=source)

    @classmethod
    def described(cls, mean: float, p99: float) -> "Lengths":
        """A log-normal distribution with this mean and this 99th percentile. Raises ValueError where there is none."""
        if not 1 <= mean <= p99:
            raise ValueError("the 99th percentile cannot be below the mean, nor the mean below 1")
        # ln p99 - ln mean = z s - s^2 / 2, s the logarithm's standard deviation; the smaller root is the plausible one.
        under_root = P99**2 - 2 * math.log(p99 / mean)
        if under_root < 0:
            raise ValueError(f"no log-normal distribution has a 99th percentile of {p99 / mean:.0f} times its mean")
        deviation = P99 - math.sqrt(under_root)
        # The mean within each of equally likely bins: their mean is the one that was given, far tail and all.
        unit = NormalDist()
        edges = [-math.inf, *(unit.inv_cdf(index / BINS) for index in range(1, BINS)), math.inf]
        below = [unit.cdf(edge - deviation) if math.isfinite(edge) else float(edge > 0) for edge in edges]
        drawn = [mean * BINS * (high - low) for low, high in pairwise(below)]
        return cls.of((max(round(tokens), 1) for tokens in drawn), "summary")

    @property
    @cache  # noqa: B019 (a study has one of these)
    def number(self) -> int:
        """Examples that were looked at."""
        return sum(number for _, number in self.counts)

    @property
    @cache  # noqa: B019
    def total(self) -> int:
        return sum(tokens * number for tokens, number in self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.number

    @property
    def longest(self) -> int:
        return self.counts[-1][0]

    def quantile(self, share: float) -> int:
        """The least length that this share of the examples does not exceed."""
        seen = 0
        for tokens, number in self.counts:
            seen += number
            if seen >= share * self.number:
                return tokens
        return self.longest

    def sample(self, number: int, seq_len: int) -> list[int]:
        """So many lengths that stand for all of them, in no order, cut at `seq_len`."""
        drawn = [min(self.quantile((index + 0.5) / number), seq_len) for index in range(number)]
        random.Random(0).shuffle(drawn)  # noqa: S311 (no secret hangs on it)
        return drawn

    @cache  # noqa: B019
    def kept(self, seq_len: int) -> int:
        """Tokens of all these examples that are left when each is cut at `seq_len`."""
        return sum(min(tokens, seq_len) * number for tokens, number in self.counts)

    @lru_cache(maxsize=64)  # noqa: B019
    def packed(self, seq_len: int, times: int = 1) -> tuple["Rows", ...]:
        """All these examples so many times, cut at `seq_len`, in as few rows of it as best-fit decreasing finds.

        The longest first, each into the fullest row that has room for it; alike ones together, so that it takes
        milliseconds where there are millions.
        """
        cut = Counter[int]()
        for tokens, number in self.counts:
            cut[min(tokens, seq_len)] += number * times
        open_rows: dict[int, list[Rows]] = {}  # by the room that is left in them
        rooms: list[int] = []  # the keys of `open_rows`, ascending
        full: list[Rows] = []

        def put(rows: Rows) -> None:
            room = seq_len - sum(rows.examples)
            if not room:
                full.append(rows)
                return
            if room not in open_rows:
                insort(rooms, room)
            open_rows.setdefault(room, []).append(rows)

        for tokens in sorted(cut, reverse=True):
            left = cut[tokens]
            while left:
                place = bisect_left(rooms, tokens)
                rows = Rows(number=left, examples=())
                if place < len(rooms):
                    rows = open_rows[rooms[place]].pop()
                    if not open_rows[rooms[place]]:
                        del open_rows[rooms.pop(place)]
                # A row that was begun is the fullest one with room until it has none.
                each = (seq_len - sum(rows.examples)) // tokens
                whole = min(rows.number, left // each)
                put_back = rows.number - whole
                if whole:
                    put(Rows(number=whole, examples=rows.examples + (tokens,) * each))
                    left -= whole * each
                elif left:
                    put(Rows(number=1, examples=rows.examples + (tokens,) * left))
                    left, put_back = 0, put_back - 1
                if put_back and rows.examples:
                    put(Rows(number=put_back, examples=rows.examples))
        return (*full, *(rows for room in rooms for rows in open_rows[room]))

    def longer(self, seq_len: int) -> float:
        """Share of the examples that are cut."""
        return sum(number for tokens, number in self.counts if tokens > seq_len) / self.number

    def facts(self) -> dict[str, Any]:
        """What a reader needs to know of it, and a digest that tells it from others."""
        text = repr(self.counts).encode()
        return {
            "source": self.source,
            "mean": self.mean,
            "median": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "longest": self.longest,
            "digest": hashlib.sha256(text).hexdigest()[:12],
        }

    def __str__(self) -> str:
        if len(self.counts) == 1:
            return f"{self.longest:,} tokens each" + f" ({SAYS[self.source]})" * (self.source != "given")
        return (
            f"{self.mean:,.0f} tokens on average, {self.quantile(0.99):,} at the 99th percentile, "
            f"{self.longest:,} the longest ({SAYS[self.source]})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`number` rows that hold examples of these lengths each."""

    number: int
    examples: tuple[int, ...]


def read_lengths(path: Path) -> Lengths:
    """From a file with one length a line. Raises UsageError; the line is named."""
    found = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            if not re.fullmatch(r"\s*[0-9]{1,9}\s*", line) or int(line) < 1:
                raise UsageError(
                    f"{path}, line {number}: {line.strip()[:40]!r} is no number of tokens",
                    remedy="write the length of one example on each line, 1 or more",
                )
            found.append(int(line))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", remedy="name a text file with one length a line") from None
    if not found:
        raise UsageError(f"{path} is empty", remedy="write the length of one example on each line")
    return Lengths.of(found, "counted")

"""The lengths of examples in tokens: counted, estimated or described by the user."""

import bisect
import hashlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from autotune.core.errors import UsageError
from autotune.core.files import read_user_text

Source = Literal["assumed", "given", "counted", "characters", "summary"]
P99 = NormalDist().inv_cdf(0.99)
MAX_BYTES = 2**30  # the largest accepted file of lengths: enough for a hundred million examples
BINS = 1000  # the number of bins, all equally likely, for a distribution given by its mean and p99

SAYS: dict[Source, str] = {
    "assumed": "assumed",
    "given": "as given",
    "counted": "counted",
    "characters": "estimated from their characters",
    "summary": "log-normal, from mean and 99th percentile",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of lengths: pairs (tokens, number of examples), sorted by tokens.

    `source` says how the lengths were obtained, which determines how reliable they are.
    `trained_share` is the share of the tokens that is trained on; the model only reads the other
    tokens. `most` is a number of tokens that no example exceeds, if the lengths are estimated and
    such a number is known.
    """

    counts: tuple[tuple[int, int], ...]
    source: Source
    trained_share: float = 1.0
    most: int | None = None
    # The hash is computed only once, because `counts` may have thousands of entries.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.counts or self.counts[0][0] < 1 or any(number < 1 for _, number in self.counts):
            raise ValueError("tokens_per_example must be at least 1")
        if not 0 < self.trained_share <= 1:
            raise ValueError(
                f"trained_share must be above 0 and at most 1, not {self.trained_share}"
            )
        object.__setattr__(self, "_hash", hash((self.counts, self.source, self.trained_share)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def constant(cls, tokens: int, source: Source = "given") -> "Lengths":
        """Return a distribution with one length. Raises ValueError for a length below 1."""
        return cls(counts=((tokens, 1),), source=source)

    @classmethod
    def of(
        cls,
        lengths: Iterable[int],
        source: Source,
        trained_share: float = 1.0,
        most: int | None = None,
    ) -> "Lengths":
        """Return the distribution of these lengths, one for each example.

        Raises ValueError if there are no lengths, or if a length is below 1.
        """
        return cls(
            counts=tuple(sorted(Counter(lengths).items())),
            source=source,
            trained_share=trained_share,
            most=most,
        )

    @classmethod
    def from_summary(cls, mean: float, p99: float) -> "Lengths":
        """Return a log-normal distribution with this mean and this 99th percentile.

        Raises ValueError if no log-normal distribution has this mean and percentile.
        """
        if not 1 <= mean <= p99:
            raise ValueError("the 99th percentile cannot be below the mean, nor the mean below 1")

        # ln p99 - ln mean = z s - s^2 / 2. Here s is the standard deviation of the logarithm, and z
        # is P99. The equation has two solutions for s, and only the smaller solution is plausible.
        under_root = P99**2 - 2 * math.log(p99 / mean)
        if under_root < 0:
            raise ValueError(
                f"no log-normal distribution has a 99th percentile of {p99 / mean:.0f}"
                " times its mean"
            )
        deviation = P99 - math.sqrt(under_root)

        # A bin's length is the mean of the distribution inside the bin. So the mean over all bins,
        # including the tail, is the given mean.
        unit = NormalDist()
        edges = [-math.inf, *(unit.inv_cdf(index / BINS) for index in range(1, BINS)), math.inf]
        shares_below = [
            unit.cdf(edge - deviation) if math.isfinite(edge) else float(edge > 0) for edge in edges
        ]
        means = [mean * BINS * (high - low) for low, high in pairwise(shares_below)]
        return cls.of((max(round(tokens), 1) for tokens in means), "summary")

    @property
    @cache  # noqa: B019 (a study has only one Lengths)
    def number(self) -> int:
        """The number of examples."""
        return sum(number for _, number in self.counts)

    @property
    @cache  # noqa: B019
    def total(self) -> int:
        """The total number of tokens of all examples."""
        return sum(tokens * number for tokens, number in self.counts)

    @property
    def mean(self) -> float:
        """The mean tokens of an example."""
        return self.total / self.number

    @property
    def longest(self) -> int:
        """The tokens of the longest example."""
        return self.counts[-1][0]

    @property
    def exact(self) -> bool:
        """Whether certainly no example exceeds `longest`; false for estimated lengths."""
        return self.source not in ("characters", "summary")

    def longest_within(self, seq_len: int) -> int:
        """Return the tokens that no example exceeds, if each is truncated to `seq_len`."""
        most = self.longest if self.exact else self.most
        return seq_len if most is None else min(most, seq_len)

    def quantile(self, share: float) -> int:
        """Return the smallest length that at least this share of the examples does not exceed."""
        place = bisect.bisect_left(self._ends, share * self.number)
        return self.counts[min(place, len(self.counts) - 1)][0]

    @property
    @cache  # noqa: B019
    def _ends(self) -> tuple[int, ...]:
        """For each length, the number of examples that are not longer."""
        return tuple(itertools.accumulate(number for _, number in self.counts))

    def sample(self, number: int, seq_len: int) -> list[int]:
        """Return `number` lengths that represent all examples, truncated to `seq_len`.

        The order is random, but the same in every call.
        """
        lengths = [min(self.quantile((index + 0.5) / number), seq_len) for index in range(number)]
        random.Random(0).shuffle(lengths)  # noqa: S311 (no secret depends on it)
        return lengths

    @cache  # noqa: B019
    def tokens_within(self, seq_len: int) -> int:
        """Return the total tokens of all examples, each truncated to `seq_len`."""
        return sum(min(tokens, seq_len) * number for tokens, number in self.counts)

    def longer(self, seq_len: int) -> float:
        """Return the share of the examples that have more than `seq_len` tokens."""
        return sum(number for tokens, number in self.counts if tokens > seq_len) / self.number

    def facts(self) -> dict[str, Any]:
        """Return plain data for reports, with a digest of the distribution."""
        return {
            "source": self.source,
            "mean": self.mean,
            "median": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "longest": self.longest,
            "trained_share": self.trained_share,
            "digest": hashlib.sha256(repr(self.counts).encode()).hexdigest()[:12],
        }

    def __str__(self) -> str:
        if len(self.counts) == 1:
            source = f" ({SAYS[self.source]})" * (self.source != "given")
            return f"{self.longest:,} tokens each" + source
        return (
            f"{self.mean:,.0f} tokens on average, {self.quantile(0.99):,} at the 99th percentile, "
            f"{self.longest:,} the longest ({SAYS[self.source]})"
        )


def read_lengths(path: Path) -> Lengths:
    """Read the lengths in a file with one length per line.

    Raises UsageError, which names the first invalid line.
    """
    lines = [line.strip() for line in read_user_text(path, MAX_BYTES).splitlines()]
    remedy = "write the length of one example, at least 1, on each line"
    for number, line in enumerate(lines, 1):
        if line and (not re.fullmatch("[0-9]{1,9}", line) or int(line) < 1):
            raise UsageError(
                f"{path}, line {number}: {line[:40]!r} is not a number of tokens", remedy=remedy
            )

    if not any(lines):
        raise UsageError(f"{path} is empty", remedy=remedy)
    return Lengths.of(map(int, filter(None, lines)), "counted")

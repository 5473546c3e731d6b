"""How long the examples are, in tokens: counted, estimated from their characters, or described by two numbers."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from autotune.errors import UsageError

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

    def __post_init__(self) -> None:
        if not self.counts or self.counts[0][0] < 1 or any(number < 1 for _, number in self.counts):
            raise ValueError("tokens_per_example must be at least 1")

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
    def number(self) -> int:
        """Examples that were looked at."""
        return sum(number for _, number in self.counts)

    @property
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

    def kept(self, seq_len: int) -> int:
        """Tokens of all these examples that are left when each is cut at `seq_len`."""
        return sum(min(tokens, seq_len) * number for tokens, number in self.counts)

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

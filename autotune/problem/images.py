"""Which images go with rows of which length: those of the rows that a probe trains on."""

from collections import Counter
from collections.abc import Iterable, Sequence

from autotune.core.images import Picture

MOST_KINDS = 256  # lengths of a dataset whose images are kept
LEAST_TEXT = 2  # tokens of a row beside its images: one is read, and the next predicted

Pictured = tuple[int, tuple[Picture, ...]]  # the tokens of an example, and its images


def taken(pictures: Sequence[Picture]) -> int:
    """Tokens that images take of a row."""
    return sum(picture.length for picture in pictures)


def pictured(examples: Iterable[Pictured]) -> tuple[Pictured, ...]:
    """Examples that represent these, ascending by length: of each length the most frequent images, and the largest.

    Of many lengths some at equal distances are kept, the shortest and the longest among them.
    """
    counted = Counter(examples)
    if not any(pictures for _, pictures in counted):
        return ()
    by_length: dict[int, Pictured] = {}
    for example, _ in sorted(counted.items(), key=lambda item: (item[1], item[0][0], taken(item[0][1]))):
        by_length[example[0]] = example
    lengths = sorted(by_length)
    last = max(min(len(lengths), MOST_KINDS) - 1, 1)
    kept = {by_length[lengths[round(place * (len(lengths) - 1) / last)]] for place in range(last + 1)}
    largest = max(counted, key=lambda example: taken(example[1]))
    return tuple(sorted(kept | {largest}, key=lambda example: (example[0], taken(example[1]))))


def images_of(examples: Sequence[Pictured], length: int, *, largest: bool = False) -> tuple[Picture, ...]:
    """The images of a row of so many tokens: those of the example nearest in length, or the largest that have room."""
    fitting = [example for example in examples if taken(example[1]) + LEAST_TEXT <= length]
    if not fitting:
        return ()
    if largest:
        return max(fitting, key=lambda example: taken(example[1]))[1]
    return min(fitting, key=lambda example: abs(example[0] - length))[1]

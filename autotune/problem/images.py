"""Choose the images that a probe uses in rows of a given length."""

from collections import Counter
from collections.abc import Iterable, Sequence

from autotune.core.images import Picture

MOST_KINDS = 256  # the selection keeps images for at most this number of row lengths
# The fewest text tokens in a row with images: the model reads one, and predicts the next one
LEAST_TEXT = 2

Pictured = tuple[int, tuple[Picture, ...]]  # the tokens of an example, and its images


def num_image_tokens(pictures: Sequence[Picture]) -> int:
    """Return the total number of tokens of these images."""
    return sum(picture.length for picture in pictures)


def representative_examples(examples: Iterable[Pictured]) -> tuple[Pictured, ...]:
    """Return a selection of the examples that represents all of them, sorted by length.

    For each length, only the example with the most frequent combination of images is kept. If there
    are more than MOST_KINDS lengths, evenly spaced lengths are kept, including the shortest and the
    longest. The example with the most image tokens is always kept.
    """
    counts = Counter(examples)
    if not any(pictures for _, pictures in counts):
        return ()

    by_length: dict[int, Pictured] = {}
    for example, _ in sorted(
        counts.items(), key=lambda item: (item[1], item[0][0], num_image_tokens(item[0][1]))
    ):
        by_length[example[0]] = example

    lengths = sorted(by_length)
    last = max(min(len(lengths), MOST_KINDS) - 1, 1)
    representatives = {
        by_length[lengths[round(place * (len(lengths) - 1) / last)]] for place in range(last + 1)
    }
    largest = max(counts, key=lambda example: num_image_tokens(example[1]))
    return tuple(
        sorted(
            representatives | {largest},
            key=lambda example: (example[0], num_image_tokens(example[1])),
        )
    )


def images_of(
    examples: Sequence[Pictured], length: int, *, largest: bool = False
) -> tuple[Picture, ...]:
    """Return the images for a row of `length` tokens.

    Only examples whose images fit in the row are considered. The images come from the example with
    the nearest length or, if `largest` is true, from the example with the most image tokens.
    """
    candidates = [
        example for example in examples if num_image_tokens(example[1]) + LEAST_TEXT <= length
    ]
    if not candidates:
        return ()
    if largest:
        return max(candidates, key=lambda example: num_image_tokens(example[1]))[1]
    return min(candidates, key=lambda example: abs(example[0] - length))[1]

# -*- coding: utf-8 -*-
"""Rows with images: random rows, or rows of a dataset.

The images of a dataset are read when a micro batch needs them.
"""

import random
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import rows
from .examples import Encoder
from .forms import Plain, parse_image_row
from .images import Tensors, add_token_types, join_values, random_example, random_values
from .picture_files import BadPicture, read_picture
from .reading import BadDataset, read_rows

# An example's tokens (see `rows`), and the tensors of its images.
ImageExample = tuple[torch.Tensor, Tensors]
BLANK: ImageExample = (rows.BLANK, {})
RANDOM_ROWS = 16  # the most different random rows; a run with more rows repeats them
VALUES = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
# Parts of the names of the tokens that a processor puts around and between image tokens
TAGS = re.compile("image|global-img|vision|row_[0-9]+_col_[0-9]+")


def random_image_examples(settings: Any, config: Any) -> list[ImageExample]:
    """Return random examples with images for the whole run.

    `settings` has the lengths and the image sizes of measured rows. The random examples have the
    lengths and image sizes of a sample of these rows.
    """
    measured = [
        (length, [SimpleNamespace(**picture) for picture in pictures])
        for length, pictures in zip(settings.lengths, settings.images, strict=True)
    ]

    # The rows are a random sample of the measured rows. The sample always includes the longest row.
    measured.sort(key=lambda one: -one[0])
    num_others = min(RANDOM_ROWS, len(measured)) - 1
    others = random.Random(0).sample(measured[1:], num_others)  # noqa: S311
    chosen = [measured[0], *others]
    chosen *= max(1, RANDOM_ROWS // len(chosen))

    share = settings.trained_share
    examples: list[ImageExample] = [
        (
            random_example(length, pictures, config, None, share),
            random_values(pictures, config.model_type, None),
        )
        for length, pictures in chosen
    ]
    number: int = settings.examples
    return (examples * (number // len(examples) + 1))[:number]


def collate_image_examples(
    batch: list[ImageExample], config: Any, padded_lengths: Sequence[int], *, masked: bool
) -> Tensors:
    """Return a micro batch of these examples. `config` is the model's config."""
    text = rows.collate(
        [[example] for example, _ in batch], padded_lengths, packing=False, masked=masked
    )
    return add_token_types(text, config) | join_values([values for _, values in batch])


class ImageRows(Sequence[ImageExample]):
    """A dataset's examples with images. The processor converts a row each time the row is read."""

    def __init__(
        self, dataset: Path, processor: Any, *, split: str | None, loss_on: str | None, seq_len: int
    ) -> None:
        """Read the rows without their images. Raises BadDataset."""
        self._rows = list(read_rows(dataset, split))
        if not self._rows:
            raise BadDataset(f"{dataset} has no examples")

        self._folder = dataset if dataset.is_dir() else dataset.parent
        self._processor = processor
        self._seq_len = seq_len
        if processor.tokenizer.chat_template is None:
            processor.tokenizer.chat_template = processor.chat_template

        self._encoder = Encoder(processor.tokenizer, loss_on)
        tags = [
            token
            for text, token in processor.tokenizer.get_added_vocab().items()
            if TAGS.search(text)
        ]
        self._tags = torch.tensor([*tags, processor.image_token_id])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ImageExample:  # type: ignore[override]
        where, row = self._rows[index]
        try:
            example, values = self._encode(where, row)
        except BadDataset as error:
            sys.exit(f"train.py: error: {error}")
        return example, values

    def _encode(self, where: str, row: dict[str, Any]) -> ImageExample:
        form, named = parse_image_row(where, row)
        if isinstance(form, Plain):
            (tokens_alone,) = self._encoder.encode([(where, row)])
            return torch.tensor(tokens_alone, dtype=torch.int)[: self._seq_len], {}

        pictures = [self._open(where, one) for one in named]
        text, ranges = self._encoder.render(where, form)
        tokens: list[torch.Tensor] = []
        values: list[Tensors] = []
        num_tokens = 0
        images_end = 0  # the number of tokens up to the last image token
        for piece, is_trained in _split(text, ranges):
            number = piece.count(self._processor.image_token)
            if number > len(pictures):
                raise BadDataset(
                    f"{where}: its messages have places for more images than the example has"
                )
            try:
                ids, more = self._process(piece, pictures[:number])
            # The processor refuses, for example, an image of 1 x 1,000 pixels.
            except ValueError as error:
                raise BadDataset(f"{where}: the processor refuses the example: {error}") from None
            pictures = pictures[number:]
            is_image = self._find_image_tokens(ids)
            if number:
                images_end = num_tokens + int(is_image.nonzero().max()) + 1
            num_tokens += len(ids)
            tokens.append(torch.where(is_image, -1 - ids, ids) if is_trained else -1 - ids)
            values.append(more)

        if pictures:
            raise BadDataset(
                f"{where}: it has {len(pictures)} more images than its messages have places for"
            )
        if images_end > self._seq_len:
            raise BadDataset(
                f"{where}: its images end at token {images_end}, but examples are truncated to"
                f" {self._seq_len} tokens"
            )
        names = dict.fromkeys(name for one in values for name in one)
        joined = {name: torch.cat([one[name] for one in values if name in one]) for name in names}
        return torch.cat(tokens).int()[: self._seq_len], joined

    def _find_image_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask of image tokens: the placeholders, and the tags around and between them."""
        found = torch.isin(ids, self._tags)
        positions = found.nonzero().flatten().tolist()
        gaps = [pair for pair in pairwise(positions) if pair[1] - pair[0] > 1]
        for before, after in gaps:
            # In some vocabularies, the tags between the tiles of an image are ordinary tokens, and
            # a line break ends a row of tiles.
            is_break = not self._processor.tokenizer.decode(ids[before + 1 : after]).strip()
            if is_break or ids[after] == self._processor.image_token_id:
                found[before + 1 : after] = True
        return found

    def _process(self, text: str, pictures: list[Any]) -> tuple[torch.Tensor, Tensors]:
        """Return the tokens of a piece of text, and the values of the images in it."""
        if not pictures:
            encoded = self._processor.tokenizer(text, add_special_tokens=False)
            return torch.tensor(encoded["input_ids"], dtype=torch.long), {}

        made = self._processor(
            text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt"
        )
        # If the processor makes a pixel_attention_mask, the image values have an additional first
        # dimension for the rows of a batch.
        in_rows = "pixel_attention_mask" in made
        values = {name: made[name][0] if in_rows else made[name] for name in VALUES if name in made}
        return made["input_ids"][0], values

    def _open(self, where: str, named: Any) -> Any:
        try:
            return read_picture(named, self._folder)
        except BadPicture as error:
            raise BadDataset(f"{where}: its image cannot be read: {error}") from None


def _split(text: str, ranges: list[tuple[int, int]] | None) -> list[tuple[str, bool]]:
    """Split a text into pieces, and return for each piece whether it is trained on.

    Without `ranges`, the whole text is trained on.
    """
    if ranges is None:
        return [(text, True)]

    pieces: list[tuple[str, bool]] = []
    ends = 0
    for start, stop in ranges:
        pieces += [(text[ends:start], False), (text[start:stop], True)]
        ends = stop
    return [(piece, is_trained) for piece, is_trained in [*pieces, (text[ends:], False)] if piece]

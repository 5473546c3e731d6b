"""Rows with images: random ones, or those of a dataset, whose images are read when a micro batch needs them."""

import io
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
from .examples import Encoder, Plain, with_images
from .images import Tensors, join_values, random_example, random_values, with_token_types
from .reading import BadDataset, read_rows

Seen = tuple[torch.Tensor, Tensors]  # an example, as of `rows`, and the values of its images
RANDOM_ROWS = 16  # different ones; a longer run repeats them
VALUES = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
TAGS = re.compile("image|global-img|vision|row_[0-9]+_col_[0-9]+")  # in the names of tokens that stand for images


def random_seen(settings: Any, config: Any) -> list[Seen]:
    """As many examples as the run has, of random tokens and images, with the lengths and sizes that were measured."""
    measured = [
        (length, [SimpleNamespace(**picture) for picture in pictures])
        for length, pictures in zip(settings.lengths, settings.images, strict=True)
    ]
    # The longest comes first: it is always there.
    measured.sort(key=lambda one: -one[0])
    chosen = [measured[0], *random.Random(0).sample(measured[1:], min(RANDOM_ROWS, len(measured)) - 1)]  # noqa: S311
    chosen *= max(1, RANDOM_ROWS // len(chosen))
    made: list[Seen] = [
        (
            random_example(length, pictures, config, None, settings.trained_share),
            random_values(pictures, config.model_type, None),
        )
        for length, pictures in chosen
    ]
    number: int = settings.examples
    return (made * (number // len(made) + 1))[:number]


def collate_seen(batch: list[Seen], config: Any, padded_lengths: Sequence[int], *, masked: bool) -> Tensors:
    """A micro batch of these examples. `config` is the model's."""
    text = rows.collate([[example] for example, _ in batch], padded_lengths, packing=False, masked=masked)
    return with_token_types(text, config) | join_values([values for _, values in batch])


class SeenRows(Sequence[Seen]):
    """The examples of a dataset. A processor makes each anew whenever it is asked for."""

    def __init__(self, dataset: Path, processor: Any, *, split: str | None, loss_on: str | None, seq_len: int) -> None:
        """Read the rows, and no image. Raises BadDataset."""
        self._rows = list(read_rows(dataset, split))
        if not self._rows:
            raise BadDataset(f"{dataset} has no rows")
        self._folder = dataset if dataset.is_dir() else dataset.parent
        self._processor, self._seq_len = processor, seq_len
        if processor.tokenizer.chat_template is None:
            processor.tokenizer.chat_template = processor.chat_template
        self._encoder = Encoder(processor.tokenizer, loss_on)
        tags = [token for text, token in processor.tokenizer.get_added_vocab().items() if TAGS.search(text)]
        self._tags = torch.tensor([*tags, processor.image_token_id])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Seen:  # type: ignore[override]
        where, row = self._rows[index]
        try:
            example, values = self._encoded(where, row)
        except BadDataset as error:
            sys.exit(f"train.py: error: {error}")
        return example, values

    def _encoded(self, where: str, row: dict[str, Any]) -> Seen:
        form, named = with_images(where, row)
        if isinstance(form, Plain):
            (alone,) = self._encoder.encode([(where, row)])
            return torch.tensor(alone, dtype=torch.int)[: self._seq_len], {}
        pictures = [self._opened(where, one) for one in named]
        text, ranges = self._encoder._rendered(form)
        tokens: list[torch.Tensor] = []
        values: list[Tensors] = []
        end = read = 0  # tokens up to the last one of an image, and of all pieces
        for piece, is_trained in _pieces(text, ranges):
            number = piece.count(self._processor.image_token)
            if number > len(pictures):
                raise BadDataset(f"{where}: its messages have places for more images than it has")
            ids, more = self._processed(piece, pictures[:number])
            pictures = pictures[number:]
            of_images = self._of_images(ids)
            if number:
                end = read + int(of_images.nonzero().max()) + 1
            read += len(ids)
            tokens.append(torch.where(of_images, -1 - ids, ids) if is_trained else -1 - ids)
            values.append(more)
        if pictures:
            raise BadDataset(f"{where}: it has {len(pictures)} more images than places for them in its messages")
        if end > self._seq_len:
            raise BadDataset(f"{where}: its images end at token {end}, and rows are cut at {self._seq_len}")
        joined = {name: torch.cat([one[name] for one in values if name in one]) for one in values for name in one}
        return torch.cat(tokens).int()[: self._seq_len], joined

    def _of_images(self, ids: torch.Tensor) -> torch.Tensor:
        """Which of these tokens are an image's: its placeholders, and the tags around and between them."""
        found = torch.isin(ids, self._tags)
        places = found.nonzero().flatten().tolist()
        for before, after in (pair for pair in pairwise(places) if pair[1] - pair[0] > 1):
            # The tags of tiles are text in some vocabularies, and a line break ends a row of tiles.
            is_break = not self._processor.tokenizer.decode(ids[before + 1 : after]).strip()
            if is_break or ids[after] == self._processor.image_token_id:
                found[before + 1 : after] = True
        return found

    def _processed(self, text: str, pictures: list[Any]) -> tuple[torch.Tensor, Tensors]:
        """The tokens of a piece of text, and the values of the images that it has places for."""
        if not pictures:
            encoded = self._processor.tokenizer(text, add_special_tokens=False)
            return torch.tensor(encoded["input_ids"], dtype=torch.long), {}
        made = self._processor(text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt")
        in_rows = "pixel_attention_mask" in made  # one more dimension, for the rows of a micro batch
        values = {name: made[name][0] if in_rows else made[name] for name in VALUES if name in made}
        return made["input_ids"][0], values

    def _opened(self, where: str, named: Any) -> Any:
        from PIL import Image

        content = named.get("bytes") if isinstance(named, dict) else None
        path = named.get("path") if isinstance(named, dict) else named
        try:
            source = io.BytesIO(content) if content else self._folder / str(path)
            return Image.open(source).convert("RGB")
        except (OSError, TypeError) as error:
            raise BadDataset(f"{where}: its image cannot be read: {error}") from None


def _pieces(text: str, ranges: list[tuple[int, int]] | None) -> list[tuple[str, bool]]:
    """A text in pieces, each trained on or only read. Without `ranges` all of it is trained on."""
    if ranges is None:
        return [(text, True)]
    ends, pieces = 0, list[tuple[str, bool]]()
    for start, stop in ranges:
        pieces += [(text[ends:start], False), (text[start:stop], True)]
        ends = stop
    return [(piece, is_trained) for piece, is_trained in [*pieces, (text[ends:], False)] if piece]

# -*- coding: utf-8 -*-
"""Puts image tokens into rows, and makes the image tensors of a micro batch.

In this module, a picture is the description of an image in a row. A picture has the number of the
image's placeholders (`tokens`), the number of tokens around them (`beside`), the shape of the
image's values (`pixels`), and for some models the `grid` of patches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from . import rows

Tensors = dict[str, torch.Tensor]

# The argument that marks the image tokens of a row, by model type. Models of other types take no
# argument that marks image tokens.
TOKEN_TYPES = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}


def count_tokens(pictures: Sequence[Any]) -> int:
    """Return the number of tokens that pictures take in a row."""
    return sum(picture.tokens + picture.beside for picture in pictures)


def random_example(
    length: int,
    pictures: Sequence[Any],
    config: Any,
    generator: torch.Generator | None,
    trained_share: float,
) -> torch.Tensor:
    """Return an example of `length` random tokens that begins with pictures.

    The tokens of pictures are not trained on. `config` is the model's config. Raises ValueError if
    the pictures leave no token to train on.
    """
    taken = count_tokens(pictures)
    if taken + 2 > length:
        raise ValueError(
            f"the images of an example take {taken} tokens, but the example has {length}"
        )

    vocab_size = config.get_text_config().vocab_size
    image = config.image_token_id
    words = torch.randint(0, vocab_size, (length,), generator=generator)
    for placeholder in (image, getattr(config, "video_token_id", image)):
        # The model raises an error for a placeholder without an image.
        words[words == placeholder] = 0

    begin = 0
    for picture in pictures:
        first = begin + picture.beside // 2
        words[first : first + picture.tokens] = image
        begin += picture.tokens + picture.beside
    return rows.mask_prompt(words, min(trained_share, 1 - taken / length))


def random_values(
    pictures: Sequence[Any], model_type: str, generator: torch.Generator | None
) -> Tensors:
    """Return random values in fp32 for a row's pictures. Masks hide no pixel, as in a real run."""
    if not pictures:
        return {}
    values = torch.cat([torch.randn(picture.pixels, generator=generator) for picture in pictures])
    made = {"pixel_values": values}
    if pictures[0].grid is not None:
        made["image_grid_thw"] = torch.tensor([picture.grid for picture in pictures])
    elif model_type not in TOKEN_TYPES:
        made["pixel_attention_mask"] = torch.ones(
            values.shape[0], *values.shape[2:], dtype=torch.long
        )
    return made


def add_token_types(text: Tensors, config: Any) -> Tensors:
    """Return the batch, with a tensor that marks image tokens if the model needs one."""
    name = TOKEN_TYPES.get(config.model_type)
    return (
        text if name is None else text | {name: (text["input_ids"] == config.image_token_id).long()}
    )


def join_values(each: Sequence[Tensors]) -> Tensors:
    """Join the image tensors of all rows in a micro batch.

    Patches, their grids and whole images are concatenated. Tiles stay grouped by row, and each row
    is padded with empty tiles to the same number of tiles.
    """
    joined: Tensors = {}
    for name in dict.fromkeys(name for values in each for name in values):
        parts = [values[name] for values in each if name in values]
        if any("pixel_attention_mask" in values for values in each):
            empty = parts[0].new_zeros(0, *parts[0].shape[1:])
            joined[name] = pad_sequence(
                [values.get(name, empty) for values in each], batch_first=True
            )
        else:
            joined[name] = torch.cat(parts)
    return joined


def join_rows(batch: list[Tensors]) -> Tensors:
    """Join rows into a micro batch: stack the tensors of tokens, and join the image tensors."""
    pictures = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    text = {
        name: torch.stack([row[name] for row in batch]) for name in batch[0] if name not in pictures
    }
    return text | join_values(
        [{name: row[name] for name in pictures if name in row} for row in batch]
    )

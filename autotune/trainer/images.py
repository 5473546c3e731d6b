"""Images in rows: where their placeholders stand, and what a micro batch gives the model beside the tokens.

A picture says what becomes of an image: its placeholders (`tokens`), the tokens around them (`beside`), the
shape of its values (`pixels`), and for some models the `grid` of its patches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from . import rows

Tensors = dict[str, torch.Tensor]

# The argument that says which tokens of a row are an image's, by model type. Others do not ask.
TOKEN_TYPES = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
# Paths of the vision tower and of what projects its features into the language model.
TOWERS = ("visual", "vision_tower", "vision_model")
VISION_PATHS = rf"(.*\.)?({'|'.join(TOWERS)}|multi_modal_projector|connector)(\..*)?"


def length_of(pictures: Sequence[Any]) -> int:
    """Tokens that pictures take of a row."""
    return sum(picture.tokens + picture.beside for picture in pictures)


def random_example(
    length: int, pictures: Sequence[Any], config: Any, generator: torch.Generator | None, trained_share: float
) -> torch.Tensor:
    """An example of so many random tokens that begins with pictures. Those of pictures are not trained on.

    `config` is the model's. Raises ValueError where they leave no token to train on.
    """
    taken = length_of(pictures)
    if taken + 2 > length:
        raise ValueError(f"the images of a row take {taken} tokens, and it has {length}")
    vocab_size, image = config.get_text_config().vocab_size, config.image_token_id
    words = torch.randint(0, vocab_size, (length,), generator=generator)
    for placeholder in (image, getattr(config, "video_token_id", image)):
        words[words == placeholder] = 0  # one without an image would be an error
    begin = 0
    for picture in pictures:
        first = begin + picture.beside // 2
        words[first : first + picture.tokens] = image
        begin += picture.tokens + picture.beside
    return rows.with_prompt(words, min(trained_share, 1 - taken / length))


def random_values(pictures: Sequence[Any], model_type: str, generator: torch.Generator | None) -> Tensors:
    """The values of the pictures of a row, as they are in a real run: fp32, and with masks that leave nothing out."""
    if not pictures:
        return {}
    values = torch.cat([torch.randn(picture.pixels, generator=generator) for picture in pictures])
    made = {"pixel_values": values}
    if pictures[0].grid is not None:
        made["image_grid_thw"] = torch.tensor([picture.grid for picture in pictures])
    elif model_type not in TOKEN_TYPES:
        made["pixel_attention_mask"] = torch.ones(values.shape[0], *values.shape[2:], dtype=torch.long)
    return made


def with_token_types(text: Tensors, config: Any) -> Tensors:
    """A batch of tokens (rows x length) with what says which of them are an image's, if the model asks for it."""
    name = TOKEN_TYPES.get(config.model_type)
    return text if name is None else text | {name: (text["input_ids"] == config.image_token_id).long()}


def join_values(each: Sequence[Tensors]) -> Tensors:
    """The values of the pictures of all rows in a micro batch.

    Patches, their grids and whole images follow each other. Tiles stay in their rows, which are filled with empty ones.
    """
    joined: Tensors = {}
    for name in dict.fromkeys(name for values in each for name in values):
        parts = [values[name] for values in each if name in values]
        if any("pixel_attention_mask" in values for values in each):
            empty = parts[0].new_zeros(0, *parts[0].shape[1:])
            joined[name] = pad_sequence([values.get(name, empty) for values in each], batch_first=True)
        else:
            joined[name] = torch.cat(parts)
    return joined


def join_rows(batch: list[Tensors]) -> Tensors:
    """A micro batch of rows that each have their tensors: those of tokens are stacked, values of pictures joined."""
    pictures = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    text = {name: torch.stack([row[name] for row in batch]) for name in batch[0] if name not in pictures}
    return text | join_values([{name: row[name] for name in pictures if name in row} for row in batch])

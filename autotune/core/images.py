"""Computes the number of tokens and the shape of the pixel values that a model gets for an image.

The rules follow transformers' image processors, with the settings that each model's authors
published. Only the image's size is needed; no image is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.errors import UsageError

# The smallest and the largest number of pixels of a scaled image, from Qwen2.5-VL's
# preprocessor_config.json.
QWEN_PIXELS = (56 * 56, 16384 * 28 * 28)
TILES_A_SIDE = 4  # the number of tiles along an image's longer side, for SmolVLM and Idefics 3
MOST_SIDE = 4096  # the largest side in pixels of a scaled image that is cut into tiles
MOST_RATIO = 200  # the largest accepted ratio of an image's sides, for Qwen2.5-VL
# A tag such as <row_1_col_1> has this number of tokens if it is tokenised as text, according to
# SmolVLM's authors.
TEXT_TAG = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image in the form that a model gets.

    In a row of tokens, the image takes `tokens` placeholder tokens, and `beside` other tokens such
    as markers. `pixels` is the shape of the pixel values: (images or tiles, channels, height,
    width). For a model that cuts images into patches, `pixels` is (patches, values per patch), and
    `grid` is the number of patches: (frames, rows, columns).
    """

    tokens: int
    beside: int
    pixels: tuple[int, ...]
    grid: tuple[int, int, int] | None = None

    @property
    def length(self) -> int:
        """The number of tokens that the image takes in a row: placeholders and other tokens."""
        return self.tokens + self.beside


def sees_images(config: Mapping[str, Any]) -> bool:
    """Return whether this module has image rules for a model with this transformers config."""
    return str(config.get("model_type")) in _RULES


def parse_size(text: str) -> tuple[int, int]:
    """Convert '896x672' to (896, 672), width and height in pixels.

    Raises UsageError for any other text.
    """
    width, _, height = text.lower().partition("x")
    is_number = width.isdecimal() and height.isdecimal()
    if not (is_number and 0 < int(width) < 10**5 and 0 < int(height) < 10**5):
        raise UsageError(
            f"the image size {text!r} is invalid",
            remedy="give width and height in pixels, such as 896x672",
        )
    return int(width), int(height)


def picture_of(
    config: Mapping[str, Any], width: int, height: int, processor: Mapping[str, Any] | None = None
) -> Picture:
    """Return an image of this size, in the form that a model with this transformers config gets.

    `processor` is the content of the model's preprocessor_config.json; by default, the published
    values apply. Raises UsageError for a model of another family, and for an image that the
    processor refuses.
    """
    if not sees_images(config):
        raise UsageError(
            f"images of {config.get('model_type')} models are not supported",
            remedy=f"use a model of type {', '.join(IMAGE_FAMILIES)}",
        )
    try:
        return _RULES[config["model_type"]](config, width, height, processor or {})
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UsageError(
            f"the model's config does not say how images are computed: {error!r}",
            remedy="pass config.json and preprocessor_config.json as they were published",
        ) from None


def _patches(
    config: Mapping[str, Any], width: int, height: int, processor: Mapping[str, Any]
) -> Picture:
    """Cut an image into patches, for Qwen2.5-VL.

    The image is scaled so that each side is a multiple of the side of a merged patch, and the
    number of pixels is within the limits.
    """
    vision = config["vision_config"]
    patch = vision.get("patch_size", 14)
    merge = vision.get("spatial_merge_size", 2)
    frames = 2
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or QWEN_PIXELS[0]
    most = processor.get("max_pixels") or size.get("longest_edge") or QWEN_PIXELS[1]
    if max(width, height) > MOST_RATIO * min(width, height):
        raise UsageError(
            f"an image of {width}x{height} is refused by the processor",
            remedy=f"the longer side may be at most {MOST_RATIO} times the shorter side",
        )

    side = patch * merge
    rows = round(height / side)
    columns = round(width / side)
    if rows * columns * side**2 > most:
        scale = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / scale / side))
        columns = max(1, math.floor(width / scale / side))
    elif rows * columns * side**2 < least:
        scale = math.sqrt(least / (height * width))
        rows = math.ceil(height * scale / side)
        columns = math.ceil(width * scale / side)

    values = vision.get("in_channels", 3) * vision.get("temporal_patch_size", frames) * patch**2
    grid = (1, rows * merge, columns * merge)
    return Picture(tokens=rows * columns, beside=2, pixels=(math.prod(grid), values), grid=grid)


def _square(
    config: Mapping[str, Any], width: int, height: int, processor: Mapping[str, Any]
) -> Picture:
    """Scale an image to a square of fixed size, for Gemma 3.

    Four more tokens surround the image's tokens: a line break and a marker before them, and a
    marker and a line break after them.
    """
    if processor.get("do_pan_and_scan"):
        raise UsageError(
            "do_pan_and_scan is not supported", remedy="set it to false in preprocessor_config.json"
        )
    vision = config["vision_config"]
    side = vision["image_size"]
    pixels = (1, vision.get("num_channels", 3), side, side)
    return Picture(tokens=config.get("mm_tokens_per_image", 256), beside=4, pixels=pixels)


def _tiles(
    config: Mapping[str, Any], width: int, height: int, processor: Mapping[str, Any]
) -> Picture:
    """Scale an image and cut it into rows of square tiles, for SmolVLM and Idefics 3.

    One more tile at the end shows the whole image.
    """
    vision = config["vision_config"]
    tile = (processor.get("max_image_size") or {}).get("longest_edge") or vision["image_size"]
    longest = min(
        (processor.get("size") or {}).get("longest_edge") or TILES_A_SIDE * tile, MOST_SIDE
    )

    ratio = width / height
    if width >= height:
        wide = longest
        high = _round_up_to_even(int(longest / ratio))
    else:
        wide = _round_up_to_even(int(longest * ratio))
        high = longest

    rows = math.ceil(max(high, 1) / tile)
    columns = math.ceil(max(wide, 1) / tile)
    if (rows, columns) == (1, 1) or not processor.get("do_image_splitting", True):
        rows = 0
        columns = 0
    each = (tile // vision["patch_size"]) ** 2 // config.get("scale_factor", 2) ** 2
    number = rows * columns + 1

    # Some vocabularies have a token for each tile's tag, with an id above the image token's. In
    # other vocabularies, tags are tokenised as text.
    text = config.get("text_config") or {}
    has_tags = (text.get("vocab_size") or 0) - config.get("image_token_id", 0) > 2
    tag = 1 if has_tags else TEXT_TAG
    # A marker and a tag precede each tile, a line break follows each row of tiles, and a marker
    # follows the image.
    beside = number * (1 + tag) + rows + 1
    pixels = (number, vision.get("num_channels", 3), tile, tile)
    return Picture(tokens=number * each, beside=beside, pixels=pixels)


def _round_up_to_even(side: int) -> int:
    return side + side % 2


_RULES = {"qwen2_5_vl": _patches, "gemma3": _square, "idefics3": _tiles, "smolvlm": _tiles}
IMAGE_FAMILIES = tuple(_RULES)  # the model types with image rules

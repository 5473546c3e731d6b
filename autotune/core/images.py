"""What a model's processor makes of an image of some size: pixels for its vision tower, and tokens in a row.

The rules are those of transformers' processors with the values that are published with the models. No image is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.errors import UsageError

QWEN_PIXELS = (
    56 * 56,
    16384 * 28 * 28,
)  # the fewest and the most of an image, in Qwen2.5-VL's preprocessor_config.json
TILES_A_SIDE = 4  # of the longest edge, for SmolVLM and Idefics 3
MOST_SIDE = 4096  # pixels to which an image is scaled at most before it is cut into tiles
MOST_RATIO = 200  # of the sides of an image, for Qwen2.5-VL
TEXT_TAG = 7  # tokens of a tag such as <row_1_col_1> where it is text, by the makers of SmolVLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image as a model gets it.

    In a row `tokens` placeholders stand for it, with `beside` tokens around and between them. `pixels` is the shape of
    its values: (images or tiles, channels, height, width); or (patches, values of a patch) where the model also gets
    their `grid`, (frames, rows, columns) of patches.
    """

    tokens: int
    beside: int
    pixels: tuple[int, ...]
    grid: tuple[int, int, int] | None = None

    @property
    def length(self) -> int:
        """Tokens that it takes of a row."""
        return self.tokens + self.beside


def sees_images(config: Mapping[str, Any]) -> bool:
    """Whether images can be computed for a model with this transformers config, as plain data."""
    return str(config.get("model_type")) in _RULES


def parse_size(text: str) -> tuple[int, int]:
    """'896x672' -> (896, 672): width and height in pixels. Raises UsageError for any other text."""
    width, _, height = text.lower().partition("x")
    if not (
        width.isdecimal()
        and height.isdecimal()
        and 0 < int(width) < 10**5
        and 0 < int(height) < 10**5
    ):
        raise UsageError(
            f"an image of {text!r} is not possible",
            remedy="give width and height in pixels, as 896x672",
        )
    return int(width), int(height)


def picture_of(
    config: Mapping[str, Any], width: int, height: int, processor: Mapping[str, Any] | None = None
) -> Picture:
    """An image of this size for the model with this transformers config, as plain data.

    `processor` is the content of its preprocessor_config.json; without one, the published values are taken. Raises
    UsageError for a model of another family, and for an image that its processor refuses.
    """
    if not sees_images(config):
        raise UsageError(
            f"images of {config.get('model_type')} models cannot be computed",
            remedy=f"take {', '.join(_RULES)}",
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
    """Qwen2.5-VL: patches of the image, scaled to a multiple of merged patches and between two numbers of pixels."""
    vision = config["vision_config"]
    patch, merge, frames = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2), 2
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or QWEN_PIXELS[0]
    most = processor.get("max_pixels") or size.get("longest_edge") or QWEN_PIXELS[1]
    if max(width, height) > MOST_RATIO * min(width, height):
        raise UsageError(
            f"an image of {width}x{height} is refused by the processor",
            remedy=f"its longer side may be {MOST_RATIO} times the shorter one",
        )
    side = patch * merge
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (
            max(1, math.floor(height / scale / side)),
            max(1, math.floor(width / scale / side)),
        )
    elif rows * columns * side**2 < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
    values = vision.get("in_channels", 3) * vision.get("temporal_patch_size", frames) * patch**2
    grid = (1, rows * merge, columns * merge)
    return Picture(tokens=rows * columns, beside=2, pixels=(math.prod(grid), values), grid=grid)


def _square(
    config: Mapping[str, Any], width: int, height: int, processor: Mapping[str, Any]
) -> Picture:
    """Gemma 3: every image is scaled to one square, with a line break and a mark at either end."""
    if processor.get("do_pan_and_scan"):
        raise UsageError(
            "do_pan_and_scan is not computed", remedy="set it to false in preprocessor_config.json"
        )
    vision = config["vision_config"]
    side = vision["image_size"]
    pixels = (1, vision.get("num_channels", 3), side, side)
    return Picture(tokens=config.get("mm_tokens_per_image", 256), beside=4, pixels=pixels)


def _tiles(
    config: Mapping[str, Any], width: int, height: int, processor: Mapping[str, Any]
) -> Picture:
    """SmolVLM and Idefics 3: square tiles of the scaled image, row by row, and after them all of it in one more."""
    vision = config["vision_config"]
    tile = (processor.get("max_image_size") or {}).get("longest_edge") or vision["image_size"]
    longest = min(
        (processor.get("size") or {}).get("longest_edge") or TILES_A_SIDE * tile, MOST_SIDE
    )
    ratio = width / height
    if width >= height:
        wide, high = longest, _even(int(longest / ratio))
    else:
        wide, high = _even(int(longest * ratio)), longest
    rows, columns = math.ceil(max(high, 1) / tile), math.ceil(max(wide, 1) / tile)
    if (rows, columns) == (1, 1) or not processor.get("do_image_splitting", True):
        rows = columns = 0
    each = (tile // vision["patch_size"]) ** 2 // config.get("scale_factor", 2) ** 2
    number = rows * columns + 1
    # Vocabularies with the tags of tiles as tokens go on behind the image's; in others the tags are text.
    text = config.get("text_config") or {}
    has_tags = (text.get("vocab_size") or 0) - config.get("image_token_id", 0) > 2
    tag = 1 if has_tags else TEXT_TAG
    beside = (
        number * (1 + tag) + rows + 1
    )  # a mark and a tag before each, a line break after a row, a mark at the end
    pixels = (number, vision.get("num_channels", 3), tile, tile)
    return Picture(tokens=number * each, beside=beside, pixels=pixels)


def _even(side: int) -> int:
    return side + side % 2


_RULES = {"qwen2_5_vl": _patches, "gemma3": _square, "idefics3": _tiles, "smolvlm": _tiles}

"""What processors make of images: against transformers' own, and worked examples by hand."""

import importlib
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.errors import UsageError
from autotune.core.images import Picture, parse_size, picture_of

QWEN, GEMMA, SMOL = (
    resolve_model(name).config for name in ("qwen2.5-vl-3b", "gemma-3-4b", "smolvlm")
)
SIZES = [
    *itertools.product((30, 224, 383, 384, 385, 768, 1000, 1536, 3000), repeat=2),
    (28, 5000),
    (4999, 3001),
    (1, 1),
]


def processing(model_type: str, file: str) -> Any:
    """A module of transformers' image processors, which need Pillow."""
    return importlib.import_module(f"transformers.models.{model_type}.{file}")


def test_images_by_hand() -> None:
    """896x672 is 64x48 patches; and for SmolVLM 1536x1152, which is 4x3 tiles and one of the whole
    image.
    """
    patches = Picture(tokens=768, beside=2, pixels=(3072, 1176), grid=(1, 48, 64))
    assert picture_of(QWEN, 896, 672) == patches and patches.length == 770
    assert picture_of(GEMMA, 896, 672) == Picture(tokens=256, beside=4, pixels=(1, 3, 896, 896))
    tiles = picture_of(SMOL, 896, 672)
    assert (tiles.tokens, tiles.pixels, tiles.grid) == (13 * 81, (13, 3, 384, 384), None)
    # a mark and the text of a tag for each, three line breaks, a last mark
    assert tiles.beside == 13 * 8 + 3 + 1
    one = picture_of(SMOL, 896, 672, {"do_image_splitting": False})
    assert (one.tokens, one.pixels[0]) == (81, 1)
    tall = picture_of(SMOL, 672, 896)
    assert tall.tokens == tiles.tokens and tall.beside == tiles.beside + 1


def test_what_a_model_has_beside_its_config_counts() -> None:
    small = picture_of(QWEN, 896, 672, {"min_pixels": 3136, "max_pixels": 28 * 28 * 100})
    assert small.tokens == 88  # 11x8
    assert (
        picture_of(QWEN, 896, 672, {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 100}})
        == small
    )
    assert picture_of(SMOL, 896, 672, {"size": {"longest_edge": 768}}).pixels[0] == 5


def test_patches_are_those_of_transformers() -> None:
    module = processing("qwen2_vl", "image_processing_pil_qwen2_vl")
    published, small = (
        {"min_pixels": 3136, "max_pixels": 12845056},
        {"min_pixels": 100_000, "max_pixels": 300_000},
    )
    for (width, height), limits in itertools.product(SIZES, (published, small)):
        high, wide = module.smart_resize(height, width, 28, **limits)
        assert picture_of(QWEN, width, height, limits).grid == (1, high // 14, wide // 14)


def test_tiles_are_those_of_transformers() -> None:
    """`_get_num_multimodal_tokens` counts a tag as one token, which it is in some vocabularies."""
    module = processing("idefics3", "image_processing_pil_idefics3")
    processor, tagged = (
        processing("idefics3", "processing_idefics3").Idefics3Processor,
        SMOL | {"image_token_id": 49100},
    )
    itself = SimpleNamespace(
        do_image_splitting=True, max_image_size={"longest_edge": 384}, size={"longest_edge": 1536}
    )
    itself.get_number_of_image_patches = partial(
        module.Idefics3ImageProcessorPil.get_number_of_image_patches, itself
    )
    whole = SimpleNamespace(
        image_processor=itself,
        image_seq_len=81,
        tokenizer=lambda text, add_special_tokens: {"input_ids": [1]},
        _merge_kwargs=lambda **_: {"images_kwargs": {}},
    )
    for width, height in SIZES:
        counted = processor._get_num_multimodal_tokens(whole, image_sizes=[(height, width)])
        picture = picture_of(tagged, width, height)
        assert picture.pixels[0] == max(counted["num_image_patches"][0], 1)
        assert picture.length == counted["num_image_tokens"][0]
        assert picture.tokens == picture_of(SMOL, width, height).tokens == 81 * picture.pixels[0]


@pytest.mark.parametrize(
    "text", ["896", "896x", "x672", "0x9", "896x672x3", "-1x5", "1e3x5", "", "100000x1"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is invalid"):
        parse_size(text)


def test_a_size_is_width_and_height() -> None:
    assert parse_size("896X672") == (896, 672)


def test_what_cannot_be_computed_is_refused() -> None:
    for config, width, processor, message in (
        (resolve_model("demo-3m").config, 9, None, "images of llama models are not supported"),
        (QWEN, 10**4, None, "is refused by the processor"),
        (GEMMA, 9, {"do_pan_and_scan": True}, "do_pan_and_scan is not supported"),
        (
            {"model_type": "gemma3", "vision_config": {}},
            9,
            None,
            "does not say how images are computed",
        ),
        (
            {"model_type": "idefics3", "vision_config": [1]},
            9,
            None,
            "does not say how images are computed",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            picture_of(config, width, 9, processor)

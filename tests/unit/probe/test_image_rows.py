"""Rows of a dataset with images, through transformers' own processor where Pillow is installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from autotune.core.images import picture_of
from autotune.probe.runtime.examples import with_parts
from autotune.probe.runtime.image_rows import SeenRows, _pieces, collate_seen
from autotune.probe.runtime.model_builder import config_of
from autotune.probe.runtime.reading import BadDataset
from autotune.problem.dataset import image_lengths
from tests.helpers.seeing import seeing
from tests.unit.problem.test_images import png

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "what ?"}
TEMPLATE = """{% for message in messages %}{{ message['role'] }} : {% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %} <end_of_utterance> \
{% endfor %}\
{% if add_generation_prompt %}assistant : {% endif %}"""


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_each_tool_has_its_way_to_say_where_images_are() -> None:
    """TRL takes parts, or puts images first; LLaMA-Factory has a placeholder in the text."""
    assert with_parts([message([IMAGE | {"image": "x"}, TEXT])], 1)[0]["content"] == [IMAGE, TEXT]
    assert with_parts([message("a <image> b<image>")], 2)[0]["content"] == [
        {"type": "text", "text": "a "},
        IMAGE,
        {"type": "text", "text": " b"},
        IMAGE,
    ]
    first = with_parts([message("s", "system"), message("what ?"), message("that", "assistant")], 2)
    assert [part["type"] for one in first for part in one["content"]] == ["text", "image", "image", "text", "text"]
    assert with_parts([message("what ?")], 0)[0]["content"] == [TEXT]


def test_pieces_are_read_or_trained_on() -> None:
    assert _pieces("abcdef", None) == [("abcdef", True)]
    assert _pieces("abcdef", [(1, 2), (4, 6)]) == [("a", False), ("b", True), ("cd", False), ("ef", True)]
    assert _pieces("abc", [(0, 2)]) == [("ab", True), ("c", False)]


def processor() -> Any:
    """SmolVLM's processor with a tokenizer of a few words, for tiles of 56 pixels of which each takes 4 tokens."""
    pytest.importorskip("PIL")
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tags = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tags += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = ["<pad>", "user", "assistant", ":", "what", "?", "black", "square", "\n", *tags]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end_of_utterance>")
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    images = Idefics3ImageProcessorPil(size={"longest_edge": 224}, max_image_size={"longest_edge": 56})
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


def dataset(folder: Path, **row: Any) -> Path:
    (folder / "a.png").write_bytes(png(20, 10))
    talk = [message("<image>what ?"), message("black square", "assistant")]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": talk, "images": ["a.png"]} | row))
    return folder / "rows.jsonl"


def test_a_row_of_a_dataset_has_the_tokens_and_values_that_were_computed(tmp_path: Path) -> None:
    made = processor()
    rows = SeenRows(dataset(tmp_path), made, split=None, loss_on=None, seq_len=200)
    example, values = rows[0]
    config = seeing("idefics3")
    image = made.tokenizer.convert_tokens_to_ids("<image>")
    picture = picture_of(config, 20, 10)
    assert (example == -1 - image).sum() == picture.tokens and values["pixel_values"].shape == picture.pixels
    assert values["pixel_attention_mask"].shape == (9, 56, 56)
    trained = made.tokenizer.convert_ids_to_tokens(example[example >= 0].tolist())
    assert trained == ["black", "square", "<end_of_utterance>"]
    made.tokenizer.chat_template = made.chat_template
    made.tokenizer.save_pretrained(tmp_path / "tokenizer")
    lengths, _ = image_lengths(
        tmp_path / "rows.jsonl", str(tmp_path / "tokenizer"), lambda width, height: picture_of(config, width, height)
    )
    assert lengths.longest == len(example) and lengths.trained_share == pytest.approx(3 / len(example))
    batch = collate_seen([rows[0], rows[0]], config_of(config), [], masked=True)
    assert batch["pixel_values"].shape == (2, *picture.pixels) and batch["labels"].max() < image + 60
    assert torch.equal(batch["labels"][0] >= 0, torch.cat([example, example[:0]]) >= 0)


@pytest.mark.parametrize(
    ("row", "seq_len", "message"),
    [
        ({"images": ["a.png", "a.png"]}, 200, "1 more images than places"),
        ({"images": []}, 200, "places for more images"),
        ({"images": ["b.png"]}, 200, "its image cannot be read"),
        ({"messages": None, "text": "x"}, 200, "needs messages"),
        ({}, 20, "rows are cut at 20"),
    ],
)
def test_a_row_that_cannot_be_trained_on_ends_the_run(
    tmp_path: Path, row: dict[str, Any], seq_len: int, message: str
) -> None:
    rows = SeenRows(dataset(tmp_path, **row), processor(), split=None, loss_on=None, seq_len=seq_len)
    with pytest.raises(SystemExit, match=message):
        rows[0]


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(BadDataset, match="has no rows"):
        SeenRows(tmp_path / "rows.jsonl", processor(), split=None, loss_on=None, seq_len=9)

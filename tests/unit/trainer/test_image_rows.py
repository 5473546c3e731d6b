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
from autotune.problem.dataset import image_lengths
from autotune.trainer.forms import split_parts
from autotune.trainer.image_rows import ImageRows, _split, collate_image_examples
from autotune.trainer.model_builder import config_of
from autotune.trainer.reading import BadDataset
from tests.helpers.seeing import seeing
from tests.unit.problem.test_images import png

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "what ?"}
TEMPLATE = """{% for message in messages %}{{ message['role'] }} : \
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %} \
<end_of_utterance> \
{% endfor %}\
{% if add_generation_prompt %}assistant : {% endif %}"""


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_each_tool_has_its_way_to_say_where_images_are() -> None:
    """TRL takes parts, or puts images first; LLaMA-Factory has a placeholder in the text."""
    assert split_parts([message([IMAGE | {"image": "x"}, TEXT])], 1)[0]["content"] == [IMAGE, TEXT]
    assert split_parts([message("a <image> b<image>")], 2)[0]["content"] == [
        {"type": "text", "text": "a "},
        IMAGE,
        {"type": "text", "text": " b"},
        IMAGE,
    ]
    first = split_parts(
        [message("s", "system"), message("what ?"), message("that", "assistant")], 2
    )
    assert [part["type"] for one in first for part in one["content"]] == [
        "text",
        "image",
        "image",
        "text",
        "text",
    ]
    assert split_parts([message("what ?")], 0)[0]["content"] == [TEXT]


def test_pieces_are_read_or_trained_on() -> None:
    assert _split("abcdef", None) == [("abcdef", True)]
    assert _split("abcdef", [(1, 2), (4, 6)]) == [
        ("a", False),
        ("b", True),
        ("cd", False),
        ("ef", True),
    ]
    assert _split("abc", [(0, 2)]) == [("ab", True), ("c", False)]


def processor() -> Any:
    """SmolVLM's processor with a tokenizer of a few words, for tiles of 56 pixels of which each
    takes 4 tokens.
    """
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tags = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tags += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = ["<pad>", "user", "assistant", ":", "what", "?", "black", "square", "\n", "\n\n", *tags]
    made = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
    )
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end_of_utterance>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 224}, max_image_size={"longest_edge": 56}
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)


def dataset(folder: Path, **row: Any) -> Path:
    (folder / "a.png").write_bytes(png(20, 10))
    talk = [message("<image>what ?"), message("black square", "assistant")]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": talk, "images": ["a.png"]} | row))
    return folder / "rows.jsonl"


def test_a_row_of_a_dataset_has_the_tokens_and_values_that_were_computed(tmp_path: Path) -> None:
    made = processor()
    rows = ImageRows(dataset(tmp_path), made, split=None, loss_on=None, seq_len=200)
    example, values = rows[0]
    config = seeing("idefics3")
    image = made.tokenizer.convert_tokens_to_ids("<image>")
    picture = picture_of(config, 20, 10)
    assert (example == -1 - image).sum() == picture.tokens and values[
        "pixel_values"
    ].shape == picture.pixels
    assert values["pixel_attention_mask"].shape == (9, 56, 56)
    trained = made.tokenizer.convert_ids_to_tokens(example[example >= 0].tolist())
    assert trained == ["black", "square", "<end_of_utterance>"]
    made.tokenizer.chat_template = made.chat_template
    made.tokenizer.save_pretrained(tmp_path / "tokenizer")
    lengths, _, end = image_lengths(
        tmp_path / "rows.jsonl",
        str(tmp_path / "tokenizer"),
        lambda width, height: picture_of(config, width, height),
    )
    last = int((example == -1 - image).nonzero().max()) + 2  # a mark follows
    assert last <= end <= last + 2
    assert lengths.longest == len(example) and lengths.trained_share == pytest.approx(
        3 / len(example)
    )
    batch = collate_image_examples([rows[0], rows[0]], config_of(config), [], masked=True)
    assert (
        batch["pixel_values"].shape == (2, *picture.pixels) and batch["labels"].max() < image + 60
    )
    assert torch.equal(batch["labels"][0] >= 0, torch.cat([example, example[:0]]) >= 0)


@pytest.mark.parametrize(
    ("row", "seq_len", "message"),
    [
        ({"images": ["a.png", "a.png"]}, 200, "places for 1 images, but the example names 2"),
        ({"images": []}, 200, "places for 1 images, but the example names 0"),
        ({"images": ["b.png"]}, 200, "its image cannot be read: No such file"),
        ({"images": ["../a.png"]}, 200, "its image cannot be read: it is not below"),
        ({"messages": None, "text": "x"}, 200, "needs messages"),
        ({"images": None, "messages": None, "text": "what <image>"}, 200, "needs messages"),
        (
            {"messages": [message([{"type": "image_url", "image_url": "a.png"}])]},
            200,
            "neither text nor of type image",
        ),
        ({}, 20, "examples are truncated to 20 tokens"),
    ],
)
def test_a_row_that_cannot_be_trained_on_ends_the_run(
    tmp_path: Path, row: dict[str, Any], seq_len: int, message: str
) -> None:
    rows = ImageRows(
        dataset(tmp_path, **row), processor(), split=None, loss_on=None, seq_len=seq_len
    )
    with pytest.raises(SystemExit, match=message):
        rows[0]


def test_what_the_template_or_the_processor_refuses_ends_the_run(tmp_path: Path) -> None:
    made = processor()

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("the aspect ratio is 300")

    made.image_processor.preprocess = refuse
    rows = ImageRows(dataset(tmp_path), made, split=None, loss_on=None, seq_len=200)
    with pytest.raises(SystemExit, match=r"rows\.jsonl:1: the processor refuses the example: "):
        rows[0]
    made.tokenizer.chat_template = "{{ raise_exception('no image') }}"
    rows = ImageRows(dataset(tmp_path), made, split=None, loss_on=None, seq_len=200)
    with pytest.raises(
        SystemExit,
        match=r"rows\.jsonl:1: the tokenizer's chat template refuses .*: no image$",
    ):
        rows[0]


@pytest.mark.parametrize("loss_on", ["all", "assistant", "completion"])
def test_what_is_trained_on_is_text_and_never_an_image(tmp_path: Path, loss_on: str) -> None:
    made = processor()
    rows = ImageRows(dataset(tmp_path), made, split=None, loss_on=loss_on, seq_len=200)
    example, _ = rows[0]
    trained = made.tokenizer.convert_ids_to_tokens(example[example >= 0].tolist())
    answer = ["black", "square", "<end_of_utterance>"]
    text = ["user", ":", "what", "?", "<end_of_utterance>", "assistant", ":", *answer]
    assert trained == (text if loss_on == "all" else answer)
    picture = picture_of(seeing("idefics3"), 20, 10)
    assert len(example) == len(text) + picture.length


def test_tags_that_are_text_belong_to_their_image() -> None:
    """SmolVLM's vocabulary has no tokens for the tags of tiles."""
    made = processor()
    rows = object.__new__(ImageRows)
    rows._processor = made
    words = "user <fake_token_around_image> what ? <image> <image> <fake_token_around_image> \n"
    words += (
        " <fake_token_around_image> what ? <image> <fake_token_around_image> what"
        " <fake_token_around_image>"
    )
    ids = torch.tensor([made.tokenizer.convert_tokens_to_ids(word) for word in words.split(" ")])
    rows._tags = torch.tensor(
        made.tokenizer.convert_tokens_to_ids(["<image>", "<fake_token_around_image>"])
    )
    read = [
        place
        for place, is_image in enumerate(rows._find_image_tokens(ids).tolist())
        if not is_image
    ]
    assert read == [0, len(ids) - 2]


def test_images_that_parts_name_are_those_of_the_row(tmp_path: Path) -> None:
    """Qwen's own form, and a list of files beside the messages: the same tokens and values."""
    made = processor()
    (listed,) = ImageRows(dataset(tmp_path), made, split=None, loss_on=None, seq_len=200)
    parts = [IMAGE | {"image": "a.png"}, TEXT | {"image": None}]
    talk = [message(parts), message("black square", "assistant")]
    (named,) = ImageRows(
        dataset(tmp_path, messages=talk, images=None), made, split=None, loss_on=None, seq_len=200
    )
    assert torch.equal(listed[0], named[0]) and torch.equal(
        listed[1]["pixel_values"], named[1]["pixel_values"]
    )


def test_rows_of_text_alone_stand_beside_rows_with_images(tmp_path: Path) -> None:
    made = processor()
    path = dataset(tmp_path)
    more = [{"text": "black square"}, {"prompt": "what ? ", "completion": "black"}]
    path.write_text("\n".join([path.read_text(), *map(json.dumps, more)]))
    with_image, text, answered = ImageRows(path, made, split=None, loss_on=None, seq_len=200)
    end = made.tokenizer.eos_token_id
    black, square, what, asks = made.tokenizer.convert_tokens_to_ids(
        ["black", "square", "what", "?"]
    )
    assert text[0].tolist()[:2] == [black, square] and not text[1]
    assert answered[0].tolist()[:3] == [-1 - what, -1 - asks, black] and end not in answered[0][:3]
    batch = collate_image_examples(
        [with_image, text], config_of(seeing("idefics3")), [], masked=True
    )
    assert (
        batch["input_ids"].shape == (2, len(with_image[0])) and batch["pixel_values"].shape[0] == 2
    )
    made.tokenizer.save_pretrained(tmp_path / "tokenizer")
    lengths, _, _ = image_lengths(
        path,
        str(tmp_path / "tokenizer"),
        lambda width, height: picture_of(seeing("idefics3"), width, height),
    )
    assert sorted(length for length, number in lengths.counts for _ in range(number)) == sorted(
        map(len, (with_image[0], text[0], answered[0]))
    )


def test_a_late_image_ends_where_the_study_says(tmp_path: Path) -> None:
    """So that no seq_len is chosen at which a row ends the run."""
    made = processor()
    ask, answer = message("what ? " * 30), message("black square", "assistant")
    path = dataset(
        tmp_path, messages=[ask, answer, message("what <image> what ?"), answer], images=["a.png"]
    )
    picture = picture_of(seeing("idefics3"), 20, 10)
    made.tokenizer.chat_template = made.chat_template
    made.tokenizer.save_pretrained(tmp_path / "tokenizer")
    *_, end = image_lengths(path, str(tmp_path / "tokenizer"), lambda width, height: picture)
    assert picture.length + 60 < end
    example, _ = ImageRows(path, made, split=None, loss_on=None, seq_len=end)[0]
    assert len(example) == end
    with pytest.raises(SystemExit, match="its images end at token"):
        ImageRows(path, made, split=None, loss_on=None, seq_len=end - 4)[0]


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(BadDataset, match="has no examples"):
        ImageRows(tmp_path / "rows.jsonl", processor(), split=None, loss_on=None, seq_len=9)

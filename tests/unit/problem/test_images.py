"""Rows with images: their sizes from files, their lengths, and which images a probe trains on."""

import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.images import Picture, picture_of
from autotune.core.train_config import TrainConfig
from autotune.problem.image_files import flat, pictures_of, size_of, text_of
from autotune.problem.images import MOST_KINDS, images_of, representative_examples
from autotune.problem.setup import set_up
from autotune.problem.study_spec import InvalidSpec, StudySpec
from autotune.problem.target import Target
from autotune.trainer.forms import Chat, parse_image_row
from autotune.trainer.reading import BadDataset
from tests.helpers.seeing import seeing

ASK = {"role": "user", "content": "what?"}


def sized(width: int, height: int) -> Picture:
    return Picture(tokens=1, beside=0, pixels=(width, height))


def png(width: int, height: int) -> bytes:
    """A whole black PNG."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    pixels = zlib.compress((b"\0" + b"\0\0\0" * width) * height)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def jpeg(width: int, height: int, frame: int = 0xC2) -> bytes:
    """What a JPEG begins with: a thumbnail of another size in its first segment, a table, then the
    frame.
    """
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 8) + b"\xff\xc0\0\x11\x08\0\1\0"
    table = b"\xff\xc4" + struct.pack(">H", 2 + 3) + b"abc"
    return (
        b"\xff\xd8"
        + thumbnail
        + table
        + bytes([0xFF, frame])
        + struct.pack(">HBHH", 17, 8, height, width)
        + b"\3"
    )


def model_in(folder: Path, model_type: str = "qwen2_5_vl") -> str:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(seeing(model_type)))
    return str(folder / "model")


def spec_of(folder: Path, **wanted: Any) -> StudySpec:
    return StudySpec(model=model_in(folder), gpu="cpu", space="cpu", **wanted)


@pytest.mark.parametrize("frame", [0xC0, 0xC1, 0xC2, 0xCF])
def test_sizes_stand_in_the_first_bytes(frame: int) -> None:
    assert size_of(BytesIO(png(30, 20))) == (30, 20)
    assert size_of(BytesIO(jpeg(300, 200, frame))) == (300, 200)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GIF89a",
        png(3, 4)[:20],
        png(0, 4),
        b"\xff\xd8",
        jpeg(3, 4)[:-8],
        b"\xff\xd8\xff\xe0\0\0\xff",
    ],
)
def test_what_is_no_image_is_named_with_its_row(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(content)
    with pytest.raises(UsageError, match="row 7: its image 'one' cannot be read") as caught:
        pictures_of("row 7", ["one"], tmp_path, sized)
    assert "leave the example out" in str(caught.value.remedy)


def test_a_plan_opens_no_image_beside_the_folder_either(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(3, 4))
    (tmp_path / "data").mkdir()
    for named in ("../a.png", str(tmp_path / "a.png"), {"path": "../a.png"}):
        with pytest.raises(UsageError, match="cannot be read: it is not below"):
            pictures_of("row 7", [named], tmp_path / "data", sized)


def test_images_are_named_in_the_ways_of_other_tools(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(3, 4))

    def sizes(**row: Any) -> list[tuple[int, ...]]:
        _, named = parse_image_row("", {"messages": [ASK]} | row)
        return [picture.pixels for picture in pictures_of("", named, tmp_path, sized)]

    assert sizes(images=["a.png", {"path": None, "bytes": png(5, 6)}]) == [(3, 4), (5, 6)]
    assert sizes(image={"path": str(tmp_path / "a.png")}) == [(3, 4)]
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "what?"},
        {"type": "image", "path": "a.png"},
    ]
    assert sizes(messages=[ASK | {"content": parts}]) == [(3, 4), (3, 4)]
    assert sizes() == sizes(images=[]) == []
    for absent in ("b.png", 7, {"path": 1}):
        with pytest.raises(UsageError, match="cannot be read"):
            sizes(image=absent)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [ASK | {"content": "<image><image>"}], "images": ["a"]},
            "places for 2 images, but the example names 1",
        ),
        (
            {"messages": [ASK | {"content": [{"type": "image"}]}], "images": ["a", "b"]},
            "for 1 images, but the example names 2",
        ),
        ({"messages": [ASK | {"content": [{"type": "image"}]}]}, "but the example names 0"),
        (
            {"messages": [ASK | {"content": [{"type": "image_url", "image_url": "a"}]}]},
            "neither text nor of type image",
        ),
        ({"messages": [ASK | {"content": [{"type": "text"}]}]}, "neither text nor of type image"),
        ({"text": "<image> a cat"}, "needs messages"),
    ],
)
def test_images_and_their_places_are_counted(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadDataset, match="row 7: .*" + reason):
        parse_image_row("row 7", row)


def test_an_image_that_the_processor_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "thin.png").write_bytes(png(1, 201))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [ASK, ASK], "image": "thin.png"}))
    spec = spec_of(tmp_path, dataset=str(tmp_path / "rows.jsonl"))
    with pytest.raises(
        UsageError, match=r"rows.jsonl:1: its image 'thin.png' is refused: .*1x201"
    ) as caught:
        set_up(spec, Target(device=resolve_device("cpu")))
    assert "200 times" in str(caught.value.remedy)


def test_a_row_without_its_images() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    answer = {"role": "assistant", "content": "a <image>cat"}
    form, named = parse_image_row(
        "", {"images": ["a", "b"], "messages": [{"role": "user", "content": parts}, answer]}
    )
    assert isinstance(form, Chat) and named == ["a", "b"]
    texts = [["what?"], ["a ", "cat"]]
    contents = [[{"type": "text", "text": text} for text in one] for one in texts]
    assert [message["content"] for message in text_of(form)["messages"]] == contents
    begun = text_of(form, whole=False)["messages"]
    assert [message["content"] for message in begun] == [contents[0], contents[1][:1]]
    flattened = flat(Chat(messages=text_of(form)["messages"]))
    assert isinstance(flattened, Chat) and [one["content"] for one in flattened.messages] == [
        "what?",
        "a cat",
    ]
    asked = text_of(Chat(messages=form.messages, completion=1))
    assert len(asked["prompt"]) == len(asked["completion"]) == 1


def test_each_length_has_its_images_and_the_longest_row_the_largest() -> None:
    small, large = (Picture(tokens=tokens, beside=0, pixels=(1,)) for tokens in (10, 90))
    kept = representative_examples(
        [(50, (small,)), (50, (small,)), (50, ()), (100, (large,)), (200, (small,)), (20, ())]
    )
    assert kept == ((20, ()), (50, (small,)), (100, (large,)), (200, (small,)))
    assert images_of(kept, 60) == images_of(kept, 190) == (small,)
    assert images_of(kept, 200, largest=True) == (large,)
    assert images_of(kept, 91) == (small,)  # the large one leaves no room for text
    assert images_of(kept, 5) == ()
    assert representative_examples([(5, ()), (9, ())]) == ()
    many = representative_examples(
        [*((100 + index, (small,)) for index in range(5000)), (300, (large, large))]
    )
    assert len(many) <= MOST_KINDS + 1 and (300, (large, large)) in many
    assert {many[0][0], many[-1][0]} == {100, 5099}


def test_examples_are_text_unless_an_option_or_a_row_has_an_image(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [ASK, ASK | {"role": "assistant"}]})
    )
    model = model_in(tmp_path)
    cpu = Target(device=resolve_device("cpu"))
    for wanted in ({}, {"dataset": str(tmp_path / "rows.jsonl")}):
        workload = set_up(
            StudySpec(model=model, gpu="cpu", space="cpu", **wanted), cpu
        ).task.workload
        assert not workload.pictured and workload.dealt


def test_one_image_in_each_example_if_its_size_is_unknown(tmp_path: Path) -> None:
    setup = set_up(
        spec_of(tmp_path, vision="trained", pins={"seq_len": 2048}),
        Target(device=resolve_device("cpu")),
    )
    workload = setup.task.workload
    assert workload.image_tokens == 24 * 32 + 2
    assert workload.lengths.longest == 1024 and workload.lengths.source == "assumed"
    assert any("896x672" in warning for warning in setup.warnings)
    (kind, *_) = workload.micro_batches(TrainConfig(seq_len=2048, micro_batch_size=2))
    assert kind.images == ((picture_of(seeing("qwen2_5_vl"), 896, 672),),) * 2
    assert not workload.dealt and workload.facts()["vision"] == "trained"


def test_the_images_of_a_dataset_count_in_its_rows(tmp_path: Path) -> None:
    """56x56 are 4 tokens for Qwen2.5-VL, 112x56 are 8; a mark stands at either end."""
    for name, content in {"s.png": png(56, 56), "l.jpg": jpeg(112, 56)}.items():
        (tmp_path / name).write_bytes(content)
    ask, answer = (
        {"role": "user", "content": "<image>" + "x" * 36},
        {"role": "assistant", "content": "y" * 31},
    )
    two = ask | {"content": "<image>" + ask["content"]}
    rows = [
        {"messages": [ask, answer], "images": ["s.png"]},
        {"messages": [two, answer], "images": ["l.jpg", "s.png"]},
    ]
    rows += [{"messages": [{"role": "user", "content": "x" * 36}, answer]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = spec_of(
        tmp_path, dataset=str(tmp_path / "rows.jsonl"), pins={"seq_len": 64}, vision="trained"
    )
    workload = set_up(spec, Target(device=resolve_device("cpu"))).task.workload
    text = (36 + 4 + 31 + 9) // 4
    assert workload.lengths.counts == ((text, 1), (text + 6, 1), (text + 16, 1))
    assert workload.lengths.source == "characters" and workload.image_tokens == 16
    assert workload.lengths.trained_share == pytest.approx(10 * 3 / (3 * text + 22))
    assert workload.vision == "trained"


def test_a_seq_len_that_ends_before_a_rows_last_image_is_removed(tmp_path: Path) -> None:
    """204 characters, of 4 to a token, stand before it; by its images alone, of 6 tokens, the row
    would fit in 32.
    """
    (tmp_path / "s.png").write_bytes(png(56, 56))
    late = [
        ASK | {"content": "x" * 196},
        ASK | {"content": "<image>"},
        {"role": "assistant", "content": "y"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": late, "images": ["s.png"]}))
    spec = spec_of(tmp_path, dataset=str(tmp_path / "rows.jsonl"), pins={"seq_len": 32})
    with pytest.raises(
        UsageError,
        match="take 6 tokens, which are never truncated, and the last image ends at token 58",
    ):
        set_up(spec, Target(device=resolve_device("cpu")))


def test_lengths_too_short_for_an_image_are_of_text_alone(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("487\n900\n1000\n1000\n")
    spec = spec_of(
        tmp_path, image_size="896x672", lengths=str(tmp_path / "lengths"), pins={"seq_len": 1024}
    )
    setup = set_up(spec, Target(device=resolve_device("cpu")))
    assert any(
        "25.0% of the examples have no room for an image of 770 tokens" in one
        for one in setup.warnings
    )
    kinds = setup.task.workload.micro_batches(TrainConfig(seq_len=1024, micro_batch_size=1))
    rows = [
        (row[0], bool(images))
        for kind in kinds
        for row, images in zip(kind.rows, kind.images, strict=True)
    ]
    assert {has for _, has in rows} == {True, False} and all(
        has == (length >= 772) for length, has in rows
    )


def test_a_text_with_an_image_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(9, 9))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "<image> a cat", "image": "a.png"}))
    spec = spec_of(tmp_path, dataset=str(tmp_path / "rows.jsonl"))
    with pytest.raises(UsageError, match="an example with images needs messages"):
        set_up(spec, Target(device=resolve_device("cpu")))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"objective": "dpo"}, "--objective dpo is untested with images"),
        ({"trainer": "trl"}, "--trainer trl is untested with images"),
        ({"gpus": 2}, "--gpus is untested with images"),
        ({"eval_share": 0.1}, "eval_share is untested with images"),
        ({"tokens_per_example": 100}, "an example of 100 tokens has no room for its image of 770"),
        ({"pins": {"seq_len": 512}}, "never truncated"),
        ({"mean_tokens": 100, "p99_tokens": 200}, "has no room for its image of 770"),
        (
            {"image_size": "56x56", "pins": {"packing": True}},
            "sequences with images are not packed",
        ),
        (
            {"image_size": "56x56", "pins": {"quantization": "int8"}},
            "an 8-bit base is untested with images",
        ),
    ],
)
def test_what_is_untested_with_images_is_refused(
    tmp_path: Path, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        set_up(
            spec_of(tmp_path, **({"image_size": "896x672"} | wanted)),
            Target(device=resolve_device("cpu")),
        )


def test_a_model_of_text_takes_no_images() -> None:
    for wanted in ({"image_size": "9x9"}, {"vision": "trained"}):
        with pytest.raises(UsageError, match="demo-3m can be trained on text, but not on images"):
            set_up(
                StudySpec(model="demo-3m", gpu="cpu", space="cpu", **wanted),
                Target(device=resolve_device("cpu")),
            )
    with pytest.raises(InvalidSpec, match="sizes of their own"):
        StudySpec(model="smolvlm", dataset="d", image_size="9x9")
    with pytest.raises(InvalidSpec, match="vision cannot be 'half'"):
        StudySpec(model="smolvlm", vision="half")


def test_no_formula_covers_images() -> None:
    with pytest.raises(UsageError, match="no formula covers the images of gemma-3-4b-it"):
        set_up(
            StudySpec(model="gemma-3-4b", gpu="h100", image_size="896x896"), resolve_device("h100")
        )
    assert resolve_model("gemma-3-4b").flops_per_token("lora", 512) is None

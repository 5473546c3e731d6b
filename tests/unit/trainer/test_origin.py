"""A checkpoint is only continued on the data, the tokenizer and the settings that it was trained
with.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.train_config import TrainConfig
from autotune.export.script import settings
from autotune.trainer.command_line import parse_options
from autotune.trainer.origin import Origin, describe, find_difference
from autotune.trainer.settings import Options
from tests.helpers.tokenizers import CHATML, byte_level
from tests.unit.export.test_script import recipe

SETTINGS = settings(recipe(TrainConfig()))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    byte_level(CHATML).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def options(weights: Path, tmp_path: Path) -> Options:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}')
    return parse_options(
        SETTINGS, ["--model", str(weights), "--dataset", str(tmp_path / "rows.jsonl")]
    )


def saved(folder: Path, facts: dict[str, Any] | None) -> str:
    """Write a checkpoint as the Trainer does, which stores the
    states of callbacks by their names.
    """
    checkpoint = folder / "checkpoint-4"
    checkpoint.mkdir()
    states = {} if facts is None else {"Origin": Origin(facts).state()}
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"global_step": 4, "stateful_callbacks": states})
    )
    return str(checkpoint)


def test_the_same_data_and_tokenizer_in_other_folders_are_continued(
    options: Options, tmp_path: Path
) -> None:
    checkpoint = saved(tmp_path, describe(SETTINGS, options))
    (tmp_path / "moved").mkdir()
    data = (tmp_path / "rows.jsonl").rename(tmp_path / "moved" / "r.jsonl")
    moved = replace(options, dataset=str(data), max_steps=9, output_dir="elsewhere")
    told = replace(SETTINGS, about=["another device"], report_to="wandb", save_steps=7)
    assert find_difference(checkpoint, describe(told, moved)) is None


def other_data(options: Options) -> Options:
    data = Path(str(options.dataset)).with_name("b.jsonl")
    data.write_text('{"text": "two"}')
    return replace(options, dataset=str(data))


def changed_data(options: Options) -> Options:
    Path(str(options.dataset)).write_text('{"text": "two"}')
    return options


def no_data(options: Options) -> Options:
    return replace(options, dataset=None)


def other_tokenizer(options: Options) -> Options:
    folder = Path(str(options.dataset)).with_name("other")
    shutil.copytree(options.model, folder)
    byte_level(CHATML + "{{ eos_token }}").save_pretrained(folder)
    return replace(options, model=str(folder))


def other_weights(options: Options) -> Options:
    folder = Path(str(options.dataset)).with_name("other")
    shutil.copytree(options.model, folder)
    (folder / "model.safetensors").write_bytes(b"more weights")
    return replace(options, model=str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_data, "on {folder}/rows.jsonl (#), not on {folder}/b.jsonl (#)"),
        (changed_data, "on {folder}/rows.jsonl (#), not on {folder}/rows.jsonl (#)"),
        (no_data, "on {folder}/rows.jsonl (#), not on random rows (#)"),
        (
            other_tokenizer,
            "with the tokenizer of {model} (#), not with the tokenizer of {folder}/other (#)",
        ),
        (
            other_weights,
            "from the weights of {model} (#), not from the weights of {folder}/other (#)",
        ),
    ],
)
def test_another_origin_is_refused_with_both_names(
    change: Callable[[Options], Options], said: str, options: Options, tmp_path: Path
) -> None:
    checkpoint = saved(tmp_path, describe(SETTINGS, options))
    found = find_difference(checkpoint, describe(SETTINGS, change(options)))
    assert found is not None
    assert len(set(re.findall(r"\(\w{8}\)", found))) == 2  # the digests
    names = said.format(folder=tmp_path, model=options.model)
    expected = f"give another --output-dir: {checkpoint} was trained {names}"
    assert re.sub(r"\(\w{8}\)", "(#)", found) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"micro_batch_size": 7}, f"micro_batch_size {SETTINGS.micro_batch_size}, not 7"),
        ({"model_settings": replace(SETTINGS.model_settings, lora_rank=3)}, "lora_rank 16, not 3"),
        ({"num_gpus": 4}, "num_gpus 1, not 4"),
    ],
)
def test_other_settings_are_refused_by_name(
    change: dict[str, Any], said: str, options: Options, tmp_path: Path
) -> None:
    checkpoint = saved(tmp_path, describe(SETTINGS, options))
    found = find_difference(checkpoint, describe(replace(SETTINGS, **change), options))
    assert found == f"give another --output-dir: {checkpoint} was trained with {said}"


def test_held_out_examples_belong_to_the_settings(options: Options, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, describe(SETTINGS, options))
    found = find_difference(checkpoint, describe(SETTINGS, replace(options, held_out=3)))
    assert found and found.endswith("with held_out 0, not 3")


def test_a_checkpoint_without_an_origin_is_refused(options: Options, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, None)
    found = find_difference(checkpoint, describe(SETTINGS, options))
    assert (
        found
        == f"give another --output-dir: {checkpoint} does not say on which data it was trained"
    )

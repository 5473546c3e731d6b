"""A model of random weights, its tokenizer and its rows, in files that another tool reads."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from autotune.catalog.models import list_models
from autotune.core.objective import Objective
from autotune.probe import synthetic_model
from tests.helpers.factories import TINY

WANTED: dict[str, Any] = {
    "model": TINY | {"model_type": "llama", "num_hidden_layers": 1},
    "device": "cpu",
    "rows": 5,
    "lengths": [3, 40],
    "held_out": [7, 2],
}


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    folder.mkdir()
    (folder / "wanted.json").write_text(json.dumps(WANTED | changes))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["synthetic_model", "wanted.json"])
    synthetic_model.main()


def rows(path: Path) -> list[list[int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.keys() == {"input_ids"} for line in lines)
    return [line["input_ids"] for line in lines]


def test_another_tool_reads_what_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "one", monkeypatch)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"rows": 5}
    config = AutoConfig.from_pretrained("model")
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == (
        "llama",
        1,
        TINY["hidden_size"],
    )
    model = AutoModelForCausalLM.from_pretrained("model", dtype="auto")
    # as published ones are
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained("model")
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.eos_token, len(tokenizer)) == (
        "<pad>",
        0,
        "<pad>",
        1 + 2 * 26,
    )
    trained, held_out = (rows(Path("data", f"{split}.jsonl")) for split in ("train", "test"))
    assert [len(row) for row in trained] == [3, 40, 3, 40, 3]
    assert [len(row) for row in held_out] == [7, 2]
    tokens = [token for row in trained for token in row]
    assert min(tokens) >= 0 and 64 < max(tokens) < TINY["vocab_size"] and trained[1] != trained[3]


@pytest.mark.parametrize(
    "family", sorted({str(model.config["model_type"]) for model in list_models()})
)
def test_a_letter_is_a_token_for_each_familys_own_tokenizer(family: str, tmp_path: Path) -> None:
    """transformers reads some families' files with a class of its own, whatever class they name."""
    synthetic_model.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert AutoTokenizer.from_pretrained(tmp_path)("abCdefG").input_ids == [1, 2, 29, 4, 5, 6, 33]


@pytest.mark.parametrize("objective", [Objective.REWARD, Objective.DPO, Objective.KTO])
def test_texts_have_so_many_tokens(
    objective: Objective, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One less than is wanted of each text: TRL adds the end."""
    made(tmp_path / "one", monkeypatch, objective=objective, trained_share=0.5)
    examples = [json.loads(line) for line in Path("data/train.jsonl").read_text().splitlines()]
    pair, answer = {"chosen", "rejected"}, {"prompt", "completion", "label"}
    columns = {Objective.REWARD: pair, Objective.DPO: {"prompt", *pair}, Objective.KTO: answer}
    assert all(example.keys() == columns[objective] for example in examples)
    texts = [
        example.get("prompt", "") + example[name]
        for example in examples
        for name in ("chosen", "rejected", "completion")
        if name in example
    ]
    counted = [len(row) for row in AutoTokenizer.from_pretrained("model")(texts).input_ids]
    assert set(counted) == {2, 39} and len(set(texts)) == len(texts)


def test_it_is_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        made(tmp_path / name, monkeypatch)
        torch.rand(3)
    files = ("model/model.safetensors", "data/train.jsonl", "data/test.jsonl")
    assert all(
        (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        for name in files
    )


def test_without_rows_to_hold_out_their_file_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "one", monkeypatch, held_out=[])
    assert Path("data/test.jsonl").read_text() == ""

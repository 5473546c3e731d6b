"""The demo model: made on its first use, it trains on a user's file, saves, resumes and answers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.problem.demo import NAME, demo_model, is_demo, with_weights
from autotune.problem.setup import set_up
from autotune.problem.study_spec import StudySpec
from tests.helpers.next_commands import next_commands, run_printed

SPACE = """\
version: 1
knobs:
  micro_batch_size: 2
  seq_len: 64
  lora_rank: 16
  precision: fp32
  checkpointing: none
  compile: none
"""
MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": f"Which colour has box {number}?"},
            {"role": "assistant", "content": f"Box {number} is green."},
        ]
    }
    for number in range(12)
]


def autotune(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.probe
def test_the_demo_model_trains_on_a_file_resumes_and_answers(tmp_path: Path) -> None:
    """By the commands that the run prints; the export trains on the same file."""
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, MESSAGES)))
    options = "--gpu cpu --dataset rows.jsonl --space space.yaml --trials 1 --budget 5m"
    options += " --global-batch 4 --epochs 2 --set save_steps=2 --study one"
    shown = autotune(tmp_path, "run", "--model", NAME, *options.split())
    train, *others = next_commands(shown)
    assert train == "autotune train --dataset rows.jsonl one"
    assert others == ["autotune verify one", "autotune explain one"]
    for command in others:
        run_printed(command, tmp_path)

    settings = json.loads((tmp_path / "runs/one/export/train_config.json").read_text())
    assert settings["dataset"] == str(tmp_path / "rows.jsonl")
    assert settings["model"] == str(demo_model()) and settings["has_published_weights"]

    shown = autotune(tmp_path, *train.split()[1:])
    assert f"{NAME} is a toy" in shown and "step 6 of 6" in shown
    told = dict(line.split(":", 1) for line in shown.splitlines() if line.startswith(("a", "bef")))
    assert told["asked"].strip() == "Which colour has box 0?"
    assert told["before"].strip() and told["after"].strip()
    saved = tmp_path / "runs/one/trained"
    assert (saved / "adapter_model.safetensors").is_file()

    shutil.rmtree(saved / "checkpoint-6")
    shown = autotune(tmp_path, "train", "one", "--resume", "--ask", "Who are you?")
    assert "step 6 of 6" in shown and "asked:  Who are you?" in shown
    lines = (saved / "progress.jsonl").read_text().splitlines()
    # A logged loss of the first and the last step adds a line, and a save after the last step too.
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 3, 4, 5, *[6] * 3, 5, *[6] * 3]


@pytest.mark.probe
def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    from autotune.probe.demo_model import make

    config = resolve_model(NAME).config
    for name in ("one", "two"):
        assert make(tmp_path / name, dict(config), steps=2) < 9
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    made = resolve_model(str(tmp_path / "one"))
    assert made.size("vocab_size") == 4096 and "toy" in (tmp_path / "one/README.md").read_text()


def test_a_plan_needs_no_weights_of_the_demo_model(tmp_path: Path) -> None:
    """The catalogue has its shape; an estimate counts tokens by the number of characters."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    spec = StudySpec(model=NAME, dataset=str(tmp_path / "rows.jsonl"))
    task = set_up(spec, resolve_device("cpu")).task
    assert is_demo(task.model) and task.model.weights is None


def test_only_the_demo_model_is_made() -> None:
    other = resolve_model("qwen3-0.6b")
    assert with_weights(other, print) is other

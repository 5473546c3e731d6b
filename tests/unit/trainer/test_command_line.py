"""The options of the exported script: what is refused, and what follows from them."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.train_config import TrainConfig
from autotune.export.script import settings
from autotune.problem.run_options import TRACKERS, RunOptions
from autotune.trainer import command_line
from autotune.trainer.command_line import _parser, last_checkpoint, parse_options
from autotune.trainer.settings import Options, one_gpu
from tests.unit.export.test_script import demo, recipe


def parsed(*arguments: str, published: bool = True) -> Options:
    made = recipe(TrainConfig()) if published else demo(TrainConfig())
    return parse_options(settings(made), list(arguments))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, published: bool = True) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments, published=published)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_the_options_are_without_others() -> None:
    assert parsed("--random-weights") == Options(
        model="mistralai/Mistral-7B-v0.3",
        dataset=None,
        split=None,
        lengths=None,
        max_steps=-1,
        held_out=0,
        held_out_tokens=0,
        output_dir="out",
        saves=False,
        checkpoint=None,
        progress=None,
        report_to="none",
    )


def test_every_option_arrives(tmp_path: Path) -> None:
    for name in ("rows", "lengths"):
        (tmp_path / name).touch()
    data, lengths, out = (str(tmp_path / name) for name in ("rows", "lengths", "o"))
    given = [
        "--model",
        "a/b",
        "--dataset",
        data,
        "--lengths",
        lengths,
        "--max-steps",
        "7",
        "--held-out",
        "3",
        "9",
    ]
    assert parsed(*given, "--output-dir", out, "--resume", "--progress", "p") == Options(
        model="a/b",
        dataset=data,
        split=None,
        lengths=lengths,
        max_steps=7,
        held_out=3,
        held_out_tokens=9,
        output_dir=out,
        saves=True,
        checkpoint=None,
        progress="p",
        report_to="none",
    )


def test_only_a_run_that_can_answer_takes_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data := tmp_path / "rows").touch()
    given = ["--dataset", str(data), "--ask", "Who?"]
    assert parsed(*given).ask == "Who?"
    assert "--ask needs --dataset" in refused(capsys, "--random-weights", "--ask", "Who?")
    made = settings(recipe(TrainConfig()))
    varlen = replace(made.model_settings, attention="varlen")
    for change, needs in (
        ({"num_gpus": 2}, "a run on one GPU"),
        ({"objective": "classification"}, "objective sft"),
        ({"images": [[{}]]}, "objective sft"),
        ({"model_settings": varlen}, "an attention other than varlen"),
    ):
        with pytest.raises(SystemExit):
            parse_options(replace(made, **change), given)
        assert needs in capsys.readouterr().err


def test_the_help_explains_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(
        "usage: train.py [-h] [--model NAME_OR_DIR] [--dataset PATH] [--split NAME]"
        " [--random-weights]"
        " [--lengths FILE] [--max-steps N] [--held-out N TOKENS] [--output-dir OUTPUT_DIR]"
        " [--resume] [--report-to"
        " {none,wandb,mlflow,tensorboard,trackio}] [--ask PROMPT] [--progress FILE]"
        " Fine-tune with exactly the configuration in train_config.json."
    )
    assert all(action.help for action in _parser(settings(recipe(TrainConfig())))._actions)


def test_a_run_needs_a_dataset_or_random_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}")
    assert "give either --dataset PATH to train, or --random-weights" in refused(capsys)
    assert "give either" in refused(capsys, "--dataset", str(data), "--random-weights")
    assert "no published weights" in refused(capsys, "--dataset", str(data), published=False)
    assert parsed(published=False).dataset is None
    assert (
        parsed("--dataset", str(data), "--model", "org/name", published=False).model == "org/name"
    )


@pytest.mark.parametrize("option", ["--dataset", "--lengths"])
def test_files_must_exist(capsys: pytest.CaptureFixture[str], option: str) -> None:
    arguments = ["--random-weights"] if option == "--lengths" else []
    assert "there is no file nowhere" in refused(capsys, *arguments, option, "nowhere")


def test_a_random_run_saves_only_where_it_is_reported_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").touch()
    assert (
        parsed("--dataset", "rows").saves
        and not parsed("--dataset", "rows", "--output-dir", "").saves
    )
    assert not parsed("--random-weights").saves
    assert not parsed("--random-weights", "--output-dir", "").saves
    assert parsed("--random-weights", "--output-dir", str(tmp_path)).saves


def test_a_dataset_of_the_hub_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--dataset", "org/name:config", "--split", "test").dataset == "org/name:config"
    assert "there is no file org/rows.jsonl" in refused(capsys, "--dataset", "org/rows.jsonl")


def test_a_checkpoint_is_continued_only_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-12"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-2", "checkpoint-10"):  # the last one was interrupted
        (tmp_path / name / "trainer_state.json").write_text("{}")
    arguments = ["--random-weights", "--output-dir", str(tmp_path)]
    assert "continue it with --resume" in refused(capsys, *arguments)
    assert parsed(*arguments, "--resume").checkpoint == str(tmp_path / "checkpoint-10")
    assert last_checkpoint(str(tmp_path / "nowhere")) is None
    for steps in ("9", "10"):  # less than the checkpoint has, or as many
        message = refused(capsys, *arguments, "--resume", "--max-steps", steps)
        assert "checkpoint-10 has been trained for 10 steps: give a larger --max-steps" in message
    assert parsed(*arguments, "--resume", "--max-steps", "11").max_steps == 11


def test_a_tracker_must_be_installed_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that only measures the speed reports to none of its own accord."""
    made = settings(replace(recipe(TrainConfig()), run_options=RunOptions(report_to="trackio")))
    (data := tmp_path / "rows").touch()
    with pytest.raises(SystemExit):
        parse_options(made, ["--dataset", str(data)])
    assert "pip install trackio, or turn reporting off" in capsys.readouterr().err
    assert parse_options(made, ["--dataset", str(data), "--report-to", "none"]).report_to == "none"
    assert parse_options(made, ["--random-weights"]).report_to == "none"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert parse_options(made, ["--dataset", str(data)]).report_to == "trackio"
    assert parse_options(made, ["--random-weights", "--report-to", "mlflow"]).report_to == "mlflow"
    assert command_line.TRACKERS == TRACKERS


def test_the_first_of_several_gpus_is_used_alone() -> None:
    assert one_gpu("3, 1") == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3"}
    assert one_gpu("")["CUDA_VISIBLE_DEVICES"] == ""


def test_checkpoints_must_fit_on_the_disk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = replace(settings(recipe(TrainConfig())), checkpoints_gib=1e9)
    (data := tmp_path / "rows").touch()
    out = ["--output-dir", str(tmp_path / "not" / "yet")]
    with pytest.raises(SystemExit):
        parse_options(made, ["--dataset", str(data), *out])
    assert "the checkpoints take up to 1e+09 GiB" in capsys.readouterr().err
    for steps in ("1", "9"):
        # no checkpoint
        assert parse_options(made, ["--dataset", str(data), *out, "--max-steps", steps]).saves
    assert parse_options(made, ["--random-weights", *out]).saves
    assert parse_options(replace(made, checkpoints_gib=1e-9), ["--dataset", str(data), *out]).saves


def test_a_split_is_of_a_dataset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--split selects a part of --dataset" in refused(
        capsys, "--random-weights", "--split", "test"
    )
    (tmp_path / "rows").touch()
    assert parsed("--dataset", str(tmp_path / "rows"), "--split", "test").split == "test"


def test_checkpoints_that_just_fit_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data := tmp_path / "rows").touch()
    monkeypatch.setattr(command_line, "free_gib", lambda folder: 2.0)
    made = replace(settings(recipe(TrainConfig())), checkpoints_gib=2.0)
    assert parse_options(made, ["--dataset", str(data), "--output-dir", str(tmp_path / "o")]).saves


def test_what_is_free_is_that_of_the_disk_on_which_a_folder_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        command_line.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free={tmp_path: 3 * 2**30, Path("/"): 1}[path]),
    )
    assert (
        command_line.free_gib(str(tmp_path / "not" / "yet"))
        == 3.0
        == command_line.free_gib(str(tmp_path))
    )


def test_a_run_does_not_start_with_a_foreign_compile_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train_config.json").write_text(
        replace(settings(recipe(TrainConfig())), use_cpu=True).to_json()
    )
    tmp_path.chmod(0o777)
    monkeypatch.setattr(command_line.os, "environ", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    monkeypatch.setattr(sys, "argv", ["train.py", "--random-weights"])
    monkeypatch.setitem(sys.modules, "autotune.trainer.train", None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=r"train\.py: error: .* can be written by every user"):
        command_line.start(tmp_path)


def test_the_environment_is_set_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is collected while the libraries load; they are frozen, and the training may collect
    again.
    """
    done: list[Any] = []
    made = replace(settings(recipe(TrainConfig())), use_cpu=True)
    (tmp_path / "train_config.json").write_text(made.to_json())
    collector = {
        name: lambda name=name: done.append(name) for name in ("disable", "freeze", "enable")
    }
    monkeypatch.setattr(command_line, "gc", SimpleNamespace(**collector))
    monkeypatch.setattr(
        command_line,
        "prepare_environment",
        lambda settings: done.append(("prepare", settings)),
    )
    loaded = SimpleNamespace(main=lambda *asked: done.append(asked))
    monkeypatch.setitem(sys.modules, "autotune.trainer.train", loaded)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["train.py", "--random-weights", "--max-steps", "3"])
    command_line.start(tmp_path)
    options = parse_options(made, ["--random-weights", "--max-steps", "3"])
    first = [("prepare", made), "disable", "freeze", "enable"]
    assert done == [*first, (made, options, tmp_path / "model_config.json")]

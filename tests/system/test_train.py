"""The full run: after a stop, a kill and a resume it has trained the same weights as an undisturbed
run.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.api import StudyResult
from autotune.catalog import find_price, resolve_device
from autotune.cli.commands import train as command
from autotune.core import nvml
from autotune.core.errors import (
    PREEMPTED,
    AutotuneError,
    EnvironmentProblem,
    Interrupted,
    NothingFits,
    UsageError,
)
from autotune.core.text import operands
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all
from autotune.export.run.train import Progress, Run
from autotune.problem.run_cost import Pauses
from autotune.study.summary import Recipe, TrainingData
from tests.helpers.factories import summary
from tests.helpers.hostile import NAMES, arguments_of_autotune
from tests.helpers.sessions import record_of
from tests.unit.export.test_script import demo, write

STEPS = 24
CONFIG = TrainConfig(micro_batch_size=2, seq_len=32, optimizer="adamw_torch", precision="bf16_pure")
_TO_BE_KILLED = """
import sys
from pathlib import Path
from tests.system.test_train import session
session(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def session(
    folder: Path,
    output: Path,
    *more: str,
    stop_at: int = STEPS + 1,
    seen: list[Progress] | None = None,
) -> tuple[int, str]:
    """One session of the run, asked to stop after step `stop_at`."""
    steps: list[int] = []

    def progress(now: Progress) -> None:
        steps.append(now.step)
        if seen is not None:
            seen.append(now)

    arguments = ["--random-weights", "--max-steps", str(STEPS), *more]
    run = Run(demo(CONFIG), folder / "train.py", output, [*arguments, "--output-dir", str(output)])
    return run.train(progress, lambda: bool(steps) and steps[-1] >= stop_at)


@pytest.mark.probe
def test_a_killed_stopped_and_resumed_run_trains_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = write(export_all(demo(CONFIG), ["train"]), tmp_path / "export")
    assert session(folder, tmp_path / "whole")[0] == 0
    # A step whose loss is logged has a second line. The first and the last step are logged, too.
    reported = (tmp_path / "whole" / "progress.jsonl").read_text().splitlines()
    steps = Counter(json.loads(line)["step"] for line in reported if json.loads(line)["loss"])
    assert [step for step, count in steps.items() if count == 2 or step == 1] == [1, 10, 20, STEPS]

    output = tmp_path / "again"
    tests = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _TO_BE_KILLED, str(folder), str(output)]
    killed = subprocess.Popen(
        command, env=os.environ | tests, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    lines = output / "progress.jsonl"
    _wait(lambda: lines.exists() and lines.read_text().count("\n") >= 2)
    # On a busy machine, the training might end before it notices that its parent was killed.
    trainings = psutil.Process(killed.pid).children(recursive=True)
    for training in trainings:
        training.suspend()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    for training in trainings:
        training.resume()  # it saves a checkpoint
    _wait(lambda: _is_free(output))

    seen: list[Progress] = []
    at = int(next(output.glob("checkpoint-*")).name.removeprefix("checkpoint-")) + 3
    assert session(folder, output, "--resume", stop_at=at, seen=seen)[0] == PREEMPTED
    assert at <= json.loads((output / "training.json").read_text())["steps"] < STEPS
    (output / "checkpoint-99").mkdir()  # of a run killed while it saved
    assert session(folder, output, "--resume", seen=seen)[0] == 0
    assert seen[-1].step == seen[-1].of == STEPS and seen[-1].left_s == 0
    assert seen[-1].trained_s > max(
        json.loads(line)["seconds"] for line in lines.read_text().splitlines()
    )

    whole, again = (
        load_file(one / "adapter_model.safetensors") for one in (tmp_path / "whole", output)
    )
    assert whole.keys() == again.keys()
    assert all(
        whole[name].dtype == again[name].dtype and whole[name].equal(again[name]) for name in whole
    )

    code, error = session(folder, tmp_path / "whole", "--no-such-option")
    assert code == 2 and "no-such-option" in error


def _is_free(output: Path) -> bool:
    """Whether the training in this directory has ended, so that its lock is free."""
    with (output / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _wait(until: Any) -> None:
    end = time.monotonic() + 120
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)


def progress_after(
    lines: list[dict[str, Any]], earlier: int = 0, arguments: tuple[str, ...] = (), **changes: Any
) -> Progress:
    recipe: Recipe = replace(demo(CONFIG), **({"price": find_price("h200-sxm")} | changes))
    pauses = Pauses(
        num_evaluations=2,
        evaluation_s=30.0,
        num_checkpoints=1,
        checkpoint_s=20.0,
        checkpoint_gib=0.0,
    )
    cost = replace(recipe.winner.cost, pauses=pauses)
    recipe = replace(
        recipe, winner=replace(recipe.winner, performance=_seconds(recipe, 2.0), cost=cost)
    )
    run = Run(recipe, Path("train.py"), Path("out"), arguments)
    for index, line in enumerate(lines):
        if index == earlier:
            run._first = None
        run._add(line)
    return run._progress()


def _seconds(recipe: Recipe, step: float) -> Any:
    return replace(recipe.winner.performance, step_time_s=step)


def line(step: int, seconds: float, began: float = 1.0) -> dict[str, Any]:
    return {"began": began, "step": step, "of": 100, "seconds": seconds, "loss": 2.5}


def test_remaining_time_uses_this_session_and_cost_counts_all_sessions() -> None:
    now = progress_after(
        [line(1, 9.0), line(2, 11.0), line(3, 13.0), line(3, 5.0, 2.0), line(4, 8.0, 2.0)],
        earlier=3,
    )
    assert (now.trained_s, now.left_s, now.projected_s) == (21.0, 96 * 3.0, 200.0)
    assert now.spent_usd is not None and now.projected_usd == pytest.approx(
        now.spent_usd * 200 / 21
    )
    assert now.slowdown is None  # too early to know
    assert now.to_dict()["error"] is None  # the run has not ended
    done = progress_after([line(100, 210.0)])
    assert done.to_dict()["error"] == pytest.approx(0.05)


def test_after_one_step_the_prediction_is_shown() -> None:
    assert progress_after([line(1, 9.0)]).left_s == 99 * 2.0


def test_a_slower_device_is_reported_after_some_steps() -> None:
    steps = [line(step, 3.0 * step) for step in range(1, 22)]
    assert progress_after(steps).slowdown == pytest.approx(0.5)
    # a CPU's pace falls as it works
    assert progress_after(steps, device=resolve_device("cpu")).slowdown is None


def test_evaluations_and_checkpoints_are_projected_and_slow_down_no_step() -> None:
    steps = [line(step, 2.0 * step) | {"paused": 0.0} for step in range(1, 22)]
    steps.append(line(22, 94.0) | {"paused": 50.0})
    whole = progress_after(steps, arguments=("--dataset", "rows.jsonl"))
    assert (whole.slowdown, whole.projected_s, whole.left_s) == (0.0, 250.0, 78 * 2.5)
    part = progress_after(steps, arguments=("--dataset", "rows.jsonl", "--max-steps", "100"))
    assert (part.projected_s, part.left_s) == (200.0, 78 * 2.0)


def test_without_a_price_there_is_no_cost() -> None:
    now = progress_after([line(1, 9.0)], price=None)
    assert now.spent_usd is None and now.projected_usd is None


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "give either --dataset"),
        ({"dataset": Path("none.jsonl")}, "there is no file none.jsonl"),
        ({"dataset": Path(__file__), "random_weights": True}, "give either --dataset"),
        (
            {"random_weights": True, "output": Path("before")},
            "checkpoint-3 belongs to an earlier run",
        ),
        (
            {"random_weights": True, "output": Path("done")},
            "adapter_model.safetensors belongs to an earlier run",
        ),
        ({"random_weights": True, "output": Path("locked")}, "another run trains in"),
    ],
)
def test_missing_input_and_existing_output_are_usage_errors(
    options: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before" / "checkpoint-3").mkdir(parents=True)
    for name in ("done/adapter_model.safetensors", "locked/progress.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("unchanged")
    _use_study(monkeypatch, tmp_path)
    with (tmp_path / "locked" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=what) as refused:
            command.train(**(_NOTHING | options))
    if "earlier run" in what:
        resumes = "checkpoint" in what
        assert ("--resume" in refused.value.remedy) is resumes
        assert ("move that file away" in refused.value.remedy) is not resumes
    assert not (tmp_path / "trained").exists()
    assert (tmp_path / "done" / "adapter_model.safetensors").read_text() == "unchanged"
    assert (tmp_path / "locked" / "progress.jsonl").read_text() == "unchanged"


def test_only_a_checkpoint_is_promised_and_resumed(tmp_path: Path) -> None:
    said = list[str]()
    for saves in (False, True):
        display = command.TrainingDisplay(saves=saves, tolerance=0.05)
        display.say = said.append  # type: ignore[method-assign]
        assert display.stopping() and display.stopping()
    assert ["a checkpoint will be saved" in text for text in said] == [False, True]

    stopped = command.interruption(tmp_path, "train --resume", "train", 130)
    assert (str(stopped), stopped.remedy) == (
        "stopped; there is no checkpoint",
        "start again: train",
    )
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text("{}")
    stopped = command.interruption(tmp_path, "train --resume", "train", 130)
    assert str(stopped) == "stopped; a checkpoint of step 7 is saved"
    assert stopped.remedy == "continue with: train --resume"


@pytest.mark.parametrize(
    ("text", "options", "what"),
    [
        ('{"text": "a"}\n{"question": "b"}', {}, r"rows.jsonl:2: an example needs messages"),
        ("", {}, "rows.jsonl has no examples"),
        ('{"text": "a"}\n{"text": "b"}', {"model": None}, "shape has no published weights"),
    ],
)
def test_examples_are_checked_before_anything_is_loaded(
    text: str,
    options: dict[str, Any],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(text)
    model = replace(demo(CONFIG).model, name="shape")
    _use_study(monkeypatch, tmp_path, model=model)
    monkeypatch.setattr(Run, "_start", lambda _: pytest.fail("the script was started"))
    with pytest.raises(UsageError, match=what):
        command.train(
            **(_NOTHING | {"dataset": Path("rows.jsonl"), "model": "org/model"} | options)
        )
    assert not (tmp_path / "trained").exists()


def test_the_dataset_of_the_study_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a few words"}\n' * 2)
    model = replace(demo(CONFIG).model, weights=str(tmp_path))
    _use_study(
        monkeypatch,
        tmp_path,
        model=model,
        data=TrainingData(path=str(tmp_path / "rows.jsonl"), split=None),
    )
    script = "import sys; open('train.ran', 'w').write(' '.join(sys.argv[1:]))"
    monkeypatch.chdir(tmp_path)
    command.train(**(_NOTHING | {"output": _scripted(tmp_path, script), "resume": True}))
    ran = Path("train.ran").read_text()
    assert ran.startswith(f"--dataset {tmp_path / 'rows.jsonl'} ")


def test_another_device_than_the_study_is_for_needs_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvml, "list_gpus", list)
    _use_study(monkeypatch, tmp_path, device=resolve_device("h200"))
    asked = _NOTHING | {
        "random_weights": True,
        "output": _scripted(tmp_path, "open('train.ran', 'w')"),
        "resume": True,
    }
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        EnvironmentProblem, match=r"^the study is for h200-sxm, but this machine has no GPU$"
    ):
        command.train(**asked)
    assert not Path("train.ran").exists()
    command.train(**asked | {"other_device": True})
    assert Path("train.ran").exists()
    assert (
        "warning: the study is for h200-sxm, but this machine has no GPU" in capsys.readouterr().err
    )


def test_a_trl_study_names_the_trl_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_study(monkeypatch, tmp_path, trainer="trl")
    with pytest.raises(UsageError) as error:
        command.train(**(_NOTHING | {"random_weights": True}))
    assert re.fullmatch(
        r"cd \S+/export && .* trl sft --config trl_sft.yaml .*", error.value.remedy or ""
    )


def _scripted(folder: Path, text: str) -> Path:
    """Write a script in place of train.py and return its output directory, for a resumed run."""
    output = folder / "output"
    (output / "export").mkdir(parents=True)
    (output / "export" / "train.py").write_text(text)
    return output


_DIES_ON_SIGTERM = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("OSError: no room on the device"))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("text", ["raise RuntimeError('no room on the device')", _DIES_ON_SIGTERM])
def test_the_error_of_a_failed_script_is_quoted(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a stop. Errors and checkpoints of earlier sessions do not count."""
    _use_study(monkeypatch, tmp_path)
    output = _scripted(tmp_path, text)
    (output / "train.log").write_text("ValueError: long ago\n")
    (output / "checkpoint-3").mkdir()
    with pytest.raises(AutotuneError, match=r"training failed: .*no room on the device"):
        command.train(**(_NOTHING | {"random_weights": True, "output": output, "resume": True}))


def test_incomplete_progress_lines_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_study(monkeypatch, tmp_path)
    whole, last = json.dumps(line(3, 9.0, began=1.0)), json.dumps(line(100, 7.0, began=2.0))
    script = "import sys\npath = sys.argv[sys.argv.index('--progress') + 1]\n"
    output = _scripted(tmp_path, f"{script}open(path, 'a').write({last!r} + chr(10))")
    (output / "progress.jsonl").write_text(f"{whole}\nno JSON\n{whole[:20]}")
    command.train(**(_NOTHING | {"random_weights": True, "output": output, "resume": True}))
    training = json.loads((output / "training.json").read_text())
    assert (training["steps"], training["trained_s"]) == (100, 16.0)


def test_the_training_gets_no_secret_that_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_study(monkeypatch, tmp_path)
    secrets = ("AUTOTUNE_STORAGE", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "HF_TOKEN")
    for name in (*secrets, "NCCL_DEBUG"):
        monkeypatch.setenv(name, "canary")
    output = _scripted(
        tmp_path, "import json, os\njson.dump(dict(os.environ), open('environment.json', 'w'))"
    )
    monkeypatch.chdir(tmp_path)
    asked = _NOTHING | {"random_weights": True, "output": output, "resume": True}
    for named in ([], ["HF_TOKEN"]):
        command.train(**asked, pass_env=named)
        environment = json.loads((tmp_path / "environment.json").read_text())
        assert {name for name, value in environment.items() if value == "canary"} == {
            "NCCL_DEBUG",
            *named,
        }
        assert environment["PATH"] == os.environ["PATH"] and "HF_HUB_OFFLINE" not in environment
    with pytest.raises(UsageError, match="NO_SUCH: there is no such variable"):
        command.train(**asked, pass_env=["NO_SUCH"])


def test_a_study_without_a_winner_names_the_commands_for_it(tmp_path: Path) -> None:
    study = StudyResult(
        summary=replace(summary(), recipe=None, study="-a b"), record=record_of(out=tmp_path)
    )
    with pytest.raises(NothingFits) as error:
        _ = study.recipe
    commands = re.findall("`(.*?)`", error.value.remedy or "")
    assert [arguments_of_autotune(one, tmp_path) for one in commands] == [
        ["oom", "--", "-a b"],
        ["resume", "--", "-a b"],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_names_the_command_that_continues_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name.replace("\0", "")  # no argument can have it
    folder = tmp_path / name.replace("/", "")
    folder.mkdir()
    _use_study(monkeypatch, tmp_path, study=name)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    dataset, output = folder / "rows.jsonl", _scripted(folder, f"raise SystemExit({PREEMPTED})")
    (output / "checkpoint-3").mkdir()
    (output / "checkpoint-3" / "trainer_state.json").write_text("{}")
    dataset.write_text('{"text": "a few words"}\n' * 2)
    options: dict[str, Any] = {
        "dataset": dataset,
        "model": name,
        "output": output,
        "resume": True,
        "max_steps": 5,
    }
    asked = _NOTHING | options | {"other_device": True}
    with pytest.raises(Interrupted) as stopped:
        command.train(**asked, pass_env=["HTTPS_PROXY"], storage="sqlite:///a b.db")
    remedy = (stopped.value.remedy or "").removeprefix("continue with: ")
    expected = [
        "train",
        "--dataset",
        str(dataset),
        "--model",
        name,
        "--max-steps",
        "5",
        "--output-dir",
        str(output),
    ]
    expected += [
        "--pass-env=HTTPS_PROXY",
        "--other-device",
        "--storage",
        "sqlite:///a b.db",
        "--resume",
        *operands(name),
    ]
    assert arguments_of_autotune(remedy, tmp_path) == expected


_NOTHING: dict[str, Any] = {
    "dataset": None,
    "model": None,
    "random_weights": False,
    "output": None,
    "resume": False,
    "max_steps": None,
    "other_device": False,
}


def _use_study(monkeypatch: pytest.MonkeyPatch, out: Path, **changes: Any) -> None:
    made = replace(
        summary(), recipe=replace(demo(CONFIG), **{"device": resolve_device("cpu")} | changes)
    )
    study = StudyResult(summary=made, record=record_of(out=out))
    monkeypatch.setattr("autotune.api.load_study", lambda *_: study)

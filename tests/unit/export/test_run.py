"""Running exported scripts: processes, limits, logs, and what verification and quality make of what
is printed.

The scripts here are a few lines instead of a training.
"""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import Cancelled, StorageError, UsageError
from autotune.core.train_config import TrainConfig
from autotune.export import script, tool_file
from autotune.export.run import process, quality, verify
from autotune.export.run.process import (
    AddedLines,
    last_error,
    run_exported,
    scratch_folder,
    time_limit_s,
    write_files,
)
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from autotune.study.summary import Quality, Recipe, Verification
from tests.helpers.factories import summary
from tests.unit.export.test_script import demo, recipe


def run(
    folder: Path, text: str, *arguments: str, limit_s: float = 60.0, **options: Any
) -> dict[str, Any] | str:
    write_files(folder, {"train.py": text})
    stops = {"should_stop": lambda: False}
    return run_exported(folder, arguments, folder / "log", limit_s=limit_s, **(stops | options))


def test_a_run_hangs_after_a_quarter_of_an_hour_and_ten_times_its_steps() -> None:
    assert time_limit_s(30, 2.0) == 900 + 10 * 60


def test_what_a_script_prints_last_is_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    ticks: list[int] = []
    text = (
        "import json, os, sys, time\ntime.sleep(0.3)\nprint('first')\n"
        "print(json.dumps({'arguments': sys.argv[1:], "
    )
    text += (
        "'more': os.environ['MORE'], 'secret': os.environ.get('SECRET_TOKEN'), 'in':"
        " sys.stdin.read(),"
    )
    text += " 'folder': os.getcwd()}))\n"
    more = {"environment": {"MORE": "m"}, "while_running": lambda: ticks.append(1)}
    assert run(tmp_path, text, "a", "b c", **more) == {
        "arguments": ["a", "b c"],
        "more": "m",
        "secret": None,
        "in": "",
        "folder": str(tmp_path),
    }
    assert ticks


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('no object')", "the script printed no result"),
        ("print('[1]')", "the script printed no result"),
        ("pass", "the script printed no result"),
        ("raise SystemExit(3)", "exit code 3"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import sys; print('train.py: error: no rows', file=sys.stderr); print('50%|',"
         " file=sys.stderr); sys.exit(1)",
         "train.py: error: no rows"),
    ],
)  # fmt: skip
def test_why_there_is_no_result(text: str, reason: str, tmp_path: Path) -> None:
    assert run(tmp_path, text) == reason


def test_a_script_that_hangs_is_killed(tmp_path: Path) -> None:
    assert str(run(tmp_path, "import time; time.sleep(60)", limit_s=0.5)).startswith(
        "not done after "
    )
    with pytest.raises(Cancelled):
        run(tmp_path, "import time; time.sleep(60)", should_stop=lambda: True)


def test_a_module_is_run_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys; print('{\"said\": \"' + sys.argv[1] + '\"}')")
    assert run(tmp_path, "", "yes", script="mine") == {"said": "yes"}


def test_the_last_error_of_a_log_from_a_place_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = b"RuntimeError: old\n"
    log.write_bytes(before + b"Traceback\nsome.Module.OutOfMemoryError: CUDA\xff\n 100%|###\n")
    assert (
        last_error(log)
        == last_error(log, len(before))
        == "some.Module.OutOfMemoryError: CUDA\ufffd"
    )
    assert last_error(log, log.stat().st_size) == ""
    log.write_text("[rank0]: torch.OutOfMemoryError: CUDA\n[rank0]:[W1] a warning\n")
    assert last_error(log) == "torch.OutOfMemoryError: CUDA"
    log.write_text("KeyError: 1\nan Error in the middle\nValueError: " + "x" * 400)
    assert last_error(log) == "ValueError: " + "x" * 288


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    lines = AddedLines(tmp_path / "f")
    assert lines.read() == []
    with (tmp_path / "f").open("ab", buffering=0) as file:
        file.write(b"a\nb")
        assert lines.read() == [b"a\n"] and lines.read() == []
        file.write(b"c\nd\n")
        assert lines.read() == [b"bc\n", b"d\n"]


def test_a_scratch_folder_begins_empty_and_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "left").touch()
    with scratch_folder(folder) as made:
        assert made == folder and not list(folder.iterdir())
        (folder / "new").touch()
    assert not folder.exists()


# --- verification

# Prints its arguments as the train.py of an export would print its result, from a step of 2 s.
ECHO = (
    "import json, sys\nprint(json.dumps({'steps': int(sys.argv[3]), 'seconds_per_step': 2,"
    " 'argv': sys.argv[1:]}))\n"
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Scripts are ECHO; what they printed."""
    results: list[Any] = []

    def kept(*arguments: Any, **options: Any) -> Any:
        results.append((arguments, options, run_exported(*arguments, **options)))
        return results[-1][2]

    monkeypatch.setattr(script, "export", lambda recipe: {"train.py": ECHO})
    monkeypatch.setattr(verify, "run_exported", kept)
    monkeypatch.setattr(quality, "run_exported", kept)
    return results


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 101),
        ({"micro_steps": 1}, 3),
        ({"micro_steps": 5}, 4),
        ({"micro_steps": 1, "soak": True}, 5),
    ],
    ids=str,
)
def test_verification_runs_enough_steps_and_one_to_warm_up(
    options: dict[str, Any], steps: int, ran: list[Any], tmp_path: Path
) -> None:
    """Two micro batches a step."""
    made = demo(TrainConfig(micro_batch_size=4, seq_len=32))
    (tmp_path / "logs").mkdir()
    said: list[str] = []
    done = verify.verify(made, tmp_path, say=said.append, **options)
    assert (
        done.reason is None and done.seconds_per_step == 2.0 and done.micro_steps == 2 * (steps - 1)
    )
    assert (done.file, done.probed, done.soak, done.tolerance) == (
        "train.py",
        True,
        "soak" in options,
        0.1 if made.device.kind == "cpu" else 0.05,
    )
    assert verify.tolerance_on(resolve_device("cpu")) == 2 * verify.tolerance_on(
        resolve_device("h100-sxm")
    )
    assert done.promised_step_s == made.winner.performance.step_time_s
    assert done.promised_gib == made.winner.measurement.peak_reserved_gib
    argv = ran[0][2]["argv"]
    expected = [
        "--random-weights",
        "--max-steps",
        str(steps),
        "--held-out",
        "1",
        "32",
        "--progress",
        verify.STEPS,
    ]
    expected += [
        "--output-dir",
        "saved",
        *(["--lengths", "lengths.txt"] if "soak" in options else []),
    ]
    assert argv == expected
    assert ran[0][1]["limit_s"] == time_limit_s(steps, done.promised_step_s)
    reporter = ran[0][1]["while_running"].__self__
    assert isinstance(reporter, verify._StepReporter) and reporter._steps == steps
    assert said[0].startswith(f"running the exported train.py for {steps} steps, about ")
    assert not (tmp_path / ".verify").exists()


def test_full_fine_tuning_saves_nothing_in_a_verification(ran: list[Any], tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    verify.verify(demo(TrainConfig(method="full", seq_len=32)), tmp_path, micro_steps=1)
    assert ran[0][2]["argv"][-2:] == ["--output-dir", ""]


class Steps:
    """A file to which a run of `each_s` seconds a step adds lines, and a clock."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch, each_s: float) -> None:
        self.file, self.each_s, self.now, self.done = file, each_s, 100.0, 0
        monkeypatch.setattr(verify.time, "monotonic", lambda: self.now)

    def end(self, reporter: verify._StepReporter, *, paused: float = 0.0) -> None:
        """End one more step, and report it."""
        self.done += 1
        self.now += self.each_s
        line = {"step": self.done, "seconds": self.done * self.each_s + paused, "paused": paused}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        reporter.report()


def test_a_tenth_of_the_steps_is_reported_at_the_pace_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 s a step were predicted, and the run takes 15 s."""
    said: list[str] = []
    steps = Steps(tmp_path / "steps", monkeypatch, 15.0)
    reporter = verify._StepReporter(steps.file, 20, 3.0, said.append)
    for _ in range(20):
        steps.end(reporter)
    assert said[0] == "verifying: step 1 of 20, about 57 s left"
    assert said[1] == "verifying: step 2 of 20, about 4 min 30 s left"
    assert said[-1] == "verifying: step 20 of 20, the last" and len(said) == 11


def test_a_run_that_has_no_step_yet_reports_that_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    steps = Steps(tmp_path / "steps", monkeypatch, 1.0)
    reporter = verify._StepReporter(steps.file, 200, 3.0, said.append)
    for now in (101.0, 102.0, 103.0, 131.0, 132.0):
        steps.now = now
        reporter.report()
    assert said == ["verifying: loading the model; no step has ended yet"] * 2


def test_a_stopped_run_says_what_its_steps_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step, which also compiles, does not count."""
    said: list[str] = []
    steps = Steps(tmp_path / "steps", monkeypatch, 15.0)
    reporter = verify._StepReporter(steps.file, 20, 3.0, said.append)
    steps.end(reporter)
    reporter.stopped()
    assert not any("stopped" in text for text in said)
    for _ in range(4):
        steps.end(reporter)
    reporter.stopped()
    assert said[-1] == (
        "verifying: stopped after step 5 of 20. A step took 15 s, 5.00 times the predicted time"
    )


def test_a_verdict_is_reported_as_soon_as_it_is_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 timed steps may take 60 s. Pauses and the first step do not count."""
    said: list[str] = []
    steps = Steps(tmp_path / "steps", monkeypatch, 15.0)
    reporter = verify._StepReporter(steps.file, 21, 3.0, said.append, 60.0)
    for paused in (0.0, 0.0, 0.0, 100.0, 100.0):
        steps.end(reporter, paused=paused)
    assert not any("slower" in text for text in said)
    for _ in range(15):
        steps.end(reporter, paused=100.0)
    (verdict,) = [text for text in said if "slower" in text]
    assert "This is certain after 6 of 21 steps" in verdict


def test_a_verdict_before_the_end_needs_a_predicted_speed() -> None:
    recipe = demo(TrainConfig(seq_len=32))
    step_s = recipe.winner.performance.step_time_s
    prediction = Verification(
        config=recipe.config,
        micro_steps=8,
        tolerance=0.05,
        promised_tokens_per_s=1.0,
        promised_step_s=step_s,
        promised_gib=1.0,
    )
    allowed_s = verify._allowed_s(recipe, prediction, 5)
    assert allowed_s == pytest.approx(4 * step_s * 1.05 * (1 + verify.MARGIN))
    compiled = demo(TrainConfig(seq_len=32, compile="per_layer"))
    for other in (replace(prediction, soak=True), replace(prediction, probed=False)):
        assert verify._allowed_s(recipe, other, 5) == math.inf
    assert verify._allowed_s(compiled, prediction, 5) == math.inf


@pytest.mark.parametrize("batch", [1, 3])
def test_the_rows_of_a_soak(batch: int) -> None:
    """Half the micro batches have a row of the whole length; all
    other rows have a quarter at most.
    """
    lengths = verify.straining_lengths(TrainConfig(micro_batch_size=batch, seq_len=100))
    assert len(lengths) == 1024 and lengths[:2] == [100, 25]
    assert {length for length in lengths if length != 100} == set(range(2, 26))
    share = sum(100 in lengths[at : at + batch] for at in range(0, 1024 - batch, batch)) / (
        1024 // batch
    )
    assert share == pytest.approx(0.5, abs=0.06)
    assert set(verify.straining_lengths(TrainConfig(seq_len=4))) == {2, 4}


def test_what_is_made_for_trl() -> None:
    """Rows for whole steps, no more than are needed and about 1,024 at most."""
    made = replace(demo(TrainConfig(micro_batch_size=8, seq_len=32)), device=resolve_device("cpu"))
    data = verify._made_for_trl(made, 3, None)
    assert data == {
        "model": made.model.config,
        "device": "cpu",
        "rows": 16 * 3,
        "lengths": [32] * 48,
        "objective": "sft",
        "trained_share": 1.0,
        "held_out": [32] * 8,
    }
    many = verify._made_for_trl(replace(made, device=resolve_device("a10")), 500, [5, 6])
    assert (many["rows"], many["device"], many["lengths"]) == (1024, "cuda", [5, 6])


@pytest.mark.parametrize("size", [1, 8, 32])
def test_what_is_made_for_trl_pads_as_the_run_does(size: int) -> None:
    """TRL pads to the longest row of a micro batch, and the longest of all sets the peak."""
    lengths = Lengths.from_summary(400, 2000)
    config = TrainConfig(micro_batch_size=size, seq_len=8192)
    made = recipe(config, workload=Workload(examples=10_000, lengths=lengths))
    data = verify._made_for_trl(made, 500, None)
    same = Workload(examples=data["rows"], lengths=Lengths.of(data["lengths"], "given"))
    assert len(data["lengths"]) == data["rows"]
    assert same.tokens_per_row(config) == pytest.approx(
        made.workload.tokens_per_row(config), rel=0.01
    )
    assert max(data["lengths"]) == lengths.longest < 8192


@pytest.mark.parametrize(
    ("padding", "longest"), [("longest", 20), ("bucket", 20), ("max_length", 32)]
)
def test_no_row_of_a_verification_is_longer_than_the_longest_of_the_run(
    padding: str, longest: int, ran: list[Any], tmp_path: Path
) -> None:
    """More memory than for that was not promised."""
    base = demo(TrainConfig(micro_batch_size=4, seq_len=32, padding=padding))
    made = replace(base, workload=replace(base.workload, lengths=Lengths.constant(20)))
    (tmp_path / "logs").mkdir()
    strained: list[int] = []

    def export(recipe: Recipe) -> dict[str, str]:
        return {
            "train.py": ECHO
            + "print(json.dumps({'steps': 5, 'lengths': open('lengths.txt').read()}))\n"
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "export", export)
        verify.verify(made, tmp_path, micro_steps=1, soak=True)
    strained = [int(length) for length in ran[0][2]["lengths"].split()]
    assert max(strained) == longest
    verify.verify(made, tmp_path, micro_steps=1)
    assert ran[1][2]["argv"][3:6] == ["--held-out", "1", str(longest)]
    assert verify._made_for_trl(made, 3, None)["held_out"] == [longest] * 4


@pytest.mark.parametrize(
    ("method", "precision", "bytes_each"),
    [("lora", "fp32", 2), ("full", "bf16_pure", 4), ("full", "fp32", 6)],
)
def test_the_room_for_random_weights(
    method: str, precision: str, bytes_each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(TrainConfig(method=method, precision=precision))
    needed = made.winner.measurement.total_params * bytes_each
    monkeypatch.setattr(verify.shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed))
    verify._check_room(made, tmp_path)
    monkeypatch.setattr(
        verify.shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 2**20)
    )
    with pytest.raises(StorageError, match="random weights of this model take"):
        verify._check_room(made, tmp_path)


def promise() -> Verification:
    values = {
        "micro_steps": 2,
        "tolerance": 0.05,
        "promised_tokens_per_s": 1.0,
        "promised_step_s": 2.0,
    }
    return Verification(config=TrainConfig(), promised_gib=2.0, **values)


def test_what_a_run_printed_is_kept() -> None:
    printed = {"steps": 3, "seconds_per_step": 4, "peak_reserved_gib": 5.0, "peaks_gib": [1.0, 2.0]}
    done = verify.with_result(promise(), printed, 3)
    assert (done.seconds_per_step, done.reserved_gib, done.peaks_gib, done.reason) == (
        4.0,
        5.0,
        (1.0, 2.0),
        None,
    )
    assert verify.with_result(promise(), printed | {"peaks_gib": None}, 3).peaks_gib == ()
    for wrong in ({"steps": 2}, {"seconds_per_step": 0}, {"seconds_per_step": "4"}):
        assert verify.with_result(promise(), printed | wrong, 3).reason is not None


@pytest.mark.parametrize(
    ("trainer", "form", "runs", "file", "probed"),
    [
        ("transformers", None, "train", "train.py", True),
        ("transformers", "trl", "trl", "trl_sft.yaml", False),
        ("trl", None, "trl", "trl_sft.yaml", True),
        ("trl", "train", "train", "train.py", False),
    ],
)
def test_the_form_that_was_probed_is_run_unless_another_is_asked_for(
    trainer: str,
    form: str | None,
    runs: str,
    file: str,
    probed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []

    def running(name: str) -> Any:
        def run(recipe: Recipe, folder: Path, steps: int, lengths: Any, run: Any) -> dict[str, Any]:
            begun.append(name)
            assert lengths is None and recipe.workload.eval_share == 0.0
            return {"steps": steps, "seconds_per_step": 2.0}

        return run

    for name in ("train", "trl"):
        monkeypatch.setattr(verify, f"_run_{name}", running(name))
    made = replace(demo(TrainConfig(seq_len=32)), trainer=trainer)
    made = replace(made, workload=replace(made.workload, eval_share=0.25))
    small = replace(
        made.winner, measurement=replace(made.winner.measurement, peak_reserved_gib=0.5)
    )
    done = verify.verify(replace(made, winner=small), tmp_path, form=form, micro_steps=1)
    assert (
        done.promised_gib == 0.5
        and begun == [runs]
        and (done.file, done.probed, done.reason) == (file, probed, None)
    )


@pytest.mark.parametrize(
    ("method", "lengths", "every", "saves"),
    [("lora", None, "9", "steps"), ("full", [5, 6], "3", "no")],
)
def test_trl_runs_on_rows_of_tokens_through_the_launcher_of_accelerate(
    method: str,
    lengths: list[int] | None,
    every: str,
    saves: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A soak evaluates and saves in each quarter of its nine steps."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(verify.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**60))
    calls: list[tuple[list[str], dict[str, Any]]] = []

    def run(arguments: list[str], **options: Any) -> dict[str, Any]:
        calls.append((arguments, options))
        return {"call": len(calls)}

    made = demo(TrainConfig(method=method, micro_batch_size=4, seq_len=32))
    for device, hides in (("h200", False), ("cpu", True)):
        calls.clear()
        on_device = replace(made, device=resolve_device(device))
        assert verify._run_trl(on_device, tmp_path, 9, lengths, run) == {"call": 2}
        (weights, options), (arguments, again) = calls
        assert weights == ["made.json"] and options["script"] == "autotune.probe.synthetic_model"
        assert json.loads((tmp_path / "made.json").read_text()) == verify._made_for_trl(
            on_device, 9, lengths
        )
        home = Path(verify.HOME)
        assert (home / "autotune" / "export" / "run" / "verify.py").samefile(verify.__file__)
        expected = {
            "HF_DATASETS_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": f"{home}{os.pathsep}/mine",
        }
        assert options["environment"] == again["environment"]
        assert options["environment"] == expected | ({"CUDA_VISIBLE_DEVICES": ""} if hides else {})
        assert again["script"] == "accelerate.commands.launch"
        head = [
            "--quiet",
            *tool_file.launch_arguments(on_device),
            "--module",
            "autotune.probe.trl_entry",
        ]
        head += ["sft", "--config", "trl_sft.yaml"]
        assert arguments[: len(head)] == head and (tmp_path / "trl_sft.yaml").is_file()
        rest = arguments[len(head) :]
        assert dict(zip(rest[::2], rest[1::2], strict=True)) == {
            "--model_name_or_path": str(tmp_path / "model"),
            "--dataset_name": str(tmp_path / "data"),
            "--assistant_only_loss": "False",
            "--output_dir": str(tmp_path / "saved"),
            "--max_steps": "9",
            "--eval_on_start": "True",
            "--eval_strategy": "steps",
            "--eval_steps": every,
            "--per_device_eval_batch_size": "4",
            "--save_strategy": saves,
            "--save_steps": every,
            "--save_total_limit": "1",
        }


def test_trl_is_not_run_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**60))
    made = demo(TrainConfig(micro_batch_size=4, seq_len=32))
    reason = verify._run_trl(made, tmp_path, 9, None, lambda *_, **options: "exit code 3")
    assert reason == "no random weights could be made: exit code 3"


# --- quality


def study(rows: int = 700, batch: int = 32) -> tuple[Recipe, Quality]:
    made = summary().recipe
    assert made is not None
    workload = Workload(
        examples=rows, lengths=Lengths.of([8] * rows, "counted"), global_batch=batch
    )
    return replace(made, workload=workload), Quality(steps=1, trained_on=4, held_out=2, tokens=8)


def test_what_is_promised_of_a_step_follows_the_tokens_that_it_happened_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro batches of two rows of 101 tokens take 3 s, of 301 tokens 5 s: 0.005 s a token.

    A step has four.
    """
    halves = Workload(examples=1000, lengths=Lengths.of([101, 301], "counted"), global_batch=8)
    made = recipe(TrainConfig(micro_batch_size=2, seq_len=512), workload=halves)
    step_s = made.winner.performance.step_time_s
    known = replace(made.winner.measurement, kind_s=((0.25, 3.0), (0.75, 5.0)))
    timed = replace(made, winner=replace(made.winner, measurement=known))
    assert made.shape.tokens_per_step == 4 * 2 * 251
    assert verify._step_s_of(timed, 2008.0) == step_s
    assert verify._step_s_of(timed, 2408.0) == pytest.approx(step_s + 400 * 0.005)
    # half of the tokens of a step on each
    shared = replace(made.winner.config, num_gpus=2, sharding="ddp")
    pair = replace(timed, winner=replace(timed.winner, config=shared))
    assert verify._step_s_of(pair, 1004.0) == step_s
    # Most micro batches of so short a run are of a length that none before had, hardly any of the
    # whole run.
    planned = replace(
        made, winner=replace(made.winner, config=replace(made.config, padding="masked"))
    )
    planned = replace(
        planned, winner=replace(planned.winner, measurement=replace(known, new_length_s=0.5))
    )
    share = made.workload.new_length_share
    # of the third to the tenth
    timed_share = (10 * share(planned.config, 10) - 2 * share(planned.config, 2)) / 8
    assert verify._plans_s(planned, 2, 10) == pytest.approx(
        4 * 0.5 * (timed_share - share(planned.config))
    )
    assert verify._plans_s(planned, 0, 2) > 0.5 and verify._plans_s(timed, 0, 2) == 0.0
    # what is not known
    assert verify._step_s_of(timed, None) == verify._step_s_of(made, 2408.0) == step_s

    def ran(recipe: Recipe, folder: Path, steps: int, lengths: Any, run: Any) -> dict[str, Any]:
        return {"steps": steps, "seconds_per_step": 2.0, "padded_tokens_per_step": 2408.0}

    monkeypatch.setattr(verify, "_run_train", ran)
    done = verify.verify(timed, tmp_path, micro_steps=1)
    assert (
        done.promised_step_s == pytest.approx(step_s + 400 * 0.005) and done.seconds_per_step == 2.0
    )


@pytest.mark.parametrize(
    ("rows", "batch", "steps", "held_out"),
    [
        (10_000, 32, 20, 64),
        (640, 32, 18, 64),
        (300, 32, 8, 30),
        (10, 3, 3, 1),
        (4, 3, 1, 1),
        (3, 3, 0, 1),
    ],
)
def test_how_many_steps_and_examples(rows: int, batch: int, steps: int, held_out: int) -> None:
    """A tenth is held out, 64 at most, at least one; twenty steps at most of what is left."""
    workload = study(rows, batch)[0].workload
    assert (quality._num_steps(workload), quality.num_held_out(workload)) == (steps, held_out)


def test_why_no_loss_can_be_measured() -> None:
    model = replace(resolve_model("demo-3m"), weights="w", tokenizer="w")
    workload = study()[0].workload
    assert quality.measurement_obstacle(model, workload, "d") is None
    assert "real weights" in str(
        quality.measurement_obstacle(replace(model, weights=None), workload, "d")
    )
    assert "examples to learn from" in str(quality.measurement_obstacle(model, workload, None))
    assert "tokenizer" in str(
        quality.measurement_obstacle(replace(model, tokenizer="t"), workload, "d")
    )
    few = study(3, 3)[0].workload
    assert (
        quality.measurement_obstacle(model, few, "d")
        == "3 examples are too few: some are held out, and a step needs 3"
    )
    assert quality.measurement_obstacle(model, study(4, 3)[0].workload, "d") is None


def test_the_sample_has_each_chosen_row_once_and_only_its_columns(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {number}", "other": 1, "prompt": None} for number in range(9)]
    data.write_text("\n".join(map(json.dumps, rows)))
    _, asked = study()
    lines = quality.sample(data, None, 9, asked.trained_on, asked.held_out).splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 6 and all(row.keys() == {"text"} for row in found)
    assert len({row["text"] for row in found}) == 6 and found != sorted(
        found, key=lambda row: row["text"]
    )
    assert quality.sample(data, None, 9, asked.trained_on, asked.held_out).splitlines() == lines
    with pytest.raises(UsageError, match="fewer examples than when the study"):
        quality.sample(data, None, 12, 10, asked.held_out)


def test_all_finalists_train_on_the_same_sample(
    ran: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = study(50, 4)
    assert made.baseline is not None
    others = [
        replace(made.winner, config=replace(made.config, lora_rank=rank))
        for rank in (4, 8, 64, 128)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": str(number)}) for number in range(50)))
    (tmp_path / "logs").mkdir()
    text = "import json, sys\nrows = open('../examples.jsonl').read().splitlines()\n"
    text += (
        "print(json.dumps({'held_out_loss': [len(rows), 2.5], 'steps': int(sys.argv[4]),"
        " 'argv': sys.argv[1:]}))"
    )
    lengths: list[int] = []

    def export(recipe: Recipe) -> dict[str, str]:
        lengths.append(recipe.winner.cost.num_steps)
        return {"train.py": text}

    monkeypatch.setattr(script, "export", export)
    said: list[str] = []
    found = quality.compare(
        made, [made.winner, *others], data, tmp_path, said.append, lambda: False
    )
    assert (found.steps, found.trained_on, found.held_out) == (11, 44, 5)
    configs = [made.winner.config, made.baseline.config, others[0].config, others[1].config]
    assert [one.config for one in found.learned] == configs and lengths == [11] * 4
    assert {(one.loss_before, one.loss_after, one.reason) for one in found.learned} == {
        (49, 2.5, None)
    }
    tokens = max(config.seq_len for config in configs)
    assert found.tokens == tokens
    expected = [
        "--dataset",
        "../examples.jsonl",
        "--max-steps",
        "11",
        "--output-dir",
        "",
        "--held-out",
        "5",
        str(tokens),
        "--report-to",
        "none",
    ]
    assert all(result["argv"] == expected for *_, result in ran)
    assert said[0].startswith("learning, 1 of 4: ") and len(said) == 4
    assert (
        found.learned[0].full_run_hours == made.winner.cost.full_run_hours
        and found.learned[0].seconds > 0
    )
    assert not (tmp_path / ".quality").exists()
    stopped = quality.compare(made, others, data, tmp_path, said.append, lambda: True)
    assert stopped.learned == ()


@pytest.mark.parametrize(
    ("printed", "losses"),
    [
        ({"held_out_loss": [3.0, 2.0], "steps": 5}, {"loss_before": 3.0, "loss_after": 2.0}),
        ("killed", {"reason": "killed"}),
        ({"steps": 5}, {"reason": "the script printed no losses"}),
        ({"held_out_loss": [3.0], "steps": 5}, {"reason": "the script printed no losses"}),
        ({"held_out_loss": None, "steps": 5}, {"reason": "the script printed no losses"}),
        ({"held_out_loss": [3.0, 2.0], "steps": 4}, {"reason": "the training took 4 of 5 steps"}),
        (
            {"held_out_loss": [3.0, float("nan")], "steps": 5},
            {"reason": "the loss went from 3.0 to nan"},
        ),
        (
            {"held_out_loss": [float("inf"), 2.0], "steps": 5},
            {"reason": "the loss went from inf to 2.0"},
        ),
    ],
    ids=str,
)
def test_losses_that_count(printed: Any, losses: dict[str, Any]) -> None:
    assert quality._losses(printed, 5) == losses


def test_the_command_gets_a_signal_when_its_parent_dies() -> None:
    by_default = process.command("a.py", ["x"])
    assert by_default == [
        sys.executable,
        process.child.__file__,
        "9",
        str(os.getpid()),
        "a.py",
        "x",
    ]
    assert process.command("a.py", [], signal.SIGTERM)[2] == "15"


def test_a_script_runs_where_the_package_is_not_installed(tmp_path: Path) -> None:
    """-S leaves out what is installed.

    The script finds its neighbours, and a module those of the working directory.
    """
    (tmp_path / "neighbour.py").write_text("word = 'found'\n")
    (tmp_path / "mine.py").write_text(
        "import sys, neighbour\nprint(neighbour.word, __name__, sys.argv[1:])\n"
    )
    for target, folder in ((str(tmp_path / "mine.py"), "/"), ("mine", str(tmp_path))):
        child = [process.child.__file__, "9", str(os.getpid()), target, "a", "b c"]
        done = subprocess.run(
            [sys.executable, "-S", *child],
            cwd=folder,
            env={},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "found __main__ ['a', 'b c']\n", done.stderr

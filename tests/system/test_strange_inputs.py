"""200 damaged dataset files and 200 random command lines: each ends in an answer or in one
sentence.

A file or a command line that ends a process with a signal, hangs or raises ends only a child of
this process. `benchmarks/strange_inputs.py` tries 2000 of each.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from autotune.cli import app
from tests.helpers.command_lines import command_lines, enter, run_command, store_study
from tests.helpers.strange_inputs import ENDS, File, FileReader, Trial, files, tried

LATE_S = 300.0  # a hang, also on a busy machine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # undone at the end
    for name, value in enter(tmp_path).items():
        monkeypatch.setenv(name, value)
    return Path.cwd()


def faults(trials: list[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.end in ENDS]


def test_damaged_files(folder: Path) -> None:
    # pyarrow 26 ended the process when it gave the columns of its footer
    aborting = File(kind="parquet", number=795)
    trials = tried([*files(200), aborting], FileReader(folder).read, late_s=LATE_S)
    assert faults(trials) == []
    assert len(trials) == 201 and {trial.end for trial in trials} == {"answer", "error"}


def test_random_command_lines(folder: Path) -> None:
    store_study()
    trials = tried(command_lines(200), run_command, name=json.dumps, late_s=LATE_S)
    assert faults(trials) == []
    assert len(trials) == 200 and {trial.end for trial in trials} == {"answer", "error"}

    # A refused line tries little of its command.
    for commands in (app.COMMANDS, ("plan", "compare", "check")):
        ends = [trial.end for trial in trials if json.loads(trial.input)[0] in commands]
        assert ends.count("answer") >= 0.3 * len(ends)


def test_each_kind_of_fault_is_noticed() -> None:
    """An input after a fault is tried in another child."""

    def run(fault: str) -> tuple[str, str]:
        if fault == "signals":
            os.kill(os.getpid(), signal.SIGKILL)
        while fault == "over_20_s":
            pass
        if fault == "unexpected":
            return fault, "exit code 1"
        assert fault == "answer"
        return fault, ""

    inputs = ["answer", *ENDS, "answer"]
    assert [trial.end for trial in tried(inputs, run, late_s=0.5)] == inputs

"""`autotune calibrate` on the CPU of this machine: what it keeps, what a plan makes of it, and what
Ctrl-C leaves.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.cli.commands.doctor import _calibration
from autotune.core.machine import processor_name
from autotune.problem.calibration import read_calibration
from tests.helpers.probing import alive, until

pytestmark = pytest.mark.probe

KEPT = Path("cache", "autotune", "calibration", "cpu.json")


def command(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(folder: Path, *arguments: str) -> str:
    process = command(folder, *arguments)
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this machine was calibrated."""
    folder = tmp_path_factory.mktemp("calibrated")
    files = ("--out", "copy.json", "--share", "shared.json")
    printed = output(folder, "calibrate", "--gpu", "cpu", *files)
    assert "ms to issue a layer" in printed
    assert "kept in cache/autotune/calibration/cpu.json" in printed
    return folder


def test_what_was_measured_is_kept_and_copied(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} >= {"cache", "copy.json", "shared.json"}
    assert (folder / "copy.json").read_text() == (folder / KEPT).read_text()
    made = read_calibration(folder / "copy.json")
    assert (made.device, made.processor, made.reference) == ("cpu", processor_name(), None)
    assert made.fingerprint.packages["torch"] and not made.measures_gpu
    assert 0.1 < made.layer_ms < 10_000  # from any host to a very busy one


def test_the_shared_file_is_a_calibration_for_others(folder: Path) -> None:
    made, shared = read_calibration(folder / "copy.json"), (folder / "shared.json").read_text()
    assert "/" not in shared and os.uname().nodename not in shared
    printed = output(folder, "import", "shared.json")
    (stored,) = (folder / "runs" / "evidence" / "calibrations").iterdir()
    assert f"--calibration {stored.relative_to(folder)}" in printed
    theirs = read_calibration(stored)
    assert (theirs.device, theirs.rates, theirs.layer_ms) == ("cpu", made.rates, made.layer_ms)


def test_a_plan_for_a_gpu_takes_the_host_of_the_file(folder: Path) -> None:
    small = (
        "--model",
        "mistral-7b",
        "--gpu",
        "a10",
        "--seq-len",
        "64",
        "--set",
        "micro_batch_size=1",
        "--json",
    )
    plain = json.loads(output(folder, "plan", *small))
    given = json.loads(output(folder, "plan", *small, "--calibration", "copy.json"))
    assert plain["calibrated"] is None and given["calibrated"].startswith(
        "host calibrated by copy.json, 20"
    )
    assert given["baseline"]["tokens_per_s"] != plain["baseline"]["tokens_per_s"]
    assert given["baseline"]["peak_reserved_gib"] == plain["baseline"]["peak_reserved_gib"]


def test_doctor_shows_it_or_how_to_make_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("autotune.core.nvml.list_gpus", list)
    monkeypatch.setattr("autotune.planning.slow_parts.num_cores", lambda: 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    none, *slow = _calibration()
    assert (none.name, none.ok, none.found) == ("calibration", None, "none")
    assert none.remedy and none.remedy.startswith(
        "`autotune calibrate --gpu cpu` measures this machine"
    )
    assert [check.ok for check in slow] == [None] * len(slow) and "1 processors, below 4" in slow[
        0
    ].found
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    shown = {check.name: check for check in _calibration()}
    assert (
        "calibrated on this machine, 20" in shown["calibrated device"].found
        and shown["calibrated device"].ok
    )
    assert "ms to issue a layer" in shown["calibrated host"].found and "slow: cores" in shown


@pytest.mark.real_processes
def test_stopped_by_ctrl_c_it_keeps_no_measurement(tmp_path: Path) -> None:
    process = command(tmp_path, "calibrate", "--gpu", "cpu")
    parent = psutil.Process(process.pid)
    until(lambda: bool(parent.children(recursive=True)), "a worker")
    workers = parent.children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.endswith("error: stopped; nothing was kept\n"), said
    until(lambda: not any(alive(worker.pid) for worker in workers), "the end of the worker")
    assert not (tmp_path / KEPT.parent).exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}  # a worker's compiled code


def test_another_card_than_the_one_that_is_here_is_refused(tmp_path: Path) -> None:
    process = command(tmp_path, "calibrate", "--gpu", "no-such-card")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "unknown gpu 'no-such-card'" in said

"""The further workers of a run on this machine: failures are reported, and they are waited for."""

import time
from pathlib import Path

import pytest

from autotune.core.errors import EnvironmentProblem
from autotune.core.process import StopToken
from autotune.study import worker_group
from autotune.study.progress import TextProgress
from autotune.study.worker_group import further_cards, local_workers


def test_a_failed_worker_is_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    url = f"sqlite:///{tmp_path}/a.db"
    with local_workers([None], "none", url, tmp_path, TextProgress(lines.append), StopToken()):
        end = time.monotonic() + 60
        log = tmp_path / "worker-2" / "logs" / "tuner.log"
        while "try: " not in log.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)  # to its exit
    assert f"worker 2 failed (exit code 2): {tmp_path}/worker-2/logs" in lines
    assert "there is no study 'none'" in log.read_text()


@pytest.mark.parametrize("stops", [True, False])
def test_busy_workers_are_waited_for_unless_the_user_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(worker_group, "LEAVE_S", 3.0)
    sleeper = tmp_path / "sleeper"  # a worker that does not leave by itself
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(worker_group.sys, "executable", str(sleeper))
    begun = time.monotonic()
    lines: list[str] = []
    stop = StopToken()
    with local_workers([None], "one", "sqlite://", tmp_path, TextProgress(lines.append), stop):
        if stops:
            stop.request()
    assert (time.monotonic() - begun > 3.0) is not stops
    assert lines[0].startswith("waiting for the other workers")


def test_there_are_no_more_workers_than_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert further_cards(2, cpu=False) == [3] and further_cards(1, cpu=False) == []
    assert further_cards(3, cpu=True) == [None, None]
    with pytest.raises(EnvironmentProblem, match="--workers 3: GPUs here: 2") as caught:
        further_cards(3, cpu=False)
    assert caught.value.remedy == "give --workers 2"

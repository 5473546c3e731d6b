"""The further workers of a run on this machine: failures are reported, and they are waited for."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import DeviceSpec, resolve_device
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.probe_types import Outcome, Rung
from autotune.core.process import StopToken
from autotune.core.train_config import TrainConfig
from autotune.study import worker_group
from autotune.study.progress import TextProgress
from autotune.study.summary import TrialRecord
from autotune.study.worker_group import further_cards, local_workers, require_ray, workers_by_node
from tests.helpers.factories import summary


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
    monkeypatch.setattr(sys, "executable", str(sleeper))
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
    with pytest.raises(
        EnvironmentProblem, match="--workers 3 needs a GPU for each worker, but this machine has 2"
    ) as caught:
        further_cards(3, cpu=False)
    assert caught.value.remedy == "give --workers 2"


GPU, CPU = resolve_device("h200"), resolve_device("cpu")


@pytest.mark.parametrize(
    ("device", "counts"), [(GPU, {"home": 8, "like": 4}), (CPU, {"home": 2, "like": 0, "other": 3})]
)
def test_nodes_of_a_cluster_take_a_worker_for_each_gpu_like_this_one(
    device: DeviceSpec, counts: dict[str, int]
) -> None:
    h200, other = {"accelerator_type:H200": 1.0}, {"accelerator_type:A100": 1.0}
    nodes: dict[str, dict[str, Any]] = {
        "home": {"Resources": {"GPU": 8.0, "autotune": 2.0} | h200},
        "like": {"Resources": {"GPU": 4.0} | h200},
        "other": {"Resources": {"GPU": 2.0, "autotune": 3.0} | other},
    }
    assert workers_by_node(nodes, "home", device) == counts
    assert workers_by_node({"home": {"Resources": {}}}, "home", device) == {"home": 0}


def test_ray_is_required_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "find_spec", lambda name: None)
    require_ray(None)
    with pytest.raises(UsageError, match="Ray is not installed"):
        require_ray("auto")
    monkeypatch.setattr(worker_group, "find_spec", lambda name: object() if name == "ray" else None)
    require_ray("auto")


def test_a_worker_on_a_card_sees_that_card_and_the_url_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = tmp_path / "recorder"
    recorder.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $AUTOTUNE_STORAGE $*"\n')
    recorder.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(recorder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    with local_workers(
        [3, None], "one", "sqlite:///a.db", tmp_path, TextProgress(lines.append), StopToken()
    ):
        pass
    parent = os.getpid()
    for number, card in ((2, "3"), (3, "7")):
        folder = tmp_path / f"worker-{number}"
        assert (folder / "logs" / "tuner.log").read_text() == (
            f"{card} sqlite:///a.db -P -m autotune worker --study one --out {folder} --parent"
            f" {parent}\n"
        )
    assert not any("failed" in line for line in lines)


def test_lines_of_progress() -> None:
    lines: list[str] = []
    progress = TextProgress(lines.append)
    progress.say("one")
    progress.note("two", "yellow")
    for speed in (None, 1234.5):
        config = TrainConfig()
        row = TrialRecord(
            number=3, config=config, outcome=Outcome.OK, rung=Rung.FULL, tokens_per_second=speed
        )
        progress.trial(row)
    progress.result(summary(), "out")
    progress.configs([], "there")
    label = TrainConfig().label()
    assert lines == [
        *("one", "two", f"trial 3: ok, {label}", f"trial 3: ok, 1,234 tokens/s, {label}"),
        *("written: out", "written: there"),
    ]
    TextProgress().say("to nobody")

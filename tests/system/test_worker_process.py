"""`autotune worker` in real processes: two share a study, one is killed, one is stopped, two cannot
join.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.trial import FrozenTrial, TrialState

from autotune.study.storage.study_record import Limits, StudyPhase, update_record
from tests.helpers.fork_server import FULL_TIMES
from tests.helpers.next_commands import run_next
from tests.helpers.shared_study import ARGUMENTS, SPACE, opened

pytestmark = pytest.mark.probe
TRIALS = 24  # alone, longer than the second worker takes to start


@dataclass(frozen=True, kw_only=True)
class Place:
    """A folder with a study that two workers finished. `shown` is what the leader printed."""

    folder: Path
    summary: dict[str, Any]
    shown: str = ""

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'runs' / 'autotune.db'}"

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        with opened(self.url) as search:
            return [one for one in search.record()[1] if not states or one.state in states]

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        line = [sys.executable, "-m", "autotune", *arguments]
        environment = {
            name: value for name, value in os.environ.items() if name != "AUTOTUNE_STORAGE"
        }
        # A study of short probes might end before its second worker has started.
        environment[FULL_TIMES] = "1"
        return subprocess.Popen(
            line, cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    empty = Place(folder=tmp_path_factory.mktemp("fleet"), summary={})
    (empty.folder / "space.yaml").write_text(SPACE)
    ended = empty.start("run", *ARGUMENTS, "--trials", str(TRIALS), "--workers", "2", "--json")
    _, errors = ended.communicate(timeout=300)
    assert ended.returncode == 0, errors
    return Place(
        folder=empty.folder,
        summary=json.loads((empty.folder / "runs" / "one" / "summary.json").read_text()),
        shown=errors,
    )


@pytest.fixture
def open_again(place: Place) -> None:
    """Reopen the study as if its leader still searched."""
    with opened(place.url) as search:
        limits = Limits(**search.recall("limits"))
        update_record(
            search, phase=StudyPhase.SEARCHING, limits=replace(limits, trials=None, patience=999)
        )


def until(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    """Return the first true value of `condition`. Fails if the process ends before."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if value := condition():
            return value
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    raise AssertionError("the condition was not met in time")


def own_running(place: Place, process: "subprocess.Popen[str]") -> list[FrozenTrial]:
    """The running trials of a worker."""
    mine = f":{process.pid}:"
    return [
        one for one in place.trials(TrialState.RUNNING) if mine in one.user_attrs.get("worker", "")
    ]


def test_two_workers_share_a_study(place: Place) -> None:
    finished = place.trials(TrialState.COMPLETE, TrialState.PRUNED)
    assert (
        len(finished) == TRIALS == place.summary["trials"]["total"]
        and place.summary["evidence"] == "measured"
    )
    assert len({one.user_attrs["worker"] for one in finished}) == 2
    assert not place.trials(TrialState.RUNNING)


def test_the_printed_commands_work(place: Place) -> None:
    verbs = [command.split()[1] for command in run_next(place.shown, place.folder)]
    assert verbs == ["train", "verify", "explain"]


def kill_in_a_trial(place: Place) -> int:
    """Kill a worker in the middle of a trial; the number of the trial.

    One that ended first does not count.
    """
    for _ in range(5):
        killed = place.start("worker", "--study", "one")
        (begun, *_) = until(lambda worker=killed: own_running(place, worker), killed)
        children = psutil.Process(killed.pid).children(recursive=True)
        assert children
        killed.kill()
        killed.communicate()
        assert not psutil.wait_procs(children, timeout=20)[1]  # no orphan
        if place.trials()[begun.number].state is TrialState.RUNNING:
            return begun.number
    raise AssertionError("every trial ended before its worker was killed")


@pytest.mark.usefixtures("open_again")
def test_the_trial_of_a_killed_worker_is_repeated_and_a_stop_queues_one_again(place: Place) -> None:
    begun = kill_in_a_trial(place)
    stopped = place.start("worker", "--study", "one")
    until(lambda: place.trials()[begun].state is not TrialState.RUNNING, stopped)
    (asked, *_) = until(lambda: own_running(place, stopped), stopped)
    children = psutil.Process(stopped.pid).children(recursive=True)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 75, errors
    assert "queued again" in errors and "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert not place.trials(TrialState.RUNNING)
    ended = place.trials()[asked.number]  # it may have proposed more since it was read
    if ended.state is TrialState.FAIL:  # or its result was recorded just before
        chosen = ended.system_attrs.get("fixed_params", {}) | ended.params
        assert chosen in [
            one.system_attrs["fixed_params"] for one in place.trials(TrialState.WAITING)
        ]


def test_a_worker_that_cannot_join_fails_with_its_exit_code(place: Place) -> None:
    missing = place.start("worker", "--study", "two")
    assert (
        "there is no study 'two'" in missing.communicate(timeout=60)[1] and missing.returncode == 2
    )
    with opened(place.url) as search:
        theirs = search.recall("fingerprint")
        search.remember("fingerprint", theirs | {"packages": theirs["packages"] | {"torch": "1.0"}})
    other = place.start("worker", "--study", "one")
    assert (
        "differs from the machine that began the study" in other.communicate(timeout=60)[1]
        and other.returncode == 3
    )

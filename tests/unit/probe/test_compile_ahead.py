"""The parent of processes that compile ahead: what it asks for, how it counts, and how it ends
them.
"""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.core.files import write_errors
from autotune.core.probe_types import ProbeRequest
from autotune.core.serialization import from_data
from autotune.probe import compile_ahead
from autotune.probe.compile_ahead import MAX_STARTS, CompileAhead, num_helpers
from autotune.probe.turns import CLAIMED, HELD, WANTED
from tests.helpers.probing import request


class Process:
    """A process that was started, and runs until it is killed or `code` says that it has ended."""

    made: list["Process"]

    def __init__(
        self, device: str, log: Path, variables: Any, *, module: str, more: list[str]
    ) -> None:
        self.device, self.log, self.variables, self.module, self.more = (
            device,
            log,
            variables,
            module,
            more,
        )
        self.code: int | None = None
        self.told: list[str] = []
        self.pid = 100 + len(self.made)
        self.made.append(self)

    def wait_for_exit(self, timeout_s: float) -> int | None:
        return self.code

    def kill(self) -> None:
        self.told.append("kill")

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    Process.made = []
    monkeypatch.setattr(compile_ahead, "WorkerProcess", Process)
    return Process.made


@pytest.mark.parametrize(
    ("cores", "number"), [(0.5, 0), (3.9, 0), (4, 1), (11, 1), (12, 2), (128, 2)]
)
def test_few_cores_are_left_to_the_worker(cores: float, number: int) -> None:
    assert num_helpers(cores) == number


def test_what_is_wanted_is_there_for_processes_that_start_when_there_is_something(
    made: list[Process], tmp_path: Path
) -> None:
    ahead, asked = CompileAhead("cuda", tmp_path / "logs", 2, 16.0), request()
    ahead.compile_next({})
    assert not made and not ahead.is_running
    ahead.compile_next({"a": asked})
    ahead.compile_next({"b": asked})
    assert ahead.is_running and [one.log.name for one in made] == ["ahead-0.log", "ahead-1.log"]
    ahead.launch()  # they run already
    assert len(made) == 2
    assert made[0].variables == {"TORCHINDUCTOR_COMPILE_THREADS": "4"} and made[0].more == [
        str(ahead.folder)
    ]
    (wanted,) = json.loads((ahead.folder / WANTED).read_text())
    assert wanted["key"] == "b" and from_data(ProbeRequest, wanted["request"]) == asked
    ahead.close()
    assert [one.told for one in made] == [["kill", "close"]] * 2 and not ahead.folder.exists()


def test_one_that_ended_is_gone_with_what_it_held_and_the_other_goes_on(
    made: list[Process], tmp_path: Path
) -> None:
    ahead = CompileAhead("cuda", tmp_path / "logs", 2, 16.0)
    ahead.compile_next({"a": request()})
    for one, gib in zip(made, (0.75, 0.5), strict=True):
        (ahead.folder / f"{one.pid}{HELD}").write_text(str(gib))
    assert ahead.held_gib() == 1.25
    made[0].code = 1
    ahead.reap()
    assert ahead.is_running and ahead.held_gib() == 0.5
    ahead.compile_next({"a": request()})
    assert ahead.is_running and len(made) == 2
    (ahead.folder / f"a{CLAIMED}").touch()
    (ahead.folder / f"b{CLAIMED}").write_text(json.dumps({"seconds": 7.5, "compile": 6.0}))
    assert ahead.claimed_keys() == {"a", "b"} and ahead.compile_seconds() == {"b": 7.5}
    ahead.make_room()
    assert not ahead.is_running and ahead.held_gib() == 0.0
    assert ahead.claimed_keys() == {"b"}  # nobody will finish the other
    ahead.close()


def test_processes_may_start_before_there_is_something_to_compile(
    made: list[Process], tmp_path: Path
) -> None:
    ahead = CompileAhead("cuda", tmp_path / "logs", 2, 16.0)
    ahead.launch()
    assert len(made) == 2 and not (ahead.folder / WANTED).exists()
    ahead.compile_next({"a": request()})
    assert len(made) == 2 and (ahead.folder / WANTED).exists()
    ahead.drop_requests()  # as before a worker measures its memory
    ahead.drop_requests()
    assert not (ahead.folder / WANTED).exists() and ahead.is_running
    ahead.close()


def test_processes_start_again_a_few_times(made: list[Process], tmp_path: Path) -> None:
    ahead = CompileAhead("cpu", tmp_path / "logs", 1, 4.0)
    for _ in range(MAX_STARTS + 2):
        ahead.compile_next({"a": request()})
        ahead.make_room()
    assert len(made) == MAX_STARTS and not ahead.is_running
    ahead.close()


def test_a_full_disk_ends_the_processes_and_not_the_study(
    made: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        with write_errors(ahead.folder):
            raise OSError(errno.ENOSPC, "No space left on device")

    ahead = CompileAhead("cuda", tmp_path / "logs", 1, 16.0)
    ahead.compile_next({"a": request()})
    monkeypatch.setattr(compile_ahead, "write_atomic", full)
    ahead.compile_next({"b": request()})
    assert not ahead.is_running and made[0].told == ["kill", "close"]
    ahead.compile_next({"c": request()})
    ahead.close()  # as a session does at its end
    assert len(made) == 1 and ahead.claimed_keys() == set()


def test_once_closed_nothing_is_asked_for_and_nothing_left_behind(
    made: list[Process], tmp_path: Path
) -> None:
    ahead = CompileAhead("cpu", tmp_path / "logs", 1, 4.0)
    ahead.close()  # as when one of the processes does not end its turn, in the midst of a search
    ahead.compile_next({"a": request()})
    assert not made and not ahead.is_running and not ahead.folder.exists()
    assert not ahead.claimed_keys() and not ahead.compile_seconds()
    ahead.close()


def test_a_host_without_room_for_a_process_has_as_many_as_there_are(
    made: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any, **named: Any) -> Process:
        if made:
            raise BlockingIOError("too many processes")
        return Process(*args, **named)

    monkeypatch.setattr(compile_ahead, "WorkerProcess", start)
    ahead = CompileAhead("cuda", tmp_path / "logs", 2, 16.0)
    ahead.compile_next({"a": request()})
    assert ahead.is_running and len(made) == 1
    ahead.close()
    assert made[0].told == ["kill", "close"]

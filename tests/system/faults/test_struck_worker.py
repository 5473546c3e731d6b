"""Faults in the worker, injected for real: signals, hangs, memory that runs out, numbers that are none.

A sitecustomize module gives every worker a child of its own, as data loaders and compilers do.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome, Phase, ProbeRequest, Rung
from autotune.probe import monitor
from autotune.probe.fault_injection import VARIABLE
from autotune.probe.supervisor import HOST_OOM, WorkerProber
from tests.helpers.probing import LARGE, WIDE, members, pid_of, request, until

pytestmark = pytest.mark.probe
Tell = Callable[..., None]
GROUP = 3  # the worker, who ends its group after it, and the child


class Faulty:
    """A prober whose worker has a child, and something to do to it in the middle of a probe."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop = folder, False
        self.prober = WorkerProber("cpu", folder / "logs", should_stop=lambda: self.stop)
        self.worker = 0

    def group(self) -> list[int]:
        return members(self.worker)

    def probe_while(self, name: str, act: Callable[[], None], timed_s: float = 600.0) -> Any:
        """Run a probe that takes that long if nothing happens to it; `act` comes once it is under way."""
        self.prober.fingerprint  # noqa: B018 (the worker is up from here on)
        if self.prober._process is None:
            self.prober.launch()
        self.worker = pid_of(self.prober)
        log = self.folder / "logs" / f"{name}.log"
        asked = ProbeRequest(
            config=request(**LARGE).config,
            model=WIDE,
            device="cpu",
            memory_gib=4.0,
            min_timed_s=timed_s,
            max_timed_steps=100_000,
        )

        def later() -> None:
            until(log.exists, "the probe to begin")
            until(lambda: len(self.group()) == GROUP, "the worker and its child")
            act()

        thread = threading.Thread(target=later)
        thread.start()
        try:
            return self.prober.probe(asked, log)
        finally:
            thread.join()

    def works_again(self) -> bool:
        result = self.prober.probe(request(), self.folder / "logs" / "again.log")
        return result.outcome is Outcome.OK and pid_of(self.prober) != self.worker


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "sitecustomize.py").write_text(
        "import subprocess, sys\n"
        "if 'autotune.probe.worker' in sys.orig_argv:\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    child.returncode = 0  # nobody waits for it\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        started = Faulty(folder)
        with started.prober:
            yield started


def left(faulty: Faulty) -> int:
    until(lambda: faulty.group() == [], "the group to be gone")  # SIGKILL returns before it has killed
    return len(faulty.group())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM], ids=lambda one: one.name)
def test_what_a_worker_did_that_was_killed_is_tried_once_more(
    faulty: Faulty, tell: Tell, number: signal.Signals
) -> None:
    result = faulty.probe_while(number.name, lambda: os.kill(faulty.worker, number), timed_s=0.5)
    assert result.notes == (f"tried twice, since the first time the worker was killed by {number.name}",)
    assert result.log == f"{number.name}.log"
    assert result.outcome is Outcome.OK, result.reason
    replaced = pid_of(faulty.prober) != faulty.worker
    tell(f"{number.name} to the worker", survived=replaced, orphans=left(faulty))


def test_a_worker_that_is_killed_twice_is_a_crash_and_the_next_probe_works(faulty: Faulty, tell: Tell) -> None:
    def kill_twice() -> None:
        first = faulty.worker
        os.kill(first, signal.SIGKILL)
        until(lambda: faulty.prober._ready and pid_of(faulty.prober) != first, "a new worker at work")
        faulty.worker = pid_of(faulty.prober)
        os.kill(faulty.worker, signal.SIGKILL)

    starts = faulty.prober.starts
    result = faulty.probe_while("twice", kill_twice)
    assert faulty.prober.starts <= starts + 2
    assert result.outcome is Outcome.CRASH and "killed by SIGKILL" in (result.reason or "")
    orphans = left(faulty)
    tell("SIGKILL to the worker, and to the next", survived=faulty.works_again(), orphans=orphans)


@contextmanager
def confined(pid: int, mib: int) -> Iterator[None]:
    """The process may have so much more memory, or the kernel kills it: a control group of its own."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()  # the first version of control groups
    group = (root / "memory" if first else root) / f"autotune-{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        used = int((group / ("memory.usage_in_bytes" if first else "memory.current")).read_text())
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(used + mib * 2**20))
    except OSError as error:  # that takes rights which a container may not have
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield
    until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
    group.rmdir()


def test_the_kernels_oom_killer_is_named_and_nobody_tries_again(faulty: Faulty, tell: Tell) -> None:
    """A control group of its own, since the worker's own cap comes first where it can."""
    faulty.prober.fingerprint  # noqa: B018 (the worker is up from here on)
    assert faulty.works_again() or faulty.prober.starts
    faulty.worker, starts = pid_of(faulty.prober), faulty.prober.starts
    with confined(faulty.worker, 100):
        asked = ProbeRequest(config=request(**LARGE).config, model=WIDE, device="cpu", memory_gib=15.0)
        result = faulty.prober.probe(asked, faulty.folder / "logs" / "oom-killer.log")
        assert result.outcome is Outcome.CRASH and result.reason == HOST_OOM and result.notes == ()
        assert faulty.prober.starts == starts
        orphans = left(faulty)
    tell("the kernel's OOM killer strikes the worker", survived=faulty.works_again(), orphans=orphans)


def test_a_hang_is_a_timeout_and_the_whole_group_is_killed(faulty: Faulty, tell: Tell) -> None:
    faulty.prober.fingerprint  # noqa: B018 (the worker is up from here on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "DEADLINES", dict.fromkeys(Phase, 8.0))
        result = faulty.probe_while("hang", lambda: os.kill(faulty.worker, signal.SIGSTOP))
    assert result.outcome is Outcome.TIMEOUT
    assert result.phase in (Phase.LOAD, Phase.FIRST_STEP)
    assert "no progress" in (result.reason or "")
    assert result.log == "hang.log"
    orphans = left(faulty)
    tell("the worker hangs (SIGSTOP)", survived=faulty.works_again(), orphans=orphans)


def test_a_stop_cancels_the_probe_and_kills_the_group(faulty: Faulty, tell: Tell) -> None:
    def stop() -> None:
        faulty.stop = True

    with pytest.raises(Cancelled):
        faulty.probe_while("stop", stop)
    orphans = left(faulty)
    faulty.stop = False
    tell("the user stops a probe", survived=faulty.works_again(), orphans=orphans)


def test_a_grandchild_that_is_killed_harms_nobody(faulty: Faulty, tell: Tell) -> None:
    assert faulty.works_again() or faulty.prober.starts  # a worker is up
    starts, worker = faulty.prober.starts, pid_of(faulty.prober)
    (child,) = (pid for pid in members(worker) if "sleep" in psutil.Process(pid).name())
    os.kill(child, signal.SIGKILL)
    result = faulty.prober.probe(request(), faulty.folder / "logs" / "childless.log")
    fine = result.outcome is Outcome.OK and faulty.prober.starts == starts
    tell("SIGKILL to a child of the worker", survived=fine)


def test_closing_leaves_nobody(faulty: Faulty, tell: Tell) -> None:
    faulty.prober.close()
    assert faulty.works_again()
    worker = pid_of(faulty.prober)
    assert len(members(worker)) == GROUP
    faulty.prober.close()
    until(lambda: members(worker) == [], "the group to be gone")
    faulty.prober.close()  # twice is fine
    tell("the study ends", survived=True, orphans=len(members(worker)))


TUNER = """
import sys, time
from pathlib import Path
from autotune.probe.supervisor import HOST_OOM, WorkerProber
prober = WorkerProber("cpu", Path(sys.argv[1]))
prober.fingerprint
print(prober._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda one: one.name)
def test_when_the_tuner_is_killed_nobody_is_left(
    faulty: Faulty, tell: Tell, tmp_path: Path, number: signal.Signals
) -> None:
    """Nor what the worker had started, which hears of nothing, nor its files."""
    files = tmp_path / "tmp"
    files.mkdir()
    command, environment = [sys.executable, "-c", TUNER, str(tmp_path)], os.environ | {"TMPDIR": str(files)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        group = int(tuner.stdout.readline())
        assert len(members(group)) == GROUP and list(files.glob("autotune-*"))
        tuner.send_signal(number)
    until(lambda: members(group) == [], "the group to be gone")
    assert not list(files.glob("autotune-*"))
    tell(f"{number.name} to the tuner", survived=tuner.returncode == -number, orphans=len(members(group)))


# In the middle of a probe: what is struck, the outcome, and whether the same worker can go on
INJECTED = {
    "oom@load": (Outcome.OOM, True),
    "oom": (Outcome.OOM, True),
    "oom@steady": (Outcome.OOM, True),
    "oom@evaluate": (Outcome.OOM, True),
    "oom@save": (Outcome.OOM, True),
    "host-oom@steady": (Outcome.OOM, True),
    "slow@steady": (Outcome.OK, True),
    "nan": (Outcome.NUMERICS, False),
    "crash@steady": (Outcome.CRASH, False),
    "exit@save": (Outcome.CRASH, False),
}


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProber]:
    """A prober of whose probes each is struck by the fault of its number."""
    faults = ",".join(f"{fault}:{number}" for number, fault in enumerate(INJECTED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, faults)
        with WorkerProber("cpu", tmp_path_factory.mktemp("struck")) as prober:
            yield prober


@pytest.mark.parametrize("fault", INJECTED)
def test_what_strikes_a_probe_is_its_result_and_the_next_one_works(
    struck: WorkerProber, tell: Tell, fault: str
) -> None:
    number, (outcome, warm) = list(INJECTED).index(fault), INJECTED[fault]
    asked = replace(request(rung=Rung.CONFIRM), evaluate=True)
    result = struck.probe(asked, struck.logs / f"trial-{number:04d}.log")
    assert result.outcome is outcome and result.log == f"trial-{number:04d}.log"
    assert outcome is Outcome.OK or result.reason
    starts = struck.starts
    after = struck.probe(asked, struck.logs / "after.log")
    assert (struck.starts == starts) is warm
    tell(f"{fault} in a probe", survived=after.outcome is Outcome.OK and struck.starts == starts + (not warm))


def test_what_a_hot_card_measured_is_measured_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """And no more: a card that stays hot is as it is."""
    monkeypatch.setenv(VARIABLE, "throttle")
    with WorkerProber("cpu", tmp_path) as prober:
        asked = replace(request(), min_timed_s=1.0)
        first, second = (prober.probe(asked, tmp_path / f"{one}.log") for one in range(2))
    assert first.notes == ("measured twice, since the first time the card was slowed down: hardware thermal",)
    for result in (first, second):
        assert result.measurement is not None and result.measurement.telemetry is not None
        assert result.measurement.telemetry.slowed_by == ("hardware thermal",)
    assert second.notes == ()
    tell("the card is slowed down by heat", survived=first.outcome is Outcome.OK is second.outcome)

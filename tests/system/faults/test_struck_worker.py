"""Real faults of the worker: signals, hangs, exhausted memory, and values that are not numbers.

A sitecustomize module starts a child in every worker, as data loaders and compilers do.
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
from autotune.probe.worker_process import WorkerProcess
from tests.helpers.fork_server import SHORT_SHARE
from tests.helpers.probing import LARGE, WIDE, alive, members, pid_of, request, until

pytestmark = pytest.mark.probe
# for one test of each kind; the others are of the same kernel and the same code
real = pytest.mark.real_processes
RecordFault = Callable[..., None]
GROUP = 3  # the worker, the watchdog that kills its group, and the child


class Faulty:
    """A prober whose worker has a child process, and actions that disturb it during a probe."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop = folder, False
        self.prober = WorkerProber("cpu", folder / "logs", should_stop=lambda: self.stop)
        self.worker = 0

    def group(self) -> list[int]:
        return members(self.worker)

    def probe_while(
        self, name: str, act: Callable[[], None], timed_s: float = 600.0, **size: Any
    ) -> Any:
        """Run a probe of this duration and call `act` after it has begun."""
        self.prober.fingerprint  # noqa: B018 (starts the worker)
        if self.prober._process is None:
            self.prober.launch()
        self.worker = pid_of(self.prober)
        log = self.folder / "logs" / f"{name}.log"
        asked = ProbeRequest(
            config=request(**(LARGE | size)).config,
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
        "    child.returncode = 0  # do not wait for it\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        )
        started = Faulty(folder)
        with started.prober:
            yield started


def count_orphans(faulty: Faulty) -> int:
    # SIGKILL returns before the process has ended
    until(lambda: faulty.group() == [], "the group to end")
    return len(faulty.group())


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, marks=real), signal.SIGSEGV, signal.SIGTERM],
    ids=lambda one: one.name,
)
def test_the_probe_of_a_killed_worker_is_repeated_once(
    faulty: Faulty, record_fault: RecordFault, number: signal.Signals
) -> None:
    small = {"micro_batch_size": 4, "seq_len": 64}
    result = faulty.probe_while(
        number.name, lambda: os.kill(faulty.worker, number), timed_s=2.0, **small
    )
    assert result.notes == (
        f"tried twice, because the first time the worker was killed by {number.name}",
    )
    assert result.log == f"{number.name}.log"
    assert result.outcome is Outcome.OK, result.reason
    replaced = pid_of(faulty.prober) != faulty.worker
    record_fault(f"{number.name} to the worker", survived=replaced, orphans=count_orphans(faulty))


def test_a_worker_killed_twice_is_a_crash_and_the_next_probe_works(
    faulty: Faulty, record_fault: RecordFault
) -> None:
    def kill_twice() -> None:
        first = faulty.worker
        os.kill(first, signal.SIGKILL)
        until(
            lambda: faulty.prober._ready and pid_of(faulty.prober) != first, "a new worker at work"
        )
        faulty.worker = pid_of(faulty.prober)
        os.kill(faulty.worker, signal.SIGKILL)

    starts = faulty.prober.starts
    result = faulty.probe_while("twice", kill_twice)
    assert faulty.prober.starts <= starts + 2
    assert result.outcome is Outcome.CRASH and "killed by SIGKILL" in (result.reason or "")
    orphans = count_orphans(faulty)
    record_fault(
        "SIGKILL to the worker and to its successor", survived=faulty.works_again(), orphans=orphans
    )


@contextmanager
def confined(pid: int, mib: int) -> Iterator[None]:
    """Limit the memory of a process to `mib` MiB more than it has, with its own control group."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()  # version 1 of control groups
    group = (root / "memory" if first else root) / f"autotune-{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        used = int((group / ("memory.usage_in_bytes" if first else "memory.current")).read_text())
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(
            str(used + mib * 2**20)
        )
    except OSError as error:  # a container may lack the rights
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"cannot create a control group: {error}")
    yield
    until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
    group.rmdir()


def test_the_kernels_oom_killer_is_reported_without_a_repeat(
    faulty: Faulty, record_fault: RecordFault
) -> None:
    """Uses a control group, since the worker's own memory cap would act first."""
    faulty.prober.fingerprint  # noqa: B018 (starts the worker)
    assert faulty.works_again() or faulty.prober.starts
    faulty.worker, starts = pid_of(faulty.prober), faulty.prober.starts
    with confined(faulty.worker, 100):
        asked = ProbeRequest(
            config=request(**LARGE).config, model=WIDE, device="cpu", memory_gib=15.0
        )
        result = faulty.prober.probe(asked, faulty.folder / "logs" / "oom-killer.log")
        assert result.outcome is Outcome.CRASH and result.reason == HOST_OOM and result.notes == ()
        assert faulty.prober.starts == starts
        orphans = count_orphans(faulty)
    record_fault(
        "the kernel's OOM killer kills the worker", survived=faulty.works_again(), orphans=orphans
    )


def test_a_hang_is_a_timeout_and_the_whole_group_is_killed(
    faulty: Faulty, record_fault: RecordFault
) -> None:
    faulty.prober.fingerprint  # noqa: B018 (starts the worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "DEADLINES", dict.fromkeys(Phase, 8.0))
        result = faulty.probe_while("hang", lambda: os.kill(faulty.worker, signal.SIGSTOP))
    assert result.outcome is Outcome.TIMEOUT
    # a loaded machine stops the worker before it has begun to load
    assert result.phase in (Phase.START, Phase.LOAD, Phase.FIRST_STEP)
    assert "no progress" in (result.reason or "")
    assert result.log == "hang.log"
    orphans = count_orphans(faulty)
    record_fault("the worker hangs (SIGSTOP)", survived=faulty.works_again(), orphans=orphans)


def test_a_stop_cancels_the_probe_and_kills_the_group(
    faulty: Faulty, record_fault: RecordFault
) -> None:
    def stop() -> None:
        faulty.stop = True

    with pytest.raises(Cancelled):
        faulty.probe_while("stop", stop)
    orphans = count_orphans(faulty)
    faulty.stop = False
    record_fault("the user stops a probe", survived=faulty.works_again(), orphans=orphans)


def test_killing_a_child_of_the_worker_does_no_harm(
    faulty: Faulty, record_fault: RecordFault
) -> None:
    assert faulty.works_again() or faulty.prober.starts  # a worker runs
    starts, worker = faulty.prober.starts, pid_of(faulty.prober)
    (child,) = (pid for pid in members(worker) if "sleep" in psutil.Process(pid).name())
    os.kill(child, signal.SIGKILL)
    result = faulty.prober.probe(request(), faulty.folder / "logs" / "childless.log")
    fine = result.outcome is Outcome.OK and faulty.prober.starts == starts
    record_fault("SIGKILL to a child of the worker", survived=fine)


@real
def test_closing_leaves_no_process(faulty: Faulty, record_fault: RecordFault) -> None:
    faulty.prober.close()
    assert faulty.works_again()
    worker = pid_of(faulty.prober)
    assert len(members(worker)) == GROUP
    faulty.prober.close()
    until(lambda: members(worker) == [], "the group to end")
    faulty.prober.close()  # closing twice is allowed
    record_fault("the study ends", survived=True, orphans=len(members(worker)))


TUNER = """
import sys, time
from pathlib import Path
from autotune.probe.supervisor import HOST_OOM, WorkerProber
prober = WorkerProber("cpu", Path(sys.argv[1]))
prober.fingerprint
print(prober._process.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def tuning(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", int, Path]]:
    """A process with a worker: the process, the worker's pid, and the directory of their temporary
    files.
    """
    files = folder / "tmp"
    files.mkdir()
    command, environment = (
        [sys.executable, "-c", TUNER, str(folder)],
        os.environ | {"TMPDIR": str(files)},
    )
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        yield tuner, int(tuner.stdout.readline()), files


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=real), signal.SIGSEGV], ids=lambda one: one.name
)
def test_a_killed_tuner_leaves_no_process_and_no_file(
    faulty: Faulty, record_fault: RecordFault, tmp_path: Path, number: signal.Signals
) -> None:
    """Neither the worker, its children nor its temporary files remain."""
    with tuning(tmp_path) as (tuner, group, files):
        assert len(members(group)) == GROUP and list(files.glob("autotune-*"))
        tuner.send_signal(number)
    until(lambda: members(group) == [], "the group to end")
    assert not list(files.glob("autotune-*"))
    record_fault(
        f"{number.name} to the tuner",
        survived=tuner.returncode == -number,
        orphans=len(members(group)),
    )


@real
def test_what_a_tuner_killed_with_its_watchdog_leaves_is_removed_at_the_next_start(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tuning(tmp_path) as (tuner, pid, files):
        worker = psutil.Process(pid)
        (watchdog,) = (
            child for child in worker.children() if "autotune.probe.worker" in child.cmdline()
        )
        watchdog.suspend()  # so that it does nothing between the two deaths
        tuner.kill()
        until(lambda: not alive(worker.pid), "the worker to end with the tuner")
        watchdog.kill()
    os.killpg(worker.pid, signal.SIGKILL)  # its child, which the watchdog would have ended
    (left,) = files.glob("autotune-*")
    monkeypatch.setattr("tempfile.tempdir", str(files))
    started = WorkerProcess("cpu", tmp_path / "worker.log")
    try:
        assert not left.exists() and len(list(files.glob("autotune-*"))) == 1
    finally:
        started.close()
    assert not list(files.glob("autotune-*"))


# For each injected fault: the outcome of its probe, and whether the same worker continues
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
    """A prober that injects fault number N into probe number N."""
    faults = ",".join(f"{fault}:{number}" for number, fault in enumerate(INJECTED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, faults)
        with WorkerProber("cpu", tmp_path_factory.mktemp("struck")) as prober:
            yield prober


@pytest.mark.parametrize("fault", INJECTED)
def test_an_injected_fault_is_the_result_of_its_probe_and_the_next_probe_works(
    struck: WorkerProber, record_fault: RecordFault, fault: str
) -> None:
    number, (outcome, warm) = list(INJECTED).index(fault), INJECTED[fault]
    asked = replace(request(rung=Rung.CONFIRM), evaluate=True)
    result = struck.probe(asked, struck.logs / f"trial-{number:04d}.log")
    assert result.outcome is outcome and result.log == f"trial-{number:04d}.log"
    assert outcome is Outcome.OK or result.reason
    starts = struck.starts
    after = struck.probe(asked, struck.logs / "after.log")
    assert (struck.starts == starts) is warm
    record_fault(
        f"{fault} in a probe",
        survived=after.outcome is Outcome.OK and struck.starts == starts + (not warm),
    )


def test_a_measurement_on_a_hot_card_is_repeated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_fault: RecordFault
) -> None:
    """Only once: a card that stays hot is not measured again."""
    monkeypatch.setenv(VARIABLE, "throttle")
    with WorkerProber("cpu", tmp_path) as prober:
        # half a second, in which the sensors are read several times
        asked = replace(request(), min_timed_s=0.5 / SHORT_SHARE)
        first, second = (prober.probe(asked, tmp_path / f"{one}.log") for one in range(2))
    assert first.notes == (
        "measured twice, because the first time the GPU was slowed down: hardware thermal",
    )
    for result in (first, second):
        assert result.measurement is not None and result.measurement.telemetry is not None
        assert result.measurement.telemetry.slowed_by == ("hardware thermal",)
    assert second.notes == ()
    record_fault(
        "the card is slowed down by heat", survived=first.outcome is Outcome.OK is second.outcome
    )

"""The launcher of ranks, with real processes that need no torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from autotune.trainer import ranks
from autotune.trainer.ranks import AGAIN_S

PROGRAM = """\
import os, signal, sys, time
sys.path.insert(0, {home!r})
from autotune.trainer import ranks

if "LOCAL_RANK" not in os.environ:
    ranks.GRACE_S = float(os.environ.get("GRACE_S", ranks.GRACE_S))
    sys.exit(ranks.run(2))
ranks.begin_rank()
rank, name = int(os.environ["RANK"]), os.environ["LOCAL_RANK"]
seen = []


def stop(number, frame):
    seen.append(number)


def tell(text):
    open(name, "a").write(text + "\\n")


{body}
"""
HOME = str(Path(__file__).parents[3])
WAITS = """
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
tell("begun")
while not seen:
    time.sleep(0.01)
"""


def program(folder: Path, body: str) -> list[str]:
    (folder / "program.py").write_text(PROGRAM.format(home=HOME, body=body))
    return [sys.executable, "program.py", "an argument"]


def run(folder: Path, body: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        program(folder, body), cwd=folder, capture_output=True, text=True, timeout=60
    )


@contextmanager
def begun(folder: Path, body: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The launcher, once both ranks have told that they began."""
    with waiting(folder, program(folder, body)) as launcher:
        yield launcher


@contextmanager
def waiting(folder: Path, command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """The launcher of this command, once both ranks have told that they began."""
    with subprocess.Popen(command, cwd=folder, start_new_session=True) as launcher:
        try:
            until = time.monotonic() + 30
            while not all((folder / name).exists() for name in "01"):
                assert launcher.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            yield launcher
        finally:
            launcher.kill()


def test_ranks_get_their_variables_and_the_arguments(tmp_path: Path) -> None:
    names = (
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    )
    done = run(
        tmp_path, f"tell(' '.join(os.environ[name] for name in {names}) + ' ' + sys.argv[1])"
    )
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / name).read_text().split() for name in "01"]
    assert [words[0] for words in told] == ["0", "1"] and told[0][1:] == told[1][1:]
    assert told[0][1:] == ["2", "2", "lo", "lo", "an", "argument"]


TRAINS = """
import psutil, torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    ranks.join("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    sockets = psutil.Process().net_connections()
    tell(" ".join({one.laddr.ip for one in sockets if one.status == "LISTEN"}))
    dist.destroy_process_group()
    return model


ranks.end_at_once(train)
"""


@pytest.mark.real_processes
def test_ranks_train_together_listen_on_loopback_and_end(tmp_path: Path) -> None:
    """torch's own rendezvous listens on all interfaces. A freed model hung in one of three runs."""
    done = run(tmp_path, TRAINS)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / name).read_text() for name in "01"] == ["127.0.0.1\n"] * 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_is_passed_on_once_and_each_rank_ends_in_its_own_time(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that saves for long is not killed because the other has ended.

    Only a rank that failed begins the grace of the others.
    """
    monkeypatch.setenv("GRACE_S", "0.3")
    body = WAITS + f"time.sleep(2 * rank)\ntell(f'saved {{len(seen)}}')\nsys.exit({code})"
    with begun(tmp_path, body) as launcher:
        for _ in range(2):  # as a scheduler signals each process
            launcher.send_signal(number)
        assert launcher.wait(30) == code
    assert [(tmp_path / name).read_text() for name in "01"] == ["begun\nsaved 1\n"] * 2


def test_a_second_signal_ends_ranks_that_do_not_answer(tmp_path: Path) -> None:
    with begun(tmp_path, WAITS.replace("not seen", "True")) as launcher:
        launcher.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(AGAIN_S + 0.5)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(10) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "train.py: error: rank 1 was ended by SIGKILL: the host may have run out of memory\n",
        ),
    ],
)
def test_ranks_that_wait_for_a_failed_one_are_ended(
    ends: str, code: int, said: str, tmp_path: Path
) -> None:
    """They have some seconds to say what they saw."""
    body = f"if rank:\n    {ends}\ntime.sleep(1)\ntell('lost the other')\ntime.sleep(600)"
    done = run(tmp_path, body)
    assert (done.returncode, done.stderr) == (code, said)
    assert (tmp_path / "0").read_text() == "lost the other\n"


class Ended:
    """A rank that has ended by the second time it is asked."""

    def __init__(self, code: int) -> None:
        self.returncode: int | None = None
        self._codes = iter([None, code])

    def poll(self) -> int | None:
        self.returncode = next(self._codes, self.returncode)
        return self.returncode


@pytest.mark.parametrize("codes", [(0, 0), (0, 1), (75, 75), (1, 0)])
def test_no_code_is_lost_of_ranks_that_end_between_two_looks(codes: tuple[int, int]) -> None:
    looked_at = [Ended(code) for code in codes]
    assert ranks._wait(looked_at, [], os.getppid()) == max(codes)  # type: ignore[arg-type]


def test_ranks_end_with_the_launcher(tmp_path: Path) -> None:
    with begun(tmp_path, WAITS + "tell('stopped')") as launcher:
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) == 3  # the supervisor and two ranks
        os.killpg(launcher.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=20)
        assert not alive
    assert [(tmp_path / name).read_text() for name in "01"] == ["begun\nstopped\n"] * 2


HANGS = """
import subprocess

signal.signal(signal.SIGTERM, signal.SIG_IGN)
with subprocess.Popen(["sleep", "600"]):
    tell("begun")
"""


def test_ranks_that_hang_are_killed_after_the_launchers_death(tmp_path: Path) -> None:
    command = program(tmp_path, HANGS)
    text = (tmp_path / "program.py").read_text()
    (tmp_path / "program.py").write_text(text.replace("if ", "ranks.ALONE_S = 1.0\nif ", 1))
    with waiting(tmp_path, command) as launcher:
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) == 5  # each rank has started a process too
        launcher.kill()
        _, alive = psutil.wait_procs(started, timeout=20)
    for one in alive:
        one.kill()
    assert not alive


NOT_YET = """
if rank:
    signal.signal(signal.SIGINT, stop)
tell("begun")
while True:
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        tell("interrupted")
"""


def test_one_signal_ends_ranks_that_do_not_train_yet(tmp_path: Path) -> None:
    """A rank may wait in C++, where Python handles no signal.

    Rank 1 trains already, and waits for rank 0.
    """
    with begun(tmp_path, NOT_YET) as launcher:
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(ranks.GRACE_S + 5) == 130
    assert (tmp_path / "0").read_text() == "begun\n"


def test_a_rank_whose_launcher_is_dead_does_not_begin(tmp_path: Path) -> None:
    variables = os.environ | {"LOCAL_RANK": "0", "RANK": "0", "AUTOTUNE_SUPERVISOR": "1"}
    command = program(tmp_path, "tell('begun')")
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "the launcher is dead\n") and not (
        tmp_path / "0"
    ).exists()


def test_a_rank_ends_with_its_code_where_nobody_reads_what_it_says() -> None:
    body = f"""
import os, sys
sys.path.insert(0, {HOME!r})
from autotune.trainer import ranks

print("trained")
os.close(1)
ranks.end_at_once(lambda: sys.exit(75))
"""
    assert (
        subprocess.run([sys.executable, "-c", body], capture_output=True, timeout=30).returncode
        == 75
    )


@pytest.mark.parametrize(
    ("train", "code", "said"),
    [
        ("lambda: None", 0, ""),
        ("lambda: sys.exit(75)", 75, ""),
        ("lambda: sys.exit()", 0, ""),
        ("lambda: sys.exit('no such file')", 1, "no such file\n"),
        ("lambda: 1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_rank_ends_at_once_with_the_code_that_training_ends_with(
    train: str, code: int, said: str
) -> None:
    """Nothing waits for a thread that would hold up the interpreter; what was to run at the end
    runs.
    """
    body = f"""
import atexit, sys, threading, time
sys.path.insert(0, {HOME!r})
from autotune.trainer import ranks

threading.Thread(target=time.sleep, args=(50,)).start()
atexit.register(print, "at the end")
print("trained")
ranks.end_at_once({train})
"""
    ended = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (code, "trained\nat the end\n")
    assert ended.stderr.endswith(said) and (said or not ended.stderr)


@pytest.mark.parametrize(
    "how", ["return Model()", "model = Model()\n    sys.exit(0)", "model = Model()\n    1 / 0"]
)
def test_a_rank_frees_no_model(how: str) -> None:
    """To free DDP's reducer after its group may wait for ever."""
    body = f"""
import sys
sys.path.insert(0, {HOME!r})
from autotune.trainer import ranks


class Model:
    def __del__(self):
        print("freed")


def train():
    {how}


ranks.end_at_once(train)
"""
    assert (
        subprocess.run([sys.executable, "-c", body], capture_output=True, timeout=30).stdout == b""
    )

"""A forked process behaves like a new process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DESCRIBE = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "parent": os.getppid(),
    "session": os.getsid(0), "pid": os.getpid(),
    "group": os.getpgrp(), "variable": os.environ.get("ONE"), "variables": sorted(os.environ),
    "first": sys.path[0], "name": __name__,
    "handles": [one for one in range(500) if os.path.exists(f"/proc/self/fd/{one}")],
    "torch": "torch" in sys.modules, "threads": len(os.listdir("/proc/self/task")),
}))
"""
NESTED = (
    "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c',"
    " sys.argv[1], 'x'], text=True))"
)

# A process starts another in a fork of itself.
FORKED = (
    "import os; pid = os.fork(); pid and os.waitpid(pid, 0); pid or"
    " exec(__import__('sys').argv.pop(1))"
)


def described(*words: str, **how: Any) -> dict[str, Any]:
    command = [sys.executable, *words]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True, **how
    )
    return dict(json.loads(done.stdout))


@pytest.fixture(params=["forked", pytest.param("new", marks=pytest.mark.real_processes)])
def is_forked(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "forked")


def test_what_a_process_finds(is_forked: bool, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name.startswith("OMP_")}
    variables |= {"ONE": "1", "LC_CTYPE": "C.UTF-8"}  # else a new process sets it
    read, write = os.pipe()
    found = described(
        "-c",
        DESCRIBE,
        "x",
        "é y",
        cwd=tmp_path,
        env=variables,
        pass_fds=[write],
        start_new_session=True,
    )
    os.close(read)
    os.close(write)
    assert found.pop("torch") is is_forked
    pid = found.pop("pid")
    assert found == {
        "arguments": ["-c", "x", "é y"],
        "folder": str(tmp_path),
        "parent": os.getpid(),
        "session": pid,
        "group": pid,
        "variable": "1",
        "variables": sorted(variables),
        "first": "",
        "name": "__main__",
        "handles": [0, 1, 2, write],
        "threads": 1,
    }


def test_a_script_and_a_process_that_a_process_starts(is_forked: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DESCRIBE)
    found = described("script.py", "x", cwd=tmp_path)
    assert (found["arguments"], found["first"], found["name"]) == (
        ["script.py", "x"],
        str(tmp_path),
        "__main__",
    )
    assert (
        found["group"] == os.getpgrp()
        and found["session"] == os.getsid(0)
        and found["torch"] is is_forked
    )
    nested = described("-c", NESTED, DESCRIBE)
    assert (
        nested["arguments"] == ["-c", "x"]
        and nested["torch"] is is_forked
        and nested["parent"] != os.getpid()
    )
    supervised = described("-c", FORKED, NESTED, DESCRIBE)
    assert supervised["arguments"] == ["-c", "x"] and supervised["torch"] is is_forked
    assert (
        subprocess.run(
            [sys.executable, "-m", "autotune", "gpus", "--no-such"], capture_output=True
        ).returncode
        == 2
    )


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        (
            "1 / 0",
            1,
            'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n',
        ),
        ("raise KeyboardInterrupt", -signal.SIGINT, "Traceback (most recent call last)"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_how_a_process_ends(is_forked: bool, program: str, code: int, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == code and ended.stderr.startswith(said), ended.stderr


def test_a_process_is_killed_with_its_session(is_forked: bool) -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    assert sleeper.poll() is None
    os.killpg(sleeper.pid, signal.SIGTERM)
    assert sleeper.wait(timeout=60) == -signal.SIGTERM

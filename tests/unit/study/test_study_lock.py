"""One process runs a study: it holds a lock of the study's directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.errors import UsageError
from autotune.study.storage.study_lock import LOCK, locked, running_process

HOLD = """
import sys
from pathlib import Path
from autotune.study.storage.study_lock import locked
with locked(Path(sys.argv[1]), "mine"):
    print("held", flush=True)
    input()
"""


def test_one_process_runs_a_study(tmp_path: Path) -> None:
    assert running_process(tmp_path) is None
    (tmp_path / LOCK).write_text("99999999")  # of a process that was killed
    assert running_process(tmp_path) is None
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    assert running_process(tmp_path) == str(other.pid)
    with (
        pytest.raises(UsageError, match=f"study 'mine' is being run by process {other.pid}"),
        locked(tmp_path, "mine"),
    ):
        pass
    other.communicate("\n")
    assert running_process(tmp_path) is None
    with locked(tmp_path, "mine"):
        assert (tmp_path / LOCK).read_text() == str(os.getpid())

"""A scratch directory goes with the process that uses it, and those of killed processes go at the
next start.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.scratch import NAME, scratch_directory

HOLD = (
    "from autotune.core.scratch import *\nwith scratch_directory() as path: print(path,"
    " flush=True); input()"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def holder(folder: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process with a scratch directory in which there is a file, and the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    (path / "below").mkdir()
    (path / "below" / "file").write_text("")
    return process, path


def test_what_a_killed_process_left_is_removed_at_the_next_start_and_what_is_in_use_stays(
    folder: Path,
) -> None:
    killed, left = holder(folder)
    living, used = holder(folder)
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    with scratch_directory() as mine:
        assert sorted(folder.iterdir()) == sorted([used, Path(mine)])
        assert (used / "below" / "file").exists()
    living.communicate("\n")
    assert living.returncode == 0 and list(folder.iterdir()) == []


def test_links_and_what_is_not_ours_are_left_alone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    precious = tmp_path_factory.mktemp("precious")
    (folder / f"{NAME}link").symlink_to(precious)
    (folder / f"{NAME}file").write_text("")
    (folder / "autotune-inject-x").mkdir()
    before = sorted(folder.iterdir())
    with scratch_directory():
        pass
    assert sorted(folder.iterdir()) == before and precious.is_dir()


def test_a_directory_in_use_is_named_locked_and_may_be_gone_at_the_end(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with scratch_directory() as path:
        assert (
            Path(path).parent == folder
            and Path(path).name.startswith(NAME)
            and not list(Path(path).iterdir())
        )
        handle = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        os.rmdir(path)
    assert not list(folder.iterdir()) and len(os.listdir("/proc/self/fd")) == before


def test_what_another_user_left_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{NAME}theirs").mkdir()
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(PermissionError), scratch_directory():
        pass
    assert (folder / f"{NAME}theirs").is_dir()

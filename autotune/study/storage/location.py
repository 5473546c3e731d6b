"""The URL of a study's database, and the study's directory."""

import os
from pathlib import Path

from autotune.core.errors import StorageError, UsageError
from autotune.core.files import write_errors
from autotune.core.text import slug

DEFAULT_ROOT = Path("runs")
DEFAULT_URL = f"sqlite:///{DEFAULT_ROOT / 'autotune.db'}"
EVIDENCE = (
    DEFAULT_ROOT / "evidence"
)  # where `autotune import` stores submissions, in the current directory
FREE_BYTES = 200 * 2**20


def storage_url(storage: str | None) -> str:
    """The database's URL: `storage`, else AUTOTUNE_STORAGE, else an SQLite file in runs/, which is created."""
    named = named_url(storage)
    if named is None:
        with write_errors(DEFAULT_ROOT.absolute()):
            DEFAULT_ROOT.mkdir(exist_ok=True)
    return named or DEFAULT_URL


def existing_url(storage: str | None) -> str:
    """The same URL, where nothing is created. Raises UsageError if there is no such SQLite file."""
    from autotune.study.storage.database import require_database, storage_errors

    url = named_url(storage) or DEFAULT_URL
    with storage_errors(url):
        require_database(url)
    return url


def named_url(storage: str | None) -> str | None:
    """What the user named: `storage`, else AUTOTUNE_STORAGE, else None."""
    return os.environ.get("AUTOTUNE_STORAGE") if storage is None else storage


def shared_url(storage: str | None) -> str:
    """The same for a database that several processes write. Raises UsageError for SQLite on a network drive."""
    from autotune.study.storage.database import network_drive

    url = storage_url(storage)
    if kind := network_drive(url):
        raise UsageError(
            f"the database is an SQLite file on a network drive ({kind}), whose locks do not hold between machines",
            remedy="give --storage postgresql+psycopg://..., or a file on a disk of this machine for its own workers",
        )
    return url


def study_directory(out: str | None, study: str) -> Path:
    """The directory of a study's files: `out`, or one under runs/ that is named after the study."""
    return Path(out) if out else DEFAULT_ROOT / slug(study)


def stored_out(out: Path, url: str) -> str:
    """How a record names a study's directory: by its path from the SQLite file's, if it is inside that, else in full.

    Both can then be moved or copied together.
    """
    from autotune.study.storage.database import sqlite_folder

    folder = sqlite_folder(url)
    if folder is None or not out.resolve().is_relative_to(folder):
        return str(out)
    return str(out.resolve().relative_to(folder))


def opened_out(stored: str, url: str, study: str) -> Path:
    """The directory that `stored_out` named, where the database is now; one under runs/ if this host has no such."""
    from autotune.study.storage.database import sqlite_folder

    out = Path(stored)
    if not out.is_absolute():
        return (sqlite_folder(url) or Path.cwd()) / out
    return out if out.is_dir() else study_directory(None, study).absolute()


def make_writable(directory: Path) -> None:
    """Create a study's directory and its logs, and check that it can be written. Raises StorageError."""
    with write_errors(directory):
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        trial = directory / ".writable"
        trial.write_text("")
        trial.unlink()
        space = os.statvfs(directory)
    if space.f_bavail * space.f_frsize < FREE_BYTES:
        raise StorageError(
            f"less than {FREE_BYTES >> 20} MiB are free at {directory}",
            remedy="free some, or give another --out",
        )

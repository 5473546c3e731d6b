"""The URL of a study's database, and the study's directory."""

import os
import shlex
from pathlib import Path

from autotune.core.errors import StorageError, UsageError
from autotune.core.files import write_errors
from autotune.core.text import slug

VARIABLE = "AUTOTUNE_STORAGE"
DEFAULT_ROOT = Path("runs")
DEFAULT_URL = f"sqlite:///{DEFAULT_ROOT / 'autotune.db'}"
# `autotune import` stores submitted measurements in this folder of the current directory.
EVIDENCE = DEFAULT_ROOT / "evidence"
FREE_BYTES = 200 * 2**20


def storage_url(storage: str | None) -> str:
    """Return the database's URL: `storage`, else $AUTOTUNE_STORAGE, else an SQLite file in runs/.

    The folder runs/ is created if necessary.
    """
    named = named_url(storage)
    if named is None:
        with write_errors(DEFAULT_ROOT.absolute()):
            DEFAULT_ROOT.mkdir(exist_ok=True)
    return named or DEFAULT_URL


def existing_url(storage: str | None) -> str:
    """Return the URL that `storage_url` returns, without creating a folder.

    Raises UsageError if the SQLite file does not exist.
    """
    from autotune.study.storage.database import require_database, storage_errors

    url = named_url(storage) or DEFAULT_URL
    with storage_errors(url):
        require_database(url)
    return url


def named_url(storage: str | None) -> str | None:
    """Return the URL that the user named: `storage`, else $AUTOTUNE_STORAGE, else None."""
    return os.environ.get(VARIABLE) if storage is None else storage


def printed_options(storage: str | None) -> tuple[list[str], str]:
    """Return the options of a printed command that name the database, and a command to run first.

    `storage` is the value of `--storage`. A password never becomes an option, because other users
    of the machine can read the options of a running command. With a password, the first command
    sets AUTOTUNE_STORAGE to the URL, with the word PASSWORD instead of the password. Otherwise the
    first command is empty.
    """
    from autotune.study.storage.database import has_password, public_url

    if storage is None:
        return [], ""
    if not has_password(storage):
        return ["--storage", storage], ""
    url = public_url(storage).replace(":***@", ":PASSWORD@")
    return [], f"export {VARIABLE}={shlex.quote(url)}"


def shared_url(storage: str | None) -> str:
    """Return the URL of a database that several processes write.

    Raises UsageError for SQLite on a network drive.
    """
    from autotune.study.storage.database import network_drive, storage_errors

    url = storage_url(storage)
    with storage_errors(url):
        kind = network_drive(url)
    if kind:
        raise UsageError(
            f"the database is an SQLite file on a network drive ({kind}), "
            "where locks do not work between machines",
            remedy="give --storage postgresql+psycopg://..., "
            "or a file on a local disk if all workers run on this machine",
        )
    return url


def study_directory(out: str | None, study: str) -> Path:
    """Return the directory of a study's files: `out`, or a folder in runs/ for the study."""
    return Path(out) if out else DEFAULT_ROOT / slug(study)


def to_stored_directory(out: Path, url: str) -> str:
    """Convert a study's directory to the text that a record stores.

    If the study's directory is inside the SQLite file's directory, the text is a relative path, so
    that both can be moved or copied together. Otherwise the text is the full path.
    """
    from autotune.study.storage.database import sqlite_folder

    folder = sqlite_folder(url)
    if folder is None or not out.resolve().is_relative_to(folder):
        return str(out)
    return str(out.resolve().relative_to(folder))


def from_stored_directory(stored: str, url: str, study: str) -> Path:
    """Return the study's directory from the text that `to_stored_directory` returns.

    A relative path is resolved from the directory that now contains the database. If an absolute
    path does not exist on this host, return a directory under runs/.
    """
    from autotune.study.storage.database import sqlite_folder

    out = Path(stored)
    if not out.is_absolute():
        return (sqlite_folder(url) or Path.cwd()) / out
    return out if out.is_dir() else study_directory(None, study).absolute()


def make_writable(directory: Path) -> None:
    """Create a study's directory with its logs, and check that it is writable.

    Raises StorageError.
    """
    with write_errors(directory):
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        trial = directory / ".writable"
        trial.write_text("")
        trial.unlink()
        space = os.statvfs(directory)
    if space.f_bavail * space.f_frsize < FREE_BYTES:
        raise StorageError(
            f"less than {FREE_BYTES >> 20} MiB are free at {directory}",
            remedy="free disk space, or give another --out",
        )

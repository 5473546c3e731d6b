"""Finds the folders of this user's cache. Those of compiled code are closed to other users.

Torch unpickles the files that it finds in its cache, which is by default a folder with a known name
in the shared temporary directory. A stranger who makes that folder first has code executed.
"""

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for a user's data between runs: in $XDG_CACHE_HOME or ~/.cache."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"


def compile_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the folders of compiled code, and make the folders.

    Folders that `environment` names are kept. Raises PermissionError, with the remedy, if another
    user owns a folder or can write to it. A folder that cannot be made stops only a compilation.
    """
    if sys.platform == "win32":  # each user has a temporary directory there
        return {}

    found = {}
    for name, default in COMPILED.items():
        folder = Path(environment.get(name) or user_cache(environment) / default)
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.exists():
            _require_private(folder, name)
        found[name] = str(folder)
    return found


def _require_private(folder: Path, name: str) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid():
        reason = "belongs to another user"
    elif status.st_mode & stat.S_IWOTH:
        reason = "can be written by every user"
    else:
        return
    raise PermissionError(
        f"{folder} {reason}, who could have code run here: name a folder of your own with {name}"
    )

# -*- coding: utf-8 -*-
"""Finds this user's cache folders, and keeps other users out of the folders of compiled code.

Torch unpickles the files that it finds in its cache, which is by default a folder with a known name
in the shared temporary directory. Another user who makes the cache folder first could execute code
in this process.
"""

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return autotune's cache folder, in $XDG_CACHE_HOME or in ~/.cache."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"


def compile_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Make the folders of compiled code, and return the environment variables that name them.

    If `environment` already names a folder, that folder is used. Raises PermissionError, with the
    remedy, if another user owns a folder or can write to it. If a folder cannot be made, no error
    is raised here, but a later compilation fails.
    """
    if sys.platform == "win32":  # on Windows, each user has a separate temporary directory
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
        f"{folder} {reason}, who could run code as you: set {name} to a folder of your own"
    )

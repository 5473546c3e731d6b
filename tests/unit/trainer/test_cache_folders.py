"""The user's cache, and folders of compiled code that no other user can write to."""

import os
import stat
from pathlib import Path

import pytest

from autotune.trainer.cache_folders import COMPILED, compile_caches, user_cache


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("/somewhere", "/somewhere"), ("", "/home/me/.cache"), (None, "/home/me/.cache")],
)
def test_where_things_are_kept_for_a_user(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, folder: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert user_cache() == Path(folder) / "autotune"


def test_folders_of_compiled_code_are_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        found = compile_caches({"XDG_CACHE_HOME": str(tmp_path)})
    finally:
        os.umask(before)
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "autotune" / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "autotune" / "triton"),
    }
    assert {stat.S_IMODE(Path(folder).stat().st_mode) for folder in found.values()} == {0o700}


def test_a_folder_that_the_user_names_is_kept(tmp_path: Path) -> None:
    named = {name: str(tmp_path / "named" / name) for name in COMPILED}
    assert compile_caches(named) == named
    assert all(stat.S_IMODE(Path(folder).stat().st_mode) == 0o700 for folder in named.values())


@pytest.mark.parametrize("name", COMPILED)
def test_a_folder_of_another_owner_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Both the default folder, which somebody made first, and one that the user names."""
    compile_caches({"XDG_CACHE_HOME": str(tmp_path)})
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(
        PermissionError, match=r"inductor belongs to another user, .*set TORCHINDUCTOR_CACHE_DIR to"
    ):
        compile_caches({"XDG_CACHE_HOME": str(tmp_path)})
    monkeypatch.undo()

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp
    with pytest.raises(
        PermissionError, match=rf"shared can be written by every user, .*set {name} to"
    ):
        compile_caches({"XDG_CACHE_HOME": str(tmp_path), name: str(shared)})


def test_a_folder_that_cannot_be_made_is_named_all_the_same(tmp_path: Path) -> None:
    """Only a compilation needs it, and torch then names it in its error."""
    (tmp_path / "file").write_text("")
    found = compile_caches({"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "file" / "autotune" / "triton")

"""`autotune doctor` marks what is there, what is missing, and what is missing but not needed."""

from importlib.metadata import PackageNotFoundError, version

from autotune.cli.commands.doctor import NEEDED, OPTIONAL, _packages


def is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def test_an_installed_package_is_ok_and_a_missing_one_only_where_it_is_needed() -> None:
    marks = {check.name: check.ok for check in _packages()}
    assert marks == dict.fromkeys(NEEDED, True) | {
        name: True if is_installed(name) else None for name in OPTIONAL
    }
    assert None in marks.values() and marks["trl"]

"""What is told of each fault, and the table that `pytest tests/system/faults --write-table` makes of it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[3] / "benchmarks" / "results" / "faults.md"
COLUMNS = ("tries", "survived", "lost", "orphans left")
HEAD = """# Faults

What was done to a study or its worker, how often, how often it went on or could be continued, how many results were
lost and how many processes were left. Written by `pytest tests/system/faults --write-table`, on CPU probes
and both databases.

"""
_told: dict[str, Counter[str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help=f"Write {TABLE.name} of what the faults did.")


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Note what a fault did, and fail unless it was survived with nothing lost and nobody left."""

    def note(fault: str, *, survived: bool, lost: int = 0, orphans: int = 0) -> None:
        record_property("fault", [fault, 1, int(survived), lost, orphans])
        assert (survived, lost, orphans) == (True, 0, 0)

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that gathers: each worker of pytest-xdist tells its own."""
    if report.when == "call":
        for name, (fault, *numbers) in report.user_properties:
            if name == "fault":
                _told.setdefault(fault, Counter()).update(dict(zip(COLUMNS, numbers, strict=True)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-table") and not hasattr(session.config, "workerinput"):
        rows = [
            f"| {fault} | {' | '.join(str(told[one]) for one in COLUMNS)} |" for fault, told in sorted(_told.items())
        ]
        TABLE.write_text(
            HEAD + "\n".join((f"| fault | {' | '.join(COLUMNS)} |", "|---|---|---|---|---|", *rows)) + "\n"
        )

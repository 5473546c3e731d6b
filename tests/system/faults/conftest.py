"""Record the effect of each fault, and write the table of `pytest tests/system/faults --write-table`."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[3] / "benchmarks" / "results" / "faults.md"
COLUMNS = ("tries", "survived", "lost", "orphans left")
HEAD = """# Faults

Each fault was injected into a study or its worker. The table counts the tries, how often the study continued or could
be resumed, the lost results and the orphaned processes. Written by `pytest tests/system/faults --write-table`, with CPU
probes and both databases.

"""
_counts: dict[str, Counter[str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help=f"Write {TABLE.name} with the effects of the faults.")


@pytest.fixture
def record_fault(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record the effect of a fault. Fails unless it was survived without a lost result or an orphaned process."""

    def note(fault: str, *, survived: bool, lost: int = 0, orphans: int = 0) -> None:
        record_property("fault", [fault, 1, int(survived), lost, orphans])
        assert (survived, lost, orphans) == (True, 0, 0)

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the recorded faults in the main process, which receives the reports of all pytest-xdist workers."""
    if report.when == "call":
        for name, (fault, *numbers) in report.user_properties:
            if name == "fault":
                _counts.setdefault(fault, Counter()).update(dict(zip(COLUMNS, numbers, strict=True)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-table") and not hasattr(session.config, "workerinput"):
        rows = [
            f"| {fault} | {' | '.join(str(counts[column]) for column in COLUMNS)} |"
            for fault, counts in sorted(_counts.items())
        ]
        TABLE.write_text(
            HEAD + "\n".join((f"| fault | {' | '.join(COLUMNS)} |", "|---|---|---|---|---|", *rows)) + "\n"
        )

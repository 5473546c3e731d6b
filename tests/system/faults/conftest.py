"""Record the effect of each fault, and write the table of `pytest tests/system/faults
--write-table`.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[3] / "benchmarks" / "results" / "faults.md"
COLUMNS = ("tries", "survived", "lost", "orphans left")
REAL, REPLAYED = "real, on a CPU", "replayed"
HEAD = """# Faults

Each fault was injected into a study or its worker. The table counts the tries, how often the study
continued or could be resumed, the results that were lost or measured again, and the orphaned
processes. Faults of a worker were tried on real probes on a CPU, outside a study. Faults of the
tuner and of the database were tried on whole studies whose probes are answered from a function: no
worker ran that could be orphaned. Where both databases were tried, that is two tries. Written by
`pytest tests/system/faults --write-table` with torch {torch} and transformers {transformers}.

"""
UNKNOWN = "not measured"
_counts: dict[tuple[str, str], list[list[int | None]]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table",
        action="store_true",
        help=f"Write {TABLE.name} with the effects of the faults.",
    )


@pytest.fixture
def record_fault(
    record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> Callable[..., None]:
    """Record the effect of a fault. Fails unless it was survived without a lost result or an
    orphaned process.

    What a test does not count is None, and not measured.
    """
    probes = REAL if request.node.get_closest_marker("probe") else REPLAYED

    def note(
        fault: str, *, survived: bool, lost: int | None = None, orphans: int | None = None
    ) -> None:
        record_property("fault", [fault, probes, 1, int(survived), lost, orphans])
        assert survived and not lost and not orphans

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the recorded faults in the main process, which receives the reports of all
    pytest-xdist workers.
    """
    if report.when == "call":
        for name, (fault, probes, *numbers) in report.user_properties:
            if name == "fault":
                _counts.setdefault((fault, probes), []).append(numbers)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-table") and not hasattr(session.config, "workerinput"):
        TABLE.write_text(table(_counts))


def table(counts: dict[tuple[str, str], list[list[int | None]]]) -> str:
    """The page. A number that some try did not measure is not measured."""
    lines = [["fault", "probes", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    for about, tries in sorted(counts.items()):
        known = [
            [number for number in column if number is not None]
            for column in zip(*tries, strict=True)
        ]
        lines.append(
            [
                *about,
                *(str(sum(column)) if len(column) == len(tries) else UNKNOWN for column in known),
            ]
        )
    head = HEAD.format(torch=version("torch"), transformers=version("transformers"))
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)

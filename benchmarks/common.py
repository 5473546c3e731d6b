"""What every benchmark shares: the shape of its result file."""

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.files import write_atomic
from autotune.result import Fingerprint, to_data

RESULTS = Path(__file__).parent / "results"


def save(
    name: str, fingerprint: Fingerprint, summary: dict[str, Any], rows: list[dict[str, Any]], out: Path | None
) -> None:
    """Write <out or results>/<name>.json: schema_version, command, date, fingerprint, summary, rows."""
    data = {
        "schema_version": 1,
        "command": shlex.join(["python", f"benchmarks/{name}.py", *(arg for arg in sys.argv[1:] if arg != str(out))]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": to_data(fingerprint),
        "summary": summary,
        "rows": rows,
    }
    write_atomic((out or RESULTS) / f"{name}.json", json.dumps(data, indent=1) + "\n")


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print rows as an aligned table."""
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

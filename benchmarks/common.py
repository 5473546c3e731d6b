"""What every benchmark shares: the shape of its result file."""

import json
import os
import shlex
import sys
import tempfile
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
        "command": shlex.join(["python", f"benchmarks/{name}.py", *_without_out(sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": to_data(fingerprint),
        "summary": summary,
        "rows": rows,
    }
    write_atomic((out or RESULTS) / f"{name}.json", json.dumps(data, indent=1) + "\n")


def own_cache() -> None:
    """Inductor's cache on disk starts empty for the next process, so that compilations are compared with their like."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = tempfile.mkdtemp(prefix="autotune-cache-")


class Rows:
    """Rows kept as they come, a line each in <out>/<name>.jsonl: what was measured outlasts the call that measured it.

    With `earlier`, the file of an earlier call on the same machine, it goes on where that ended.
    """

    def __init__(self, name: str, out: Path | None, earlier: Path | None) -> None:
        text = earlier.read_text() if earlier else ""
        self.all: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        folder = out or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.jsonl"
        self._path.write_text(text)

    def add(self, row: dict[str, Any]) -> None:
        self.all.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, **values: Any) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(key) == value for key, value in values.items()) for row in self.all)


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print rows as an aligned table."""
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _without_out(arguments: list[str]) -> list[str]:
    place = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:place] + arguments[place + 2 :]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

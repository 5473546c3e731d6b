"""The answers of the commands that are about studies and about this machine.

The names of the fields are keys of the JSON output.
"""

from dataclasses import dataclass
from typing import Any

from autotune.core.probe_types import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of a study that a command wrote or left in place."""

    study: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One study of a database. `files` is the study's directory; an unknown speed is None."""

    study: str
    model: str
    device: str
    trials: int
    running: bool
    tokens_per_s: float | None
    files: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A thing that `doctor` examined. `ok` is None if the thing is missing but not needed."""

    name: str
    ok: bool | None
    found: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """The number of trials that a worker ran for a study."""

    study: str
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """A knob of a search space: its values or its range.

    `when` is the condition under which the knob has an effect.
    """

    values: list[Any]
    range: list[Any] | None
    when: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRow:
    """One measurement in a submission. Unknown numbers are None."""

    device: str
    model: str | None
    label: str
    tokens_per_s: float | None
    peak_reserved_gib: float | None
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A submission that is stored in `file`."""

    file: str
    was_known: bool
    rows: tuple[ImportedRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The content of training.json: the steps, time and cost of a run, next to the projection.

    The run has done `steps` of its `of` optimizer steps. `error` is the time of a complete run
    divided by the projected time, minus 1.
    """

    schema_version: int
    study: str
    steps: int
    of: int
    exit_code: int
    spent_usd: float | None
    projected_usd: float | None
    loss: float | None
    error: float | None
    trained_s: float
    projected_s: float
    wall_s: float

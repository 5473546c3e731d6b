"""What a study keeps about itself in its database, besides trials and probes: a versioned record with named fields.

Each field is a user attribute of the Optuna study, as JSON, so that the leader and its workers can update their own
fields independently. A record of another schema version is refused: probe results of that version do not compare.
"""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Protocol, Self

from autotune.core.errors import StorageError, UsageError
from autotune.core.probe_types import Fingerprint, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_difference
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.study.ablation import Ablation
from autotune.study.decomposition import Decomposition
from autotune.study.learning import Learning
from autotune.study.summary import Quality, Verification

SCHEMA_VERSION = 2  # 1 was a dictionary named "facts", without a version in it
_VERSION = "schema_version"  # written last, so that a record with a version is complete
_WORKER = "worker_seconds:"  # and a worker's name: each worker writes an attribute of its own


class StudyPhase(StrEnum):
    """What the leader of a study is doing; workers help while it searches."""

    SEARCHING = "searching"
    CONFIRMING = "confirming"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop searching. `trials` is a total over all sessions; `patience` counts trials without a better one."""

    budget_s: float
    trials: int | None = None
    patience: int = 40
    finalists: int = 3
    rounds: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTerms:
    """What all probes of a study have in common: the memory limit in GiB, the fraction kept free, and the seed."""

    memory_gib: float
    headroom: float
    seed: int = 0

    def request(self, task: Task, config: TrainConfig, device: str) -> ProbeRequest:
        """The request for a probe of the whole model on `device` ("cpu" or "cuda")."""
        return task.request(
            config,
            device=device,
            memory_gib=self.memory_gib,
            headroom=self.headroom,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """One study as its database knows it. `out` is the study's directory, as `location.opened_out` reads it.

    `wall_seconds` counts all sessions, `earlier_seconds` those before the current one, `worker_seconds` what each
    further worker worked. `limits` and `phase` are None until the search begins.
    """

    task: Task
    fingerprint: Fingerprint
    terms: ProbeTerms
    spec: StudySpec
    out: str
    reserve_opened: bool = False
    shallow_only: bool = False
    limits: Limits | None = None
    phase: StudyPhase | None = None
    wall_seconds: float = 0.0
    earlier_seconds: float = 0.0
    worker_seconds: dict[str, float] = field(default_factory=dict)
    quality: Quality | None = None
    verification: Verification | None = None
    learning: Learning | None = None
    too_short_for: tuple[str, ...] = ()  # what the budget of the last session was too short for
    ablation: Ablation | None = None
    decomposition: Decomposition | None = None

    @property
    def others_seconds(self) -> float:
        """Seconds that workers other than the leader worked, summed up."""
        return sum(self.worker_seconds.values())

    def identity(self) -> dict[str, Any]:
        """What must not change when the study is continued, by what an error message calls it."""
        task = self.task
        return {
            "model": task.model.name,
            "model digest": task.model.digest,
            "weights": task.model.weights is not None,
            "device": task.device.name,
            "data sheet": to_data(replace(task.device, given=None)) if task.device.given else None,
            "measured on": (task.measured_on or task.device).name,
            "plays ranks": task.plays_ranks,
            "deadline in hours": task.within_hours,
            "trainer": task.trainer,
            "workload": task.workload.facts(),
            "rows dealt out by length": task.workload.dealt,
            "memory in GiB": round(
                self.terms.memory_gib
            ),  # other processes on the card change it a little
            "headroom": self.terms.headroom,
            "fingerprint": to_data(self.fingerprint),
            "reserve opened": self.reserve_opened,
            "shallow only": self.shallow_only,
            "space": task.space.describe(),
        }

    def require_same(self, now: "StudyRecord") -> None:
        """Refuse to continue this study as `now` would. Raises UsageError, which names what differs."""
        current = to_data(now.identity())
        for key, value in to_data(self.identity()).items():
            if value != current[key]:
                raise UsageError(
                    f"study {self.task.study!r} cannot be continued: its {key} differs: "
                    f"{fmt_difference(value, current[key])}",
                    remedy="give the same options as before, or another name with --study",
                )

    @classmethod
    def from_attributes(cls, name: str, attributes: dict[str, Any]) -> Self | None:
        """The record among a study's attributes; None if there is none yet.

        Raises:
            UsageError: another version of autotune wrote the study.
            StorageError: the attributes do not have the form of a record.
        """
        version = attributes.get(_VERSION)
        if version is None and "facts" not in attributes:
            return None
        if version != SCHEMA_VERSION:
            is_newer = isinstance(version, int) and version > SCHEMA_VERSION
            raise UsageError(
                f"study {name!r} was written by {'a newer' if is_newer else 'an earlier'} "
                f"version of autotune (record version {version or 1}, this one reads {SCHEMA_VERSION})",
                remedy="open it with the version that wrote it, or run the study again under another name",
            )
        names = {item.name for item in fields(cls)}
        values = {key: value for key, value in attributes.items() if key in names}
        values["worker_seconds"] = {
            key.removeprefix(_WORKER): value
            for key, value in attributes.items()
            if key.startswith(_WORKER)
        }
        carried = (values.get("task") or {}).get("carried")
        if carried and "ratio" in carried:  # products and bytes had one ratio before
            ratio = carried.pop("ratio")
            carried |= {"products": ratio, "bytes": ratio}
        try:
            return from_data(cls, values)
        except (KeyError, TypeError, ValueError) as error:  # pydantic's error is a ValueError
            raise StorageError(
                f"the record of study {name!r} cannot be read: {str(error).splitlines()[0]}",
                remedy="open it with the version that made it, or run the study again under another name",
            ) from None


class Attributes(Protocol):
    """Where a record is written: the attributes of an Optuna study, which `Optimizer` opens."""

    def attributes(self) -> dict[str, Any]:
        """All attributes."""

    def remember(self, key: str, value: Any) -> None:
        """Write one attribute."""


def start_record(study: Attributes, record: StudyRecord) -> None:
    """Write the record of a study that begins or continues.

    Raises UsageError if the study exists and what must not change differs.
    """
    existing = StudyRecord.from_attributes(record.task.study, study.attributes())
    if existing is not None:
        existing.require_same(record)
    for key in ("task", "fingerprint", "terms", "spec", "out", "reserve_opened", "shallow_only"):
        study.remember(key, to_data(getattr(record, key)))
    study.remember(_VERSION, SCHEMA_VERSION)


def update_record(study: Attributes, **changes: Any) -> None:
    """Write these fields of the record."""
    for key, value in changes.items():
        study.remember(key, to_data(value))


def add_worker_seconds(study: Attributes, worker: str, seconds: float) -> None:
    """Record how long a worker other than the leader has worked so far."""
    study.remember(f"{_WORKER}{worker}", seconds)

"""The record of a study in its database: everything about the study except trials and probes.

The record has a schema version. Each field is stored as JSON in its own user attribute of the
Optuna study, so the leader and its workers can update different fields independently. A record of
another schema version is refused, because results of its probes cannot be compared with new
results.
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

SCHEMA_VERSION = 2  # version 1 was a dictionary named "facts", without a version number
_VERSION = "schema_version"  # this key is written last, so a record with a version is complete
_WORKER = "worker_seconds:"  # a key consists of this prefix and a worker's name


class StudyPhase(StrEnum):
    """The activity of a study's leader; workers help while the phase is SEARCHING.

    STOPPED means that a user or a failure stopped the study before its end.
    """

    SEARCHING = "searching"
    CONFIRMING = "confirming"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a search.

    `trials` is the maximum number of trials in all sessions together, or None. The search stops
    after `patience` trials without an improvement. The confirmation measures about `finalists`
    configurations in up to `rounds` rounds.
    """

    budget_s: float
    trials: int | None = None
    patience: int = 40
    finalists: int = 3
    rounds: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTerms:
    """The settings that all probes of a study share.

    These are the memory limit in GiB, the fraction of this memory to keep free, and the seed.
    """

    memory_gib: float
    headroom: float
    seed: int = 0

    def request(self, task: Task, config: TrainConfig, device: str) -> ProbeRequest:
        """Return the request for a probe of the whole model on `device` ("cpu" or "cuda")."""
        return task.request(
            config,
            device=device,
            memory_gib=self.memory_gib,
            headroom=self.headroom,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """One study as its database knows it.

    `out` is the study's directory in the form that `location.from_stored_directory` reads.
    `wall_seconds` is the time of all sessions, `earlier_seconds` the time of the sessions before
    the current one, and `worker_seconds` the time of each additional worker. `limits` and `phase`
    are None until the search begins.
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
    too_short_for: tuple[str, ...] = ()  # parts of the study that the last session had no time for
    ablation: Ablation | None = None
    decomposition: Decomposition | None = None

    @property
    def others_seconds(self) -> float:
        """The total seconds that workers other than the leader worked."""
        return sum(self.worker_seconds.values())

    def identity(self) -> dict[str, Any]:
        """Return the values that must stay the same when the study continues.

        The keys are the names of these values in error messages.
        """
        task = self.task
        return {
            "model": task.model.name,
            "model digest": task.model.digest,
            "weights": task.model.weights is not None,
            "device": task.device.name,
            "data sheet": to_data(replace(task.device, given=None)) if task.device.given else None,
            "measured on": (task.measured_on or task.device).name,
            "simulation of ranks": task.plays_ranks,
            "deadline in hours": task.within_hours,
            "trainer": task.trainer,
            "workload": task.workload.facts(),
            "sequences distributed over GPUs by length": task.workload.dealt,
            # The available memory varies a little with other processes on the GPU, so only whole
            # GiB are compared.
            "memory in GiB": round(self.terms.memory_gib),
            "headroom": self.terms.headroom,
            "fingerprint": to_data(self.fingerprint),
            "use of the reserve space": self.reserve_opened,
            "shallow only": self.shallow_only,
            "space": task.space.describe(),
        }

    def require_same(self, now: "StudyRecord") -> None:
        """Raise UsageError if `now` differs in a value that must stay the same.

        The error names the value that differs.
        """
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
        """Read the record from a study's attributes; return None if there is none yet.

        Raises:
            UsageError: another version of autotune wrote the study.
            StorageError: the attributes do not form a record.
        """
        version = attributes.get(_VERSION)
        if version is None and "facts" not in attributes:
            return None

        if version != SCHEMA_VERSION:
            is_newer = isinstance(version, int) and version > SCHEMA_VERSION
            raise UsageError(
                f"study {name!r} was written by {'a newer' if is_newer else 'an earlier'} "
                f"version of autotune (record version {version or 1}, "
                f"this version reads {SCHEMA_VERSION})",
                remedy="open it with the version that wrote it, "
                "or run the study again under another name",
            )

        names = {item.name for item in fields(cls)}
        values = {key: value for key, value in attributes.items() if key in names}
        values["worker_seconds"] = {
            key.removeprefix(_WORKER): value
            for key, value in attributes.items()
            if key.startswith(_WORKER)
        }

        carried = (values.get("task") or {}).get("carried")
        if (
            carried and "ratio" in carried
        ):  # older versions stored a single ratio, for both products and bytes
            ratio = carried.pop("ratio")
            carried |= {"products": ratio, "bytes": ratio}

        try:
            return from_data(cls, values)
        except (KeyError, TypeError, ValueError) as error:  # pydantic's error is a ValueError
            raise StorageError(
                f"the record of study {name!r} cannot be read: {str(error).splitlines()[0]}",
                remedy="open it with the version that made it, "
                "or run the study again under another name",
            ) from None


class Attributes(Protocol):
    """The interface to an Optuna study's attributes, which hold a record.

    `Optimizer` implements it.
    """

    def attributes(self) -> dict[str, Any]:
        """Return all attributes."""

    def remember(self, key: str, value: Any) -> None:
        """Write one attribute."""


def start_record(study: Attributes, record: StudyRecord) -> None:
    """Write the record of a study that begins or continues.

    Raises UsageError if the study exists already and differs in a value that must stay the same.
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
    """Record the seconds that a worker other than the leader has worked so far."""
    study.remember(f"{_WORKER}{worker}", seconds)

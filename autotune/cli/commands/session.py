"""Opening a study that exists: from its name to the values that report, export, status and oom read. No torch."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from autotune.core.errors import UsageError
from autotune.problem.task import Task
from autotune.study.storage.location import storage_url
from autotune.study.storage.study_record import StudyRecord
from autotune.study.summary import StudySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStudy:
    """A study as its database knows it."""

    summary: StudySummary
    record: StudyRecord

    @property
    def task(self) -> Task:
        """What is tuned for what."""
        return self.record.task

    @property
    def out(self) -> Path:
        """The study's directory."""
        return Path(self.record.out)


def open_study(name: str | None, storage: str | None) -> StoredStudy:
    """A finished or running study, by name; the newest if none is given.

    Raises:
        UsageError: there is no such study.
        StorageError: the database cannot be read, or holds what was never written by us.
    """
    from autotune.study.storage.optuna_storage import read_record, study_names

    url = storage_url(storage)
    names = study_names(url)
    if not names:
        raise UsageError(
            "there is no study in this database", remedy="start one with `autotune run`, or name --storage"
        )
    if name is None:
        name = names[-1]
    if name not in names:
        raise UsageError(f"there is no study {name!r} here", remedy=f"the studies are: {', '.join(names)}")
    record = read_record(url, name)
    if record is None:
        raise UsageError(f"{name!r} is not a study of autotune", remedy="name one that `autotune run` made")
    return load(name, url, record)


def load(name: str, url: str, record: StudyRecord) -> StoredStudy:
    """The study with this record."""
    from autotune.planning.other_devices import winner_on_other_devices
    from autotune.study.history import restore, summarize
    from autotune.study.optimizer import Optimizer
    from autotune.study.storage.probe_store import ProbeStore

    task = record.task
    with closing(Optimizer.open(url, name, task.space)) as search:
        finished, importances = search.finished(), search.importances()
    with closing(ProbeStore(url)) as store:  # last: where the study runs, a row is there before its trial is finished
        stored = store.of_study(name)
    rows, selection = restore(task, finished, stored)
    probed = sum(row.result.seconds.get("total", 0.0) for row in stored)
    others = record.others_seconds
    summary = summarize(
        rows,
        selection,
        record.fingerprint,
        stored,
        cards=winner_on_other_devices(record.terms.headroom),
        # While it runs it was last recorded when a trial ended.
        wall_seconds=max(record.wall_seconds, 0.0 if others else probed),
        others_seconds=others,
        importances=importances,
        quality=record.quality,
        verification=record.verification,
        explanation=record.ablation,
    )
    return StoredStudy(summary=summary, record=record)

"""Opening a study that exists: from its name to the values that report, export, status and oom read. No torch."""

import fcntl
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.errors import StorageError, UsageError
from autotune.core.probe_types import Fingerprint, from_data, to_data
from autotune.problem.setup import slug
from autotune.problem.task import Task
from autotune.study.ablation import Ablation
from autotune.study.summary import Quality, StudySummary, Verification

DEFAULT_ROOT = Path("runs")
LOCK = ".lock"  # in a study's directory, held by the process that runs it


def storage_url(storage: str | None) -> str:
    """The database: --storage, AUTOTUNE_STORAGE, or a SQLite file under runs/ whose folder is made on the way."""
    if storage is None:
        storage = os.environ.get("AUTOTUNE_STORAGE")
    if storage is None:
        DEFAULT_ROOT.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{DEFAULT_ROOT / 'autotune.db'}"
    return storage


def shared_url(storage: str | None) -> str:
    """The same, of a database that several processes may write. Raises UsageError for one that they may not."""
    from autotune.study.storage.database import network_drive

    url = storage_url(storage)
    if kind := network_drive(url):
        raise UsageError(
            f"the database is an SQLite file on a network drive ({kind}), whose locks do not hold between machines",
            remedy="give --storage postgresql+psycopg://..., or a file on a disk of this machine for its own workers",
        )
    return url


def out_dir(out: str | None, study: str) -> Path:
    return Path(out) if out else DEFAULT_ROOT / slug(study)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStudy:
    """A study as its database knows it."""

    summary: StudySummary
    task: Task
    facts: dict[str, Any]
    out: Path


def running(out: Path) -> str | None:
    """The process that runs the study of this directory now; None where nobody does, or the directory is elsewhere."""
    try:
        with (out / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read().strip() or "?"
    except OSError:
        pass
    return None


def facts_of(task: Task, fingerprint: Fingerprint, *, memory_gib: float, headroom: float) -> dict[str, Any]:
    """What must be the same when a study is continued, as plain data."""
    return {
        "model": task.model.name,
        "model digest": task.model.digest,
        "weights": task.model.weights is not None,
        "device": task.device.name,
        "measured on": task.measured_on.name if task.measured_on else task.device.name,
        "trainer": task.trainer,
        "workload": task.workload.facts(),
        "memory in GiB": round(memory_gib),  # neighbours on the card move it a little
        "headroom": headroom,
        "fingerprint": to_data(fingerprint),
    }


def quality_of(facts: dict[str, Any]) -> Quality | None:
    """What a study's finalists were last found to learn, if they were asked."""
    return from_data(Quality, facts["quality"]) if "quality" in facts else None


def verification_of(facts: dict[str, Any]) -> Verification | None:
    """What the exported run of a study's winner was last seen to do, if it was run."""
    return from_data(Verification, facts["verification"]) if "verification" in facts else None


def explanation_of(facts: dict[str, Any]) -> Ablation | None:
    """What the knobs of a study's winner were last found to be worth, if that was asked."""
    return from_data(Ablation, facts["explanation"]) if "explanation" in facts else None


def open_study(name: str | None, storage: str | None) -> StoredStudy:
    """A finished or running study, by name; the newest if none is given.

    Raises:
        UsageError: there is no such study.
        StorageError: the database cannot be read, or holds what was never written by us.
    """
    from autotune.study.optimizer import stored_facts, study_names

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
    facts = stored_facts(url, name) or {}
    if "subject" not in facts:
        raise UsageError(f"{name!r} is not a study of autotune", remedy="name one that `autotune run` made")
    if "lengths" not in facts["subject"].get("workload", {}):
        raise UsageError(
            f"{name!r} was made by an earlier autotune, which kept no distribution of lengths",
            remedy="run the study again under another name",
        )
    try:
        return _open(name, url, facts)
    except (KeyError, TypeError, ValueError) as error:  # pydantic's is a ValueError
        raise StorageError(
            f"study {name!r} holds what autotune does not write: {str(error).splitlines()[0]}",
            remedy="open it with the version that made it, or run the study again under another name",
        ) from None


def _open(name: str, url: str, facts: dict[str, Any]) -> StoredStudy:
    """From what the database holds, whoever wrote it."""
    from autotune.planning.other_devices import of_winner
    from autotune.study.history import restore, seconds_of_others, summarize
    from autotune.study.optimizer import Optimizer
    from autotune.study.storage.probe_store import ProbeStore

    task = from_data(Task, facts["subject"])
    with closing(Optimizer.open(url, name, task.space)) as search:
        finished, importances = search.finished(), search.importances()
    with closing(ProbeStore(url)) as store:  # last: where the study runs, a row is there before its trial is finished
        stored = store.of_study(name)
    rows, selection = restore(task, finished, stored)
    probed = sum(row.result.seconds.get("total", 0.0) for row in stored)
    others = seconds_of_others(facts)
    summary = summarize(
        rows,
        selection,
        from_data(Fingerprint, facts["fingerprint"]),
        stored,
        cards=of_winner(float(facts.get("headroom", 0.05))),
        # While it runs it was last told when a trial ended.
        wall_seconds=max(float(facts.get("wall_seconds", 0.0)), 0.0 if others else probed),
        others_seconds=others,
        importances=importances,
        quality=quality_of(facts),
        verification=verification_of(facts),
        explanation=explanation_of(facts),
    )
    return StoredStudy(summary=summary, task=task, facts=facts, out=Path(facts["out"]))

"""`autotune fleet`: the files that start a study's workers on Kubernetes, SkyPilot or Slurm."""

from pathlib import Path

from autotune.cli.commands.session import open_study
from autotune.core.errors import UsageError
from autotune.core.files import write_atomic
from autotune.study.storage.location import storage_url


def command(study: str | None, storage: str | None, *, workers: int, formats: list[str], out: Path | None) -> None:
    """Write them, and say where. Raises UsageError where no other machine could reach the study."""
    from autotune.export.clusters import SYSTEMS, render, workers_job

    for wanted in formats:
        if wanted not in SYSTEMS:
            raise UsageError(f"there is no format {wanted!r}", remedy=f"the formats are {', '.join(SYSTEMS)}")
    if storage_url(storage).startswith("sqlite"):
        raise UsageError(
            "the study is in an SQLite file, which other machines cannot share",
            remedy="run it with --storage postgresql+psycopg://..., or with --workers N on this machine alone",
        )
    found = open_study(study, storage)
    if found.record.limits is None:
        raise UsageError(
            f"study {found.summary.study!r} cannot be joined yet", remedy="wait until `autotune run` has begun it"
        )
    job = workers_job(
        study=found.summary.study,
        device=found.task.measured_on or found.task.device,
        fingerprint=found.record.fingerprint,
        budget_s=found.record.limits.budget_s,
        count=workers,
    )
    folder = out or found.out
    folder.mkdir(parents=True, exist_ok=True)
    for wanted in formats or SYSTEMS:
        for name, text in render(job, wanted).items():
            write_atomic(folder / name, text)
            print(folder / name)

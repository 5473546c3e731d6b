"""`autotune submit` and `autotune import`: publish or import measured results."""

from contextlib import closing
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Json, Storage, StudyName
from autotune.cli.terminal import print_answer_json
from autotune.core.errors import UsageError
from autotune.core.files import write_atomic
from autotune.core.units import fmt_count, fmt_gib
from autotune.report.values.commands import Files, Imported, ImportedRow
from autotune.study.storage.location import EVIDENCE, storage_url

if TYPE_CHECKING:
    from autotune.prediction.observed_speed import Observation


def submit(
    study: StudyName = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write. [the study's submission.json]"),
    ] = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Write a study's results for publication: winner, baseline, GPU, and package versions.

    Raises:
        UsageError: there is no such study, the GPU is not in the catalogue, or the speeds are
            projected or disturbed.
        NothingFits: the study has no winner.
        StorageError: the file cannot be written.
    """
    from autotune.api import load_study
    from autotune.core.probe_types import Evidence
    from autotune.planning.submission import submission_of

    result = load_study(study, storage)
    recipe = result.recipe
    if recipe.winner.evidence is Evidence.PROJECTED:
        device = recipe.device.name
        gpus = recipe.config.num_gpus
        target = device if gpus == 1 else f"{gpus} GPUs {device}"
        raise UsageError(
            f"the study's speeds are projected: no training was measured on {target}",
            remedy=f"run the study on {target}",
        )

    if recipe.winner.evidence is Evidence.DISTURBED:
        raise UsageError(
            "the study's speeds are disturbed: other work ran on the machine",
            remedy="run the study again while nothing else runs",
        )

    submission = submission_of(recipe, _measured_on(result.summary.study, storage))
    path = out or result.out / "submission.json"
    write_atomic(path, submission.text)

    if json_:
        print_answer_json(Files(study=result.summary.study, files=(str(path),)))
        return
    print(path)
    print(
        "The file names GPU, model and versions, but no path, dataset, study or machine. Read it "
        "before you send it."
    )


def import_(
    file: Annotated[Path, typer.Argument(help="File that `autotune submit` wrote.")],
    evidence: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Directory of evidence. [runs/evidence]", show_default=False
        ),
    ] = EVIDENCE,
    json_: Json = False,
) -> None:
    """Check the file of a submission, and keep it as evidence for later estimates.

    Raises:
        UsageError: the file is not a valid submission.
        StorageError: the directory cannot be written.
    """
    from autotune.planning.observations import read_submission, store_submission

    path, was_known = store_submission(file, evidence)
    rows = read_submission(path)

    if json_:
        print_answer_json(
            Imported(file=str(path), was_known=was_known, rows=tuple(map(_row, rows)))
        )
        return

    for row in rows:
        model = row.model or f"a model of shape {row.model_digest}"
        speed = f"{fmt_count(row.tokens_per_s)} tokens/s, {fmt_gib(row.peak_reserved_gib)}"
        print(f"{row.device}  {model}  {row.config.label()}  {speed}  [{row.evidence}]")
    print(f"{path} was stored before: nothing changed" if was_known else path)


def _row(row: "Observation") -> ImportedRow:
    return ImportedRow(
        device=row.device,
        model=row.model,
        label=row.config.label(),
        tokens_per_s=row.tokens_per_s,
        peak_reserved_gib=row.peak_reserved_gib,
        evidence=row.evidence,
    )


def _measured_on(study: str, storage: str | None) -> str:
    """Return the day of the study's last probe."""
    from autotune.study.storage.probe_store import ProbeStore

    with closing(ProbeStore(storage_url(storage))) as store:
        days = [
            row.result.started_at[:10]
            for row in store.probes_of_study(study)
            if row.result.started_at
        ]
    return max(days, default=date.today().isoformat())

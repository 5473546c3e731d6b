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
from autotune.core.units import DASH, fmt_count, fmt_gib
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
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="File that `autotune submit`, `calibrate --share` or a trainer's callback wrote, "
            "or a folder of such files.",
        ),
    ],
    evidence: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Directory of evidence. [runs/evidence]", show_default=False
        ),
    ] = EVIDENCE,
    json_: Json = False,
) -> None:
    """Check submissions, and keep them as evidence for later estimates.

    All valid files of a folder are kept, even if others are invalid.

    Raises:
        UsageError: a file is not a valid submission, or the folder has none.
        StorageError: the directory cannot be written.
    """
    from autotune.planning.observations import (
        calibration_in,
        read_submission,
        store_submission,
        submissions_in,
    )

    problems: list[UsageError] = []
    stored: dict[Path, bool] = {}
    for one in submissions_in(file):
        try:
            path, was_known = store_submission(one, evidence)
            stored[path] = was_known
        except UsageError as error:
            problems.append(error)

    if json_ and stored:
        rows = tuple(_row(row) for path in stored for row in read_submission(path))
        kept = str(evidence if file.is_dir() else next(iter(stored)))
        print_answer_json(Imported(file=kept, was_known=all(stored.values()), rows=rows))
    for path, was_known in () if json_ else stored.items():
        for observed in read_submission(path):
            _print_row(observed)
        if (calibration := calibration_in(path)) is not None:
            print(f"calibration: add --calibration {calibration} to an estimate for this machine")
        print(f"{path} was stored before: nothing changed" if was_known else path)

    if problems:
        raise UsageError("\n".join(map(str, problems)), remedy=problems[0].remedy)


def _print_row(row: "Observation") -> None:
    model = row.model or f"a model of shape {row.model_digest}"
    peak = DASH if row.peak_reserved_gib is None else fmt_gib(row.peak_reserved_gib)
    speed = f"{fmt_count(row.tokens_per_s)} tokens/s, {peak}"
    print(f"{row.device}  {model}  {row.config.label()}  {speed}  [{row.evidence}]")


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

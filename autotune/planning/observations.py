"""Loads other users' measurements from the package's data and from imported submission files.

The module `submission` validates submission files. Its import loads pydantic, which is slow, so it
is imported only if there is a file to read.
"""

import functools
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.errors import UsageError
from autotune.core.files import load_data, read_regular, write_atomic
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.prediction.observed_speed import Observation
from autotune.problem.calibration import write_calibration
from autotune.study.storage.location import EVIDENCE

if TYPE_CHECKING:
    from autotune.planning.submission import Submission

Say = Callable[[str], None]
# Submissions of other users that come with the package; CONTRIBUTING.md says how to add one
CONTRIBUTED = Path(str(files("autotune.catalog"))) / "data" / "measured"


def ignore_message(text: str) -> None:
    """Ignore a message."""


@functools.cache
def published_observations() -> tuple[Observation, ...]:
    """Return the published measurements that come with the package."""
    unknown = {"step_time_s": None, "peak_reserved_gib": None, "model_digest": None}
    published = (
        Observation(**unknown | row | {"config": TrainConfig(**row["config"])})
        for row in load_data("autotune.catalog", "data/sightings")
    )
    contributed, _ = load_evidence(CONTRIBUTED)
    return (*published, *contributed)


def known_observations(
    directory: Path = EVIDENCE, say: Say = ignore_message
) -> tuple[Observation, ...]:
    """Return the published observations and the submissions imported into `directory`.

    `say` gets a warning for each unreadable file.
    """
    imported, problems = load_evidence(directory)
    for problem in problems:
        say(f"warning: {problem}")
    return tuple(dict.fromkeys((*published_observations(), *imported)))


def read_submission(path: Path) -> tuple[Observation, ...]:
    """Return the observations of a submission from another user; a calibration has none.

    Raises UsageError if the file is unreadable or too large, or has an unknown field.
    """
    return _observations(_load(path))


def submissions_in(path: Path) -> tuple[Path, ...]:
    """Return the JSON files of a folder, or the path itself if it is no folder.

    Raises UsageError if the folder has no JSON file.
    """
    if not path.is_dir():
        return (path,)
    found = tuple(sorted(path.glob("*.json")))
    if not found:
        raise UsageError(f"{path} has no .json file", remedy="name a file, or another folder")
    return found


def store_submission(path: Path, directory: Path) -> tuple[Path, bool]:
    """Check a submission, and copy it into `directory`.

    The copy's file name is the submission's digest. A calibration is also written as a file for
    `--calibration` (`calibration_in`). Returns the path of the copy, and whether the copy existed
    before.

    Raises:
        UsageError: in the cases of `read_submission`.
        StorageError: `directory` cannot be written.
    """
    submission = _load(path)
    # The submission's digest names the copy, so the submission's author cannot choose a path.
    target = directory / f"{submission.digest}.json"
    try:
        was_there = _load(target) == submission
    except UsageError:
        was_there = False
    if not was_there:
        write_atomic(target, submission.text)
    if (calibration := submission.to_calibration()) is not None:
        write_calibration(calibration, _calibration_path(target))
    return target, was_there


def calibration_in(stored: Path) -> Path | None:
    """Return the file for `--calibration` of a stored submission, or None if it has none."""
    path = _calibration_path(stored)
    return path if path.is_file() else None


def _calibration_path(stored: Path) -> Path:
    return stored.parent / "calibrations" / stored.name


def load_evidence(directory: Path) -> tuple[tuple[Observation, ...], tuple[str, ...]]:
    """Return the observations of valid files in `directory`, and an error text for each other file.

    If several files have equal content, only one of them is loaded. The function raises no
    exception.
    """
    submissions: dict[str, Submission] = {}
    problems = []

    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        return (), (f"cannot read {_short(str(directory))}: {error.strerror}",)

    for name in names:
        try:
            submission = _load(directory / name)
            submissions[submission.digest] = submission
        except UsageError as error:
            problems.append(str(error))

    return tuple(
        observation
        for submission in submissions.values()
        for observation in _observations(submission)
    ), tuple(problems)


def _observations(submission: "Submission") -> tuple[Observation, ...]:
    """Return one observation for each measured configuration."""
    return tuple(
        Observation(
            device=submission.gpu,
            model=submission.model,
            model_digest=submission.model_digest,
            config=row.config,
            accumulation=row.accumulation,
            tokens_per_row=row.tokens_per_row,
            tokens_per_s=row.raw_tokens_per_s,
            step_time_s=row.step_time_s,
            peak_reserved_gib=row.peak_reserved_gib,
            source=f"submission {submission.digest}",
            as_of=submission.date,
            trainer=submission.trainer or "",
            evidence=row.evidence,
        )
        for row in submission.rows
    )


def _load(path: Path) -> "Submission":
    from pydantic import ValidationError

    from autotune.planning.submission import Submission

    name = _short(str(path))
    try:
        return Submission.model_validate_json(read_regular(path))
    except OSError as error:
        raise UsageError(
            f"cannot read {name}: {error.strerror or error}", remedy="check the path"
        ) from None
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False, include_context=False, include_input=False)[:5]:
            place = ".".join(str(part) for part in item["loc"]) or "the file"
            problems.append(
                f"{name}: {_short(place)}: {_short(item['msg'].removeprefix('Value error, '))}"
            )
        raise UsageError(
            "\n".join(problems),
            remedy="ask for a file that this version wrote: by `autotune submit`, "
            "`calibrate --share` or the trainer's callback",
        ) from None


def _short(text: str) -> str:
    """Return a text from an untrusted file, made safe to print on one line of a terminal."""
    return printable(text)[:300]

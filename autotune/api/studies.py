"""Studies from Python: run one, load one, and read its results."""

import html
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.api.main import main
from autotune.core.errors import NothingFits, UsageError
from autotune.core.notebook import progress_or_default
from autotune.core.text import study_command
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.report import describe
from autotune.report.study_directory import write_exports, write_study, write_versus
from autotune.study.progress import TextProgress
from autotune.study.storage.location import existing_url, from_stored_directory
from autotune.study.storage.study_record import StudyRecord
from autotune.study.summary import Recipe, StudySummary, summary_data

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def tune(
    model: str,
    *,
    gpu: str = "auto",
    space: str | SearchSpace | None = None,
    gpus: int | str | Sequence[int] | None = None,
    progress: Callable[[str], Any] | None = None,
    **options: Any,
) -> "StudyResult":
    """Search for the best configuration with real probes, as `autotune run` does.

    Returns the results of the study. `options` are the options of the command, with underscores:
    budget="10m", examples=50_000, pins={"lora_rank": 32}. With several GPU counts in `gpus`, such
    as [1, 2, 4, 8], the study compares them. The function writes the same files and the same
    database as the command. `progress`, for example `print`, receives a line for each step and
    trial; without it, only a notebook shows these lines. Ctrl-C during the search raises
    Interrupted after the files are written. Another call with the same study name continues the
    study.

    Raises:
        AutotuneError: the error that the command would report, with `remedy` and `exit_code`.
        TypeError: an option is unknown.
    """
    counts = gpus if isinstance(gpus, int | str | None) else tuple(gpus)
    spec = StudySpec(model=model, gpu=gpu, space=space, gpus=counts, **options)
    if spec.configs:
        raise UsageError(
            "a spec that lists its configurations (configs) has no winner to return",
            remedy="probe its configurations with `autotune run --spec`",
        )

    say = progress_or_default(progress)
    outcome = main(spec, lambda plan: nullcontext(TextProgress(say)), say=say)
    if outcome.error is not None:
        raise outcome.error
    return load_study(outcome.plan.study, outcome.plan.url)


def load_study(name: str | None = None, storage: str | None = None) -> "StudyResult":
    """Load a study by name, running or finished. Without a name, load the newest.

    Raises:
        UsageError: there is no such study, or another version of autotune wrote it.
        StorageError: the database cannot be read.
    """
    from autotune.study.session import find_record

    url = existing_url(storage)
    return result_of(find_record(name, url), url)


def result_of(record: StudyRecord, url: str) -> "StudyResult":
    """Load the current state of this record's study from its database."""
    from autotune.planning.projections import project_winner
    from autotune.study.session import read_summary

    return StudyResult(summary=read_summary(record, url, project_winner), record=record, url=url)


def _require_one_model(first: Recipe, second: Recipe) -> None:
    """Raise UsageError if two winners train different models, whose speeds cannot be compared."""
    if first.model.digest != second.model.digest:
        raise UsageError(
            f"study {first.study!r} trains {first.model.name}, and study {second.study!r} trains "
            f"{second.model.name}: the speeds of different models cannot be compared",
            remedy="name two studies that train the same model",
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StudyResult:
    """The results of a study. A notebook shows them as a table."""

    summary: StudySummary
    record: StudyRecord
    url: str = ""  # the database's URL, which may contain a password

    @property
    def task(self) -> Task:
        """The model, the device, the workload and the search space."""
        return self.record.task

    @property
    def out(self) -> Path:
        """The study's directory."""
        return from_stored_directory(self.record.out, self.url, self.summary.study)

    @property
    def recipe(self) -> Recipe:
        """The winner, the baseline and their evidence.

        Raises NothingFits if no configuration succeeded.
        """
        if self.summary.recipe is None:
            name = self.summary.study
            raise NothingFits(
                f"study {name!r} has no configuration that succeeded",
                remedy=f"see `{study_command('oom', name)}`, "
                f"or continue the study: `{study_command('resume', name)}`",
            )
        return self.summary.recipe

    @property
    def winner(self) -> TrainConfig:
        """The best configuration. Raises NothingFits if no configuration succeeded."""
        return self.recipe.config

    @property
    def trials(self) -> list[dict[str, Any]]:
        """A dict for each trial, ready for a data frame.

        Each dict has the trial's knobs and outcome, its tokens/s, its peak memory in GiB, the
        evidence for these numbers, and the reason for a failure.
        """
        return [
            {
                "number": row.number,
                **row.config.as_dict(),
                "outcome": row.outcome.value,
                "tokens_per_second": row.tokens_per_second,
                "peak_reserved_gib": row.peak_reserved_gib,
                "limit_gib": row.limit_gib,
                "evidence": row.evidence.value,
                "reason": row.reason,
            }
            for row in self.summary.trials
        ]

    @property
    def figures(self) -> "dict[str, Figure]":
        """The figures of the report by name, without empty figures."""
        from plotly.graph_objects import Figure

        from autotune.report.html import draw

        return {
            name: Figure(drawn) for name, drawn in draw(self.summary).items() if drawn is not None
        }

    def data(self) -> dict[str, Any]:
        """The content of summary.json."""
        return summary_data(self.summary, str(self.out))

    def report(
        self, out: str | Path | None = None, *, against: "StudyResult | None" = None
    ) -> Path:
        """Write report.html and the study's other files, by default into the study's directory.

        With `against`, write one page instead, with the winners of both studies side by side.

        Raises:
            NothingFits: one of the studies has no winner.
            UsageError: the two studies train different models.
        """
        folder = Path(out) if out else self.out
        if against is not None:
            _require_one_model(self.recipe, against.recipe)
            return write_versus(folder, self.summary, against.summary)
        write_study(folder, self.summary)
        return folder / "report.html"

    def export(self, *formats: str, out: str | Path | None = None) -> list[Path]:
        """Export the winner in the named formats, by default in all usual formats.

        Raises:
            NothingFits: no configuration succeeded.
            UsageError: there is no such format.
        """
        return write_exports(Path(out) if out else self.out, self.recipe, list(formats) or None)

    def reload(self) -> "StudyResult":
        """The current state of the same study, from its database."""
        return load_study(self.summary.study, self.url)

    def _facts(self) -> dict[str, str]:
        facts = {"study": self.summary.study}
        recipe = self.summary.recipe
        if recipe is None:
            return facts | {"winner": "no configuration succeeded"}
        facts |= {"model": recipe.model.name, "device": recipe.device.name}
        for name, candidate in {"winner": recipe.winner, "baseline": recipe.baseline}.items():
            if candidate is not None:
                facts[name] = f"{candidate.config.label()}; {describe.candidate_line(candidate)}"
        return facts

    def __repr__(self) -> str:
        return (
            f"StudyResult({', '.join(f'{name}={text!r}' for name, text in self._facts().items())})"
        )

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>"
            for name, text in self._facts().items()
        )
        return f"<table>{''.join(rows)}</table>"

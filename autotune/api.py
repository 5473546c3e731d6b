"""autotune from Python and notebooks: `tune`, `load_study`, and what they return. The same studies as the commands'."""

import html
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from autotune.cli.commands.session import StoredStudy, open_study
from autotune.core.errors import NothingFits
from autotune.core.files import write_atomic
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import slug
from autotune.problem.study_spec import StudySpec
from autotune.report.describe import candidate_line
from autotune.report.study_directory import write_exports, write_study
from autotune.study.summary import Recipe, StudySummary, summary_data

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def tune(
    model: str, *, gpu: str = "auto", space: "str | SearchSpace | None" = None, quiet: bool = False, **options: Any
) -> "Result":
    """Search for the best configuration with real probes, as `autotune run` does, and return the study.

    `options` are those of the command, with underscores: budget="10m", examples=50_000, pins={"lora_rank": 32}. The
    study's files and its database are written as the command writes them. Call it in the main thread, which signals
    reach.

    Raises:
        AutotuneError: what the command would end with, as an exception with `remedy` and `exit_code`.
        TypeError: an option that there is not.
    """
    from autotune.cli.commands.run import run

    with TemporaryDirectory(prefix="autotune-") as folder:
        if isinstance(space, SearchSpace):
            path = Path(folder) / f"{slug(space.name)}.yaml"  # the name is anybody's
            write_atomic(path, space.as_yaml())
            space = str(path)
        name = run(StudySpec(model=model, gpu=gpu, space=space, **options), quiet=quiet)
    return load_study(name, options.get("storage"))


def load_study(name: str | None = None, storage: str | None = None) -> "Result":
    """A study by name, running or finished; the newest if none is given.

    Raises:
        UsageError: there is no such study.
        StorageError: the database cannot be read.
    """
    return Result(study=open_study(name, storage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a study found. Shows itself as a table in a notebook."""

    study: StoredStudy

    @property
    def summary(self) -> StudySummary:
        """Everything, as values."""
        return self.study.summary

    @property
    def recipe(self) -> Recipe:
        """The winner, the baseline, and what they rest on. Raises NothingFits where nothing came through."""
        if self.summary.recipe is None:
            raise NothingFits(
                f"study {self.summary.study!r} has no configuration that came through", remedy="see `autotune oom`"
            )
        return self.summary.recipe

    @property
    def winner(self) -> TrainConfig:
        """The best configuration. Raises NothingFits where nothing came through."""
        return self.recipe.winner.config

    @property
    def trials(self) -> list[dict[str, Any]]:
        """A dict for each trial, fit for a data frame: its knobs, outcome, tokens/s, GiB, evidence and reason."""
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
        """The report's figures by name, those that have something to show."""
        from plotly.graph_objects import Figure

        from autotune.report import draw

        return {name: Figure(drawn) for name, drawn in draw(self.summary).items() if drawn is not None}

    def data(self) -> dict[str, Any]:
        """What summary.json holds."""
        return summary_data(self.summary, str(self.study.out))

    def report(self, out: str | Path | None = None) -> Path:
        """Write report.html and the other files of the study, into its own directory by default."""
        folder = Path(out) if out else self.study.out
        write_study(folder, self.summary)
        return folder / "report.html"

    def export(self, *formats: str, out: str | Path | None = None) -> list[Path]:
        """Write the winner for trainers, by default the usual ones. Raises NothingFits, UsageError."""
        assert self.recipe
        return write_exports(Path(out) if out else self.study.out, self.summary, list(formats) or None)

    def _repr_html_(self) -> str:
        rows = [("study", self.summary.study)]
        if (recipe := self.summary.recipe) is None:
            rows.append(("winner", "nothing came through"))
        else:
            rows += [("model", recipe.model.name), ("device", recipe.device.name)]
            pair = {"winner": recipe.winner, "baseline": recipe.baseline}
            rows += [(name, f"{one.config.label()}; {candidate_line(one)}") for name, one in pair.items() if one]
        cells = "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(text)}</td></tr>" for key, text in rows)
        return f"<table>{cells}</table>"

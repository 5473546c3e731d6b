"""Reports a study's progress: an interface, and an implementation that writes lines of text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from autotune.core.train_config import TrainConfig
from autotune.problem.setup import Setup
from autotune.study.summary import StudySummary, TrialRecord

if TYPE_CHECKING:
    from autotune.study.named_configs import ConfigResult


class Progress(Protocol):
    """Receives the events of a study in order.

    The display of the command line also implements this interface.
    """

    def say(self, text: str) -> None:
        """A slow step begins; `text` describes it."""

    def note(self, text: str, style: str | None = None) -> None:
        """The study has a message for the user; `style` is its colour in a terminal."""

    def plan(self, setup: Setup, *, fits_gib: float, trials: int | None, workers: int) -> None:
        """The search is about to begin; a configuration may use at most `fits_gib` GiB."""

    def resumed(self, rows: list[TrialRecord]) -> None:
        """The session begins; `rows` has the trials of earlier sessions (empty for a new study)."""

    def trying(self, number: int, config: TrainConfig) -> None:
        """A trial begins."""

    def trial(self, row: TrialRecord) -> None:
        """A trial has ended."""

    def result(self, summary: StudySummary, out_dir: str) -> None:
        """The study has ended; its files are in `out_dir`."""

    def configs(self, results: "list[ConfigResult]", out_dir: str) -> None:
        """All configurations that the user named were probed; their files are in `out_dir`."""


class TextProgress:
    """Passes each step and note to `write` as a line; the default `write` discards the lines."""

    def __init__(self, write: Callable[[str], Any] = lambda text: None) -> None:
        self._write = write

    def say(self, text: str) -> None:
        """Write the text as one line."""
        self._write(text)

    def note(self, text: str, style: str | None = None) -> None:
        """Write the text as one line."""
        self._write(text)

    def plan(self, setup: Setup, *, fits_gib: float, trials: int | None, workers: int) -> None:
        """Write one line for each warning of the setup."""
        for warning in setup.warnings:
            self._write(f"warning: {warning}")

    def resumed(self, rows: list[TrialRecord]) -> None:
        """Write no line, because `SharedTrials.resume` reports the number of trials."""

    def trying(self, number: int, config: TrainConfig) -> None:
        """Write no line, because `trial` writes a line when the trial ends."""

    def trial(self, row: TrialRecord) -> None:
        """Write one line for a trial."""
        speed = "" if row.tokens_per_second is None else f", {row.tokens_per_second:,.0f} tokens/s"
        self._write(f"trial {row.number}: {row.outcome.value}{speed}, {row.config.label()}")

    def result(self, summary: StudySummary, out_dir: str) -> None:
        """Write one line that names the directory of the files."""
        self._write(f"written: {out_dir}")

    def configs(self, results: "list[ConfigResult]", out_dir: str) -> None:
        """Write one line that names the directory of the files."""
        self._write(f"written: {out_dir}")

"""Results in Python's shell and in notebooks: short tables, and progress only in a notebook."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import check, compare, plan, tune
from autotune.api import studies
from autotune.core.errors import UsageError
from autotune.core.notebook import ShownAsTable, is_notebook, progress_or_default
from autotune.report.values.longest import LongestRow
from tests.helpers.factories import calibration


class OutStream(io.StringIO):
    """A stream like the one that ipykernel puts in place of stdout in a notebook."""


OutStream.__module__ = "ipykernel.iostream"


class Table(ShownAsTable):
    def facts(self) -> dict[str, str]:
        return {"a": "<b>", "long": "two words"}


def test_a_table_has_aligned_lines_and_escaped_html() -> None:
    assert repr(Table()) == str(Table()) == "a     <b>\nlong  two words"
    assert Table()._repr_html_() == (
        "<table><tr><th>a</th><td>&lt;b&gt;</td></tr>"
        "<tr><th>long</th><td>two words</td></tr></table>"
    )


def test_estimates_print_themselves_as_a_short_table() -> None:
    found = plan("mistral-7b", gpu="h100")
    shown = repr(found)
    assert shown.startswith("plan           mistralai/Mistral-7B-v0.3 on h100-sxm\n")
    assert found.best is not None and found.best.config.label() in shown
    for word in (" GiB of 73.3 GiB, fits", " useful tokens/s (", "full run ", "$", "estimated"):
        assert word in shown
    assert len(shown) < 600 and shown.endswith(repr(found.best))

    nothing = repr(plan("llama-3.1-70b", gpu="t4"))
    assert "no configuration is certain to fit; the leanest:" in nothing and len(nothing) < 600


def test_comparisons_print_a_line_for_each_choice() -> None:
    lines = repr(compare("mistral-7b", ["a10", "h100"])).splitlines()
    assert [line.split()[:2] for line in lines] == [["a10", "fits,"], ["h100-sxm", "fits,"]]
    lines = repr(plan("mistral-7b", gpu="h100", gpus=[1, 2])).splitlines()
    assert lines[1].startswith("1 GPU ") and any(line.startswith("2 GPUs, ddp ") for line in lines)
    assert max(map(len, lines)) < 200


def test_a_checked_file_prints_its_verdict_and_the_change(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\nmax_length: 8192\n"
        "per_device_train_batch_size: 8\ngradient_checkpointing: false\n"
    )
    shown = repr(check(file, gpu="rtx-4090"))
    assert shown.startswith("trl.yaml       out of memory on rtx-4090\n") and len(shown) < 800


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (calibration(), ("calibration  ", " cores, ", " GB/s")),
        (LongestRow(method="lora", config={}, tokens=4096, step_s=2.0), ("4,096 tokens", "2.0 s")),
        (LongestRow(method="full", config={}, problem="too large"), ("too large",)),
    ],
)
def test_measured_values_print_themselves_too(value: Any, words: tuple[str, ...]) -> None:
    assert all(word in repr(value) for word in words) and len(repr(value)) < 400


def test_only_a_notebook_shows_progress_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress_or_default(None)("a step")
    assert not is_notebook() and capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", screen := OutStream())
    progress_or_default(None)("a step")
    own: list[str] = []
    progress_or_default(own.append)("mine")
    assert is_notebook() and screen.getvalue() == "a step\n" and own == ["mine"]


def test_tune_shows_its_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to an error, which stands for the rest of the study."""

    def begin(spec: Any, open_progress: Any, *, say: Callable[[str], Any]) -> None:
        say("starting")
        with open_progress(None) as progress:
            progress.say("probing")
        raise UsageError("the end")

    monkeypatch.setattr(studies, "main", begin)
    monkeypatch.setattr(sys, "stdout", screen := OutStream())
    with pytest.raises(UsageError, match="the end"):
        tune("demo-3m", gpu="cpu")
    assert screen.getvalue() == "starting\nprobing\n"

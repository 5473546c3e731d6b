"""No text of anybody's acts on the terminal: neither printed,
nor styled by rich, nor in an error.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cli.commands.notes import estimate_notes
from autotune.cli.console import Display
from autotune.cli.terminal import guard, notes_last, print_table
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.planning import counted_memory
from tests.unit.catalog.test_models import LLAMA
from tests.unit.cli.test_console import Terminal, terminal

HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"
STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")  # what rich itself writes


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--gpu", "a10", "--model", HOSTILE),
        ("plan", "--gpu", "a10", "--model", f"no{HOSTILE}"),
        ("compare", "--gpus", "a10", "--model", HOSTILE),
        ("check", f"{HOSTILE}.yaml", "--gpu", "a10"),
        ("run", "--gpu", HOSTILE, "--model", "demo-3m"),
        ("prices", "--prices", f"{HOSTILE}.yaml"),
        ("--debug", "run", "--space", f"{HOSTILE}.yaml", "--gpu", "cpu", "--model", HOSTILE),
        (HOSTILE,),
    ],
    ids=lambda arguments: arguments[0].partition("\x1b")[0],
)
def test_a_hostile_name_is_shown_and_not_obeyed(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / HOSTILE / "config.json").write_text(json.dumps(LLAMA | {"model_type": HOSTILE}))
    (tmp_path / f"{HOSTILE}.yaml").write_text(
        json.dumps({"model_name_or_path": HOSTILE, HOSTILE: [HOSTILE]})
    )
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = ended.stdout + ended.stderr
    assert "evil" in shown and not set(shown) & set("\x1b\x07\x9b\r\u202e")


def test_rich_styles_clean_text(monkeypatch: pytest.MonkeyPatch) -> None:
    got = terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdout", got)
    guard()
    with Display(budget_s=600.0) as one:
        one.say(HOSTILE)
        one.note(HOSTILE, "bold")
    print_table(HOSTILE, {HOSTILE: "left"}, [(HOSTILE,)])
    print(HOSTILE)
    assert STYLES.search(got.getvalue())
    lines = [line.rpartition("\r")[2] for line in STYLES.sub("", got.getvalue()).splitlines()]
    assert sum("evil" in line for line in lines) >= 5
    assert not set("".join(lines)) & set("\x1b\x07\x9b\u202e")


def test_line_ends_and_tabs_pass_and_bytes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    guard()
    print("a\tb\nc", end="")
    assert sys.stdout.isatty() and sys.stdout.getvalue() == "a\tb\nc"  # type: ignore[attr-defined]
    with pytest.raises(TypeError):  # by which click tells a text stream
        sys.stdout.write(b"")  # type: ignore[arg-type]


def test_a_computation_that_takes_long_says_what_it_does_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("autotune.cli.terminal.print_note", shown.append)
    with notes_last() as say:
        say("lora: counting")
    assert shown == []

    monkeypatch.setattr("autotune.cli.terminal.SILENT_S", 0.1)
    with notes_last() as say:
        say("lora: counting")
        while not shown:
            time.sleep(0.01)
        say("qlora: counting")
        say("warning: tiling has no effect")
        assert shown == ["lora: counting", "qlora: counting"]
    assert shown[2:] == ["warning: tiling has no effect"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_what_an_encoding_lacks_ends_no_command(encoding: str, tmp_path: Path) -> None:
    """A table has dashes where nothing is known, and lines that few encodings have."""
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", "gpus"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert ended.returncode == 0, ended.stderr
    row = next(
        line for line in ended.stdout.decode(encoding).splitlines() if "v100-pcie-32gb" in line
    )
    assert row.count("\u2013" if encoding == "cp1252" else " - ") == 2 and "?" not in row


def test_an_estimate_says_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count takes up to a minute; of many short ones, not each is said."""
    shown: list[str] = []
    monkeypatch.setattr("autotune.cli.terminal.print_note", shown.append)
    monkeypatch.setattr("autotune.cli.terminal.SILENT_S", 0.0)
    monkeypatch.setattr("autotune.dry.prober.SAY_EACH_S", 600.0)
    prober = counted_memory._prober()
    monkeypatch.setattr(prober, "_ask", lambda message: {"refused": "not here"})
    request = ProbeRequest(config=TrainConfig(), model={"model_type": "x"}, memory_gib=1.0, depth=1)
    before = prober.say
    monkeypatch.setattr(prober, "_said_at", -math.inf)
    with estimate_notes():
        for steps in (1, 2, 3):
            prober.count(replace(request, micro_steps=steps))
        while not shown:
            time.sleep(0.01)
    assert shown == [f"counting the memory of {request.config.label()} without a GPU"]
    assert prober.say == before

"""Line 1 of a command is its answer, at any width.

`COMMANDS` has the commands with the pattern of line 1: a verdict or a name, a number and a unit. A
new row needs a command line that ends within seconds and needs no GPU. `ABOUT_STUDIES` has the
commands that read the study or the file of the fixture `folder`.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.cli.terminal import print_table
from autotune.study.storage.study_record import start_record
from tests.helpers.outage import make_tables
from tests.helpers.replay import machine
from tests.helpers.sessions import by_tokens, record_of, starter, whole

WIDE = 1000
LISTS = ("gpus", "models", "prices", "plan: suite")  # these have a row for each item
USD = r"\$[\d.,]+"
SPEED = r"[\d,]+ tokens/s"
PLAN = ("plan", "--model", "llama-3.2-1b")
LONGEST = ("longest", "--model", "demo-3m", "--gpu", "a10")
COMPARE = ("compare", "--model", "llama-3.2-1b", "--tokens-per-example", "512", "--space", "lora")

COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "plan": ((*PLAN, "--gpu", "a10"), rf"Llama-3.2-1B fits a10: LoRA r\d+, \d+ x [\d,]+, {SPEED}"),
    "plan: does not fit": (
        ("plan", "--model", "llama-3.1-70b", "--gpu", "t4"),
        r"Llama-3.1-70B does not fit t4: it needs at least [\d.]+ GiB of [\d.]+ GiB",
    ),
    "plan: several GPUs": (
        (*PLAN, "--gpu", "h100", "--gpus", "1,2", "--rank", "16", "--set", "compile=none"),
        rf"1 h100-sxm trains Llama-3.2-1B cheapest: LoRA r\d+, \d+ x [\d,]+, {SPEED}",
    ),
    "plan: suite": (
        ("plan", "--spec", "qwen-7b"),
        r"6 of 6 configurations surely fit a100-80gb-sxm",
    ),
    "compare": (
        (*COMPARE, "--gpus", "l4,a10,t4"),
        rf"\S+ trains Llama-3.2-1B cheapest: LoRA r16, \d+ x [\d,]+, {SPEED}",
    ),
    "compare: buy": (
        (*COMPARE, "--gpus", "rtx-4090,rtx-3090", "--buy", "2000"),
        rf"rtx-4090 is the GPU to buy for at most {USD}: {USD}, Llama-3.2-1B",
    ),
    "prices": (("prices",), rf"\S+ is the cheapest GPU: {USD}/h"),
    "prices: one GPU": (("prices", "h100"), rf"h100-sxm costs {USD}/h"),
    "gpus": (("gpus",), r"\d+ GPUs with \d+ to \d+ GiB of memory"),
    "models": (("models",), r"\d+ models with [\d.]+ to [\d,.]+ billion parameters"),
    "suites": (("suites",), r"\d+ suites have \d+ configurations"),
    "longest": (
        (*LONGEST, "--method", "lora", "--most-tokens", "1024", "--predict"),
        r"a10 trains sequences of up to [\d,]+ tokens of demo-3m with LoRA",
    ),
}


ABOUT_STUDIES: dict[str, tuple[tuple[str, ...], str]] = {
    "status": (("status",), r"1\.\d times the speed of the baseline: the full run takes \d+ min"),
    "list": (("list",), rf"1 study, 0 running; the newest is one: demo-3m on h200-sxm, {SPEED}"),
    "oom": (("oom",), r"1 of 8 trials ran out of memory: .* missed the limit by [\d.]+ %"),
    "report": (("report",), r"1\.\d times the speed of the baseline: the full run takes \d+ min"),
    "report: two": (("report", "one", "one"), r"No measurable difference in speed"),
    "check": (
        ("check", "trl.yaml", "--gpu", "a10"),
        r"out of memory: needs [\d.]+ of [\d.]+ GiB on a10",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a study of eight trials, of which one ran out of memory, and with a file."""
    folder = tmp_path_factory.mktemp("s")
    (folder / "runs").mkdir()
    make_tables(url := f"sqlite:///{folder}/runs/autotune.db")
    opened: list[Any] = []
    session = whole(
        starter(url, folder / "logs", opened), machine(limit_gib=2.2, rate=by_tokens), trials=8
    )
    start_record(session.search, record_of(out=folder / "runs" / "one"))
    for resource in opened:
        resource.close()
    (folder / "trl.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\nmax_length: 8192\n"
        "per_device_train_batch_size: 8\ngradient_checkpointing: true\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.cli.terminal.SILENT_S", 600.0)  # a busy machine shows no progress
        patch.chdir(folder)
        patch.delenv("AUTOTUNE_STORAGE", raising=False)
        yield folder


@functools.cache
def run(name: str, width: int) -> Any:
    """Run a command of COMMANDS in a terminal of this width."""
    arguments, _ = (COMMANDS | ABOUT_STUDIES)[name]
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(arguments))


def words(text: str) -> set[str]:
    """Return the words of a text, without the lines of tables."""
    return set(re.sub(r"[━┏┓┗┛┡┩└┘─┳╇┴┃│]", " ", text).split())


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", [*COMMANDS, *ABOUT_STUDIES])
def test_line_1_is_the_answer_and_no_word_is_broken(name: str, width: int, folder: Path) -> None:
    result = run(name, width)
    first, *others = result.stdout.splitlines()
    assert re.match((COMMANDS | ABOUT_STUDIES)[name][1], first), first
    # The output of both streams, in the order of writing, begins with the answer.
    assert result.output.startswith(first)

    assert words(result.stdout) == words(run(name, WIDE).stdout)
    too_long = [line for line in (first, *others) if len(line) > width and " " in line.strip()]
    assert not too_long


def test_a_short_answer_names_the_option_for_more() -> None:
    for name in COMMANDS:
        said = run(name, WIDE)
        assert said.stdout.splitlines()[-1].startswith("--details shows "), name
        assert len(said.stdout.split()) < 180 or name in LISTS, name


def test_a_table_that_is_too_wide_is_divided_between_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = dict.fromkeys(("name", "first", "second", "third"), "left")
    print_table(None, columns, [("row", "a" * 20, "two words", "b" * 28)])
    text = capsys.readouterr().out
    assert "a" * 20 in text and "b" * 28 in text and text.count("│ row ") == 2
    assert all(len(line) <= 40 for line in text.splitlines())

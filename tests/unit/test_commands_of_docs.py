"""The commands in the documents parse, and those that need seconds and no GPU answer.

A block of code has whole commands. A code span may have a part of a command: its options exist.
`tests/system/test_demo.py` runs the five steps of docs/your-data.md.
"""

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from autotune.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md"]
PAGES += [ROOT / "autotune" / "cli" / "SKILL.md"]
PAGES += [ROOT / "studies" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```\w*.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# A command at the start of a line, after `&&`, or in a container
COMMAND = re.compile(r"^\s*(?:.* && |docker run .* )?autotune ([a-z].*)$")

# These answer within a second or two, and store nothing.
ANSWERING = {"plan", "compare", "check", "gpus", "models", "prices", "suites", "spaces", "schema"}
NOT_RUN = ("--live", "--dataset org/")  # they need a network
GRPO_YAML = """model_name_or_path: Qwen/Qwen3-4B
reward_funcs: a_reward
dtype: bfloat16
use_peft: true
lora_target_modules: all-linear
use_vllm: true
"""
RUN_YAML = """\
model_name_or_path: mistralai/Mistral-7B-v0.3
use_peft: true
dtype: bfloat16
max_length: 512
"""
CARD = "memory: 24\nbf16_tflops: 165\nbandwidth_gb_s: 1008\n"


def blocks(path: Path) -> list[str]:
    """Return the lines of a page's blocks of code, joined where they end with a backslash."""
    text = "\n".join(BLOCK.findall(path.read_text(encoding="utf-8")))
    return text.replace("\\\n", " ").splitlines()


def commands(path: Path) -> list[str]:
    found = (COMMAND.match(line) for line in blocks(path))
    return [re.split(r" [|>] ", one[1])[0] for one in found if one]


def spans(path: Path) -> list[str]:
    """Return the code spans that begin with a command of autotune."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    found = re.findall(r"`autotune (\w[^`]*)`", text)
    return [" ".join(span.split()) for span in found if not span.startswith("COMMAND")]


@cache
def command_of(name: str) -> Any:
    """Return a command of the command line."""
    group = typer.main.get_group(app.app)
    _, command, _ = group.resolve_command(typer.Context(group), [name])
    return command


def parse(line: str) -> None:
    """Parse a command line without running it. Raises an error if it is wrong."""
    name, *words = shlex.split(line, comments=True)
    if name == "dev":
        command_of(name).resolve_command(typer.Context(command_of(name)), words)
    elif "--help" not in words:
        command_of(name).make_context(name, words)


ALL = [(path.name, line) for path in PAGES for line in commands(path)]


def test_every_page_of_the_guide_has_commands() -> None:
    assert {"README.md", "first-run.md", "your-data.md", "answer.md", "many-gpus.md"} <= {
        name for name, _ in ALL
    }
    assert len(ALL) > 60


@pytest.mark.parametrize(("page", "line"), ALL)
def test_a_command_of_a_block_parses(page: str, line: str) -> None:
    parse(line)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_options_of_a_code_span_exist(path: Path) -> None:
    for span in spans(path):
        name = span.split()[0]
        command = command_of(name)
        if name == "dev":
            continue
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        named = {option.partition("=")[0] for option in re.findall(r"(?<!')--[a-z][\w=-]*", span)}
        assert named <= known | {"--help"}, span


def answering() -> list[str]:
    """Return each command that a test can run: with real names, and without a network."""
    lines = [
        line
        for page, line in ALL
        # tests/system/test_questions.py runs the commands of that page.
        if line.split()[0] in ANSWERING and page != "questions.md"
    ]
    is_real = {line: not re.search(r"\b[A-Z]{3,}\b", line) for line in lines}
    return [
        line for line in dict.fromkeys(lines) if is_real[line] and not any(map(line.count, NOT_RUN))
    ]


@pytest.mark.parametrize("line", answering())
def test_a_command_that_needs_no_gpu_answers(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "why", "completion": "so"}))
    (tmp_path / "run.yaml").write_text(RUN_YAML)
    (tmp_path / "grpo.yaml").write_text(GRPO_YAML)
    (tmp_path / "my-gpu.yaml").write_text(CARD)
    result = CliRunner().invoke(app.app, shlex.split(line, comments=True))
    assert result.exit_code == 0, result.output
    assert result.stdout

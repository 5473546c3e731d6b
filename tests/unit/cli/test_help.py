"""What --help and a bare `autotune` print: groups, panels, examples, and nothing cut off."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from autotune.cli import app, help
from autotune.cli.study_options import ALL
from autotune.core.errors import UsageError
from autotune.problem.study_spec import OPTIONS, RARE, ROLLOUTS, StudySpec

ROOT = Path(__file__).parents[3]
IN_PANELS = ("run", "plan", "compare", "check")
# A value that is not the default, for each rare setting
VALUES: dict[str, tuple[str, Any]] = {
    "compile_ahead": ("never", "never"),
    "eval_share": ("5e-2", 0.05),
    "eval_steps": ("50", 50),
    "expert_parallel": ("2", 2),
    "fresh": ("true", True),
    "global_batch_tokens": ("65536", 65536),
    "image_size": ("1280x960", "1280x960"),
    "interruptions_per_day": ("2.5", 2.5),
    "patience": ("7", 7),
    "play_ranks": ("true", True),
    "ray": ("auto", "auto"),
    "report_to": ("wandb", "wandb"),
    "restart_minutes": ("5", 5),
    "save_steps": ("100", 100),
    "seed": ("3", 3),
    "slack": ("0", 0.0),
    "vision": ("trained", "trained"),
}


def output(*arguments: str) -> str:
    result = CliRunner().invoke(app.app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def joined(text: str) -> str:
    return " ".join(text.split())


def options_of(page: str) -> list[str]:
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", page, re.MULTILINE)


def spec_of(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> StudySpec:
    """The study that `autotune run` would begin."""
    made: list[StudySpec] = []
    monkeypatch.setattr(
        "autotune.cli.commands.run.run_spec", lambda spec, **others: made.append(spec)
    )
    result = CliRunner().invoke(app.app, words)
    assert result.exit_code == 0, result.exception
    return made[0]


def test_every_command_is_in_one_group_with_its_whole_description() -> None:
    grouped = [name for names in help.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(app.COMMANDS)

    usage, _, page = output("--help").partition("\n")
    assert usage == "Usage: autotune [OPTIONS] COMMAND [ARGS]..."
    assert "..." not in page and max(map(len, page.splitlines())) <= 80
    assert all(f"\n{title}:\n" in page for title in help.GROUPS)
    for name, (_, text) in app.COMMANDS.items():
        first, _, _ = text.partition("\n\n")
        assert joined(f"{name} {first}") in joined(page), name


def test_a_bare_autotune_says_where_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = output().splitlines()
    assert 5 <= len(lines) <= 10 and max(map(len, lines)) <= 80
    commands = [line[line.index("autotune ") :] for line in lines if re.match(r"  \d\. ", line)]
    plan, trial, search = (shlex.split(command)[1:] for command in commands)
    assert output(*plan)
    assert spec_of(monkeypatch, trial).gpu == "cpu"
    assert spec_of(monkeypatch, search).examples == 10_000


def test_another_commands_spelling_of_an_option_works_but_is_not_shown() -> None:
    for command, gpus, shown, hidden in (
        ("compare", "--gpus", "--methods", "--method"),
        ("longest", "--gpu", "--method", "--methods"),
    ):
        names = options_of(output(command, "--help"))
        assert shown in names and hidden not in names
        for option in (shown, hidden):
            words = [command, "--model", "qwen2.5-0.5b", gpus, "t4", option, "lora,nothing"]
            error = CliRunner().invoke(app.app, words).exception
            assert isinstance(error, UsageError) and "'nothing'" in str(error), option


def test_run_shows_its_options_in_panels() -> None:
    page = output("run", "--help")
    assert "..." not in page and max(map(len, page.splitlines())) <= 80
    given = options_of(page)
    assert len(given) == len(set(given)) <= 56
    assert given[:8] == [f"--{name.replace('_', '-')}" for name in help.PANELS["Most used"]]
    assert "`autotune plan` estimates" in page


def test_the_examples_of_run_are_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^    autotune (run .+)$", output("run", "--help"), re.MULTILINE)
    assert len(examples) == 3
    specs = [spec_of(monkeypatch, shlex.split(example)) for example in examples]
    assert [spec.dataset for spec in specs] == ["data.jsonl", None, None]
    assert specs[2].seed == 7


@pytest.mark.parametrize("command", IN_PANELS)
def test_every_option_is_in_a_panel(command: str) -> None:
    page = output(command, "--help")
    group: Any = typer.main.get_group(app.app)
    _, entry, _ = group.resolve_command(typer.Context(group), [command])
    options = [max(one.opts, key=len) for one in entry.params if not one.hidden]
    named = {one for one in options if one.startswith("--")}
    assert named | {"--help"} == set(options_of(page))
    assert "\nOptions:\n" not in page and page.count("\nOutput:\n") == 1
    assert options_of(page.partition("Arguments:")[2].partition("\n\n")[0]) == []


def test_few_options_need_no_panel() -> None:
    assert "\nOptions:\n" in output("status", "--help")


def test_a_setting_of_run_is_an_option_or_rare() -> None:
    options = set(OPTIONS) - set(ROLLOUTS)  # no probe generates completions
    assert set(ALL) >= options
    page = output("run", "--help")
    for name in options:
        assert (f"--{name.replace('_', '-')}" in options_of(page)) is not (name in RARE), name


def test_every_rare_setting_is_documented() -> None:
    page = joined(output("run", "--help"))
    guide = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    rows = [line for line in guide.splitlines() if line.startswith("| `")]
    for name in RARE:
        assert re.search(rf"set one of [\w, ]*\b{name}\b", page), name
        assert any(f"`{name}`" in row for row in rows), name


@pytest.mark.parametrize("name", RARE)
def test_a_rare_setting_is_reached_by_set_and_by_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, value = VALUES[name]
    words = ["run", "--model", "demo-3m", "--gpu", "cpu"]
    needed = ["--set", "eval_share=0.1"] if name == "eval_steps" else []
    given = spec_of(monkeypatch, [*words, *needed, "--set", f"{name}={text}"])
    assert getattr(given, name) == value

    file = tmp_path / "study.yaml"
    share = "eval_share: 0.1\n" if name == "eval_steps" else ""
    file.write_text(f"model: demo-3m\n{share}{name}: {str(value).lower()}\n")
    assert getattr(spec_of(monkeypatch, [*words, "--spec", str(file)]), name) == value


def test_a_setting_of_the_command_line_replaces_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("model: demo-3m\nseed: 1\nglobal_batch: 8\nreport_to: wandb\n")
    words = ["run", "--spec", str(file), "--set", "seed=2", "--set", "global_batch_tokens=4096"]
    spec = spec_of(monkeypatch, [*words, "--set", "dora=true", "--rank", "8"])
    assert (spec.seed, spec.global_batch, spec.global_batch_tokens) == (2, None, 4096)
    assert spec.report_to == "wandb" and spec.pins == {"dora": True, "lora_rank": 8}

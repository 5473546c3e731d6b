"""Text of unknown origin is safe on a terminal, in a file name, and in Markdown."""

import shlex
from pathlib import Path

import pytest

from autotune.core.text import code_span, dashed, operands, printable, printable_lines, short_path, study_command


def test_operands_are_no_options() -> None:
    assert operands("a", "b") == ["a", "b"]
    assert operands("--help") == ["--", "--help"]


def test_printable_text_stays_on_one_line_and_steers_no_terminal() -> None:
    assert printable("a\x1b[31m\nb\u202e") == "a?[31m?b?"
    assert printable("a\nb", " ") == "a b"
    assert printable("übung") == "übung"
    assert printable_lines("a\x1b]0;b\x07\n\tc\r\x9bd\udcff\n") == "a?]0;b?\n\tc??d?\n"


@pytest.mark.parametrize(
    ("text", "expected"), [("NVIDIA L4", "nvidia-l4"), ("--A  b__c--", "a-b-c"), ("../../etc", "etc"), ("", "")]
)
def test_dashed(text: str, expected: str) -> None:
    assert dashed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "`plain`"),
        ("a\n# b\x1b[0m", "`a # b [0m`"),
        ("`x`", "`` `x` ``"),
        ("a ``` b", "````a ``` b````"),
        ("a ` b ``` c", "````a ` b ``` c````"),
        ("", "`–`"),
    ],
)
def test_code_span(text: str, expected: str) -> None:
    assert code_span(text) == expected


def test_a_command_names_its_study_as_the_shell_reads_it() -> None:
    for study in ("plain", "two words", "-x", "$(reboot)"):
        assert shlex.split(study_command("status", study)) == ["autotune", "status", *operands(study)]
    assert study_command("status", "plain") == "autotune status plain"


def test_a_path_is_short_inside_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "runs" / "a") == "runs/a"
    assert short_path(tmp_path.parent / "other") == str(tmp_path.parent / "other")

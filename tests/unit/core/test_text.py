"""Text of unknown origin is safe on a terminal, in a file name, and in Markdown."""

import hashlib
import os
import shlex
from pathlib import Path

import pytest

from autotune.core.text import (
    code_span,
    kebab_case,
    operands,
    printable,
    printable_lines,
    short_path,
    slug,
    study_command,
)


def test_operands_are_no_options() -> None:
    assert operands("a", "b") == ["a", "b"]
    assert operands("--help") == ["--", "--help"]
    assert operands("a", "-b") == ["--", "a", "-b"] and operands() == []


def test_printable_text_stays_on_one_line_and_steers_no_terminal() -> None:
    assert printable("a\x1b[31m\nb\u202e") == "a?[31m?b?"
    assert printable("a\nb", " ") == "a b"
    assert printable("übung") == "übung"
    assert printable_lines("a\x1b]0;b\x07\n\tc\r\x9bd\udcff\n") == "a?]0;b?\n\tc??d?\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("NVIDIA L4", "nvidia-l4"), ("--A  b__c--", "a-b-c"), ("../../etc", "etc"), ("", "")],
)
def test_dashed(text: str, expected: str) -> None:
    assert kebab_case(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "`plain`"),
        ("a\n# b\x1b[0m", "`a # b [0m`"),
        ("`x`", "`` `x` ``"),
        ("`x", "`` `x ``"),
        ("x`", "`` x` ``"),
        ("a ``` b", "````a ``` b````"),
        ("a ` b ``` c", "````a ` b ``` c````"),
        ("", "`–`"),
    ],
)
def test_code_span(text: str, expected: str) -> None:
    assert code_span(text) == expected


def test_a_command_names_its_study_as_the_shell_reads_it() -> None:
    for study in ("plain", "two words", "-x", "$(reboot)"):
        assert shlex.split(study_command("status", study)) == [
            "autotune",
            "status",
            *operands(study),
        ]
    assert study_command("status", "plain") == "autotune status plain"


def test_a_path_is_short_inside_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "runs" / "a") == "runs/a"
    assert short_path(tmp_path.parent / "other") == str(tmp_path.parent / "other")


HOSTILE = [
    "",
    ".",
    "..",
    "...",
    "/",
    "//",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a/../b",
    "~",
    "~root",
    "$HOME",
]
HOSTILE += [
    "a b",
    "a\nb",
    "a\tb",
    "a\0b",
    "\x1b[31m",
    "\x7f",
    "\udcff",
    "\ud800",
    "-rf",
    "--out",
    "*",
    "a;b",
    "a'b",
]
HOSTILE += [
    "H200",
    "h200-H",
    "ä",
    "日本",
    "a" * 81,
    "a" * 80 + "b",
    "A" * 5000,
    "a.",
    ".a",
    "-",
    "con.",
    "\u202eb",
]
FINE = ["h200-mistral-7b", "a", "a.b", "a_b", "a..b", "0", "a" * 80]


@pytest.mark.parametrize("study", HOSTILE + FINE)
def test_a_slug_is_one_plain_file_name(tmp_path: Path, study: str) -> None:
    name = slug(study)
    assert 0 < len(name) <= 90
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")
    assert name[0] not in ".-"
    assert os.path.normpath(tmp_path / name) == str(tmp_path / name)
    assert (tmp_path / name).parent == tmp_path == Path(os.path.dirname(tmp_path / name))
    assert (slug(name) == name) is (study in FINE)


def test_a_plain_name_is_its_own_slug() -> None:
    assert [slug(name) for name in FINE] == FINE


@pytest.mark.parametrize(
    ("study", "plain"),
    [
        ("-" * 5 + "a" * 90, "a" * 80),
        ("a" * 79 + ".b", "a" * 79 + "."),
        ("a" * 90 + ".", "a" * 80),
        ("A.-", "a"),
    ],
)
def test_a_slug_stays_the_same(study: str, plain: str) -> None:
    """Signs at its ends go before it is cut. Directories of earlier studies have these names."""
    digest = hashlib.sha256(study.encode()).hexdigest()
    assert slug(study) == f"{plain}-{digest[:8]}"


def test_no_two_names_share_a_slug() -> None:
    names = [*HOSTILE, *FINE, "a-b", "a b", "a  b", "a\tb", "A-b", "h200"]
    names += [slug(name) for name in HOSTILE]  # a study called like another one's directory
    names = list(dict.fromkeys(names))
    assert len({slug(name) for name in names}) == len(names)

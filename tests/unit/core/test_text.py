"""Text of unknown origin is safe on a terminal, in a file name, and in Markdown."""

import pytest

from autotune.core.text import code_span, dashed, operands, printable, printable_lines


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
        ("", "`–`"),
    ],
)
def test_code_span(text: str, expected: str) -> None:
    assert code_span(text) == expected

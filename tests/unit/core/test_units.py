"""Units are printed as a person writes them, unknown is a dash, and an error names its remedy and
its exit code.
"""

import os

import pytest

from autotune.core import errors
from autotune.core.units import (
    DASH,
    GIB,
    MIB,
    fmt_count,
    fmt_difference,
    fmt_gib,
    fmt_hours,
    fmt_many,
    fmt_seconds,
    fmt_usd,
    gib,
    parse_duration,
)


@pytest.mark.parametrize("fmt", [fmt_gib, fmt_count, fmt_usd, fmt_seconds])
def test_unknown_is_a_dash_and_never_zero(fmt):
    assert fmt(None) == DASH == "–"
    assert fmt(0) != DASH


def test_gib_is_two_to_the_thirtieth():
    assert (MIB, GIB) == (1_048_576, 1_073_741_824)
    assert gib(3 * 2**29) == 1.5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00 GiB"),
        (9.994, "9.99 GiB"),
        (9.995, "10.0 GiB"),
        (9.996, "10.0 GiB"),
        (139.81, "139.8 GiB"),
        (-1, "-1.00 GiB"),
    ],
)
def test_fmt_gib(value, text):
    assert fmt_gib(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.12345, "0.123"),
        (67.54, "67.5"),
        (99.96, "100"),
        (100, "100"),
        (12345.6, "12,346"),
    ],
)
def test_fmt_count(value, text):
    assert fmt_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "$0.00"),
        (0.00312, "$0.00312"),
        (6.54e-5, "$0.0000654"),
        (0.05, "$0.05"),
        (0.5, "$0.50"),
        (0.584, "$0.584"),
        (0.1 + 0.2, "$0.30"),
        (0.994, "$0.994"),
        (0.995, "$0.995"),
        (0.996, "$1.00"),
        (3.39, "$3.39"),
        (1234.5, "$1,234.50"),
    ],
)
def test_fmt_usd(value, text):
    assert fmt_usd(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (0.9994, "999 ms"),
        (0.9995, "1.0 s"),  # never "1000 ms"
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (61, "1 min 1 s"),
        (2715, "45 min 15 s"),
        (3599.6, "1 h"),
        (3661, "1 h 1 min"),
        (9000, "2 h 30 min"),
        (3_600_000 * 4 + 60, "4,000 h 1 min"),
    ],
)
def test_fmt_seconds(value, text):
    assert fmt_seconds(value) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("0.5", 0.5),
        ("90s", 90),
        ("2m", 120),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1h0m5s", 3605),
        ("5M", 300),
        (" 90 ", 90),
    ],
)
def test_parse_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "-5",
        "+5",
        "nan",
        "inf",
        "1e3",
        "5 m",
        "1d",
        "30m1h",
        "1h1h",
        "1h30",
        "1.m",
        ".5h",
        "٣",
        "h",
        "1,5h",
    ],
)
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration; write it like 90s, 10m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0", "0s", "0h0m0s", "0.0m", "9" * 400])
def test_a_duration_is_positive_and_finite(text):
    with pytest.raises(ValueError, match="a duration must be positive and finite, not"):
        parse_duration(text)


# --- errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.AutotuneError, 1),
        (errors.UsageError, 2),
        (errors.EnvironmentProblem, 3),
        (errors.NothingFits, 4),
        (errors.TooManyFailures, 5),
        (errors.StorageError, 6),
        (errors.BudgetTooShort, 7),
        (errors.Interrupted, 130),
    ],
)
def test_exit_codes(kind, code):
    error = kind("what happened", remedy="what to do")
    assert (str(error), error.remedy, error.exit_code) == ("what happened", "what to do", code)
    assert isinstance(error, errors.AutotuneError)
    assert kind("alone").remedy is None


def test_a_signal_keeps_its_own_code():
    assert errors.Interrupted("stopped", exit_code=143).exit_code == 143
    stopped = errors.Interrupted("stopped", remedy="go on")
    assert (stopped.exit_code, str(stopped), stopped.remedy) == (130, "stopped", "go on")


def test_cancelled_is_not_shown_to_the_user():
    assert not issubclass(errors.Cancelled, errors.AutotuneError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lora_rnk", "; did you mean 'lora_rank'?"),
        ("LORA_RANK", "; did you mean 'lora_rank'?"),
        ("seqlen", "; did you mean 'seq_len'?"),
        ("zzz", ""),
        ("", ""),
        (7, ""),
    ],
)
def test_did_you_mean(name, hint):
    assert errors.did_you_mean(name, ["seq_len", "lora_rank", "lora_rank"]) == hint


def test_did_you_mean_names_three_at_most():
    assert (
        errors.did_you_mean("a10x", ["a10", "a100", "a10g", "a40"])
        == "; did you mean 'a10' or 'a10g' or 'a100'?"
    )


def test_hours_are_printed_as_seconds_are():
    assert [fmt_hours(value) for value in (2.5, 1 / 60, None)] == ["2 h 30 min", "1 min", DASH]


def test_a_difference_names_what_changed_at_any_depth():
    then = {"a": 1, "b": {"c": 2, "d": 3}, "gone": 4}
    now = {"a": 1, "b": {"c": 5, "d": 3}, "new": 6}
    assert (
        fmt_difference(then, now)
        == "b: c: 2 then, 5 now; gone: 4 then, None now; new: None then, 6 now"
    )
    assert fmt_difference({"a": 1}, [2]) == "{'a': 1} then, [2] now"


def test_what_a_connection_did_is_known_unless_it_is_said_to_be_lost():
    assert not errors.StorageError("full").lost and errors.AutotuneError("x").explained is None
    assert errors.PREEMPTED == os.EX_TEMPFAIL  # try again later


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1 epoch"),
        (2000, "2,000 epochs"),
        (1.0, "1 epoch"),
        (0.5, "0.5 epochs"),
        (0, "0 epochs"),
    ],
)
def test_fmt_many(number, text):
    assert fmt_many(number, "epoch") == text

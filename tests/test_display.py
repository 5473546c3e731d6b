"""What a run shows: lines for people on stderr, events for programs on stdout."""

import json
import time
from dataclasses import replace

import pytest
from factories import summary

from autotune.catalog import resolve_device
from autotune.commands import display
from autotune.commands.display import Display
from autotune.recipe import summary_data
from autotune.setup import set_up
from autotune.spec import StudySpec

SETUP = set_up(StudySpec(model="mistral-7b", gpu="h200", price=3.0), resolve_device("h200"))


def shown(capsys: pytest.CaptureFixture[str], **options: bool) -> tuple[str, str]:
    study = summary()
    with Display(budget_s=600.0, **options) as one:
        one.say("starting")
        one.plan(SETUP, fits_gib=100.0, trials=None)
        one.trial(study.trials[0])
        one.note("a note")
        one.result(study, "runs/one")
    ended = capsys.readouterr()
    return ended.out, ended.err


def test_events_are_lines_of_json_and_the_last_has_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(capsys, events=True, quiet=True)
    events = [json.loads(line) for line in out.splitlines()]
    assert [one["event"] for one in events] == ["step", "plan", "trial", "note", "result"]
    assert all(one["seconds"] >= 0 for one in events) and err == ""
    assert events[1]["model"].startswith("mistralai/Mistral-7B") and events[1]["left_out"]
    assert events[2]["number"] == 0 and events[2]["outcome"] == "ok"
    told = json.loads(json.dumps(summary_data(summary(), "runs/one")))
    assert {key: events[-1][key] for key in told} == told


def test_a_suite_is_one_event_where_events_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(budget_s=600.0, events=True, quiet=True) as one:
        assert one.configs([{"name": "one"}]) is True
    with Display(budget_s=600.0, quiet=True) as one:
        assert one.configs([{"name": "one"}]) is False
    (event,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert event["event"] == "result" and event["configs"] == [{"name": "one"}]


def test_without_events_stdout_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(capsys)
    assert out == "" and "winner" in err and "\x1b[" not in err


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "PLAIN_S", 0.01)
    with Display(budget_s=600.0) as one:
        one.plan(SETUP, fits_gib=100.0, trials=None)
        one.trial(replace(summary().trials[0], tokens_per_second=12_345.0))
        end = time.monotonic() + 20
        err = ""
        while "running   [" not in err.partition("12,345")[2] and time.monotonic() < end:
            time.sleep(0.02)
            err += capsys.readouterr().err
    beats = [line for line in err.splitlines() if line.startswith("running   [")]
    assert " and $0.00 gone" in beats[-1] and "best 12,345 tokens/s" in beats[-1]
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # it ends with the run

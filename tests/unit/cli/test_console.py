"""The output of a run: lines for people on stderr, events for programs on stdout."""

import io
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.catalog import resolve_device
from autotune.cli import console
from autotune.cli.console import REUSED, Display
from autotune.cli.last_screen import answer
from autotune.core.json_view import json_data
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.text import operands
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_hours, fmt_usd
from autotune.problem.setup import set_up
from autotune.problem.study_spec import NamedConfig, StudySpec
from autotune.study.named_configs import ConfigResult
from autotune.study.summary import summary_data
from tests.helpers.factories import summary
from tests.helpers.hostile import NAMES, arguments_of_autotune

SETUP = set_up(StudySpec(model="mistral-7b", gpu="h200", price=3.0), resolve_device("h200"))


def shown(capsys: pytest.CaptureFixture[str], **options: bool) -> tuple[str, str]:
    study = summary()
    with Display(budget_s=600.0, **options) as one:
        one.say("starting")
        one.plan(SETUP, fits_gib=100.0, trials=None, workers=1)
        one.trial(study.trials[0])
        one.note("a note")
        one.result(study, "runs/one")
    ended = capsys.readouterr()
    return ended.out, ended.err


def test_events_are_lines_of_json_and_the_last_has_the_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = shown(capsys, events=True, quiet=True)
    events = [json.loads(line) for line in out.splitlines()]
    assert [one["event"] for one in events] == ["step", "plan", "trial", "note", "result"]
    assert all(one["seconds"] >= 0 for one in events) and err == ""
    assert events[1]["model"].startswith("mistralai/Mistral-7B") and events[1]["left_out"]
    assert events[2]["number"] == 0 and events[2]["outcome"] == "ok"
    data = json.loads(json.dumps(summary_data(summary(), "runs/one")))
    assert {key: events[-1][key] for key in data} == data


@pytest.mark.parametrize("name", [name for name in NAMES if name.isprintable()])
def test_the_command_that_explains_names_the_study(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with Display(budget_s=600.0) as one:
        one.result(replace(summary(), study=name), "runs/one")
    lines = capsys.readouterr().out.splitlines()
    command = lines[
        next(place for place, line in enumerate(lines) if "ask why it won; " in line) + 1
    ]
    assert arguments_of_autotune(command, tmp_path) == ["explain", *operands(name)]


def test_the_cost_of_several_gpus_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(budget_s=1200.0) as one:
        one.plan(SETUP, fits_gib=100.0, trials=None, workers=4)
        err = capsys.readouterr().err
        assert "$3.00/h" in err and "the search itself costs about $4.00" in err
        one._started -= 600.0
        assert one._status_line() == "10:00 elapsed ($2.00), 9:59 left, starting"


def test_named_configurations_are_one_event(capsys: pytest.CaptureFixture[str]) -> None:
    result = ConfigResult(
        case=NamedConfig(name="one"),
        config=TrainConfig(),
        outcome=Outcome.OK,
        evidence=Evidence.MEASURED,
    )
    with Display(budget_s=600.0, events=True, quiet=True) as one:
        one.configs([result], "runs/it")
    with Display(budget_s=600.0, quiet=True) as one:
        one.configs([result], "runs/it")
    (event,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert event["event"] == "result" and event["configs"] == json_data([result])


def test_the_answer_is_on_stdout_and_begins_with_the_speed_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, err = shown(capsys)
    first, *lines = out.splitlines()
    assert first == (
        "2.1 times the speed of the baseline: the full run takes 10 min 19 s and costs $0.617 "
        "(mistralai/Mistral-7B-v0.3 on h200-sxm)"
    )
    assert any(line.startswith("   winner  lora r16 4x1024") for line in lines)
    assert any(line.startswith("   search  saves $") for line in lines)
    assert "a note" in err and "winner" not in err and "\x1b[" not in out + err
    assert shown(capsys, quiet=True) == ("", "")


def test_without_a_terminal_a_status_line_is_printed_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "STATUS_EVERY_S", 0.01)
    with Display(budget_s=600.0) as one:
        one.plan(SETUP, fits_gib=100.0, trials=None, workers=1)
        one.trial(replace(summary().trials[0], tokens_per_second=12_345.0))
        end = time.monotonic() + 20
        err = ""
        while "best 12,345 tokens/s, searching" not in err and time.monotonic() < end:
            time.sleep(0.02)
            err += capsys.readouterr().err
    status = [line for line in err.splitlines() if line.endswith(", searching")]
    assert status[-1].startswith("0:00 elapsed ($0.00), 9:59 left, best 12,345 tokens/s")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # it ends with the run


def test_a_resumed_study_is_compared_with_the_best_so_far(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trials = summary().trials
    larger = replace(trials[0].config, micro_batch_size=4)
    fastest = replace(trials[0], number=4, tokens_per_second=9_000.0, config=larger)
    with Display(budget_s=600.0) as one:
        one.resumed([trials[0], fastest, replace(trials[2], tokens_per_second=99_000.0)])
        one.trial(replace(trials[0], number=9, tokens_per_second=8_500.0))
        assert one._status_line().endswith("best 9,000 tokens/s, searching")
        # The confirmation was slower, so that another configuration is the best.
        one.trial(replace(fastest, number=10, tokens_per_second=8_000.0))
        assert one._status_line().endswith("best 8,500 tokens/s, searching")
    said = capsys.readouterr().err
    assert "the best so far: trial 4, 9,000 tokens/s, lora r16 4x512" in said
    assert re.search(r"(?m)^    9    8,500 +\S+  ok ", said)
    with Display(budget_s=600.0) as one:
        one.resumed([])
    assert capsys.readouterr().err == ""


def test_what_is_proposed_again_has_its_line_already(capsys: pytest.CaptureFixture[str]) -> None:
    first = summary().trials[0]
    with Display(budget_s=600.0) as one:
        # as a baseline that was tried before the study began
        one.trial(replace(first, reused=True))
        one.trial(replace(first, number=8, reused=True))
        one.trial(replace(first, number=9))  # probed again
    said = capsys.readouterr().err
    assert re.findall(r"(?m)^ +(\d+) +\S+ +\S+  (?:ok|best) ", said) == ["0", "9"]
    assert said.count("reused") == 2 and said.count("; reused") + said.count(": reused") == 1
    assert said.count(REUSED) == 1


def test_what_the_study_itself_measured_is_not_called_reused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A new study probes the baseline while it looks for one, and its first trial takes that."""
    with Display(budget_s=600.0) as one:
        one.trial(replace(summary().trials[0], reused=True, is_own=True))
    said = capsys.readouterr().err
    assert "    0    8,000   20.0  best     lora r16" in said and "reused" not in said


def test_the_word_reused_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = summary().trials[:2]
    with Display(budget_s=600.0) as one:
        one.trial(first)
        assert REUSED not in capsys.readouterr().err
        one.trial(replace(first, number=8, reused=True, tokens_per_second=99_000.0))
        one.trial(replace(second, number=9, reused=True))
    said = capsys.readouterr().err
    assert said.count(": reused") + said.count("; reused") == 2 and said.count(REUSED) == 1


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Terminal:
    """In place of stdout and stderr from here on; pytest puts its own there when a test's body
    begins.
    """
    made = Terminal()
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setattr(sys, "stderr", made)
    for name, value in (
        {"COLUMNS": "80", "TERM": "xterm-256color", "NO_COLOR": ""} | environment
    ).items():
        monkeypatch.setenv(name, value)
    return made


def plain(text: str) -> list[str]:
    """Lines without colours, and without the spinner and how it is wiped out."""
    return [
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rpartition("\r")[2].rstrip()
        for line in text.splitlines()
    ]


def test_on_a_terminal_the_clock_goes_on_while_a_step_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got, wanted = (
        terminal(monkeypatch),
        ("time  0:01 elapsed, 9:58 left", "now   starting the probe worker"),
    )
    with Display(budget_s=600.0) as one:
        one.say("starting the probe worker")
        end = time.monotonic() + 20
        while wanted[0] not in got.getvalue() and time.monotonic() < end:
            time.sleep(0.02)
    assert all(text in got.getvalue() for text in wanted)


def test_on_a_terminal_a_long_line_continues_below_itself_and_a_command_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown_on(terminal(monkeypatch, COLUMNS="64"), "runs/one", name="long-" * 20)
    commands = [line for line in lines if line.lstrip().startswith("autotune")]
    assert len(commands) == 3 and any(len(line) > 100 for line in commands)
    named = [line for line in lines if line not in commands and "long-long" not in line]
    assert max(map(len, named)) <= 72  # the table of results
    place = next(
        number for number, line in enumerate(named) if line.startswith(" baseline  lora r16")
    )
    assert named[place + 1] == " " * 11 + "adamw_torch_fused"


@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (160, 50)])
def test_the_last_screen_is_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch, columns: int, rows: int
) -> None:
    """All above it is in the terminal's history, and the winner stands on it however many notes
    there are.
    """
    got = terminal(monkeypatch, COLUMNS=str(columns), LINES=str(rows))
    recipe = summary().recipe
    assert recipe is not None
    caveats = tuple(f"note {number} " + "of some length " * 6 for number in range(40))
    study = replace(summary(), recipe=replace(recipe, caveats=caveats))
    with Display(budget_s=600.0) as one:
        one.result(study, "runs/one")
    above, screen = got.getvalue().rsplit("\x1b[H", 1)
    lines = plain(screen)
    assert "note 39" in above and above.count("\n") > rows
    assert lines[0].startswith("2.1 times the speed of the baseline: ") and len(lines) <= rows - 1
    wanted = (
        recipe.config.label(),
        "full run",
        "Intervals ",
        "out of memory",
        "notes are above and in the report",
    )
    for text in wanted:
        assert any(text in line for line in lines), text
    assert sum(line.lstrip().startswith("autotune ") for line in lines) == 3


def test_each_moment_says_what_happens_what_it_costs_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal(monkeypatch)
    trial = replace(summary().trials[0], tokens_per_second=10_000.0)
    with Display(budget_s=600.0) as one:
        one.plan(SETUP, fits_gib=100.0, trials=None, workers=1)
        one.trial(trial)
        one.trying(7, trial.config)
        one._started -= 60.0
        time_, now, best = one.__rich__().plain.splitlines()
    assert time_ == "time  1:00 elapsed ($0.05), 8:59 left"
    assert now == f"now   trial 7: {trial.config.label()}"
    hours = 10_000 * 512 / 10_000.0 / 3600  # 10,000 examples, cut at 512 tokens
    assert (
        best == f"best  trial 0, 10,000 tokens/s, full run about {fmt_hours(hours)},"
        f" {fmt_usd(3.0 * hours)}"
    )


def test_the_numbers_of_trials_are_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown_on(terminal(monkeypatch), "runs/one")
    head = next(line for line in lines if line.startswith("trial"))
    fits, out = (
        next(line for line in lines if line.startswith(f"    {number}  ")) for number in (0, 2)
    )
    assert head == "trial    tok/s    GiB  outcome  configuration"
    assert fits.startswith("    0    8,000   20.0  best     lora r16 1x512")
    assert out.startswith("    2        –  134.6  oom      lora r16 4x2048")
    assert "2.0% over the limit in backward" in " ".join(" ".join(lines).split())


def test_the_report_is_named_above_the_last_command(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(budget_s=600.0) as one:
        one.result(summary(), "runs/it's here")
    *_, purpose, command = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert purpose == "ask why it won; the report is runs/it's here/report.html:"
    assert command == "autotune explain h200-mistral-7b"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    for wish, found in {"": True, "1": False}.items():
        lines = shown_on(got := terminal(monkeypatch, NO_COLOR=wish), "runs/one")
        assert bool(coloured.search(got.getvalue())) is found and any(
            "winner" in line for line in lines
        )


def shown_on(terminal: Terminal, out: str, *, name: str = "one") -> list[str]:
    """The lines of a run."""
    study = summary(study=name)
    with Display(budget_s=600.0) as one:
        one.plan(SETUP, fits_gib=100.0, trials=None, workers=1)
        for row in study.trials[:5]:
            one.trial(row)
        one.result(study, out)
    return plain(terminal.getvalue())


def test_the_limit_of_an_example_card_is_called_one() -> None:
    study = summary()
    assert study.recipe is not None
    said = {
        field.name: field.text for field in answer(study, replace(study.recipe, example_gib=0.3))
    }
    assert said["memory"].endswith("is the limit on an example card of 0.30 GiB")
    assert "example card" not in " ".join(field.text for field in answer(study, study.recipe))

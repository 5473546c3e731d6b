"""A session of a full run, with a few lines instead of a training: what it records, counts,
restores and passes on.
"""

import fcntl
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import Price, resolve_device
from autotune.core.errors import UsageError
from autotune.core.train_config import TrainConfig
from autotune.export.run.train import Progress, Run
from autotune.problem.run_cost import Pauses
from autotune.study.summary import Recipe
from tests.unit.export.test_script import demo

PAUSES = Pauses(
    num_evaluations=2, evaluation_s=30.0, num_checkpoints=1, checkpoint_s=20.0, checkpoint_gib=0.0
)
# 0.002 a second
PRICE = Price(provider="p", device="d", usd_per_hour=7.2, spot_usd_per_hour=None, source="s")


def recipe(pauses: Pauses | None = PAUSES, **changes: Any) -> Recipe:
    """A step takes 2 s."""
    made: Recipe = replace(
        demo(TrainConfig(seq_len=32)), **{"price": PRICE, "device": resolve_device("a10")} | changes
    )
    winner = made.winner
    speed = replace(winner.performance, step_time_s=2.0)
    return replace(
        made, winner=replace(winner, performance=speed, cost=replace(winner.cost, pauses=pauses))
    )


def line(step: int, seconds: float, began: float = 1.0, **more: float) -> dict[str, Any]:
    return {"began": began, "step": step, "of": 100, "seconds": seconds, "loss": 2.5, **more}


def after(*lines: dict[str, Any], arguments: Sequence[str] = (), **changes: Any) -> Progress:
    run = Run(recipe(**changes), Path("train.py"), Path("out"), arguments)
    for one in lines:
        run._add(one)
    return run._progress()


# --- what the lines say


def test_progress_by_hand() -> None:
    """From step 2 to 12 in 30 s: 88 are left, of 3 s each."""
    now = after(line(2, 9.0), line(7, 20.0), line(12, 39.0))
    assert (now.step, now.of, now.loss, now.trained_s, now.left_s) == (12, 100, 2.5, 39.0, 88 * 3.0)
    assert (now.projected_s, now.slowdown) == (200.0, None)
    assert (now.spent_usd, now.projected_usd) == (pytest.approx(0.078), pytest.approx(0.4))
    unpriced = after(line(2, 9.0), price=None)
    assert (unpriced.spent_usd, unpriced.projected_usd, unpriced.left_s) == (None, None, 98 * 2.0)


def test_a_session_counts_once_with_its_last_line() -> None:
    now = after(line(1, 3.0), line(2, 5.0), line(1, 4.0, 2.0), line(3, 10.0, 2.0))
    assert now.trained_s == 15.0 and now.step == 3


@pytest.mark.parametrize(("steps", "slowdown"), [(20, None), (21, 0.25), (22, 0.25)])
def test_a_speed_is_compared_after_twenty_steps(steps: int, slowdown: float | None) -> None:
    lines = [line(step, 2.5 * step) for step in range(1, steps + 1)]
    assert after(*lines).slowdown == (None if slowdown is None else pytest.approx(slowdown))
    assert after(*lines, device=resolve_device("cpu")).slowdown is None


def test_pauses_slow_no_step_down_and_are_projected_for_a_whole_run() -> None:
    lines = line(1, 12.0, paused=10.0), line(11, 92.0, paused=70.0)
    whole = after(*lines, arguments=("--dataset", "rows.jsonl"))
    assert (whole.projected_s, whole.left_s) == (250.0, 89 * 2.5)
    assert whole.projected_usd == pytest.approx(0.5)
    for arguments in ((), ("--random-weights",), ("--dataset", "rows.jsonl", "--max-steps", "100")):
        part = after(*lines, arguments=arguments)
        assert (part.projected_s, part.left_s) == (200.0, 89 * 2.0)
    assert after(*lines, arguments=("--dataset", "rows.jsonl"), pauses=None).projected_s == 200.0


def test_a_run_that_is_complete_has_an_error() -> None:
    done = after(line(100, 230.0))
    assert done.to_dict() == {
        "schema_version": 1,
        "steps": 100,
        "of": 100,
        "trained_s": 230.0,
        "spent_usd": pytest.approx(0.46),
        "projected_s": 200.0,
        "projected_usd": pytest.approx(0.4),
        "loss": 2.5,
        "error": pytest.approx(0.15),
    }
    assert done.left_s == 0.0 and after(line(99, 230.0)).to_dict()["error"] is None


# --- a session

STEP = """
import json, os, sys, time
arguments = sys.argv[1:]
file = open(arguments[arguments.index("--progress") + 1], "a")
def step(number, seconds, began=5.0):
    line = {"began": began, "step": number, "of": 2, "seconds": seconds, "loss": 1.5}
    print(json.dumps(line), file=file, flush=True)
"""


def session(
    folder: Path, text: str, *arguments: str, should_stop: Any = lambda: False, **options: Any
) -> Any:
    """One session of a script of this text: what was reported, the exit code and the error."""
    (folder / "train.py").write_text(STEP + text)
    seen: list[Progress] = []
    run = Run(recipe(), folder / "train.py", folder / "out", arguments, **options)
    return seen, *run.train(seen.append, should_stop)


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "training.json").read_text())
    return found


def test_a_session_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("WANDB_TOKEN", "y")
    text = (
        "print('told', arguments[:2], os.environ.get('SECRET_TOKEN'),"
        " os.environ.get('WANDB_TOKEN'))\n"
    )
    text += "print('in', repr(sys.stdin.read()))\nstep(1, 2.5)\nstep(2, 5.0)\n"
    seen, code, error = session(tmp_path, text, "--a", "b c", pass_env=["WANDB_TOKEN"])
    assert (code, error, seen[-1].step, seen[-1].trained_s) == (0, "", 2, 5.0)
    found = kept(tmp_path)
    assert found.pop("wall_s") > 0
    assert found == {"study": recipe().study, **seen[-1].to_dict(), "exit_code": 0}
    assert (tmp_path / "out" / "train.log").read_text() == "told ['--a', 'b c'] None y\nin ''\n"
    assert (tmp_path / "out" / "progress.jsonl").read_text().count("\n") == 2


def test_a_session_that_fails_before_a_step_leaves_the_record_of_the_last(tmp_path: Path) -> None:
    session(tmp_path, "step(1, 2.5)\nprint('ValueError: of the first', file=sys.stderr)\n")
    before = kept(tmp_path)
    seen, code, error = session(tmp_path, "sys.exit(3)")
    # the error was of an earlier session
    assert (seen, code, error) == ([], 3, "") and kept(tmp_path) == before
    seen, code, error = session(tmp_path, "step(2, 2.0, began=6.0)\nraise ValueError('now')")
    assert (code, error, seen[-1].trained_s) == (1, "ValueError: now", 4.5)
    assert (kept(tmp_path)["exit_code"], kept(tmp_path)["steps"]) == (1, 2)


def test_half_a_line_of_a_session_that_was_killed_is_cut_off(tmp_path: Path) -> None:
    lines = tmp_path / "out" / "progress.jsonl"
    lines.parent.mkdir()
    whole = json.dumps(line(1, 3.0)) + "\n"
    lines.write_text(whole + '{"began": 1.0, "st')
    seen, *_ = session(tmp_path, "step(2, 2.0)\n")
    assert (seen[-1].step, seen[-1].trained_s) == (2, 5.0)
    assert lines.read_text().startswith(whole) and lines.read_text().count("\n") == 2
    lines.write_text("no json\n[]\n{}\n" + whole)  # whatever else stands there
    assert session(tmp_path, "step(2, 2.0)\n")[0][-1].trained_s == 5.0


def test_a_fresh_run_forgets_the_sessions_before(tmp_path: Path) -> None:
    for fresh, trained_s, logged in ((False, 2.0, 1), (False, 4.0, 2), (True, 2.0, 1)):
        began = float(trained_s)
        seen, *_ = session(tmp_path, f"print('line')\nstep(1, 2.0, began={began})\n", fresh=fresh)
        assert seen[-1].trained_s == trained_s
        assert (tmp_path / "out" / "train.log").read_text() == "line\n" * logged


def test_a_stop_is_passed_on_once_and_waited_for(tmp_path: Path) -> None:
    """A second one would kill many a trainer while it saves."""
    text = (
        "import signal\ncount = []\nsignal.signal(signal.SIGTERM, lambda *_: count.append(1))\n"
        "step(1, 2.0)\n"
    )
    text += (
        "end = time.monotonic() + 60\nwhile not count and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
    )
    text += "time.sleep(0.7)\nstep(2, 4.0)\nsys.exit(70 + len(count))\n"
    steps: list[int] = []
    (tmp_path / "train.py").write_text(STEP + text)
    run = Run(recipe(), tmp_path / "train.py", tmp_path / "out", [])
    code, _ = run.train(lambda now: steps.append(now.step), lambda: bool(steps))
    assert code == 71 and steps[-1] == 2 and kept(tmp_path)["exit_code"] == 71


def test_a_directory_in_which_another_run_trains_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "progress.jsonl").write_text("half a line")
    with (tmp_path / "out" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another run trains in") as caught:
            session(tmp_path, "step(1, 2.0)\n", fresh=True)
    assert caught.value.remedy == "wait, or give another --output-dir"
    assert (tmp_path / "out" / "progress.jsonl").read_text() == "half a line"


def test_the_script_holds_the_lock_and_gets_a_signal_when_this_process_dies(tmp_path: Path) -> None:
    run = Run(recipe(), tmp_path / "train.py", tmp_path / "out", ["--x"])
    assert run._command[2] == str(int(signal.SIGTERM))
    assert run._command[-3:] == ["--x", "--progress", str(tmp_path / "out" / "progress.jsonl")]
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    process = run._start()
    try:
        with (tmp_path / "out" / ".lock").open("a") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with (tmp_path / "out" / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
    assert time.monotonic() < end

"""The whole program on the CPU: real probes, real OOMs, and a real study that is killed and
resumed.
"""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import yaml
from optuna.trial import TrialState

from autotune.core.files import document
from autotune.core.train_config import TrainConfig
from autotune.export.script import runtime_files
from autotune.report.json_forms import form_of
from autotune.study.summary import summary_data
from tests.helpers.factories import summary
from tests.helpers.next_commands import next_commands, run_next, run_printed, stranger

pytestmark = pytest.mark.probe

# 64 sequences of 64 tokens do not fit into 0.6 GiB with any configuration; 4 fit easily. There are
# enough trials for 96 sequences to come after 64, so that they are refused: both are in steps of
# several micro batches.
SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [4, 64, 96], kind: system}
  seq_len: 64
  lora_rank: {values: [8, 16, 32], kind: learning}
  precision: fp32
  checkpointing: {values: [none, full], kind: system}
"""
TRIALS = 6
ARGUMENTS = ("--gpu", "cpu", "--model", "demo-3m", "--memory-gib", "0.6", "--space", "space.yaml")
ARGUMENTS += (
    "--global-batch",
    "192",
    "--examples",
    "1920",
    "--price",
    "0.5",
    "--budget",
    "10m",
    "--set",
    "seed=8",
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autotune", *arguments]


def autotune(folder: Path, *arguments: str) -> Ended:
    ended = subprocess.run(
        command(*arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=stranger(),
    )
    return Ended(code=ended.returncode, out=ended.stdout, err=ended.stderr)


def prepared(folder: Path) -> Path:
    (folder / "space.yaml").write_text(SPACE)
    return folder


def trials(folder: Path, study: str) -> list[optuna.trial.FrozenTrial]:
    """All trials as Optuna reads them."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'runs' / 'autotune.db'}")
    try:
        return optuna.load_study(storage=storage, study_name=study).trials
    finally:
        storage.engine.dispose()


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A study that ran to its end in `folder`."""

    folder: Path
    out: Path
    ended: Ended
    data: dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = prepared(tmp_path_factory.mktemp("study"))
    ended = autotune(folder, "run", *ARGUMENTS, "--trials", str(TRIALS), "--json")
    assert ended.code == 0, ended.err
    data = json.loads(ended.out)
    return Finished(folder=folder, out=Path(data["out_dir"]), ended=ended, data=data)


def test_the_winner_was_measured(finished: Finished) -> None:
    data = finished.data
    winner, baseline = data["winner"], data["baseline"]
    assert (data["model"], data["device"], data["evidence"]) == ("demo-3m", "cpu", "measured")
    assert winner["config"]["micro_batch_size"] == 4 and winner["config"]["lora_rank"] >= 16
    assert winner["memory"]["peak_reserved_gib"] < winner["memory"]["limit_gib"] < 0.6 * 0.95
    assert (
        baseline["config"]["micro_batch_size"] == 4
        and baseline["config"]["checkpointing"] == "full"
    )
    ratio = (
        winner["performance"]["tokens_per_second"] / baseline["performance"]["tokens_per_second"]
    )
    # Tests run side by side, which may make the machine too unsteady for a speed-up.
    assert data["speedup"] == (None if data["unsteady"] else pytest.approx(ratio))
    # 1,920 examples at the winner's speed and the given price
    hours = winner["cost"]["full_run_hours"]
    assert hours == pytest.approx(
        1920 / winner["performance"]["samples_per_second"] / 3600, rel=0.05
    )
    assert winner["cost"]["full_run_usd"] == pytest.approx(hours * 0.5)


def test_after_an_oom_larger_configurations_are_refused(finished: Finished) -> None:
    rows = {row["number"]: row for row in lines(finished.out)}
    assert len(rows) == TRIALS == finished.data["trials"]["total"]
    outcomes = [row["outcome"] for row in rows.values()]
    assert (
        outcomes.count("oom") >= 1 and outcomes.count("refused") >= 1 and outcomes.count("ok") >= 2
    )
    assert {outcome: outcomes.count(outcome) for outcome in ("ok", "oom", "refused")} == {
        outcome: finished.data["trials"][outcome] for outcome in ("ok", "oom", "refused")
    }
    for trial in trials(finished.folder, finished.data["study"]):
        row = rows[trial.number]
        fits = row["config"]["micro_batch_size"] <= 4
        assert (row["outcome"] == "ok") is fits
        assert trial.state is (TrialState.COMPLETE if fits else TrialState.PRUNED)
        assert (trial.constraints["memory"] > 0) is not fits
        assert (row["margin"] > 0) is not fits
        launched = row["outcome"] != "refused" and not row["reused"]
        assert (finished.out / "logs" / f"trial-{trial.number:04d}.log").exists() is launched


def test_the_json_has_the_documented_keys(finished: Finished) -> None:
    expected = summary_data(summary(), "out")
    assert finished.data.keys() == expected.keys()
    for part in ("winner", "baseline"):
        assert finished.data[part].keys() == expected[part].keys()
        for inner in ("performance", "memory", "cost"):
            assert finished.data[part][inner].keys() == expected[part][inner].keys()
    assert finished.data["trials"].keys() == expected["trials"].keys()
    assert finished.data["fingerprint"].keys() == expected["fingerprint"].keys()


def test_messages_are_on_stderr_and_stdout_is_json(finished: Finished) -> None:
    assert finished.ended.out.count("\n") == 1
    for part in (
        "baseline",
        "left out  lora_rank 8",
        "over the limit",
        "winner",
        "full run takes",
        "the search cost $",
        "--max-steps 5",
    ):
        assert part in finished.ended.err
    assert "Traceback" not in finished.ended.err and "Warning" not in finished.ended.err


def test_the_study_directory_is_complete(finished: Finished) -> None:
    out = finished.out
    names = {path.name for path in out.iterdir()} - {".lock"}
    assert names == {
        "recipe.yaml",
        "projection.json",
        "summary.json",
        "trials.jsonl",
        "oom_report.md",
        "oom_report.json",
        "report.html",
        "export",
        "logs",
    }
    assert json.loads((out / "summary.json").read_text()) == finished.data
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert str(finished.data["winner"]["config"]["seq_len"]) in json.dumps(recipe)
    projection = json.loads((out / "projection.json").read_text())
    assert (
        projection["winner"]["full_run_hours"] == finished.data["winner"]["cost"]["full_run_hours"]
    )
    assert len(json.loads((out / "oom_report.json").read_text())) > 0
    assert "out of memory" in (out / "oom_report.md").read_text().lower()
    assert "</html>" in (out / "report.html").read_text()
    assert {path.name for path in (out / "export").iterdir()} >= {
        "train.py",
        "launch.sh",
        "model_config.json",
    }


def test_the_printed_command_trains(finished: Finished) -> None:
    """Further tests of this file run the two others."""
    study = finished.data["study"]
    train, *others = next_commands(finished.ended.err)
    assert others == [f"autotune verify {study}", f"autotune explain {study}"]
    output = json.loads(run_printed(train, finished.folder, "--json").stdout)
    assert (output["steps"], output["study"]) == (3, study)


def _without_search(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out the time and the cost of the search, which grew until the report was written."""
    savings = data["savings"] and {
        key: value
        for key, value in data["savings"].items()
        if key not in ("search_hours", "search_usd", "pays")
    }
    kept = {key: value for key, value in data.items() if key not in ("wall_seconds", "search_usd")}
    return kept | {"savings": savings}


def test_status_shows_the_study(finished: Finished) -> None:
    output = autotune(finished.folder, "status", "--json")
    assert output.code == 0, output.err
    data = json.loads(output.out)
    assert data.pop("running") is False
    assert _without_search(data) == _without_search(finished.data)
    plain = autotune(finished.folder, "status", finished.data["study"])
    assert plain.code == 0 and plain.err == ""
    assert (
        f"{TRIALS} total" in plain.out
        and finished.data["study"] in plain.out
        and "measured" in plain.out
    )


def test_oom_shows_the_oom_report(finished: Finished) -> None:
    answer = autotune(finished.folder, "oom", finished.data["study"])
    assert (answer.code, answer.err) == (0, "")
    assert re.match(r"\d+ of \d+ trials ran out of memory: .* First change: ", answer.out)
    output = autotune(finished.folder, "oom", finished.data["study"], "--details")
    assert output.out.strip() == (finished.out / "oom_report.md").read_text().strip()
    assert json.loads(autotune(finished.folder, "oom", "--json").out) == json.loads(
        (finished.out / "oom_report.json").read_text()
    )


def test_report_and_export_write_the_same_again(finished: Finished, tmp_path: Path) -> None:
    assert autotune(finished.folder, "report", "--out", str(tmp_path / "again")).code == 0
    names = (
        "recipe.yaml",
        "projection.json",
        "oom_report.md",
        "oom_report.json",
        "export/train.py",
    )
    for name in names:
        assert (tmp_path / "again" / name).read_text() == (finished.out / name).read_text()
    assert (tmp_path / "again" / "report.html").exists()
    ended = autotune(
        finished.folder, "export", "--format", "train", "--out", str(tmp_path / "only")
    )
    assert ended.code == 0
    written = {
        str(path.relative_to(tmp_path / "only"))
        for path in (tmp_path / "only").rglob("*")
        if path.is_file()
    }
    names = {"train.py", "train_config.json", "launch.sh", "model_config.json", *runtime_files()}
    assert written == {f"export/{name}" for name in names}
    assert all(Path(line).exists() for line in ended.out.splitlines())


def test_a_study_cannot_continue_with_another_memory_limit(finished: Finished) -> None:
    arguments = ["2" if one == "0.6" else one for one in ARGUMENTS]
    ended = autotune(finished.folder, "run", *arguments, "--study", finished.data["study"])
    assert ended.code == 2 and ended.out == ""
    assert "its memory in GiB differs: 1 then, 2 now" in ended.err  # 0.6 is printed as 1


def test_the_winners_file_is_run_and_the_result_has_its_form(finished: Finished) -> None:
    """The time on a busy CPU is not checked, whatever the exit code says of it."""
    ended = autotune(
        finished.folder, "verify", finished.data["study"], "--micro-steps", "4", "--json"
    )
    assert ended.code in (0, 1), ended.err
    form_of("verify").validate_json(ended.out)
    verified = json.loads(ended.out)
    assert verified["reason"] is None and verified["tokens_per_s"] > 0
    assert verified["holds"] is (ended.code == 0)


def test_a_micro_batch_of_the_winner_is_profiled(finished: Finished) -> None:
    ended = autotune(finished.folder, "explain", finished.data["study"], "--profile", "--json")
    assert ended.code == 0, ended.err
    form_of("explain --profile").validate_json(ended.out)
    found = json.loads(ended.out)
    assert found == json.loads((finished.out / "profile.json").read_text())
    assert (found["of"], found["idle_s"], found["config"]) == (
        "operators",
        None,
        finished.data["winner"]["config"],
    )
    work = [row for row in found["profile"]["work"] if row["stage"] != "optimizer"]
    assert sum(row["seconds"] for row in work) == pytest.approx(found["profile"]["busy_s"])
    products, attention, moved = found["bounds"]
    # In fp32, whose products were measured: nothing is faster than the device at its best, but for
    # noise.
    assert products["flops"] > attention["flops"] > 0 and moved["moved_bytes"] > 0
    assert 0 < products["best_s"] < 2 * products["seconds"]
    loader = next(row for row in found["host"] if row["part"] == "data loader")
    assert loader["found"] > 0 and loader["suffices"] is (loader["found"] >= loader["needed"])
    with gzip.open(finished.out / "profile_trace.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "autotune: MLP", "autotune: adapters"} <= names
    assert "attention projections" in (finished.out / "profile.html").read_text()
    wrong = autotune(
        finished.folder, "explain", finished.data["study"], "--profile", "--trial", "999"
    )
    assert wrong.code == 2 and "has no trial 999" in wrong.err


def test_explain_shows_the_effect_of_each_knob_of_the_winner(finished: Finished) -> None:
    """The last test of this study, since it rewrites the files."""
    ended = autotune(finished.folder, "explain", finished.data["study"], "--json")
    assert ended.code == 0, ended.err
    output = json.loads(ended.out)
    form_of("explain").validate_json(ended.out)
    summary = json.loads((finished.out / "summary.json").read_text())
    winner, baseline = (summary[who]["config"] for who in ("winner", "baseline"))
    assert summary["explanation"] == output
    assert [one["knob"] for one in output["undone"]] == [
        name for name in winner if winner[name] != baseline[name]
    ]
    for one in output["undone"]:
        assert TrainConfig(**one["config"]).as_dict() == winner | {
            one["knob"]: baseline[one["knob"]]
        }
        assert one["tokens_per_s"] is None or one["tokens_per_s"] > 0
    assert "Why it won" in (finished.out / "report.html").read_text()


# Interruptions

QUICK_SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [2, 4], kind: system}
  seq_len: 16
  lora_rank: {values: [16, 32], kind: learning}
  precision: fp32
  checkpointing: {values: [none, full], kind: system}
"""
QUICK = (
    "--gpu",
    "cpu",
    "--model",
    "demo-3m",
    "--space",
    "space.yaml",
    "--global-batch",
    "4",
    "--examples",
    "2000",
)
QUICK += ("--budget", "10m", "--study", "mine", "--out", "out")


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_status_from_another_terminal_while_it_runs(tmp_path: Path) -> None:
    arguments = ("run", *QUICK, "--quiet", "--events")
    (tmp_path / "space.yaml").write_text(QUICK_SPACE)
    with subprocess.Popen(
        command(*arguments),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=stranger(),
    ) as process:
        until(
            lambda: (
                (tmp_path / "out" / "trials.jsonl").exists() and len(lines(tmp_path / "out")) > 0
            ),
            process,
        )
        output, as_data = (
            autotune(tmp_path, "status"),
            autotune(tmp_path, "status", "mine", "--json"),
        )
        process.terminate()
        out, err = process.communicate()
    assert (output.code, output.err) == (0, "")
    assert f"mine, being run by process {process.pid}" in output.out and " total" in output.out
    assert json.loads(as_data.out)["running"] is True
    assert all("event" in json.loads(line) for line in out.splitlines())
    # SIGTERM, which batch systems send, ends it cleanly.
    assert process.returncode == 143 and err.startswith("error: stopped") and "Traceback" not in err
    assert TrialState.RUNNING not in {trial.state for trial in trials(tmp_path, "mine")}
    assert json.loads(autotune(tmp_path, "status", "--json").out)["running"] is False


def interrupted(folder: Path, number: signal.Signals, *, after: int, total: int) -> tuple[int, str]:
    """Run a session of the study 'mine' and send it a signal during a probe, after `after` trials.

    Checks that its worker ends too and that its temporary files are deleted.
    """
    arguments = ("run", *QUICK, "--trials", str(total))
    scratch = folder / "scratch"
    scratch.mkdir()
    where = stranger() | {"TMPDIR": str(scratch)}
    with subprocess.Popen(
        command(*arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=where,
    ) as process:
        out = folder / "out"

        def probing() -> bool:
            """Whether some probe has a log but its trial is not recorded yet."""
            done = (
                {row["number"] for row in lines(out)} if (out / "trials.jsonl").exists() else set()
            )
            begun = {
                int(path.stem.removeprefix("trial-")) for path in (out / "logs").glob("trial-*.log")
            }
            return len(done) >= after and bool(begun - done)

        until(probing, process)
        (worker,) = (
            child
            for child in psutil.Process(process.pid).children()
            if os.getsid(child.pid) == child.pid
        )
        assert alive(worker)
        assert len(list(scratch.glob("autotune-*"))) == 1
        process.send_signal(number)
        _, err = process.communicate()
    deadline = time.monotonic() + 60
    while alive(worker) or list(scratch.glob("autotune-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    shutil.rmtree(scratch)
    return process.returncode, err


TOTAL = 4


def test_a_killed_and_then_stopped_study_resumes_without_loss(tmp_path: Path) -> None:
    folder, out = tmp_path, tmp_path / "out"
    (folder / "space.yaml").write_text(QUICK_SPACE)
    code, _ = interrupted(folder, signal.SIGKILL, after=1, total=TOTAL)
    assert code == -signal.SIGKILL
    before, lost = (
        lines(out),
        [trial for trial in trials(folder, "mine") if trial.state is TrialState.RUNNING],
    )
    assert len(lost) == 1 and len(before) < TOTAL - 1

    code, err = interrupted(folder, signal.SIGINT, after=len(before) + 1, total=TOTAL)
    assert code == 130
    assert f"trials: {len(before)} done already, 1 interrupted and queued again" in err
    assert err.splitlines()[-2].startswith("error: stopped")
    (resume,) = next_commands("\n".join(err.splitlines()[-2:]))
    assert resume == "autotune resume mine"
    assert "Traceback" not in err
    between = lines(out)
    assert between[: len(before)] == before
    data = json.loads((out / "summary.json").read_text())
    assert len(before) < len(between) == data["trials"]["total"] < TOTAL
    assert data["winner"] is not None
    for name in (
        "report.html",
        "oom_report.md",
        "recipe.yaml",
        "projection.json",
        "export/train.py",
    ):
        assert (out / name).exists()
    assert TrialState.RUNNING not in {trial.state for trial in trials(folder, "mine")}

    ended = run_printed(resume, folder, "--json")
    after = lines(out)
    assert after[: len(between)] == between
    assert len(after) == TOTAL == json.loads(ended.stdout)["trials"]["total"]
    finished_trials = trials(folder, "mine")
    assert {trial.state for trial in finished_trials} <= {
        TrialState.COMPLETE,
        TrialState.PRUNED,
        TrialState.FAIL,
    }
    assert sum(trial.state is not TrialState.FAIL for trial in finished_trials) == TOTAL
    # The interrupted trial came next.
    again = next(
        trial
        for trial in finished_trials
        if trial.number > lost[0].number and trial.state is not TrialState.FAIL
    )
    assert again.params == lost[0].params
    assert json.loads(ended.stdout)["winner"] is not None


def test_a_model_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Two layers of the model fit with one example of 64 tokens, four do not.

    In fp32: a processor without AVX-512 takes 200 times as long for products in bf16.
    """
    (tmp_path / "model").mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 16384,
        "max_position_embeddings": 512,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    little = ("--memory-gib", "0.6", "--tokens-per-example", "64", "--set", "precision=fp32")
    ended = autotune(tmp_path, "run", "--gpu", "cpu", "--model", "model", *little, "--json")
    assert ended.code == 4, ended.err
    # The study is stored with its tries, and has no winner.
    assert json.loads(ended.out)["winner"] is None
    error, remedy, more = ended.err.splitlines()[-3:]
    assert more == f"  see: {document('errors.md')}#nothing-fits"
    assert error.startswith("error: nothing in the search space fits") and "GiB" in error
    assert remedy.startswith("  try: ")
    assert "Traceback" not in ended.err
    first, second = run_next(ended.err, tmp_path)
    assert first.startswith("autotune oom ") and second == f"{first} --details"

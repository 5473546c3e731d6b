"""`autotune dev inject`: what it tells of studies that were struck.

The faults themselves are tried in tests/faults.
"""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.cli.commands import dev as command
from autotune.core.errors import TooManyFailures, UsageError
from autotune.core.probe_types import Phase
from autotune.probe import fault_injection
from autotune.probe.fault_injection import FAULTS, VARIABLE, strike, throttles
from autotune.probe.harness import BadLoss


def study(outcome: str = "oom", code: int = 0, trials: int = command.TRIALS) -> Any:
    """In the place of a real one: its trials, and its exit code."""

    def run(folder: Path, gpu: str, struck: str = "", **around: Any) -> int:
        if around:
            return 6
        (folder / "out").mkdir(exist_ok=True)
        rows = [
            {"number": n, "outcome": outcome if n == command.STRUCK else "ok"}
            for n in range(trials)
        ]
        (folder / "out" / "trials.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        return code

    return run


def test_every_fault_of_a_probe_is_one_that_it_knows() -> None:
    assert set(command.OUTCOMES) <= set(FAULTS)


def test_what_came_of_each_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_study", study())
    command.inject(["oom", "db-gone", "disk-full"], "cpu", json_=True)
    reported = json.loads(capsys.readouterr().out)
    assert [(row["fault"], row["survived"], row["lost"], row["orphans"]) for row in reported] == [
        ("oom", True, 0, 0),
        ("db-gone", True, 0, 0),
        ("disk-full", True, 0, 0),
    ]
    assert (
        reported[0]["happened"] == "trial 1: oom"
        and reported[1]["happened"] == "exit 6, then continued: exit 0"
    )


@pytest.mark.parametrize("wrong", [{"outcome": "ok"}, {"code": 1}, {"trials": 3}], ids=str)
def test_what_is_not_survived_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    monkeypatch.setattr(command, "_study", study(**wrong))
    with pytest.raises(TooManyFailures, match="studies did not survive oom"):
        command.inject(["oom"], "cpu")
    assert "oom" in capsys.readouterr().out


def test_a_fault_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="no fault 'omm'; did you mean 'oom'"):
        command.inject(["omm"], "cpu")


def test_only_the_requested_phase_of_the_requested_trial_is_struck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    strike("trial-0003.log", Phase.LOAD)
    monkeypatch.setenv(VARIABLE, "crash@load:3")
    strike("trial-0004.log", Phase.LOAD)
    strike("trial-0003-depth2.log", Phase.STEADY)
    with pytest.raises(RuntimeError, match="injected"):
        strike("trial-0003-depth2.log", Phase.LOAD)
    for wrong in ("flood", "crash@noon", "crash:x"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=r"AUTOTUNE_INJECT|noon"):
            strike("trial-0003.log", Phase.LOAD)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("crash", RuntimeError, "injected: CUDA error: an illegal memory access was encountered"),
        ("ecc", RuntimeError, "injected: CUDA error: uncorrectable ECC error encountered"),
        ("oom", torch.OutOfMemoryError, "injected: out of memory. Tried to allocate 2.00 GiB"),
        ("host-oom", MemoryError, "injected: the host's memory ran out"),
        ("nan", BadLoss, "injected: the loss went nan"),
    ],
)
def test_what_is_raised(
    monkeypatch: pytest.MonkeyPatch, fault: str, error: type[Exception], words: str
) -> None:
    monkeypatch.setenv(VARIABLE, f"throttle,{fault}")
    strike("trial-0001.log", Phase.LOAD)
    with pytest.raises(error) as caught:
        strike("trial-0001.log", Phase.FIRST_STEP)
    assert str(caught.value) == words


def test_one_rank_of_several_may_be_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nan@load:1#1")
    strike("trial-0001.log", Phase.LOAD)
    strike("trial-0002.rank1.log", Phase.LOAD, 1)
    with pytest.raises(BadLoss):
        strike("trial-0001.rank1.log", Phase.LOAD, 1)


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        ("slow", ("sleep", 5.0)),
        ("hang", ("sleep", 1e6)),
        ("exit", ("exit", 3)),
        ("sigkill", ("kill", 41, signal.SIGKILL)),
        ("sigsegv", ("kill", 41, signal.SIGSEGV)),
        ("sigstop", ("kill", 41, signal.SIGSTOP)),
        ("sigabrt", ("kill", 41, signal.SIGABRT)),
        ("sigbus", ("kill", 41, signal.SIGBUS)),
        ("throttle", None),
    ],
)
def test_what_is_done_to_the_process(
    monkeypatch: pytest.MonkeyPatch, fault: str, done: tuple[Any, ...] | None
) -> None:
    said: list[Any] = []
    linux = SimpleNamespace(
        environ={VARIABLE: f"{fault}@save"},
        getpid=lambda: 41,
        kill=lambda *values: said.append(("kill", *values)),
        _exit=lambda code: said.append(("exit", code)),
    )
    monkeypatch.setattr(fault_injection, "os", linux)
    monkeypatch.setattr(
        fault_injection.time, "sleep", lambda seconds: said.append(("sleep", seconds))
    )
    strike("trial-0001.log", Phase.FIRST_STEP)
    assert said == []
    strike("trial-0001.log", Phase.SAVE)
    assert said == ([done] if done else [])


@pytest.mark.parametrize(
    ("faults", "hot"),
    [
        ("", False),
        ("oom", False),
        ("throttle", True),
        ("oom,throttle:1", True),
        ("throttle:2", False),
    ],
)
def test_which_probes_are_to_report_heat(
    monkeypatch: pytest.MonkeyPatch, faults: str, hot: bool
) -> None:
    monkeypatch.setenv(VARIABLE, faults)
    assert throttles("trial-0001.log") is hot

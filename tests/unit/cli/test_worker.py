"""`autotune worker`, on recorded answers: who may join a study, what a node apart is told, and when a worker leaves."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.catalog import resolve_device
from autotune.cli.commands import local, worker
from autotune.cli.commands.local import further_cards, local_workers
from autotune.cli.console import Display
from autotune.core.errors import EnvironmentProblem, TooManyFailures, UsageError
from autotune.core.probe_types import Fingerprint, Rung
from autotune.core.train_config import TrainConfig
from autotune.study.storage.study_record import Limits, StudyPhase, start_record, update_record
from tests.helpers.factories import FINGERPRINT
from tests.helpers.replay import Answers, ReplayProber, machine
from tests.helpers.sessions import Start, altered, begun, by_tokens, record_of, subject_of

SOUND = machine(rate=by_tokens)


# --- the command itself


class Prober(ReplayProber):
    """In the place of the warm worker's launcher."""

    device = "cpu"

    def __enter__(self) -> "Prober":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def launch(self) -> None:
        pass


Join = Callable[..., list[TrainConfig]]


@pytest.fixture
def join(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Join:
    """Joins a study of one trial, and says what was probed for it."""
    session = begun(start, task=subject_of(device=resolve_device("cpu"), price=None))
    start_record(session.search, record_of(session.study.task, tmp_path))
    update_record(session.search, limits=replace(session.study.limits, trials=4), phase=StudyPhase.SEARCHING)

    def run(
        answers: Answers = SOUND,
        *,
        fingerprint: Fingerprint = FINGERPRINT,
        phase: str = StudyPhase.SEARCHING,
        study: str = "one",
        allow_mixed: bool = False,
    ) -> list[TrainConfig]:
        session.search.remember("phase", phase)
        prober = Prober(answers, fingerprint)
        monkeypatch.setattr(worker, "WorkerProber", lambda *_, **__: prober)
        url = f"sqlite:///{tmp_path / 'autotune.db'}"
        worker.command(study, url, out=tmp_path / "w", allow_mixed=allow_mixed, parent=None, quiet=True)
        return [one.config for one in prober.requests if one.rung is not Rung.NODE]

    return run


def test_a_worker_probes_until_the_limits_are_reached(join: Join) -> None:
    probed = join()
    assert len(probed) == 3 == len(set(probed))


def test_a_worker_leaves_a_study_that_has_ended(join: Join) -> None:
    assert join(phase=StudyPhase.ENDED) == []


def test_a_study_that_does_not_exist_is_refused(join: Join) -> None:
    with pytest.raises(UsageError, match="there is no study 'two'"):
        join(study="two")


def test_another_machine_is_refused_unless_it_is_asked_for(join: Join) -> None:
    other = replace(FINGERPRINT, packages=FINGERPRINT.packages | {"torch": "2.12.0"})
    with pytest.raises(EnvironmentProblem, match="torch") as caught:
        join(fingerprint=other)
    assert caught.value.exit_code == 3
    assert len(join(fingerprint=other, allow_mixed=True)) == 3


def test_a_node_apart_is_refused_unless_it_is_asked_for(join: Join) -> None:
    larger = altered(peak_reserved_gib=1.05)
    with pytest.raises(TooManyFailures, match="not like the others: it reserves") as caught:
        join(larger)
    assert caught.value.exit_code == 5
    assert len(join(larger, allow_mixed=True)) == 3


def test_a_study_that_is_not_begun_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until its limits are known, which is what comes last."""
    url = f"sqlite:///{tmp_path}/late.db"
    joinable = record_of(limits=Limits(budget_s=1.0))
    found = iter([None, record_of(), joinable])
    monkeypatch.setattr("autotune.study.storage.optuna_storage.read_record", lambda *_: next(found))
    monkeypatch.setattr(worker, "LOOK_EVERY_S", 0.01)
    assert worker._begun(url, "late", "1m", quiet=False) == joinable
    assert capsys.readouterr().err.count("waiting 1m at most for study 'late'") == 1
    monkeypatch.setattr("autotune.study.storage.optuna_storage.read_record", lambda *_: None)
    with pytest.raises(UsageError, match="there is no study 'late'"):
        worker._begun(url, "late", "1s", quiet=True)
    with pytest.raises(UsageError, match="--wait"):
        worker._begun(url, "late", "soon", quiet=True)


# --- those that `run` starts


def test_a_worker_that_failed_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(budget_s=60.0)
    with local_workers([None], "none", f"sqlite:///{tmp_path}/a.db", tmp_path, display, lambda: False):
        end = time.monotonic() + 60
        log = tmp_path / "worker-2" / "logs" / "tuner.log"
        while "try: " not in log.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)  # to its exit
    assert f"worker 2 failed (exit code 2): {tmp_path}/worker-2/logs" in capsys.readouterr().err
    assert "there is no study 'none'" in log.read_text()


@pytest.mark.parametrize("stops", [True, False])
def test_those_that_are_still_at_it_are_waited_for_unless_the_user_has_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stops: bool
) -> None:
    monkeypatch.setattr(local, "LEAVE_S", 3.0)
    sleeper = tmp_path / "sleeper"  # a worker that does not leave by itself
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(local.sys, "executable", str(sleeper))
    begun = time.monotonic()
    with local_workers([None], "one", "sqlite://", tmp_path, Display(budget_s=60.0), lambda: stops):
        pass
    assert (time.monotonic() - begun > 3.0) is not stops
    assert "waiting for the other workers" in capsys.readouterr().err


def test_there_are_no_more_workers_than_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert further_cards(2, cpu=False) == [3] and further_cards(1, cpu=False) == []
    assert further_cards(3, cpu=True) == [None, None]
    with pytest.raises(EnvironmentProblem, match="--workers 3: GPUs here: 2") as told:
        further_cards(3, cpu=False)
    assert told.value.remedy == "give --workers 2"

"""`autotune worker`, on recorded answers: who may join, what a node that differs reports, when a
worker leaves.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.catalog import resolve_device
from autotune.cli.commands import worker
from autotune.core.errors import EnvironmentProblem, TooManyFailures, UsageError
from autotune.core.probe_types import Fingerprint, Rung
from autotune.core.train_config import TrainConfig
from autotune.study import session as session_module
from autotune.study.storage.study_record import Limits, StudyPhase, start_record, update_record
from tests.helpers.factories import FINGERPRINT
from tests.helpers.replay import Answers, ReplayProber, machine
from tests.helpers.sessions import Start, altered, begun, by_tokens, record_of, subject_of

SOUND = machine(rate=by_tokens)


# --- the command itself


class Prober(ReplayProber):
    """In the place of the warm worker's launcher."""

    device = "cpu"
    should_stop: Callable[[], bool]  # whether the warm worker would end its probe

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
    start_record(session.search, record_of(session.study.trials.task, tmp_path))
    update_record(
        session.search,
        limits=replace(session.study.trials.limits, trials=4),
        phase=StudyPhase.SEARCHING,
    )

    def run(
        answers: Answers = SOUND,
        *,
        fingerprint: Fingerprint = FINGERPRINT,
        phase: str = StudyPhase.SEARCHING,
        study: str | None = "one",
        named: str | None = None,
        allow_mixed: bool = False,
        wall_seconds: float = 0.0,
    ) -> list[TrainConfig]:
        session.search.remember("phase", phase)
        update_record(session.search, wall_seconds=wall_seconds)
        prober = Prober(answers, fingerprint)

        def launcher(device: str, logs: Path, *, should_stop: Callable[[], bool]) -> Prober:
            monkeypatch.setattr(Prober, "should_stop", staticmethod(should_stop), raising=False)
            return prober

        monkeypatch.setattr(session_module, "WorkerProber", launcher)
        url = f"sqlite:///{tmp_path / 'autotune.db'}"
        options = {"out": tmp_path / "w", "allow_mixed": allow_mixed, "parent": None, "quiet": True}
        worker.worker(study, url, named, **options)
        return [one.config for one in prober.requests if one.rung is not Rung.NODE]

    return run


def test_a_worker_probes_until_the_limits_are_reached(join: Join) -> None:
    probed = join()
    assert len(probed) == 3 == len(set(probed))


def test_a_probe_of_a_worker_ends_with_the_budget_of_the_study(join: Join) -> None:
    join()
    assert not Prober.should_stop()
    join(wall_seconds=2e6)  # of 1e6
    assert Prober.should_stop()


def test_a_worker_leaves_a_study_that_has_ended(join: Join) -> None:
    assert join(phase=StudyPhase.ENDED) == []


def test_a_study_that_does_not_exist_is_refused(join: Join) -> None:
    with pytest.raises(UsageError, match="there is no study 'two'"):
        join(study="two")


def test_a_study_has_one_name_or_is_the_newest(join: Join) -> None:
    assert len(join(study=None)) == 3
    with pytest.raises(UsageError, match="there is no study 'two'"):
        join(study=None, named="two")
    with pytest.raises(UsageError, match="two names"):
        join(named="one")


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


def test_a_worker_waits_for_a_study_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until its limits are known, which are written last."""
    url = f"sqlite:///{tmp_path}/late.db"
    joinable = record_of(limits=Limits(budget_s=1.0))
    found = iter([None, record_of(), joinable])
    monkeypatch.setattr(session_module, "read_record", lambda *_: next(found))
    monkeypatch.setattr(session_module, "JOIN_RETRY_S", 0.01)
    said: list[str] = []
    assert session_module.await_study(url, "late", 60.0, said.append) == joinable
    assert said == ["waiting 1 min at most for study 'late' to begin"]
    monkeypatch.setattr(session_module, "read_record", lambda *_: None)
    with pytest.raises(UsageError, match="there is no study 'late'"):
        session_module.await_study(url, "late", 0.1)
    with pytest.raises(UsageError, match="--wait"):
        worker.worker(
            "late", url, out=None, allow_mixed=False, parent=None, quiet=True, wait="soon"
        )

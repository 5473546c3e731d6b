"""The Optuna study on SQLite and PostgreSQL: states, constraints and repair."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from autotune.core.errors import StorageError
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace
from autotune.study.optimizer import TOO_LATE, Optimizer
from tests.helpers.postgres import postgres_server, stop

SPACE = SearchSpace(
    name="small",
    knobs=(
        Knob(name="method", values=("lora", "full")),
        Knob(name="micro_batch_size", values=(1, 2, 4, 8)),
        Knob(name="seq_len", low=64, high=256),
        Knob(name="lora_rank", values=(8, 16, 32)),
    ),
)
FITS, TOO_LARGE = {"memory": -0.25, "health": 0.0}, {"memory": 0.1, "health": 0.0}

Begin = Callable[..., Optimizer]


@pytest.fixture
def begin(database: str) -> Iterator[Begin]:
    """A function that opens a new session of the study 'one', as after a restart."""
    opened: list[Optimizer] = []

    def create(space: SearchSpace = SPACE, seed: int = 0) -> Optimizer:
        opened.append(Optimizer.create(database, "one", space, seed=seed))
        return opened[-1]

    yield create
    for search in opened:
        search.close()


@pytest.fixture
def trials(database: str) -> Iterator[Callable[[], list[FrozenTrial]]]:
    """A function that returns the trials as Optuna reads them."""
    storages: list[optuna.storages.RDBStorage] = []

    def read() -> list[FrozenTrial]:
        storages.append(optuna.storages.RDBStorage(database))
        return optuna.load_study(storage=storages[-1], study_name="one").trials

    yield read
    for storage in storages:
        storage.engine.dispose()


Read = Callable[[], list[FrozenTrial]]


def test_outcomes_become_states_and_signed_constraints(begin: Begin, trials: Read) -> None:
    search = begin()
    reported = {
        Outcome.OK: (1000.0, FITS),
        Outcome.OOM: (None, TOO_LARGE),
        Outcome.REFUSED: (None, TOO_LARGE),
        Outcome.NUMERICS: (None, {"memory": 0.0, "health": 1.0}),
        Outcome.CRASH: (None, {"memory": 0.0, "health": 1.0}),
    }
    asked = {}
    for outcome, (value, margins) in reported.items():
        asked[outcome] = search.ask()
        search.tell(asked[outcome].number, outcome, value, margins, reason=f"because {outcome}")
    by_number = {trial.number: trial for trial in trials()}
    for outcome, (value, margins) in reported.items():
        trial = by_number[asked[outcome].number]
        assert trial.state is (TrialState.COMPLETE if outcome is Outcome.OK else TrialState.PRUNED)
        assert trial.value == value
        assert trial.constraints == margins
    oom = by_number[asked[Outcome.OOM].number]
    assert oom.constraints["memory"] > 0
    finished = begin().finished()
    assert [one.outcome for one in finished] == list(reported)
    assert [one.config for one in finished] == [one.config for one in asked.values()]
    assert [one.value for one in finished] == [value for value, _ in reported.values()]
    assert [one.reason for one in finished] == [f"because {outcome}" for outcome in reported]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_value_that_is_no_number_never_completes(
    begin: Begin, trials: Read, value: float | None
) -> None:
    search = begin()
    search.tell(search.ask().number, Outcome.OK, value, {"memory": float("nan"), "health": 1.0})
    (trial,) = trials()
    assert trial.state is TrialState.PRUNED
    assert trial.constraints == {"health": 1.0}


def test_the_best_trial_is_feasible(begin: Begin, database: str) -> None:
    search = begin()
    search.tell(search.ask().number, Outcome.OK, 10.0, FITS)
    search.tell(search.ask().number, Outcome.OOM, None, TOO_LARGE)
    search.tell(search.ask().number, Outcome.OK, 20.0, FITS)
    storage = optuna.storages.RDBStorage(database)
    best = optuna.load_study(storage=storage, study_name="one").best_trial
    storage.engine.dispose()
    assert best.value == 20.0


def test_proposals_are_in_the_space_and_omit_inactive_knobs(begin: Begin, trials: Read) -> None:
    search = begin()
    proposals = [search.ask() for _ in range(12)]
    for asked, trial in zip(proposals, trials(), strict=True):
        config = asked.config
        assert config.method in ("lora", "full")
        assert config.micro_batch_size in (1, 2, 4, 8)
        assert 64 <= config.seq_len <= 256
        assert ("lora_rank" in trial.params) is (config.method == "lora")
        assert config.lora_rank in ((8, 16, 32) if config.method == "lora" else (None,))
    assert len({asked.config.digest for asked in proposals}) > 6


def test_an_enqueued_configuration_is_proposed_next(begin: Begin) -> None:
    search = begin()
    chosen = {"method": "lora", "micro_batch_size": 4, "seq_len": 100, "lora_rank": 32}
    search.enqueue(chosen)
    assert search.ask().config == TrainConfig(**chosen)


def test_a_continued_study_draws_other_numbers(begin: Begin) -> None:
    search = begin()
    first = []
    for _ in range(3):
        asked = search.ask()
        first.append(asked.config)
        search.tell(asked.number, Outcome.OK, 1.0, FITS)
    again = begin()
    assert [again.ask().config for _ in range(3)] != first


def test_repair_reports_stored_results_and_queues_the_rest_again(
    begin: Begin, trials: Read
) -> None:
    search = begin()
    done, stored, lost = search.ask(), search.ask(), search.ask()
    search.tell(done.number, Outcome.OK, 5.0, FITS)

    search = begin()  # the earlier session was killed

    def settle(number: int) -> bool:
        if number != stored.number:
            return False
        search.tell(number, Outcome.OOM, None, TOO_LARGE)
        return True

    assert search.repair(settle) == 1
    states = {trial.number: trial.state for trial in trials()}
    assert states == {
        done.number: TrialState.COMPLETE,
        stored.number: TrialState.PRUNED,
        lost.number: TrialState.FAIL,
        lost.number + 1: TrialState.WAITING,
    }
    again = search.ask()
    assert (again.number, again.config) == (lost.number + 1, lost.config)
    search.tell(again.number, Outcome.OK, 6.0, FITS)
    assert [one.number for one in search.finished()] == [done.number, stored.number, again.number]
    assert begin().repair(settle) == 0


def test_a_queue_that_is_closed_is_queued_again_by_a_later_session(
    begin: Begin, trials: Read
) -> None:
    search = begin()
    wanted = {"method": "lora", "micro_batch_size": 4, "seq_len": 100, "lora_rank": 32}
    for length in (100, 101):
        search.enqueue(wanted | {"seq_len": length})
    search.close_queue()
    for trial in trials():
        assert trial.state is TrialState.FAIL and trial.user_attrs["reason"] == TOO_LATE
        assert trial.duration is not None  # Optuna copies no study with a trial that never began

    search = begin()
    assert search.reopen_queue() == 2 and search.reopen_queue() == 0
    asked = search.ask()
    assert asked.config == TrainConfig(**wanted)
    search.tell(asked.number, Outcome.OK, 5.0, FITS)
    search.close_queue()
    assert begin().reopen_queue() == 1  # the other was tried


@pytest.mark.parametrize(
    "damage", [{"outcome": "won"}, {"config": {"seq_len": "long"}}, {"config": []}]
)
def test_a_trial_of_no_known_form_is_a_storage_error(
    begin: Begin, database: str, damage: dict[str, object]
) -> None:
    search = begin()
    trial = search.ask()
    search.tell(trial.number, Outcome.OK, 5.0, FITS)
    storage = optuna.storages.RDBStorage(database)
    with storage.engine.begin() as connection:
        for key, value in damage.items():
            query = "UPDATE trial_user_attributes SET value_json = :value WHERE key = :key"
            connection.execute(sa.text(query), {"key": key, "value": json.dumps(value)})
    storage.engine.dispose()
    with pytest.raises(StorageError, match=f"^trial {trial.number} of the study cannot be read"):
        begin().finished()


def test_a_new_session_leaves_running_trials_to_repair(begin: Begin, trials: Read) -> None:
    """Only what this session's own interrupted `ask` left behind goes back at once."""
    number = begin().ask(worker="me").number
    begin().ask(worker="me")
    assert trials()[number].state is TrialState.RUNNING


def test_a_returned_trial_is_proposed_again(begin: Begin) -> None:
    """Also after two interruptions, and if it came from the queue."""
    search = begin()
    search.enqueue({"method": "full", "micro_batch_size": 2, "seq_len": 77})
    first = search.ask()
    for _ in range(2):
        search.give_back(first.number)
        again = search.ask()
        assert again.config == first.config
        assert again.number > first.number
        first = again
    assert search.finished() == []


def test_a_late_constraint_of_a_returned_trial_is_dropped(begin: Begin, trials: Read) -> None:
    search = begin()
    asked = search.ask()
    search.give_back(asked.number)
    again = search.ask()
    search.tell(again.number, Outcome.OOM, None, TOO_LARGE)
    assert trials()[again.number].constraints == TOO_LARGE
    assert trials()[asked.number].constraints == {}


@pytest.mark.server
def test_an_unreachable_server_is_a_storage_error(postgres: object) -> None:
    """The error shows the cause, not Optuna's wrapper."""
    with postgres_server() as server:
        url = server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
        search = Optimizer.create(url, "one", SPACE, seed=0)
        asked = search.ask()
        stop(server)
        with pytest.raises(StorageError, match="connect"):
            search.tell(asked.number, Outcome.OK, 1.0, FITS)
        search.close()


def test_a_closed_optimizer_holds_no_file(tmp_path: Path) -> None:
    """Else each study that was opened to be read would keep its database open until the process
    ends.
    """
    path = tmp_path / "study.db"

    def num_open() -> int:
        return sum(
            one.is_symlink() and one.readlink() == path for one in Path("/proc/self/fd").iterdir()
        )

    search = Optimizer.create(f"sqlite:///{path}", "one", SPACE, seed=0)
    search.ask()
    assert num_open() > 0
    search.close()
    assert num_open() == 0

"""A study session with a `ReplayProber`, shared by the tests of the loop, of confirmation and of
resuming.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.probe_types import ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.planning.projections import project_winner
from autotune.problem.constraints import Floors
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.history import summarize
from autotune.study.loop import Study
from autotune.study.optimizer import Optimizer
from autotune.study.storage.database import Outages
from autotune.study.storage.optuna_storage import opened_storage
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import Limits, ProbeTerms, StudyRecord
from autotune.study.summary import StudySummary, TrialRecord
from tests.helpers.factories import FINGERPRINT
from tests.helpers.replay import Answers, ReplayProber, machine


def space(**knobs: tuple[Any, ...]) -> SearchSpace:
    return SearchSpace(
        name="test",
        knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items()),
    )


SPACE = space(
    micro_batch_size=(1, 2, 4, 8),
    seq_len=(256,),
    lora_rank=(16, 32),
    checkpointing=("none", "full"),
)
BASELINE = TrainConfig(seq_len=256)


def by_tokens(config: TrainConfig) -> float:
    """A different rate for each configuration, higher without recomputation and with the lower
    rank.
    """
    speed = 1000.0 + 10 * config.micro_batch_size
    return (
        speed
        * (0.7 if config.checkpointing == "full" else 1.0)
        * (0.9 if config.lora_rank == 32 else 1.0)
    )


@dataclass(kw_only=True)
class Session:
    """One session of the study 'one', built as `autotune run` builds it."""

    study: Study
    prober: ReplayProber
    search: Optimizer
    evaluator: Evaluator
    store: ProbeStore
    said: list[str]

    def summary(self) -> StudySummary:
        trials = self.study.trials
        return summarize(
            record_of(trials.task, too_short_for=tuple(trials.too_short_for)),
            trials.rows,
            trials.selection,
            self.store.probes_of_study(trials.task.study),
            project=project_winner,
            wall_seconds=2.0,
        )

    def winner(self) -> TrainConfig:
        recipe = self.summary().recipe
        assert recipe is not None
        return recipe.winner.config


Start = Callable[..., Session]


def subject_of(space: SearchSpace = SPACE, **changes: Any) -> Task:
    values: dict[str, Any] = {
        "study": "one",
        "model": resolve_model("demo-3m"),
        "device": resolve_device("h200"),
        "price": find_price("h200-141gb"),
        "workload": Workload(examples=1000, lengths=Lengths.constant(256), global_batch=32),
        "floors": Floors(),
        "space": space,
    }
    return Task(**(values | changes))


def record_of(task: Task | None = None, out: Path = Path("out"), **changes: Any) -> StudyRecord:
    """The record that `autotune run` writes for a study on FINGERPRINT's machine, with 80 GiB."""
    task = task or subject_of()
    values: dict[str, Any] = {
        "task": task,
        "fingerprint": FINGERPRINT,
        "terms": ProbeTerms(memory_gib=80.0, headroom=0.05, seed=0),
        "spec": StudySpec(model=task.model.name),
        "out": str(out),
    }
    return StudyRecord(**(values | changes))


def starter(url: str, logs: Path, opened: list[Any]) -> Start:
    """Return a function that starts sessions on this database and appends their connections to
    `opened`.
    """

    def start(
        answers: Answers | None = None,
        *,
        task: Task | None = None,
        began: float | None = None,
        begin: list[TrainConfig] | None = None,
        on_trial: Callable[[TrialRecord], None] = lambda row: None,
        should_stop: Callable[[], bool] = lambda: False,
        waits_s: float = 0.0,
        **limits: Any,
    ) -> Session:
        task = task or subject_of()
        prober = ReplayProber(answers or machine(rate=by_tokens))
        said: list[str] = []
        outages = Outages(said.append, should_stop, seconds=waits_s)
        store = ProbeStore(url, outbox=logs.parent / "outbox.jsonl", outages=outages)
        search = Optimizer.create(url, task.study, task.space, seed=0, outages=outages)
        opened.extend((store, search))

        def request(config: TrainConfig) -> ProbeRequest:
            return ProbeRequest(config=config, model=task.model.config, memory_gib=80.0)

        evaluator = Evaluator(prober, store, study=task.study, logs=logs, request=request)
        trials = SharedTrials(
            task=task,
            optimizer=search,
            evaluator=evaluator,
            limits=Limits(**({"budget_s": 1e6, "patience": 16} | limits)),
            started=time.monotonic() if began is None else began,
            say=said.append,
            should_stop=should_stop,
            on_trial=on_trial,
        )
        trials.resume(store.probes_of_study(task.study))
        trials.begin(begin or [])
        return Session(
            study=Study(trials),
            prober=prober,
            search=search,
            evaluator=evaluator,
            store=store,
            said=said,
        )

    return start


def states(database: str) -> list[TrialState]:
    """The states of all trials as Optuna reads them."""
    with opened_storage(database) as storage:
        return [
            trial.state for trial in optuna.load_study(storage=storage, study_name="one").trials
        ]


def whole(start: Start, answers: Answers | None = None, **arguments: Any) -> Session:
    """Run and confirm a session that starts with the baseline."""
    session = start(answers, begin=[BASELINE], **arguments)
    session.study.run()
    session.study.confirm()
    return session


def begun(start: Start, **arguments: Any) -> Session:
    """Run a session that measures only the baseline."""
    session = start(begin=[BASELINE], trials=1, **arguments)
    session.study.run()
    return session


def altered(**factors: float) -> Callable[[ProbeRequest], ProbeResult]:
    """Answers of the usual machine with some fields of its measurements scaled by a factor."""

    def answer(request: ProbeRequest) -> ProbeResult:
        probed = machine(rate=by_tokens)(request)
        if probed.measurement is None:
            return probed
        changes: dict[str, Any] = {
            name: tuple(number * factor for number in value)
            if isinstance(value := getattr(probed.measurement, name), tuple)
            else value * factor
            for name, factor in factors.items()
        }
        return replace(probed, measurement=replace(probed.measurement, **changes))

    return answer

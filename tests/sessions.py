"""A study session over recorded answers: what the tests of the loop, of confirming and of resuming share."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from factories import FINGERPRINT
from optuna.trial import TrialState
from replay import Answers, ReplayProber, machine

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.config import TrainConfig
from autotune.database import Outages
from autotune.ladder import Ladder
from autotune.lengths import Lengths
from autotune.objective import Floors
from autotune.recall import summarize
from autotune.recipe import StudySummary, TrialRow
from autotune.result import ProbeRequest
from autotune.search import Search
from autotune.space import Knob, SearchSpace
from autotune.store import ProbeStore
from autotune.study import Limits, Study
from autotune.subject import Subject
from autotune.workload import Workload


def space(**knobs: tuple[Any, ...]) -> SearchSpace:
    learning = ("lora_rank", "seq_len")
    return SearchSpace(
        name="test",
        knobs=tuple(
            Knob(name=name, values=values, kind="learning" if name in learning else "system")
            for name, values in knobs.items()
        ),
    )


SPACE = space(micro_batch_size=(1, 2, 4, 8), seq_len=(256,), lora_rank=(16, 32), checkpointing=("none", "full"))
BASELINE = TrainConfig(seq_len=256)


def by_tokens(config: TrainConfig) -> float:
    """Every configuration has a rate of its own; what recomputes nothing and has the lower rank is faster."""
    speed = 1000.0 + 10 * config.micro_batch_size
    return speed * (0.7 if config.checkpointing == "full" else 1.0) * (0.9 if config.lora_rank == 32 else 1.0)


@dataclass(kw_only=True)
class Session:
    """One session of the study 'one', as `autotune run` puts it together."""

    study: Study
    prober: ReplayProber
    search: Search
    ladder: Ladder
    store: ProbeStore
    said: list[str]

    def summary(self) -> StudySummary:
        return summarize(
            self.study.rows,
            self.study.judge,
            FINGERPRINT,
            self.store.of_study(self.study.subject.study),
            headroom=0.05,
            wall_seconds=2.0,
            importances=self.search.importances(),
        )

    def winner(self) -> TrainConfig:
        recipe = self.summary().recipe
        assert recipe is not None
        return recipe.winner.config


Start = Callable[..., Session]


def subject_of(space: SearchSpace = SPACE, **changes: Any) -> Subject:
    values: dict[str, Any] = {
        "study": "one",
        "model": resolve_model("demo-3m"),
        "device": resolve_device("h200"),
        "price": find_price("h200-141gb"),
        "workload": Workload(examples=1000, lengths=Lengths.constant(256), global_batch=32),
        "floors": Floors(),
        "space": space,
    }
    return Subject(**(values | changes))


def starter(url: str, logs: Path, opened: list[Any]) -> Start:
    def start(
        answers: Answers | None = None,
        *,
        subject: Subject | None = None,
        began: float | None = None,
        begin: list[TrainConfig] | None = None,
        on_trial: Callable[[TrialRow], None] = lambda row: None,
        should_stop: Callable[[], bool] = lambda: False,
        waits_s: float = 0.0,
        **limits: Any,
    ) -> Session:
        subject = subject or subject_of()
        prober = ReplayProber(answers or machine(rate=by_tokens))
        said: list[str] = []
        outages = Outages(said.append, should_stop, seconds=waits_s)
        store = ProbeStore(url, spool=logs.parent / "spool.jsonl", outages=outages)
        facts = {"model": subject.model.name}
        search = Search.create(url, subject.study, subject.space, seed=0, facts=facts, outages=outages)
        opened.extend((store, search))

        def request(config: TrainConfig) -> ProbeRequest:
            return ProbeRequest(config=config, model=subject.model.config, memory_gib=80.0)

        ladder = Ladder(prober, store, study=subject.study, logs=logs, request=request)
        study = Study(
            subject,
            search,
            ladder,
            Limits(**({"budget_s": 1e6, "patience": 16} | limits)),
            time.monotonic() if began is None else began,
            on_trial=on_trial,
            say=said.append,
            should_stop=should_stop,
        )
        study.resume(store.of_study(subject.study))
        study.begin(begin or [])
        return Session(study=study, prober=prober, search=search, ladder=ladder, store=store, said=said)

    return start


def states(database: str) -> list[TrialState]:
    storage = optuna.storages.RDBStorage(database)
    found = [trial.state for trial in optuna.load_study(storage=storage, study_name="one").trials]
    storage.engine.dispose()
    return found


def whole(start: Start, answers: Answers | None = None, **arguments: Any) -> Session:
    """A session with the baseline in its queue, run and confirmed."""
    session = start(answers, begin=[BASELINE], **arguments)
    session.study.run()
    session.study.confirm()
    return session

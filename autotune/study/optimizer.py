"""Everything that Optuna does for us: which configuration is tried next, and what became of each.

Out of memory is information: told as PRUNED with a signed margin, never FAIL, which samplers ignore. FAIL is for trials
that have to be run again. Hands history and importances out as plain data.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace
from autotune.study.importance import importances
from autotune.study.storage.database import Outages, one_at_a_time, retried
from autotune.study.storage.optuna_storage import opened_storage, optuna_errors, optuna_storage

STARTUP_TRIALS = 8
METRIC = "useful tokens/s"
NAMELESS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A proposal: the trial's number in the study and what it chose."""

    number: int
    config: TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A finished trial as the study remembers it."""

    number: int
    config: TrainConfig
    outcome: Outcome
    value: float | None
    reused: bool
    reason: str | None
    constraints: dict[str, float]


class Optimizer:
    """One Optuna study: created, or continued if the space is the same."""

    def __init__(
        self, url: str, storage: RDBStorage, study: optuna.Study, space: SearchSpace, outages: Outages | None = None
    ) -> None:
        self._url, self._storage, self._study, self._space = url, storage, study, space
        self.outages = outages or Outages()
        self.outages.watch(storage.engine)
        self._asked: dict[int, optuna.Trial] = {}  # a Trial that is made anew samples anew
        self._asking, self._withdrawn = False, set[int]()  # what a broken connection may interrupt
        self._nameless: dict[int, float] = {}  # running trials that nobody has put a name on, and since when

    @classmethod
    def create(
        cls,
        url: str,
        name: str,
        space: SearchSpace,
        *,
        seed: int,
        outages: Outages | None = None,
    ) -> "Optimizer":
        """A new study, or the existing one of this name."""
        with optuna_errors(url), contextlib.ExitStack() as undo:
            storage = undo.enter_context(opened_storage(url))
            one_at_a_time(storage.engine)
            study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
            search = cls(url, storage, study, space, outages)
            if not study.metric_names:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    study.set_metric_names([METRIC])
            undo.pop_all()  # from here on `close` gives the connections back
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = optuna.samplers.TPESampler(
                multivariate=True,
                group=True,
                n_startup_trials=STARTUP_TRIALS,
                seed=seed + len(study.trials),  # a continued study must not draw the same numbers again
            )
        return search

    @classmethod
    def open(cls, url: str, name: str, space: SearchSpace) -> "Optimizer":
        """An existing study, to be read."""
        with optuna_errors(url):
            storage = optuna_storage(url)
            return cls(url, storage, optuna.load_study(storage=storage, study_name=name), space)

    def close(self) -> None:
        self._storage.engine.dispose()

    @retried
    def remember(self, key: str, value: Any) -> None:
        """Store a value of plain data under a key; `study_record` names the keys."""
        with optuna_errors(self._url):
            self._study.set_user_attr(key, value)

    @retried
    def remembered(self, key: str) -> Any:
        """What was remembered under this key; None if nothing was."""
        with optuna_errors(self._url):
            return self._study.user_attrs.get(key)

    @retried
    def attributes(self) -> dict[str, Any]:
        """Everything that was remembered."""
        with optuna_errors(self._url):
            return dict(self._study.user_attrs)

    def repair(self, settle: Callable[[int], bool], workers: Callable[[], Collection[str]] = tuple) -> int:
        """Settle trials that a killed session left RUNNING: told from our row, or failed and queued again.

        `settle(number)` tells the trial if its probe is stored, and returns whether it was. Trials of `workers` at
        work are left alone, and those without a worker's name wait for some seconds: somebody may just have begun them.
        Returns how many were queued again.
        """
        requeued, nameless, now = 0, dict[int, float](), time.monotonic()
        running = self._in_state(TrialState.RUNNING)
        at_work = workers()  # asked after what runs was read, so that whoever began it has joined
        for trial in running:
            worker = trial.user_attrs.get("worker")
            if worker in at_work:
                continue
            since = self._nameless.get(trial.number, now)
            if worker is None and len(at_work) > 1 and now - since < NAMELESS_S:
                nameless[trial.number] = since
            elif not settle(trial.number):
                requeued += self.give_back(trial.number)
        self._nameless = nameless
        return requeued

    @retried
    def enqueue(self, chosen: dict[str, Any]) -> None:
        """Have this choice tried next, by whoever asks first."""
        with optuna_errors(self._url):
            self._study.enqueue_trial(chosen)

    def hold(self, params: dict[str, Any]) -> None:
        """Propose nothing but these values of these knobs from now on."""
        if params:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self._study.sampler = optuna.samplers.PartialFixedSampler(params, self._study.sampler)

    def is_waiting(self) -> bool:
        """Whether something is queued already."""
        return bool(self._in_state(TrialState.WAITING))

    @retried
    def ask(self, wanted: dict[str, Any] | None = None, *, worker: str = "") -> Proposal:
        """The next trial: of what is `wanted`, else what is queued, else what the sampler proposes."""
        if self._asking:  # the last time it broke off, and may have left a trial behind
            for left in self._in_state(TrialState.RUNNING):
                if worker and left.user_attrs.get("worker") == worker and left.number not in self._asked:
                    self.give_back(left.number)
        self._asking = True
        asked = None
        while asked is None:  # else another held this session to be gone, and gave the trial back
            with optuna_errors(self._url), contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                trial = self._study.ask() if wanted is None else self._begun(wanted, worker)
                asked = self._chosen(trial, worker if wanted is None else "")
        self._asking = False
        return asked

    def _chosen(self, trial: optuna.Trial, worker: str) -> Proposal:
        """What a trial that was begun tries."""
        if worker:
            trial.set_user_attr("worker", worker)
        chosen: dict[str, Any] = {}
        for knob in self._space.knobs:
            if knob.is_active(chosen):
                chosen[knob.name] = trial._suggest(knob.name, distribution(knob))
        config = self._space.config(chosen)
        trial.set_user_attr("config", config.as_dict())
        self._asked[trial.number] = trial
        return Proposal(number=trial.number, config=config)

    def _begun(self, wanted: dict[str, Any], worker: str) -> optuna.Trial:
        """A trial of this choice; not by way of the queue, from which another worker could take it."""
        known = {name: distribution(knob) for name in wanted if (knob := self._space.knob(name)) is not None}
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params={name: wanted[name] for name in known},
            distributions=known,
            user_attrs={"worker": worker} if worker else {},
        )
        storage, study = self._study._storage, self._study
        self._study._thread_local.cached_all_trials = None  # as `Study.ask` does, or the sampler would not see the last
        return optuna.Trial(study, storage.create_new_trial(study._study_id, template_trial=template))

    @retried
    def tell(
        self,
        number: int,
        outcome: Outcome,
        value: float | None,
        margins: dict[str, float],
        *,
        reused: bool = False,
        reason: str | None = None,
    ) -> bool:
        """Tell what became of a trial. Margins are signed: above 0 is infeasible.

        False where others held this session to be dead and gave the trial back: that stands.
        """
        with optuna_errors(self._url), contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            trial = self._asked.pop(number, None)
            if trial is None:  # asked for by a session that was killed
                trial = optuna.trial.Trial(self._study, self._trial(number)._trial_id)
            if (state := self._trial(number).state).is_finished():
                return state is not TrialState.FAIL
            for key, margin in margins.items():
                if math.isfinite(margin) and key not in trial.constraints:  # a session may have been killed in here
                    trial.set_constraint(key, margin)
            trial.set_user_attr("outcome", outcome.value)
            trial.set_user_attr("reused", reused)
            if reason:
                trial.set_user_attr("reason", reason[:500])
            if value is not None and math.isfinite(value):
                if outcome is Outcome.OK:
                    return self._finish(number, TrialState.COMPLETE, value)
                trial.report(value, step=0)  # SLOW: what it would have done tells samplers how far off it is
            return self._finish(number, TrialState.PRUNED)
        return False

    def _finish(self, number: int, state: TrialState, value: float | None = None) -> bool:
        """False where another worker was quicker; Optuna says so in two ways."""
        try:
            self._study.tell(number, value, state)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            return False
        return True

    @retried
    def withdraw(self, number: int) -> bool:
        """The trial is not to be: it counts for nothing. False where another worker was quicker to say so."""
        again = number in self._withdrawn  # its connection broke: who was quicker is this session
        self._withdrawn.add(number)
        with optuna_errors(self._url):
            self._asked.pop(number, None)
            return self._finish(number, TrialState.FAIL) or again

    def give_back(self, number: int) -> bool:
        """The trial was not finished: it goes back to the queue, as a new trial. False where another did so."""
        trial = self._trial(number)
        chosen = trial.system_attrs.get("fixed_params", {}) | trial.params
        if not self.withdraw(number):
            return False
        if chosen:
            self.enqueue(chosen)
        return True

    def finished_numbers(self) -> set[int]:
        """The numbers of the trials with an outcome."""
        return {trial.number for trial in self._in_state(TrialState.COMPLETE, TrialState.PRUNED)}

    def finished(self) -> list[FinishedTrial]:
        """Trials with an outcome, in order; those that were given back are not among them."""
        return [
            FinishedTrial(
                number=trial.number,
                config=TrainConfig(**trial.user_attrs["config"]),
                outcome=Outcome(trial.user_attrs.get("outcome", Outcome.CRASH)),
                value=trial.value if trial.state is TrialState.COMPLETE else None,
                reused=bool(trial.user_attrs.get("reused")),
                reason=trial.user_attrs.get("reason"),
                constraints=trial.constraints,
            )
            for trial in self._in_state(TrialState.COMPLETE, TrialState.PRUNED)
            if "config" in trial.user_attrs
        ]

    @retried
    def record(self) -> tuple[dict[str, Any], list[FrozenTrial]]:
        """What Optuna keeps of the study: its attributes, and its trials of any state."""
        with optuna_errors(self._url):
            return dict(self._study.user_attrs), self._study.get_trials(deepcopy=False)

    def importances(self) -> dict[str, float]:
        """How much each knob that was varied mattered, or nothing where that cannot be said."""
        with contextlib.suppress(Exception):
            return importances(self._in_state(TrialState.COMPLETE, TrialState.PRUNED))
        return {}

    @retried
    def _in_state(self, *states: TrialState) -> list[FrozenTrial]:
        with optuna_errors(self._url):
            found: list[FrozenTrial] = self._study.get_trials(deepcopy=False, states=states)
        return found

    @retried
    def _trial(self, number: int) -> FrozenTrial:
        with optuna_errors(self._url):
            return self._study.get_trials(deepcopy=False)[number]


def distribution(knob: Knob) -> BaseDistribution:
    """A knob as Optuna samples it. Ordered integers given as a list stay categories, since they may have gaps."""
    if knob.low is not None and knob.high is not None:
        return IntDistribution(knob.low, knob.high, log=knob.log)
    return CategoricalDistribution(knob.values)

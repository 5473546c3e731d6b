"""The interface to Optuna, which proposes configurations and learns their outcomes.

A trial that runs out of memory gets Optuna's state PRUNED. Its constraint is the positive fraction
by which it exceeds the memory limit. Such a trial never gets the state FAIL, because samplers
ignore failed trials. FAIL marks trials that have to run again. Finished trials are returned as
plain data.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.core.errors import StorageError
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace
from autotune.study.storage.database import OTHER, Outages, one_at_a_time, retry_on_outage
from autotune.study.storage.optuna_storage import opened_storage, optuna_errors, optuna_storage

STARTUP_TRIALS = 8
METRIC = "useful tokens/s"
METRIC_OF_SEVERAL = "useful tokens/s of each GPU"
UNNAMED_S = 5.0  # a running trial without a worker's name is left unchanged for this time
MAX_REASON = 500  # characters
# POSTPONED is the attribute of a trial that was still queued when its study ended. TOO_LATE is the
# reason that is stored with such a trial.
POSTPONED = "postponed"
TOO_LATE = "the study ended before this trial began; a resumed study tries it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A trial that has begun: its number in the study, and its configuration."""

    number: int
    config: TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A finished trial as Optuna knows it."""

    number: int
    config: TrainConfig
    outcome: Outcome
    value: float | None
    reused: bool
    reason: str | None


class Optimizer:
    """One Optuna study, which is created or continued. The caller closes the Optimizer.

    A continued study must have the same search space as before.
    """

    def __init__(
        self,
        url: str,
        storage: RDBStorage,
        study: optuna.Study,
        space: SearchSpace,
        outages: Outages | None = None,
    ) -> None:
        self._url = url
        self._storage = storage
        self._study = study
        self._space = space
        self.outages = outages or Outages()
        self.outages.watch(storage.engine)
        # The trials that this worker began. They are kept, because a second optuna.Trial object for
        # such a trial would sample the trial's values again.
        self._own_trials: dict[int, optuna.Trial] = {}
        self._is_asking = False  # stays True if a broken connection interrupted `ask`
        self._withdrawn: set[int] = set()
        # Running trials without a worker's name, and when they were first seen.
        self._unnamed_since: dict[int, float] = {}

    @classmethod
    def create(
        cls, url: str, name: str, space: SearchSpace, *, seed: int, outages: Outages | None = None
    ) -> "Optimizer":
        """Create a study, or continue the study of this name."""
        with optuna_errors(url), contextlib.ExitStack() as undo:
            storage = undo.enter_context(opened_storage(url))
            one_at_a_time(storage.engine)
            study = optuna.create_study(
                storage=storage, study_name=name, direction="maximize", load_if_exists=True
            )
            optimizer = cls(url, storage, study, space, outages)

            with _without_experimental_warnings():
                if not study.metric_names:
                    several = len(space.choices("num_gpus")) > 1
                    study.set_metric_names([METRIC_OF_SEVERAL if several else METRIC])
                study.sampler = optuna.samplers.TPESampler(
                    multivariate=True,
                    group=True,
                    n_startup_trials=STARTUP_TRIALS,
                    # A continued study must not draw the same random numbers again.
                    seed=seed + len(study.trials),
                )

            undo.pop_all()  # the caller closes the connections from here on
        return optimizer

    @classmethod
    def open(cls, url: str, name: str, space: SearchSpace) -> "Optimizer":
        """Open an existing study to read it."""
        with optuna_errors(url):
            storage = optuna_storage(url)
            return cls(url, storage, optuna.load_study(storage=storage, study_name=name), space)

    def close(self) -> None:
        """Close the connections."""
        self._storage.engine.dispose()

    @retry_on_outage
    def remember(self, key: str, value: Any) -> None:
        """Store a value of plain data under a key; `study_record` names the keys."""
        with optuna_errors(self._url):
            self._study.set_user_attr(key, value)

    def recall(self, key: str) -> Any:
        """Return the value stored under this key, or None."""
        return self.attributes().get(key)

    @retry_on_outage
    def attributes(self) -> dict[str, Any]:
        """Return all stored values by key."""
        with optuna_errors(self._url):
            return dict(self._study.user_attrs)

    def repair(
        self, settle: Callable[[int], bool], workers: Callable[[], Collection[str]] = tuple
    ) -> int:
        """End trials that a killed session left running: finish them, or queue them again.

        Args:
            settle: Finishes the trial of this number if the result of its probe is stored, and
                returns whether the result is stored.
            workers: The names of the live workers, whose trials are not changed. A trial without a
                worker's name is left unchanged for UNNAMED_S seconds, because its worker may just
                have begun it.

        Returns:
            The number of trials that were queued again.
        """
        num_queued = 0
        unnamed_since = dict[int, float]()
        now = time.monotonic()
        running = self._trials_in_state(TrialState.RUNNING)
        # The live workers are read after the running trials. So if a running trial's worker is
        # alive, `live` contains it.
        live = workers()
        for trial in running:
            worker = trial.user_attrs.get("worker")
            if worker in live:
                continue
            since = self._unnamed_since.get(trial.number, now)
            if worker is None and len(live) > 1 and now - since < UNNAMED_S:
                unnamed_since[trial.number] = since
            elif not settle(trial.number):
                num_queued += self.give_back(trial.number)

        self._unnamed_since = unnamed_since
        return num_queued

    @retry_on_outage
    def enqueue(self, chosen: dict[str, Any]) -> None:
        """Queue a choice, {knob: value}, for the next worker that asks for a trial."""
        with optuna_errors(self._url):
            self._study.enqueue_trial(chosen)

    def hold(self, params: dict[str, Any]) -> None:
        """From now on, propose only configurations with the knob values in `params`."""
        with _without_experimental_warnings():
            self._study.sampler = optuna.samplers.PartialFixedSampler(params, self._study.sampler)

    def is_waiting(self) -> bool:
        """Whether the queue holds a trial."""
        return bool(self._trials_in_state(TrialState.WAITING))

    def has_unfinished(self) -> bool:
        """Whether any trial is queued or running."""
        return bool(self._trials_in_state(TrialState.WAITING, TrialState.RUNNING))

    def close_queue(self) -> None:
        """Mark the queued trials as failed, so that no worker begins them.

        A resumed study queues them again (`reopen_queue`).
        """
        for trial in self._trials_in_state(TrialState.WAITING):
            self._postpone(trial.number)

    @retry_on_outage
    def _postpone(self, number: int) -> None:
        with (
            optuna_errors(self._url),
            contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError),
        ):
            trial_id = self._trial(number)._trial_id
            storage = self._study._storage  # Optuna has no public way to end a queued trial
            storage.set_trial_user_attr(trial_id, POSTPONED, True)
            storage.set_trial_user_attr(trial_id, "reason", TOO_LATE)
            # Optuna cannot copy a study that has a finished trial which never ran.
            storage.set_trial_state_values(trial_id, TrialState.RUNNING)
            self._finish(number, TrialState.FAIL)

    def reopen_queue(self) -> int:
        """Queue again the choices that earlier sessions had no time to try; return their number.

        Choices that have been tried in the meantime are left out.
        """
        others = (TrialState.WAITING, TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)
        known = [_chosen_values(trial) for trial in self._trials_in_state(*others)]
        num_queued = 0
        for trial in self._trials_in_state(TrialState.FAIL):
            chosen = _chosen_values(trial)
            if trial.user_attrs.get(POSTPONED) and chosen not in known:
                self.enqueue(chosen)
                known.append(chosen)
                num_queued += 1
        return num_queued

    @retry_on_outage
    def ask(self, wanted: dict[str, Any] | None = None, *, worker: str = "") -> Proposal:
        """Begin a trial of the choice `wanted`.

        A choice is {knob: value}. Without `wanted`, the trial takes the next choice in the queue
        or, if the queue is empty, the sampler's proposal.
        """
        if self._is_asking:
            # The last call of this method was interrupted and may have left a running trial behind.
            for trial in self._trials_in_state(TrialState.RUNNING):
                if (
                    worker
                    and trial.user_attrs.get("worker") == worker
                    and trial.number not in self._own_trials
                ):
                    self.give_back(trial.number)

        self._is_asking = True
        proposal = None
        # The loop repeats if another worker considered this worker dead, and put the trial back
        # into the queue.
        while proposal is None:
            with (
                optuna_errors(self._url),
                contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError),
            ):
                if wanted is None:
                    proposal = self._propose(self._study.ask(), worker)
                else:
                    proposal = self._propose(self._begin(wanted, worker), "")

        self._is_asking = False
        return proposal

    def _propose(self, trial: optuna.Trial, worker: str) -> Proposal:
        """Let a trial choose a value for each knob that has an effect."""
        if worker:
            trial.set_user_attr("worker", worker)
        chosen: dict[str, Any] = {}
        for knob in self._space.knobs:
            if not knob.is_active(chosen):
                continue
            values = knob.possible(chosen)
            if len(values) == 1 < len(knob.choices()):
                chosen[knob.name] = values[0]  # the values of earlier knobs allow only this value
            elif knob.low is not None and knob.high is not None:
                chosen[knob.name] = trial.suggest_int(knob.name, knob.low, knob.high, log=knob.log)
            else:
                chosen[knob.name] = trial.suggest_categorical(knob.name, knob.values)

        config = self._space.config(chosen)
        trial.set_user_attr("config", config.as_dict())
        self._own_trials[trial.number] = trial
        return Proposal(number=trial.number, config=config)

    def _begin(self, wanted: dict[str, Any], worker: str) -> optuna.Trial:
        """Begin a trial of this choice.

        Optuna's public functions can only queue the choice, and another worker could take it from
        the queue. So this method uses private functions of Optuna.
        """
        known = {
            name: distribution(knob)
            for name in wanted
            if (knob := self._space.knob(name)) is not None
        }

        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params={name: wanted[name] for name in known},
            distributions=known,
            user_attrs={"worker": worker} if worker else {},
        )

        study = self._study
        # Clear the cache of trials, as `Study.ask` does. Otherwise the sampler misses the latest
        # trials.
        study._thread_local.cached_all_trials = None
        return optuna.Trial(
            study, study._storage.create_new_trial(study._study_id, template_trial=template)
        )

    @retry_on_outage
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
        """Finish a trial. If one of `margins` is positive, the trial is infeasible.

        Returns False if another worker considered this worker dead, and put the trial back into the
        queue. The trial then stays in the queue.
        """
        with (
            optuna_errors(self._url),
            contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError),
        ):
            trial = self._own_trials.pop(number, None)
            if trial is None:  # a killed session began it; Optuna has no public way to get the id
                trial = optuna.trial.Trial(self._study, self._trial(number)._trial_id)

            state = self._trial(number).state
            if state.is_finished():
                return state is not TrialState.FAIL

            # A killed session may have set some constraints. Each access to the constraints queries
            # the database, so they are read once.
            known = trial.constraints
            for key, margin in margins.items():
                if math.isfinite(margin) and key not in known:
                    trial.set_constraint(key, margin)

            trial.set_user_attr("outcome", outcome.value)
            trial.set_user_attr("reused", reused)
            if reason:
                trial.set_user_attr("reason", reason[:MAX_REASON])

            if value is not None and math.isfinite(value):
                if outcome is Outcome.OK:
                    return self._finish(number, TrialState.COMPLETE, value)
                # If the outcome is SLOW, the predicted value shows the sampler how far the trial is
                # from the best trial.
                trial.report(value, step=0)
            return self._finish(number, TrialState.PRUNED)
        return False

    def _finish(self, number: int, state: TrialState, value: float | None = None) -> bool:
        """Finish a trial in Optuna and return True, or False if another worker was quicker.

        If another worker was quicker, Optuna raises one of two exceptions.
        """
        try:
            self._study.tell(number, value, state)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            return False
        return True

    @retry_on_outage
    def withdraw(self, number: int) -> bool:
        """Mark a trial as failed, so that it is ignored.

        Returns False if another worker was quicker.
        """
        # If the connection breaks, `retry_on_outage` calls this method again. The first call may
        # then have marked the trial as failed already.
        again = number in self._withdrawn
        self._withdrawn.add(number)
        with optuna_errors(self._url):
            self._own_trials.pop(number, None)
            return self._finish(number, TrialState.FAIL) or again

    def give_back(self, number: int) -> bool:
        """Put an unfinished trial back into the queue, as a new trial.

        Returns False if another worker has put it back already.
        """
        chosen = _chosen_values(self._trial(number))
        if not self.withdraw(number):
            return False
        if chosen:
            self.enqueue(chosen)
        return True

    def finished_numbers(self) -> set[int]:
        """Return the numbers of the trials with an outcome."""
        return {
            trial.number for trial in self._trials_in_state(TrialState.COMPLETE, TrialState.PRUNED)
        }

    def finished(self) -> list[FinishedTrial]:
        """Return the trials with an outcome in the order of their numbers.

        Trials that were given back are left out. Raises StorageError.
        """
        trials = self._trials_in_state(TrialState.COMPLETE, TrialState.PRUNED)
        return [_to_finished_trial(trial) for trial in trials if "config" in trial.user_attrs]

    @retry_on_outage
    def record(self) -> tuple[dict[str, Any], list[FrozenTrial]]:
        """Return Optuna's record of the study: its attributes, and its trials in any state."""
        with optuna_errors(self._url):
            return dict(self._study.user_attrs), self._study.get_trials(deepcopy=False)

    @retry_on_outage
    def _trials_in_state(self, *states: TrialState) -> list[FrozenTrial]:
        with optuna_errors(self._url):
            trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False, states=states)
        return trials

    @retry_on_outage
    def _trial(self, number: int) -> FrozenTrial:
        with optuna_errors(self._url):
            return self._study.get_trials(deepcopy=False)[number]


def _chosen_values(trial: FrozenTrial) -> dict[str, Any]:
    """Return the values with which a trial was queued, and the values chosen for it so far."""
    chosen: dict[str, Any] = trial.system_attrs.get("fixed_params", {}) | trial.params
    return chosen


def _to_finished_trial(trial: FrozenTrial) -> FinishedTrial:
    """Convert a trial to a FinishedTrial. Raises StorageError if its attributes are invalid."""
    try:
        return FinishedTrial(
            number=trial.number,
            config=TrainConfig(**trial.user_attrs["config"]),
            outcome=Outcome(trial.user_attrs.get("outcome", Outcome.CRASH)),
            value=trial.value if trial.state is TrialState.COMPLETE else None,
            reused=bool(trial.user_attrs.get("reused")),
            reason=trial.user_attrs.get("reason"),
        )
    except (TypeError, ValueError) as error:
        raise StorageError(
            f"trial {trial.number} of the study cannot be read: {error}", remedy=OTHER
        ) from None


def distribution(knob: Knob) -> BaseDistribution:
    """Return the Optuna distribution of a knob.

    A list of ordered integers stays categorical, because it may have gaps.
    """
    if knob.low is not None and knob.high is not None:
        return IntDistribution(knob.low, knob.high, log=knob.log)
    return CategoricalDistribution(knob.values)


@contextlib.contextmanager
def _without_experimental_warnings() -> Iterator[None]:
    """Silence Optuna's warnings about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield

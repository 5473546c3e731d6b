"""The trials of a study that several workers share.

A worker begins a trial, records its result and reads the results of other workers. This module also
decides when a search stops: if the user asks for it, if the time or the number of trials is used
up, or if many trials in a row brought no improvement.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.prediction.projection import run_tokens_per_s
from autotune.prediction.step_time import estimate_step_time
from autotune.problem.performance import margins
from autotune.problem.search_space import SearchSpace
from autotune.problem.task import Task
from autotune.study.evaluator import Evaluation, Evaluator, Pruner
from autotune.study.formula_seeds import formula_speed
from autotune.study.history import restore, to_record
from autotune.study.neighbours import COMPILED, neighbours
from autotune.study.optimizer import Optimizer, Proposal
from autotune.study.selection import Selection
from autotune.study.storage.leases import Coordinator, SingleWorker
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.storage.study_record import Limits
from autotune.study.summary import TrialRecord

AWAIT_S = 0.2
REAP_EVERY_S = 15.0

WHOLE_SHARE = 0.1  # the search spends at most this share of the budget on probes of whole models
BASELINE_SHARE = 0.2  # all probes of baselines take at most this share of the budget
CONFIRMATION_SHARE = 0.15  # at most this share of the budget is reserved for the confirmation
# If the confirmation of a single configuration needs more than CONFIRMATION_SHARE of the budget, up
# to this share of the budget is reserved for the confirmation.
LEAST_SHARE = 1 / 3

# The next three constants are numbers of candidates.
MANY = 15  # a search should evaluate at least this number of candidates
# If the time is too short for this number of candidates, untried configurations near the best one
# are tried in place of the sampler's proposals.
PLENTY = 40
ENOUGH = 12  # time is reserved for the confirmation once this number of candidates is evaluated
COMPILING_S = 5.0  # the assumed time to compile one candidate

# Seeds are compiled at once if the search has time for this number of compiled candidates, and
# other processes compile the code of the candidates that follow.
SEEDS = 3

# If time is short, a candidate is tried only if its score, predicted by the formula, is at least
# this share of the best configuration's predicted score.
WORTH = 0.5
# A candidate whose code is compiled already is tried early if its predicted score is at least this
# share of the best configuration's predicted score.
ALIKE = 0.9

# The time reserved for a probe of the confirmation is this multiple of its predicted time.
LATE = 1.2
LEAST_NOISE = 0.005  # the smallest relative noise that a score is assumed to have
# The key of the study's attribute that lists which trials belong to coordinate searches.
COORDINATE_TRIALS = "climbed"


@dataclass(slots=True, kw_only=True)
class SharedTrials:
    """The trials of one study as one of its workers sees them, and the limits of this worker.

    The budget begins at `started`, in seconds of `clock`. The limit on trials covers all workers
    and sessions.

    - `rows` holds the finished trials of all workers, and `selection` all measurements of each
      configuration.
    - `too_short_for` lists, in words, the parts of the study that the budget was too short for.
    - If `rank` is set, untried configurations of this LoRA rank are proposed first.
    - `kept_s` seconds of the search time are reserved for searches with other GPU counts.
    - `new_rows` returns the results that other workers stored since the last call.
    - `on_begin` is called when this worker begins to probe a trial. `on_trial` is called with every
      trial that this worker finished, and `on_trial_of_others` with every trial of other workers.
    - `exempt` holds the numbers of the trials of coordinate search, which the limit on trials
      without an improvement ignores.
    - `moving` has the knob that coordinate search is changing, and the configuration that this
      change starts from.
    - `compiles_ahead` is True if other processes compile the code of later candidates.
    - `is_compiled` says whether the code of a configuration with compiled layers exists already,
      because of an earlier trial or of compilation in advance.
    """

    task: Task
    optimizer: Optimizer
    evaluator: Evaluator
    limits: Limits
    started: float
    coordinator: Coordinator = field(default_factory=SingleWorker)
    say: Callable[[str], None] = lambda text: None
    should_stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    new_rows: Callable[[], list[StoredProbe]] = list
    on_begin: Callable[[int, TrainConfig], None] = lambda number, config: None
    on_trial: Callable[[TrialRecord], None] = lambda row: None
    on_trial_of_others: Callable[[TrialRecord], None] = lambda row: None
    rows: list[TrialRecord] = field(default_factory=list)
    selection: Selection = field(init=False)
    too_short_for: list[str] = field(default_factory=list)
    rank: int | None = None
    exempt: set[int] = field(default_factory=set)
    moving: tuple[str, TrainConfig] | None = None
    compiles_ahead: bool = False
    is_compiled: Callable[[TrainConfig], bool] = lambda config: False
    kept_s: float = 0.0
    # The numbers of the trials that other workers finished.
    _by_others: set[int] = field(default_factory=set)
    # This worker's unfinished trials: number -> config digest.
    _open: dict[int, str] = field(default_factory=dict)
    # The results of other workers by trial number, and the numbers of the trials among them that
    # are not finished in Optuna yet.
    _results_of_others: dict[int, ProbeResult] = field(default_factory=dict)
    _unfinished_numbers: set[int] = field(default_factory=set)
    # True if another worker was trying a configuration when this worker last asked for a trial.
    _met_others: bool = False
    _reap_at: float = 0.0
    _promises: dict[TrainConfig, float] = field(default_factory=dict)
    # Chooses among configurations with equally few changes; no cryptographic strength is needed.
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311

    def __post_init__(self) -> None:
        self.selection = Selection(self.task)

    def resume(self, stored: list[StoredProbe]) -> None:
        """Take over earlier sessions' results, and finish or queue interrupted trials."""
        self._results_of_others = {
            row.trial: row.result
            for row in stored
            if row.trial is not None and row.result.depth is None
        }

        for row in stored:
            self.evaluator.learn(row.trial, row.result)
        num_queued = self.optimizer.repair(self._settle, self.coordinator.workers)

        self.rows, self.selection = restore(self.task, self.optimizer.finished(), stored)
        self._unfinished_numbers = self._results_of_others.keys() - {
            row.number for row in self.rows
        }
        self.exempt = set(self.optimizer.recall(COORDINATE_TRIALS) or ())

        if self.rows:
            self.say(
                f"trials: {len(self.rows)} done already, {num_queued} interrupted and queued again"
            )

    def begin(self, tried: list[TrainConfig]) -> None:
        """Queue the first trials of the search.

        A new study queues the configurations in `tried`, which were probed before the search began.
        Their results are stored, so their trials need no probe. A resumed study queues again the
        trials for which its earlier sessions had no time.
        """
        for config in () if self.rows else tried:
            self.optimizer.enqueue(self.task.space.clip(config))

        if not self.is_done() and (num_queued := self.optimizer.reopen_queue()):
            self.say(f"trials that did not begin in time, queued again: {num_queued}")

    def run_one(
        self, pruner: Pruner | None, wanted: dict[str, Any] | None = None
    ) -> TrialRecord | None:
        """Run a trial of the choice `wanted`, or of the next proposal; return the trial's record.

        Returns None if this worker has no trial left to run.
        """
        proposal = self.ask(wanted)
        if proposal is None:
            return None
        return self.evaluate(proposal, pruner)

    def evaluate(
        self, proposal: Proposal, pruner: Pruner | None, *, whole: bool = True
    ) -> TrialRecord:
        """Evaluate a trial that has begun, and record it.

        If `whole` is True, the whole model may be measured. The baseline is evaluated on models
        with few layers if possible, because its whole model is measured at the end of the study.
        """
        self.on_begin(proposal.number, proposal.config)
        spare_s = self.spare_s() if whole and proposal.config not in self.task.baselines else 0.0
        return self.record(
            proposal,
            self.evaluator.evaluate(proposal.config, proposal.number, pruner, spare_s=spare_s),
        )

    def ask(self, wanted: dict[str, Any] | None = None) -> Proposal | None:
        """Begin a trial of the choice `wanted`, or of the next proposal.

        No two workers run the same configuration. A proposed configuration is replaced by an
        untried one if another worker is trying it, or if its trial would take longer than the time
        left for the search. A `wanted` choice is never replaced. Returns None if no configuration
        is left to try, or if the maximum number of trials is reached.
        """
        self.sync()
        taken = self.coordinator.leased_digests()
        self._met_others = self._met_others or not taken <= set(self._open.values())
        if self._is_full(lambda: len(taken)):
            return None

        proposal = self.optimizer.ask(wanted, worker=self.coordinator.name)
        digest = proposal.config.digest
        if not self.coordinator.take(digest, proposal.number):
            self._met_others = True
            self.optimizer.withdraw(proposal.number)
            other = self.pick_untried() if wanted is None else None
            return None if other is None else self.ask(other)
        self._open[proposal.number] = digest

        if self.rows and self.duration_predictor()(proposal.config) > self.candidate_s():
            self.optimizer.withdraw(proposal.number)
            self.coordinator.drop(self._open.pop(proposal.number))
            other = self.pick_untried() if wanted is None else None
            return None if other is None else self.ask(other)

        if self._is_full(lambda: self.coordinator.count_ahead(digest)):
            self.give_back(proposal.number)
            return None
        return proposal

    def _is_full(self, num_open: Callable[[], int]) -> bool:
        """Whether the finished and unfinished trials have reached the maximum number of trials."""
        maximum = self.limits.trials
        return (
            maximum is not None and num_open() + len(self.optimizer.finished_numbers()) >= maximum
        )

    def record(self, proposal: Proposal, evaluation: Evaluation) -> TrialRecord:
        """Finish a trial with its result, which is stored already.

        If this call fails, `Optimizer.repair` finishes the trial later with the stored result.
        """
        digest = self._open.pop(proposal.number)
        counts = self._finish(proposal.number, evaluation)
        self.coordinator.drop(digest)
        row = self._add(proposal.number, evaluation, counts=counts)
        if counts:
            self.on_trial(row)
        return row

    def give_back(self, number: int) -> None:
        """Put an unfinished trial of this worker back into the queue."""
        self.optimizer.give_back(number)
        self.coordinator.drop(self._open.pop(number))

    @contextmanager
    def return_trials_on_failure(self) -> Iterator[None]:
        """Put unfinished trials back into the queue if the `with` block fails.

        The exception is then raised again, except Cancelled, which only ends the block.
        """
        try:
            yield
        except BaseException as error:
            for number in list(self._open):
                self.give_back(number)
            if not isinstance(error, Cancelled):
                raise
            self.record_omission("the whole search")

    def best(self, num_gpus: int | None = None) -> TrialRecord | None:
        """Return the best finished trial, measured or extrapolated.

        With `num_gpus`, only trials on this number of GPUs count.
        """
        rows = [
            row
            for row in self.rows
            if row.outcome is Outcome.OK and row.tokens_per_second is not None
        ]
        return max(
            (row for row in rows if num_gpus in (None, row.config.num_gpus)),
            key=self.score,
            default=None,
        )

    def score(self, row: TrialRecord) -> float:
        """The value that the search maximizes; 0 for a trial without a speed."""
        return self.task.score(row.config, row.tokens_per_second) if row.tokens_per_second else 0.0

    def open_outcomes(self) -> dict[str, Outcome]:
        """Return {digest: OK} of this worker's unfinished trials, as if they had succeeded."""
        return dict.fromkeys(self._open.values(), Outcome.OK)

    def digests(self) -> set[str]:
        """The digests of the configurations of all finished trials."""
        return {row.config.digest for row in self.rows}

    def pick_untried(
        self, *, keep_s: float = 0.0, promising: bool = True, **pinned: Any
    ) -> dict[str, Any] | None:
        """Return an untried choice that differs least from the best configuration.

        The choice's predicted time is at most the time left for the search, minus `keep_s`. If time
        is short and `promising` is True, choices whose code is compiled already come first, in the
        order of the scores that the formula predicts. The result is then None if every choice's
        predicted score is less than half of the best configuration's predicted score. `pinned`
        fixes the values of some knobs; the space must contain these values.
        """
        best = self.best()
        space = self.task.space
        for name, value in pinned.items():
            space = space.pin(name, value)

        groups = self._nearest(space, best.config if best else None, self.candidate_s() - keep_s)
        if best is None or not promising or not self.lacks_plenty():
            return next((self._random.choice(near) for near in groups if near), None)

        fallback = None
        best_promise = self.promise(best.config)
        for near in groups:
            promised = [(self.promise(space.config(chosen)), chosen) for chosen in near]
            alike = [one for one in promised if one[0] >= ALIKE * best_promise]
            ready = [one for one in alike if self._is_ready(space.config(one[1]))]
            if ready or fallback is not None:
                # `fallback` is from the previous group, whose configurations have fewer changes,
                # but no compiled code. Only one more group is searched for a configuration with
                # compiled code.
                return max(ready, key=lambda one: one[0])[1] if ready else fallback

            worth = [one for one in promised if one[0] >= WORTH * best_promise]
            if worth:
                fallback = max(worth, key=lambda one: one[0])[1]
        return fallback

    def _nearest(
        self, space: SearchSpace, centre: TrainConfig | None, most_s: float
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield groups of untried choices that take at most `most_s` seconds, the nearest first.

        The nearest choices differ from `centre` in the fewest knobs.
        """
        seen = self.coordinator.leased_digests() | self.digests() | set(self._open.values())
        lasts_s = self.duration_predictor()
        while nearest := neighbours(space, centre, seen, self.rank):
            yield [chosen for chosen in nearest if lasts_s(space.config(chosen)) <= most_s]
            seen |= {space.config(chosen).digest for chosen in nearest}

    def _is_ready(self, config: TrainConfig) -> bool:
        """Whether a configuration needs no compilation."""
        return config.compile == "none" or self.is_compiled(config)

    def promise(self, config: TrainConfig) -> float:
        """The score that the formula predicts for the configuration, or 0 without a prediction.

        Each score is computed only once.
        """
        if config not in self._promises:
            speed = formula_speed(self.task, config)
            self._promises[config] = self.task.score(config, speed) if speed else 0.0
        return self._promises[config]

    def await_others(self) -> bool:
        """Wait a moment if another worker may give a trial back; return whether to ask again.

        Another worker may put its trial back into the queue while any trial is running or queued.
        Also returns True if another worker was trying a configuration when this worker last asked
        for a trial, even if the other worker has finished since.
        """
        met_others = self._met_others
        self._met_others = False
        if (
            not met_others
            and not self.coordinator.leased_digests()
            and not self.optimizer.has_unfinished()
        ):
            return False
        time.sleep(AWAIT_S)
        return True

    def sync(self, *, reap: bool = False) -> None:
        """Take over the results of other workers.

        Every 15 s, or if `reap` is True, the trials of dead workers are also finished or queued
        again.
        """
        for row in self.new_rows():
            self.evaluator.learn(row.trial, row.result)
            if row.trial is not None and row.result.depth is None:
                self._results_of_others[row.trial] = row.result
                self._unfinished_numbers.add(row.trial)

        if reap or self.clock() >= self._reap_at:
            self.reap()

        finished = (
            self._unfinished_numbers & self.optimizer.finished_numbers()
            if self._unfinished_numbers
            else set[int]()
        )
        # A trial that was put back into the queue is not in `finished`, even if its result was
        # stored later.
        for number in sorted(finished):
            self._unfinished_numbers.remove(number)
            self._by_others.add(number)
            self.rows = [row for row in self.rows if row.number != number]
            result = self._results_of_others[number]
            evaluation = Evaluation(result=result, seconds=result.seconds.get("total", 0.0))
            self.on_trial_of_others(self._add(number, evaluation))

    def reap(self) -> None:
        """Finish dead workers' trials whose results are stored; queue their other trials again."""
        if isinstance(self.coordinator, SingleWorker):
            return
        self._reap_at = self.clock() + REAP_EVERY_S
        num_queued = self.optimizer.repair(self._settle, self.coordinator.workers)
        if num_queued:
            self.say(f"trials of a worker that died, queued again: {num_queued}")

    def _settle(self, number: int) -> bool:
        """Finish a dead worker's trial if its result is stored; return whether it is stored."""
        if number not in self._results_of_others:
            return False
        self._finish(number, Evaluation(result=self._results_of_others[number]))
        return True

    def _add(self, number: int, evaluation: Evaluation, *, counts: bool = True) -> TrialRecord:
        """Add a result to the selection and, if `counts` is True, a record of the trial to `rows`.

        `counts` is False if another worker put the trial back into the queue. The result is still
        added to the selection, so the trial's configuration may win.
        """
        row = to_record(number, evaluation, self.task)
        if counts:
            self.rows.append(row)
        self.selection.add_result(evaluation.result, reused=row.is_from_other)
        return row

    def _finish(self, number: int, evaluation: Evaluation) -> bool:
        result = evaluation.result
        speed = run_tokens_per_s(self.task, result)
        return self.optimizer.tell(
            number,
            result.outcome,
            speed and self.task.score(result.config, speed),
            margins(result),
            reused=evaluation.reused,
            reason=result.reason,
        )

    def record_omission(self, what: str) -> None:
        """Record that the budget was too short for a part of the study, which `what` names."""
        if what not in self.too_short_for:
            self.too_short_for.append(what)

    def has_ended(self) -> bool:
        """Whether the budget is used up, or the user asked to stop."""
        return self.should_stop() or self.clock() - self.started >= self.limits.budget_s

    def is_spent(self) -> bool:
        """Whether the time left until the confirmation is too short for another candidate."""
        took = self.evaluator.truncated_s.values() or self.evaluator.whole_s.values()
        return self.candidate_s() <= (statistics.median(took) if took else 0.0)

    def is_over(self) -> bool:
        """Whether no more trials may begin: a limit is reached, or the user asked to stop."""
        return self.should_stop() or self.is_spent() or self._is_full(lambda: len(self._open))

    def is_done(self) -> bool:
        """Whether the search should end. The first trial runs even if the budget is used up."""
        if (
            self.should_stop()
            or self._is_full(lambda: len(self._open))
            or (self.rows and self.is_spent())
        ):
            return True
        return self.num_stale() >= self.limits.patience

    def num_stale(self) -> int:
        """Count the trials since the best score last improved by more than twice the noise.

        Trials without a speed, trials with reused results, trials in `exempt` and trials of other
        workers are not counted.
        """
        best = 0.0
        num_stale = 0
        for row in self.rows:
            if row.tokens_per_second is None or row.reused:
                continue
            improved = False
            if row.outcome is Outcome.OK:
                noise = max(self.selection.noise(row.config), LEAST_NOISE)
                improved = self.score(row) > best * (1 + 2 * noise)
                best = max(best, self.score(row))

            if improved:
                num_stale = 0
            elif row.number not in self.exempt | self._by_others:
                num_stale += 1
        return num_stale

    def left_s(self) -> float:
        """The seconds that are left of the budget."""
        return self.limits.budget_s - (self.clock() - self.started)

    def search_s(self) -> float:
        """The seconds that are left for the search now."""
        return self.left_s() - self._confirmation_s() - self.kept_s

    def candidate_s(self) -> float:
        """The seconds that are left to evaluate candidates.

        Until ENOUGH candidates are evaluated, the time reserved for the confirmation is included.
        """
        enough = not (self.evaluator.truncated_s and self.num_missing(ENOUGH))
        return self.search_s() if enough else self.left_s() - self.kept_s

    def is_hurried(self) -> bool:
        """Whether the time left may be too short for MANY candidates with compiled layers."""
        return self.num_missing() * self.compiled_s() > self.search_s()

    def may_compile_seeds(self) -> bool:
        """Whether the search may begin with compiled seeds.

        If the time may be too short, it may begin with them only if other processes compile too.
        """
        has_time = self.search_s() > SEEDS * self.compiled_s()
        return not self.is_hurried() or (self.compiles_ahead and has_time)

    def lacks_plenty(self) -> bool:
        """Whether the time left may be too short for PLENTY candidates with compiled layers.

        Also True if `is_hurried()` is True.
        """
        compiles = COMPILED in self.task.space.choices("compile")
        return self.is_hurried() or (
            compiles and self.num_missing(PLENTY) * self.compiled_s() > self.search_s()
        )

    def num_missing(self, wanted: int = MANY) -> int:
        """How many more candidates must be evaluated until there are `wanted` candidates."""
        return max(
            wanted - sum(row.outcome is not Outcome.REFUSED for row in self.rows) - len(self._open),
            0,
        )

    def duration_predictor(self) -> Callable[[TrainConfig], float]:
        """Return a function that predicts the seconds to probe a candidate's truncated models.

        A linear regression over the candidates probed so far converts the formula's time of a micro
        batch to the seconds of the probes. The function returns 0 for a candidate that was probed
        already, and if it cannot predict.
        """

        def micro_s(config: TrainConfig) -> float:
            time = estimate_step_time(self.task.model, self.task.workload.mean_row_config(config))
            return 0.0 if time is None else time.micro_s

        known = self.evaluator.truncated_s
        compiled = self.evaluator.compiling_s
        points = [(micro_s(one), took_s - compiled.get(one, 0.0)) for one, took_s in known.items()]
        if len({x for x, _ in points}) < 2:
            return lambda config: 0.0
        line = statistics.linear_regression(*zip(*points, strict=True))

        def lasts_s(config: TrainConfig) -> float:
            own_s = 0.0 if config in known else micro_s(config)
            compiling_s = 0.0 if self._is_ready(config) else COMPILING_S
            return max(line.intercept + line.slope * own_s, 0.0) + compiling_s if own_s else 0.0

        return lasts_s

    def compiled_s(self) -> float:
        """The typical seconds to evaluate a compiled candidate; 0 before the first probe."""
        took = self.evaluator.truncated_s.values()
        return statistics.median(took) + COMPILING_S if took else 0.0

    def spare_s(self) -> float:
        """The seconds that the search may now spend on a probe of one whole model.

        The result is 0 while `lacks_plenty` is True.
        """
        if self.lacks_plenty():
            return 0.0
        unspent_s = WHOLE_SHARE * self.limits.budget_s - sum(self.evaluator.whole_s.values())
        return max(min(unspent_s, self.search_s()), 0.0)

    def affords(self, config: TrainConfig) -> bool:
        """Whether the shortest confirmation of `config` is predicted to fit into the time left."""
        left_s = self.left_s()
        baselines = self.task.baselines
        if config in baselines:
            spent = (self.evaluator.truncated_s, self.evaluator.whole_s)
            spent_s = sum(seconds.get(one, 0.0) for seconds in spent for one in baselines)
            left_s = min(left_s, BASELINE_SHARE * self.limits.budget_s - spent_s)

        took_s = self._short_confirmation_s(config)
        return took_s is None or LATE * took_s <= left_s

    def can_end(self, config: TrainConfig) -> bool:
        """Whether the shortest confirmation of `config` is predicted to end within the budget.

        An unknown duration is taken as 0.
        """
        return (self._short_confirmation_s(config) or 0.0) <= self.left_s()

    def _confirmation_s(self) -> float:
        """The seconds to reserve for confirmation.

        The confirmation measures each finalist and the baseline once, and the winner in every
        round. If the budget is too short to confirm even the likely winner, no time is reserved,
        and the search uses all the time that is left. No time is reserved either after the
        first trial, because a second one says more than a confirmation of the first.
        """
        finalists = self.selection.finalists(self.limits.finalists)
        if not finalists or len(self.rows) == 1 or not self.can_end(finalists[0]):
            return 0.0

        likely = finalists[0]
        baseline = self.selection.baseline()
        others = dict.fromkeys([*finalists[1:], baseline or likely])
        wanted = [likely] * self.limits.rounds + [
            one for one in others if one != likely and self.affords(one)
        ]

        times = [self._short_confirmation_s(config) or 0.0 for config in wanted]
        least_s = min(LATE * times[0], LEAST_SHARE * self.limits.budget_s)
        return min(LATE * sum(times), max(CONFIRMATION_SHARE * self.limits.budget_s, least_s))

    def _short_confirmation_s(self, config: TrainConfig) -> float | None:
        return self.evaluator.confirmation_s(
            config, self.task.workload.run_shape(config).probe_micro_steps
        )

    def confirmed_micro_steps(self, config: TrainConfig) -> int:
        """The number of micro batches in a step of a confirmation.

        The number is reduced if a confirmation with longer steps would take more than half of the
        time left.
        """
        shape = self.task.workload.run_shape(config)
        took_s = self.evaluator.confirmation_s(config, shape.confirmation_micro_steps) or 0.0
        return (
            shape.confirmation_micro_steps
            if 2 * took_s <= self.left_s()
            else shape.probe_micro_steps
        )

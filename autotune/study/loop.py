"""The loop of a study: propose a configuration, evaluate it, record it; then measure the best ones again.

Adapters are passed in: nothing here knows a database, a GPU or a screen. Every result is stored before Optuna gets it,
so that a killed study continues with nothing lost.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from autotune.core.errors import Cancelled
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.performance import AGAIN
from autotune.problem.task import Task
from autotune.study.confirmation import Confirmation, measure_close_calls
from autotune.study.coordinate_search import REMEMBERED_AS, TOO_LARGE, CoordinateSearch, smaller_batches
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.optimizer import Optimizer
from autotune.study.ranking import more_capable
from autotune.study.selection import Selection
from autotune.study.stopping import StoppingRule
from autotune.study.storage.coordinator import Coordinator, SingleWorker
from autotune.study.storage.probe_store import StoredProbe
from autotune.study.storage.study_record import Limits
from autotune.study.summary import TrialRecord

STARTUP = 8  # trials with a number, before which helpers keep to the neighbours of the best


class Study:
    """One session of a study, of the worker that leads it (`run`) or of one that helps (`work`).

    The budget counts from `started`, in seconds of `clock`. `trials` has the trials of all workers; its callbacks may
    be set before the first trial.
    """

    __slots__ = ("_say", "limits", "stopping", "task", "trials")

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        evaluator: Evaluator,
        limits: Limits,
        started: float,
        *,
        coordinator: Coordinator | None = None,
        say: Callable[[str], None] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task = task
        self.limits = limits
        self.trials = SharedTrials(task, optimizer, evaluator, coordinator or SingleWorker(), limits.trials, say, clock)
        self.stopping = StoppingRule(self.trials, limits, started, clock, should_stop)
        self._say = say

    @property
    def rows(self) -> list[TrialRecord]:
        """The finished trials of all workers and sessions."""
        return self.trials.rows

    @property
    def selection(self) -> Selection:
        """What was measured of each configuration."""
        return self.trials.selection

    def resume(self, stored: list[StoredProbe]) -> None:
        """Take over what earlier sessions stored, and settle trials that were interrupted."""
        num_queued = self.trials.resume(stored)
        self.stopping.exempt = set(self.trials.optimizer.remembered(REMEMBERED_AS) or ())
        if self.rows:
            self._say(f"{len(self.rows)} trials are done already, {num_queued} interrupted ones are queued again")

    def begin(self, tried: list[TrainConfig]) -> None:
        """Queue the baselines that were tried before a new study began; their results are stored already."""
        if not self.rows:
            for config in tried:
                self.trials.optimizer.enqueue(self.task.space.clip(config))

    def run(self) -> None:
        """Search until a limit is reached, then try the best with its learning knobs at their most capable.

        Unfinished trials go back to the queue, whatever ends this.
        """
        with self._giving_back():
            while self.trials.optimizer.is_waiting() and not self.stopping.is_done():
                if self.trials.run_one(self.selection.prune_reason) is None:
                    break
            self._search_coordinates()
            self._raise_capability()
            self._sample()
            self._raise_capability()
            measure_close_calls(
                self.selection, self.trials.evaluator, self.stopping.has_ended, self.stopping.is_spent, self._say
            )

    def work(self, is_over: Callable[[], bool]) -> None:
        """Help a study that another session leads: its queue, then neighbours of the best, then the sampler.

        `is_over` returns whether the leader has stopped searching.
        """
        with self._giving_back():
            repeated = False  # whether the last proposal was known already
            while not self.stopping.is_done() and not is_over():
                self._hold_rank()
                wanted, known = None, self.trials.digests()
                num_valued = sum(row.tokens_per_second is not None for row in self.rows)
                if (repeated or num_valued < STARTUP) and not self.trials.optimizer.is_waiting():
                    wanted = self.trials.untried()
                    if wanted is None and repeated:
                        break
                row = self.trials.run_one(self.selection.prune_reason, wanted)
                if row is None and not self.trials.await_others():
                    break
                repeated = row is not None and row.config.digest in known
            self.trials.sync(reap=True)

    def confirm(self) -> None:
        """Measure the finalists again, with the rest of the budget."""
        Confirmation(
            self.task,
            self.selection,
            self.trials.evaluator,
            self.limits.finalists,
            self.limits.rounds,
            self.stopping.has_ended,
            self._say,
        ).run()

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        """Put unfinished trials back into the queue if the block fails. A stop by the user ends the block only."""
        try:
            yield
        except BaseException as error:
            self.trials.give_all_back()
            if not isinstance(error, Cancelled):
                raise

    def _search_coordinates(self) -> None:
        CoordinateSearch(self.trials, self.stopping, self._say).run()

    def _hold_rank(self) -> None:
        """Propose only the LoRA rank that most trials have had, once there is one.

        Their code is compiled: another rank changes speed by 1 to 2 % and costs a compilation for each micro batch
        size. The rank is raised at the end of the search.
        """
        if self.trials.rank is not None or not self.task.space.knob("lora_rank"):
            return
        ranks = [row.config.lora_rank for row in self.rows if row.config.lora_rank]
        if ranks:
            self.trials.rank = statistics.mode(ranks)
            self.trials.optimizer.hold({"lora_rank": self.trials.rank})

    def _sample(self) -> None:
        """Run what the sampler proposes until a limit is reached, or nothing is left to try."""
        trials = self.trials
        had_best = trials.best() is not None
        self._hold_rank()
        while not self.stopping.is_done():
            known = trials.digests()
            row = trials.run_one(self.selection.prune_reason)
            if row is None:
                if not trials.await_others():
                    return
                continue
            if not had_best and trials.best() is not None:  # no baseline succeeded at first
                had_best = True
                self._search_coordinates()
            if row.config.digest in known and not self.stopping.is_done():
                untried = trials.untried()
                if untried is None:
                    others = " or is being tried by another worker" if trials.coordinator.taken() else ""
                    self._say(f"every configuration of the space has been tried{others}")
                    return
                trials.optimizer.enqueue(untried)

    def _raise_capability(self) -> None:
        """Try the best with its learning knobs at their most capable, then with each knob alone.

        With the values that would win by now, other configurations about as fast as the best are tried too: which of
        these is the best is chance, and the winner must not depend on it.
        """
        best = self.trials.best()
        if best is None:
            return
        most, *single = more_capable(self.task.space, best.config)
        for raised in ([most], single):
            for config in raised:
                self._try_sizes(config)
            for config in self._about_as_fast(best):
                self._try_sizes(config)

    def _about_as_fast(self, best: TrialRecord) -> list[TrainConfig]:
        """The three fastest configurations within the error of one probe, with the likely winner's learning knobs."""
        likely = self.selection.finalists(1)
        if not likely:
            return []
        space, min_speed = self.task.space, (best.tokens_per_second or 0.0) * (1 - AGAIN)
        learned = {knob.name: getattr(likely[0], knob.name) for knob in space.knobs if knob.kind == "learning"}
        rows = [row for row in self.rows if row.outcome is Outcome.OK and (row.tokens_per_second or 0.0) >= min_speed]
        raised = [
            space.config(space.clip(replace(row.config, **learned)))
            for row in sorted(rows, key=lambda row: row.tokens_per_second or 0.0, reverse=True)
            if row.config.method == likely[0].method
        ]
        return list(dict.fromkeys(raised))[:3]

    def _try_sizes(self, config: TrainConfig) -> None:
        """Try this configuration and, while it does not fit, ever smaller micro batches of it.

        Without a pruner: the cost of capability is to be measured on whole models, and most candidates are close.
        """
        outcomes = {row.config: row.outcome for row in self.rows}
        for smaller in smaller_batches(self.task.space, config):
            outcome = outcomes.get(smaller)
            if outcome is None:
                if self.stopping.is_over():
                    return
                row = self.trials.run_one(None, self.task.space.clip(smaller))
                outcome = Outcome.OK if row is None else row.outcome  # None: another worker is trying it
            if outcome not in TOO_LARGE:
                return

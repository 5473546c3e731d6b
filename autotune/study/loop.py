"""The loop of a study: propose a configuration, evaluate it, record it; then measure the best ones again.

Adapters are passed in: nothing here knows a database, a GPU or a screen. Every result is stored before Optuna gets it,
so that a killed study continues with nothing lost.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.performance import TIE
from autotune.study.confirmation import confirm_finalists, measure_close_calls
from autotune.study.coordinate_search import TOO_LARGE, CoordinateSearch, smaller_batches
from autotune.study.distributed import SharedTrials
from autotune.study.ranking import more_capable
from autotune.study.summary import TrialRecord

STARTUP = 8  # trials with a number, before which helpers keep to the neighbours of the best


@dataclass(frozen=True, slots=True)
class Study:
    """One session of a study, of the worker that leads it (`run`) or of one that helps (`work`)."""

    trials: SharedTrials

    def run(self) -> None:
        """Search until a limit is reached, then try the best with its learning knobs at their most capable.

        Unfinished trials go back to the queue, whatever ends this.
        """
        trials = self.trials
        with trials.giving_back():
            while trials.optimizer.is_waiting() and not trials.is_done():
                if trials.run_one(trials.selection.prune_reason) is None:
                    break
            self._climb()
            if trials.is_spent():
                trials.cut("the whole search")
            self._raise_capability()
            self._sample()
            self._raise_capability()
            measure_close_calls(trials)

    def work(self, is_over: Callable[[], bool]) -> None:
        """Help a study that another session leads: its queue, then neighbours of the best, then the sampler.

        `is_over` returns whether the leader has stopped searching.
        """
        trials = self.trials
        with trials.giving_back():
            repeated = False  # whether the last proposal was known already
            while not trials.is_done() and not is_over():
                self._hold_rank()
                wanted, known = None, trials.digests()
                num_valued = sum(row.tokens_per_second is not None for row in trials.rows)
                if (repeated or num_valued < STARTUP) and not trials.optimizer.is_waiting():
                    wanted = trials.untried()
                    if wanted is None and repeated:
                        break
                row = trials.run_one(trials.selection.prune_reason, wanted)
                if row is None and not trials.await_others():
                    break
                repeated = row is not None and row.config.digest in known
            trials.sync(reap=True)

    def confirm(self) -> None:
        """Measure the finalists again, with the rest of the budget."""
        confirm_finalists(self.trials)

    def _climb(self) -> None:
        """Coordinate search for each number of GPUs in turn, each in its share of the time that is left."""
        trials, numbers = self.trials, self.trials.task.numbers_of_gpus
        for index, number in enumerate(numbers):
            trials.kept_s = 0.0
            trials.kept_s = max(trials.search_s(), 0.0) * (1 - 1 / (len(numbers) - index))
            CoordinateSearch(trials, number).run()
        trials.kept_s = 0.0

    def _hold_rank(self) -> None:
        """Propose only the LoRA rank that most trials have had, once there is one.

        Their code is compiled: another rank changes speed by 1 to 2 % and costs a compilation for each micro batch
        size. The rank is raised at the end of the search.
        """
        trials = self.trials
        ranks = [row.config.lora_rank for row in trials.rows if row.config.lora_rank]
        if ranks and trials.rank is None and trials.task.space.knob("lora_rank"):
            trials.rank = statistics.mode(ranks)
            trials.optimizer.hold({"lora_rank": trials.rank})

    def _sample(self) -> None:
        """Run what the sampler proposes until a limit is reached, or nothing is left to try."""
        trials = self.trials
        had_best = trials.best() is not None
        self._hold_rank()
        while not trials.is_done():
            known = trials.digests()
            wanted = trials.untried() if trials.lacks_plenty() else None  # the sampler has little to go by yet
            row = trials.run_one(trials.selection.prune_reason, wanted)
            if row is None:
                if not trials.await_others():
                    return
                continue
            if not had_best and trials.best() is not None:  # no baseline succeeded at first
                had_best = True
                self._climb()
            if row.config.digest in known and not trials.is_done():
                untried = trials.untried(promising=False)
                if untried is None:
                    others = " or is being tried by another worker" if trials.coordinator.taken() else ""
                    trials.say(f"every configuration of the space has been tried{others}")
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
        most, *single = more_capable(self.trials.task.space, best.config)
        for raised in ([most], single):
            for config in raised:
                self._try_sizes(config)
            for config in self._about_as_fast(best):
                self._try_sizes(config)

    def _about_as_fast(self, best: TrialRecord) -> list[TrainConfig]:
        """Of all that tie with the best three, with the likely winner's learning knobs.

        Those whose pace the host sets come last, and of the others those with the least memory first.
        """
        likely = next(iter(self.trials.selection.finalists(1)), None)
        if likely is None:
            return []
        space, min_score = self.trials.task.space, self.trials.score(best) * (1 - TIE)
        learned = {knob.name: getattr(likely, knob.name) for knob in space.knobs if knob.kind == "learning"}
        rows = [row for row in self.trials.rows if row.outcome is Outcome.OK and row.config.method == likely.method]
        fast = [row for row in rows if self.trials.score(row) >= min_score]
        host_bound = self.trials.selection.is_host_bound
        fast.sort(key=lambda row: (host_bound(row.config), row.peak_reserved_gib or math.inf))
        return list(dict.fromkeys(space.config(space.clip(replace(row.config, **learned))) for row in fast))[:3]

    def _try_sizes(self, config: TrainConfig) -> None:
        """Try this configuration and, while it does not fit, ever smaller micro batches of it.

        Without a pruner: the cost of capability is to be measured on whole models, and most candidates are close.
        """
        trials = self.trials
        outcomes = {row.config: row.outcome for row in trials.rows}
        for smaller in smaller_batches(trials.task.space, config):
            outcome = outcomes.get(smaller)
            if outcome is None:
                if trials.is_over():
                    return
                row = trials.run_one(None, trials.task.space.clip(smaller))
                outcome = Outcome.OK if row is None else row.outcome  # None: another worker is trying it
            if outcome not in TOO_LARGE:
                return

"""The loop of a study: it tries configurations, records them, and measures the best ones again.

This module uses the database, the GPU and the screen only through interfaces. Every result is
stored before Optuna gets it, so a study that was killed can continue without loss.
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

# A helper is a worker that does not lead the study. Until this number of trials has a speed,
# helpers try configurations near the best trial.
STARTUP = 8


@dataclass(frozen=True, slots=True)
class Study:
    """One session of a study. The leader calls `run`, and a helper calls `work`."""

    trials: SharedTrials

    def run(self) -> None:
        """Search until a limit is reached, and try more capable variants of the best configuration.

        If an exception ends the search, its unfinished trials go back to the queue.
        """
        trials = self.trials
        with trials.return_trials_on_failure():
            self.run_queue()
            self._run_coordinate_searches()
            if trials.is_spent():
                trials.record_omission("the whole search")
            self._raise_capability()
            self._sample()
            self._raise_capability()
            measure_close_calls(trials)

    def run_queue(self) -> None:
        """Run the queued trials, for example the configurations probed before the search began.

        The first trial runs even if the user asked to stop, because its result is usually stored.
        If it is not, its probe ends at once.
        """
        trials = self.trials
        while trials.optimizer.is_waiting() and not (trials.rows and trials.is_done()):
            if trials.run_one(trials.selection.prune_reason) is None:
                break

    def work(self, is_over: Callable[[], bool]) -> None:
        """Try configurations of a study that another session leads.

        First run the queued trials, then try configurations near the best one, and then the
        sampler's proposals. `is_over` returns whether the leader has stopped searching.
        """
        trials = self.trials
        with trials.return_trials_on_failure():
            repeated = False  # True if the last trial's configuration had been tried before
            while not trials.is_done() and not is_over():
                self._hold_rank()
                wanted = None
                known = trials.digests()
                num_valued = sum(row.tokens_per_second is not None for row in trials.rows)
                if (repeated or num_valued < STARTUP) and not trials.optimizer.is_waiting():
                    wanted = trials.pick_untried()
                    if wanted is None and repeated:
                        break

                row = trials.run_one(trials.selection.prune_reason, wanted)
                if row is None and not trials.await_others():
                    break
                repeated = row is not None and row.config.digest in known
            trials.sync(reap=True)

        # The leader may have closed the queue before this worker put its unfinished trial back.
        if is_over():
            trials.optimizer.close_queue()

    def confirm(self) -> None:
        """Measure the finalists again, as far as the budget allows."""
        confirm_finalists(self.trials)

    def _run_coordinate_searches(self) -> None:
        """Run coordinate search for each number of GPUs in turn.

        The time that is left is divided equally among these searches.
        """
        trials = self.trials
        numbers = trials.task.numbers_of_gpus
        for index, number in enumerate(numbers):
            trials.kept_s = 0.0
            trials.kept_s = max(trials.search_s(), 0.0) * (1 - 1 / (len(numbers) - index))
            CoordinateSearch(trials, number).run()
        trials.kept_s = 0.0

    def _hold_rank(self) -> None:
        """Once configurations with LoRA were tried, propose only their most frequent rank.

        The code for this rank is compiled already. Another rank changes the speed by only 1 to 2 %,
        but needs a compilation for each micro batch size. Higher ranks are tried at the end of the
        search.
        """
        trials = self.trials
        ranks = [row.config.lora_rank for row in trials.rows if row.config.lora_rank]
        if ranks and trials.rank is None and trials.task.space.knob("lora_rank"):
            trials.rank = statistics.mode(ranks)
            trials.optimizer.hold({"lora_rank": trials.rank})

    def _sample(self) -> None:
        """Run the sampler's trials until a limit is reached or every configuration was tried."""
        trials = self.trials
        had_best = trials.best() is not None
        self._hold_rank()
        while not trials.is_done():
            known = trials.digests()
            # If time is short, the sampler would have too little data, so an untried configuration
            # near the best one is tried instead.
            wanted = trials.pick_untried() if trials.lacks_plenty() else None
            row = trials.run_one(trials.selection.prune_reason, wanted)

            if row is None:
                if not trials.await_others():
                    return
                continue

            if not had_best and trials.best() is not None:  # no configuration had succeeded before
                had_best = True
                self._run_coordinate_searches()

            if row.config.digest in known and not trials.is_done():
                untried = trials.pick_untried(promising=False)
                if untried is None:
                    others = (
                        " or is being tried by another worker"
                        if trials.coordinator.leased_digests()
                        else ""
                    )
                    trials.say(f"every configuration of the space has been tried{others}")
                    return
                trials.optimizer.enqueue(untried)

    def _raise_capability(self) -> None:
        """Try the best configuration with its learning knobs at their most capable values.

        A learning knob, such as the LoRA rank, changes how much the model can learn. First all
        learning knobs are raised together, then each of them alone. Then the configurations that
        are about as fast as the best one get the learning knobs of the likely winner, and are tried
        too. Chance decides which of these nearly equal configurations is measured as the fastest,
        and the winner must not depend on chance.
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
        """Return up to three configurations that are about as fast as `best`.

        Their learning knobs are set to the likely winner's values. GPU-bound configurations come
        before CPU-bound ones. Among GPU-bound configurations, and among CPU-bound ones, the
        configuration that needs the least memory comes first.
        """
        likely = next(iter(self.trials.selection.finalists(1)), None)
        if likely is None:
            return []
        space = self.trials.task.space
        min_score = self.trials.score(best) * (1 - TIE)
        learned = {
            knob.name: getattr(likely, knob.name) for knob in space.knobs if knob.kind == "learning"
        }

        rows = [
            row
            for row in self.trials.rows
            if row.outcome is Outcome.OK and row.config.method == likely.method
        ]
        fast = [row for row in rows if self.trials.score(row) >= min_score]

        host_bound = self.trials.selection.is_host_bound
        fast.sort(key=lambda row: (host_bound(row.config), row.peak_reserved_gib or math.inf))
        return list(
            dict.fromkeys(space.config(space.clip(replace(row.config, **learned))) for row in fast)
        )[:3]

    def _try_sizes(self, config: TrainConfig) -> None:
        """Try this configuration; while it does not fit, try smaller and smaller micro batches.

        No candidate is pruned; each is measured as a whole model. Most candidates are about as fast
        as the best configuration, so an extrapolation would be too inexact to compare them with it.
        """
        trials = self.trials
        outcomes = {row.config: row.outcome for row in trials.rows}

        for smaller in smaller_batches(trials.task.space, config):
            outcome = outcomes.get(smaller)
            if outcome is None:
                if trials.is_over():
                    return
                row = trials.run_one(None, trials.task.space.clip(smaller))
                # `run_one` returned no row because another worker is trying the configuration.
                outcome = Outcome.OK if row is None else row.outcome
            if outcome not in TOO_LARGE:
                return

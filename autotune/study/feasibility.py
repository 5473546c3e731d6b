"""Before a search, find a configuration that fits in memory: the baseline, if possible."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from autotune.core.errors import NothingFits, UsageError
from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib
from autotune.prediction.projection import run_performance
from autotune.problem.constraints import Narrowing, narrow_to_sharing
from autotune.problem.search_space import SearchSpace, ways_to_fit
from autotune.problem.task import Task
from autotune.study.evaluator import FAILED, Evaluator


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasible:
    """The configurations that were tried before a search.

    `tried` has the first configurations of the study, whose results are stored. If `opens_reserve`
    is True, no configuration of the normal space fits, so the search uses the reserve space, which
    also has knob values that cost quality but save memory. `problem` is the error to raise if no
    configuration fits, and None otherwise.
    """

    tried: list[TrainConfig]
    opens_reserve: bool = False
    problem: NothingFits | None = None


def find_feasible(
    task: Task,
    reserve: SearchSpace,
    evaluator: Evaluator,
    say: Callable[[str], None],
) -> Feasible:
    """Find a configuration that fits: a baseline, or the configuration that needs the least memory.

    If possible, only truncated models with a few layers are probed, because a probe of the whole
    baseline of a large model would take time from the search. Raises Cancelled if the user asked to
    stop, or if the budget is used up.
    """
    tried_configs: list[TrainConfig] = []

    def one_fits(baselines: Iterable[TrainConfig]) -> bool:
        """Try the configurations in order until one fits; return whether one fits."""
        for config in baselines:
            say(f"baseline: {config.label()}")
            tried_configs.append(config)
            result = evaluator.evaluate(config, None, spare_s=0.0).result
            if result.outcome in FAILED:
                # The winner will be compared with the baseline, so the baseline is worth a second
                # try.
                result = evaluator.evaluate(config, None, spare_s=0.0).result
                evaluator.failures_in_a_row = 0

            if result.outcome not in (Outcome.OOM, Outcome.REFUSED):
                return True
            say(f"the baseline does not fit: {result.reason}")
        return False

    # A probe of a baseline that does not fit can take a fifth of the budget. So the baselines that
    # the formula predicts not to fit are probed last. Once a smaller baseline has been measured,
    # most of these baselines are refused without a probe.
    doubtful = list(takewhile(lambda config: not evaluator.should_fit(config), task.baselines))
    fits = one_fits(task.baselines[len(doubtful) :])
    if one_fits(doubtful) or fits:
        return Feasible(tried=tried_configs)

    for space in (task.space, reserve):
        for config in leanest_of(space):
            say(
                "the baseline does not fit; trying the configuration that needs the least memory: "
                f"{config.label()}"
            )
            result = evaluator.evaluate(config, None, spare_s=0.0).result
            opens_reserve = space is reserve and reserve != task.space
            if result.outcome not in (Outcome.OOM, Outcome.REFUSED):
                tried = [config] if opens_reserve else [*tried_configs, config]
                return Feasible(tried=tried, opens_reserve=opens_reserve)
            tried_configs.append(config)
    return Feasible(
        tried=list(dict.fromkeys(tried_configs)),
        opens_reserve=opens_reserve,
        problem=nothing_fits(result, task),
    )


def leanest_of(space: SearchSpace) -> list[TrainConfig]:
    """Return the configuration that needs the least memory for each sharding strategy.

    If the space has no sharding knob, the list has one configuration. If the space has this knob
    and also allows a single GPU, a configuration for one GPU comes first.
    """
    if space.knob("sharding") is None:
        return [space.config(space.leanest())]

    *fewer, most = sorted(space.choices("num_gpus"))
    leanest = [
        space.config(space.pin("num_gpus", number).leanest()) for number in fewer if number == 1
    ]
    for way in sorted(space.choices("sharding"), key=KNOBS["sharding"].memory_rank):
        pinned = space.pin("num_gpus", most).pin("sharding", way)
        narrowing = Narrowing(space=pinned, reserve=pinned)
        # UsageError means that no configuration of the space can use this strategy.
        with suppress(UsageError):
            narrow_to_sharing(narrowing)
            leanest.append(narrowing.space.config(narrowing.space.leanest()))
    return leanest


def nothing_fits(result: ProbeResult, task: Task) -> NothingFits:
    """Return the error which says that no configuration fits.

    The message says how much memory the smallest configuration needs, and its speed if known.
    """
    need = "more memory than is available"
    speed_note = ""
    if result.oom is not None:
        least = fmt_gib(result.oom.allocated_gib + (result.oom.requested_gib or 0.0))
        limit = fmt_gib(result.oom.limit_gib)
        need = f"more than {least} (allocated when memory ran out) of the {limit} available"
        if result.measurement is not None:
            need = f"{least} of the {limit} available (extrapolated from a few layers)"

    if result.measurement is not None:
        speed = run_performance(task, result.config, [result.measurement]).tokens_per_second
        speed_note = f"; it would train {speed:,.0f} tokens/s here if it fitted"

    return NothingFits(
        "nothing in the search space fits: even the configuration that needs the least memory,"
        f" {result.config.label()}, needs {need}{speed_note}",
        remedy=ways_to_fit(result.config),
    )

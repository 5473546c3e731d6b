"""Predict the next configurations of a search, so that their code can be compiled in advance."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Outcome, ProbeRequest, World
from autotune.core.train_config import TrainConfig, digest_of
from autotune.probe.compile_ahead import CompileAhead
from autotune.study.coordinate_search import ORDER, next_move, order_of_moves
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.neighbours import COMPILED, compiled_variants, neighbours
from autotune.study.ranking import more_capable

# At most this number of compilations is requested at a time, because a new best configuration may
# make them useless.
MOST = 8
NOT_IN_LAYERS = ("loss", "loader_workers", "group_by_length", "optimizer_in_backward")


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Requests compilation of likely next configurations whenever a trial begins."""

    trials: SharedTrials
    ahead: CompileAhead

    def begin(self, trying: TrainConfig) -> None:
        """Request compilation of the configurations that may follow this trial."""
        tried = {code_key(config) for config in (trying, *(row.config for row in self.trials.rows))}
        configs = likely_next(self.trials, trying)
        self.ahead.compile_next(
            shallow_requests(self.trials.evaluator, configs, tried | self.ahead.claimed_keys())
        )


def shallow_requests(
    evaluator: Evaluator, configs: Iterable[TrainConfig], known: Container[str] = ()
) -> dict[str, ProbeRequest]:
    """Return requests that compile the code of these configurations, as {key of the code: request}.

    At most MOST requests are returned. Configurations whose code has a key in `known` are left out.
    For several GPUs, one process simulates a rank, whose layers have the code of a real rank.
    """
    requests: dict[str, ProbeRequest] = {}
    for config in configs:
        key = code_key(config)
        if key in known or key in requests:
            continue

        if (request := evaluator.shallowest(config)) is not None:
            requests[key] = replace(request, world=World.FAKE)
        if len(requests) == MOST:
            break
    return requests


def code_key(config: TrainConfig) -> str:
    """Return a key for a configuration's compiled code.

    Two configurations have the same key if the compiled code of their layers is the same.
    """
    others = {name for name, knob in KNOBS.items() if not knob.affects & {"micro_time", "learning"}}
    same = {name: KNOBS[name].default for name in others.union(NOT_IN_LAYERS, ("optimizer",))}
    return digest_of(replace(config, **same).as_dict())


def likely_next(trials: SharedTrials, trying: TrainConfig) -> Iterator[TrainConfig]:
    """Yield untried configurations with compiled layers, the most likely next one first.

    Coordinate search will continue from its current configuration or, if the running trial is
    better, from the configuration of that trial. So the compiled variants of these two
    configurations come first, followed by copies of the two with one changed knob. Outside
    coordinate search, the best configuration so far takes the place of the current one. Next come
    variants of the best configuration that can learn more, for example with a higher LoRA rank.
    Last come configurations similar to the best one, beginning with the configuration that the
    formula predicts to be the fastest.
    """
    space = trials.task.space
    best = trials.best()
    tried = {row.config.digest: row.outcome for row in trials.rows} | trials.open_outcomes()
    if trials.moving is None:
        name = ORDER[0]
        centres = dict.fromkeys((trying, best.config if best else trying))
    else:
        name, current = trials.moving
        centres = dict.fromkeys((current, trying))

    if COMPILED not in space.choices("compile"):
        return

    compiled = compiled_variants(space, centres)
    learned = more_capable(space, best.config) if best else []
    moves = chain(
        compiled,
        _moves([*centres, *compiled], name, trials, tried),
        learned,
        _neighbours(trials, tried),
    )

    for config in moves:
        is_new = config.digest not in tried
        if is_new and config.compile == COMPILED and trials.evaluator.should_fit(config):
            yield config


def _moves(
    centres: list[TrainConfig], name: str, trials: SharedTrials, tried: dict[str, Outcome]
) -> Iterator[TrainConfig]:
    """Yield the configurations that coordinate search would try next.

    Each move changes one knob of one configuration in `centres`. The knob `name` is changed first.
    """
    space = trials.task.space
    order = order_of_moves(trials.selection, centres[0])
    place = order.index(name)
    for knob in (*order[place:], *order[:place]):
        for centre in centres:
            chosen = next_move(space, centre, knob, tried)
            if chosen is not None:
                yield space.config(chosen)


def _neighbours(trials: SharedTrials, tried: dict[str, Outcome]) -> Iterator[TrainConfig]:
    """Yield the compiled configurations with the fewest differences from the best configuration.

    They are sorted by the score that the formula predicts, the best first.
    """
    best = trials.best()
    if best is None:
        return
    space = trials.task.space.pin("compile", COMPILED)
    near = (
        space.config(chosen) for chosen in neighbours(space, best.config, set(tried), trials.rank)
    )
    yield from islice(sorted(near, key=trials.promise, reverse=True), MOST)

"""One coordinate search by hand: trials that answer from a table of speeds stand in for a study."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.probe_types import Outcome, Rung
from autotune.core.train_config import TrainConfig
from autotune.study import coordinate_search as module
from autotune.study.coordinate_search import CoordinateSearch
from autotune.study.evaluator import Evaluation
from autotune.study.optimizer import Proposal
from autotune.study.summary import TrialRecord
from tests.helpers.factories import result
from tests.helpers.sessions import space, subject_of

CHOICES = space(
    micro_batch_size=(2, 4, 8),
    seq_len=(256,),
    lora_rank=(16,),
    loss=("full", "chunked"),
    compile=("none", "per_layer"),
)
START = TrainConfig(micro_batch_size=4, seq_len=256)
CHUNKED, EIGHT, COMPILED = (
    replace(START, loss="chunked"),
    replace(START, micro_batch_size=8),
    replace(START, compile="per_layer", padding="bucket"),
)


class Trials:
    """What a coordinate search asks of a study. A truncated model of `config` predicts
    `speeds[config]`.

    Where that is an outcome, it decides; None predicts nothing.
    """

    def __init__(
        self,
        speeds: dict[TrainConfig, Any] | Callable[[TrainConfig], Any],
        *,
        hurried: bool = False,
    ) -> None:
        self.speed = speeds if callable(speeds) else lambda config: speeds.get(config, 100.0)
        self.task: Any = subject_of(CHOICES)
        self.rows: list[TrialRecord] = []
        self.exempt: set[int] = set()
        self.hurried, self.taken, self.missing = hurried, set[TrainConfig](), 15
        self.asked: list[TrainConfig] = []
        # and whether the whole model might be measured
        self.ended: list[tuple[TrainConfig, bool]] = []
        self.kept: list[tuple[str, list[int]]] = []
        self.said: list[str] = []
        self.left = 100
        self.host_bound = set[TrainConfig]()
        # how many are asked for before a configuration is compiled ahead
        self.ready: dict[TrainConfig, int] = {}
        self.wanted: list[dict[str, Any]] = []
        self.begun: list[tuple[int, TrainConfig]] = []
        self.optimizer = SimpleNamespace(
            remember=lambda key, numbers: self.kept.append((key, numbers))
        )
        self.selection = SimpleNamespace(
            predicted_speed=lambda config, found: found,
            prune_reason="the pruner",
            is_host_bound=lambda config: config in self.host_bound,
        )
        self.evaluator = SimpleNamespace(evaluate_low_fidelity=self.low, evaluate=self.whole)
        self.add(START, 1000.0)

    def add(
        self, config: TrainConfig, speed: float | None, outcome: Outcome = Outcome.OK
    ) -> TrialRecord:
        made = TrialRecord(
            number=len(self.rows),
            config=config,
            outcome=outcome,
            rung=Rung.FULL,
            tokens_per_second=speed,
        )
        self.rows.append(made)
        return made

    def low(self, config: TrainConfig, number: int) -> Any:
        found = self.speed(config)
        return Evaluation(result=result(config, found)) if isinstance(found, Outcome) else found

    def whole(self, config: TrainConfig, number: int) -> Evaluation:
        return Evaluation(result=result(config, Outcome.OK))

    def ask(self, chosen: dict[str, Any]) -> Proposal | None:
        config = self.task.space.config(chosen)
        if config in self.taken:
            return None
        self.asked.append(config)
        self.left -= 1
        return Proposal(number=10 + len(self.asked), config=config)

    def record(self, proposal: Proposal, evaluation: Evaluation) -> TrialRecord:
        outcome = evaluation.result.outcome
        return self.add(proposal.config, 700.0 if outcome is Outcome.OK else None, outcome)

    def evaluate(self, proposal: Proposal, pruner: Any, *, whole: bool = True) -> TrialRecord:
        assert pruner == "the pruner"
        self.ended.append((proposal.config, whole))
        return self.add(proposal.config, self.speed(proposal.config))

    def best(self, num_gpus: int | None = None) -> TrialRecord | None:
        rows = [
            row
            for row in self.rows
            if row.outcome is Outcome.OK and num_gpus in (None, row.config.num_gpus)
        ]
        return max(rows, key=self.score, default=None)

    def score(self, row: TrialRecord) -> float:
        return row.tokens_per_second or 0.0

    def pick_untried(self, *, keep_s: float = 0.0, **pinned: Any) -> dict[str, Any] | None:
        self.wanted.append(pinned | {"keep_s": keep_s})
        return None

    def is_done(self) -> bool:
        return self.left <= 0

    def may_compile_seeds(self) -> bool:
        return not self.hurried

    def num_missing(self) -> int:
        return self.missing

    def on_begin(self, number: int, config: TrainConfig) -> None:
        self.begun.append((number, config))

    def compiled_s(self) -> float:
        return 7.0

    def is_compiled(self, config: TrainConfig) -> bool:
        return len(self.asked) >= self.ready.get(config, 1000)

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The formula seeds: none, unless a test adds some."""
    found: list[TrainConfig] = []
    monkeypatch.setattr(module, "formula_seeds", lambda task, config, limit_gib: iter(found))
    return found


def ran(trials: Trials) -> list[TrainConfig]:
    CoordinateSearch(trials, 1).run()  # type: ignore[arg-type]
    return trials.asked


def first_pass(trials: Trials, **options: Any) -> list[TrainConfig]:
    best = trials.best()
    assert best is not None
    search = CoordinateSearch(trials, 1)  # type: ignore[arg-type]
    search._tried = {row.config.digest: row.outcome for row in trials.rows}
    search._pass_over_knobs(best, **options)
    return trials.asked


@pytest.mark.parametrize(("speed", "moves"), [(989.0, False), (991.0, True)])
def test_the_same_in_less_memory_is_taken_unless_it_is_over_a_percent_slower(
    speed: float, moves: bool
) -> None:
    chunked, then = first_pass(Trials({CHUNKED: speed}))[:2]
    assert chunked == CHUNKED
    assert then == (replace(CHUNKED, micro_batch_size=8) if moves else EIGHT)


@pytest.mark.parametrize(("speed", "moves"), [(1009.0, False), (1011.0, True)])
def test_others_are_taken_for_over_a_percent_more(speed: float, moves: bool) -> None:
    """After 8, which is the largest, 2 is tried from 4 alone; then the layers are compiled of where
    the search is.
    """
    tried = first_pass(Trials({EIGHT: speed}))
    at = EIGHT if moves else START
    assert tried == [
        CHUNKED,
        EIGHT,
        *([] if moves else [replace(START, micro_batch_size=2)]),
        replace(COMPILED, micro_batch_size=at.micro_batch_size),
    ]


def test_without_formulas_the_seed_of_a_mixture_is_compiled_with_grouped_products() -> None:
    """The formulas know the speed of other models; those without experts have no such seed."""
    trials = Trials({})
    knobs = {knob.name: knob.values for knob in CHOICES.knobs}
    trials.task = subject_of(space(**knobs, lora_kernels=("peft", "grouped")))
    seed = replace(COMPILED, loss="chunked", lora_kernels="grouped", micro_batch_size=8)
    assert ran(trials)[0] == seed
    assert ran(Trials({}))[0] == CHUNKED


def test_a_seed_that_does_not_fit_gets_a_leaner_optimizer_before_a_smaller_micro_batch() -> None:
    largest = replace(COMPILED, loss="chunked", lora_kernels="grouped", micro_batch_size=8)
    lean = replace(largest, optimizer="adamw_8bit")
    smaller = replace(largest, micro_batch_size=4)
    knobs = {knob.name: knob.values for knob in CHOICES.knobs} | {
        "lora_kernels": ("peft", "grouped"),
        "optimizer": ("adamw_torch_fused", "adamw_8bit"),
    }
    trials = Trials({largest: Outcome.OOM})
    trials.task = subject_of(space(**knobs))
    assert ran(trials)[:2] == [largest, lean]

    trials = Trials({largest: Outcome.OOM, lean: Outcome.OOM})
    trials.task = subject_of(space(**knobs))
    tried = ran(trials)
    assert tried[:3] == [largest, lean, smaller]
    # The search continues from the seed that fits, not with another seed.
    assert replace(smaller, micro_batch_size=2) not in tried[3:4]


@pytest.mark.parametrize("is_host_bound", [True, False])
def test_micro_batches_grow_before_less_is_recomputed_if_the_host_sets_the_pace(
    is_host_bound: bool,
) -> None:
    full = replace(START, checkpointing="full")
    trials = Trials({})
    knobs = {knob.name: knob.values for knob in CHOICES.knobs}
    trials.task = subject_of(space(**knobs, checkpointing=("full", "none")))
    trials.rows.clear()
    trials.add(full, 1000.0)
    if is_host_bound:
        trials.host_bound = {full}
    larger, kept = replace(full, micro_batch_size=8), replace(full, checkpointing="none")
    tried = first_pass(trials)
    assert (tried.index(larger) < tried.index(kept)) is is_host_bound


def test_a_knob_may_be_left_out() -> None:
    assert COMPILED not in first_pass(Trials({}), leave_out="compile")
    assert first_pass(Trials({}), leave_out="micro_batch_size") == [CHUNKED, COMPILED]


def test_moves_go_by_what_is_predicted_and_the_best_of_a_pass_is_measured_first() -> None:
    """The speeds of a pass: 991, 1200 (after which 2 is not tried), 1500.

    The next pass has nothing to try.
    """
    whole = (
        replace(CHUNKED, micro_batch_size=8),
        replace(CHUNKED, micro_batch_size=8, compile="per_layer"),
    )
    compiled = replace(whole[1], padding="bucket")
    trials = Trials({CHUNKED: 991.0, whole[0]: 1200.0, compiled: 1500.0})
    assert ran(trials)[:3] == [CHUNKED, whole[0], compiled]
    assert trials.ended[:3] == [(compiled, True), (whole[0], True), (CHUNKED, True)]
    assert trials.said[0] == f"predicted 991 tokens/s: {CHUNKED.label()}"
    assert trials.exempt == {10 + number for number in range(1, len(trials.asked) + 1)}
    assert trials.kept[0] == ("climbed", [11]) and trials.kept[1] == ("climbed", [11, 12])
    assert len(set(trials.asked)) == len(trials.asked)
    assert trials.begun == [
        (10 + number, config) for number, config in enumerate(trials.asked, start=1)
    ]


def test_the_search_ends_where_a_pass_finds_nothing_better() -> None:
    trials = Trials({})
    assert ran(trials) == [CHUNKED, EIGHT, replace(START, micro_batch_size=2), COMPILED]
    assert [whole for _, whole in trials.ended] == [True] * 4
    done = Trials({})
    done.left = 2
    assert ran(done) == [CHUNKED, EIGHT] and len(done.ended) == 2
    nothing = Trials({})
    nothing.rows.clear()
    assert ran(nothing) == []


def test_what_truncated_models_decide_is_recorded_at_once() -> None:
    trials = Trials({CHUNKED: Outcome.OOM, EIGHT: Outcome.REFUSED})
    ran(trials)
    assert [(row.config, row.outcome) for row in trials.rows[1:3]] == [
        (CHUNKED, Outcome.OOM),
        (EIGHT, Outcome.REFUSED),
    ]
    assert CHUNKED not in [config for config, _ in trials.ended]


def test_what_truncated_models_say_nothing_of_is_measured() -> None:
    trials = Trials({CHUNKED: None})
    ran(trials)
    assert (trials.rows[1].config, trials.rows[1].tokens_per_second) == (CHUNKED, 700.0)


def test_what_another_worker_tries_is_left_to_it() -> None:
    trials = Trials({EIGHT: 1500.0})
    trials.taken = {EIGHT}
    assert (
        ran(trials) == [CHUNKED, replace(START, micro_batch_size=2), COMPILED]
        and len(trials.rows) == 4
    )


def test_seeds_come_first_and_what_was_tried_is_not_tried_again(seeds: list[TrainConfig]) -> None:
    seeds += [COMPILED, START, EIGHT]
    trials = Trials({COMPILED: 900.0, EIGHT: 950.0})
    assert ran(trials)[:2] == [COMPILED, EIGHT]
    assert trials.ended[:2] == [(EIGHT, True), (COMPILED, True)] and trials.asked.count(EIGHT) == 1
    done = Trials({})
    done.left = 1
    assert ran(done) == [COMPILED]


def test_in_a_hurry_nothing_is_compiled_and_no_whole_model_measured_at_first(
    seeds: list[TrainConfig],
) -> None:
    """Then the best is compiled, and neighbours of it are asked for while more than two candidates
    are missing.
    """
    seeds += [replace(COMPILED, micro_batch_size=8)]
    trials = Trials({EIGHT: 1500.0}, hurried=True)
    tried = ran(trials)
    assert tried[:3] == [
        EIGHT,
        replace(EIGHT, loss="chunked"),
        replace(EIGHT, compile="per_layer", padding="bucket"),
    ]
    assert [whole for config, whole in trials.ended if config.compile == "none"] == [False, False]
    assert [whole for config, whole in trials.ended if config.compile != "none"] == [True]
    learned = {"seq_len": 256, "lora_rank": 16}
    assert trials.wanted == [learned | {"compile": "none", "keep_s": 14.0}]
    enough = Trials({}, hurried=True)
    enough.missing = 2
    ran(enough)
    assert enough.wanted == []
    nothing = Trials({}, hurried=True)
    nothing.rows.clear()
    assert ran(nothing) == [] and nothing.wanted == []


LARGE = replace(COMPILED, micro_batch_size=8)


@pytest.mark.parametrize(
    ("ready", "first"),
    [
        ({LARGE: 0}, [LARGE]),  # compiled before the first seed
        ({LARGE: 1}, [EIGHT, LARGE]),
        ({LARGE: 2}, [EIGHT, replace(EIGHT, loss="chunked"), LARGE]),
        (
            {replace(LARGE, loss="chunked"): 2},
            [EIGHT, replace(EIGHT, loss="chunked"), replace(LARGE, loss="chunked")],
        ),
    ],
)
def test_in_a_hurry_what_was_compiled_ahead_is_tried_at_once_and_the_moves_begin_there(
    seeds: list[TrainConfig], ready: dict[TrainConfig, int], first: list[TrainConfig]
) -> None:
    seeds += [LARGE]
    speeds = {
        EIGHT: 1500.0,
        replace(EIGHT, loss="chunked"): 1600.0,
        LARGE: 2500.0,
        replace(LARGE, loss="chunked"): 2600.0,
    }
    trials = Trials(speeds, hurried=True)
    trials.ready = ready
    tried = ran(trials)
    assert tried[: len(first)] == first
    assert trials.wanted == []
    assert all(config.compile == "per_layer" for config in tried[len(first) :]) and len(
        tried
    ) > len(first)
    ended = [whole for config, whole in trials.ended if config in first[:2]]
    assert ended == [False] * len(first[:2])


def test_what_was_compiled_ahead_and_is_slower_does_not_end_the_search_without(
    seeds: list[TrainConfig],
) -> None:
    trials = Trials({EIGHT: 1500.0}, hurried=True)
    trials.ready = {COMPILED: 0}
    tried = ran(trials)
    assert tried[:3] == [COMPILED, CHUNKED, EIGHT] and len(trials.wanted) == 1


def test_in_a_hurry_each_neighbour_is_judged_before_the_next_is_chosen() -> None:
    """So is what the pass over the knobs found: neighbours are those of the best by then."""
    trials = Trials({CHUNKED: 1100.0, EIGHT: 1300.0}, hurried=True)
    offers = iter(
        [trials.task.space.clip(config) for config in (EIGHT, replace(START, micro_batch_size=2))]
    )
    best: list[TrainConfig] = []

    def untried(**_: Any) -> dict[str, Any] | None:
        found = trials.best()
        assert found is not None
        best.append(found.config)
        return next(offers, None)

    trials.pick_untried = untried  # type: ignore[method-assign]
    ran(trials)
    assert best == [CHUNKED, EIGHT, EIGHT]

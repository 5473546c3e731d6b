"""Coordinate search: one knob at a time from the best, only
where it may pay, nothing tried twice.
"""

from dataclasses import replace

from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace, shipped_spaces
from autotune.study.coordinate_search import ORDER, next_move, smaller_batches
from tests.helpers.replay import machine
from tests.helpers.sessions import Start, space, subject_of

SPACE = SearchSpace(
    name="small",
    knobs=(
        Knob(name="compile", values=("none", "per_layer")),
        Knob(name="micro_batch_size", values=(1, 2, 4, 8, 16)),
        Knob(name="checkpointing", values=("none", "every_2", "full")),
        Knob(name="lora_rank", low=8, high=64, log=True),
    ),
)
MIDDLE = TrainConfig(micro_batch_size=4, checkpointing="full", lora_rank=16)


def first_moves(here: TrainConfig, name: str, outcome: Outcome) -> list[TrainConfig]:
    """What is tried by one knob while every try ends in `outcome`."""
    tried: dict[str, Outcome] = {here.digest: Outcome.OK}
    found = []
    while (chosen := next_move(SPACE, here, name, tried)) is not None:
        config = SPACE.config(chosen)
        tried[config.digest] = outcome
        found.append(config)
    return found


def test_a_micro_batch_is_tried_larger_then_smaller() -> None:
    sizes = [
        config.micro_batch_size for config in first_moves(MIDDLE, "micro_batch_size", Outcome.SLOW)
    ]
    assert sizes == [8, 2]


def test_a_larger_micro_batch_may_need_an_optimizer_with_less_state() -> None:
    choices: SearchSpace = space(
        micro_batch_size=(2, 4, 8),
        optimizer=("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
    )
    here = TrainConfig(micro_batch_size=4)
    tried = {here.digest: Outcome.OK}
    moves = []
    while (chosen := next_move(choices, here, "micro_batch_size", tried)) is not None:
        moves.append((chosen["micro_batch_size"], chosen["optimizer"]))
        tried[choices.config(chosen).digest] = Outcome.OOM
    assert moves == [(8, "adamw_torch_fused"), (8, "adamw_8bit"), (2, "adamw_torch_fused")]

    larger = replace(here, micro_batch_size=8)
    fits = {here.digest: Outcome.OK, larger.digest: Outcome.SLOW}
    assert (next_move(choices, here, "micro_batch_size", fits) or {})["micro_batch_size"] == 2


def test_less_recomputation_is_tried_once_where_it_fits() -> None:
    assert [one.checkpointing for one in first_moves(MIDDLE, "checkpointing", Outcome.OK)] == [
        "none"
    ]


def test_less_recomputation_is_tried_with_smaller_micro_batches_then_with_more() -> None:
    found = first_moves(MIDDLE, "checkpointing", Outcome.OOM)
    assert [(one.checkpointing, one.micro_batch_size) for one in found] == [
        ("none", 4),
        ("none", 2),
        ("none", 1),
        ("every_2", 4),
        ("every_2", 2),
        ("every_2", 1),
    ]


def test_recomputing_some_layers_is_tried_where_none_took_too_small_a_micro_batch() -> None:
    """Nothing recomputed in rows too few for the device says
    little of half of it in more of them.
    """
    tried = {MIDDLE.digest: Outcome.OK}
    for size, outcome in ((4, Outcome.OOM), (2, Outcome.REFUSED), (1, Outcome.SLOW)):
        tried[replace(MIDDLE, checkpointing="none", micro_batch_size=size).digest] = outcome
    chosen = next_move(SPACE, MIDDLE, "checkpointing", tried)
    assert (
        chosen is not None
        and chosen["checkpointing"] == "every_2"
        and chosen["micro_batch_size"] == 4
    )


def test_nobody_climbs_towards_what_is_slower() -> None:
    fast = replace(MIDDLE, checkpointing="none", compile="per_layer")
    for name in ("checkpointing", "compile"):
        assert first_moves(fast, name, Outcome.OK) == []


def test_eager_attention_is_replaced_first() -> None:
    searched = SPACE.offer("attention", ("eager", "flex_attention"))
    eager = replace(MIDDLE, attention="eager")
    moves = [next_move(searched, eager, name, {}) for name in ORDER]
    first = next(move for move in moves if move is not None)
    assert searched.config(first) == replace(eager, attention="flex_attention")
    flex = replace(eager, attention="flex_attention")
    assert next_move(searched, flex, "attention", {}) is None


def test_learning_knobs_are_not_climbed() -> None:
    assert "lora_rank" not in ORDER and "seq_len" not in ORDER
    for name in ORDER:
        assert all(
            one.lora_rank == MIDDLE.lora_rank for one in first_moves(MIDDLE, name, Outcome.OOM)
        )


def test_nobody_climbs_from_one_quantised_base_to_another() -> None:
    space = SearchSpace.load("everything")
    nf4 = TrainConfig(quantization="nf4", compile="per_layer")
    assert next_move(space, nf4, "quantization", {}) is None
    plain = replace(nf4, quantization="none")
    assert space.config(next_move(space, plain, "quantization", {}) or {}).quantization == "fp8"


def test_every_shipped_space_can_be_climbed() -> None:
    for name in shipped_spaces():
        space = SearchSpace.load(name)
        start = space.config(space.clip(TrainConfig(checkpointing="full")))
        for knob in ORDER:
            chosen = next_move(space, start, knob, {})
            assert chosen is None or space.config(chosen) != start


def test_a_study_climbs_from_its_baseline_to_the_top_of_a_smooth_hill(start: Start) -> None:
    def rate(config: TrainConfig) -> float:
        return (
            1000.0
            * {"none": 1.4, "every_2": 1.2, "full": 1.0}[config.checkpointing]
            * {1: 0.7, 2: 0.9, 4: 1.0, 8: 0.98, 16: 0.9}[config.micro_batch_size]
            * (1.5 if config.compile == "per_layer" else 1.0)
            / (1 + (config.lora_rank or 0) / 1000)
        )

    session = start(
        machine(limit_gib=60.0, rate=rate), task=subject_of(SPACE), begin=[MIDDLE], trials=14
    )
    session.study.run()
    best = session.study.trials.best()
    assert best is not None
    assert (best.config.checkpointing, best.config.micro_batch_size, best.config.compile) == (
        "none",
        4,
        "per_layer",
    )


def test_packing_is_climbed_to_with_the_largest_micro_batch_that_allows_it() -> None:
    here = TrainConfig(micro_batch_size=8)
    choices: SearchSpace = space(micro_batch_size=(1, 2, 4, 8), packing=(False, True))
    choices = choices.condition("packing", "micro_batch_size", (1, 2, 4))
    chosen = next_move(choices, here, "packing", {here.digest: Outcome.OK})
    assert chosen == {"micro_batch_size": 4, "packing": True}
    tried = {here.digest: Outcome.OK, choices.config(chosen).digest: Outcome.OOM}
    assert next_move(choices, here, "packing", tried) == {"micro_batch_size": 2, "packing": True}
    assert next_move(choices, choices.config(chosen), "packing", tried) is None


def test_at_the_ends_of_its_values_a_micro_batch_has_one_neighbour() -> None:
    found = {
        size: [
            one.micro_batch_size
            for one in first_moves(
                replace(MIDDLE, micro_batch_size=size), "micro_batch_size", Outcome.OOM
            )
        ]
        for size in (1, 2, 16)
    }
    assert found == {1: [2], 2: [4, 1], 16: [8]}


def test_smaller_micro_batches_come_after_the_configuration_itself_the_largest_first() -> None:
    assert [one.micro_batch_size for one in smaller_batches(SPACE, MIDDLE)] == [4, 2, 1]
    assert list(smaller_batches(space(seq_len=(256,)), MIDDLE)) == [MIDDLE]

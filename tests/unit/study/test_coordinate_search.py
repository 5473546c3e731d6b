"""Coordinate search: one knob at a time, only where it may pay; and the nearest untried configurations."""

from dataclasses import replace

from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace, load_space, shipped_spaces
from autotune.study.coordinate_search import ORDER, at_distance, by_distance, neighbours, next_move
from tests.helpers.replay import machine
from tests.helpers.sessions import Start, subject_of

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
    sizes = [config.micro_batch_size for config in first_moves(MIDDLE, "micro_batch_size", Outcome.SLOW)]
    assert sizes == [8, 2]


def test_less_recomputation_is_tried_once_where_it_fits() -> None:
    assert [one.checkpointing for one in first_moves(MIDDLE, "checkpointing", Outcome.OK)] == ["none"]


def test_less_recomputation_that_does_not_fit_is_tried_with_smaller_micro_batches_then_with_more() -> None:
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
    """Nothing recomputed in rows too few for the device says little of half of it in more of them."""
    tried = {MIDDLE.digest: Outcome.OK}
    for size, outcome in ((4, Outcome.OOM), (2, Outcome.REFUSED), (1, Outcome.SLOW)):
        tried[replace(MIDDLE, checkpointing="none", micro_batch_size=size).digest] = outcome
    chosen = next_move(SPACE, MIDDLE, "checkpointing", tried)
    assert chosen is not None and chosen["checkpointing"] == "every_2" and chosen["micro_batch_size"] == 4


def test_nobody_climbs_towards_what_is_slower() -> None:
    fast = replace(MIDDLE, checkpointing="none", compile="per_layer")
    for name in ("checkpointing", "compile"):
        assert first_moves(fast, name, Outcome.OK) == []


def test_learning_knobs_are_not_climbed() -> None:
    assert "lora_rank" not in ORDER and "seq_len" not in ORDER
    for name in ORDER:
        assert all(one.lora_rank == MIDDLE.lora_rank for one in first_moves(MIDDLE, name, Outcome.OOM))


def test_nobody_climbs_from_one_quantised_base_to_another() -> None:
    space = load_space("everything")
    nf4 = TrainConfig(quantization="nf4", compile="per_layer")
    assert next_move(space, nf4, "quantization", {}) is None
    plain = replace(nf4, quantization="none")
    assert space.config(next_move(space, plain, "quantization", {}) or {}).quantization == "fp8"


def test_every_shipped_space_can_be_climbed() -> None:
    for name in shipped_spaces():
        space = load_space(name)
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

    session = start(machine(limit_gib=60.0, rate=rate), task=subject_of(SPACE), begin=[MIDDLE], trials=14)
    session.study.run()
    best = session.study.best()
    assert best is not None
    assert (best.config.checkpointing, best.config.micro_batch_size, best.config.compile) == ("none", 4, "per_layer")


# --- the nearest untried configurations


def differing(config: TrainConfig, other: TrainConfig) -> set[str]:
    """The knobs in which two configurations differ."""
    return {name for name, _ in config.as_dict().items() ^ other.as_dict().items()}


def test_neighbours_in_a_huge_space_differ_in_one_knob_and_reach_every_knob() -> None:
    space = load_space("everything")
    best = TrainConfig(micro_batch_size=16, seq_len=1024)
    assert space.size() > 20_000_000
    found = [space.config(chosen) for chosen in neighbours(space, best, {best.digest})]
    assert all(len(differing(config, best) - {"double_quant"}) == 1 for config in found)
    wanted = {knob.name for knob in space.knobs if knob.is_active(space.clip(best)) and len(knob.choices()) > 1}
    assert set[str]().union(*(differing(config, best) for config in found)) >= wanted


def test_configurations_two_edits_away_follow_once_all_nearer_ones_were_tried() -> None:
    space = load_space("everything")
    best = TrainConfig(micro_batch_size=16, seq_len=1024)
    seen = {space.config(chosen).digest for distance in (0, 1) for chosen in at_distance(space, best, distance)}
    found = [space.config(chosen) for chosen in neighbours(space, best, seen)]
    assert len(found) > 400 and max(len(differing(config, best)) for config in found) <= 3  # an edit may enable a knob


def test_every_choice_has_exactly_one_distance() -> None:
    space = SearchSpace(
        name="conditional",
        knobs=(
            Knob(name="method", values=("lora", "full")),
            Knob(name="quantization", values=("none", "nf4")),
            Knob(name="double_quant", values=(False, True)),
            Knob(name="micro_batch_size", low=1, high=4),
        ),
    )
    found = [space.config(chosen) for chosen in by_distance(space, TrainConfig(micro_batch_size=2))]
    assert len(found) == space.size() == 16
    assert set(found) == {space.config(chosen) for chosen in space.enumerate()}
    assert found[0] == TrainConfig(micro_batch_size=2)


def test_no_neighbour_is_left_only_once_every_configuration_was_tried() -> None:
    seen: set[str] = set()
    while found := neighbours(SPACE, MIDDLE, seen):
        seen |= {SPACE.config(chosen).digest for chosen in found[:7]}
    assert len(seen) == SPACE.size()


def test_other_ranks_come_after_everything_of_the_rank() -> None:
    space = SearchSpace(
        name="ranks",
        knobs=(
            Knob(name="method", values=("lora", "full")),
            Knob(name="lora_rank", values=(16, 32), kind="learning"),
            Knob(name="micro_batch_size", values=(1, 2)),
            Knob(name="loss", values=("full", "chunked")),
        ),
    )
    best = TrainConfig(micro_batch_size=2)
    seen = {best.digest}
    order: list[TrainConfig] = []
    while found := neighbours(space, best, seen, 16):
        order.append(space.config(found[0]))
        seen.add(order[-1].digest)
    assert [config.lora_rank == 16 for config in order] == [True] * 3 + [False] * 8
    assert len(seen) == space.size()


def test_without_a_best_the_search_is_around_the_default_configuration() -> None:
    nearest = [SPACE.config(chosen) for chosen in neighbours(SPACE, None, set())]
    assert nearest == [SPACE.config(SPACE.clip(TrainConfig()))]

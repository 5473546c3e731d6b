"""The nearest untried configurations of a space: exact in a space of any size."""

from collections.abc import Iterable

from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace
from autotune.study.neighbours import choices_at_distance, choices_by_distance, neighbours

SPACE = SearchSpace(
    name="small",
    knobs=(
        Knob(name="compile", values=("none", "per_layer")),
        Knob(name="micro_batch_size", values=(1, 2, 4, 8, 16)),
        Knob(name="checkpointing", values=("none", "every_2", "full")),
        Knob(name="lora_rank", low=14, high=18, log=True),
    ),
)
MIDDLE = TrainConfig(micro_batch_size=4, checkpointing="full", lora_rank=16)


def differing(config: TrainConfig, other: TrainConfig) -> set[str]:
    """The knobs in which two configurations differ, without those that packing and quantization
    take with them.
    """
    found = {name for name, _ in config.as_dict().items() ^ other.as_dict().items()}
    enabled = {
        "packing": {"padding", "group_by_length", "packed_attention"},
        "compile": {"padding"},
    }
    enabled |= {"quantization": {"double_quant", "kbit_preparation"}}
    return found - set().union(*(others for knob, others in enabled.items() if knob in found))


def without_budget(configs: Iterable[TrainConfig]) -> list[TrainConfig]:
    """Those without selective recomputation, which takes compiled layers with it."""
    return [config for config in configs if config.activation_budget == 1]


def test_neighbours_in_a_huge_space_differ_in_one_knob_and_reach_every_knob() -> None:
    space = SearchSpace.load("everything")
    best = TrainConfig(micro_batch_size=16, seq_len=1024)
    assert space.size() > 20_000_000
    found = without_budget(
        space.config(chosen) for chosen in neighbours(space, best, {best.digest})
    )
    assert all(len(differing(config, best)) == 1 for config in found)
    wanted = {
        knob.name
        for knob in space.knobs
        if knob.is_active(space.clip(best)) and len(knob.choices()) > 1
    }
    assert set[str]().union(*(differing(config, best) for config in found)) >= wanted


def test_configurations_two_edits_away_follow_once_all_nearer_ones_were_tried() -> None:
    space = SearchSpace.load("everything")
    best = TrainConfig(micro_batch_size=16, seq_len=1024)
    seen = {
        space.config(chosen).digest
        for distance in (0, 1)
        for chosen in choices_at_distance(space, best, distance)
    }
    found = without_budget(space.config(chosen) for chosen in neighbours(space, best, seen))
    assert len(found) > 400 and max(len(differing(config, best)) for config in found) == 2


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
    found = [
        space.config(chosen)
        for chosen in choices_by_distance(space, TrainConfig(micro_batch_size=2))
    ]
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
            Knob(name="lora_rank", values=(16, 32)),
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

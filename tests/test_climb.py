"""The climb: one knob at a time from the best so far, the dear knob last, nothing tried twice."""

from replay import machine
from sessions import Start, subject_of

from autotune.climb import neighbours, steps
from autotune.config import TrainConfig
from autotune.space import Knob, SearchSpace, load_space

SPACE = SearchSpace(
    name="small",
    knobs=(
        Knob(name="compile", values=("none", "per_layer")),
        Knob(name="micro_batch_size", values=(1, 2, 4, 8, 16)),
        Knob(name="checkpointing", values=("none", "every_2", "full")),
        Knob(name="lora_rank", low=8, high=64, log=True, kind="learning"),
    ),
)
MIDDLE = TrainConfig(micro_batch_size=4, checkpointing="full", lora_rank=16)


def test_each_neighbour_differs_in_one_knob_and_compilation_comes_last() -> None:
    changed = []
    for chosen in neighbours(SPACE, MIDDLE):
        other = SPACE.config(chosen)
        names = [knob.name for knob in SPACE.knobs if getattr(other, knob.name) != getattr(MIDDLE, knob.name)]
        assert len(names) == 1
        changed.append((names[0], getattr(other, names[0])))
    assert changed == [
        ("checkpointing", "none"),
        ("checkpointing", "every_2"),
        ("micro_batch_size", 8),
        ("micro_batch_size", 2),
        ("lora_rank", 32),
        ("lora_rank", 8),
        ("compile", "per_layer"),
    ]


def test_numbers_step_to_the_next_value_and_stop_at_the_ends() -> None:
    sizes = Knob(name="micro_batch_size", values=(1, 2, 4, 8, 16))
    assert (steps(sizes, 1), steps(sizes, 16), steps(sizes, 8)) == ([2], [8], [16, 4])
    ranks = Knob(name="lora_rank", low=8, high=64, log=True)
    assert (steps(ranks, 8), steps(ranks, 48), steps(ranks, 64)) == ([16], [64, 24], [32])


def test_a_switch_is_no_number() -> None:
    assert steps(Knob(name="double_quant", values=(True, False)), True) == [False]


def test_every_shipped_space_has_neighbours_that_are_configurations_of_it() -> None:
    for name in ("default", "lora", "qlora", "full", "cpu"):
        space = load_space(name)
        start = space.config(space.clip(TrainConfig()))
        near = [space.config(chosen) for chosen in neighbours(space, start)]
        assert near and start not in near and len({one.digest for one in near}) >= len(near) / 2


def test_a_study_climbs_from_its_baseline_to_the_top_of_a_smooth_hill(start: Start) -> None:
    def rate(config: TrainConfig) -> float:
        return (
            1000.0
            * {"none": 1.4, "every_2": 1.2, "full": 1.0}[config.checkpointing]
            * {1: 0.7, 2: 0.9, 4: 1.0, 8: 0.98, 16: 0.9}[config.micro_batch_size]
            * (1.5 if config.compile == "per_layer" else 1.0)
            / (1 + (config.lora_rank or 0) / 1000)
        )

    session = start(machine(limit_gib=60.0, rate=rate), subject=subject_of(SPACE), begin=[MIDDLE], trials=14)
    session.study.run()
    best = session.study.best()
    assert best is not None
    assert (best.config.checkpointing, best.config.micro_batch_size, best.config.compile) == ("none", 4, "per_layer")

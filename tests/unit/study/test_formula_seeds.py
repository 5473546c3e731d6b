"""Warm start by formula: which configurations it proposes, and that a study tries them first."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.core.knobs import SELECTIVE
from autotune.core.train_config import TrainConfig
from autotune.prediction import estimate as prediction
from autotune.prediction.memory_formula import memory_breakdown
from autotune.prediction.step_time import StepTimeEstimate
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import SearchSpace
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study import formula_seeds as module
from autotune.study.formula_seeds import HOSTS, VARIED, formula_seeds, formula_speed
from tests.helpers.factories import calibration
from tests.helpers.replay import machine
from tests.helpers.sessions import Start, by_tokens, subject_of

HERE = TrainConfig(seq_len=512)
COMPILED = replace(
    HERE, compile="per_layer", lora_kernels="joined", precision="bf16_pure", loss="chunked"
)


def task(**changes: object) -> Task:
    space = SearchSpace.load("lora").pin("seq_len", 512).pin("lora_rank", 16)
    space = space.pin("packing", False).pin("optimizer", HERE.optimizer)
    full = Workload(lengths=Lengths.constant(512), global_batch=32)
    return subject_of(space, **({"model": resolve_model("mistral-7b"), "workload": full} | changes))


def test_where_memory_is_short_each_pace_of_the_host_has_its_own() -> None:
    """The three that an H200 under the cap of a 24 GB card was measured with: 12,200, about 14,000,
    15,700 tokens/s.
    """
    slow, middle, quick = formula_seeds(task(), HERE, 19.6)
    assert slow == replace(COMPILED, micro_batch_size=16, checkpointing="full")
    # Joined adapters would take a little more than there is.
    assert middle == replace(
        COMPILED, lora_kernels="peft", micro_batch_size=4, checkpointing="every_2"
    )
    assert replace(quick, loss="chunked") == replace(
        COMPILED, micro_batch_size=2, checkpointing="none"
    )


def test_with_room_the_host_makes_no_difference() -> None:
    found = list(formula_seeds(task(), HERE, 127.0))
    assert len(found) == 1 and found[0].checkpointing == "none" and found[0].compile == "per_layer"


@pytest.mark.parametrize("pace", [0, 2])
def test_a_host_that_was_calibrated_has_one_seed(pace: int) -> None:
    """That of its pace: 1.0 or 0.5 times what the formula assumes, 10.2 ms a layer."""
    own = calibration("h200-sxm", layer_ms=10.2 * HOSTS[pace])
    assert list(formula_seeds(task(calibration=own), HERE, 19.6)) == [
        list(formula_seeds(task(), HERE, 19.6))[pace]
    ]
    elsewhere = task(calibration=replace(own, device="a10"))
    assert len(list(formula_seeds(elsewhere, HERE, 19.6))) == 3


def test_a_slower_card_leaves_the_host_behind() -> None:
    assert len(list(formula_seeds(task(device=resolve_device("a10")), HERE, 19.6))) == 1


@pytest.mark.parametrize("limit_gib", [16.0, 19.6, 40.0, 75.0])
def test_each_fits_and_differs_in_nothing_that_it_may_not_touch(limit_gib: float) -> None:
    found = list(formula_seeds(task(), HERE, limit_gib))
    assert found and len(set(found)) == len(found)
    for config in found:
        need = memory_breakdown(
            resolve_model("mistral-7b"), task().workload.longest_row_config(config), 2
        )
        assert need is not None and need.peak_reserved_gib <= limit_gib
        changed = config.as_dict().items() ^ HERE.as_dict().items()
        assert {name for name, _ in changed} <= set(VARIED)


@pytest.mark.parametrize(
    "nothing",
    [
        lambda: formula_seeds(task(), HERE, 10.0),  # not even the weights fit
        lambda: formula_seeds(task(model=resolve_model("mixtral-8x7b")), HERE, 139.0),
        lambda: formula_seeds(task(device=resolve_device("cpu")), HERE, 75.0),
    ],
)
def test_nothing_where_nothing_fits_or_nothing_is_known(nothing: Callable[[], object]) -> None:
    assert list(nothing()) == []  # type: ignore[call-overload]


def test_full_fine_tuning_has_no_rank_to_keep() -> None:
    both = SearchSpace.of(
        method=["lora", "full"], lora_rank=[16, 32], micro_batch_size=[1, 2], seq_len=512
    )
    full = TrainConfig(
        method="full", lora_rank=None, micro_batch_size=1, seq_len=512, precision="bf16_pure"
    )
    found = list(
        formula_seeds(replace(task(), space=both.pin("precision", "bf16_pure")), full, 130.0)
    )
    assert all(config.method == "full" for config in found)


def test_a_study_tries_them_right_after_its_baseline(start: Start) -> None:
    roomy = task(floors=replace(task().floors, allow_pure_bf16=True))
    session = start(machine(limit_gib=75.0, rate=by_tokens), task=roomy, begin=[HERE], trials=3)
    session.study.run()
    tried = [row.config for row in session.study.trials.rows]
    assert tried[0] == HERE and tried[1] == next(formula_seeds(roomy, HERE, 75.0))


def test_a_space_with_too_many_configurations_is_bounded_to_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_CONFIGS", 60)
    asked: list[TrainConfig] = []

    def counted(model: object, config: TrainConfig, micro_steps: int, **_: object) -> object:
        asked.append(config)
        return memory_breakdown(resolve_model("mistral-7b"), config, micro_steps)

    monkeypatch.setattr(prediction, "memory_of", counted)
    uncached = prediction._memory_by_formula.__wrapped__
    monkeypatch.setattr(prediction, "_memory_by_formula", uncached)
    wide = replace(task(), space=task().space.pin("seq_len", 512))
    found = list(formula_seeds(wide, HERE, 75.0))
    asked = list(dict.fromkeys(asked))  # first all of them, then those that fit for each host
    assert found and len(asked) == 60
    # which compiled layers need
    taken_along = {"per_layer": {("padding", "bucket")}, "none": set()}
    alone = [c for c in asked if c.checkpointing not in SELECTIVE]  # which takes compilation along
    changed = [
        len(c.as_dict().items() - HERE.as_dict().items() - taken_along[c.compile]) for c in alone
    ]
    assert changed == sorted(changed) and changed[0] == 0


def test_a_speed_by_formula_is_of_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four micro batches of eight rows of 512 tokens, 2 s each, and 4 s for the rest: 16,384 tokens
    in 12 s.
    """
    known, case = StepTimeEstimate(products_s=1.0, bytes_s=1.0, host_s=0.0, rest_s=4.0), task()
    monkeypatch.setattr(prediction, "_reference_by_formula", lambda *asked: known)
    assert formula_speed(case, HERE) == pytest.approx(16_384 / 12)
    assert formula_speed(replace(case, device=resolve_device("a10")), HERE) == pytest.approx(
        16_384 / 12
    )
    monkeypatch.setattr(prediction, "_reference_by_formula", lambda *asked: None)
    assert formula_speed(case, HERE) == 0.0


def test_the_paces_of_hosts_that_are_tried() -> None:
    assert HOSTS == (1.0, 0.67, 0.5)


@pytest.mark.parametrize(("most", "nearest"), [(3, False), (2, True)])
def test_a_space_of_as_many_as_are_looked_at_is_enumerated(
    monkeypatch: pytest.MonkeyPatch, most: int, nearest: bool
) -> None:
    """Of three micro batches, the middle one is nearest to itself."""
    monkeypatch.setattr(module, "MAX_CONFIGS", most)
    small = replace(
        task(), space=SearchSpace.of(micro_batch_size=[2, 8, 16], lora_rank=[16, 32], seq_len=512)
    )
    sizes = [config.micro_batch_size for config in module._candidates(small, HERE)]
    assert sizes == ([8, 2] if nearest else [2, 8, 16])


def test_what_needs_all_there_is_fits() -> None:
    small = replace(
        task(), space=SearchSpace.of(micro_batch_size=[2, 8], lora_rank=16, seq_len=512)
    )
    seed = replace(HERE, micro_batch_size=2)
    need = memory_breakdown(small.model, small.workload.longest_row_config(seed), 2)
    assert need is not None
    assert list(formula_seeds(small, HERE, need.peak_reserved_gib)) == [seed]
    assert list(formula_seeds(small, HERE, need.peak_reserved_gib - 0.001)) == []

"""A study that compares several numbers of GPUs: each has a best, and the cheapest that ends in
time wins.
"""

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import Price, resolve_device
from autotune.core.probe_types import ProbeRequest, ProbeResult, World
from autotune.core.train_config import TrainConfig
from autotune.planning.more_gpus import project_gpu_counts
from autotune.problem.search_space import SearchSpace
from autotune.report import describe
from autotune.study.summary import Recipe
from tests.helpers.replay import machine
from tests.helpers.sessions import Session, Start, by_tokens, space, subject_of, whole

LINKED = replace(resolve_device("h200"), link_gb_s=1e9)
PRICE = Price(provider="own", device="h200-sxm", usd_per_hour=2.0, source="test")
EFFICIENCY = {1: 1.0, 2: 0.9, 4: 0.7}
SPACE = space(
    num_gpus=(1, 2, 4),
    sharding=("ddp", "fsdp2"),
    micro_batch_size=(8, 16, 32),
    seq_len=(256,),
    lora_rank=(16,),
    checkpointing=("none", "full"),
)
SPACE = SPACE.divide(32).condition("sharding", "num_gpus", (2, 4))


def rate(config: TrainConfig) -> float:
    """Of one rank."""
    return (
        by_tokens(config)
        * EFFICIENCY[config.num_gpus]
        * (0.8 if config.sharding == "fsdp2" else 1.0)
    )


def study(start: Start, within_hours: float | None = None, limit_gib: float = 100.0) -> Session:
    task = subject_of(SPACE, within_hours=within_hours, price=PRICE)
    return whole(start, machine(rate=rate, limit_gib=limit_gib), task=task)


def recipe_of(session: Session) -> Recipe:
    recipe = session.summary().recipe
    assert recipe is not None
    return recipe


def test_without_a_deadline_the_fewest_gpu_hours_win(start: Start) -> None:
    recipe = recipe_of(study(start))
    best = [
        (one.config.num_gpus, one.config.micro_batch_size, one.config.sharding)
        for one in recipe.by_gpus
    ]
    assert best == [(1, 32, "none"), (2, 16, "ddp"), (4, 8, "ddp")]  # what divides 32 rows
    assert {one.config.checkpointing for one in recipe.by_gpus} == {"none"}
    assert recipe.config.num_gpus == 1 and recipe.reason.startswith("the cheapest above the floors")
    speeds = [one.performance.tokens_per_second for one in recipe.by_gpus]
    assert speeds == pytest.approx(
        [one.config.num_gpus * rate(one.config) for one in recipe.by_gpus]
    )
    assert [one.cost.usd_per_hour for one in recipe.by_gpus] == [2.0, 4.0, 8.0]
    assert {cell.config.num_gpus for cell in recipe.cells} == {1}


def test_a_number_of_gpus_is_represented_by_a_confirmed_configuration(start: Start) -> None:
    """Another one, which the search measured once, looks 5 % faster."""
    session = study(start)
    selection = session.study.trials.selection
    best = next(one.config for one in recipe_of(session).by_gpus if one.config.num_gpus == 2)
    assert selection.record(best).confirmed
    once = next(
        record
        for record in selection.records.values()
        if record.config.num_gpus == 2 and record.search_measurements and not record.confirmed
    )
    found = once.search_measurements[0]
    faster = 1.05 * rate(best) / rate(once.config)
    once.measured = replace(
        found,
        step_s=tuple(step / faster for step in found.step_s),
        micro_step_s=tuple(step / faster for step in found.micro_step_s),
    )
    recipe = selection.recipe(session.prober.fingerprint)
    assert recipe is not None and best in [one.config for one in recipe.by_gpus]


def test_each_number_of_gpus_starts_with_each_way_to_share_until_one_fits(start: Start) -> None:
    """What ddp would have to keep on each GPU does not fit on two."""

    def answer(request: ProbeRequest) -> ProbeResult:
        limit_gib = 0.001 if request.config.sharding == "ddp" else 100.0
        return machine(rate=rate, limit_gib=limit_gib)(request)

    session = whole(start, answer, task=subject_of(SPACE, price=PRICE))
    best = {one.config.num_gpus: one.config.sharding for one in recipe_of(session).by_gpus}
    assert best == {1: "none", 2: "fsdp2", 4: "fsdp2"}
    asked = [request.config for request in session.prober.requests if request.config.num_gpus == 2]
    assert [(one.sharding, one.micro_batch_size, one.checkpointing) for one in asked[:3]] == [
        ("ddp", 16, "none"),
        ("ddp", 8, "none"),  # which leaves more memory free
        ("fsdp2", 16, "none"),
    ]


def test_the_cheapest_that_ends_in_time_wins(start: Start) -> None:
    """256,000 tokens take one GPU 194 s, two 118 s and four 84 s."""
    recipe = recipe_of(study(start, within_hours=150 / 3600))
    assert (
        recipe.config.num_gpus == 2
        and "the cheapest that ends within 2 min 30 s above" in recipe.reason
    )
    assert [one.config.num_gpus for one in recipe.by_gpus] == [1, 2, 4]
    assert not any("ends within" in caveat for caveat in recipe.caveats)
    assert recipe.speedup == pytest.approx(2 * rate(recipe.config) / rate(recipe.baseline.config))  # type: ignore[union-attr]
    assert "on 2 GPUs instead of 1" in describe.speed_up(recipe)
    rows = project_gpu_counts(recipe)
    assert (rows.own, rows.known) == (2, (1, 2, 4))
    cheapest, fastest, in_time = describe.gpu_choices(rows, recipe.within_hours)
    assert cheapest.startswith("cheapest: 1 GPU (") and fastest.startswith("fastest: 4 GPUs, ddp (")
    assert in_time.startswith("cheapest within 2 min 30 s: 2 GPUs, ddp (")


def test_where_nothing_ends_in_time_the_fastest_wins_and_is_late(start: Start) -> None:
    recipe = recipe_of(study(start, within_hours=60 / 3600))
    assert recipe.config.num_gpus == 4 and recipe.reason.startswith(
        "the fastest, because no configuration ends within 1 min, above"
    )
    assert any("nothing that was tried ends within 1 min" in caveat for caveat in recipe.caveats)
    assert describe.gpu_choices(project_gpu_counts(recipe), recipe.within_hours)[2].endswith(
        "none is known"
    )


def test_no_slack_is_worth_a_deadline(start: Start) -> None:
    """The higher rank, 1 % slower, would win by the slack, but ends 1 s late."""
    ranks = SPACE.offer("lora_rank", (16, 32))
    config = TrainConfig(micro_batch_size=32, seq_len=256, checkpointing="none")
    low, high = replace(config, lora_rank=16), replace(config, lora_rank=32)
    task = subject_of(ranks, within_hours=32 * 32 * 256 / 1000 / 3600)
    assert task.score(high, 999.0) * (1 + 1.0) < task.score(low, 1000.1)
    four = replace(high, num_gpus=4, micro_batch_size=8)
    # the fastest of those that are late is the best
    assert task.score(four, 999.0) < task.score(high, 999.5)


def test_pauses_count_for_the_deadline(start: Start) -> None:
    """One GPU's steps end in time, and its checkpoints do not."""

    def slow_to_save(request: ProbeRequest) -> ProbeResult:
        answer = machine(rate=rate, limit_gib=100.0)(request)
        assert answer.measurement is not None
        return replace(
            answer, measurement=replace(answer.measurement, evaluation_s=1.0, checkpoint_s=60.0)
        )

    task = subject_of(SPACE, within_hours=220 / 3600, price=PRICE, world=World.FAKE, device=LINKED)
    session = whole(start, slow_to_save, task=task)
    recipe = recipe_of(session)
    alone = recipe.by_gpus[0]
    assert alone.cost.full_run_hours > 220 / 3600 > alone.cost.full_run_hours - 60 / 3600
    assert recipe.config.num_gpus == 2 and not any(
        "ends within" in caveat for caveat in recipe.caveats
    )


def test_each_number_is_searched_in_its_share_of_the_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.study import loop

    session = start(machine(rate=rate, limit_gib=100.0), task=subject_of(SPACE), budget_s=3000.0)
    seen: list[tuple[int, int]] = []

    class Climb:
        def __init__(self, trials: Any, number: int) -> None:
            seen.append((number, round(trials.kept_s, -2)))

        def run(self) -> None:
            """Take no time."""

    monkeypatch.setattr(loop, "CoordinateSearch", Climb)
    session.study._run_coordinate_searches()
    assert seen == [(1, 2000), (2, 1500), (4, 0)] and session.study.trials.kept_s == 0.0


def test_a_choice_divides_the_batch_however_it_was_made() -> None:
    for chosen in (*SPACE.enumerate(), *SPACE.sample(50)):
        assert 32 % (chosen["num_gpus"] * chosen["micro_batch_size"]) == 0
        assert SPACE.config(chosen).micro_batch_size == chosen["micro_batch_size"]
    assert (
        SPACE.size()
        == len({SPACE.config(chosen) for chosen in SPACE.enumerate()})
        == 2 * (3 + 2 * 2 + 2)
    )
    sampled = {
        "num_gpus": 4,
        "sharding": "ddp",
        "micro_batch_size": 32,
        "seq_len": 256,
        "lora_rank": 16,
    }
    assert SPACE.config(sampled).micro_batch_size == 8
    assert SPACE.clip(TrainConfig(num_gpus=2, micro_batch_size=32))["micro_batch_size"] == 16
    assert SearchSpace.of(micro_batch_size=[2, 4]).divide(6).clip(
        TrainConfig(micro_batch_size=4)
    ) == {"micro_batch_size": 2}

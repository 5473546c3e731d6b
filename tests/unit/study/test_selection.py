"""Who wins, what confirms it, and every doubt that a reader should have."""

from dataclasses import replace

import pytest

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.probe_types import Outcome, ProbeResult, Rung, Telemetry
from autotune.core.train_config import TrainConfig
from autotune.prediction.transfer import SpeedTransfer
from autotune.problem.constraints import Floors
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import SearchSpace
from autotune.problem.task import BASELINE, Task
from autotune.problem.workload import Workload
from autotune.study.selection import Selection
from tests.helpers.factories import FINGERPRINT, add_measured, measurement, result

GIVEN = Workload(examples=3200, lengths=Lengths.constant(1024), examples_assumed=False)
SUBJECT = Task(
    study="s",
    model=resolve_model("mistral-7b"),
    device=resolve_device("h200"),
    price=find_price("h200-sxm"),
    workload=GIVEN,
    floors=Floors(),
    space=SearchSpace.load("lora"),
)
FAST = TrainConfig(micro_batch_size=8, checkpointing="none")
SLOW = BASELINE


def steady(micro_s: float, micro_steps: int = 2, **changes):
    """Steps that agree with one another, without noise."""
    values = {"step_s": (micro_steps * micro_s,) * 3, "micro_step_s": (micro_s,), "rest_s": ()}
    return measurement(**(values | {"micro_steps": micro_steps} | changes))


def selection(workload: Workload = GIVEN, **seconds: float) -> Selection:
    """FAST and SLOW measured once each, at 0.5 and 1 s a micro batch."""
    made = Selection(replace(SUBJECT, workload=workload))
    add_measured(made, FAST, steady(0.5))
    add_measured(made, SLOW, steady(1.0))
    return made


def confirmed(again_s: float = 0.5) -> Selection:
    made = selection()
    for _ in range(2):
        made.confirm(FAST, steady(again_s))
        made.confirm(SLOW, steady(1.0))
    return made


# --- baselines


@pytest.mark.parametrize(
    ("space", "method", "rank", "length", "sizes"),
    [
        (SearchSpace.load("lora"), "lora", 16, 1024, [8, 4, 2, 1]),
        (SearchSpace.load("full"), "full", None, 1024, [8, 4, 2, 1]),
        (SearchSpace.load("cpu"), "lora", 16, 256, [8, 4, 2, 1]),
        (SearchSpace.load("lora").pin("micro_batch_size", 32), "lora", 16, 1024, [32]),
        (SearchSpace.load("lora").pin("micro_batch_size", 3).pin("lora_rank", 64), "lora", 64, 1024, [3]),
    ],
)
def test_baselines_are_clipped_to_the_space_and_halved(space, method, rank, length, sizes):
    found = replace(SUBJECT, space=space).baselines()
    assert [config.micro_batch_size for config in found] == sizes
    assert {(config.method, config.lora_rank, config.seq_len) for config in found} == {(method, rank, length)}


def test_the_baseline_is_the_largest_that_was_measured():
    empty = Selection(SUBJECT)
    assert empty.baseline() is None
    add_measured(empty, replace(BASELINE, micro_batch_size=1), steady(1.0))
    add_measured(empty, replace(BASELINE, micro_batch_size=4), steady(1.0))
    assert empty.baseline() == replace(BASELINE, micro_batch_size=4)


# --- finalists


def test_finalists_are_the_likely_winner_and_the_fastest():
    made = Selection(replace(SUBJECT, floors=Floors(slack=0.05)))
    able = TrainConfig(lora_rank=64)
    for config, micro_s in ((SLOW, 1.0), (FAST, 0.5), (able, 0.51), (replace(FAST, compile="per_layer"), 0.505)):
        add_measured(made, config, steady(micro_s))
    assert made.finalists(2) == [able, FAST]
    assert made.finalists(9) == [able, FAST, replace(FAST, compile="per_layer"), SLOW]
    assert Selection(SUBJECT).finalists(3) == []


# --- the recipe


def test_nothing_measured_is_no_recipe():
    assert Selection(SUBJECT).recipe(FINGERPRINT) is None


def test_the_recipe():
    recipe = confirmed().recipe(FINGERPRINT)
    assert (recipe.winner.config, recipe.baseline.config) == (FAST, SLOW)
    assert recipe.speedup == pytest.approx(2.0)
    assert recipe.accumulation == 4
    assert recipe.winner.performance.step_time_s == pytest.approx(2.0)
    assert recipe.winner.cost.full_run_hours == pytest.approx(100 * 2.0 / 3600)
    assert recipe.winner.cost.full_run_usd == pytest.approx(100 * 2.0 / 3600 * 3.39)
    assert recipe.winner.cost.kwh == pytest.approx(0.65 * 100 * 2.0 / 3600)
    assert [cost.examples for cost in recipe.by_examples] == [10_000, 50_000, 100_000]
    assert recipe.caveats == ()
    assert (recipe.study, recipe.trainer, recipe.fingerprint) == ("s", "transformers", FINGERPRINT)


def test_mfu_is_over_the_catalogued_peak():
    best = confirmed().recipe(FINGERPRINT).winner
    flops = resolve_model("mistral-7b").flops_per_token("lora", 1024)
    assert best.performance.mfu == pytest.approx(flops * 32 * 1024 / 2.0 / 989.4e12)


def test_the_confirmation_outranks_the_search():
    made = selection()
    made.confirm(FAST, steady(1.2))  # not as fast as it seemed
    made.confirm(SLOW, steady(1.0))
    recipe = made.recipe(FINGERPRINT)
    assert recipe.winner.config == SLOW
    assert recipe.baseline.config == SLOW
    assert recipe.speedup == 1.0


def test_the_largest_peak_and_the_median_time_of_the_confirmations_are_kept():
    made = selection()
    for micro_s, peak in ((0.5, 30.0), (0.6, 50.0), (0.7, 40.0)):
        made.confirm(FAST, steady(micro_s, peak_reserved_gib=peak))
    best = made.candidate(FAST)
    assert best.measurement.peak_reserved_gib == 50.0
    assert best.performance.step_time_s == pytest.approx(2.4)


def test_unknown_power_is_no_energy():
    made = Selection(SUBJECT)
    add_measured(made, FAST, steady(0.5, telemetry=None))
    assert made.candidate(FAST).cost.kwh is None
    add_measured(made, FAST, steady(0.5, telemetry=Telemetry()))
    recipe = made.recipe(FINGERPRINT)
    assert recipe.winner.cost.kwh is None
    assert {cost.kwh for cost in recipe.by_examples} == {None}


def test_the_best_of_each_learning_cell():
    made = selection()
    long = replace(FAST, seq_len=2048)
    add_measured(made, replace(FAST, compile="per_layer"), steady(0.4))
    add_measured(made, long, steady(0.9))
    recipe = made.recipe(FINGERPRINT)
    assert {cell.config for cell in recipe.cells} == {replace(FAST, compile="per_layer"), long}


def test_a_dropped_configuration_is_out_and_named():
    made = confirmed()
    made.reject(FAST, "out of memory in save")
    recipe = made.recipe(FINGERPRINT)
    assert recipe.winner.config == SLOW
    assert recipe.caveats == (
        "lora r16 8x1024 bf16_mixed ckpt-none adamw_torch_fused succeeded in the search but failed its confirmation: "
        "out of memory in save",
    )
    made.reject(SLOW, "x")
    made.reject(SLOW, "again")  # nothing left to take out
    assert made.recipe(FINGERPRINT) is None
    assert made.baseline() is None


# --- caveats


def test_times_on_a_cpu_are_upper_bounds_and_that_is_said():
    made = confirmed()
    made.task = replace(made.task, device=resolve_device("cpu"), price=None)
    (caveat,) = made.recipe(FINGERPRINT).caveats
    assert "can be twice as fast" in caveat


def test_a_study_that_was_cut_short():
    assert selection().recipe(FINGERPRINT).caveats == (
        "the winner was not measured a second time: the study was cut short",
    )


@pytest.mark.parametrize(
    ("again_s", "caveats"),
    [
        (0.5, ()),
        (0.51, ()),  # 2 % is within what is normal
        (0.55, ("the search's step time was -9.1% off the confirmed one, which counts",)),
        (0.45, ("the search's step time was +11.1% off the confirmed one, which counts",)),
    ],
)
def test_a_search_that_was_off(again_s, caveats):
    assert confirmed(again_s).recipe(FINGERPRINT).caveats == caveats


@pytest.mark.parametrize(("share", "percent"), [(None, None), (0.79, None), (0.8, "80%"), (1.3, "100%")])
def test_a_host_that_sets_the_pace_is_reported(share, percent):
    made = confirmed()
    made.confirm(FAST, steady(0.5, host_share=share))
    recipe = made.recipe(FINGERPRINT)
    assert [percent in one and FAST.label() in one for one in recipe.caveats] == [True] * (percent is not None)
    assert all("the host sets the pace" in one for one in recipe.caveats)


def test_what_is_within_the_noise_is_not_reported_apart():
    made = selection()
    rival = replace(FAST, compile="per_layer")
    noisy = steady(0.5, step_s=(0.9, 1.0, 1.1))
    add_measured(made, FAST, noisy)
    made.confirm(FAST, noisy)
    made.confirm(rival, steady(0.51))
    made.confirm(SLOW, steady(1.0))
    assert made.noise(FAST) == pytest.approx(0.1 * (2 / 3) ** 0.5)
    assert made.noise(rival) == 0.0
    assert made.recipe(FINGERPRINT).caveats == (f"not distinguishable in speed from {rival.label()}",)


def test_a_tie_goes_to_less_memory_and_is_named():
    """0.2 % faster with 92.7 GiB against 54.7 is no reason to win."""
    large, small, made = replace(FAST, micro_batch_size=16), FAST, Selection(SUBJECT)
    for config, micro_s, peak in ((large, 0.998, 92.7), (small, 0.5, 54.7), (SLOW, 1.0, 20.0)):
        add_measured(made, config, steady(micro_s, peak_reserved_gib=peak))
        made.confirm(config, steady(micro_s, peak_reserved_gib=peak))
    recipe = made.recipe(FINGERPRINT)
    assert recipe.winner.config == small
    assert recipe.reason == "it leaves more memory free, at no measurable cost; nothing more capable was tried"
    assert recipe.caveats == (f"not distinguishable in speed from {large.label()}",)


def test_what_ran_out_of_memory_was_tried():
    made = confirmed()
    made.add_result(result(replace(FAST, lora_rank=64), Outcome.OOM))
    assert made.recipe(FINGERPRINT).reason.endswith("nothing more capable is within the slack")


def test_a_conversion_that_all_speeds_share_does_not_blur_their_ratio():
    made = confirmed()
    plain = made.recipe(FINGERPRINT)
    made.task = replace(made.task, carried=SpeedTransfer(ratio=0.1, error=0.5))
    converted = made.recipe(FINGERPRINT)
    assert converted.winner.performance.spread[1] > 0.5
    assert converted.speedup_interval == pytest.approx(plain.speedup_interval) and converted.differs


def test_noise_of_what_was_never_measured():
    assert Selection(SUBJECT).noise(FAST) == 0.0
    single = Selection(SUBJECT)
    add_measured(single, FAST, steady(0.5, step_s=(1.0,)))
    assert single.noise(FAST) == 0.0


@pytest.mark.parametrize(
    ("precisions", "floors", "said"),
    [
        (("bf16_mixed", "bf16_pure"), Floors(), True),  # a floor, and the reserve was opened
        (("bf16_mixed", "bf16_pure"), Floors(allow_pure_bf16=True), False),
        (("bf16_pure",), Floors(), False),  # the user's choice
    ],
)
def test_a_winner_that_the_floors_forbid_unless_nothing_else_fits(precisions, floors, said):
    space = SearchSpace.of(method="full", seq_len=1024, micro_batch_size=[1, 2], precision=list(precisions))
    made = Selection(replace(SUBJECT, space=space, floors=floors))
    pure = TrainConfig(method="full", lora_rank=None, precision="bf16_pure", micro_batch_size=2)
    add_measured(made, pure, steady(0.5))
    made.confirm(pure, steady(0.5))
    caveat = "precision bf16_pure: no fp32 master weights; searched because nothing else fits (--allow-pure-bf16)"
    assert (caveat in made.recipe(FINGERPRINT).caveats) is said


def test_assumptions_are_reported():
    workload = Workload(examples=12_345, lengths=Lengths.constant(2048, "assumed"))
    made = selection(workload)
    made.confirm(FAST, steady(0.5))
    assert made.recipe(FINGERPRINT).caveats == (
        "the length of an example was not given: 2,048 tokens are assumed "
        "(--dataset, --lengths or --tokens-per-example)",
        "the number of examples was not given: 12,345 are assumed (--examples)",
        "50.0% of the tokens are cut off at seq_len 1024, from 100.0% of the examples",
    )


def test_whoever_leads_may_win():
    """Micro batches of 16, 8 and 4: each step down costs a little speed, and the first leaves memory tight."""
    made = Selection(SUBJECT)
    for size, speed, free in ((16, 1000.0, 0.02), (8, 990.0, 0.5), (4, 970.0, 0.67)):
        config = replace(FAST, micro_batch_size=size)
        made.confirm(config, steady(size * 1024 / speed, limit_gib=100.0, peak_reserved_gib=100.0 * (1 - free)))
    leader = made.leader()
    assert leader is not None and leader.micro_batch_size == 8
    assert made.may_win(leader)


# --- how long the full run takes to start

PLAIN = TrainConfig()


def begun(config: TrainConfig, **seconds: float) -> ProbeResult:
    """Its steps take 1.02 s each."""
    return result(config, seconds={"total": 60.0} | seconds)


def test_the_start_is_what_worker_model_and_first_step_took_the_first_time() -> None:
    selection, slow = Selection(SUBJECT), TrainConfig(compile="per_layer")
    selection.add_result(begun(PLAIN, start=14.0, load=6.0, first_step=4.04))
    selection.add_result(begun(slow, load=0.5, first_step=22.04))
    selection.add_result(begun(slow, load=0.5, first_step=5.04))  # by then compiled code lay on disk
    assert selection.startup_s(PLAIN) == pytest.approx(14 + 6 + 2)
    assert selection.startup_s(slow) == pytest.approx(14 + 6 + 20)
    assert selection.startup_s(TrainConfig(seq_len=64)) is None
    assert selection.candidate(slow).cost.startup_s == selection.startup_s(slow)


def test_what_a_confirmation_needed_to_start_counts_as_well() -> None:
    selection = Selection(SUBJECT)
    first = begun(PLAIN, start=14.0, load=6.0, first_step=4.04)
    selection.record_startup(replace(first, rung=Rung.CONFIRM))
    assert selection.startup_s(PLAIN) == pytest.approx(14 + 6 + 2)


def test_a_start_that_was_not_seen_or_was_another_cards_is_not_reported() -> None:
    selection = Selection(SUBJECT)
    selection.add_result(begun(PLAIN, load=6.0, first_step=4.04))
    assert selection.startup_s(PLAIN) is None
    elsewhere = Selection(replace(SUBJECT, measured_on=resolve_device("h200")))
    elsewhere.add_result(begun(PLAIN, start=14.0, load=6.0, first_step=4.04))
    assert elsewhere.startup_s(PLAIN) is None

"""Who wins, what confirms it, and every doubt that a reader should have."""

from dataclasses import replace

import pytest

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.probe_types import Evidence, Outcome, ProbeResult, Rung, SkewedRouting, Telemetry
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import Extrapolation
from autotune.problem.constraints import Floors
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import SearchSpace
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.task import BASELINE, Task
from autotune.problem.workload import Workload
from autotune.study.selection import Selection
from tests.helpers.factories import FINGERPRINT, add_measured, calibration, measurement, result

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
UNEVEN = replace(GIVEN, lengths=Lengths.of([100] * 50 + [1000] * 50, "counted"))
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


def test_of_what_nothing_is_known_nothing_is_open() -> None:
    record = selection().record(replace(FAST, lora_rank=32))
    assert not (record.undecided or record.cannot_win or record.best_known or record.late_s)


# --- baselines


@pytest.mark.parametrize(
    ("space", "method", "rank", "length", "sizes"),
    [
        (SearchSpace.load("lora"), "lora", 16, 1024, [8, 4, 2, 1]),
        (SearchSpace.load("full"), "full", None, 1024, [8, 4, 2, 1]),
        (SearchSpace.load("cpu"), "lora", 16, 256, [8, 4, 2, 1]),
        (SearchSpace.load("lora").pin("micro_batch_size", 32), "lora", 16, 1024, [32]),
        (
            SearchSpace.load("lora").pin("micro_batch_size", 3).pin("lora_rank", 64),
            "lora",
            64,
            1024,
            [3],
        ),
    ],
)
def test_baselines_are_clipped_to_the_space_and_halved(space, method, rank, length, sizes):
    found = replace(SUBJECT, space=space).baselines
    assert [config.micro_batch_size for config in found] == sizes
    assert {(config.method, config.lora_rank, config.seq_len) for config in found} == {
        (method, rank, length)
    }


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
    for config, micro_s in (
        (SLOW, 1.0),
        (FAST, 0.5),
        (able, 0.51),
        (replace(FAST, compile="per_layer"), 0.505),
    ):
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
    assert recipe.winner.cost.full_run_usd == pytest.approx(
        100 * 2.0 / 3600 * SUBJECT.price.usd_per_hour
    )
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
        "lora r16 8x1024 bf16_mixed ckpt-none adamw_torch_fused succeeded in the search but failed"
        " its confirmation: "
        "out of memory in save",
    )
    made.reject(SLOW, "x")
    made.reject(SLOW, "again")  # nothing left to take out
    assert made.recipe(FINGERPRINT) is None
    assert made.baseline() is None


# --- caveats


def test_the_cost_of_skewed_routing_is_stated():
    made = confirmed()
    record = made.record(FAST)
    skewed = SkewedRouting(hottest=4.0, ratio=1.057)
    record.confirmed[:] = [replace(one, skewed=skewed) for one in record.confirmed]
    assert made.recipe(FINGERPRINT).caveats == (
        "probes load the experts of a mixture evenly, trained routers do not: a micro batch takes "
        "1.06 times as long if the busiest expert of each layer gets 4 times the mean number of "
        "tokens [measured]",
    )


def test_a_study_that_was_cut_short():
    assert selection().recipe(FINGERPRINT).caveats == (
        "the winner was not measured a second time: the study was cut short",
    )


@pytest.mark.parametrize(
    ("again_s", "caveats"),
    [
        (0.5, ()),
        (0.51, ()),  # 2 % is within what is normal
        (
            0.55,
            (
                "the search's step time differed by -9.1% from the confirmed time,"
                " which is reported",
            ),
        ),
        (
            0.45,
            (
                "the search's step time differed by +11.1% from the confirmed time,"
                " which is reported",
            ),
        ),
    ],
)
def test_a_search_that_was_off(again_s, caveats):
    assert confirmed(again_s).recipe(FINGERPRINT).caveats == caveats


def test_a_confirmation_with_shorter_steps_is_not_off():
    """One that had less time has two micro batches in a step, and another four."""
    made = selection()
    for micro_steps in (2, 4, 4):
        made.confirm(FAST, steady(0.5, micro_steps=micro_steps))
    assert made.recipe(FINGERPRINT).caveats == ()


@pytest.mark.parametrize(
    ("share", "percent"), [(None, None), (0.79, None), (0.8, "80%"), (1.3, "100%")]
)
def test_a_host_that_sets_the_pace_is_reported(share, percent):
    made = confirmed()
    made.confirm(FAST, steady(0.5, host_share=share))
    recipe = made.recipe(FINGERPRINT)
    assert [percent in one and FAST.label() in one for one in recipe.caveats] == [True] * (
        percent is not None
    )
    assert all("is CPU-bound" in one for one in recipe.caveats)


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
    assert made.recipe(FINGERPRINT).caveats == (
        f"the winner is not distinguishable in speed from {rival.label()}",
    )


def test_a_tie_goes_to_less_memory_and_is_named():
    """0.2 % faster with 92.7 GiB against 54.7 is no reason to win."""
    large, small, made = replace(FAST, micro_batch_size=16), FAST, Selection(SUBJECT)
    for config, micro_s, peak in ((large, 0.998, 92.7), (small, 0.5, 54.7), (SLOW, 1.0, 20.0)):
        add_measured(made, config, steady(micro_s, peak_reserved_gib=peak))
        made.confirm(config, steady(micro_s, peak_reserved_gib=peak))
    recipe = made.recipe(FINGERPRINT)
    assert recipe.winner.config == small
    assert (
        recipe.reason
        == "it leaves more memory free, at no measurable cost; nothing more capable was tried"
    )
    assert recipe.caveats == (f"the winner is not distinguishable in speed from {large.label()}",)


def test_what_ran_out_of_memory_was_tried():
    made = confirmed()
    made.add_result(result(replace(FAST, lora_rank=64), Outcome.OOM))
    assert made.recipe(FINGERPRINT).reason.endswith(
        "no more capable configuration costs at most 5% more"
    )


def test_a_conversion_that_all_speeds_share_does_not_blur_their_ratio():
    made = confirmed()
    plain = made.recipe(FINGERPRINT)
    made.task = replace(made.task, carried=SpeedTransfer(products=0.1, bytes=0.1, error=0.5))
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
    space = SearchSpace.of(
        method="full", seq_len=1024, micro_batch_size=[1, 2], precision=list(precisions)
    )
    made = Selection(replace(SUBJECT, space=space, floors=floors))
    pure = TrainConfig(method="full", lora_rank=None, precision="bf16_pure", micro_batch_size=2)
    add_measured(made, pure, steady(0.5))
    made.confirm(pure, steady(0.5))
    caveat = (
        "precision bf16_pure: no fp32 master weights; searched because nothing else fits"
        " (--allow-pure-bf16)"
    )
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
    """Micro batches of 16, 8 and 4: each step down costs a little speed, and the first leaves
    memory tight.
    """
    made = Selection(SUBJECT)
    for size, speed, free in ((16, 1000.0, 0.02), (8, 990.0, 0.5), (4, 970.0, 0.67)):
        config = replace(FAST, micro_batch_size=size)
        made.confirm(
            config,
            steady(size * 1024 / speed, limit_gib=100.0, peak_reserved_gib=100.0 * (1 - free)),
        )
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
    # by then compiled code lay on disk
    selection.add_result(begun(slow, load=0.5, first_step=5.04))
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


# --- confirmations


def test_a_confirmation_that_succeeds_counts_with_its_start() -> None:
    made = Selection(SUBJECT)
    again = replace(begun(PLAIN, start=14.0, load=6.0, first_step=4.04), rung=Rung.CONFIRM)
    assert made.add_confirmation(again) and made.add_confirmation(again)
    assert made.record(PLAIN).confirmed == [again.measurement] * 2
    assert made.startup_s(PLAIN) == pytest.approx(14 + 6 + 2)


@pytest.mark.parametrize("config", [FAST, SLOW], ids=["rival", "baseline"])
@pytest.mark.parametrize(
    ("outcome", "reason", "said", "fits"),
    [
        (Outcome.OOM, None, "oom", False),
        (Outcome.NUMERICS, "its losses differ", "its losses differ", False),
        (Outcome.TIMEOUT, None, "timeout", True),
    ],
)
def test_a_confirmation_that_fails_is_out_except_for_a_baseline_that_fits(
    config, outcome, reason, said, fits
):
    made = confirmed()
    assert not made.add_confirmation(result(config, outcome, reason=reason))
    assert made.caveats == [
        f"{config.label()} succeeded in the search but failed its confirmation: {said}"
    ]
    compared = fits and config == SLOW
    assert bool(made.record(config).best_known) is compared
    assert (
        config not in [scored.config for scored in made.pool()]
        and made.record(config).cannot_win is compared
    )


def test_the_largest_peak_of_its_confirmations_says_whether_a_configuration_is_tight():
    """97 of 100 GiB, once, are not enough room for the faster one to win."""
    made = confirmed(0.99)
    for peak in (97.0, 50.0):
        made.confirm(FAST, steady(0.99, peak_reserved_gib=peak, limit_gib=100.0))
    assert made.leader() == SLOW


@pytest.mark.parametrize(
    ("speed", "noise", "may_win"),
    [
        (981.0, 0.0, True),  # 1 % more of this and 1 % less of the best: the two are equal at 980.3
        (979.0, 0.0, False),
        (960.0, 0.03, True),  # its own steps scatter by 3 %: equal at 942.6
        (940.0, 0.03, False),
    ],
)
def test_a_rival_may_win_if_noise_favours_it(speed, noise, may_win):
    made, rival = (
        Selection(replace(SUBJECT, floors=Floors(slack=0.0))),
        replace(FAST, compile="per_layer"),
    )
    micro_s = FAST.tokens / speed
    made.confirm(FAST, steady(FAST.tokens / 1000.0))
    made.confirm(
        rival, steady(micro_s, step_s=(2 * micro_s * (1 - noise), 2 * micro_s * (1 + noise)))
    )
    assert made.may_win(FAST) and made.may_win(rival) is may_win
    assert not Selection(SUBJECT).may_win(FAST)


# --- disagreement


@pytest.mark.parametrize(
    ("again", "difference"),
    [
        ([], 0.0),
        ([2.5], 0.2),  # a single one is compared with the 3 s of the search
        ([3.0, 3.3, 3.0], 0.1),
        ([2.5, 2.5], 0.0),  # two are not
    ],
)
def test_disagreement_is_in_whole_steps(again, difference):
    """A step has four micro batches of 0.5 s, and the rest makes the difference."""
    made = Selection(SUBJECT)
    add_measured(made, FAST, steady(0.5, rest_s=(1.0,)))
    for step in again:
        made.confirm(FAST, steady(0.5, rest_s=(step - 2.0,)))
    assert made.disagreement(FAST) == pytest.approx(difference)


def test_an_earlier_study_may_have_measured_a_faster_machine():
    """A confirmation is compared with this study's search alone."""
    made = Selection(SUBJECT)
    made.add_result(result(FAST, measurement=steady(0.5)), reused=True)
    made.confirm(FAST, steady(0.7))
    assert made.disagreement(FAST) == 0
    made.add_result(result(FAST, measurement=steady(0.5)))
    assert made.disagreement(FAST) == pytest.approx(0.4)


@pytest.mark.parametrize(("config", "steps"), [(FAST, (0.5, 0.55)), (SLOW, (1.0, 1.1))])
def test_measurements_that_differ_are_doubtful(config, steps):
    made = selection()
    for index in range(2):
        made.confirm(FAST, steady(steps[index] if config == FAST else 0.5))
        made.confirm(SLOW, steady(steps[index] if config == SLOW else 1.0))
    expected = (
        f"measurements of {config.label()} differ by 10%: something disturbed them, so the "
        "intervals cover all of them"
    )
    assert [one for one in made.recipe(FINGERPRINT).caveats if "differ by" in one] == [expected]


def test_a_card_that_was_hot_is_doubtful_and_one_at_its_power_limit_is_not():
    made = confirmed()
    for reasons in (("hardware thermal", "power cap"), ("a brake", "hardware thermal")):
        made.confirm(FAST, steady(0.5, telemetry=Telemetry(throttle_reasons=reasons)))
    made.confirm(FAST, steady(0.5, telemetry=None))
    # it did not win
    made.confirm(SLOW, steady(1.0, telemetry=Telemetry(throttle_reasons=("sync boost",))))
    assert made.recipe(FINGERPRINT).caveats == (
        "the GPU was throttled during the measurement: a brake, hardware thermal",
    )


@pytest.mark.parametrize(
    ("again_s", "off"), [(0.486, False), (0.485, True), (0.515, False), (0.516, True)]
)
def test_a_search_within_three_percent_is_not_off(again_s, off):
    assert bool(confirmed(again_s).recipe(FINGERPRINT).caveats) is off


# --- losses

WEIGHTS = replace(SUBJECT, model=replace(SUBJECT.model, weights="/weights"))
COARSE = replace(FAST, optimizer="adamw_8bit")


def compared(
    losses: tuple[float, ...], wanted: tuple[float, ...] | None, task: Task = WEIGHTS
) -> Selection:
    """COARSE with these losses, where the reference has those (None: it failed)."""
    made = Selection(task)
    add_measured(made, COARSE, steady(0.5, losses=losses))
    reference = made.missing_reference(COARSE)
    if reference is not None:
        made.references[reference.digest] = None if wanted is None else steady(1.0, losses=wanted)
    return made


def test_losses_off_by_more_than_two_percent_are_unsound():
    made = compared((3.0, 2.1), (3.0, 2.0))
    assert made.distrust_reason(COARSE) == (
        "its losses differ by 2.5% from the losses with bf16 under autocast (fp32 on devices "
        "without bf16) and 32-bit optimizer state "
        "(at most 2% is allowed)"
    )
    assert made.missing_reference(COARSE) is None and made.distrust_reason(FAST) is None
    assert compared((3.0, 2.06), (3.0, 2.0)).distrust_reason(COARSE) is None
    assert compared((3.0,), None).distrust_reason(COARSE) is None
    assert (
        compared((3.0,), (1.0,), SUBJECT).distrust_reason(COARSE) is None
    )  # its weights are random


@pytest.mark.parametrize(("device", "precision"), [("h200", "bf16_mixed"), ("v100-16gb", "fp32")])
def test_the_reference_is_in_the_best_format_that_the_card_has(device, precision):
    task = replace(WEIGHTS, device=resolve_device(device))
    reference = Selection(task).missing_reference(COARSE)
    assert reference == replace(
        COARSE, optimizer="adamw_torch_fused", precision=precision, checkpointing="full"
    )
    assert Selection(task).missing_reference(FAST) is None
    assert Selection(SUBJECT).missing_reference(COARSE) is None


@pytest.mark.parametrize(
    ("made", "config", "said"),
    [
        (compared((3.0,), (1.0,)), FAST, "no number format needs a comparison with bf16 under"),
        (
            compared((3.0,), (1.0,), SUBJECT),
            COARSE,
            "unknown: with random weights, the loss does not show",
        ),
        (
            compared((3.0,), None),
            COARSE,
            "unknown: adamw_8bit was not compared with bf16 under autocast",
        ),
        (
            compared((3.0, 2.1), (3.0, 2.0)),
            COARSE,
            "with adamw_8bit, the losses differ by 2.50% from the losses with bf16 under",
        ),
    ],
)
def test_what_is_known_of_number_formats_is_said(made, config, said):
    add_measured(made, config, steady(0.4, losses=made.record(COARSE).measured.losses))
    if config == FAST:
        made.reject(COARSE, "no candidate")
    assert made.recipe(FINGERPRINT).numerics.startswith(said)


# --- what was extrapolated


def extrapolated(made: Selection, config: TrainConfig, micro_s: float, error: float = 0.0) -> None:
    found = steady(micro_s, time_error=error)
    made.add_result(
        result(config, Outcome.SLOW, measurement=found, evidence=Evidence.EXTRAPOLATED, seconds={})
    )


def test_close_calls_are_those_that_may_win_and_the_best_of_other_cells_within_the_slack():
    """FAST was measured at 0.5 s for eight rows.

    Rows of twice the length are another result cell.
    """
    made = selection()
    assert Selection(SUBJECT).close_calls() == [] == made.close_calls()
    near, far, noisy = (
        replace(FAST, compile="per_layer", attention=one) for one in ("sdpa", "eager", "sdpa_cudnn")
    )
    longer, too_long = replace(FAST, seq_len=2048), replace(FAST, seq_len=4096)
    able, less = replace(FAST, lora_rank=64, micro_batch_size=4), replace(FAST, lora_rank=8)
    extrapolated(made, near, 0.505, 0.015)
    extrapolated(made, far, 0.52, 0.015)
    extrapolated(made, noisy, 0.52, 0.05)
    extrapolated(made, able, 0.26)  # 4 % slower and more capable
    extrapolated(made, less, 0.52)  # 4 % slower and less capable, but the best of its cell
    extrapolated(made, longer, 0.53)  # these are 6 % slower, since the rest of a row is padding
    extrapolated(made, too_long, 9.0)
    assert made.close_calls() == [able, near, noisy, less]
    extrapolated(Selection(SUBJECT), near, 0.1)
    only = Selection(SUBJECT)
    extrapolated(only, near, 0.5)
    assert only.close_calls() == [] and only.finalists(3) == [near]
    assert only.recipe(FINGERPRINT).caveats == (
        "nothing was probed at full depth: every number is extrapolated from a few layers",
    )


def test_a_baseline_that_was_only_extrapolated_is_still_compared_with():
    made = Selection(SUBJECT)
    extrapolated(made, SLOW, 1.0)
    add_measured(made, FAST, steady(0.5))
    made.confirm(FAST, steady(0.5))
    recipe = made.recipe(FINGERPRINT)
    assert recipe.baseline.config == SLOW
    assert (recipe.winner.evidence, recipe.speedup_evidence) == (
        Evidence.MEASURED,
        Evidence.EXTRAPOLATED,
    )
    assert recipe.caveats == (
        "the baseline was not probed at full depth: its speed is extrapolated from a few layers",
    )
    made.confirm(SLOW, steady(1.0))
    recipe = made.recipe(FINGERPRINT)
    assert recipe.speedup_evidence is Evidence.MEASURED and recipe.caveats == ()


def test_who_was_extrapolated_and_not_pruned_may_win():
    """No time was left to measure it: it is a finalist, and the
    winner where the study ends there.
    """
    made, near = Selection(SUBJECT), replace(FAST, compile="per_layer")
    add_measured(made, SLOW, steady(1.0))
    made.add_result(result(near, measurement=steady(0.4), evidence=Evidence.EXTRAPOLATED))
    assert made.finalists(3) == [near, SLOW]
    recipe = made.recipe(FINGERPRINT)
    assert recipe.winner.config == near
    assert recipe.caveats == (
        "the winner was not probed at full depth: its numbers are extrapolated from a few layers",
    )


@pytest.mark.parametrize(
    ("again_s", "error", "rival", "wins"),
    [
        (0.405, 0.02, False, False),  # cannot be told apart
        (0.44, 0.12, True, False),  # likely faster: to be confirmed next
        (0.44, 0.02, True, True),  # surely faster
    ],
)
def test_who_was_extrapolated_rivals_what_is_confirmed_slower(again_s, error, rival, wins):
    """FAST was ahead in the search, with 0.39 s.

    What was extrapolated to 0.4 s may not have been confirmed in time.
    """
    made, near = Selection(SUBJECT), replace(FAST, compile="per_layer")
    add_measured(made, FAST, steady(0.39))
    found = steady(0.4, time_error=error)
    made.add_result(result(near, measurement=found, evidence=Evidence.EXTRAPOLATED))
    assert made.rival() == FAST  # the likely winner before the first confirmation
    made.confirm(FAST, steady(again_s))
    assert made.rival() == (near if rival else None)
    recipe = made.recipe(FINGERPRINT)
    assert made.leader() == recipe.winner.config == (near if wins else FAST)
    said = "the winner was not probed at full depth: its numbers are extrapolated from a few layers"
    assert (said in recipe.caveats) is wins
    made.confirm(near, steady(0.42))
    assert made.rival() is None and made.recipe(FINGERPRINT).winner.evidence is Evidence.MEASURED


def test_with_a_deadline_only_confirmations_know_what_pauses_take():
    made, near = Selection(replace(SUBJECT, within_hours=0.2)), replace(FAST, compile="per_layer")
    add_measured(made, FAST, steady(0.39))
    made.add_result(result(near, measurement=steady(0.4), evidence=Evidence.EXTRAPOLATED))
    made.confirm(FAST, steady(0.6))
    assert made.rival() is None and made.recipe(FINGERPRINT).winner.config == FAST
    made.task = replace(made.task, within_hours=None)
    assert made.rival() == made.recipe(FINGERPRINT).winner.config == near


@pytest.mark.parametrize(("micro_s", "wins"), [(0.475, False), (0.46, True)])
def test_what_is_more_capable_and_confirmed_stays_unless_the_other_is_beyond_the_slack_for_certain(
    micro_s, wins
):
    """FAST was confirmed with 0.5 s.

    Without its rank, 0.475 s would be 5.3 % faster, and uncertain by 2.5 %.
    """
    made, less = Selection(SUBJECT), replace(FAST, lora_rank=8)
    add_measured(made, FAST, steady(0.45))
    made.add_result(
        result(less, measurement=steady(micro_s, time_error=0.025), evidence=Evidence.EXTRAPOLATED)
    )
    made.confirm(FAST, steady(0.5))
    assert made.recipe(FINGERPRINT).winner.config == (less if wins else FAST)


def test_who_is_more_capable_is_a_rival_though_it_ties():
    made, able = Selection(SUBJECT), replace(FAST, lora_rank=64)
    add_measured(made, FAST, steady(0.45))
    made.add_result(result(able, measurement=steady(0.5), evidence=Evidence.EXTRAPOLATED))
    made.confirm(FAST, steady(0.495))
    assert made.rival() == able


def test_whether_the_host_sets_the_pace_of_a_projection_is_unknown():
    made = Selection(SUBJECT)
    add_measured(made, FAST, steady(0.5, host_share=0.9))
    assert made.is_host_bound(FAST)
    made.task = replace(
        made.task,
        carried=SpeedTransfer(products=0.5, bytes=0.4, error=0.1),
        measured_on=resolve_device("h100"),
    )
    assert not made.is_host_bound(FAST)


@pytest.mark.parametrize(("error", "kept"), [(0.04, True), (0.03, False)])
def test_what_cannot_win_is_pruned_with_the_speed_that_it_needs(error, kept):
    """FAST does 8 x 1,024 tokens in 0.5 s, so 16,384 a second. 0.52 s is 4 % more."""
    made, config = selection(), replace(FAST, compile="per_layer")
    prediction = Extrapolation(measurement=steady(0.52, time_error=error))
    assert made.predicted_speed(config, prediction) == pytest.approx(15_753.8, rel=1e-5)
    reason = made.prune_reason(config, prediction)
    assert reason == (None if kept else "predicted 15,754 tokens/s (±3%), 16,384 are needed to win")
    assert Selection(SUBJECT).prune_reason(config, prediction) is None


@pytest.mark.parametrize(("host_share", "kept"), [(0.7, True), (0.9, False)])
def test_a_prediction_that_needs_less_memory_may_equal_the_best_unless_its_host_sets_the_pace(
    host_share, kept
):
    """FAST does 8 rows in 0.5 s and takes 20.4 GiB. One row in 0.063 s is 1 % slower."""
    made, config = selection(), replace(FAST, micro_batch_size=1)
    found = steady(0.063, peak_reserved_gib=10.0, host_share=host_share)
    assert (made.prune_reason(config, Extrapolation(measurement=found)) is None) is kept


def test_a_prediction_that_leaves_room_beats_what_is_tight():
    """FAST takes 97 of 100 GiB: what leaves a tenth free wins within the slack of 5 %, at 0.52 s
    for 0.5.
    """
    made, config = Selection(SUBJECT), replace(FAST, compile="per_layer")
    add_measured(made, FAST, steady(0.5, peak_reserved_gib=97.0, limit_gib=100.0))
    for peak, kept in ((89.0, True), (91.0, False)):
        prediction = Extrapolation(
            measurement=steady(0.52, peak_reserved_gib=peak, limit_gib=100.0)
        )
        assert (made.prune_reason(config, prediction) is None) is kept


def test_evidence_is_projected_where_another_card_probed():
    made = selection()
    assert (made.candidate(FAST).evidence, made.candidate(FAST).memory_evidence) == (
        Evidence.MEASURED,
    ) * 2
    made.task = replace(
        made.task,
        carried=SpeedTransfer(products=0.5, bytes=0.4, error=0.1),
        measured_on=resolve_device("h100"),
    )
    best = made.recipe(FINGERPRINT).winner
    assert (best.evidence, best.cost.evidence, best.memory_evidence) == (
        Evidence.PROJECTED,
        Evidence.PROJECTED,
        Evidence.MEASURED,
    )
    assert best.cost.kwh is None  # the power was that of the other card
    caveat = next(
        one for one in made.recipe(FINGERPRINT).caveats if one.startswith("probed on h100")
    )
    assert "products 0.5 times as fast, memory 0.4 times" in caveat
    bare = Selection(SUBJECT)
    extrapolated(bare, FAST, 0.5)
    assert (
        bare.candidate(FAST).evidence
        is bare.candidate(FAST).memory_evidence
        is Evidence.EXTRAPOLATED
    )


def test_a_study_cut_short_before_its_likely_winner_was_confirmed():
    """The baseline was confirmed first: it does not win for that."""
    made = selection()
    made.confirm(SLOW, steady(1.0))
    recipe = made.recipe(FINGERPRINT)
    assert recipe.winner.config == FAST and recipe.caveats[-1].startswith(
        "the winner was not measured a second time"
    )


@pytest.mark.parametrize(("again_s", "wins"), [(0.9, True), (1.01, True), (1.1, False)])
def test_what_is_confirmed_slower_than_a_baseline_that_was_not_confirmed_does_not_win(
    again_s, wins
):
    """The machine was busy when FAST was measured again, and no time was left for the baseline."""
    made = selection()
    for _ in range(2):
        made.confirm(FAST, steady(again_s))
    recipe = made.recipe(FINGERPRINT)
    assert made.leader() == recipe.winner.config == (FAST if wins else SLOW)
    assert recipe.speedup == pytest.approx(1.0 / again_s if wins else 1.0)
    assert recipe.differs is (again_s == 0.9)
    if not wins:
        assert recipe.caveats == (
            "the winner was not measured a second time: the study was cut short",
        )


def test_a_baseline_that_was_pruned_wins_over_what_is_confirmed_slower_if_that_is_certain():
    """It was extrapolated at 1 s, with an error, and given up since FAST needed 0.5 s by the
    search.
    """
    for error, winner in ((0.01, SLOW), (0.15, FAST)):
        made = Selection(SUBJECT)
        add_measured(made, FAST, steady(0.5))
        extrapolated(made, SLOW, 1.0, error)
        made.confirm(FAST, steady(1.1))
        assert made.recipe(FINGERPRINT).winner.config == winner


def test_a_winner_is_not_slower_than_the_baseline_by_noise_alone():
    """FAST frees more memory.

    A few steps of it are long: the others are 3 % slower than each of the baseline's.
    """
    made = Selection(SUBJECT)
    again = {
        FAST: steady(1.03, step_s=(2.06, 2.06, 2.06, 4.0), peak_reserved_gib=10.0),
        SLOW: steady(1.0, peak_reserved_gib=30.0),
    }
    for config, found in again.items():
        add_measured(made, config, found)
        made.confirm(config, found)
    recipe = made.recipe(FINGERPRINT)
    assert made.noise(FAST) > 0.3 and recipe.winner.config == SLOW


def test_a_probe_without_a_number_is_known_as_tried_only():
    made, measured = Selection(SUBJECT), result(FAST)
    made.add_result(replace(measured, outcome=Outcome.OOM))
    made.add_result(replace(measured, measurement=None))
    assert made.records == {} and made.tried == {FAST}
    made.add_result(replace(measured, outcome=Outcome.SLOW))
    assert made.record(FAST).measured == measured.measurement


def test_the_start_without_weights_to_load_and_of_several_workers():
    made = Selection(SUBJECT)
    for start_s in (10.0, 20.0, 90.0):
        made.add_result(begun(PLAIN, start=start_s, first_step=1.0))  # no longer than two steps
    assert made.startup_s(PLAIN) == 20.0


# --- what the data leave open


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "characters",
            ["the lengths of the examples are estimated from their characters, not counted"],
        ),
        (
            "summary",
            [
                "the lengths of the examples are log-normal, from mean and 99th percentile, not"
                " counted"
            ],
        ),
        ("counted", []),
    ],
)
def test_lengths_that_were_not_counted_are_said_to_be(source, said):
    made = selection(replace(GIVEN, lengths=Lengths.of([1024], source)))
    made.confirm(FAST, steady(0.5))
    assert list(made.recipe(FINGERPRINT).caveats) == said


def test_padding_and_packing_are_said():
    """1,600 examples each of 512 and 256 tokens, in rows of 1,024: two of one kind or four of the
    other in 1,200 rows.

    Eight rows have 21.3 examples, so that two micro batches come nearest to 32.
    """
    mixed, packed = (
        replace(GIVEN, lengths=Lengths.of([512, 256], "given")),
        replace(FAST, packing=True),
    )
    made = selection(mixed)
    made.confirm(FAST, steady(0.5))
    (padding,) = made.recipe(FINGERPRINT).caveats
    in_sequence = "25% of the tokens in a sequence (on average 511)"
    assert padding == f"{in_sequence} are padding, which tokens/s does not count"
    add_measured(made, packed, steady(0.5))
    made.confirm(packed, steady(0.5))
    (packing,) = made.recipe(FINGERPRINT).caveats
    assert packing == (
        "sequences are packed: 2.7 examples per sequence on average,"
        " with 100.0% of the tokens used; a step has 42.7"
        " examples on average, "
        "32 were requested"
    )


# --- who is named


def test_a_baseline_whose_pace_the_host_sets_is_reported_too():
    made = confirmed()
    made.confirm(SLOW, steady(1.0, host_share=0.9))
    (caveat,) = made.recipe(FINGERPRINT).caveats
    assert caveat.startswith(
        f"{SLOW.label()} is CPU-bound: issuing the kernels takes the host 90% of the time"
    )


def test_of_a_cell_whose_best_are_equal_the_measured_one_is_named():
    made = selection()
    extrapolated(made, replace(FAST, compile="per_layer"), 0.5)
    assert [cell.config for cell in made.recipe(FINGERPRINT).cells] == [FAST]


def test_the_start_leaves_out_what_the_first_steps_take_in_any_case():
    """4.04 s, of which 3.04 s are steps that neither load nor compile."""
    made = Selection(SUBJECT)
    first = begun(PLAIN, start=14.0, load=6.0, first_step=4.04)
    made.add_result(replace(first, measurement=replace(first.measurement, warm_s=3.04)))
    assert made.startup_s(PLAIN) == pytest.approx(14 + 6 + 1)


def test_a_card_that_was_calibrated_is_named_where_speeds_are_projected():
    made = selection()
    card = calibration("h100-sxm")
    made.task = replace(
        made.task,
        carried=SpeedTransfer(products=0.5, bytes=0.4, error=0.1),
        measured_on=resolve_device("h100"),
        calibration=card,
    )
    (caveat,) = [
        one
        for one in made.recipe(FINGERPRINT).caveats
        if one.startswith("probed on h100-sxm with its")
    ]
    assert f"from data sheets, h100-sxm {card.label} (matrix products 0.5 times as fast" in caveat
    made.task = replace(made.task, calibration=calibration("a10"))  # of neither card
    assert "speeds are projected from data sheets (matrix products" in " ".join(
        made.recipe(FINGERPRINT).caveats
    )

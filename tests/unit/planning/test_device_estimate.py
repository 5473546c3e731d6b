"""Speed and cost of one configuration on one device, from its step time by hand; and what says
whether it fits.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import Price, list_devices, resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.planning.device_estimate import (
    ACCURACY,
    COUNTED,
    OF_H100,
    OF_MEASURED_KIND,
    OF_OTHER_KIND,
    RANK_ACCURACY,
    accuracy_text,
    conversions_accuracy,
    corrected_by_observations,
    device_limit_gib,
    limit_of,
    planned_device,
    smallest_card,
)
from autotune.planning.plan import planned_setup
from autotune.prediction.estimate import (
    Estimate,
    MemoryBounds,
    device_step_time,
    estimate,
    memory_state,
)
from autotune.prediction.memory_formula import CONTEXT_GIB, ERROR, memory_breakdown
from autotune.prediction.observed_speed import Observation, measured_ratios, observed_transfer
from autotune.prediction.step_time import UNKNOWN_HOST, StepTimeEstimate, estimate_step_time
from autotune.prediction.transfer import (
    BETWEEN,
    REFERENCE,
    WITHIN,
    calibrated_parts,
    interval,
    speed_transfer,
)
from autotune.problem.length_distribution import Lengths
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.study_spec import StudySpec
from autotune.problem.workload import RunShape, Workload
from autotune.report.describe import estimate_basis
from tests.helpers.factories import calibration
from tests.helpers.sessions import subject_of
from tests.unit.prediction.test_memory_formula import estimate as memory_of

H200, A10 = resolve_device(REFERENCE), resolve_device("a10")
PRICE = Price(provider="p", device="d", usd_per_hour=3.0, spot_usd_per_hour=1.0, source="s")
# Three micro batches of two rows on each of two devices: 12 rows a step, and 100 steps.
SHAPE = RunShape(
    micro_batch_size=2,
    accumulation=3,
    world_size=2,
    tokens_per_row=100.0,
    examples_per_row=1.0,
    useful_tokens_per_row=50.0,
    examples=1200,
    epochs=1,
)
STEP = StepTimeEstimate(products_s=1.0, bytes_s=1.0, host_s=0.0, rest_s=4.0, device_error=0.1)


def with_speed(
    step: StepTimeEstimate | None, *, state: str = FITS, num_steps: int | None = None, **facts: Any
) -> Estimate:
    """The estimate of a run of SHAPE whose step time on the reference GPU is known."""
    task = subject_of(**{"device": H200, "price": PRICE} | facts)
    memory = memory_of()
    limit_gib = memory.peak_reserved_gib * {FITS: 2.0, TIGHT: 1.0, OOM: 0.5}[state]
    found = estimate(
        task,
        TrainConfig(),
        limit_gib,
        shape=SHAPE,
        num_steps=num_steps,
        memory=MemoryBounds(least=memory, most=memory),
        clock=lambda: device_step_time(task, TrainConfig(), step),
    )
    assert found is not None and found.state == state
    return found


def test_speed_and_cost_on_the_reference_card_by_hand() -> None:
    """A step takes 3 x 2 + 4 = 10 s: 600 useful tokens, of which each of two devices has half; 100
    steps, 1,000 s.
    """
    found = with_speed(STEP)
    assert (found.tokens_per_s, found.samples_per_s) == (30.0, 0.6)
    assert found.interval == interval(30.0, 0.1)
    cost = found.cost
    assert cost is not None and (cost.num_steps, cost.evidence) == (100, Evidence.ESTIMATED)
    hours = 1000 / 3600
    assert cost.full_run_hours == pytest.approx(hours)
    assert cost.interval_hours == pytest.approx(interval(hours, 0.1))
    assert (cost.usd_per_hour, cost.full_run_usd) == (6.0, pytest.approx(6 * hours))
    with_losses = 24 * math.exp(1 / 24 / 6) * math.expm1(hours / 24)  # one a day, of one save
    assert cost.spot_usd == pytest.approx(2 * with_losses)
    assert cost.kwh == pytest.approx(2 * 0.7 * hours)
    assert (found.num_observations, found.calibration) == (0, None)


def test_a_run_may_end_before_its_examples_do() -> None:
    cost = with_speed(STEP, num_steps=36).cost
    assert cost is not None and (cost.num_steps, cost.full_run_hours) == (36, pytest.approx(0.1))


def test_what_has_no_price_or_power_has_no_cost() -> None:
    unpriced = with_speed(STEP, price=None, device=replace(H200, tdp_w=None)).cost
    assert unpriced is not None and (unpriced.full_run_usd, unpriced.spot_usd, unpriced.kwh) == (
        None,
        None,
        None,
    )
    on_demand = with_speed(STEP, price=replace(PRICE, spot_usd_per_hour=None)).cost
    assert on_demand is not None and on_demand.spot_usd is None and on_demand.usd_per_hour == 6.0


def test_only_what_fits_has_a_speed() -> None:
    unknown = with_speed(STEP, device=replace(A10, bandwidth_gb_s=None))
    for estimated in (with_speed(STEP, state=OOM), unknown, with_speed(None)):
        assert (estimated.tokens_per_s, estimated.interval, estimated.cost, estimated.step) == (
            None,
        ) * 4
    assert with_speed(STEP, state=TIGHT).tokens_per_s == 30.0
    slower = with_speed(STEP, device=A10)
    assert slower.tokens_per_s is not None and slower.tokens_per_s < 10.0


def test_a_need_near_the_limit_is_tight_on_both_sides() -> None:
    needs = (10.0 / (1 - ERROR) + 0.01, 10.0 / (1 - ERROR) - 0.01, 10.0, 10.0 / (1 + ERROR) + 0.01)
    assert [memory_state(need, 10.0) for need in needs] == [OOM, TIGHT, TIGHT, TIGHT]
    assert memory_state(10.0, 10.0 * (1 + ERROR)) == memory_state(9.0, 10.0) == FITS
    assert [memory_state(need, 10.0, 0.01) for need in (10.2, 10.05, 9.95, 9.8)] == [
        OOM,
        TIGHT,
        TIGHT,
        FITS,
    ]


def test_bounds_of_memory_fit_where_the_upper_one_certainly_does() -> None:
    less, more = memory_of(), memory_of(micro_batch_size=16)
    least, most = less.peak_reserved_gib, more.peak_reserved_gib
    bounds = MemoryBounds(least=less, most=more)
    assert bounds.reported is more and least < most
    least *= 1 - ERROR
    assert bounds.state(least - 0.01) == OOM and bounds.state(least + 0.01) == TIGHT
    assert (
        bounds.state(most * (1 + ERROR) - 0.01) == TIGHT
        and bounds.state(most * (1 + ERROR)) == FITS
    )
    unbounded = replace(bounds, most=None)
    assert unbounded.reported is less
    assert [unbounded.state(limit) for limit in (least - 0.01, least + 0.01, 10 * most)] == [
        OOM,
        TIGHT,
        TIGHT,
    ]


def test_the_limit_of_a_device_is_what_its_reserve_and_a_context_leave() -> None:
    usable = A10.usable_gib
    assert usable is not None
    assert device_limit_gib(A10, 0.0) == pytest.approx(usable - CONTEXT_GIB)
    assert device_limit_gib(A10, 0.0, 10.0) == pytest.approx(10.0 - CONTEXT_GIB)
    assert device_limit_gib(A10, 0.25) < device_limit_gib(A10, 0.1) < device_limit_gib(A10, 0.0)
    assert device_limit_gib(A10, 0.0, 0.1) == 0.01  # so that it can be divided by


def test_the_smallest_card_has_the_least_memory_of_those_that_fit() -> None:
    sizes = [card.memory_gib for card in list_devices() if card.memory_gib]
    smallest, large = (
        smallest_card(lambda card: True),
        smallest_card(lambda card: (card.memory_gib or 0) > 50),
    )
    assert smallest is not None and smallest.memory_gib == min(sizes)
    assert large is not None and large.memory_gib == min(size for size in sizes if size > 50)
    assert smallest_card(lambda card: (card.memory_gib or math.inf) > 10_000) is None


OBSERVED = Observation(
    device="a10",
    model="mistralai/Mistral-7B-v0.3",
    model_digest=None,
    config=TrainConfig(micro_batch_size=8, seq_len=512),
    accumulation=4,
    tokens_per_s=800.0,
    step_time_s=None,
    peak_reserved_gib=None,
    source="a test",
    as_of=None,
)


def ratios(**changes: Any) -> list[float]:
    return measured_ratios([replace(OBSERVED, **changes)], A10, "lora", "none")


def test_an_observation_six_deviations_off_is_a_mistake() -> None:
    """The logarithm of the ratio of the speeds is off by as much
    from card to card and within one.
    """
    (ratio,), most = ratios(), 6.0 * math.hypot(BETWEEN, WITHIN)
    expected = 800.0 / ratio  # tokens a second, by formula
    assert ratios(tokens_per_s=640.0) == [pytest.approx(0.8 * ratio)]
    assert ratios(tokens_per_s=expected / math.exp(most - 0.001)) == [
        pytest.approx(math.exp(0.001 - most))
    ]
    assert ratios(tokens_per_s=expected / math.exp(most + 0.001)) == []
    assert ratios(tokens_per_s=expected) == [pytest.approx(1.0)]


def test_rows_of_an_observation_have_their_mean_length() -> None:
    shorter = replace(OBSERVED.config, seq_len=256)
    assert ratios(tokens_per_row=256.4) == ratios(config=shorter) != ratios()
    assert ratios(tokens_per_row=512.0) == ratios() == ratios(tokens_per_row=None)


def test_only_whole_measurements_with_the_same_method_count() -> None:
    assert len(measured_ratios([OBSERVED] * 3, A10, "lora", "none")) == 3
    for method, base in (("full", "none"), ("lora", "nf4")):
        assert measured_ratios([OBSERVED], A10, method, base) == []
    assert measured_ratios([OBSERVED], H200, "lora", "none") == []


def test_a_device_is_planned_for_by_name_or_is_the_one_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotune.core.nvml.list_gpus", list)
    assert planned_device("a10") == A10
    for name in ("auto", " AUTO "):
        with pytest.raises(UsageError, match="no GPU is given") as caught:
            planned_device(name)
        assert caught.value.remedy == "name one: --gpu a10 (`autotune gpus`)"


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("h200", "5 % off in the median of these 11 models"),
        ("h100", "4.3 % off in the median of GPU-bound steps of two models"),
        ("l40s", "published pairs of GPUs, and 8 % with a measurement on the GPU"),
        ("t4", "so the range of the speed is wider"),
        ("mi300x", "so the range of the speed is wider"),
    ],
)
def test_the_accuracy_is_that_of_the_gpu(gpu: str, said: str) -> None:
    task = planned_setup(StudySpec(model="mistral-7b"), resolve_device(gpu)).task
    assert accuracy_text(task).endswith(said)
    assert accuracy_text(task, num_gpus=2).startswith(RANK_ACCURACY)
    assert accuracy_text(task, counted=True).startswith(COUNTED)


def test_a_comparison_names_the_gpus_of_each_kind() -> None:
    def said(*gpus: str) -> str:
        spec = StudySpec(model="mistral-7b")
        return conversions_accuracy([planned_setup(spec, resolve_device(gpu)).task for gpu in gpus])

    assert said("h200") == ""
    assert said("l40s", "h200", "a10", "l40s") == OF_MEASURED_KIND.format(gpu="l40s and a10")
    assert said("h100", "t4") == f"{OF_H100}. {OF_OTHER_KIND.format(gpu='t4')}"
    many = said("l40s", "a10", "l4", "rtx-4090", "rtx-3090", "a100-80gb")
    assert "The speed on l40s, a10, l4, rtx-4090 and 2 other GPUs follows" in many


def test_a_calibrated_gpu_has_no_error_of_a_data_sheet() -> None:
    task = planned_setup(StudySpec(model="mistral-7b"), A10).task
    assert accuracy_text(task) != ACCURACY
    assert accuracy_text(replace(task, calibration=calibration())) == ACCURACY


@pytest.mark.parametrize(
    "knobs",
    [{"allocator": "fixed"}, {"method": "full", "optimizer": "paged_adamw_8bit"}],
    ids=str,
)
def test_memory_that_is_given_back_proves_no_lack_of_memory(knobs: dict[str, Any]) -> None:
    """Free segments and pages of a paged optimizer take memory only while there is enough."""
    config = TrainConfig(micro_batch_size=4, seq_len=2048, checkpointing="none", **knobs)
    memory = memory_breakdown(resolve_model("mistral-7b"), config)
    assert memory is not None and memory.returned > 0.5
    bounds, error = MemoryBounds(least=memory, most=memory), memory.error
    assert bounds.state(memory.peak_reserved_gib * (1 + 1.01 * error)) == FITS
    assert bounds.state(memory.needed_gib * (1 - 0.99 * error)) == TIGHT
    assert bounds.state(memory.needed_gib * (1 - 1.01 * error)) == OOM
    kept = replace(memory, returned=0.0)
    assert MemoryBounds(least=kept, most=kept).state(kept.peak_reserved_gib * 0.95) == OOM


def test_what_an_estimate_rests_on_is_said() -> None:
    assert estimate_basis(accuracy_text(), None).startswith(
        "Nothing was measured here. Estimated: memory by a formula"
    )
    counted = estimate_basis(accuracy_text(counted=True), None)
    assert counted.startswith(
        "Nothing was measured here. Estimated: memory by counting a training step"
    )
    for is_counted, by in ((False, "a formula"), (True, "counting a training step")):
        known = estimate_basis(
            accuracy_text(counted=is_counted), calibrated_parts(calibration(), A10)
        )
        assert known.startswith(
            f"Estimated, GPU and host calibrated on this machine, 2026-11-22: memory by {by}"
        )


def test_products_in_8_bits_are_expected_by_their_own_peak() -> None:
    """An observation counts by the time of its device's parts and its rest, each on its card, over
    what it took.
    """
    l4, model = resolve_device("l4"), resolve_model("mistral-7b")
    for knobs, precision in ({"quantization": "fp8", "compile": "per_layer"}, "fp8"), ({}, "bf16"):
        seen = replace(
            OBSERVED, device="l4", config=replace(OBSERVED.config, **knobs), accumulation=3
        )
        transfer = speed_transfer(H200, l4, precision=precision)
        step_time = estimate_step_time(model, seen.config, UNKNOWN_HOST)
        assert transfer is not None and step_time is not None
        assert transfer.attention is not None
        device_s = step_time.products_s / transfer.products + step_time.bytes_s / transfer.bytes
        device_s += step_time.attention_s / transfer.attention
        took_s = 3 * 8 * 512 / 800
        (ratio,) = measured_ratios([seen], l4, "lora", seen.config.quantization)
        assert ratio == pytest.approx((3 * device_s + step_time.rest_s / transfer.bytes) / took_s)
    eager = replace(OBSERVED, device="l4", config=replace(OBSERVED.config, quantization="fp8"))
    assert measured_ratios([eager], l4, "lora", "fp8") == []  # the formula has no speed for it


def test_a_step_of_less_than_twice_the_time_of_the_host_says_little_of_the_card() -> None:
    """On an H100 the host's part of a micro batch of 8 rows of 256 tokens is close to that of the
    card.
    """
    h100, config = resolve_device("h100"), replace(OBSERVED.config, seq_len=256)
    step_time = estimate_step_time(resolve_model("mistral-7b"), config, UNKNOWN_HOST)
    assert step_time is not None
    for times, counts in ((1.99, 0), (2.01, 1)):
        speed = 8 * 256 / (times * step_time.host_s)  # of each of the 4 micro batches
        seen = replace(OBSERVED, device="h100-sxm", config=config, tokens_per_s=speed)
        assert len(measured_ratios([seen], h100, "lora", "none")) == counts


def test_a_calibrated_card_transfers_by_precision_size_and_training() -> None:
    """Its training was LoRA on a base that is not quantised, and makes only such speeds more
    certain.
    """
    made = calibration("h100-sxm", products={"bf16": {1024: 100.0, 8192: 700.0}})
    h100, lora = resolve_device("h100"), TrainConfig()

    def of(
        config: TrainConfig, calibration: Any = made, side: float | None = None
    ) -> SpeedTransfer:
        found = observed_transfer(H200, h100, config, [], calibration, side=side)
        assert found is not None
        return found

    for config in (TrainConfig(quantization="nf4"), TrainConfig(method="full")):
        assert of(lora).error < of(config).error and of(lora).products == of(config).products
    assert of(lora, side=1024).products < 0.2 * of(lora, side=8192).products
    assert of(lora, None) == speed_transfer(H200, h100)
    l4 = resolve_device("l4")
    by_precision = [speed_transfer(H200, l4, precision=precision) for precision in ("bf16", "fp8")]
    assert by_precision[0] != by_precision[1]
    for quantization, expected in zip(("none", "fp8"), by_precision, strict=True):
        config = TrainConfig(quantization=quantization, compile="per_layer")
        assert observed_transfer(H200, l4, config, []) == expected
    small, large = (
        with_speed(replace(STEP, side=side), device=h100, calibration=made) for side in (1024, 8192)
    )
    assert small.calibration is made and small.tokens_per_s and large.tokens_per_s
    assert small.tokens_per_s < 0.7 * large.tokens_per_s


def test_a_correction_keeps_the_ratio_of_the_hosts() -> None:
    carried = speed_transfer(H200, A10)
    assert carried is not None
    model = resolve_model("mistral-7b")
    for before, host in ((replace(carried, host=0.5), 0.5), (carried, None), (None, None)):
        case = subject_of(model=model, device=A10, measured_on=H200, carried=before)
        seen = observed_transfer(H200, A10, case.baselines[0], [OBSERVED])
        assert seen is not None and seen.basis == 1
        assert corrected_by_observations(case, [OBSERVED]).carried == replace(seen, host=host)
    # The card's own calibration is worth more than what others measured.
    calibrated = subject_of(
        model=model, device=A10, measured_on=H200, carried=carried, calibration=calibration()
    )
    assert corrected_by_observations(calibrated, [OBSERVED]) is calibrated
    case = subject_of(model=model, device=A10)
    slow = replace(case, calibration=calibration(products={"bf16": {8192: 7.0}}))
    plain, limited = (estimate(one, OBSERVED.config, 100.0) for one in (case, slow))
    assert plain and limited and plain.tokens_per_s and limited.tokens_per_s
    assert limited.tokens_per_s < plain.tokens_per_s and limited.calibration == slow.calibration


def test_memory_is_of_the_longest_row_and_time_of_the_mean() -> None:
    """Nine of ten rows have 100 tokens, one 1,000: a mean of 190 with one row in a micro batch; two
    of these a step.
    """
    lengths, config = (
        Lengths(counts=((100, 9), (1000, 1)), source="given"),
        TrainConfig(micro_batch_size=1),
    )
    model, price = resolve_model("mistral-7b"), PRICE
    for global_batch, micro_steps in ((1, 1), (2, 2)):
        workload = Workload(examples=960, lengths=lengths, global_batch=global_batch)
        case = subject_of(model=model, workload=workload, price=price)
        found = estimate(case, config, 100.0)
        memory = memory_breakdown(model, replace(config, seq_len=1000), micro_steps)
        assert found is not None and memory is not None and found.memory == memory
        assert (found.need_gib, found.state, found.limit_gib) == (
            memory.peak_reserved_gib,
            FITS,
            100.0,
        )
        assert (found.device, found.config, found.price) == (case.device, config, price)
        step_time = estimate_step_time(model, replace(config, seq_len=190), UNKNOWN_HOST)
        assert step_time is not None and found.samples_per_s is not None
        step_s = micro_steps * step_time.micro_s + step_time.rest_s
        assert found.samples_per_s == pytest.approx(global_batch / step_s)
        assert found.tokens_per_s == pytest.approx(190 * global_batch / step_s)


def test_the_limit_is_what_the_spec_asks_for() -> None:
    for headroom, memory_gib in ((0.0, None), (0.2, None), (0.2, 12.0)):
        spec = StudySpec(model="mistral-7b", headroom=headroom, memory_gib=memory_gib)
        assert limit_of(spec, A10) == device_limit_gib(A10, headroom, memory_gib)
    assert limit_of(StudySpec(model="mistral-7b", headroom=0.2, memory_gib=12.0), A10) < 12.0 * 0.8

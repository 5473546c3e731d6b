"""Step times, spread, scores and margins, computed by hand."""

from dataclasses import replace

import pytest

from autotune.core.probe_types import Measurement, Outcome
from autotune.core.train_config import TrainConfig
from autotune.prediction.projection import widen_by_conversion
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import (
    AGAIN,
    TIE,
    Performance,
    margins,
    performance,
    step_spread,
    step_time_s,
    tokens_per_s,
)
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.workload import Workload
from tests.helpers.factories import measurement, oom_detail, result

WORKLOAD = Workload(examples=1000, lengths=Lengths.constant(1024), global_batch=32)
SHAPE = WORKLOAD.run_shape(TrainConfig())


def space(**knobs) -> SearchSpace:
    return SearchSpace(
        name="test", knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items())
    )


# --- time and score


def test_the_interval_of_a_speed_up_leaves_out_what_both_share():
    """Both may be 10 % slower or 25 % faster; what a projection adds to both makes neither faster
    than the other.
    """
    fast, slow = (
        Performance.from_step_time(SHAPE, seconds, spread=(-0.1, 0.25)) for seconds in (1.0, 2.0)
    )
    assert fast.times(slow) == pytest.approx((2 * 0.9 / 1.25, 2 * 1.25 / 0.9))
    assert widen_by_conversion(fast, 0.3).times(widen_by_conversion(slow, 0.3)) == pytest.approx(
        fast.times(slow)
    )


def test_the_error_of_a_projection_widens_the_spread() -> None:
    """80 % of cases lie within 1.2816 deviations: of 0.3, from 0.6808 to 1.4688 times; root of the
    sum of squares.
    """
    own = Performance.from_step_time(SHAPE, 1.0, spread=(-0.1, 0.25), mfu=0.4)
    widened = widen_by_conversion(own, 0.3)
    assert widened.spread == pytest.approx(
        (-((0.1**2 + 0.3192**2) ** 0.5), (0.25**2 + 0.4688**2) ** 0.5), rel=1e-3
    )
    assert (widened.own_spread, widened.mfu, widened.step_time_s) == ((-0.1, 0.25), None, 1.0)
    assert (AGAIN, TIE) == (0.01, 0.02)


def test_a_step_is_its_micro_batches_and_the_rest():
    one = measurement(micro_step_s=(0.5, 0.4, 9.0), rest_s=(0.02, 0.03, 0.01))
    assert step_time_s(one, 4) == pytest.approx(4 * 0.5 + 0.02)
    assert step_time_s(measurement(micro_step_s=(0.5,), rest_s=()), 1) == 0.5


def test_micro_batches_of_a_new_length_take_longer():
    one = measurement(micro_step_s=(0.5,), rest_s=(0.02,), new_length_s=0.2)
    assert step_time_s(one, 4, 0.25) == pytest.approx(4 * (0.5 + 0.25 * 0.2) + 0.02)
    assert step_time_s(replace(one, new_length_s=None), 4, 0.25) == pytest.approx(4 * 0.5 + 0.02)
    assert step_time_s(one, 4) == pytest.approx(4 * 0.5 + 0.02)
    # 16 examples of 16 lengths, four to a step and one to a micro batch: each micro batch of the
    # single pass is new where no earlier one had its length, 1 - (15 / 16) ** 16 of the 16 lengths.
    tail = Workload(examples=16, lengths=Lengths.of(range(64, 80), "counted"), global_batch=4)
    config = TrainConfig(micro_batch_size=1, padding="masked")
    micro_s = 0.5 + (1 - (15 / 16) ** 16) * 0.2
    assert performance(config, [one], tail).step_time_s == pytest.approx(4 * micro_s + 0.02)
    assert performance(replace(config, padding="bucket"), [one], tail).step_time_s == pytest.approx(
        4 * 0.5 + 0.02
    )


def test_spread_is_relative_to_the_reported_step():
    one = measurement(step_s=(1.0, 0.9, 1.2), micro_step_s=(0.5,), rest_s=(0.0,))
    assert step_spread([one], 2) == pytest.approx((-0.1, 0.2))
    assert step_spread([one], 20) == pytest.approx((-0.1, 0.2))
    faster = measurement(step_s=(0.5,), micro_step_s=(0.25,), rest_s=(0.0,))
    # 0.75 is reported
    assert step_spread([one, faster], 2) == pytest.approx((0.5 / 0.75 - 1, 1.2 / 0.75 - 1))
    assert step_spread([faster], 1) == (-0.02, 0.02)  # one step tells nothing of its spread
    parted = replace(faster, micro_step_s=(0.49, 0.5, 0.53), rest_s=())
    assert step_spread([parted], 1) == pytest.approx((-0.02, 0.06))  # but for its micro batches
    steady = replace(faster, step_s=(0.5,) * 9)
    # another probe would not agree with it like that
    assert step_spread([steady], 1) == (-0.01, 0.01)
    # of an extrapolated time
    assert step_spread([replace(steady, time_error=0.04)], 1) == (-0.04, 0.04)
    assert step_spread([replace(faster, time_error=0.015)], 1) == (-0.02, 0.02)


def test_performance_by_hand():
    # 32 sequences of 1,024 useful tokens in 4 micro batches of 0.5 s and 0.02 s for the optimizer.
    speed = performance(
        TrainConfig(micro_batch_size=8, seq_len=2048),
        [measurement(0.5)],
        WORKLOAD,
        flops_per_token=1e9,
        peak_tflops=100.0,
    )
    assert speed.step_time_s == pytest.approx(2.02)
    assert speed.samples_per_second == pytest.approx(32 / 2.02)
    assert speed.tokens_per_second == pytest.approx(32 * 1024 / 2.02)
    assert speed.mfu == pytest.approx(32 * 1024 * 1e9 / 2.02 / 1e14)  # padding is no use


def test_the_median_of_the_measurements_counts():
    config = TrainConfig(micro_batch_size=32)
    three = [measurement(0.5), measurement(0.6), measurement(5.0)]
    assert performance(config, three, WORKLOAD).step_time_s == pytest.approx(0.62)


@pytest.mark.parametrize("known", [{}, {"flops_per_token": 1e9}, {"peak_tflops": 100.0}])
def test_an_unknown_peak_gives_no_mfu(known):
    assert performance(TrainConfig(), [measurement()], WORKLOAD, **known).mfu is None


def test_cut_off_tokens_do_not_count():
    config = TrainConfig(micro_batch_size=32, seq_len=512)
    assert performance(config, [measurement(0.48)], WORKLOAD).tokens_per_second == pytest.approx(
        32 * 512 / 0.5
    )


def test_a_micro_batch_that_does_not_divide_has_no_performance():
    with pytest.raises(ValueError, match="micro batch 5 does not divide the global batch 32"):
        performance(TrainConfig(micro_batch_size=5), [measurement()], WORKLOAD)


def test_only_probes_that_succeeded_or_were_pruned_as_slow_have_a_score():
    for outcome in (Outcome.OK, Outcome.SLOW):
        assert tokens_per_s(
            result(outcome=outcome, measurement=measurement()), WORKLOAD
        ) == pytest.approx(32 * 1024 / 2.02)
    for outcome in set(Outcome) - {Outcome.OK, Outcome.SLOW}:
        assert tokens_per_s(result(outcome=outcome, measurement=measurement()), WORKLOAD) is None
    assert tokens_per_s(result(measurement=None), WORKLOAD) is None


# --- margins


@pytest.mark.parametrize(
    ("outcome", "changes", "memory", "health"),
    [
        (Outcome.OK, {"measurement": measurement(peak_reserved_gib=66.0)}, -0.5, 0.0),
        (Outcome.OOM, {}, 133 / 132 - 1, 0.0),
        (Outcome.OOM, {"oom": None}, 0.001, 0.0),
        (Outcome.REFUSED, {"oom": oom_detail()}, 133 / 132 - 1, 0.0),
        (Outcome.NUMERICS, {"measurement": measurement(peak_reserved_gib=66.0)}, -0.5, 1.0),
        (Outcome.NUMERICS, {}, 0.0, 1.0),
        (Outcome.TIMEOUT, {}, 0.0, 1.0),
        (Outcome.CRASH, {}, 0.0, 1.0),
    ],
)
def test_margins(outcome, changes, memory, health):
    assert margins(result(outcome=outcome, **changes)) == pytest.approx(
        {"memory": memory, "health": health}
    )


def test_capability_is_an_order():
    evaluator = [
        TrainConfig(quantization="nf4", lora_rank=64),
        TrainConfig(quantization="int8", lora_rank=8),
        TrainConfig(method="full", precision="bf16_pure"),
        TrainConfig(lora_rank=16, seq_len=4096),
        TrainConfig(lora_rank=32, seq_len=512),
        TrainConfig(lora_rank=32, precision="bf16_pure"),
        TrainConfig(lora_rank=32, precision="fp16_mixed"),
        TrainConfig(lora_rank=32, optimizer="adafactor"),
        TrainConfig(lora_rank=32, optimizer="adamw_8bit"),
        TrainConfig(lora_rank=32),
        TrainConfig(lora_rank=32, dora=True, seq_len=512),
    ]
    assert sorted(evaluator, key=lambda config: config.capability) == evaluator
    assert (
        TrainConfig(micro_batch_size=1, compile="per_layer").capability == TrainConfig().capability
    )


# packed by hand in test_packing.py
BY_HAND = Lengths.of([7, 6, 5, 5, 5, 3, 3, 2, 1, 12], "counted")
PACKED = TrainConfig(seq_len=10, micro_batch_size=1, packing=True)


def test_useful_tokens_of_packed_rows_count() -> None:
    workload = Workload(examples=10, lengths=BY_HAND, global_batch=8)
    fields = dict.fromkeys(Measurement.__dataclass_fields__, 0.0)
    measured = Measurement(**fields | {"step_s": (1.0,), "micro_step_s": (0.25,), "rest_s": ()})  # type: ignore[arg-type]
    packed, alone = (
        performance(replace(PACKED, packing=on), [measured], workload) for on in (True, False)
    )
    assert packed.tokens_per_second == pytest.approx(9.4 / 0.25)
    assert alone.tokens_per_second == pytest.approx(4.7 / 0.25)
    assert packed.samples_per_second == pytest.approx(2 / 0.25)

"""How the measurements of another card, or of a simulated
rank, become the speed of the full run.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.memory_budget import nccl_gib
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import CollectiveRates, KernelTimes, World
from autotune.core.train_config import TrainConfig
from autotune.prediction.collectives import (
    SLOWEST_LINK,
    SLOWEST_MEASURED_LINK,
    SLOWEST_RULE,
    TOGETHER,
    slowest_link,
    traffic,
)
from autotune.prediction.projection import run_performance, run_tokens_per_s
from autotune.problem.length_distribution import Lengths
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from tests.helpers.factories import calibration, measurement, result
from tests.helpers.sessions import space, subject_of

H200, A100, T4 = map(resolve_device, ("h200", "a100", "t4"))
CARRIED = SpeedTransfer(products=0.5, bytes=0.5, error=0.1)
PADDED = Workload(
    examples=1000, lengths=Lengths.of([100, 200, 400, 1000], "counted"), global_batch=32
)


def asked(task: Task, **knobs: Any) -> Any:
    return task.request(
        TrainConfig(**knobs), device="cuda:0", memory_gib=80.0, headroom=0.05, seed=3
    )


def test_a_speed_of_another_card_is_converted_by_its_ratio() -> None:
    own, carried = subject_of(), subject_of(device=A100, measured_on=H200, carried=CARRIED)
    config, probed = TrainConfig(seq_len=256), result(TrainConfig(seq_len=256))
    assert run_tokens_per_s(carried, probed) == pytest.approx(
        0.5 * (run_tokens_per_s(own, probed) or 0)
    )
    assert (
        run_tokens_per_s(own, result(config, measurement=None))
        is run_tokens_per_s(carried, result(config, measurement=None))
        is None
    )
    measured, projected = (
        run_performance(task, config, [measurement()]) for task in (own, carried)
    )
    assert (measured.own_spread, projected.own_spread) == (None, measured.spread)
    assert projected.samples_per_second == pytest.approx(measured.samples_per_second / 2)
    assert projected.tokens_per_second == pytest.approx(measured.tokens_per_second / 2)
    assert projected.step_time_s == pytest.approx(2 * measured.step_time_s)
    # 1.2816 deviations of 10 % either way, and what the probes differ by at a right angle to it.
    low, high = math.exp(-0.12816) - 1, math.exp(0.12816) - 1
    assert projected.spread == pytest.approx(
        (-math.hypot(low, measured.spread[0]), math.hypot(high, measured.spread[1])), rel=1e-4
    )
    assert (own.search_price, carried.search_price) == (own.price, find_price("h200-sxm"))


def test_what_multiplies_what_moves_bytes_and_the_host_are_projected_apart() -> None:
    """Half of the speed in products alone, or in bytes alone, slows down by less; what the host
    needs by nothing.
    """
    task = subject_of(device=A100, measured_on=H200, model=resolve_model("mistral-7b"))
    config = TrainConfig(seq_len=1024)

    def slower(products: float, bytes: float, **fields: Any) -> float:
        carried = replace(task, carried=SpeedTransfer(products=products, bytes=bytes, error=0.1))
        found = measurement(0.5, rest_s=(), **fields)
        assert run_tokens_per_s(carried, result(config, measurement=found)) == pytest.approx(
            run_performance(carried, config, [found]).tokens_per_second
        )
        there, here = (run_performance(one, config, [found]) for one in (carried, task))
        return there.step_time_s / here.step_time_s

    by_products, by_bytes = slower(0.5, 1.0), slower(1.0, 0.5)
    assert 1 < by_bytes < by_products < 2 and by_products + by_bytes == pytest.approx(3)
    assert slower(2.0, 2.0, host_share=0.99) == pytest.approx(1.0, abs=0.02)
    assert 0.5 < slower(2.0, 2.0, host_share=0.6) < 0.7
    known, unknown = (
        run_performance(
            replace(task, carried=CARRIED), config, [measurement(0.5, host_share=share)]
        ).spread
        for share in (0.0, 0.99)
    )
    assert unknown[1] > 2 * known[1] and unknown[0] < 2 * known[0]


def test_a_profile_tells_what_is_projected_by_what() -> None:
    """Of 0.5 s the card is busy for 0.3 s, two thirds in products: they take twice as long there,
    the bytes half.
    """
    kernels = KernelTimes(
        products_s=0.2,
        fp8_s=0.0,
        attention_s=0.0,
        bytes_s=0.1,
        busy_s=0.3,
        micro_s=0.5,
        num_kernels=2,
    )
    transfer = SpeedTransfer(products=0.5, bytes=2.0, error=0.1, profiled_error=0.02)
    own = subject_of()
    there = replace(own, measured_on=H200, carried=transfer)
    config, found = TrainConfig(seq_len=256), measurement(0.5, rest_s=(), kernels=kernels)
    steps = [run_performance(task, config, [found]).step_time_s for task in (own, there)]
    host = 0.5**4 - 0.3**4
    assert steps[1] / steps[0] == pytest.approx(((2 * 0.2 + 0.1 / 2) ** 4 + host) ** 0.25 / 0.5)
    assert run_tokens_per_s(there, result(config, measurement=found)) == pytest.approx(
        run_performance(there, config, [found]).tokens_per_second
    )
    # A device that is busy all the time is projected with the error of profiles.
    busy = measurement(0.3, kernels=replace(kernels, micro_s=0.3))
    low, high = run_performance(there, config, [busy]).spread
    own_high = run_performance(own, config, [busy]).spread[1]
    assert high == pytest.approx(math.hypot(math.exp(1.2816 * 0.02) - 1, own_high))
    assert low < 0


def test_flops_are_compared_with_the_peak_that_the_products_have() -> None:
    mfu = {
        (device.name, quantization): run_performance(
            subject_of(device=device),
            TrainConfig(seq_len=256, quantization=quantization),
            [measurement()],
        ).mfu
        for device in (H200, T4)
        for quantization in ("none", "fp8")
    }
    assert mfu[H200.name, "fp8"] is None and T4.bf16_tflops is None
    ratio = (H200.bf16_tflops or 0) / (T4.fp16_tflops or 1)
    assert mfu[T4.name, "none"] == pytest.approx(ratio * (mfu[H200.name, "none"] or 0))


def test_a_rank_that_was_played_gets_the_time_of_what_ranks_send() -> None:
    """A step computes 32 / 4 / 4 = 2 micro batches of half a second.

    It sends gradients once, or layers in each.
    """
    model, device = resolve_model("mistral-7b"), replace(H200, link_gb_s=10.0)
    shared_out = space().pin("num_gpus", 4)
    real = subject_of(model=model, device=device, space=shared_out)
    played = replace(real, world=World.FAKE)
    assert (real.probing_gpus, played.probing_gpus, subject_of().probing_gpus) == (4, 1, 1)
    one, four = TrainConfig(), TrainConfig(num_gpus=4)
    assert (real.is_projected(four), played.is_projected(four), played.is_projected(one)) == (
        False,
        True,
        False,
    )
    assert asked(played, num_gpus=4).simulates_rank and asked(real, num_gpus=4).has_real_ranks
    assert asked(real, num_gpus=4).memory_gib - asked(
        played, num_gpus=4
    ).memory_gib == pytest.approx(nccl_gib(4))
    twice = (
        asked(real, num_gpus=4).memory_gib
        - asked(played, num_gpus=4, sharding="fsdp2", copies=2).memory_gib
    )
    # a group for the shards, and one for each of them
    assert twice == pytest.approx(2 * nccl_gib(2))
    on_cpu = replace(played, device=resolve_device("cpu"))
    assert asked(on_cpu, num_gpus=4).memory_gib == 80.0
    found = measurement(0.5, rest_s=())
    for strategy, micro_steps_that_send in (("ddp", 1), ("fsdp2", 2)):
        config = TrainConfig(
            method="full", micro_batch_size=4, num_gpus=4, sharding=strategy, seq_len=1024
        )
        alone, together = (run_performance(task, config, [found]) for task in (real, played))
        sent = traffic(model, config, Parallelism.of(config))
        assert sent is not None and alone.step_time_s == pytest.approx(1.0)
        communication_s = sent.step_bytes(2) / 10e9
        added = together.step_time_s - alone.step_time_s
        assert 0.5 * communication_s < added - TOGETHER < communication_s * micro_steps_that_send
        low, high = together.spread
        # The step takes from 1 s, if nothing is added, to what the slowest link adds to it.
        slowest_s = 1.0 + slowest_link(played, Parallelism.of(config)) * communication_s
        ends = [at / together.step_time_s - 1 for at in (1.0, slowest_s)]
        assert (-low, high) == pytest.approx(
            tuple(
                math.hypot(own, end, TOGETHER) for own, end in zip(alone.spread, ends, strict=True)
            ),
            rel=1e-3,
        )
        assert run_tokens_per_s(played, result(config, measurement=found)) == pytest.approx(
            together.tokens_per_second
        )
    quick = replace(played, device=replace(device, link_gb_s=1e9))
    at_once = run_performance(quick, config, [found])
    assert at_once.step_time_s == pytest.approx(1 + TOGETHER)
    assert at_once.spread[1] == pytest.approx(math.hypot(alone.spread[1], TOGETHER), rel=1e-3)


def test_a_calibrated_link_counts_for_its_card_and_number() -> None:
    rates = CollectiveRates(num_gpus=4, gather_gb_s=5.0, scatter_gb_s=5.0, reduce_gb_s=2.5)
    device, found = replace(H200, link_gb_s=10.0), measurement(0.5, rest_s=())
    by_catalogue = subject_of(
        model=resolve_model("mistral-7b"),
        device=device,
        space=space().pin("num_gpus", 4),
        world=World.FAKE,
    )
    measured = replace(by_catalogue, calibration=calibration("h200-sxm", collectives=(rates,)))
    config = TrainConfig(
        method="full", micro_batch_size=4, num_gpus=4, sharding="fsdp2", seq_len=1024
    )
    shards = Parallelism.of(config)
    assert (by_catalogue.link_gb_s(shards), measured.link_gb_s(shards)) == (10.0, 5.0)
    assert measured.link_gb_s(replace(shards, strategy="ddp")) == 2.5
    assert measured.link_gb_s(replace(shards, num_gpus=2)) == 10.0
    slow, fast = (
        run_performance(measured, config, [found]),
        run_performance(by_catalogue, config, [found]),
    )
    assert slow.step_time_s > fast.step_time_s
    assert (
        slowest_link(measured, shards)
        == SLOWEST_MEASURED_LINK
        < SLOWEST_LINK
        == slowest_link(by_catalogue, shards)
    )
    other = replace(by_catalogue, calibration=calibration("a10", collectives=(rates,)))
    assert other.link_gb_s(shards) == 10.0


def test_a_link_by_rule_may_be_slower_unless_it_was_calibrated() -> None:
    rates = CollectiveRates(num_gpus=4, gather_gb_s=5.0, scatter_gb_s=5.0, reduce_gb_s=2.5)
    device = replace(resolve_device("mi300x"), name="h200-sxm")
    by_rule = subject_of(
        model=resolve_model("mistral-7b"),
        device=device,
        space=space().pin("num_gpus", 4),
        world=World.FAKE,
    )
    shards = Parallelism(num_gpus=4, strategy="fsdp2")
    assert by_rule.link_gb_s(shards) == 144
    assert by_rule.is_link_by_rule(shards) and slowest_link(by_rule, shards) == SLOWEST_RULE
    measured = replace(by_rule, calibration=calibration("h200-sxm", collectives=(rates,)))
    assert measured.link_gb_s(shards) == 5.0
    assert not measured.is_link_by_rule(shards)
    assert slowest_link(measured, shards) == SLOWEST_MEASURED_LINK
    assert measured.is_link_by_rule(replace(shards, num_gpus=2))


def test_gpus_of_any_world_wait_for_the_longest_rows() -> None:
    """Their probes have the same lengths on all ranks.

    Of 100 and 300 tokens the longer of two is 250 in the mean.
    """
    workload = Workload(examples=1000, lengths=Lengths.of([100, 300], "counted"), global_batch=16)
    alike = replace(workload, lengths=Lengths.constant(200, "counted"))
    config = TrainConfig(
        num_gpus=2, sharding="fsdp2", micro_batch_size=1, seq_len=512, padding="longest"
    )
    pair, found = space().pin("num_gpus", 2), measurement(0.5, rest_s=(0.1,))
    for world in World:
        uneven, even = (
            subject_of(workload=one, space=pair, world=world) for one in (workload, alike)
        )
        steps = [run_performance(task, config, [found]).step_time_s for task in (uneven, even)]
        assert steps[0] - steps[1] == pytest.approx(8 * 0.5 * 0.25, rel=0.01 + TOGETHER)
        speed = run_performance(uneven, config, [found])
        assert run_tokens_per_s(uneven, result(config, measurement=found)) == pytest.approx(
            speed.tokens_per_second
        )


def test_what_ranks_send_of_a_model_without_a_formula_follows_from_what_a_probe_counted() -> None:
    """All of 1.4 G parameters in bf16, gathered twice on two GPUs, over a link of 1 GB/s: 1.4 s
    each.
    """
    model, config = (
        resolve_model("falcon-h1-1.5b"),
        TrainConfig(num_gpus=2, sharding="fsdp2", seq_len=256),
    )
    task = subject_of(
        model=model,
        space=space().pin("num_gpus", 2),
        device=replace(H200, link_gb_s=1.0),
        world=World.FAKE,
    )
    assert traffic(model, config, Parallelism.of(config)) is None
    found = measurement(0.001, rest_s=(), total_params=1_400_000_000, trainable_params=10_000_000)
    each_s = (
        run_performance(task, config, [found]).step_time_s
        / task.workload.run_shape(config).accumulation
    )
    assert 2 * 1.4 < each_s < 2 * 1.4 * 1.2  # and the ends


def test_a_rank_is_not_played_where_nobody_knows_how_fast_it_sends() -> None:
    task = subject_of(
        space=space().pin("num_gpus", 2), device=replace(H200, link_gb_s=None), world=World.FAKE
    )
    with pytest.raises(ValueError, match="bandwidth is unknown, so a simulated rank has no speed"):
        run_performance(task, TrainConfig(num_gpus=2), [measurement()])

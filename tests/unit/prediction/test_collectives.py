"""The time of a step on several GPUs: bytes on the wire, what is hidden, and an interval that one
GPU's time bounds.
"""

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import ModelSpec, resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.core.parallelism import STRATEGIES, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.prediction.collectives import (
    HIDDEN_COSTS,
    SLOWEST_LINK,
    TOGETHER,
    RankStepTime,
    Traffic,
    add_gradient_all_reduce,
    counted_traffic,
    forward_share,
    rank_step_time,
    traffic,
)
from autotune.prediction.step_time import StepTimeEstimate, estimate_step_time
from autotune.prediction.transfer import interval
from tests.helpers.factories import measurement

PACE = 1 + TOGETHER
# A device's 2 s and a host's 0, so that a micro batch takes 2 s.
STEP = StepTimeEstimate(products_s=1.5, bytes_s=0.5, host_s=0.0, rest_s=0.4, device_error=0.1)
FULL = TrainConfig(method="full", checkpointing="none", loss="full")
LORA = TrainConfig(checkpointing="none", loss="full")


def mistral(layers: int = 32) -> ModelSpec:
    model = resolve_model("mistral-7b")
    return replace(model, params=None, config=model.config | {"num_hidden_layers": layers})


def of(strategy: str, num_gpus: int = 4) -> Parallelism:
    return Parallelism(num_gpus=num_gpus, strategy=strategy)


def timed(
    sent: Traffic, accumulation: int = 1, strategy: str = "fsdp2", **changes: Any
) -> RankStepTime:
    config = replace(FULL, **changes)
    return rank_step_time(
        STEP, config, of(strategy), sent, accumulation=accumulation, link_gb_s=1.0
    )


def test_bytes_on_the_wire() -> None:
    sizes = Sizes.of(mistral())
    assert sizes is not None
    psi = 2 * 3 / 4 * sizes.params  # a gather of bf16 on four ranks
    found = {strategy: traffic(mistral(), FULL, of(strategy)) for strategy in STRATEGIES[1:]}
    ends = 2 * 3 / 4 * (2 * sizes.embedding + (sizes.params - 2 * sizes.embedding) / 32)
    assert found["ddp"] == Traffic(last_backward=pytest.approx(4 * psi))
    of_fsdp2: dict[str, Any] = {
        "forward": psi,
        "last_backward": psi,
        "ends": pytest.approx(ends),
        "gradients": psi,
    }
    assert found["fsdp2"] == Traffic(**of_fsdp2, backward=psi)
    assert found["fsdp2_keep"] == Traffic(**of_fsdp2)
    assert found["zero1"] == Traffic(last_backward=psi, after=psi)
    assert found["zero2"] == Traffic(backward=psi, after=psi)
    assert found["zero3"] == Traffic(forward=psi, backward=2 * psi, ends=pytest.approx(ends))


def test_gradients_are_divided_once_a_step_or_in_each_micro_batch() -> None:
    config = TrainConfig(method="full")
    once, each = (
        traffic(mistral(), config, replace(of("fsdp2"), sync_each_batch=sync))
        for sync in (False, True)
    )
    assert once is not None and each is not None
    assert each.step_bytes(1) == once.step_bytes(1)
    assert each.step_bytes(3) - once.step_bytes(3) == pytest.approx(2 * once.last_backward)


def test_what_goes_to_the_host_and_back_has_no_formula() -> None:
    assert traffic(mistral(), TrainConfig(), replace(of("fsdp2"), offload=True)) is None


def test_hosts_with_copies_add_up_all_gradients_by_a_network_that_their_gpus_share() -> None:
    """Of two hosts each sends all bytes of the gradients once; a slower network counts as more
    bytes of the link.
    """
    config, hosts = TrainConfig(method="full"), Parallelism(num_gpus=16, strategy="fsdp2", copies=2)
    assert hosts.single_copy == of("fsdp2", 8)
    sent, sizes = traffic(mistral(), config, hosts.single_copy), Sizes.of(mistral())
    assert sent is not None and sizes is not None
    found = add_gradient_all_reduce(sent, hosts, slower=10.0)
    steps = [
        rank_step_time(STEP, FULL, way, sent, accumulation=1, link_gb_s=1.0)
        for way in (hosts, of("fsdp2", 8))
    ]
    assert steps[0].step_s == pytest.approx(steps[1].step_s)  # each GPU steps an eighth
    assert found.last_backward - sent.last_backward == pytest.approx(
        10 * 2 * sizes.params, rel=1e-3
    )
    assert replace(found, last_backward=sent.last_backward) == sent
    each = replace(hosts, sync_each_batch=True)
    often = traffic(mistral(), config, each.single_copy)
    assert often is not None
    added = add_gradient_all_reduce(often, each, slower=10.0).backward - often.backward
    assert added == pytest.approx(found.last_backward - sent.last_backward)
    # Copies on one host: each GPU sends its own eighth over its own link.
    here = traffic(mistral(), config, hosts)
    assert here is not None
    assert here.last_backward - sent.last_backward == pytest.approx(2 * sizes.params / 8, rel=1e-3)


def test_adapters_alone_are_reduced() -> None:
    sizes, found, ddp = (
        Sizes.of(mistral()),
        traffic(mistral(), LORA, of("fsdp2", 2)),
        traffic(mistral(), LORA, of("ddp", 2)),
    )
    assert sizes is not None and found is not None and ddp is not None
    adapters = sizes.adapter_params(LORA)
    assert found.forward == sizes.params + adapters and found.last_backward == adapters
    assert ddp == Traffic(last_backward=4 * adapters)
    layer = (sizes.params - 2 * sizes.embedding + adapters) / 32
    assert found.ends == pytest.approx(sizes.embedding + layer + adapters / 32)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2_keep"])
@pytest.mark.parametrize("config", [LORA, FULL], ids=["lora", "full"])
def test_what_a_probe_counted_says_the_same_as_the_formula(
    config: TrainConfig, strategy: str
) -> None:
    sizes = Sizes.of(mistral())
    assert sizes is not None
    adapters = 0 if config.method == "full" else sizes.adapter_params(config)
    counted = measurement(
        total_params=sizes.params + adapters, trainable_params=adapters or sizes.params
    )
    shared = replace(config, num_gpus=4, sharding=strategy)
    found = counted_traffic(mistral(), shared, counted)
    expected = traffic(mistral(), shared, Parallelism.of(shared))
    assert expected is not None
    for name in ("forward", "backward", "last_backward", "after", "ends"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_one_gpu_sends_nothing_and_some_models_have_no_formula() -> None:
    assert traffic(mistral(), LORA, Parallelism()) is None
    assert traffic(resolve_model("pythia-1b"), LORA, of("ddp")) is None


def test_the_longer_of_computation_and_communication_sets_the_pace() -> None:
    """A third of 2 s is the forward pass."""
    quick, slow = timed(Traffic(forward=0.3e9)), timed(Traffic(forward=6e9))
    assert quick.step_s == pytest.approx(2 * PACE + HIDDEN_COSTS * 0.3 + 0.4 / 4)
    assert slow.step_s == pytest.approx(6 + 2 * TOGETHER + HIDDEN_COSTS * 2 / 3 + 4 / 3 + 0.4 / 4)
    assert (quick.communication_s, slow.communication_s) == pytest.approx((0.3, 6.0))
    assert quick.exposed_s == pytest.approx(HIDDEN_COSTS * 0.3)
    assert slow.exposed_s == pytest.approx(slow.step_s - 2 * PACE - 0.1)


def test_the_last_micro_batch_reduces_and_each_gathers() -> None:
    sent = Traffic(forward=0.1e9, backward=0.2e9, last_backward=0.4e9, after=0.8e9, ends=1.6e9)
    found = timed(sent, accumulation=3)
    hidden = HIDDEN_COSTS * (3 * 0.3 + 0.4)
    assert found.step_s == pytest.approx(3 * (2 * PACE + 1.6) + hidden + 0.8 + 0.1)
    assert found.communication_s == pytest.approx(3 * 1.9 + 0.4 + 0.8)


def test_the_optimizers_time_is_divided_where_its_state_is() -> None:
    assert timed(Traffic(), strategy="ddp").step_s == pytest.approx(2 * PACE + 0.4)
    assert timed(Traffic(), strategy="zero1").step_s == pytest.approx(2 * PACE + 0.1)


def test_at_the_fast_end_of_the_interval_all_is_hidden_and_at_the_slow_end_nothing() -> None:
    fast, slow = interval(1.0, STEP.error)
    found = timed(Traffic(forward=0.3e9), accumulation=2)
    assert found.interval_s[0] == pytest.approx(fast * 4.1)
    assert found.interval_s[1] == pytest.approx(slow * 4.1 + SLOWEST_LINK * 0.6)
    assert found.interval_s[0] < found.step_s < found.interval_s[1]
    sure = replace(STEP, device_error=0.0, host_error=0.0)
    known = rank_step_time(
        sure, FULL, of("fsdp2"), Traffic(ends=0.3e9), accumulation=2, link_gb_s=1.0
    )
    assert (known.interval_s[0], known.step_s) == pytest.approx((4.1, 4 * PACE + 0.7))


@pytest.mark.parametrize(
    ("knobs", "share"),
    [
        ({"method": "full", "checkpointing": "none"}, 1 / 3),
        ({"method": "full", "checkpointing": "full"}, 1 / 4),
        ({"checkpointing": "none"}, 1 / 2),
        ({"checkpointing": "every_2"}, 1 / 2.5),
    ],
    ids=str,
)
def test_the_share_of_the_forward_pass(knobs: dict[str, Any], share: float) -> None:
    assert forward_share(TrainConfig(**knobs)) == pytest.approx(share)


# Seconds of a step on each of two H200s with 4 x 1,024 tokens a micro batch: transformers' Trainer,
# Mistral-7B's sizes.
@pytest.mark.parametrize(
    ("layers", "config", "strategy", "accumulation", "seconds"),
    [
        (8, FULL, "fsdp2", 1, 0.1281),
        (16, FULL, "fsdp2", 1, 0.2436),
        (4, FULL, "fsdp2", 2, 0.1322),
        (8, FULL, "fsdp2_keep", 1, 0.1213),
        (8, LORA, "fsdp2", 1, 0.0972),
        (4, FULL, "ddp", 2, 0.1296),
    ],
    ids=str,
)
def test_steps_that_were_measured(
    layers: int, config: TrainConfig, strategy: str, accumulation: int, seconds: float
) -> None:
    config, parallelism = replace(config, micro_batch_size=4), of(strategy, 2)
    alone, sent = (
        estimate_step_time(mistral(layers), config),
        traffic(mistral(layers), config, parallelism),
    )
    assert alone is not None and sent is not None
    found = rank_step_time(
        alone, config, parallelism, sent, accumulation=accumulation, link_gb_s=370
    )
    assert found.interval_s[0] < seconds < found.interval_s[1]
    assert found.step_s == pytest.approx(seconds, rel=0.18)

"""The number of GPUs and the strategy: what is no value, and what a strategy cannot train."""

import re
from typing import Any

import pytest

from autotune.core.knobs import KNOBS
from autotune.core.parallelism import FSDP2, STRATEGIES, ZERO, Parallelism
from autotune.core.train_config import TrainConfig

GRAPHS: dict[str, Any] = {
    "cuda_graphs": "micro_batch",
    "padding": "bucket",
    "checkpointing": "none",
}


def refusal(strategy: str, **knobs: Any) -> str | None:
    return Parallelism(num_gpus=2, strategy=strategy).refusal(TrainConfig(**knobs))


def test_one_gpu_is_the_default() -> None:
    assert Parallelism() == Parallelism(num_gpus=1, strategy="none")


@pytest.mark.parametrize("num_gpus", [0, -1, 1.0, True, "2", None])
def test_the_number_of_gpus_is_a_positive_integer(num_gpus: Any) -> None:
    with pytest.raises(ValueError, match="num_gpus is a positive integer, not"):
        Parallelism(num_gpus=num_gpus)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="strategy is one of none, ddp, fsdp2, fsdp2_keep, zero1, zero2, zero3, not 'x'",
    ):
        Parallelism(num_gpus=2, strategy="x")


@pytest.mark.parametrize(("num_gpus", "strategy"), [(2, "none"), (1, "ddp"), (1, "fsdp2")])
def test_several_gpus_have_a_strategy_and_one_has_none(num_gpus: int, strategy: str) -> None:
    with pytest.raises(ValueError, match=f"strategy {strategy} does not match num_gpus {num_gpus}"):
        Parallelism(num_gpus=num_gpus, strategy=strategy)


def test_sharded_training_has_a_precision_of_its_own() -> None:
    config = TrainConfig(precision="bf16_mixed")
    precisions = {
        strategy: Parallelism(num_gpus=1 if strategy == "none" else 2, strategy=strategy).precision(
            config
        )
        for strategy in STRATEGIES
    }
    assert precisions == dict.fromkeys(("none", "ddp"), "bf16_mixed") | dict.fromkeys(
        (*FSDP2, *ZERO), "bf16_sharded"
    )
    assert (
        Parallelism(num_gpus=2, strategy="fsdp2").precision(TrainConfig(precision="fp32")) == "fp32"
    )


@pytest.mark.parametrize(
    ("knobs", "words", "refused_by"),
    [
        ({"quantization": "nf4"}, "nf4 weights", ZERO),
        ({"quantization": "nf4", "quantize_experts": True}, "nf4|4-bit experts", (*FSDP2, *ZERO)),
        ({"quantization": "int8"}, "int8 weights", (*FSDP2, *ZERO)),
        ({"quantization": "fp8"}, "fp8 base", (*FSDP2, *ZERO)),
        ({"optimizer": "adamw_8bit"}, "adamw_8bit", (*FSDP2, *ZERO)),
        ({"optimizer": "paged_adamw_8bit"}, "paged_adamw_8bit", (*FSDP2, *ZERO)),
        ({"optimizer": "lion_8bit"}, "lion_8bit", (*FSDP2, *ZERO)),
        ({"optimizer": "adafactor"}, "(?i)adafactor", (*FSDP2, *ZERO)),
        ({"precision": "bf16_pure"}, "bf16_pure is untested", ZERO),
        ({"precision": "fp32"}, "fp32 is untested", ZERO),
        ({"precision": "fp16_mixed"}, "fp16_mixed is untested", (*FSDP2, *ZERO)),
        ({"dora": True}, "DoRA", (*FSDP2, *ZERO)),
        ({"compile": "per_layer"}, "compiled layers", ZERO),
        ({"loss": "chunked"}, "", ()),
        ({"loss": "chunked", "modules_to_save": "head"}, "copy of the output head", ("zero3",)),
        ({"optimizer": "adamw_torch"}, "", ()),
        ({"method": "full", "optimizer_in_backward": True}, "step before", STRATEGIES[1:]),
        (GRAPHS, "cuda_graphs micro_batch works only with number of GPUs 1", STRATEGIES[1:]),
        (
            {"tiling": "tokens", "checkpointing": "full"},
            "tiling tokens works only with",
            STRATEGIES[1:],
        ),
        ({"method": "full"}, "", ()),
        ({}, "", ()),
    ],
    ids=str,
)
def test_what_a_strategy_cannot_train(
    knobs: dict[str, Any], words: str, refused_by: tuple[str, ...]
) -> None:
    knobs = {"loss": "full"} | knobs
    refusals = {strategy: refusal(strategy, **knobs) for strategy in STRATEGIES[1:]}
    assert tuple(strategy for strategy, reason in refusals.items() if reason) == refused_by
    for reason in filter(None, refusals.values()):
        assert re.search(words, reason)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_gpus": 2, "strategy": "ddp", "sync_each_batch": True}, "ddp does not support"),
        ({"num_gpus": 2, "strategy": "zero3", "offload": True}, "zero3 does not support"),
        ({"num_gpus": 4, "strategy": "zero2", "copies": 2}, "zero2 does not support"),
        (
            {"num_gpus": 6, "strategy": "fsdp2", "copies": 4},
            "4 copies of the model cannot divide 6 GPUs",
        ),
        ({"num_gpus": 4, "strategy": "fsdp2", "copies": 0}, "0 copies"),
        (
            {"num_gpus": 4, "strategy": "fsdp2", "copies": 4},
            "4 copies of the model cannot divide 4 GPUs",
        ),
    ],
)
def test_what_fsdp2_alone_does(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Parallelism(**values)


def test_a_configuration_says_how_its_gpus_share() -> None:
    config = TrainConfig(num_gpus=8, sharding="fsdp2_keep", sync_each_batch=True, offload=True)
    found = Parallelism.of(config)
    assert found == Parallelism(
        num_gpus=8, strategy="fsdp2_keep", sync_each_batch=True, offload=True
    )
    assert (found.name, found.num_shards) == ("fsdp2_keep, sync_each_batch, offloaded", 8)
    hosts = Parallelism(num_gpus=16, strategy="fsdp2", copies=2)
    assert (hosts.name, hosts.num_shards) == ("hsdp", 8)
    assert Parallelism.of(TrainConfig(sync_each_batch=True, offload=True)) == Parallelism()
    twice = Parallelism.of(TrainConfig(num_gpus=8, sharding="fsdp2", copies=2))
    assert (twice.name, twice.num_shards, twice.single_copy) == (
        "hsdp",
        4,
        Parallelism(num_gpus=4, strategy="fsdp2"),
    )


def test_each_copy_of_the_shards_is_on_two_gpus_at_least() -> None:
    """What a configuration cannot have becomes the next smaller number of copies that it can."""
    possible = {
        number: [
            TrainConfig(num_gpus=number, sharding="fsdp2", copies=copies).copies
            for copies in (2, 4, 8)
        ]
        for number in KNOBS["num_gpus"].choices
    }
    for number, found in possible.items():
        most = [
            copies
            for copies in (1, 2, 4, 8)
            if number % copies == 0 and (number > copies or copies == 1)
        ]
        assert found == [max(one for one in most if one <= copies) for copies in (2, 4, 8)], number
    assert TrainConfig(num_gpus=8, sharding="ddp", copies=2).copies == 1

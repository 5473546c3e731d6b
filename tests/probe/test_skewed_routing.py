"""Skewed routing: the load of the hottest expert, and routers that are as before afterwards."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.core.probe_types import ProbeRequest, Rung
from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.probe.skewed_routing import hottest_load, routers, skew_routing
from autotune.probe.supervisor import WorkerProber
from autotune.trainer.grouped_lora import uses_interface
from autotune.trainer.model_builder import build, config_of, set_lora_kernels, trainable_model
from tests.probe.test_grouped_lora import CPU, EXPERTS, FAMILIES, IN_GATE, SHAPE

pytestmark = [
    pytest.mark.probe,
    # PEFT asks with a name from before transformers 5.23
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # PEFT's, of its own pattern
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]
# 64 experts with 4 for each token, by the names of all families
MANY = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 64
)
MANY |= dict.fromkeys(("num_experts_per_tok", "moe_k"), 4)


def loads(model: torch.nn.Module) -> list[list[float]]:
    """The load of each expert in each layer, as a multiple of the mean, the largest first."""
    found: list[list[float]] = []

    def count(experts: Any, args: tuple[Any, ...]) -> None:
        chosen = Counter(args[1].flatten().tolist())
        mean = sum(chosen.values()) / experts.num_experts
        found.append(sorted(chosen[one] / mean for one in range(experts.num_experts))[::-1])

    hooks = [
        module.register_forward_pre_hook(count)
        for module in model.modules()
        if uses_interface(module)
    ]
    tokens = torch.randint(3, 4096, (8, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in IN_GATE else pytest.mark.families)
        for family in FAMILIES
    ],
)
def test_the_hottest_expert_gets_four_times_the_mean(family: str) -> None:
    """In all families of transformers' interface."""
    shape = SHAPE | FAMILIES[family] | MANY | {"model_type": family, "vocab_size": 4096}
    settings = model_settings(EXPERTS, family)
    torch.manual_seed(0)
    model = build(config_of(shape), settings, CPU)
    adapted = trainable_model(model, settings, CPU)
    before = [router.weight.clone() for router in routers(model)]
    assert before and hottest_load(64, 4) == 4.0

    even = loads(model)
    with skew_routing(model):
        skewed = loads(model)
    for layer in even:
        assert layer[0] < 2.6
    for layer in skewed:
        assert 2.7 < layer[0] < 5.0
        # In a trained OLMoE, the busier half of a layer's experts gets 75 % of the tokens.
        assert 0.7 < sum(layer[:32]) / 64 < 0.85
    assert all(map(torch.equal, before, (router.weight for router in routers(model))))
    assert loads(model) == even

    set_lora_kernels(model, settings)
    with skew_routing(model):
        assert len(routers(adapted)) == len(before)


def test_an_expert_is_never_chosen_by_most_tokens() -> None:
    """Mixtral routes a quarter of the tokens to each of 8 experts, so 4 times is impossible."""
    assert hottest_load(8, 2) == pytest.approx(1.6)
    assert hottest_load(128, 8) == 4.0


def test_a_confirmation_says_what_skewed_routing_costs(prober: WorkerProber, tmp_path: Any) -> None:
    """Only a confirmation of a mixture times it: not a probe of the search, nor a dense model."""
    config = TrainConfig(
        **{"precision": "fp32", "micro_batch_size": 1, "seq_len": 64, "checkpointing": "none"},
        lora_targets="attention",
    )
    request = ProbeRequest(
        config=config,
        model=SHAPE | FAMILIES["qwen3_moe"] | {"model_type": "qwen3_moe"},
        device="cpu",
        memory_gib=2.0,
        rung=Rung.CONFIRM,
        min_timed_s=0.0,
        min_timed_micros=1,
        max_timed_steps=1,
    )
    dense = replace(request, model=SHAPE | {"model_type": "llama"})
    found = [
        prober.probe(one, tmp_path / f"{index}.log").measurement
        for index, one in enumerate((request, replace(request, rung=Rung.FULL), dense))
    ]
    confirmed, searched, of_dense = found
    assert confirmed and searched and of_dense
    assert searched.skewed is None and of_dense.skewed is None
    assert confirmed.skewed is not None and confirmed.skewed.ratio > 0.2
    assert confirmed.skewed.hottest == pytest.approx(0.4 * 6 / 2)
    assert confirmed.losses == searched.losses

"""The memory of the phases of a GRPO step, from shapes that are computed by hand."""

from dataclasses import replace

import pytest

from autotune.catalog import ModelSpec, resolve_model
from autotune.core.objective import Objective
from autotune.core.probe_types import Phase
from autotune.core.rollout_types import SERVER, TRANSFORMERS, Engine
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import MemoryBounds, memory_of
from autotune.prediction.memory_formula import EVALUATES
from autotune.prediction.rollout_memory import (
    cache_bytes,
    cached_tokens,
    engine_weights_gib,
    largest,
    needed_share,
    phases,
)
from autotune.problem.rollouts import Rollouts

QWEN = resolve_model("qwen3-4b")
CARD_GIB = 80.0
LORA = TrainConfig(
    method="lora", lora_rank=16, micro_batch_size=4, seq_len=2560, checkpointing="full",
    loss="chunked", padding="masked",
)  # fmt: skip
ROLLOUTS = Rollouts(
    prompt_tokens=512,
    completion_tokens=2048,
    sequences=64,
    num_generations=8,
    engine=Engine(share=0.3, max_tokens=2560),
)


def found(
    config: TrainConfig = LORA, rollouts: Rollouts = ROLLOUTS, *, scored: bool = True
) -> dict[Phase, MemoryBounds]:
    def bounds(steps: int) -> MemoryBounds:
        memory = memory_of(QWEN, config, steps, objective=Objective.GRPO)
        assert memory is not None
        return MemoryBounds(least=memory, most=memory)

    evaluated = bounds(EVALUATES) if scored else None
    return phases(QWEN, config, rollouts, CARD_GIB, bounds(2), evaluated)


def peaks(bounds: MemoryBounds) -> tuple[float, float]:
    least, most = bounds.bounds_gib
    assert most is not None
    return least, most


def test_each_phase_holds_the_engine_and_what_the_model_needs_then() -> None:
    by_phase = found()
    assert list(by_phase) == [Phase.ROLLOUT, Phase.LOG_PROBS, Phase.BACKWARD]
    update = memory_of(QWEN, LORA, 2, objective=Objective.GRPO)
    assert update is not None
    for bounds in by_phase.values():
        least, most = bounds.least.engine, bounds.reported.engine
        assert 0.9 * 24 < least < 24 < most < 26  # vLLM's share is 0.3 * 80
    least, most = peaks(by_phase[Phase.BACKWARD])
    assert most - by_phase[Phase.BACKWARD].reported.engine == pytest.approx(
        update.peak_reserved_gib
    )
    rollout = by_phase[Phase.ROLLOUT].reported
    assert rollout.activations == rollout.logits == rollout.gradients == 0
    assert rollout.optimizer == update.optimizer and rollout.weights == update.weights
    assert largest(by_phase).reported.phase is Phase.BACKWARD


def test_a_sleeping_engine_frees_its_share_while_the_model_trains() -> None:
    awake = found()
    engine = replace(ROLLOUTS.engine, sleeps=True)
    asleep = found(rollouts=replace(ROLLOUTS, engine=engine))
    assert asleep[Phase.ROLLOUT] == awake[Phase.ROLLOUT]
    for phase in (Phase.LOG_PROBS, Phase.BACKWARD):
        assert peaks(awake[phase])[0] - peaks(asleep[phase])[1] > 20
        assert asleep[phase].reported.engine < 2


def test_a_server_takes_no_memory_and_the_model_itself_needs_a_cache() -> None:
    alone = found(rollouts=replace(ROLLOUTS, engine=Engine(kind=SERVER, max_tokens=2560)))
    assert list(alone) == [Phase.LOG_PROBS, Phase.BACKWARD]
    assert alone[Phase.BACKWARD].reported.engine == 0
    itself = found(rollouts=replace(ROLLOUTS, engine=Engine(kind=TRANSFORMERS, max_tokens=2560)))
    least, most = itself[Phase.ROLLOUT].least.engine, itself[Phase.ROLLOUT].reported.engine
    # 36 layers, keys and values, 8 heads of 128 values, 16 bits
    cache = 64 * 2560 * 36 * 2 * 8 * 128 * 2 / 2**30
    assert least == pytest.approx(cache) and cache < most < 2 * cache
    assert itself[Phase.BACKWARD].reported.engine == 0


def test_only_full_fine_tuning_holds_a_second_model_as_reference() -> None:
    full = replace(LORA, method="full", lora_rank=None, precision="bf16_pure")
    compared = replace(ROLLOUTS, has_reference=True)
    params = (QWEN.params or 0) * 2 / 2**30
    for config, more in ((LORA, 0.0), (full, params)):
        one, two = found(config), found(config, compared)
        for phase in (Phase.LOG_PROBS, Phase.BACKWARD):
            assert peaks(two[phase])[1] - peaks(one[phase])[1] == pytest.approx(more, rel=0.01)
        assert two[Phase.ROLLOUT].bounds_gib == pytest.approx(one[Phase.ROLLOUT].bounds_gib)


def test_whole_logits_are_counted_if_the_version_holds_them_and_may_be_if_it_is_unknown() -> None:
    logits = 4 * 2048 * 151_936 / 2**30
    tiled, whole, unknown = (
        found(rollouts=replace(ROLLOUTS, whole_logits=each))[Phase.BACKWARD]
        for each in (False, True, None)
    )
    assert whole.least.logits == pytest.approx(8 * logits)
    assert whole.reported.logits == pytest.approx(20 * logits)
    assert unknown.bounds_gib == (tiled.bounds_gib[0], whole.bounds_gib[1])
    pure = replace(LORA, method="full", lora_rank=None, precision="bf16_pure")
    least = found(pure, replace(ROLLOUTS, whole_logits=True))[Phase.BACKWARD].least
    assert least.logits == pytest.approx(4 * logits)


def test_what_is_moved_to_the_host_is_not_there_in_a_rollout() -> None:
    moved = found(rollouts=replace(ROLLOUTS, offloads=("weights", "optimizer")))
    rollout = moved[Phase.ROLLOUT].reported
    assert rollout.weights == rollout.optimizer == 0 and rollout.adapters > 0
    assert moved[Phase.BACKWARD] == found()[Phase.BACKWARD]


def test_a_phase_without_log_probabilities_is_left_out() -> None:
    assert Phase.LOG_PROBS not in found(scored=False)


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [
        ({}, 147_456, 147_456),
        ({"sliding_window": 4096}, 0, 147_456),
        (
            {
                "sliding_window": 4096,
                "layer_types": ["sliding_attention"] * 30 + ["full_attention"] * 6,
            },
            147_456 / 6,
            147_456,
        ),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 36 * 2 * 576, 36 * 2 * 576),
    ],
    ids=["full", "window", "both", "latent"],
)
def test_bytes_of_cache_for_a_token(config: dict[str, object], least: float, most: float) -> None:
    model = replace(QWEN, config={k: v for k, v in QWEN.config.items() if k != "sliding_window"})
    model = replace(model, config=model.config | config)
    assert cache_bytes(model) == (least, most)


def test_an_engine_loads_a_base_in_16_bits_unless_it_is_in_4() -> None:
    def gib(model: ModelSpec = QWEN, num_gpus: int = 1, **knobs: object) -> float:
        engine = replace(ROLLOUTS.engine, num_gpus=num_gpus)
        config = replace(LORA, **knobs)
        size = engine_weights_gib(model, config, replace(ROLLOUTS, engine=engine))
        assert size is not None and size[0] == size[1]
        return size[1]

    assert gib() == pytest.approx((QWEN.params or 0) * 2 / 2**30)
    assert gib(num_gpus=2) == pytest.approx(gib() / 2)
    assert 0.25 * gib() < gib(quantization="nf4") < 0.5 * gib()
    stored = replace(resolve_model("gpt-oss-20b"), stored_as="mxfp4")
    bounds = engine_weights_gib(stored, LORA, ROLLOUTS)
    assert bounds is not None and 10 < bounds[0] < 13 and 38 < bounds[1] < 40


def test_the_needed_share_is_the_one_whose_cache_surely_holds_the_tokens() -> None:
    share = needed_share(QWEN, LORA, ROLLOUTS, CARD_GIB, 100_000)
    assert share is not None and 0.25 < share < 0.35
    rollouts = replace(ROLLOUTS, engine=replace(ROLLOUTS.engine, share=share))
    cached = cached_tokens(QWEN, LORA, rollouts, CARD_GIB)
    assert cached is not None
    assert cached[0] == pytest.approx(100_000) and cached[1] > 100_000
    tiny = replace(ROLLOUTS, engine=replace(ROLLOUTS.engine, share=0.05))
    cached = cached_tokens(QWEN, LORA, tiny, CARD_GIB)
    assert cached is not None and cached[1] < 0  # the weights alone need more

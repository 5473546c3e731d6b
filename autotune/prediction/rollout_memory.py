"""The memory of each phase of a GRPO step: rollout, log-probabilities and update.

The phases follow each other on the same GPU, and the largest decides whether the run fits. The
memory of the trained model in a phase comes from the caller. This module adds the memory of the
engine that generates completions. The constants are from one engine (vLLM 0.23 with Qwen3-4B on an
H100), so most terms have a lower and an upper bound.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from autotune.catalog import ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.probe_types import Phase
from autotune.core.rollout_types import BATCHED_TOKENS, COLOCATED, SERVER, TRANSFORMERS
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.prediction.estimate import MemoryBounds
from autotune.prediction.memory_formula import NF4_STATISTICS, WHOLE_LOGITS, MemoryBreakdown
from autotune.problem.rollouts import Rollouts

# GiB that vLLM holds beyond its share, mostly CUDA graphs: 29.9 GiB were in use with 102 graphs and
# a share of 27.7 GiB, including a CUDA context.
BEYOND_SHARE = (0.0, 1.6)
# GiB that a sleeping engine keeps: 2.5 GiB were in use after `sleep`, including a CUDA context.
ASLEEP = (0.3, 1.9)
# A cache of transformers grows by copying, so that the allocator also holds old, smaller blocks.
# Nothing was measured: the upper bound assumes that they take as much as half of the cache.
GROWN_CACHE = 1.5
CACHE_BYTES = 2  # for each value of the cache: vLLM's cache has the dtype of the weights, 16 bits
SAMPLING_BYTES = 12  # for each logit of the next token: the logits, the scores, the probabilities


def phases(
    model: ModelSpec,
    config: TrainConfig,
    rollouts: Rollouts,
    card_gib: float,
    trained: MemoryBounds,
    scored: MemoryBounds | None,
) -> dict[Phase, MemoryBounds]:
    """Return the memory of a GPU at the peak of each phase, by phase.

    `card_gib` is the memory of the whole GPU. `trained` is the memory of the model's update.
    `scored` is the memory of a forward pass without gradients, or None if the run has no such
    phase. The key of the update is the phase of its peak, such as BACKWARD.
    """
    awake, asleep = _engine_gib(model, config, rollouts, card_gib)
    if rollouts.engine.kind == COLOCATED and not rollouts.engine.sleeps:
        asleep = awake

    found = {}
    if rollouts.engine.kind != SERVER:
        resting = MemoryBounds(
            least=_resting(trained.least, rollouts),
            most=trained.most and _resting(trained.most, rollouts),
        )
        found[Phase.ROLLOUT] = _add(resting, engine=awake)
    reference = _reference_gib(model, config, trained.least) if rollouts.has_reference else 0.0
    if scored is not None:
        moment = replace(scored.least, phase=Phase.LOG_PROBS)
        most = scored.most and replace(scored.most, phase=Phase.LOG_PROBS)
        whole = _whole_logits_gib(model, config, rollouts, in_update=False)
        found[Phase.LOG_PROBS] = _add(
            MemoryBounds(least=moment, most=most), weights=reference, engine=asleep, logits=whole
        )
    whole = _whole_logits_gib(model, config, rollouts, in_update=True)
    found[trained.reported.phase] = _add(trained, weights=reference, engine=asleep, logits=whole)
    return found


def largest(found: Mapping[Phase, MemoryBounds]) -> MemoryBounds:
    """Return the memory of a step with these phases, which need their memory one after another."""
    return reduce(MemoryBounds.include_evaluation, found.values())


def _resting(memory: MemoryBreakdown, rollouts: Rollouts) -> MemoryBreakdown:
    """Return the memory between two updates: the model, its adapters and the optimizer."""
    trained = replace(
        memory,
        gradients=0.0,
        activations=0.0,
        logits=0.0,
        reserved=0.0,
        communication=0.0,
        phase=Phase.ROLLOUT,
    )
    offloaded: dict[str, Any] = dict.fromkeys(rollouts.offloads, 0.0)
    return replace(trained, **offloaded)


def _add(
    bounds: MemoryBounds,
    *,
    engine: tuple[float, float],
    weights: float = 0.0,
    logits: tuple[float, float] = (0.0, 0.0),
) -> MemoryBounds:
    """Return the bounds with the GiB of an engine, of a reference model, and of whole logits."""

    def larger(memory: MemoryBreakdown, end: int) -> MemoryBreakdown:
        return replace(
            memory,
            engine=engine[end],
            weights=memory.weights + weights,
            logits=max(memory.logits, logits[end]),
        )

    return MemoryBounds(least=larger(bounds.least, 0), most=bounds.most and larger(bounds.most, 1))


def _engine_gib(
    model: ModelSpec, config: TrainConfig, rollouts: Rollouts, card_gib: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bounds of the engine's memory while it generates, and while the model trains."""
    engine = rollouts.engine
    if engine.kind == SERVER:
        return (0.0, 0.0), (0.0, 0.0)
    if engine.kind == TRANSFORMERS:
        least, most = cache_bytes(model)
        wide = config.method == "full" and config.precision != "bf16_pure"
        tokens = rollouts.sequences * rollouts.longest
        sampled = gib(SAMPLING_BYTES * rollouts.sequences * model.vocab_size)
        cache = gib(least * tokens), GROWN_CACHE * gib(most * tokens * (2 if wide else 1))
        return (cache[0], cache[1] + sampled), (0.0, 0.0)

    share_gib = engine.share * card_gib
    # The engine has room for its own activations, which exist only while it generates.
    awake = share_gib - _activations_gib(model, rollouts), share_gib + BEYOND_SHARE[1]
    return awake, ASLEEP


def _activations_gib(model: ModelSpec, rollouts: Rollouts) -> float:
    """Return an upper bound of the memory in the engine's share that is free while it is idle."""
    inner = model.size("intermediate_size") or 4 * model.hidden_size
    layer = 2 * BATCHED_TOKENS * (4 * model.hidden_size + 3 * inner)
    return gib(layer + SAMPLING_BYTES * rollouts.sequences * model.vocab_size)


def _reference_gib(model: ModelSpec, config: TrainConfig, memory: MemoryBreakdown) -> float:
    """Return the GiB of the untrained model. With adapters, it is the model without adapters."""
    return memory.weights if config.method == "full" else 0.0


def _whole_logits_gib(
    model: ModelSpec, config: TrainConfig, rollouts: Rollouts, *, in_update: bool
) -> tuple[float, float]:
    """Return bounds of the logits of a whole micro batch, (0, 0) if they are computed in tiles.

    If it is unknown whether they are, the lower bound is 0.
    """
    if rollouts.whole_logits is False:
        return 0.0, 0.0
    logits = config.micro_batch_size * rollouts.completion_tokens * model.vocab_size
    least, most = WHOLE_LOGITS[in_update]
    pure = config.precision == "bf16_pure" and config.quantization == "none"
    certain = 0 if rollouts.whole_logits is None else least / 2 if pure else least
    return gib(certain * logits), gib(most * logits)


# --- an engine of vLLM


def cache_bytes(model: ModelSpec) -> tuple[float, float]:
    """Return the least and the most bytes of cache for each token of a sequence.

    The least counts the layers with full attention only: the cache of other layers has a limit. The
    most counts all layers. A model with latent attention stores one compressed vector for each
    layer.
    """
    latent = model.size("kv_lora_rank")
    if latent is not None:
        values = latent + (model.size("qk_rope_head_dim") or 0)
    else:
        heads = model.size("num_attention_heads") or 1
        width = model.size("head_dim") or model.hidden_size // heads
        values = 2 * (model.size("num_key_value_heads") or heads) * width
    text = model.config.get("text_config") or model.config
    kinds = text.get("layer_types")
    full = kinds.count("full_attention") if isinstance(kinds, list) else 0
    every = CACHE_BYTES * values * model.num_layers
    limited = model.size("sliding_window") is not None and not full
    return (0.0 if limited else CACHE_BYTES * values * (full or model.num_layers)), every


def engine_weights_gib(
    model: ModelSpec, config: TrainConfig, rollouts: Rollouts
) -> tuple[float, float] | None:
    """Return bounds of the GiB of a colocated engine's own weights on each GPU, or None if unknown.

    The engine loads a 4-bit base in 4 bits, and every other base in 16 bits. If the checkpoint is
    stored in fewer bits, the engine may load it as it is stored.
    """
    sizes = Sizes.of(model)
    params = model.params or (sizes.params if sizes else None)
    if params is None:
        return None
    most = least = 2.0 * params
    packed_bytes = 0.5 + NF4_STATISTICS[True]
    if config.quantization == "nf4":
        packed = sizes.linear_params if sizes else params
        least = most = most - packed * (2 - packed_bytes)
    elif model.stored_as is not None:
        least = packed_bytes * params
    return gib(least) / rollouts.engine.num_gpus, gib(most) / rollouts.engine.num_gpus


def cached_tokens(
    model: ModelSpec, config: TrainConfig, rollouts: Rollouts, card_gib: float
) -> tuple[float, float] | None:
    """Return how many tokens a colocated engine's cache holds: the least and the most, or None.

    The numbers may be negative: then the share is too small for the engine's own weights. They are
    None if the size of the weights is unknown.
    """
    weights = engine_weights_gib(model, config, rollouts)
    if weights is None:
        return None
    engine = rollouts.engine
    least, most = (each / engine.num_gpus for each in cache_bytes(model))
    share_gib = engine.share * card_gib
    room = share_gib - weights[1] - _activations_gib(model, rollouts) - BEYOND_SHARE[1]
    return room * 2**30 / most, (share_gib - weights[0]) * 2**30 / max(least, 1.0)


def needed_share(
    model: ModelSpec, config: TrainConfig, rollouts: Rollouts, card_gib: float, tokens: float
) -> float | None:
    """Return the share with which a colocated engine's cache surely holds `tokens` tokens."""
    weights = engine_weights_gib(model, config, rollouts)
    if weights is None:
        return None
    cache = gib(tokens * cache_bytes(model)[1]) / rollouts.engine.num_gpus
    return (weights[1] + cache + _activations_gib(model, rollouts) + BEYOND_SHARE[1]) / card_gib

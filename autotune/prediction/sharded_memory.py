"""The memory of one of several GPUs, by formula: the parts of `memory_formula`, divided as the strategy divides them.

FSDP2 as accelerate sets it has one unit for each layer, one for the embedding, and one for final norm and head that is
not resharded after the forward pass. Which buffers are alive at which moment was read in torch's `fully_shard` and
counted there, with the operations of a training step on the meta device. DeepSpeed's stages follow the ZeRO paper, with
the settings of the exported script, or of a file that `check` reads.
"""

import functools
from dataclasses import dataclass, replace

from autotune.catalog import ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.memory_budget import nccl_of
from autotune.core.parallelism import FSDP2, Parallelism
from autotune.core.probe_types import Measurement, Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.prediction.memory_formula import (
    KEPT_ANSWERS,
    WORKSPACE,
    MemoryBreakdown,
    beyond_allocated_gib,
    kept_gib,
    live_logits,
    memory_breakdown,
    step_moments,
    supported,
)

# The largest error of the formula is 3 %, and 1.5 % under DeepSpeed. Streams of their own have pools of their own,
# whose free blocks serve no other until memory is short: ranks held 20 to 55 % more than they had allocated where the
# card had room for it.
RANK_ERROR = 0.08
MAX_LIVE = 10**9  # parameters that stage 3 may keep gathered, by DeepSpeed's default
IN_FORWARD = ("gathering", "gathering the head", "forward")  # moments of a step
AFTER_SCATTERING = (
    "second",
    "first",
    "inputs",
    "scattering",
    "optimizer",
)  # those whose gradients are shards

# Bytes of (gradients, activations, logits, communication) at a moment of a step.
Moment = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedBuffers:
    """The memory that DeepSpeed needs beside the parts of the model.

    `bucket` counts the values of a bucket; None is the Trainer's `auto`. `live` counts the parameters that stage 3 may
    keep gathered; None is two layers, as in the exported script. With `builds_whole`, each GPU holds the whole model
    before DeepSpeed divides it.
    """

    bucket: int | None = None
    live: int | None = None
    builds_whole: bool = True


EXPORTED = DeepSpeedBuffers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The parameters of a model as several GPUs divide and exchange them.

    `base` counts those of the model, `adapters` those beside it, `layer` both of a layer.
    """

    base: int
    adapters: int
    layer: float
    embedding: int
    trained: int
    trained_layer: float

    @classmethod
    def of(cls, sizes: Sizes, config: TrainConfig) -> "Shares":
        """What there is to divide with this method and these adapters."""
        full, adapters = config.method == "full", sizes.adapter_params(config)
        ends = sizes.embedding * (1 if sizes.tied else 2)
        layer = (sizes.params - ends + adapters) / sizes.layers
        return cls(
            base=sizes.params,
            adapters=adapters,
            layer=layer,
            embedding=sizes.embedding,
            trained=sizes.params if full else adapters,
            trained_layer=layer if full else adapters / sizes.layers,
        )

    @classmethod
    def counted(cls, model: ModelSpec, config: TrainConfig, measured: Measurement) -> "Shares":
        """The same of any model, from the parameters that a probe counted; what is trained whole counts as adapters."""
        full, trained = config.method == "full", measured.trainable_params
        adapters = 0 if full else trained
        embedding = model.vocab_size * model.hidden_size
        ends = embedding * (1 if model.config.get("tie_word_embeddings") else 2)
        layer = max(measured.total_params - ends, 0) / model.num_layers
        return cls(
            base=measured.total_params - adapters,
            adapters=adapters,
            layer=layer,
            embedding=embedding,
            trained=trained,
            trained_layer=layer if full else trained / model.num_layers,
        )


def rank_breakdown(
    model: ModelSpec,
    config: TrainConfig,
    parallelism: Parallelism,
    micro_steps: int = 2,
    buffers: DeepSpeedBuffers = EXPORTED,
) -> MemoryBreakdown | None:
    """The memory of one rank at the peak of a step, in GiB; None where no formula covers model or configuration.

    `micro_steps` are the micro batches of a step on each GPU: with 1, nothing waits for a later one. Raises ValueError
    if the strategy cannot train the configuration.
    """
    reason = parallelism.refusal(config)
    if reason is not None:
        raise ValueError(reason)
    sizes = supported(model, config)
    if sizes is None or (parallelism.shards and config.precision == "fp32"):
        return None
    if parallelism.shards:
        return _sharded(sizes, config, parallelism, micro_steps > 1, buffers)
    memory = memory_breakdown(model, config, micro_steps, ddp=parallelism.num_gpus > 1)
    if memory is None or parallelism.num_gpus == 1:
        return memory
    return replace(memory, nccl=nccl_of(parallelism), own_error=RANK_ERROR)


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _sharded(
    sizes: Sizes,
    config: TrainConfig,
    parallelism: Parallelism,
    accumulates: bool,
    buffers: DeepSpeedBuffers,
) -> MemoryBreakdown:
    fsdp, shares = parallelism.strategy in FSDP2, Shares.of(sizes, config)
    if fsdp:
        moments = _fsdp2_moments(sizes, config, shares, parallelism, accumulates)
    else:
        moments = _zero_moments(sizes, config, shares, parallelism, accumulates, buffers)
    weights, adapters, state = _lasting(config, shares, parallelism)
    if not fsdp and buffers.builds_whole:
        built = (4 if config.method == "full" else 2) * shares.base + 4 * shares.adapters
        moments["building"] = (0.0, 0.0, 0.0, max(built - weights - adapters - state, 0.0))
    totals = {name: sum(parts) for name, parts in moments.items()}
    moment = max(totals, key=lambda name: totals[name])
    gradients, activations, logits, communication = moments[moment]
    live, layer = live_logits(config, sizes.vocab), kept_gib(sizes, config)
    reserved = beyond_allocated_gib(config, live, gib(activations + logits), layer)
    phase = Phase.FORWARD if moment in IN_FORWARD else Phase.BACKWARD
    own, scattered = (
        _pools(sizes, config, shares, parallelism),
        _scattered(config, shares, parallelism),
    )
    elsewhere = {
        name: min(moments[name][0], scattered) if name in AFTER_SCATTERING else 0.0
        for name in moments
    }
    pooled = own + max(totals[name] - elsewhere[name] for name in moments)
    return MemoryBreakdown(
        weights=gib(weights),
        adapters=gib(adapters),
        gradients=gib(gradients),
        optimizer=gib(state),
        activations=gib(activations),
        logits=gib(logits),
        workspace=gib(WORKSPACE),
        reserved=reserved,
        phase={"optimizer": Phase.OPTIMIZER, "building": Phase.LOAD}.get(moment, phase),
        communication=gib(communication),
        nccl=nccl_of(parallelism),
        pools=gib(max(pooled - totals[moment], 0.0)) if fsdp else 0.0,
        own_error=RANK_ERROR,
    )


def _pools(sizes: Sizes, config: TrainConfig, shares: Shares, parallelism: Parallelism) -> float:
    """Bytes that are allocated on streams of their own: two gathered layers, both ends, and scattered gradients."""
    of_trained = max(
        2.0 * shares.trained_layer, 2.0 * shares.embedding if config.method == "full" else 0.0
    )
    ends = 2.0 * shares.embedding * (1 if sizes.tied else 2)
    scattered = _scattered(config, shares, parallelism)
    return 4.0 * shares.layer + ends + scattered + of_trained / parallelism.num_shards


def _lasting(
    config: TrainConfig, shares: Shares, parallelism: Parallelism
) -> tuple[float, float, float]:
    """Bytes of weights, adapters and optimizer state of a rank. The state of DeepSpeed has the fp32 masters too."""
    gpus = parallelism.num_shards
    if parallelism.strategy not in FSDP2:
        held = gpus if parallelism.strategy == "zero3" else 1
        return 2 * shares.base / held, 2 * shares.adapters / held, 12 * shares.trained / gpus
    if parallelism.offload:
        return 0.0, 0.0, 0.0
    trained = 2 if config.precision == "bf16_pure" else 4
    weights = (trained if config.method == "full" else 2) * float(shares.base)
    return weights / gpus, trained * shares.adapters / gpus, 2 * trained * shares.trained / gpus


def _scattered(config: TrainConfig, shares: Shares, parallelism: Parallelism) -> float:
    """Bytes of a rank's shard of all gradients at the end of the backward pass."""
    if parallelism.offload:
        return 0.0
    return (2 if config.precision == "bf16_pure" else 4) * shares.trained / parallelism.num_shards


def _held_gradients(
    sizes: Sizes, config: TrainConfig, shares: Shares, parallelism: Parallelism, accumulates: bool
) -> dict[str, float]:
    """Bytes of gradients that FSDP2 holds at the moments of a step, without those of the unit that computes.

    Those of a micro batch whose step is not yet over wait unsharded, unless each is divided; those of the last are
    scattered layer by layer, in fp32: 2 / gpus of the bytes of an unsharded one. Those of a tied head wait for the end.
    Until the pass is over, what copies of the shards add up is held in bf16 too.
    """
    gpus, whole = parallelism.num_shards, accumulates and not parallelism.sync_each_batch
    layer, end = (
        2 * shares.trained_layer,
        2.0 * shares.embedding if config.method == "full" else 0.0,
    )
    scattered = _scattered(config, shares, parallelism)
    waiting = 2.0 * shares.trained if whole else scattered * accumulates
    of_layer, of_end = (0.0 if parallelism.offload else 2 * each / gpus for each in (layer, end))
    # Shards that are still to come; where others wait divided, these are added to what is there.
    missing_layer, missing_end = (
        each if whole or not accumulates else 0.0 for each in (of_layer, of_end)
    )
    first = scattered - missing_end - missing_layer + (layer + end) * whole
    added_up = 1 / gpus if parallelism.copies > 1 else 0.0
    return {
        "waiting": waiting,
        "layers": waiting if sizes.tied else waiting - end * whole + of_end + end * added_up,
        "second": first
        - missing_layer
        + layer * whole
        + (2.0 * shares.trained - end - 2 * layer) * added_up,
        "first": first + (2.0 * shares.trained - end - layer) * added_up,
        "inputs": scattered - missing_end + end * whole + (2.0 * shares.trained - end) * added_up,
        "scattered": scattered,
        "added up": 2.0 * shares.trained * added_up,
    }


def _fsdp2_moments(
    sizes: Sizes, config: TrainConfig, shares: Shares, parallelism: Parallelism, accumulates: bool
) -> dict[str, Moment]:
    """The moments of a step under FSDP2 that may be its peak.

    A gathered layer is alive twice, as it came and in the shape of its parameters.
    """
    full, tied, gpus = config.method == "full", sizes.tied, parallelism.num_shards
    plain = _undivided(sizes, config, shares)
    layer, embedding = 2 * shares.layer, 2.0 * shares.embedding
    trained_layer, trained_end = 2 * shares.trained_layer, embedding if full else 0.0
    keeps = parallelism.strategy == "fsdp2_keep"
    kept = (sizes.layers * layer + (0 if tied else embedding)) if keeps else 0.0
    gathered = 0.0 if keeps else layer
    held = _held_gradients(sizes, config, shares, parallelism, accumulates)
    waiting, scattered = held["waiting"], held["scattered"]
    # When a layer's activations are most, one of its gradients exists; then these grow as the activations go.
    of_layer = plain["first"][1]
    growing = max(
        trained_layer - of_layer, 2.0 * sizes.hidden * sizes.intermediate if full else 0.0
    )
    body, before_last = plain["forward"][1], plain["forward"][1] * (sizes.layers - 1) / sizes.layers
    return {
        # What a unit gathered is held until the next one is in the shape of its parameters.
        "gathering": (waiting, before_last, 0.0, max(kept, layer) + 2 * layer + embedding * tied),
        "gathering the head": (waiting, body, 0.0, kept + layer + (1 if tied else 2) * embedding),
        "forward": (
            waiting,
            body,
            # A loss in chunks follows once the model's forward pass is over, and with it what it gathered.
            0.0 if config.loss == "chunked" else plain["forward"][2],
            kept + embedding + (layer if tied else embedding),
        ),
        "head": (waiting, *plain["head"][1:], kept + embedding),
        "layers": (
            held["layers"],
            plain["layers"][1] + growing,
            0.0,
            # The layer, the next one, and the gradients of the unit before, which are being scattered.
            max(kept, layer) + gathered + (embedding if tied else trained_end),
        ),
        "second": (
            held["second"],
            of_layer + growing,
            0.0,
            layer + gathered + embedding * (tied or keeps) + trained_layer,
        ),
        "first": (held["first"], of_layer + growing, 0.0, layer + embedding + trained_layer),
        "inputs": (held["inputs"], plain["inputs"][1], 0.0, embedding + trained_layer),
        # Unsharded, as the input of its scattering, and as what came of that in bf16 and in fp32.
        "scattering": (
            scattered,
            trained_end,
            0.0,
            trained_end + max(trained_end / gpus, held["added up"]),
        ),
        "optimizer": (
            scattered,
            0.0 if parallelism.offload else _square_roots(config, shares, gpus),
            0.0,
            0.0,
        ),
    }


def _undivided(
    sizes: Sizes, config: TrainConfig, shares: Shares
) -> dict[str, tuple[float, float, float]]:
    """The moments of a step that computes in bf16, without gradients: the memory that no GPU shares with others."""
    pure, logits = replace(config, precision="bf16_pure"), live_logits(config, sizes.vocab)
    return step_moments(sizes, pure, shares.trained, 0.0, 2, logits, accumulates=False)


def _zero_moments(
    sizes: Sizes,
    config: TrainConfig,
    shares: Shares,
    parallelism: Parallelism,
    accumulates: bool,
    buffers: DeepSpeedBuffers,
) -> dict[str, Moment]:
    """The moments of a step under DeepSpeed: gradients in bf16, divided from stage 2 on, and in fp32 for the step.

    The third stage has memory for its shard of them at all times.
    """
    gpus, stage = parallelism.num_gpus, parallelism.strategy
    pure = replace(config, precision="bf16_pure")
    gradients = 2 * shares.trained / (1 if stage == "zero1" else gpus)
    plain = step_moments(
        sizes,
        pure,
        shares.trained,
        gradients,
        2,
        live_logits(config, sizes.vocab),
        accumulates=accumulates or stage == "zero3",
    )
    bucket = 2.0 * (buffers.bucket or sizes.hidden**2)
    live = 0.0
    if stage == "zero3":
        live = 2.0 * min(
            shares.base + shares.adapters,
            2 * shares.layer if buffers.live is None else buffers.live,
        )
    moments = {
        name: (max(held, 0.0), activations, logits, bucket + live)
        for name, (held, activations, logits) in plain.items()
    }
    whole = gradients + 4 * shares.trained / gpus
    return moments | {"optimizer": (whole, _square_roots(config, shares, gpus), 0.0, bucket)}


def _square_roots(config: TrainConfig, shares: Shares, gpus: int) -> float:
    """Bytes that torch's own AdamW, if it is not fused, needs for the roots of the second moments."""
    each = 2 if config.precision == "bf16_pure" else 4
    return each * shares.trained / gpus if config.optimizer == "adamw_torch" else 0.0

"""The formula for the memory of each GPU in a training on several GPUs.

The terms of `memory_formula` are divided among the GPUs as the strategy shards them. With
accelerate's settings, FSDP2 gathers and shards parameters in units: one for each layer, one for the
embedding, and one for the final norm and the head. The unit of the head is not resharded after the
forward pass. A training step with torch's `fully_shard` on the meta device showed which buffers
exist at each moment. For DeepSpeed's stages, the formula follows the ZeRO paper. The caller passes
DeepSpeed's settings, either from the exported script or from a file that the command `check` reads.
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
    EVALUATES,
    KEPT_ANSWERS,
    WORKSPACE,
    MemoryBreakdown,
    allocator_overhead_gib,
    evaluation_moments,
    evaluation_overhead_gib,
    kept_gib,
    live_logits,
    memory_breakdown,
    step_moments,
    supported,
)

# The assumed relative error of a rank's peak. The largest measured error was 3 % under FSDP2 and
# 1.5 % under DeepSpeed. Each side stream has its own memory pool, and other streams get the free
# blocks of this pool only if memory is short. So on cards with enough memory, the memory that a
# rank reserved was 20 to 55 % above the memory that the rank had allocated.
RANK_ERROR = 0.08
MAX_LIVE = 10**9  # DeepSpeed's default for the number of parameters that stage 3 may keep gathered
IN_FORWARD = ("gathering", "gathering the head", "forward")  # moments of a step
EVALUATED = ("layer evaluated", "head evaluated")  # moments of an evaluation
# Moments of a step after gradients were scattered, so that each rank holds only its shard of them
AFTER_SCATTERING = ("second", "first", "inputs", "scattering", "optimizer")

# The bytes of (gradients, activations, logits, communication) that exist at a moment of a step
Moment = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedBuffers:
    """The settings that determine how much memory DeepSpeed needs for its buffers.

    `bucket` is the number of gradients in a bucket, or None for the Trainer's value `auto`. `live`
    is the number of parameters that stage 3 may keep gathered, or None for the parameters of two
    layers, as in the exported script. If `builds_whole` is true, each GPU holds the whole model
    before DeepSpeed shards the model.
    """

    bucket: int | None = None
    live: int | None = None
    builds_whole: bool = True


EXPORTED = DeepSpeedBuffers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The numbers of a model's parameters that several GPUs shard and exchange.

    `base` is the number of parameters in the base model, `adapters` the number in all adapters, and
    `layer` the number in one layer with its adapters.
    """

    base: int
    adapters: int
    layer: float
    embedding: int
    trained: int
    trained_layer: float

    @classmethod
    def of(cls, sizes: Sizes, config: TrainConfig) -> "Shares":
        """Return the numbers of parameters for this configuration's method and adapters."""
        full = config.method == "full"
        adapters = sizes.adapter_params(config)
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
    def from_measurement(
        cls, model: ModelSpec, config: TrainConfig, measured: Measurement
    ) -> "Shares":
        """Return the numbers of parameters of any model, from the totals that a probe counted.

        The parameters of modules that are trained in full beside adapters are included in
        `adapters`.
        """
        full = config.method == "full"
        trained = measured.trainable_params
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
    """Return the GiB that one rank needs at the peak of a step, or None if no formula covers it.

    `micro_steps` is the number of micro batches in a step of each GPU. With 1, no gradients are
    kept for a later micro batch. Raises ValueError if the strategy cannot train the configuration.
    """
    reason = parallelism.refusal(config)
    if reason is not None:
        raise ValueError(reason)
    sizes = supported(model, config)
    if sizes is None or (parallelism.shards and config.precision == "fp32"):
        return None

    if parallelism.shards:
        return _sharded_breakdown(sizes, config, parallelism, min(micro_steps, 2), buffers)
    memory = memory_breakdown(model, config, micro_steps, ddp=parallelism.num_gpus > 1)
    if memory is None or parallelism.num_gpus == 1:
        return memory
    return replace(memory, nccl=nccl_of(parallelism), own_error=RANK_ERROR)


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _sharded_breakdown(
    sizes: Sizes,
    config: TrainConfig,
    parallelism: Parallelism,
    micro_steps: int,
    buffers: DeepSpeedBuffers,
) -> MemoryBreakdown:
    accumulates = micro_steps > 1
    fsdp = parallelism.strategy in FSDP2
    shares = Shares.of(sizes, config)
    if fsdp:
        moments = _fsdp2_moments(sizes, config, shares, parallelism, accumulates)
    else:
        moments = _zero_moments(sizes, config, shares, parallelism, accumulates, buffers)

    weights, adapters, state = _lasting_bytes(config, shares, parallelism)
    if not fsdp and buffers.builds_whole:
        built_bytes = (4 if config.method == "full" else 2) * shares.base + 4 * shares.adapters
        moments["building"] = (0.0, 0.0, 0.0, max(built_bytes - weights - adapters - state, 0.0))
    if micro_steps == EVALUATES:
        moments = _evaluation(sizes, config, shares, moments)

    totals = {name: sum(parts) for name, parts in moments.items()}
    moment = max(totals, key=lambda name: totals[name])
    gradients, activations, logits, communication = moments[moment]
    live = live_logits(config, sizes.vocab)
    layer = kept_gib(sizes, config)
    reserved = allocator_overhead_gib(config, live, gib(activations + logits), layer)
    if micro_steps == EVALUATES:
        reserved = evaluation_overhead_gib(gib(activations), gib(logits))
    phases = {"optimizer": Phase.OPTIMIZER, "building": Phase.LOAD}
    phases |= dict.fromkeys(IN_FORWARD, Phase.FORWARD) | dict.fromkeys(EVALUATED, Phase.EVALUATE)

    # The pool of each stream keeps all the memory that the stream held at its peak. So the peaks of
    # all streams add up, even if they occur at different moments.
    side_pools = _pools(sizes, config, shares, parallelism)
    scattered = _scattered_bytes(config, shares, parallelism)
    in_side_pools = {
        name: min(moments[name][0], scattered) if name in AFTER_SCATTERING else 0.0
        for name in moments
    }
    pooled = side_pools + max(totals[name] - in_side_pools[name] for name in moments)
    return MemoryBreakdown(
        weights=gib(weights),
        adapters=gib(adapters),
        gradients=gib(gradients),
        optimizer=gib(state),
        activations=gib(activations),
        logits=gib(logits),
        workspace=gib(WORKSPACE),
        reserved=reserved,
        phase=phases.get(moment, Phase.BACKWARD),
        communication=gib(communication),
        nccl=nccl_of(parallelism),
        pools=gib(max(pooled - totals[moment], 0.0)) if fsdp else 0.0,
        own_error=RANK_ERROR,
    )


def _evaluation(
    sizes: Sizes, config: TrainConfig, shares: Shares, step: dict[str, Moment]
) -> dict[str, Moment]:
    """Return the memory at the moments of an evaluation, given the moments of a training step.

    An evaluation gathers the same parameters as the forward pass of a step. ZeRO 3 holds memory for
    gradients during an evaluation too.
    """
    gathered = max(step[name][3] for name in IN_FORWARD if name in step)
    gradients = step["forward"][0]
    pure = replace(config, precision="bf16_pure")
    logits = live_logits(config, sizes.vocab)
    whole = evaluation_moments(sizes, pure, shares.trained, 2, logits)
    return {name: (gradients, body, head, gathered) for name, (_, body, head) in whole.items()}


def _pools(sizes: Sizes, config: TrainConfig, shares: Shares, parallelism: Parallelism) -> float:
    """Return the bytes that the memory pools of side streams hold.

    The pools hold two gathered layers, the embedding, the head and scattered gradients.
    """
    trained_end = 2.0 * shares.embedding if config.method == "full" else 0.0
    trained_bytes = max(2.0 * shares.trained_layer, trained_end)
    ends = 2.0 * shares.embedding * (1 if sizes.tied else 2)
    scattered = _scattered_bytes(config, shares, parallelism)
    return 4.0 * shares.layer + ends + scattered + trained_bytes / parallelism.num_shards


def _lasting_bytes(
    config: TrainConfig, shares: Shares, parallelism: Parallelism
) -> tuple[float, float, float]:
    """Return the bytes of a rank's weights, adapters and optimizer state.

    DeepSpeed's optimizer state includes the fp32 master weights.
    """
    gpus = parallelism.num_shards
    if parallelism.strategy not in FSDP2:
        num_holders = gpus if parallelism.strategy == "zero3" else 1
        return (
            2 * shares.base / num_holders,
            2 * shares.adapters / num_holders,
            12 * shares.trained / gpus,
        )
    if parallelism.offload:
        return 0.0, 0.0, 0.0
    trained = 2 if config.precision == "bf16_pure" else 4
    weights = (trained if config.method == "full" else 2) * float(shares.base)
    return weights / gpus, trained * shares.adapters / gpus, 2 * trained * shares.trained / gpus


def _scattered_bytes(config: TrainConfig, shares: Shares, parallelism: Parallelism) -> float:
    """Return the bytes of a rank's gradient shards at the end of the backward pass."""
    if parallelism.offload:
        return 0.0
    return (2 if config.precision == "bf16_pure" else 4) * shares.trained / parallelism.num_shards


def _held_gradients(
    sizes: Sizes, config: TrainConfig, shares: Shares, parallelism: Parallelism, accumulates: bool
) -> dict[str, float]:
    """Return the bytes of gradients that FSDP2 holds, for each moment of a step.

    The result excludes the gradients of the unit that is being computed. Before the last micro
    batch of a step, gradients are kept unsharded, unless each micro batch scatters its gradients.
    The last micro batch scatters gradients layer by layer in fp32. A shard then takes 2 / gpus
    times the bytes of the unsharded bf16 gradients. The gradients of a tied head are kept until the
    backward pass ends. With several copies of the model, the sums of gradients over all copies are
    also held in bf16 until the backward pass ends.
    """
    gpus = parallelism.num_shards
    whole = accumulates and not parallelism.sync_each_batch
    layer = 2 * shares.trained_layer
    end = 2.0 * shares.embedding if config.method == "full" else 0.0
    scattered = _scattered_bytes(config, shares, parallelism)
    waiting = 2.0 * shares.trained if whole else scattered * accumulates
    of_layer, of_end = (0.0 if parallelism.offload else 2 * each / gpus for each in (layer, end))
    # The bytes of the gradient shards that do not exist yet. If an earlier micro batch made shards,
    # new gradients are added to these shards in place, so no shard is missing.
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
    """Return the memory at each moment of an FSDP2 step that may be the peak.

    While a layer is being gathered, its bytes exist twice: in the receive buffer and in its
    parameters.
    """
    full = config.method == "full"
    tied = sizes.tied
    gpus = parallelism.num_shards
    plain = _replicated_moments(sizes, config, shares)
    layer = 2 * shares.layer
    embedding = 2.0 * shares.embedding
    trained_layer = 2 * shares.trained_layer
    trained_end = embedding if full else 0.0
    keeps = parallelism.strategy == "fsdp2_keep"
    untied = 0 if tied else embedding
    kept = sizes.layers * layer + untied if keeps else 0.0
    gathered = 0.0 if keeps else layer
    held = _held_gradients(sizes, config, shares, parallelism, accumulates)
    waiting = held["waiting"]
    scattered = held["scattered"]

    # When a layer's activations are at their peak, only one gradient of the layer exists.
    # Afterwards, the gradients grow while the activations shrink.
    of_layer = plain["first"][1]
    of_mlp = 2.0 * sizes.hidden * sizes.intermediate if full else 0.0
    growth = max(trained_layer - of_layer, of_mlp)
    body = plain["forward"][1]
    before_last = plain["forward"][1] * (sizes.layers - 1) / sizes.layers

    return {
        # A unit's receive buffer is held until the next unit has been copied into its parameters.
        "gathering": (waiting, before_last, 0.0, max(kept, layer) + 2 * layer + embedding * tied),
        "gathering the head": (waiting, body, 0.0, kept + layer + (1 if tied else 2) * embedding),
        "forward": (
            waiting,
            body,
            # A chunked loss computes its logits after the model's forward pass, when the gathered
            # units are already freed.
            0.0 if config.loss == "chunked" else plain["forward"][2],
            kept + embedding + (layer if tied else embedding),
        ),
        "head": (waiting, *plain["head"][1:], kept + embedding),
        "layers": (
            held["layers"],
            plain["layers"][1] + growth,
            0.0,
            # These bytes hold the current layer, the next gathered layer, and the previous unit's
            # gradients, which are being scattered.
            max(kept, layer) + gathered + (embedding if tied else trained_end),
        ),
        "second": (
            held["second"],
            of_layer + growth,
            0.0,
            layer + gathered + embedding * (tied or keeps) + trained_layer,
        ),
        "first": (held["first"], of_layer + growth, 0.0, layer + embedding + trained_layer),
        "inputs": (held["inputs"], plain["inputs"][1], 0.0, embedding + trained_layer),
        # The last gradient exists four times: unsharded, as the input of the reduce-scatter, and as
        # its output in bf16 and in fp32
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


def _replicated_moments(
    sizes: Sizes, config: TrainConfig, shares: Shares
) -> dict[str, tuple[float, float, float]]:
    """Return the bytes of gradients, activations and logits at each moment of a step in bf16.

    Every GPU holds all activations and logits of its rows, because no strategy shards them.
    """
    pure = replace(config, precision="bf16_pure")
    logits = live_logits(config, sizes.vocab)
    return step_moments(sizes, pure, shares.trained, 0.0, 2, logits, accumulates=False)


def _zero_moments(
    sizes: Sizes,
    config: TrainConfig,
    shares: Shares,
    parallelism: Parallelism,
    accumulates: bool,
    buffers: DeepSpeedBuffers,
) -> dict[str, Moment]:
    """Return the memory at the moments of a step under DeepSpeed.

    Gradients are in bf16, and stages 2 and 3 shard the gradients. For the optimizer step, each rank
    also has its shard of the gradients in fp32. In stage 3, each rank's shard of the gradients
    stays allocated during the whole step.
    """
    gpus = parallelism.num_gpus
    stage = parallelism.strategy
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
        most_live = 2 * shares.layer if buffers.live is None else buffers.live
        live = 2.0 * min(shares.base + shares.adapters, most_live)

    moments = {
        name: (max(held, 0.0), activations, logits, bucket + live)
        for name, (held, activations, logits) in plain.items()
    }
    whole = gradients + 4 * shares.trained / gpus
    return moments | {"optimizer": (whole, _square_roots(config, shares, gpus), 0.0, bucket)}


def _square_roots(config: TrainConfig, shares: Shares, gpus: int) -> float:
    """Return the bytes that torch's unfused AdamW needs for the square roots of second moments."""
    each = 2 if config.precision == "bf16_pure" else 4
    return each * shares.trained / gpus if config.optimizer == "adamw_torch" else 0.0

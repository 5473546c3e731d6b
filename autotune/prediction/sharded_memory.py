"""The formula for the memory of each GPU in a training on several GPUs.

The terms of `memory_formula` are divided among the GPUs as the strategy shards them. With
accelerate's settings, FSDP2 gathers and shards parameters in units: one for each layer, one for the
embedding, and one for the final norm and the head. The unit of the head is not resharded after the
forward pass. A training step with torch's `fully_shard` on the meta device showed which buffers
exist at each moment. For DeepSpeed's stages, the formula follows the ZeRO paper. The caller passes
the tool's settings, either of the exported script or from a file that the command `check` reads.
Tensors in the host's memory take no memory of the GPU, except while they are gathered. Without a
formula for the model, the activations of a dry probe replace those of the formula.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.catalog import ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.memory_budget import nccl_of
from autotune.core.parallelism import FSDP2, ZERO, Parallelism
from autotune.core.probe_types import DryCount, Measurement, Phase
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB, gib
from autotune.prediction.memory_formula import (
    EVALUATES,
    KEPT_ANSWERS,
    NF4_STATISTICS,
    WORKSPACE,
    MemoryBreakdown,
    allocator_overhead_gib,
    counted_breakdown,
    evaluation_moments,
    evaluation_overhead_gib,
    kept_gib,
    live_logits,
    memory_breakdown,
    optimizer_state,
    returned_gib,
    step_moments,
    supported,
)

# The assumed relative error of a rank's peak. The largest measured error was 3 % under FSDP2 and
# 1.5 % under DeepSpeed. Each side stream has its own memory pool, and other streams get the free
# blocks of this pool only if memory is short. So on cards with enough memory, the memory that a
# rank reserved was 20 to 55 % above the memory that the rank had allocated.
RANK_ERROR = 0.08
# The same for ranks whose activations a dry probe of one GPU counted; they were at most 9.7 % off
# (`benchmarks/counts.py mixture_ranks`).
COUNTED_RANK_ERROR = 0.1
MAX_LIVE = 10**9  # DeepSpeed's default for the number of parameters that stage 3 may keep gathered
BUCKET = 5 * 10**8  # DeepSpeed's default for the number of gradients in a bucket
IN_FORWARD = ("gathering", "gathering the head", "forward", "unpacking")  # moments of a step
# Moments at which FSDP2 has freed either the embedding or the head
WITH_ROOT = ("gathering", "forward", "unpacking", "head", "layers", "second", "first")
EVALUATE_SEGMENT = str(Phase.EVALUATE)
EVALUATED = ("layer evaluated", "head evaluated")  # moments of an evaluation
# Moments of a step after gradients were scattered, so that each rank holds only its shard of them
AFTER_SCATTERING = ("second", "first", "inputs", "scattering", "optimizer")

_PHASES = (
    {"optimizer": Phase.OPTIMIZER, "building": Phase.LOAD}
    | dict.fromkeys(IN_FORWARD, Phase.FORWARD)
    | dict.fromkeys(EVALUATED, Phase.EVALUATE)
)
# The bytes of (gradients, activations, logits, communication) that exist at a moment of a step
Moment = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSettings:
    """The settings of a tool that determine how much memory a rank needs.

    `bucket` is the number of gradients in DeepSpeed's buckets, or None for the Trainer's value
    `auto`. `live` is the number of parameters that stage 3 may keep gathered, or None for the
    parameters of two layers, as in the exported script. If `builds_whole` is true, each GPU builds
    the whole model before stages 1 and 2 shard its optimizer's state. `offloads_weights` and
    `offloads_state` keep the weights, and the gradients with the optimizer's state, in the host's
    memory. FSDP2 can only offload both (`Parallelism.offload`). With `fsdp_1`, the embedding and
    the head stay gathered. Without `shards_statistics`, each GPU holds all scales of a 4-bit base,
    and without `shards_packed` also all of its 4-bit weights.
    """

    bucket: int | None = None
    live: int | None = None
    builds_whole: bool = False
    offloads_weights: bool = False
    offloads_state: bool = False
    fsdp_1: bool = False
    shards_statistics: bool = True
    shards_packed: bool = True


EXPORTED = ShardingSettings(builds_whole=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The numbers of a model's parameters that several GPUs shard and exchange.

    `base` is the number of parameters in the base model, `adapters` the number in all adapters, and
    `layer` the number in one layer with its adapters. Of a 4-bit base, `in_4_bits` parameters in
    all layers are packed. `packed` are the bytes of these parameters that are sharded, and `whole`
    are the bytes that each GPU holds.
    """

    base: int
    adapters: int
    layer: float
    embedding: int
    trained: int
    trained_layer: float
    num_layers: int
    in_4_bits: int = 0
    packed: float = 0.0
    whole: float = 0.0

    @classmethod
    @functools.lru_cache(maxsize=KEPT_ANSWERS)
    def of(
        cls, sizes: Sizes, config: TrainConfig, settings: ShardingSettings = EXPORTED
    ) -> "Shares":
        """Return the numbers of parameters for this configuration's method and adapters."""
        full = config.method == "full"
        adapters = sizes.adapter_params(config)
        ends = sizes.embedding * (1 if sizes.tied else 2)
        layer = (sizes.params - ends + adapters) / sizes.layers
        shares = cls(
            base=sizes.params,
            adapters=adapters,
            layer=layer,
            embedding=sizes.embedding,
            trained=sizes.params if full else adapters,
            trained_layer=layer if full else adapters / sizes.layers,
            num_layers=sizes.layers,
        )
        return shares._quantised(config, sizes.linear_params, settings)

    @classmethod
    def from_measurement(
        cls, model: ModelSpec, config: TrainConfig, measured: Measurement | DryCount
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
        shares = cls(
            base=measured.total_params - adapters,
            adapters=adapters,
            layer=layer,
            embedding=embedding,
            trained=trained,
            trained_layer=layer if full else trained / model.num_layers,
            num_layers=model.num_layers,
        )
        in_layers = max(measured.total_params - adapters - ends, 0)
        return shares._quantised(config, in_layers, EXPORTED)

    def _quantised(
        self, config: TrainConfig, in_4_bits: int, settings: ShardingSettings
    ) -> "Shares":
        """Return the shares with the bytes of a 4-bit base; other bases stay as they are."""
        if config.quantization != "nf4":
            return self
        statistics = NF4_STATISTICS[config.double_quant] * in_4_bits
        packed = 0.5 * in_4_bits
        sharded = packed + (statistics if settings.shards_statistics else 0.0)
        if not settings.shards_packed:
            sharded = 0.0
        whole = packed + statistics - sharded
        return replace(self, in_4_bits=in_4_bits, packed=sharded, whole=whole)

    @property
    def base_bytes(self) -> float:
        """The bytes of the base's weights that are sharded, in 16 bits or packed."""
        return 2.0 * (self.base - self.in_4_bits) + self.packed

    @property
    def layer_bytes(self) -> float:
        """The bytes of a gathered layer with its adapters, in 16 bits or packed."""
        return 2.0 * self.layer + (self.packed - 2.0 * self.in_4_bits) / self.num_layers


def rank_breakdown(
    model: ModelSpec,
    config: TrainConfig,
    parallelism: Parallelism,
    micro_steps: int = 2,
    settings: ShardingSettings = EXPORTED,
) -> MemoryBreakdown | None:
    """Return the GiB that one rank needs at the peak of a step, or None if no formula covers it.

    `micro_steps` is the number of micro batches in a step of each GPU. With 1, no gradients are
    kept for a later micro batch. Raises ValueError if the strategy cannot train the configuration.
    If the settings are of another tool, the caller knows that the tool can train it.
    """
    reason = parallelism.refusal(config) if settings == EXPORTED else None
    if reason is not None:
        raise ValueError(reason)
    sizes = supported(model, config)
    if sizes is None or (parallelism.shards and config.precision == "fp32"):
        return None

    if parallelism.shards:
        return _sharded_breakdown(sizes, config, parallelism, min(micro_steps, 2), settings)
    memory = memory_breakdown(model, config, micro_steps, ddp=parallelism.num_gpus > 1)
    if memory is None or parallelism.num_gpus == 1:
        return memory
    return replace(memory, nccl=nccl_of(parallelism), own_error=RANK_ERROR)


def is_countable(config: TrainConfig, parallelism: Parallelism) -> bool:
    """Return whether `counted_rank_breakdown` covers a rank.

    Without a formula, the memory of a sharded model is only known for products in 16 bits.
    """
    in_16_bits = config.quantization == "none" and config.precision != "fp32"
    return not parallelism.shards or in_16_bits


def counted_rank_breakdown(
    model: ModelSpec,
    config: TrainConfig,
    parallelism: Parallelism,
    micro_steps: int,
    count: DryCount,
    settings: ShardingSettings = EXPORTED,
) -> MemoryBreakdown | None:
    """Return the memory of a rank from a dry probe of one GPU, for a model without a formula.

    If the model is sharded, `count` is of a step of two micro batches, or of an evaluation, in the
    precision of `sharded_precision`. Otherwise `count` is of the step itself. The result is None
    for ranks that are not covered (`is_countable`).
    """
    if not is_countable(config, parallelism):
        return None
    if not parallelism.shards:
        alone = counted_breakdown(model, config, count)
        # DDP sends gradients from buckets, which together are as large as these gradients. If no
        # two GPUs hold the same experts, the experts' gradients are not sent.
        buckets = count.gradients_gib
        if parallelism.num_gpus == parallelism.expert_parallel:
            buckets -= count.expert_gradients_gib
        return replace(
            alone, communication=buckets, nccl=nccl_of(parallelism), own_error=RANK_ERROR
        )

    tied = bool(model.config.get("tie_word_embeddings"))
    sizes = Sizes(
        family=model.config["model_type"],
        layers=model.num_layers,
        hidden=model.hidden_size,
        intermediate=0,
        heads=1,
        key_heads=1,
        head_dim=1,
        vocab=model.vocab_size,
        tied=tied,
        capped=False,
        params=count.total_params,
    )
    shares = Shares.from_measurement(model, config, count)
    moments = _counted_moments(count)
    found = _breakdown(sizes, config, parallelism, micro_steps, settings, shares, moments, 0.0)
    return replace(found, counted=True, own_error=COUNTED_RANK_ERROR)


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def sharded_precision(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the precision in which a sharded model computes.

    The result is cached, because plans for several numbers of GPUs need the same configurations.
    """
    return replace(config, precision="bf16_pure")


def _counted_moments(count: DryCount) -> dict[str, tuple[float, float, float]]:
    """Return the bytes of gradients, activations and logits at each moment of a dry probe.

    The dry probe does not separate the logits from the activations.
    """
    static = count.model_gib + count.adapters_gib + count.optimizer_gib + gib(WORKSPACE)
    segments = count.segment_peak_gib
    if EVALUATE_SEGMENT in segments:
        layer, head = (
            (segments.get(name, 0.0) - static) * GIB
            for name in (EVALUATE_SEGMENT, f"{EVALUATE_SEGMENT}_head")
        )
        return {"layer evaluated": (0.0, layer, 0.0), "head evaluated": (0.0, head, 0.0)}

    kept = {
        name: max(peak - static - count.gradients_gib, 0.0) * GIB for name, peak in segments.items()
    }
    body = kept.get("forward", 0.0)
    layers = kept.get("backward_layers", 0.0)
    return {
        "forward": (0.0, body, max(kept.get("forward_head", 0.0) - body, 0.0)),
        "head": (0.0, kept.get("backward", 0.0), 0.0),
        "layers": (0.0, layers, 0.0),
        "first": (0.0, min(layers, body), 0.0),
        "inputs": (0.0, kept.get("backward_inputs", 0.0), 0.0),
        "optimizer": (0.0, 0.0, 0.0),
    }


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _sharded_breakdown(
    sizes: Sizes,
    config: TrainConfig,
    parallelism: Parallelism,
    micro_steps: int,
    settings: ShardingSettings,
) -> MemoryBreakdown:
    shares = Shares.of(sizes, config, settings)
    # In ZeRO's third stage, gradients are always added to a rank's shard.
    accumulates = parallelism.strategy == "zero3" or (
        micro_steps > 1 and parallelism.strategy in ZERO
    )
    plain = _replicated_moments(sizes, config, shares.trained, accumulates)
    layer = kept_gib(sizes, config)
    return _breakdown(sizes, config, parallelism, micro_steps, settings, shares, plain, layer)


def _breakdown(
    sizes: Sizes,
    config: TrainConfig,
    parallelism: Parallelism,
    micro_steps: int,
    settings: ShardingSettings,
    shares: Shares,
    plain: Mapping[str, tuple[float, float, float]],
    layer_gib: float,
) -> MemoryBreakdown:
    """Return a rank's memory at the peak of a step, given the `plain` moments of one GPU.

    `layer_gib` is the memory that one layer keeps for its backward pass.
    """
    accumulates = micro_steps > 1
    fsdp = parallelism.strategy in FSDP2
    if micro_steps == EVALUATES and "layer evaluated" in plain:
        moments = _counted_evaluation(parallelism, shares, settings, plain)
    elif fsdp:
        moments = _fsdp2_moments(sizes, config, shares, parallelism, accumulates, settings, plain)
    else:
        moments = _zero_moments(sizes, config, shares, parallelism, accumulates, settings, plain)

    held = _sharded_bytes(sizes, config, shares, parallelism)
    weights, adapters, state = _lasting_bytes(held, shares, parallelism, settings)
    if settings.builds_whole and parallelism.strategy in ("zero1", "zero2"):
        built_bytes = (4 if config.method == "full" else 2) * shares.base + 4 * shares.adapters
        moments["building"] = (0.0, 0.0, 0.0, max(built_bytes - weights - adapters - state, 0.0))
    if micro_steps == EVALUATES and "layer evaluated" not in plain:
        moments = _evaluation(sizes, config, shares, moments)

    totals = {name: sum(parts) for name, parts in moments.items()}
    moment = max(totals, key=lambda name: totals[name])
    gradients, activations, logits, communication = moments[moment]
    live = live_logits(config, sizes.vocab)
    reserved = allocator_overhead_gib(config, live, gib(activations + logits), layer_gib)
    if micro_steps == EVALUATES:
        reserved = evaluation_overhead_gib(gib(activations), gib(logits))

    pooled = 0.0
    if fsdp:
        # The pool of each stream keeps all the memory that the stream held at its peak. So the
        # peaks of all streams add up, even if they occur at different moments.
        scattered = _scattered_bytes(config, shares, parallelism)
        in_main_pool = (
            total - (min(moments[name][0], scattered) if name in AFTER_SCATTERING else 0.0)
            for name, total in totals.items()
        )
        pooled = _pools(sizes, config, shares, parallelism) + max(in_main_pool)
    return MemoryBreakdown(
        weights=gib(weights),
        adapters=gib(adapters),
        gradients=gib(gradients),
        optimizer=gib(state),
        returned=returned_gib(config, 0.0 if micro_steps == EVALUATES else layer_gib, gib(state)),
        activations=gib(activations),
        logits=gib(logits),
        workspace=gib(WORKSPACE),
        reserved=reserved,
        phase=_PHASES.get(moment, Phase.BACKWARD),
        communication=gib(communication),
        nccl=nccl_of(parallelism),
        pools=gib(max(pooled - totals[moment], 0.0)),
        host=gib(_host_bytes(held, shares, parallelism, settings)),
        own_error=RANK_ERROR,
    )


def _counted_evaluation(
    parallelism: Parallelism,
    shares: Shares,
    settings: ShardingSettings,
    plain: Mapping[str, tuple[float, float, float]],
) -> dict[str, Moment]:
    """Return the moments of an evaluation that a dry probe counted, with the gathered layers."""
    if parallelism.strategy == "zero3":
        gathered = _live_bytes(shares, settings)
    elif parallelism.strategy in FSDP2:
        gathered = 2 * shares.layer_bytes + 2.0 * shares.embedding
    else:
        gathered = 0.0
    return {name: (*parts, gathered) for name, parts in plain.items()}


def _evaluation(
    sizes: Sizes, config: TrainConfig, shares: Shares, step: dict[str, Moment]
) -> dict[str, Moment]:
    """Return the memory at the moments of an evaluation, given the moments of a training step.

    An evaluation gathers the same parameters as the forward pass of a step. ZeRO 3 holds memory for
    gradients during an evaluation too.
    """
    gathered = max(step[name][3] for name in IN_FORWARD if name in step)
    gradients = step["forward"][0]
    logits = live_logits(config, sizes.vocab)
    whole = evaluation_moments(sizes, sharded_precision(config), shares.trained, 2, logits)
    return {name: (gradients, body, head, gathered) for name, (_, body, head) in whole.items()}


def _pools(sizes: Sizes, config: TrainConfig, shares: Shares, parallelism: Parallelism) -> float:
    """Return the bytes that the memory pools of side streams hold.

    The pools hold two gathered layers, the embedding, the head and scattered gradients.
    """
    trained_end = 2.0 * shares.embedding if config.method == "full" else 0.0
    trained_bytes = max(2.0 * shares.trained_layer, trained_end)
    ends = 2.0 * shares.embedding * (1 if sizes.tied else 2)
    scattered = _scattered_bytes(config, shares, parallelism)
    return 2 * shares.layer_bytes + ends + scattered + trained_bytes / parallelism.num_shards


def offloads(parallelism: Parallelism, settings: ShardingSettings) -> tuple[bool, bool]:
    """Return whether the weights, and the gradients and optimizer state, are on the host."""
    whole = parallelism.offload
    weights = settings.offloads_weights and parallelism.strategy == "zero3"
    return whole or weights, whole or settings.offloads_state


def _sharded_bytes(
    sizes: Sizes, config: TrainConfig, shares: Shares, parallelism: Parallelism
) -> tuple[float, float, float]:
    """Return the bytes of a rank's weights, adapters and optimizer state, wherever they are.

    DeepSpeed's optimizer state includes the fp32 master weights.
    """
    gpus = parallelism.num_shards
    if parallelism.strategy not in FSDP2:
        num_holders = gpus if parallelism.strategy == "zero3" else 1
        masters = 4.0 * shares.trained
        state = masters + optimizer_state(sizes, config, shares.trained, masters)
        return shares.base_bytes / num_holders, 2 * shares.adapters / num_holders, state / gpus
    trained = 2 if config.precision == "bf16_pure" else 4
    weights = trained * float(shares.base) if config.method == "full" else shares.base_bytes
    state = optimizer_state(sizes, config, shares.trained, float(trained * shares.trained))
    return weights / gpus, trained * shares.adapters / gpus, state / gpus


def _lasting_bytes(
    held: tuple[float, float, float],
    shares: Shares,
    parallelism: Parallelism,
    settings: ShardingSettings,
) -> tuple[float, float, float]:
    """Return those of the `held` bytes (`_sharded_bytes`) that are on the GPU."""
    weights, adapters, state = held
    without_weights, without_state = offloads(parallelism, settings)
    if without_weights:
        weights = adapters = 0.0
    return weights + shares.whole, adapters, 0.0 if without_state else state


def _host_bytes(
    held: tuple[float, float, float],
    shares: Shares,
    parallelism: Parallelism,
    settings: ShardingSettings,
) -> float:
    """Return those of the `held` bytes in the host's memory, with the gradients in fp32."""
    weights, adapters, state = held
    has_weights, has_state = offloads(parallelism, settings)
    gradients = 4.0 * shares.trained / parallelism.num_shards
    return (weights + adapters) * has_weights + (state + gradients) * has_state


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
    widened = 1 if config.precision == "bf16_pure" else 2  # shards are in fp32
    of_layer, of_end = (
        0.0 if parallelism.offload else widened * each / gpus for each in (layer, end)
    )
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
    sizes: Sizes,
    config: TrainConfig,
    shares: Shares,
    parallelism: Parallelism,
    accumulates: bool,
    settings: ShardingSettings,
    plain: Mapping[str, tuple[float, float, float]],
) -> dict[str, Moment]:
    """Return the memory at each moment of an FSDP2 step that may be the peak.

    While a layer is being gathered, its bytes exist twice: in the receive buffer and in its
    parameters.
    """
    full = config.method == "full"
    tied = sizes.tied
    gpus = parallelism.num_shards
    layer = shares.layer_bytes
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
    # FSDP 1 keeps the embedding and the head together.
    root = embedding if settings.fsdp_1 and not tied else 0.0

    moments = {
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
    if "unpacking" in plain:
        ends = embedding * (2 if keeps and not tied else 1)
        moments["unpacking"] = (*plain["unpacking"], max(kept - untied, layer) + layer + ends)
    return {
        name: (gradients, activations, logits, communication + root * (name in WITH_ROOT))
        for name, (gradients, activations, logits, communication) in moments.items()
    }


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _replicated_moments(
    sizes: Sizes, config: TrainConfig, trained: int, accumulates: bool
) -> Mapping[str, tuple[float, float, float]]:
    """Return the bytes of gradients, activations and logits at each moment of a step in bf16.

    Every GPU holds all activations and logits of its rows, because no strategy shards them. So the
    result is the same for all numbers of GPUs. `trained` is the number of trained parameters.
    """
    logits = live_logits(config, sizes.vocab)
    moments = step_moments(
        sizes, sharded_precision(config), trained, 0.0, 2, logits, accumulates=accumulates
    )
    if config.quantization != "nf4":
        return moments

    # A product with a 4-bit matrix first unpacks the matrix. In the backward pass of the MLP, four
    # bytes for each value of the MLP are freed before the largest matrix is unpacked.
    largest = 2.0 * max(fan_in * fan_out for fan_in, fan_out in sizes.matrices.values())
    inner = 4.0 * sizes.intermediate * config.tokens
    for name in ("layers", "first"):
        gradients, activations, head = moments[name]
        moments[name] = (gradients, activations + max(largest - inner, 0.0), head)
    in_layer = largest + config.tokens * (4 * sizes.intermediate + 6 * sizes.hidden)
    return moments | {"unpacking": (0.0, moments["forward"][1] + in_layer, 0.0)}


def _zero_moments(
    sizes: Sizes,
    config: TrainConfig,
    shares: Shares,
    parallelism: Parallelism,
    accumulates: bool,
    settings: ShardingSettings,
    plain: Mapping[str, tuple[float, float, float]],
) -> dict[str, Moment]:
    """Return the memory at the moments of a step under DeepSpeed.

    Gradients are in bf16, and stages 2 and 3 shard the gradients. For the optimizer step, each rank
    also has its shard of the gradients in fp32. In stage 3, each rank's shard of the gradients
    stays allocated during the whole step. If the optimizer is offloaded, stages 2 and 3 send each
    gradient to the host as soon as it is reduced.
    """
    gpus = parallelism.num_gpus
    stage = parallelism.strategy
    _, on_host = offloads(parallelism, settings)
    gradients = 2 * shares.trained / (1 if stage == "zero1" else gpus)
    bucket = 2.0 * (settings.bucket or sizes.hidden**2)
    live = _live_bytes(shares, settings) if stage == "zero3" else 0.0

    if on_host and stage != "zero1":
        gradients = 0.0
        # Stage 2 copies each gradient to the host through a buffer for the largest one.
        largest = shares.embedding if config.method == "full" else shares.trained_layer
        bucket += 2.0 * largest * (stage == "zero2")
    embedding = 2.0 * shares.embedding if config.method == "full" else 0.0
    held = {"first": max(gradients - embedding, 0.0), "inputs": gradients}
    waiting = gradients if accumulates or stage == "zero3" else 0.0
    moments = {
        name: (held.get(name, waiting), activations, logits, bucket + live)
        for name, (_, activations, logits) in plain.items()
    }
    if on_host:
        return moments | {"optimizer": (gradients, 0.0, 0.0, bucket)}
    whole = gradients + 4 * shares.trained / gpus
    return moments | {"optimizer": (whole, _square_roots(config, shares, gpus), 0.0, bucket)}


def _live_bytes(shares: Shares, settings: ShardingSettings) -> float:
    """Return the bytes of the parameters that ZeRO's third stage keeps gathered.

    A layer is gathered even if it exceeds the limit.
    """
    whole = shares.base_bytes + 2.0 * shares.adapters
    if settings.live is None:
        return min(whole, 2 * shares.layer_bytes)
    return min(whole, max(2.0 * settings.live, shares.layer_bytes))


def _square_roots(config: TrainConfig, shares: Shares, gpus: int) -> float:
    """Return the bytes that torch's unfused AdamW needs for the square roots of second moments."""
    each = 2 if config.precision == "bf16_pure" else 4
    return each * shares.trained / gpus if config.optimizer == "adamw_torch" else 0.0

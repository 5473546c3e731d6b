"""The formula for a configuration's memory; it needs the model's shape, but no GPU and no torch.

Each possible peak of a training step is affine in the tokens of a micro batch. The coefficients are
weighted sums of the model's sizes, such as the hidden size. The formula contains the exact number
of bytes that a layer keeps for its backward pass; `tests/probe/test_kept_activations.py` compares
them with the bytes in the autograd graph. The bytes of the head, of temporary tensors and of
compiled layers were measured on whole models on an H200 (`benchmarks/plan.py memory`). For families
and configurations that were not measured, the result is None.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.catalog import ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.files import load_data
from autotune.core.objective import Objective
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.core.probe_types import DryCount, Phase
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.core.units import MIB, gib
from autotune.trainer.settings import chunk_tokens

# The fields of MemoryBreakdown that are not part of the peak
NO_TERMS = ("phase", "counted", "own_error", "pools", "returned", "host")
CONTEXT_GIB = 0.81  # the CUDA context of a worker: 0.74 to 0.81 on an H200 with CUDA 13
# Bytes of cuBLAS's two workspaces: 32 MiB each on Hopper, less on older cards
WORKSPACE = 64.2 * MIB
# If the allocator's segments cannot grow, they hold unused memory: at most this fraction of the
# bytes that one layer keeps for its backward pass. The fraction is the largest of nine
# configurations on an H100 (`benchmarks/memory.py allocator`). Four of the nine, with full
# fine-tuning or large logits, had no unused memory.
FIXED_SHARE = 0.9
# The relative error of a peak that the formula predicts, about two standard deviations
# (`benchmarks/plan.py memory`).
ERROR = 0.04
# With this value of the argument `micro_steps`, the formulas compute an evaluation instead of a
# training step.
EVALUATES = 0
# In an evaluation, the allocator's unused memory is this fraction of the layers' tensors plus 1 %
# of the logits. The fraction was 8 to 16 % for Llama and Qwen3 shapes on an H200. The formula's
# error for the tensors themselves was at most 0.1 %.
EVALUATED_UNUSED = 0.12
EVALUATION_ERROR = 0.06
# A dry probe runs a step of the real training code without a GPU. COUNT_ERROR is the relative error
# of the peak memory that a dry probe computes. The largest of 296 errors was 0.8 %
# (`benchmarks/plan.py memory`).
COUNT_ERROR = 0.015
# The relative error of the memory that a dry probe computes for segments that cannot grow. Of 28
# errors, 26 were at most 7 %, and the largest was 15 % (`benchmarks/memory.py allocator`).
SEGMENTS_ERROR = 0.07
# The relative error of a peak that a dry probe computed for an int8 base. The dry probe omits the
# copies of outlier activations. With random weights, most inputs of `down_proj` are outliers: on an
# H200, probes of three whole models held up to 9 % more memory than the dry probes computed.
INT8_ERROR = 0.09
# If layers are computed in tiles, tensors are few and large. The allocator then reserves more
# memory, as a share of the peak, and this share has an error of the same size
# (`benchmarks/longest.py`). On an H100, the allocator reserved 2.1 % more than the 39 GiB that a
# dry probe computed. Under a cap of 24 GB, it reserved over 3.7 % more, and no memory was left for
# another block.
TILED_SHARE = 0.03
# The memory and the time on the reference card do not depend on the card for which a run is
# planned. A comparison of cards needs the same results for each card, so the results are cached.
# This cache size exceeds the number of configurations in a plan.
KEPT_ANSWERS = 2**14
_BLOCK = 256  # the number of values of 8-bit optimizer state that share one scale of 4 bytes
# Bytes of scales for each 4-bit weight, with `double_quant` off and on. 64 weights share one scale.
NF4_STATISTICS = {False: 4 / 64, True: (1 + 4 / 256) / 64}
# With transformers' Trainer, the bytes for each logit while the loss is computed, and while the
# gradient of the loss is computed
LOGIT_BYTES = (10.0, 12.0)
# TRL's trainers for DPO and KTO multiply hidden states by the head in tiles. A tile has at most
# TILE_TOKENS tokens and TILE_WORDS words of the vocabulary (`trl/kernels/chunked_logprob.py`). All
# tiles use one buffer.
TILE_TOKENS = 4096
TILE_WORDS = 32768

# Bytes that eager attention keeps for the score of each head and pair of tokens.
SCORES = {"gemma2": 8}
SCORES_DEFAULT = 6
SCORES_COMPILED = 4
# In an evaluation, the bytes for each score, which exists four times: in 16 bits, with the mask
# added, in 32 bits, and cast back to 16 bits
EVALUATED_SCORES = 10
QWEN3_EAGER = {"lora": (12, 4), "full": (14, 6)}
_NORMS = {"gemma2": 4}  # the number of norms in a layer; 2 for a family that is not listed
_PHASES = {"forward": Phase.FORWARD, "optimizer": Phase.OPTIMIZER} | dict.fromkeys(
    ("layer evaluated", "head evaluated"), Phase.EVALUATE
)
# Joined adapters (`trainer.joined_lora`) widen the base's matrices and their inputs. The number of
# added columns is a multiple of JOINED_MULTIPLE.
JOINED_MULTIPLE = 64
# Groups of matrices that multiply the same input
_SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj", "gate_up_proj"),
    ("down_proj",),
)


def kept_factors(kernels: str) -> dict[str, dict[str, tuple[int, int, int, int]]]:
    """Return the table `kept_factors.yaml` for `eager` or `compiled` layers.

    The outer key of the table is a family, and the inner key is a method with a precision, such as
    `lora_mixed`. Each value has four numbers: how many bytes a layer keeps per token for each unit
    of the hidden size, the intermediate size, the size of all queries, and the size of all keys.
    """
    return dict(load_data("autotune.prediction", "kept_factors")[kernels])


# Bytes of each logit if a whole micro batch has its logits at once. In a forward pass, the logits
# exist in 32 bits, and before that in 16. In the update, the least is the logits and their
# gradient; the most has two parts of the gradient, their sum and its cast besides.
WHOLE_LOGITS = ((4, 8), (8, 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """The memory at the peak of a step in GiB, by term, without the CUDA context.

    Args:
        activations: the tensors that layers keep for the backward pass, the inputs of recomputed
            layers, and temporary tensors.
        logits: the head's logits with their gradients.
        reserved: the memory that the allocator reserved, but that no tensor uses.
        communication: on several GPUs, the layers that were gathered from shards, and the buffers
            of gradients.
        nccl: NCCL's memory outside torch's allocator.
        pools: free memory that the allocator keeps for streams other than the main one, and
            releases if the GPU's memory is short.
        engine: the engine that generates the answers of a GRPO run, with its weights and cache.
        returned: memory of other terms that is given back before a run is out of memory: free
            segments of an allocator whose segments cannot grow, and pages of a paged optimizer.
        host: the tensors of this GPU's process that are offloaded to the host's memory.
        offloaded: the same tensors if the GPU and the host share one memory (`in_one_pool`).
        counted: whether the memory comes from a dry probe instead of a formula.
        own_error: the relative error of the peak, or None for ERROR or COUNT_ERROR.
    """

    JSON: ClassVar = "terms()"

    weights: float
    adapters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float
    reserved: float
    phase: Phase
    communication: float = 0.0
    nccl: float = 0.0
    engine: float = 0.0
    pools: float = 0.0
    returned: float = 0.0
    host: float = 0.0
    offloaded: float = 0.0
    counted: bool = False
    own_error: float | None = None

    @property
    def error(self) -> float:
        """The relative error of the peak; the true peak may be higher or lower."""
        if self.own_error is not None:
            return self.own_error
        return COUNT_ERROR if self.counted else ERROR

    @property
    def lasting_gib(self) -> float:
        """The memory that the process also holds between steps."""
        return self.weights + self.adapters + self.optimizer

    @property
    def peak_gib(self) -> float:
        """The memory allocated at the peak."""
        static = self.weights + self.adapters + self.gradients + self.optimizer
        return static + self.activations + self.logits + self.workspace + self.communication

    @property
    def peak_reserved_gib(self) -> float:
        """What the allocator holds at the peak, plus NCCL's memory, `engine` and `offloaded`."""
        return self.peak_gib + self.reserved + self.nccl + self.engine + self.offloaded

    @property
    def needed_gib(self) -> float:
        """The memory without which the run is out of memory, plus NCCL's memory."""
        return self.peak_reserved_gib - self.returned

    @property
    def roomy_gib(self) -> float:
        """The peak with `pools`, if the card has room for them; the CUDA context is excluded."""
        return self.peak_reserved_gib + self.pools

    def in_one_pool(self, pinned: float = 1.0) -> "MemoryBreakdown":
        """Return the memory of a GPU that shares one memory with its host.

        Offloaded tensors then take `pinned` times their size of the GPU's memory.
        """
        return replace(self, host=0.0, offloaded=self.offloaded + pinned * self.host)

    def terms(self) -> dict[str, float]:
        """Return the terms that are not zero, by name; the terms sum to `peak_reserved_gib`."""
        named = {name: getattr(self, name) for name in self.__slots__ if name not in NO_TERMS}
        return {name: value for name, value in named.items() if value}


def unsupported(model: ModelSpec, config: TrainConfig) -> str | None:
    """Return the feature that the formulas of memory and step time do not cover, or None."""
    sizes = Sizes.of(model)
    if sizes is None:
        return f"{printable(model.config['model_type'])} models"
    return _uncovered_feature(sizes, config)


def _uncovered_feature(sizes: Sizes, config: TrainConfig) -> str | None:
    in_layers = sizes.adapted(config) <= sizes.matrices.keys()
    uncovered = (
        (not in_layers and "adapters on modules beyond attention and MLP")
        or (config.precision == "fp32" and "fp32 precision")
        or (config.modules_to_save != "none" and "modules trained in full beside adapters")
        or (config.quantization == "int8" and "int8 bases")
        or (config.kbit_preparation and "k-bit preparation")
        or (config.dora and "DoRA")
        or (config.optimizer_in_backward and "an optimizer in the backward pass")
        or (config.lora_dropout and config.compile != "none" and "dropout in compiled adapters")
        or (config.offloads and "offloaded checkpoints")
        or (config.activation_budget < 1 and "selective recomputation")
        or (config.tiling != "none" and "tiles of tokens")
    )
    return uncovered or None


def supported(model: ModelSpec, config: TrainConfig) -> Sizes | None:
    """Return the model's sizes if the formulas cover the model and configuration, or None."""
    sizes = Sizes.of(model)
    return None if sizes is None or _uncovered_feature(sizes, config) else sizes


def memory_breakdown(
    model: ModelSpec,
    config: TrainConfig,
    micro_steps: int = 2,
    *,
    ddp: bool = False,
    objective: Objective = Objective.SFT,
) -> MemoryBreakdown | None:
    """Return the memory of a training run at the peak of a step, or None if no formula covers it.

    `micro_steps` is the number of micro batches in a step. With 1 micro batch, no gradients exist
    during the forward pass. With EVALUATES, the result is the memory of an evaluation. If `ddp` is
    true, each of several GPUs holds the whole model, and the GPUs exchange gradients. The micro
    batch size in the configuration is a number of examples. For some objectives, an example has two
    rows.
    """
    sizes = supported(model, config)
    if sizes is None:
        return None

    sizes = sizes.with_objective(objective)
    config = rows_of(config, objective)
    memory = _breakdown(sizes, config, micro_steps, objective)
    if not ddp:
        return memory
    # DDP copies the gradients into buckets, so all gradients exist twice. The Trainer has no option
    # to make gradients views of the buckets.
    return replace(memory, communication=gib(_trained_bytes(sizes, config)))


def rows_of(config: TrainConfig, objective: Objective) -> TrainConfig:
    """Return the configuration as the objective's trainer runs it.

    In the result, the micro batch size is the number of rows instead of examples. The loss becomes
    the loss of the objective. The precision becomes bf16 for adapters on a quantised base, because
    TRL trains these adapters in 16 bits.
    """
    if objective is Objective.SFT:
        return config

    in_16_bits = objective is not Objective.CLASSIFICATION and config.quantization != "none"
    return replace(
        config,
        micro_batch_size=objective.rows_per_example * config.micro_batch_size,
        loss="chunked" if objective.num_labels is None else "full",
        precision="bf16_pure" if in_16_bits else config.precision,
    )


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _breakdown(
    sizes: Sizes,
    config: TrainConfig,
    micro_steps: int,
    objective: Objective,
) -> MemoryBreakdown:
    full = config.method == "full"
    pure = config.precision == "bf16_pure"
    base_bytes = 4 if full and not pure else 2  # for each parameter of an unquantised base
    trained = sizes.params if full else sizes.adapter_params(config)
    trained_bytes = _trained_bytes(sizes, config)
    logits = live_logits(config, sizes.vocab, objective)
    untrained = sizes.params if full and objective.has_reference else 0
    moments = step_moments(
        sizes,
        config,
        trained,
        trained_bytes,
        base_bytes,
        logits,
        # CUDA graphs keep their gradient buffers between steps, so gradients always exist.
        accumulates=micro_steps > 1 or config.cuda_graphs != "none",
        objective=objective,
    )
    if micro_steps == EVALUATES:
        # CUDA graphs keep the memory of a training step, and an evaluation cannot reuse it.
        kept = max(moments.values(), key=sum) if config.cuda_graphs != "none" else (0.0, 0.0, 0.0)
        evaluated = evaluation_moments(sizes, config, trained, base_bytes, logits, objective)
        moments = {
            name: (kept[0], kept[1] + activations, kept[2] + head)
            for name, (_, activations, head) in evaluated.items()
        }
    moment = max(moments, key=lambda name: sum(moments[name]))
    gradients, activations, head = moments[moment]

    weights = _weights(sizes, config, base_bytes) + untrained * base_bytes
    optimizer = gib(optimizer_state(sizes, config, trained, trained_bytes))
    # An evaluation frees nothing: its unused memory is a fraction of each tensor.
    layer_gib = 0.0 if micro_steps == EVALUATES else kept_gib(sizes, config)
    return MemoryBreakdown(
        weights=gib(weights + joined_bytes(sizes, config)),
        adapters=gib(0.0 if full else trained_bytes),
        gradients=gib(gradients),
        optimizer=optimizer,
        returned=returned_gib(config, layer_gib, optimizer)
        + (logits_overhead_gib(logits) if moment == "optimizer" else 0.0),
        activations=gib(activations),
        logits=gib(head),
        workspace=gib(WORKSPACE + side_workspace(config)),
        reserved=evaluation_overhead_gib(gib(activations), gib(head))
        if micro_steps == EVALUATES
        else allocator_overhead_gib(
            config, logits, gib(activations + head), kept_gib(sizes, config)
        ),
        own_error=EVALUATION_ERROR if micro_steps == EVALUATES else None,
        phase=_PHASES.get(moment, Phase.BACKWARD),
    )


def _trained_bytes(sizes: Sizes, config: TrainConfig) -> int:
    """Return the bytes of the trained parameters, which are in 16 bits only in pure bf16."""
    trained = sizes.params if config.method == "full" else sizes.adapter_params(config)
    return trained * (2 if config.precision == "bf16_pure" else 4)


def counted_breakdown(
    model: ModelSpec,
    config: TrainConfig,
    count: DryCount,
    objective: Objective = Objective.SFT,
    trainer: OtherTrainer = USUAL,
) -> MemoryBreakdown:
    """Return the memory at the peak of a step, from the result `count` of a dry probe.

    `trainer` is the trainer of the step that was counted. The dry probe has all layers of the
    model. A formula adds the memory that the allocator reserved but that no tensor uses. The term
    `activations` includes the logits, because the dry probe does not separate them.
    """
    peak = count.peak_allocated_gib
    workspace = gib(WORKSPACE + side_workspace(config))
    static = count.model_gib + count.adapters_gib + count.optimizer_gib
    segment = max(count.segment_peak_gib, key=lambda name: count.segment_peak_gib[name])
    # If the peak is in the forward pass, these gradients are from an earlier micro batch.
    gradients = min(count.gradients_gib, max(peak - static - workspace, 0.0))
    evaluates = segment.startswith(Phase.EVALUATE)
    if evaluates:
        gradients = 0.0
    activations = max(peak - static - workspace - gradients, 0.0)
    logits = live_logits(rows_of(config, objective), model.vocab_size, objective)
    if not (trainer.upcasts_logits or config.kbit_preparation):
        logits //= 2  # they have half as many bytes
    # Recomputed layers keep only their inputs, and one of them is computed again.
    inputs = _kept_inputs_gib(model, rows_of(config, objective))
    layers = 1 if config.checkpoint_every else model.num_layers
    layer = max(activations - gib(12.0 * logits) - inputs, 0.0) / layers
    reserved = allocator_overhead_gib(config, logits, activations, layer)
    own_error = INT8_ERROR if config.quantization == "int8" else None
    if evaluates:
        in_head = activations if segment.endswith("head") else 0.0
        reserved = evaluation_overhead_gib(activations - in_head, in_head)
        own_error = own_error or EVALUATION_ERROR

    memory = MemoryBreakdown(
        weights=count.model_gib,
        adapters=count.adapters_gib,
        gradients=gradients,
        optimizer=count.optimizer_gib,
        returned=returned_gib(config, 0.0 if evaluates else layer, count.optimizer_gib)
        + (logits_overhead_gib(logits) if segment.startswith(Phase.OPTIMIZER) else 0.0),
        activations=activations,
        logits=0.0,
        workspace=workspace,
        reserved=reserved,
        phase=Phase(segment.partition("_")[0]),
        counted=True,
        own_error=own_error,
    )
    return memory if evaluates else with_tiles(memory, config)


def with_tiles(memory: MemoryBreakdown, config: TrainConfig) -> MemoryBreakdown:
    """Return a step's memory with the memory that the allocator reserves in addition for tiles."""
    if config.tiling == "none":
        return memory
    return replace(
        memory,
        reserved=memory.reserved + TILED_SHARE * memory.peak_reserved_gib,
        own_error=max(memory.error, TILED_SHARE),
    )


def in_fixed_segments(memory: MemoryBreakdown, count: DryCount) -> MemoryBreakdown:
    """Return the memory of a run whose allocator's segments cannot grow.

    Without the segments in `count`, the result is `memory`, whose unused memory comes from a
    formula.
    """
    if count.reserved_gib is None or count.occupied_gib is None:
        return memory
    return replace(
        memory,
        reserved=count.reserved_gib - memory.peak_gib,
        returned=count.reserved_gib - count.occupied_gib,
        own_error=max(memory.own_error or 0.0, SEGMENTS_ERROR),
    )


def _kept_inputs_gib(model: ModelSpec, config: TrainConfig) -> float:
    """Return the GiB of the inputs that recomputed layers keep on the GPU."""
    every = config.checkpoint_every
    if not every or config.offloads:
        return 0.0
    in_32_bits = config.kbit_preparation or (
        config.method == "full" and config.precision != "bf16_pure"
    )
    recomputed = math.ceil(model.num_layers / every)
    return gib(recomputed * config.tokens * model.hidden_size * (4 if in_32_bits else 2))


def live_logits(config: TrainConfig, vocab: int, objective: Objective = Objective.SFT) -> int:
    """Return the number of logits that exist at the same time."""
    if objective.num_labels is not None:
        return 0
    if objective is not Objective.SFT:
        return min(config.tokens, TILE_TOKENS) * TILE_WORDS
    return (chunk_tokens(config.tokens) if config.loss == "chunked" else config.tokens) * vocab


def kept_gib(sizes: Sizes, config: TrainConfig) -> float:
    """Return the GiB that a layer would keep for its backward pass without recomputation."""
    return gib(config.tokens * kept_bytes(sizes, config))


def allocator_overhead_gib(
    config: TrainConfig, logits: int, activations_gib: float, layer_gib: float
) -> float:
    """Return the GiB that the allocator reserved but that no tensor uses.

    `layer_gib` is the memory that one layer keeps for its backward pass.
    """
    fragmentation = 0.010 if config.compile == "none" else 0.034
    unused = FIXED_SHARE * layer_gib if config.allocator == "fixed" else 0.0
    # CUDA graphs are captured on a separate stream, and cuBLAS allocates another workspace there.
    unused += gib(WORKSPACE) if config.cuda_graphs != "none" else 0.0
    overhead = logits_overhead_gib(logits) + gib(42 * MIB)
    return overhead + fragmentation * activations_gib + unused


def logits_overhead_gib(logits: int) -> float:
    """Return the unused GiB of the segments that held logits.

    In the optimizer's step no logits exist, so these segments are free, and are given back before
    a run is out of memory.
    """
    return gib(2.4 * logits)


def returned_gib(config: TrainConfig, layer_gib: float, optimizer_gib: float) -> float:
    """Return the GiB that are given back before a run is out of memory.

    If segments cannot grow, the allocator frees whole unused segments and tries again. The driver
    moves the pages of a paged optimizer's state to the host's memory.
    """
    free = FIXED_SHARE * layer_gib if config.allocator == "fixed" else 0.0
    return free + (optimizer_gib if config.optimizer.startswith("paged_") else 0.0)


def evaluation_overhead_gib(activations_gib: float, logits_gib: float) -> float:
    """Return the GiB that the allocator reserved in an evaluation but that no tensor uses."""
    return EVALUATED_UNUSED * activations_gib + 0.01 * logits_gib + gib(42 * MIB)


def step_moments(
    sizes: Sizes,
    config: TrainConfig,
    trained: int,
    trained_bytes: float,
    base_bytes: int,
    logits: int,
    *,
    accumulates: bool,
    objective: Objective = Objective.SFT,
) -> dict[str, tuple[float, float, float]]:
    """Return the bytes of (gradients, activations, logits) at each possible peak of a step.

    `trained` is the number of trained parameters, and `logits` is the number of logits that exist
    at the same time. The micro batch size in `config` is the number of rows, not of examples.
    """
    full = config.method == "full"
    tokens = config.tokens
    keep = kept_bytes(sizes, config)
    moving = moving_bytes(sizes, config)
    every = config.checkpoint_every
    recomputed = 0 if every is None else math.ceil(sizes.layers / every)
    body = tokens * ((sizes.layers - recomputed) * keep + recomputed * base_bytes * sizes.hidden)

    # Autocast keeps the 16-bit cast of each weight until the forward pass ends, or longer if the
    # backward pass needs it. Embeddings are not cast, and the head of a chunked loss is cast after
    # the layers. Without a chunked loss, the formula includes a cast of an untied embedding,
    # although embeddings are not cast, so the formula's result is up to 0.7 % too high.
    labels = objective.num_labels is not None
    embeddings = sizes.embedding * (1 if sizes.tied or labels else 2)
    cast = trained - (embeddings if full and (labels or config.loss == "chunked") else 0)
    if config.fp8_products != "none":  # only the head is multiplied in 16 bits
        cast = 0 if labels or config.loss == "chunked" else sizes.embedding
    casts = (
        0.0 if config.precision == "bf16_pure" or config.lora_kernels == "joined" else 2.0 * cast
    )
    kept_casts = casts * (1 - recomputed / sizes.layers)
    if config.compile != "none":
        casts = kept_casts

    capped = 2 if sizes.capped else 0
    norm = tokens * sizes.hidden * (6 if base_bytes == 2 else 20)
    waiting = trained_bytes if accumulates else 0.0
    embedding = float(base_bytes * sizes.embedding) if full else 0.0
    # The gradient of a tied head is kept until the embedding's gradient exists. Then both gradients
    # are summed, and the sum is added to the gradient of earlier micro batches. With an unchunked
    # loss in 16 bits, the sum is a separate tensor.
    shared = embedding if sizes.tied else 0.0
    final_sum = shared * (accumulates + (config.loss == "full" and config.precision == "bf16_pure"))

    in_forward, in_head = (logits * (each + capped) for each in LOGIT_BYTES)
    if objective is not Objective.SFT:
        in_forward, in_head = (
            (0.0, 0.0) if not logits else _head_in_tiles(sizes, config, base_bytes, logits)
        )
    elif full and config.loss == "chunked":
        in_forward = 0.0
        in_head = _trained_head_in_chunks(sizes, base_bytes, logits) + 4 * tokens * sizes.hidden

    layer = tokens * ((keep if recomputed else 0) + moving)
    root = trained_bytes if config.optimizer == "adamw_torch" else 0.0
    return {
        "forward": (waiting, body + norm + casts, in_forward),
        "head": (waiting, body + norm - 2 * tokens * sizes.hidden + kept_casts, in_head),
        "layers": (waiting, body + layer + kept_casts + shared, 0.0),
        # The first layer's backward pass comes last, when the gradients of all other layers exist.
        "first": (trained_bytes - embedding, layer + shared, 0.0),
        # The embedding's gradient is computed in a tensor of its own, and then added to the
        # gradient of earlier micro batches.
        "inputs": (trained_bytes, embedding + final_sum, 0.0),
        # torch's unfused AdamW allocates a tensor for the square root of the second moment.
        "optimizer": (trained_bytes, root, 0.0),
    }


def evaluation_moments(
    sizes: Sizes,
    config: TrainConfig,
    trained: int,
    base_bytes: int,
    logits: int,
    objective: Objective = Objective.SFT,
) -> dict[str, tuple[float, float, float]]:
    """Return the bytes of (gradients, activations, logits) at each possible peak of an evaluation.

    An evaluation has no gradients, and its layers keep no activations. Each factor in this function
    counts the bytes, or the tensors of hidden states, that are alive at once in an uncompiled layer
    of transformers. The factors were derived from dry probes.
    """
    tokens = config.tokens
    hidden = base_bytes * sizes.hidden
    adapted = sizes.adapted(config) if config.method == "lora" else frozenset[str]()
    autocast = config.precision != "bf16_pure"

    # During the MLP or the attention, four more tensors of hidden states are alive: the embeddings'
    # output, the layer's input, the residual and the norm's output. In addition to the sum of an
    # adapter's output and the base's output, two copies of the adapter's output are alive. PEFT
    # casts the adapter's input, unless the base is quantised.
    widened = bool(adapted & {"gate_proj", "up_proj", "gate_up_proj"})
    is_joint = "gate_up_proj" in sizes.matrices
    of_mlp = (8 + 4 * widened if is_joint else 6 + 2 * widened) * sizes.intermediate
    if widened and autocast and config.quantization == "none":
        of_mlp += 4 * sizes.hidden

    of_attention = 8 * sizes.queries + 4 * sizes.keys - hidden
    if config.attention == "eager":
        of_attention += EVALUATED_SCORES * sizes.heads * config.seq_len
    elif config.has_mask and config.attention.startswith("sdpa"):
        of_attention += 2 * config.seq_len + 4 * (sizes.queries - sizes.keys)

    # Autocast keeps the casts of trained parameters until the model's forward pass ends. Embeddings
    # are not cast. With a chunked loss, the head is cast after the forward pass.
    ends = sizes.embedding * (1 if sizes.tied else 2) if config.method == "full" else 0
    of_layers = 2.0 * (trained - ends) if autocast else 0.0
    head_cast = 2.0 * sizes.embedding if autocast and ends else 0.0
    if objective is not Objective.SFT:
        head = _head_in_tiles(sizes, config, base_bytes, logits)[0] if logits else 0.0
    elif config.loss == "chunked":
        head = 8.0 * logits + head_cast
    else:
        head = LOGIT_BYTES[0] * logits + head_cast + of_layers

    layer = tokens * (4 * hidden + max(of_mlp, of_attention)) + of_layers
    return {
        "layer evaluated": (0.0, layer, 0.0),
        "head evaluated": (0.0, tokens * hidden, head),
    }


def _trained_head_in_chunks(sizes: Sizes, base_bytes: int, logits: int) -> float:
    """Return the bytes that a trained head needs during a chunked loss.

    These bytes are the head's gradient, summed over chunks, plus the logits of a chunk or the
    gradient of a chunk, whichever is larger. Under autocast, the cast of the head is added, and the
    gradient of a chunk is in 16 bits.
    """
    gradient = base_bytes * sizes.embedding
    cast = 2 * sizes.embedding
    if base_bytes == 2:
        return float(gradient + max(gradient + 2 * logits, 12 * logits))
    return float(gradient + cast + max(gradient + cast, 12 * logits))


def _head_in_tiles(
    sizes: Sizes, config: TrainConfig, base_bytes: int, logits: int
) -> tuple[float, float]:
    """Return the bytes that TRL's head needs in its forward pass, and while it computes gradients.

    All tokens are assumed to belong to answers, so all have logits. Each logit of a tile has 16
    bits. The hidden states are copied, and the rows of the head that a tile needs are cast. The
    gradients of the hidden states and of a trained head are summed in 32 bits, and then cast to the
    dtype of the hidden states and of the head.
    """
    hidden = config.tokens * sizes.hidden

    casts = (
        2.0 * (TILE_WORDS + min(config.tokens, TILE_TOKENS)) * sizes.hidden
        if base_bytes == 4
        else 0.0
    )
    forward = 2.0 * logits + base_bytes * hidden + casts
    of_head = sizes.embedding if config.method == "full" else 0
    gradients = (hidden + of_head) * (4.0 if base_bytes == 4 else 6.0)
    return forward, forward + gradients


def _weights(sizes: Sizes, config: TrainConfig, base_bytes: int) -> float:
    """Return the bytes of the base model."""
    linear = sizes.linear_params
    if config.quantization == "nf4" and sizes.packed_bytes:
        return sizes.packed_bytes
    if config.quantization == "nf4":
        bytes_per_weight = 0.5 + NF4_STATISTICS[config.double_quant]
        return linear * bytes_per_weight + (sizes.params - linear) * base_bytes
    if config.quantization == "fp8":  # one scale for each matrix is negligible
        return linear + (sizes.params - linear) * base_bytes
    return sizes.params * base_bytes


def optimizer_state(sizes: Sizes, config: TrainConfig, trained: int, trained_bytes: float) -> float:
    """Return the bytes of optimizer state.

    bitsandbytes keeps the state of embeddings in 32 bits.
    """
    moments = {"adamw_8bit": 2, "paged_adamw_8bit": 2, "lion_8bit": 1}.get(config.optimizer)
    if moments is None:
        return 0.0 if config.optimizer == "adafactor" else 2 * trained_bytes
    in_32_bits = sizes.embedding if config.method == "full" else 0
    return moments * ((trained - in_32_bits) * (1 + 4 / _BLOCK) + in_32_bits * 4)


def side_workspace(config: TrainConfig) -> float:
    """Return the bytes of cuBLAS's workspace on the second CUDA stream.

    Only adapters that are part of the base's matrices use a second stream.
    """
    return WORKSPACE / 2 if config.widens_base else 0.0


def joined_bytes(sizes: Sizes, config: TrainConfig) -> float:
    """Return the bytes that joined adapters add to the base.

    One matrix product computes the outputs of the base and of the adapters. So each of the two
    matrices of an adapter is stored twice more: in 16 bits, and inside the enlarged matrix of the
    base. On an fp8 base, no matrix is enlarged, but a transposed copy of each 8-bit weight is kept.
    """
    total = 0.0
    for (fan_in, fan_out), rank in joined_groups(sizes, config):
        if config.quantization == "fp8":
            own_rank = config.lora_rank or 0
            total += fan_out * fan_in / 2 + rank * fan_in + own_rank * fan_out
            continue
        pad = _joined_pad(rank)
        total += (fan_out + pad) * (fan_in + pad) - fan_out * fan_in + rank * (fan_in + fan_out)
    return 2.0 * sizes.layers * total


def joined_groups(sizes: Sizes, config: TrainConfig) -> list[tuple[tuple[int, int], int]]:
    """Return, for adapters that share an input, their joint shape (in, out) and total rank."""
    if config.lora_kernels != "joined":
        return []
    adapted = sizes.adapted(config)
    groups = [
        [sizes.matrices[name] for name in names if name in adapted] for names in _SHARED_INPUTS
    ]
    return [
        ((group[0][0], sum(fan_out for _, fan_out in group)), (config.lora_rank or 0) * len(group))
        for group in groups
        if group
    ]


def _joined_pad(rank: int) -> int:
    return -(-rank // JOINED_MULTIPLE) * JOINED_MULTIPLE


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def kept_bytes(sizes: Sizes, config: TrainConfig) -> float:
    """Return the bytes per token that a layer keeps for its backward pass if not recomputed."""
    compiled = config.compile != "none"
    # On an fp8 base, autocast adds nothing to what joined adapters keep: the input in 16 bits.
    in_fp8 = config.quantization == "fp8" and config.lora_kernels == "joined"
    pure = config.precision == "bf16_pure" or config.quantization == "nf4" or in_fp8
    case = f"{config.method}_{'pure' if pure else 'mixed'}"
    eager = kept_factors("eager")[sizes.family]
    table = (
        kept_factors("compiled")[sizes.family] if compiled or config.kernels == "liger" else eager
    )
    of_hidden, of_inner, of_queries, of_keys = table[case]
    # Liger's norms and MLPs keep the same tensors as compiled norms and MLPs. Autocast adds the
    # same number of bytes to these layers as to eager layers.
    if config.kernels == "liger" and not pure:
        pure_case = case.replace("mixed", "pure")
        factors = (
            own + more - less
            for own, more, less in zip(table[pure_case], eager[case], eager[pure_case], strict=True)
        )
        of_hidden, of_inner, of_queries, of_keys = factors

    if config.attention == "eager":  # eager attention repeats keys and values, and keeps its scores
        other = {
            "gemma2": (of_queries, of_keys),
            "phi3": (of_queries, 0),
            "qwen3": QWEN3_EAGER[config.method],
        }
        of_queries, of_keys = other.get(sizes.family, (8, 0))

    if config.fp8_products != "none":
        # The inputs of products are kept in one byte instead of two: the outputs of both norms and
        # the product of the MLP. The output of the attention is kept in 16 bits for its own
        # backward pass, so its cast adds one byte.
        of_hidden -= 1
        of_inner -= 1

    keep: float = of_hidden * sizes.hidden + of_inner * sizes.intermediate
    keep += of_queries * sizes.queries + of_keys * sizes.keys + 4 * _NORMS.get(sizes.family, 2)

    if config.attention == "eager":
        scores = SCORES_COMPILED if compiled else SCORES.get(sizes.family, SCORES_DEFAULT)
        keep += scores * sizes.heads * config.seq_len
    else:
        keep += 4 * sizes.heads
        if config.has_mask and config.attention.startswith("sdpa"):
            # With a mask, keys and values are repeated for each query head before SDPA, which keeps
            # the repeated tensors. In Phi 3, one product computes queries, keys and values
            # together, so its layers keep the same number of bytes as without a mask.
            repeated = 0 if sizes.family == "phi3" else 4 * (sizes.queries - sizes.keys)
            keep += 2 * config.seq_len + repeated
        if sizes.family == "phi3" and not compiled and config.packed_attention == "varlen":
            # Varlen attention keeps the values (V) as a separate tensor instead of the output of
            # the joint product for queries, keys and values. The output of the attention is copied
            # only if adapters cast it.
            casts = config.method == "lora" and not pure
            keep -= 2 * (sizes.queries + sizes.keys) + (0 if casts else 2 * sizes.queries)

    if sizes.family == "qwen3":  # Qwen3 normalises the queries and keys of each head
        keep += 4 * (sizes.heads + sizes.key_heads)

    if config.method == "lora":
        keep -= _kept_by_missing_adapters(sizes, config, pure=pure)
        keep += _kept_by_dropout(sizes, config, pure=pure) if config.lora_dropout else 0.0
        keep += 2 * (config.lora_rank or 1) * len(sizes.adapted(config))
    return keep + _kept_by_joining(sizes, config, pure=pure)


def _kept_by_joining(sizes: Sizes, config: TrainConfig, *, pure: bool) -> float:
    """Return how many more bytes per token a layer keeps if one product computes base and adapters.

    The input is multiplied by the A matrices of the adapters, and the products are stored in
    additional columns of the base's input. The output of the attention has no such columns, so it
    is copied into a wider tensor, and the copy is kept. Under autocast, such a copy exists anyway.
    On an fp8 base, nothing is stored in additional columns.
    """
    if config.quantization == "fp8":
        return 0.0
    groups = joined_groups(sizes, config)
    copies = groups and pure and config.attention != "eager" and "o_proj" in sizes.adapted(config)
    copied_bytes = 2.0 * sizes.queries if copies else 0.0
    return sum(2.0 * _joined_pad(rank) for _, rank in groups) + copied_bytes


def _kept_by_missing_adapters(sizes: Sizes, config: TrainConfig, *, pure: bool) -> float:
    """Return how many fewer bytes per token a layer keeps if some matrices have no adapter.

    `kept_factors` assumes adapters on every matrix. An adapter keeps its input. Under autocast,
    each adapter keeps its own cast of the input, unless Inductor makes one cast for all. Without
    autocast, adapters on matrices with the same input keep that input once. Fused attention keeps
    its output, with or without adapters. If the output is neither cast nor copied, it is also the
    input of `o_proj`, so a missing adapter on `o_proj` saves no bytes.
    """
    adapted = sizes.adapted(config)
    compiled = config.compile != "none"
    if not pure and not compiled:
        return sum(
            2.0 * fan_in for name, (fan_in, _) in sizes.matrices.items() if name not in adapted
        )

    unused = [names for names in _SHARED_INPUTS if not adapted & set(names)]
    if pure and (_keeps_output(sizes, config) or (compiled and config.attention != "eager")):
        unused = [names for names in unused if "o_proj" not in names]
    inputs = {name: fan_in for name, (fan_in, _) in sizes.matrices.items()}
    return sum(2.0 * next(inputs[name] for name in names if name in inputs) for names in unused)


def _keeps_output(sizes: Sizes, config: TrainConfig) -> bool:
    """Return whether an uncompiled layer keeps the input of `o_proj` even without an adapter.

    Fused attention keeps its output for the backward pass. The same tensor is the input of
    `o_proj`, unless the output is cast or copied first. Phi 3 copies it, unless rows are packed.
    """
    keeps_input = sizes.family != "phi3" or config.packed_attention == "varlen"
    return config.attention != "eager" and keeps_input


def _kept_by_dropout(sizes: Sizes, config: TrainConfig, *, pure: bool) -> float:
    """Return the bytes for each token that a layer keeps because of its adapters' dropout.

    Each adapter keeps a dropout mask of one byte for each value of its input. An adapter also keeps
    its own input after dropout, while adapters without dropout share one input. Under autocast,
    each adapter keeps a separate input even without dropout: the cast.
    """
    adapted = sizes.adapted(config)
    fan_in = {name: size for name, (size, _) in sizes.matrices.items() if name in adapted}
    masks = float(sum(fan_in.values()))
    if not pure:
        return masks

    # Fused attention keeps its output, which is the input of `o_proj`, with or without dropout.
    kept_anyway = {"o_proj"} if _keeps_output(sizes, config) else set()
    groups = [
        [name for name in names if name in fan_in and name not in kept_anyway]
        for names in _SHARED_INPUTS
    ]
    shared_bytes = sum(2.0 * fan_in[names[0]] for names in groups if names)
    return masks + 2.0 * masks - shared_bytes


def moving_bytes(sizes: Sizes, config: TrainConfig) -> float:
    """Return the bytes per token of temporary tensors in a layer's backward pass."""
    if config.compile != "none":
        return 8 * sizes.intermediate + 6 * sizes.hidden
    is_half = (
        config.method == "full" or config.precision == "bf16_pure" or config.quantization == "nf4"
    )
    return (4 if is_half else 8) * sizes.intermediate + 3 * sizes.hidden


def largest_logits_gib(model: ModelSpec, tokens: int) -> float:
    """Return an upper bound of the GiB of an update's logits if all `tokens` have them at once."""
    return gib(WHOLE_LOGITS[True][1] * tokens * model.vocab_size)

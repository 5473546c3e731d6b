"""The formula for the time of a micro batch: matrix products plus the time to move bytes.

The formula assumes that all matrix products reach the rate of large products, and that all bytes
move at the bandwidth of the card's memory. Its constants come from profiles and from measured step
times of 16 models on an H200 and an H100 (`benchmarks/plan.py speed`). The module `transfer`
converts these two times to other cards. A micro batch also takes at least as long as the host needs
to issue the work, which does not depend on the card. The host's time is the least certain of the
three times: some hosts are twice as fast as others, and only a calibration measures the user's
host.
"""

import functools
import math
import statistics
from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device
from autotune.catalog.model_sizes import Sizes
from autotune.core.objective import Objective
from autotune.core.probe_types import UNALIGNED, WIDE, DryCount, Measurement
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.prediction.memory_formula import (
    KEPT_ANSWERS,
    MemoryBreakdown,
    joined_groups,
    kept_bytes,
    memory_breakdown,
    rows_of,
    supported,
)
from autotune.prediction.transfer import REFERENCE, USUAL_SHARE, flash_tflops, products_tflops
from autotune.problem.calibration import Calibration
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.trainer.settings import chunk_tokens

# A matrix multiplication in fp8 is this many times as fast as in bf16, including the time to cast
# the weights for each multiplication.
FP8 = 1.6
# The bytes that a step moves for each byte that a layer keeps for its backward pass, and for each
# logit, including temporary tensors. A layer moves more bytes under autocast, and fewer with
# Liger's kernels or if it is compiled. The head is never compiled. `benchmarks/plan.py speed` fits
# these constants, and predicts each model with the constants that fit all other models.
MOVED = {
    "mixed": 10.8,
    "pure": 9.8,
    "liger": 7.3,
    "compiled": 4.0,
    "logits": 58.0,
}
# In full fine-tuning, a layer moves this fraction of the bytes that a layer with adapters moves.
FULL = 0.45
# The milliseconds that the host needs to issue one layer with adapters, in one micro batch
HOST_MS = {"eager": 6.0, "compiled": 3.5}
NF4_MS = 2.0  # added milliseconds to issue the unpacking of a layer's 4-bit base
FULL_MS = 2.5  # the host's milliseconds to issue a layer without adapters
AGAIN = 0.7  # if a layer is recomputed, its host time grows by this fraction
# The bytes that are moved for each logit if TRL computes the loss in tiles. A forward pass writes
# and reads each 16-bit logit once, which moves 4 bytes. A backward pass writes and reads each logit
# twice, and moves the logit's gradient once, which makes 10 bytes.
TILE_FORWARD = 4.0
TILE_BACKWARD = 10.0
DEVICE_ERROR = 0.07  # relative standard deviation of the device's time
# A dry probe counts the operations and the moved bytes of a step without a GPU. The following
# factors convert its counts to the times of kernels. They come from profiles of three models on an
# H200 (`benchmarks/counts.py speed`). A thin product is a matrix product that is bound by
# bandwidth, such as a product with an adapter.
THICK = 1.14  # speed of products that are not thin, divided by the mean speed of all products
MOVED_SHARE = 0.665  # fraction of the memory bandwidth that kernels reach if they only move bytes
THIN_SHARE = 0.73  # fraction of the memory bandwidth that thin products reach
# Time per FLOP of memory-efficient attention, divided by the mean time per FLOP of all products
BY_POSITION = 2.2
OPERATION_US = 23.0  # the host's microseconds to issue one operation
# Time to move a byte of a strided or an indexed tensor, divided by the time for other tensors. The
# six factors STRIDED, INDEXED, NOT_ALIGNED, FLASH, WIDE_FORWARD and WIDE_BACKWARD come from
# profiles of 11 other models on an H100. One of the 11 models had unaligned rows, and two had wide
# heads.
STRIDED = 2.0
INDEXED = 3.0
# Time per FLOP of the following operations, divided by the mean time per FLOP of all products
NOT_ALIGNED = 5.5  # a matrix product with unaligned rows (`probe_types.UNALIGNED`)
FLASH = 1.4  # flash attention, if it replaces cuDNN's attention
# With a mask of packed or padded examples, another kernel computes also the FLOPs that a causal
# mask leaves out. In profiles of three models, attention took this many times as long.
MASKED = 2.7
# FlexAttention, for each FLOP in the blocks that it computes: both passes of 2 x 4,096 tokens with
# 64 heads of 64 values took 4.2 ms on an H100
FLEX = 2.2
WIDE_FORWARD = 5.4  # memory-efficient attention of wide heads
WIDE_BACKWARD = 20.0
# Bytes that are moved for each logit if the model caps its logits: three operations in 16 bits, and
# their gradients
CAPPED = 26.0
# Bytes that are moved to unpack a weight of a 4-bit base: the packed weight with its scale, and the
# 16-bit weight
UNPACKED = 2.56
# The relative standard deviation of the device's time if the time comes from a dry probe. Without
# the six factors above that were taken from the 11 models, the 80 % interval contained 27 of the 30
# measurements of these models. With the six factors, the median error for the 11 models is 4.3 %,
# but another family may use kernels that the 11 models lack.
COUNTED_ERROR = 0.15
# The device's time if the inputs of recomputed layers wait in the host's memory, divided by its
# time if they stay on the GPU. For Mistral-7B and Llama-3.1-8B, with adapters and in full, it is
# 1.04 to 1.07 on an H200 (`benchmarks/levers.py reference`). The error is assumed to cover hosts
# whose PCIe is slower relative to the GPU.
OFFLOADED = 1.06
OFFLOADED_ERROR = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host's time to issue work, relative to the hosts on which HOST_MS was measured.

    A larger `scale` means a slower host. `error` is the standard deviation of the logarithm of
    `scale`.
    """

    scale: float
    error: float


MEASURED_HOST = Host(scale=1.0, error=0.25)
# In published runs with small micro batches on A100s, hosts take about half the time that HOST_MS
# predicts.
UNKNOWN_HOST = Host(scale=0.6, error=0.5)


def host_of(calibration: Calibration | None) -> Host:
    """Return the calibrated host, or an unknown host without a calibration.

    The calibrated host gets the error of MEASURED_HOST. A calibration of a CPU timed the
    computation together with the host's work, so its host has the error of UNKNOWN_HOST.
    """
    if calibration is None:
        return UNKNOWN_HOST
    scale = calibration.layer_ms / (HOST_MS["eager"] * (1 + AGAIN))
    return Host(
        scale=scale, error=(MEASURED_HOST if calibration.measures_gpu else UNKNOWN_HOST).error
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeEstimate:
    """The seconds of a micro batch on the device and on the host, and of the rest of a step.

    `rest_s` is the time after the last micro batch: clipping and the optimizer. The device's time
    consists of `products_s` for matrix products, `attention_s` for attention, and `bytes_s` for
    moving bytes. If `profiled` is
    true, the parts of the device's time come from a profile, and `fp8_s` is the time of 8-bit
    products. Each error is the standard deviation of the time's logarithm. `side` is the size of
    square matrices whose product has the layers' mean number of multiply-adds, or None if unknown.
    `num_observations` is the number of other users' measurements that corrected the conversion to
    another card.
    """

    products_s: float
    bytes_s: float
    host_s: float
    rest_s: float
    attention_s: float = 0.0
    fp8_s: float = 0.0
    profiled: bool = False
    device_error: float = DEVICE_ERROR
    host_error: float = MEASURED_HOST.error
    side: float | None = None
    num_observations: int = 0

    @property
    def device_s(self) -> float:
        """The device's time for a micro batch: matrix products, attention and moved bytes."""
        return self.products_s + self.attention_s + self.fp8_s + self.bytes_s

    @property
    def products_share(self) -> float:
        """The share of the device's time that products and attention in 16 or more bits take."""
        return (self.products_s + self.attention_s) / self.device_s

    @property
    def micro_s(self) -> float:
        """The longer of the device's and the host's time, plus up to 19 % if they are similar."""
        return math.sqrt(math.hypot(self.device_s**2, self.host_s**2))

    @property
    def host_share(self) -> float:
        """The host's weight in `micro_s`, from 0 (GPU-bound) to 1 (CPU-bound)."""
        return self.host_s**4 / (self.device_s**4 + self.host_s**4)

    @property
    def error(self) -> float:
        """The standard deviation of the logarithm of `micro_s`."""
        return self.device_error + (self.host_error - self.device_error) * self.host_share

    def longer(self, factor: float, rest: float = 1.0) -> "StepTimeEstimate":
        """Multiply the micro batch times by `factor`, and the time after them by `rest`."""
        if factor == rest == 1.0:
            return self
        return replace(
            self,
            products_s=factor * self.products_s,
            attention_s=factor * self.attention_s,
            fp8_s=factor * self.fp8_s,
            bytes_s=factor * self.bytes_s,
            host_s=factor * self.host_s,
            rest_s=rest * self.rest_s,
        )

    def with_offloading(self) -> "StepTimeEstimate":
        """Add what the copies cost if the inputs of recomputed layers wait in the host's memory."""
        return replace(
            self.longer(OFFLOADED),
            host_s=self.host_s,
            device_error=math.hypot(self.device_error, OFFLOADED_ERROR),
        )

    def convert(self, transfer: SpeedTransfer) -> "StepTimeEstimate":
        """Convert the device's times to another card, and the host's time if its ratio is known."""
        error = transfer.profiled_error if self.profiled else None
        return replace(
            self,
            products_s=self.products_s / transfer.products,
            attention_s=self.attention_s / (transfer.attention or transfer.products),
            fp8_s=self.fp8_s / (transfer.fp8 or transfer.products),
            bytes_s=self.bytes_s / transfer.bytes,
            host_s=self.host_s / (transfer.host or 1.0),
            rest_s=self.rest_s / transfer.bytes,
            device_error=math.hypot(self.device_error, transfer.error if error is None else error),
            host_error=self.host_error if transfer.host is None else MEASURED_HOST.error,
            num_observations=transfer.basis,
        )


def counted_step_time(
    config: TrainConfig, count: DryCount, host: Host = MEASURED_HOST
) -> StepTimeEstimate | None:
    """Return the time of a step on the reference card, from a dry probe of the whole model.

    The result is None if the dry probe computed only memory. The result is also None with CUDA
    graphs, because their time was never measured. And the result is None if some products are not
    in 16 bits: with a base in int8 or fp8 and with `fp8_products`, products are in 8 bits. Experts
    multiply in 16 bits only if their weights are in bf16.
    """
    in_16_bits = config.precision != "fp32" and config.quantization != "int8"
    in_16_bits = in_16_bits and not config.multiplies_in_fp8
    in_16_bits = in_16_bits and not any("fallback" in name for name in count.flops)
    if not count.flops or not in_16_bits or config.cuda_graphs != "none":
        return None

    card = resolve_device(REFERENCE)
    rate = 1e12 * (products_tflops(card) or math.nan)
    bandwidth = 1e9 * (card.bandwidth_gb_s or math.nan)
    moved = count.moved_bytes
    thin = count.moved_bytes.get("thin product", 0)
    weighted_bytes = (
        moved.get("other", 0)
        + STRIDED * moved.get("strided", 0)
        + INDEXED * moved.get("indexed", 0)
    )
    weights = count.model_gib if config.method == "full" else count.adapters_gib
    # The same sum as in `_step_time`, with gradients as large as the trained weights.
    step_bytes = (5 * weights + 2 * count.optimizer_gib) * GIB
    slow = {name: flops * _slowness(name, config) for name, flops in count.flops.items()}
    attention = sum(flops for name, flops in slow.items() if "attention" in name)
    on_gpu = StepTimeEstimate(
        products_s=(sum(slow.values()) - attention) / rate,
        attention_s=attention / rate,
        bytes_s=(weighted_bytes / MOVED_SHARE + thin / THIN_SHARE) / bandwidth,
        host_s=count.operations * OPERATION_US * 1e-6 * host.scale,
        rest_s=step_bytes / bandwidth,
        device_error=COUNTED_ERROR,
        host_error=host.error,
    )
    return on_gpu.with_offloading() if config.offloads else on_gpu


def _slowness(name: str, config: TrainConfig) -> float:
    """Return the operation's time per FLOP, divided by the mean time per FLOP of all products."""
    if "attention" not in name:
        return NOT_ALIGNED if name.endswith(UNALIGNED) else 1 / THICK
    if name.endswith(WIDE):
        return WIDE_BACKWARD if "backward" in name else WIDE_FORWARD
    if "efficient" in name:
        return BY_POSITION
    if "flex" in name:
        return FLEX
    return FLASH if config.padding == "longest" and config.attention == "sdpa" else 1.0


def divide_step_time(
    measurement: Measurement, by_formula: StepTimeEstimate | None
) -> StepTimeEstimate:
    """Divide a measured step time into the parts of a StepTimeEstimate.

    The parts have the same proportions as in the measurement's profile. Without a profile, they
    have the same proportions as in `by_formula`, which is the formula's estimate for the measured
    card. The device error is 0, because the caller adds the measurement's error. The host has the
    error of UNKNOWN_HOST, because the time may be converted to another host.
    """
    micro_s = statistics.median(measurement.micro_step_s)
    kernels = measurement.kernels
    rest_s = statistics.median(measurement.rest_s) if measurement.rest_s else 0.0

    if kernels is not None:
        device_s = min(kernels.busy_s / kernels.micro_s, 1.0) * micro_s
        # The kernels' times may sum to more than the busy time, because some kernels run at the
        # same time. The sum is scaled to the busy time.
        multiplies_s = kernels.products_s + kernels.attention_s + kernels.fp8_s
        of_kernels = device_s / (multiplies_s + kernels.bytes_s)
        return StepTimeEstimate(
            products_s=of_kernels * kernels.products_s,
            attention_s=of_kernels * kernels.attention_s,
            fp8_s=of_kernels * kernels.fp8_s,
            bytes_s=of_kernels * kernels.bytes_s,
            host_s=_other_part(micro_s, device_s),
            rest_s=rest_s,
            device_error=0.0,
            host_error=UNKNOWN_HOST.error,
            profiled=True,
        )

    host_s = min(measurement.host_share or 0.0, 0.99) * micro_s
    device_s = _other_part(micro_s, host_s)
    products = by_formula.products_share if by_formula else USUAL_SHARE
    attention = by_formula.attention_s / by_formula.device_s if by_formula else 0.0
    return StepTimeEstimate(
        products_s=(products - attention) * device_s,
        attention_s=attention * device_s,
        bytes_s=(1 - products) * device_s,
        host_s=host_s,
        rest_s=rest_s,
        device_error=0.0,
        host_error=UNKNOWN_HOST.error,
    )


def _other_part(micro_s: float, part_s: float) -> float:
    """Return the host's time if `part_s` is the device's time, and the reverse."""
    return math.pow(micro_s**4 - part_s**4, 0.25)


def estimate_step_time(
    model: ModelSpec,
    config: TrainConfig,
    host: Host = MEASURED_HOST,
    objective: Objective = Objective.SFT,
) -> StepTimeEstimate | None:
    """Return the time of a step on the reference card, or None if no formula covers it.

    The result is None for CUDA graphs and for uncompiled fp8, which were not measured. All tokens
    are assumed to enter the loss.
    """
    sizes = supported(model, config)
    if sizes is None or config.cuda_graphs != "none":
        return None
    # Uncompiled fp8 is slower than bf16, so its time was not measured.
    if config.quantization == "fp8" and config.compile == "none":
        return None
    trained = memory_breakdown(model, config, objective=objective)
    assert trained is not None
    return _step_time(sizes, rows_of(config, objective), host, trained, objective)


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _step_time(
    sizes: Sizes, config: TrainConfig, host: Host, trained: MemoryBreakdown, objective: Objective
) -> StepTimeEstimate:
    card: DeviceSpec = resolve_device(REFERENCE)
    full = config.method == "full"
    tokens = config.tokens
    recomputed = _recomputed_share(sizes, config)
    own, untrained = objective.passes  # additional forward passes without gradients
    passes = own + untrained

    # A multiply-add counts as two operations. Each weight matrix is multiplied once in the forward
    # pass, once for the gradient of its input, and in full fine-tuning once more for the gradient
    # of the weight.
    head = sizes.embedding if objective.num_labels is None else 0
    params = sizes.linear_params + head
    products = (6 if full else 4) * params + 2 * recomputed * sizes.linear_params
    products += 2 * passes * params
    if objective is not Objective.SFT:
        products += 2 * head  # the logits are computed again for their gradients
    # A causal mask leaves out half of the operations.
    attention = 6 * config.seq_len * sizes.queries * sizes.layers * (1 + (recomputed + passes) / 3)
    if config.has_mask and config.attention.startswith("sdpa"):
        attention *= MASKED

    quantities = fitted_quantities(sizes, config, objective)
    moved = sum(MOVED[name] * quantity for name, quantity in quantities.items())
    moved += tokens * sizes.vocab * _known_logit_bytes(sizes, objective) / MOVED_SHARE
    if config.quantization == "nf4":  # the base is unpacked for every product
        moved += UNPACKED / MOVED_SHARE * sizes.linear_params * (2 + recomputed + passes)
    # An adapter reads its input and writes its output in each forward pass. The backward pass reads
    # or writes both twice. With `lora_kernels: joined`, the base's products do half of this. On an
    # fp8 base, joined adapters only share their input.
    ends = sum(sum(sizes.matrices[name]) for name in sizes.adapted(config))
    if config.lora_kernels == "joined" and not config.widens_base:
        ends = sum(fan_in + fan_out for (fan_in, fan_out), _ in joined_groups(sizes, config))
    thin = tokens * (4 + 2 * (1 + recomputed + own)) * sizes.layers * ends
    moved += (0.5 if config.widens_base else 1.0) * thin / THIN_SHARE
    if full:
        moved += _gradient_bytes(sizes, config, objective) / MOVED_SHARE

    faster = FP8 if config.multiplies_in_fp8 else 1.0
    rate = 1e12 * (products_tflops(card) or math.nan) * faster
    attention_rate = 1e12 * (flash_tflops(card) or math.nan)
    bandwidth = 1e9 * (card.bandwidth_gb_s or math.nan)

    # Clipping reads the gradients and scales them, and the optimizer reads them. The optimizer also
    # reads and writes weights and state.
    weights = trained.adapters
    if full:
        weights = trained.weights / (2 if objective.has_reference else 1)
    step_bytes = (3 * trained.gradients + 2 * weights + 2 * trained.optimizer) * GIB
    return StepTimeEstimate(
        products_s=tokens * products / rate,
        attention_s=tokens * attention / attention_rate,
        bytes_s=moved / bandwidth,
        host_s=_host_s(sizes, config, objective) * host.scale,
        rest_s=step_bytes / bandwidth,
        device_error=_device_error(config, objective),
        host_error=host.error,
        side=math.cbrt(tokens * sizes.linear_params / (sizes.layers * len(sizes.matrices))),
    )


def _device_error(config: TrainConfig, objective: Objective) -> float:
    """Return the relative standard deviation of the device's time.

    It is larger for what the formula was not fitted to: other objectives, joined adapters on an fp8
    base, and trained layers with fp8 products.
    """
    unfitted = config.fp8_products != "none" or (
        config.quantization == "fp8" and config.lora_kernels == "joined"
    )
    return COUNTED_ERROR if unfitted or objective is not Objective.SFT else DEVICE_ERROR


def fitted_quantities(
    sizes: Sizes, config: TrainConfig, objective: Objective = Objective.SFT
) -> dict[str, float]:
    """Return how often each constant of MOVED counts in a micro batch.

    The quantities are bytes that layers keep, weighted with their passes, and numbers of logits.
    """
    own, untrained = objective.passes
    # PEFT reads the base's outputs again to add the adapters' outputs. With `lora_kernels: joined`,
    # an adapter is part of the base's matrix product, unless the base is in fp8.
    adapted = len(sizes.adapted(config)) / len(sizes.matrices)
    with_adapters = FULL + (0.0 if config.widens_base else adapted * (1 - FULL))
    passes = with_adapters * (2 + _recomputed_share(sizes, config) + own) + FULL * untrained

    kinds = {
        "compiled": config.compile != "none",
        "liger": config.kernels == "liger",
        "pure": config.precision == "bf16_pure",
        "mixed": True,
    }
    kind = next(name for name, applies in kinds.items() if applies)
    quantities = {kind: passes * config.tokens * sizes.layers * kept_bytes(sizes, config)}
    if objective is Objective.SFT:
        quantities["logits"] = float(config.tokens * sizes.vocab)
    return quantities


def _recomputed_share(sizes: Sizes, config: TrainConfig) -> float:
    """Return the fraction of the layers that the backward pass computes again."""
    every = config.checkpoint_every
    return math.ceil(sizes.layers / every) / sizes.layers if every else 0.0


def _gradient_bytes(sizes: Sizes, config: TrainConfig, objective: Objective) -> float:
    """Return the bytes that full fine-tuning moves to cast weights and to sum gradients.

    Each gradient is added to the gradient of earlier micro batches. A chunked loss does so for the
    head after each chunk. Autocast also casts weights to 16 bits, and gradients to 32 bits.
    """
    pure = config.precision == "bf16_pure"
    head = 0
    if objective is Objective.SFT and config.loss == "chunked":
        chunks = math.ceil(config.tokens / chunk_tokens(config.tokens))
        head = chunks * sizes.embedding
    return (6 if pure else 24) * (sizes.params + head)


def _known_logit_bytes(sizes: Sizes, objective: Objective) -> float:
    """Return the bytes that all passes move for each logit, beside those in MOVED."""
    if objective.num_labels is not None:
        return 0.0
    if objective is Objective.SFT:
        return CAPPED if sizes.capped else 0.0
    return TILE_FORWARD * (1 + sum(objective.passes)) + TILE_BACKWARD


def _host_s(sizes: Sizes, config: TrainConfig, objective: Objective) -> float:
    """Return the seconds that the measured hosts need to issue a micro batch."""
    own, untrained = objective.passes
    adapted = len(sizes.adapted(config)) / len(sizes.matrices)
    unpacking_ms = NF4_MS if config.quantization == "nf4" else 0.0
    adapter_ms = HOST_MS["compiled" if config.compile != "none" else "eager"] - FULL_MS
    issue_ms = FULL_MS + adapted * adapter_ms + unpacking_ms
    untrained_ms = AGAIN * untrained * (FULL_MS + unpacking_ms)
    again = AGAIN * (_recomputed_share(sizes, config) + own)
    return sizes.layers * (issue_ms * (1 + again) + untrained_ms) / 1000

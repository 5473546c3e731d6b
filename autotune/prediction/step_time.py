"""The time of a micro batch, by formula: products at the rate of large ones, all else at the memory's bandwidth.

The constants were measured on an H200 (`benchmarks/depth_extrapolation.py`, `benchmarks/search.py replay`), and
`transfer` converts both parts to other cards. The host's time to issue the work is a lower bound of its own, which no
card changes, and the least certain number: hosts differ by a factor of two, unless a calibration measured this one.
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
    kept_bytes,
    memory_breakdown,
    rows_of,
    supported,
)
from autotune.prediction.transfer import REFERENCE, USUAL_SHARE, products_tflops
from autotune.problem.calibration import Calibration
from autotune.problem.speed_transfer import SpeedTransfer

FP8 = 1.36  # that rate with factors in 8 bits, relative to bf16: measured while weights were cast for each product
# Bytes moved for each byte that a layer keeps, with temporary tensors; for each logit; for each byte of a 4-bit base.
EAGER, COMPILED = (10.5, 560.0, 8.5), (5.0, 260.0, 5.0)
FULL = 0.7  # share of these bytes in full fine-tuning, which has no adapters
HOST_MS = {
    "eager": 6.0,
    "compiled": 3.5,
}  # the host's time for a layer and micro batch, with adapters
NF4_MS, FULL_MS = 2.0, 2.5
AGAIN = 0.7  # share of that time that recomputing the layer adds
# Bytes of each logit of TRL's tiles: written and read in 16 bits by each forward pass, and twice as often, with its
# gradient, by the backward pass.
TILE_FORWARD, TILE_BACKWARD = 4.0, 10.0
# Where these take the place of the usual logits, layers move so many times the bytes of the constants above, whose part
# for logits takes in some of it: dry probes of five families with adapters counted 1.3 to 1.6.
LAYERS_ALONE = 1.45
DEVICE_ERROR = 0.08  # relative standard deviation of the device's time
# What a dry probe counts, held against the kernels of profiled micro batches of three models on an H200
# (`benchmarks/counts.py speed`): products that are not thin are faster than all products together; kernels that move
# bytes reach a share of the memory's bandwidth, those of thin products another; attention by positions is slower than
# products; and the host takes so long for an operation.
THICK, MOVED_SHARE, THIN_SHARE, BY_POSITION, OPERATION_US = 1.14, 0.665, 0.73, 2.2, 23.0
# How many times as long as another byte one takes that is strided or indexed; and how many times as long as one of all
# products together an operation takes: of a product whose rows are not aligned, of flash attention where cuDNN's is
# left out, of memory-efficient attention of wide heads. Profiles of 11 other models on an H100 showed these; one of
# them alone had rows that are not aligned, two had wide heads.
STRIDED, INDEXED = 2.0, 3.0
NOT_ALIGNED, FLASH, WIDE_FORWARD, WIDE_BACKWARD = 5.5, 1.4, 5.4, 20.0
# As DEVICE_ERROR. With it the range held 27 of the 30 rows of those 11 before they showed what was wrong. They are
# 4.3 % off in the median since, but the next family may have kernels that none of them had.
COUNTED_ERROR = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The time in which a host issues work, relative to those of the measurements; the deviation of its logarithm."""

    scale: float
    error: float


MEASURED_HOST = Host(scale=1.0, error=0.25)
# Published runs with small micro batches on A100s take half the time in which the hosts of the measurements issue them.
UNKNOWN_HOST = Host(scale=0.6, error=0.5)


def host_of(calibration: Calibration | None) -> Host:
    """The host of a calibration, with the error of a measured one; an unknown host without a calibration.

    One that was calibrated with a CPU alone also computed what it issued, and is no more certain than an unknown host.
    """
    if calibration is None:
        return UNKNOWN_HOST
    scale = calibration.layer_ms / (HOST_MS["eager"] * (1 + AGAIN))
    return Host(scale=scale, error=(MEASURED_HOST if calibration.on_gpu else UNKNOWN_HOST).error)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeEstimate:
    """Seconds of a micro batch, by device and host, and `rest_s` after the last one of a step: clipping, the optimizer.

    The device multiplies, and moves bytes. With `profiled` a profile divided its time, and tells products in 8 bits
    apart (`fp8_s`). Errors are standard deviations of the logarithms. `side` is that of square matrices whose product
    has as many multiply-adds as those of the layers have in the mean; None where it is unknown. `num_observations`
    counts the measurements by others that a conversion to another card rests on.
    """

    products_s: float
    bytes_s: float
    host_s: float
    rest_s: float
    fp8_s: float = 0.0
    profiled: bool = False
    device_error: float = DEVICE_ERROR
    host_error: float = MEASURED_HOST.error
    side: float | None = None
    num_observations: int = 0

    @property
    def device_s(self) -> float:
        """All parts of the device's time."""
        return self.products_s + self.fp8_s + self.bytes_s

    @property
    def products_share(self) -> float:
        """The share of the device's time that is in products."""
        return self.products_s / self.device_s

    @property
    def micro_s(self) -> float:
        """The longer of the two, a little more where they are close."""
        return math.sqrt(math.hypot(self.device_s**2, self.host_s**2))

    @property
    def host_share(self) -> float:
        """How far the host sets the pace, from 0 to 1."""
        return self.host_s**4 / (self.device_s**4 + self.host_s**4)

    @property
    def error(self) -> float:
        """The standard deviation of the logarithm of `micro_s`."""
        return self.device_error + (self.host_error - self.device_error) * self.host_share

    def longer(self, factor: float, rest: float = 1.0) -> "StepTimeEstimate":
        """With micro batches that take so many times as long, on device and host, and the rest of a step too."""
        return replace(
            self,
            products_s=factor * self.products_s,
            fp8_s=factor * self.fp8_s,
            bytes_s=factor * self.bytes_s,
            host_s=factor * self.host_s,
            rest_s=rest * self.rest_s,
        )

    def on(self, transfer: SpeedTransfer) -> "StepTimeEstimate":
        """The same on another card: the device's parts by its speeds, the host's part as it is if no host is known."""
        error = transfer.profiled_error if self.profiled else None
        return replace(
            self,
            products_s=self.products_s / transfer.products,
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
    """The time of a step on the reference card, from the work of the whole model.

    None where only memory was counted, where products are not in 16 bits, as those of bases that multiply in 8 bits and
    of experts but in bf16, where checkpoints wait in the host's memory, and with CUDA graphs, which nobody timed.
    """
    in_16_bits = config.precision != "fp32" and config.quantization not in ("int8", "fp8")
    in_16_bits = in_16_bits and not any("fallback" in name for name in count.flops)
    if not count.flops or not in_16_bits or config.offloads or config.cuda_graphs != "none":
        return None
    card = resolve_device(REFERENCE)
    rate, bandwidth = (
        1e12 * (products_tflops(card) or math.nan),
        1e9 * (card.bandwidth_gb_s or math.nan),
    )
    moved, thin = count.moved_bytes, count.moved_bytes.get("thin product", 0)
    weighed = (
        moved.get("other", 0)
        + STRIDED * moved.get("strided", 0)
        + INDEXED * moved.get("indexed", 0)
    )
    weights = count.model_gib if config.method == "full" else count.adapters_gib
    stepped = (
        5 * weights + 2 * count.optimizer_gib
    ) * GIB  # as of the formula; gradients are as large as weights
    return StepTimeEstimate(
        products_s=sum(flops * _slowness(name, config) for name, flops in count.flops.items())
        / rate,
        bytes_s=(weighed / MOVED_SHARE + thin / THIN_SHARE) / bandwidth,
        host_s=count.operations * OPERATION_US * 1e-6 * host.scale,
        rest_s=stepped / bandwidth,
        device_error=COUNTED_ERROR,
        host_error=host.error,
    )


def _slowness(name: str, config: TrainConfig) -> float:
    """How many times as long an operation of this kind takes on the reference card as one of all products together."""
    if "attention" not in name:
        return NOT_ALIGNED if name.endswith(UNALIGNED) else 1 / THICK
    if name.endswith(WIDE):
        return WIDE_BACKWARD if "backward" in name else WIDE_FORWARD
    if "efficient" in name:
        return BY_POSITION
    return FLASH if config.padding == "longest" and config.attention == "sdpa" else 1.0


def divide_step_time(
    measurement: Measurement, by_formula: StepTimeEstimate | None
) -> StepTimeEstimate:
    """A measured time in its parts: as a profile divides it, else as the formula of its card does.

    No error of the measurement counts; on another host its part is uncertain.
    """
    micro_s, kernels = statistics.median(measurement.micro_step_s), measurement.kernels
    rest_s = statistics.median(measurement.rest_s) if measurement.rest_s else 0.0
    if kernels is not None:
        device_s = min(kernels.busy_s / kernels.micro_s, 1.0) * micro_s
        multiplies_s = (
            kernels.products_s + kernels.attention_s
        )  # of attention, nearly all are products
        of_kernels = device_s / (
            multiplies_s + kernels.fp8_s + kernels.bytes_s
        )  # some run at the same time
        return StepTimeEstimate(
            products_s=of_kernels * multiplies_s,
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
    return StepTimeEstimate(
        products_s=products * device_s,
        bytes_s=(1 - products) * device_s,
        host_s=host_s,
        rest_s=rest_s,
        device_error=0.0,
        host_error=UNKNOWN_HOST.error,
    )


def _other_part(micro_s: float, part_s: float) -> float:
    """The time of the device, or of the host, that makes `micro_s` with that of the other."""
    return math.pow(micro_s**4 - part_s**4, 0.25)


def estimate_step_time(
    model: ModelSpec,
    config: TrainConfig,
    host: Host = MEASURED_HOST,
    objective: Objective = Objective.SFT,
) -> StepTimeEstimate | None:
    """The time of a step on the reference card; None where `supported` is None, and for what was not timed.

    That is fp8 without compilation, and CUDA graphs. All tokens are taken to be trained on.
    """
    sizes = supported(model, config)
    if sizes is None or config.cuda_graphs != "none":
        return None
    if (
        config.quantization == "fp8" and config.compile == "none"
    ):  # slower than bf16, so nobody chooses it
        return None
    trained = memory_breakdown(model, config, objective=objective)
    assert trained is not None
    return _step_time(sizes, rows_of(config, objective), host, trained, objective)


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _step_time(
    sizes: Sizes, config: TrainConfig, host: Host, trained: MemoryBreakdown, objective: Objective
) -> StepTimeEstimate:
    card: DeviceSpec = resolve_device(REFERENCE)
    full, compiled, tokens = config.method == "full", config.compile != "none", config.tokens
    again = (
        0.0
        if config.checkpoint_every is None
        else math.ceil(sizes.layers / config.checkpoint_every) / sizes.layers
    )
    own, untrained = objective.passes  # that compute no gradients
    passes = own + untrained
    head, of_logits = _head(sizes, compiled, objective)
    # A multiply-add is two operations; forward, the gradient of the input, and in full fine-tuning that of the weight.
    products = (6 if full else 4) * (sizes.linear_params + head) + 2 * again * sizes.linear_params
    products += 2 * passes * (sizes.linear_params + head)
    of_kept, _, of_base = COMPILED if compiled else EAGER
    if objective is not Objective.SFT:
        products += 2 * head  # which makes the logits anew for their gradients
        of_kept *= LAYERS_ALONE
    if not full:
        products += (6 + 2 * again + 2 * own) * sizes.adapter_params(config)
    attention = 6 * config.seq_len * sizes.queries * sizes.layers * (1 + (again + passes) / 3)
    adapted = len(sizes.adapted(config)) / len(sizes.matrices)
    # Joined adapters read no outputs again to add to them: of what is left of their bytes nothing is counted.
    with_adapters = FULL + (adapted * (1 - FULL) if config.lora_kernels == "peft" else 0.0)
    moved = (
        of_kept
        * sizes.layers
        * kept_bytes(sizes, config)
        * (with_adapters * (2 + again + own) + FULL * untrained)
    )
    moved = tokens * (moved + of_logits * sizes.vocab)
    if config.quantization == "nf4":  # unpacked for every product
        moved += of_base * sizes.linear_params * (2 + again + passes)
    rate = (
        1e12 * (products_tflops(card) or math.nan) * (FP8 if config.quantization == "fp8" else 1.0)
    )
    bandwidth = 1e9 * (card.bandwidth_gb_s or math.nan)
    unpacking_ms = NF4_MS if config.quantization == "nf4" else 0.0
    issue_ms = (
        FULL_MS + adapted * (HOST_MS["compiled" if compiled else "eager"] - FULL_MS) + unpacking_ms
    )
    issued_ms = issue_ms * (1 + AGAIN * (again + own)) + AGAIN * untrained * (
        FULL_MS + unpacking_ms
    )
    # Clipping reads the gradients; the optimizer reads and writes weights and state.
    weights = trained.weights / (2 if objective.has_reference else 1) if full else trained.adapters
    stepped = (3 * trained.gradients + 2 * weights + 2 * trained.optimizer) * GIB
    return StepTimeEstimate(
        products_s=tokens * (products + attention) / rate,
        bytes_s=moved / bandwidth,
        host_s=sizes.layers * issued_ms / 1000 * host.scale,
        rest_s=stepped / bandwidth,
        device_error=DEVICE_ERROR if objective is Objective.SFT else COUNTED_ERROR,
        host_error=host.error,
        side=math.cbrt(tokens * sizes.linear_params / (sizes.layers * len(sizes.matrices))),
    )


def _head(sizes: Sizes, compiled: bool, objective: Objective) -> tuple[int, float]:
    """The parameters of the head, and the bytes that are moved for each logit in all passes."""
    if objective.num_labels is not None:
        return 0, 0.0
    if objective is Objective.SFT:
        return sizes.embedding, (COMPILED if compiled else EAGER)[1]
    return sizes.embedding, (
        TILE_FORWARD * (1 + sum(objective.passes)) + TILE_BACKWARD
    ) / MOVED_SHARE

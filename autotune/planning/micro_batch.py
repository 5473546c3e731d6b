"""Computes a lower bound of a profiled micro batch's time, and the host resources that a run needs.

A dry probe runs the micro batch on torch's meta device, without a GPU. It adds up the FLOPs, and
the bytes that operations read and write. The device's rates (FLOP/s and bandwidth) were measured
just before the profile.
"""

from collections.abc import Iterator
from dataclasses import replace

from autotune.catalog import DeviceSpec
from autotune.core.machine import host_memory_gib, num_cores
from autotune.core.micro_profile import KernelClass, MicroBatchProfile
from autotune.core.probe_types import DeviceRates, DryCount, MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB, fmt_gib, gib
from autotune.dry.prober import DryAnswer, DryProber
from autotune.planning.slow_parts import LIMITS
from autotune.problem.calibration import Calibration
from autotune.report.values.profile import Bound, HostNeed

DTYPES = {"bf16_mixed": "bf16", "bf16_pure": "bf16", "fp16_mixed": "fp16", "fp32": "fp32"}
MOVES = "all that moves bytes"
NOT_MOVED = (
    KernelClass.PRODUCTS,
    KernelClass.ATTENTION,
    KernelClass.OPTIMIZER,
    KernelClass.COLLECTIVES,
)
LOADER_SHARE = (
    0.1  # the share of a micro batch's time that a data loader in the training process may take
)
# The GiB of host memory that a process with PyTorch, transformers and CUDA takes. Without CUDA,
# such a process takes 0.5 GiB.
PROCESS_GIB = 2.0
CHECKPOINT_S = 60.0  # a disk that writes a checkpoint in at most this many seconds is fast enough


def count_work(request: ProbeRequest, profile: MicroBatchProfile) -> DryAnswer:
    """Compute the FLOPs and the memory traffic of the profiled micro batch with a dry probe."""
    rows = ((profile.length,),) * profile.rows
    counted_request = replace(
        request, micro_batches=(MicroBatch(rows=rows, length=profile.length, share=1.0),)
    )
    with DryProber() as prober:
        return prober.count(counted_request)


def bounds(
    profile: MicroBatchProfile, count: DryCount | None, rates: DeviceRates, config: TrainConfig
) -> tuple[Bound, ...]:
    """Return the measured seconds and the least possible seconds of each kind of work.

    The kinds of work are matrix products, attention, and all other operations. Memory bandwidth
    limits the other operations. If the least possible time is unknown, `Bound.best_s` is None.
    """

    def seconds_of(*kinds: KernelClass) -> float:
        return sum(one.seconds for one in profile.micro_work if one.kind in kinds)

    by_size = {} if config.multiplies_in_fp8 else rates.products.get(DTYPES[config.precision], {})
    rate = max(by_size.values(), default=0.0) * 1e12
    bandwidth = rates.copy_gb_s * 1e9
    moves = seconds_of(*(kind for kind in KernelClass if kind not in NOT_MOVED))
    products = seconds_of(KernelClass.PRODUCTS)
    attention = seconds_of(KernelClass.ATTENTION)

    if count is None:
        works = ("matrix products", products), ("attention", attention), (MOVES, moves)
        return tuple(
            Bound(work=work, seconds=seconds, flops=None, moved_bytes=None, best_s=None)
            for work, seconds in works
        )

    attention_flops = count.attention_flops
    product_flops = float(
        sum(number for name, number in count.flops.items() if "attention" not in name)
    )
    product_bytes = float(
        sum(number for name, number in count.moved_bytes.items() if "product" in name)
    )
    other_bytes = float(sum(count.moved_bytes.values())) - product_bytes
    products_best_s = max(product_flops / rate, product_bytes / bandwidth) if rate else None
    attention_best_s = attention_flops / rate if rate else None

    return (
        Bound(
            work="matrix products",
            seconds=products,
            flops=product_flops,
            moved_bytes=product_bytes,
            best_s=products_best_s,
        ),
        Bound(
            work="attention",
            seconds=attention,
            flops=attention_flops,
            moved_bytes=None,
            best_s=attention_best_s,
        ),
        Bound(
            work=MOVES,
            seconds=moves,
            flops=None,
            moved_bytes=other_bytes,
            best_s=other_bytes / bandwidth,
        ),
    )


def host_needs(
    profile: MicroBatchProfile,
    config: TrainConfig,
    device: DeviceSpec,
    *,
    count: DryCount | None,
    calibration: Calibration | None,
    disk_mb_s: float | None,
    examples_per_s: float,
    tokenised_per_s: float | None,
) -> Iterator[HostNeed]:
    """Yield a HostNeed for each part of the machine: the amount needed and the amount found.

    Training consumes `examples_per_s` examples per second. `disk_mb_s` is the disk's rate, and
    `tokenised_per_s` the rate of tokenisation in examples per second; both were measured on this
    machine. Without `count`, the results for host memory and disk are left out.
    """
    separate_process = config.loader_workers > 0
    rows_per_s = profile.rows / profile.micro_s
    yield HostNeed(
        part="data loader",
        found=profile.loader_rows_per_s,
        needed=rows_per_s if separate_process else rows_per_s / LOADER_SHARE,
        unit="sequences/s",
        why="its processes must keep up with training"
        if separate_process
        else f"it runs in the training's process, and may take {LOADER_SHARE:.0%} of the time",
    )
    yield HostNeed(
        part="reading and tokenising",
        found=tokenised_per_s,
        needed=examples_per_s,
        unit="examples/s",
        why="it runs once, before training, and should take less time than an epoch of training",
    )

    yield _cores(config)
    for limit in LIMITS:
        if limit.part == "link to the GPU" and profile.on_gpu:
            value = limit.measured(calibration, device)
            yield HostNeed(
                part=limit.part, found=value, needed=limit.least, unit=limit.unit, why=limit.why
            )
    if count is None:  # without a count, the size of the model is unknown
        return

    weights_gib = gib(2 * count.total_params)
    yield HostNeed(
        part="host memory",
        found=host_memory_gib(),
        needed=weights_gib + PROCESS_GIB,
        unit="GiB",
        why=f"the model's {fmt_gib(weights_gib)} in bf16 pass through host memory when the model "
        f"is loaded, and PyTorch itself takes {PROCESS_GIB:.0f} GiB",
    )

    checkpoint_gib = (count.adapters_gib or count.model_gib) + count.optimizer_gib
    yield HostNeed(
        part="disk",
        found=disk_mb_s,
        needed=checkpoint_gib * GIB / 1e6 / CHECKPOINT_S,
        unit="MB/s",
        why=f"training waits while a checkpoint of {fmt_gib(checkpoint_gib)} is written; at this "
        "rate, that takes a minute",
    )


def _cores(config: TrainConfig) -> HostNeed:
    """Return the number of CPU cores that the run needs: one for each process that computes."""
    busy = ["the training loop"]
    busy += ["the data loader's processes"] if config.loader_workers else []
    busy += ["the compiler"] if config.compile != "none" else []
    *others, last = busy
    why = f"one for {', '.join(others)}{' and ' * bool(others)}{last}"
    return HostNeed(part="cores", found=num_cores(), needed=len(busy), unit="processors", why=why)

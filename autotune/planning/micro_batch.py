"""What a profiled micro batch says: what the device could do at best, what is lost, and whether the host suffices.

What must be computed and moved is counted by a dry probe; what the device reaches was measured just before.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
NOT_MOVED = (
    KernelClass.PRODUCTS,
    KernelClass.ATTENTION,
    KernelClass.OPTIMIZER,
    KernelClass.COLLECTIVES,
)
LOADER_SHARE = 0.1  # of a micro batch, that a loader in the training's own process may take
PROCESS_GIB = 2.0  # of host memory for PyTorch and transformers, which take 0.5 without CUDA
CHECKPOINT_S = 60.0  # in which a checkpoint should be written


def count_work(request: ProbeRequest, profile: MicroBatchProfile) -> DryAnswer:
    """What the profiled micro batch computes and moves, counted on the meta device, in seconds."""
    rows = ((profile.length,),) * profile.rows
    same = replace(
        request, micro_batches=(MicroBatch(rows=rows, length=profile.length, share=1.0),)
    )
    with DryProber() as prober:
        return prober.count(same)


def bounds(
    profile: MicroBatchProfile, count: DryCount | None, rates: DeviceRates, config: TrainConfig
) -> tuple[Bound, ...]:
    """The time of products, of attention and of all that moves bytes, each with the least that the device needs."""

    def took(*kinds: KernelClass) -> float:
        return sum(one.seconds for one in profile.micro_work if one.kind in kinds)

    of_dtype = (
        {} if config.quantization == "fp8" else rates.products.get(DTYPES[config.precision], {})
    )
    rate = max(of_dtype.values(), default=0.0) * 1e12
    bandwidth = rates.copy_gb_s * 1e9
    moves = took(*(kind for kind in KernelClass if kind not in NOT_MOVED))
    products, attention = took(KernelClass.PRODUCTS), took(KernelClass.ATTENTION)
    if count is None:
        unknown: dict[str, Any] = {"flops": None, "moved_bytes": None, "best_s": None}
        named = {"matrix products": products, "attention": attention, "all that moves bytes": moves}
        return tuple(
            Bound(work=name, seconds=seconds, **unknown) for name, seconds in named.items()
        )
    # A causal mask hides half of the products of attention, which only some counts leave out.
    halves = {
        name: 1.0 if "efficient" in name else 0.5 for name in count.flops if "attention" in name
    }
    of_attention = sum(count.flops[name] * half for name, half in halves.items())
    of_products = float(sum(number for name, number in count.flops.items() if name not in halves))
    by_products = float(
        sum(number for name, number in count.moved_bytes.items() if "product" in name)
    )
    moved = float(sum(count.moved_bytes.values())) - by_products
    best = max(of_products / rate, by_products / bandwidth) if rate else None
    least = of_attention / rate if rate else None
    return (
        Bound(
            work="matrix products",
            seconds=products,
            flops=of_products,
            moved_bytes=by_products,
            best_s=best,
        ),
        Bound(
            work="attention", seconds=attention, flops=of_attention, moved_bytes=None, best_s=least
        ),
        Bound(
            work="all that moves bytes",
            seconds=moves,
            flops=None,
            moved_bytes=moved,
            best_s=moved / bandwidth,
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
    """What the run needs of the machine: of memory and disk by what was counted of its model.

    `examples_per_s` are those that it trains on, the rest was measured here. Without a count nothing is said of them.
    """
    apart = config.loader_workers > 0
    rows_per_s = profile.rows / profile.micro_s
    yield HostNeed(
        part="data loader",
        found=profile.loader_rows_per_s,
        needed=rows_per_s if apart else rows_per_s / LOADER_SHARE,
        unit="rows/s",
        why="its processes keep up with training"
        if apart
        else f"it shares the training's process, of which it may take {LOADER_SHARE:.0%}",
    )
    yield HostNeed(
        part="reading and tokenising",
        found=tokenised_per_s,
        needed=examples_per_s,
        unit="examples/s",
        why="done once, before training: slower than this, it would take longer than a pass over the examples",
    )
    yield _cores(config)
    for limit in LIMITS:
        if limit.part == "link to the GPU" and profile.on_gpu:
            found = limit.measured(calibration, device)
            yield HostNeed(
                part=limit.part, found=found, needed=limit.least, unit=limit.unit, why=limit.why
            )
    if count is None:  # neither is the size of the model known here
        return
    weights_gib = gib(2 * count.total_params)
    yield HostNeed(
        part="host memory",
        found=host_memory_gib(),
        needed=weights_gib + PROCESS_GIB,
        unit="GiB",
        why=f"the model in bf16 has {fmt_gib(weights_gib)}, which pass through it when the model is loaded, and "
        f"{PROCESS_GIB:.0f} GiB are for PyTorch",
    )
    saved_gib = (count.adapters_gib or count.model_gib) + count.optimizer_gib
    yield HostNeed(
        part="disk",
        found=disk_mb_s,
        needed=saved_gib * GIB / 1e6 / CHECKPOINT_S,
        unit="MB/s",
        why=f"a checkpoint has {fmt_gib(saved_gib)}, for which training waits: this writes it in a minute",
    )


def _cores(config: TrainConfig) -> HostNeed:
    """A processor for each that works at the same time."""
    busy = ["the loop that issues the work"]
    busy += ["the processes of the loader"] if config.loader_workers else []
    busy += ["the compiler"] if config.compile != "none" else []
    *others, last = busy
    why = f"one for {', '.join(others)}{' and ' * bool(others)}{last}"
    return HostNeed(part="cores", found=num_cores(), needed=len(busy), unit="processors", why=why)

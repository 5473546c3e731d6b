"""Measures the data rates between a host's GPUs in the collectives that DDP and FSDP2 use.

This module runs in the workers' processes. The number of collectives is fixed and does not depend
on their times: a rank that issued more collectives than the others would wait forever.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from autotune.core.probe_types import CollectiveRates, RankAddress
from autotune.core.units import MIB
from autotune.probe.meters import Meter

NUMBERS = (2, 4, 8, 16, 32, 64)
WARM_UP = 3
ROUNDS = 3
CALLS = 8
# The sizes of the buffers in fp16 elements. FSDP2 gathers and scatters one layer at a time; DDP
# reduces one bucket of gradients at a time.
LAYER = 128 * MIB
BUCKET = 13 * MIB
ON_CPU = 32  # on a CPU, which is used only for trial runs, buffers are smaller by this factor


def measure_collectives(
    meter: Meter, address: RankAddress, num_ranks: int
) -> tuple[CollectiveRates, ...]:
    """The data rates in groups of 2, 4, ... GPUs, and in the group of all ranks' GPUs.

    The measurement takes about a second for each number of GPUs. This process joins the process
    group of all ranks, and leaves it at the end of the measurement. Raises the errors of
    torch.distributed.
    """
    backend = "nccl" if meter.torch_device.type == "cuda" else "gloo"
    store = dist.FileStore(address.meeting, num_ranks)
    dist.init_process_group(backend, rank=address.number, world_size=num_ranks, store=store)

    try:
        found = []
        for number in sorted({*(size for size in NUMBERS if size < num_ranks), num_ranks}):
            # torch requires that every rank creates the group, even a rank that is not in the
            # group.
            group = dist.new_group(list(range(number)))
            if address.number < number:
                found.append(_measure(meter, group, number))
        return tuple(found)
    finally:
        dist.destroy_process_group()
        meter.release()


def _measure(meter: Meter, group: dist.ProcessGroup, number: int) -> CollectiveRates:
    divisor = number * (1 if meter.torch_device.type == "cuda" else ON_CPU)
    whole = torch.zeros(number * (LAYER // divisor), dtype=torch.float16, device=meter.torch_device)
    part = whole[: len(whole) // number].clone()
    bucket = whole[: BUCKET * number // divisor].clone()
    sent = (number - 1) / number

    def gb_s(call: Callable[[], object], buffer: torch.Tensor, times: float = 1.0) -> float:
        """The bus bandwidth of a collective in GB/s, as defined by nccl-tests."""
        return float(times * sent * buffer.nbytes / _seconds(meter, call) / 1e9)

    return CollectiveRates(
        num_gpus=number,
        gather_gb_s=gb_s(lambda: dist.all_gather_into_tensor(whole, part, group=group), whole),
        scatter_gb_s=gb_s(lambda: dist.reduce_scatter_tensor(part, whole, group=group), whole),
        reduce_gb_s=gb_s(lambda: dist.all_reduce(bucket, group=group), bucket, 2.0),
    )


def _seconds(meter: Meter, call: Callable[[], object]) -> float:
    """The seconds of one call: the median over a few rounds."""
    for _ in range(WARM_UP):
        call()

    rounds = []
    for _ in range(ROUNDS):
        begin = meter.mark()
        for _ in range(CALLS):
            call()
        end = meter.mark()
        meter.synchronize()
        rounds.append(max(meter.seconds(begin, end), 1e-9) / CALLS)
    return statistics.median(rounds)

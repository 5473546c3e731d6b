"""What the GPUs of a host reach when they send each other something: the collectives that DDP and FSDP2 use.

In the workers' processes. All ranks issue the same number of collectives, whatever each of them takes, since one that
issued more would wait for ever.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from autotune.core.probe_types import CollectiveRates, Seat
from autotune.core.units import MIB
from autotune.probe.meters import Meter

NUMBERS = (2, 4, 8, 16, 32, 64)
WARM_UP, ROUNDS, CALLS = 3, 3, 8
# Elements of fp16: of a layer, which FSDP2 gathers and scatters at a time, and of a bucket of gradients of DDP.
LAYER, BUCKET = 128 * MIB, 13 * MIB
ON_CPU = 32  # times as few there: a trial


def measure_collectives(meter: Meter, seat: Seat, num_ranks: int) -> tuple[CollectiveRates, ...]:
    """The rates for 2, 4, ... GPUs, up to all of the world, which this process joins and leaves. About a second each.

    Raises what torch.distributed raises.
    """
    backend = "nccl" if meter.torch_device.type == "cuda" else "gloo"
    store = dist.FileStore(seat.meeting, num_ranks)
    dist.init_process_group(backend, rank=seat.number, world_size=num_ranks, store=store)
    try:
        found = []
        for number in sorted({*(one for one in NUMBERS if one < num_ranks), num_ranks}):
            group = dist.new_group(
                list(range(number))
            )  # by all ranks, those that are not in it too
            if seat.number < number:
                found.append(_measure(meter, group, number))
        return tuple(found)
    finally:
        dist.destroy_process_group()
        meter.release()


def _measure(meter: Meter, group: dist.ProcessGroup, number: int) -> CollectiveRates:
    divisor = number * (1 if meter.torch_device.type == "cuda" else ON_CPU)
    whole = torch.zeros(number * (LAYER // divisor), dtype=torch.float16, device=meter.torch_device)
    part, bucket = (
        whole[: len(whole) // number].clone(),
        whole[: BUCKET * number // divisor].clone(),
    )
    sent = (number - 1) / number

    def gb_s(call: Callable[[], object], buffer: torch.Tensor, times: float = 1.0) -> float:
        """The bus bandwidth, as nccl-tests counts it."""
        return float(times * sent * buffer.nbytes / _seconds(meter, call) / 1e9)

    return CollectiveRates(
        num_gpus=number,
        gather_gb_s=gb_s(lambda: dist.all_gather_into_tensor(whole, part, group=group), whole),
        scatter_gb_s=gb_s(lambda: dist.reduce_scatter_tensor(part, whole, group=group), whole),
        reduce_gb_s=gb_s(lambda: dist.all_reduce(bucket, group=group), bucket, 2.0),
    )


def _seconds(meter: Meter, call: Callable[[], object]) -> float:
    """Seconds of one call: the median over a few rounds."""
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

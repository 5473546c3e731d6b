"""This process as a rank of a world: it joins the process group of a probe on several GPUs, and leaves it.

A fake world has one process, which plays rank 0: a collective copies on the device, and waits for nobody. Two H200s
showed that it takes exactly the memory of a real rank. What a rank sees of others is a copy of its own, so that losses
mean nothing.
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.core.parallelism import ZERO
from autotune.core.probe_types import ProbeRequest, Seat
from autotune.core.untested import untested


def refusal(request: ProbeRequest) -> str | None:
    """Why a request for several GPUs is not probed; None if it is."""
    parallelism = request.parallelism
    if parallelism.num_gpus == 1:
        return None
    if parallelism.strategy in ZERO and find_spec("deepspeed") is None:
        return f"{parallelism.strategy} needs DeepSpeed: pip install deepspeed"
    return untested("trainer", request.trainer, "several_gpus") or parallelism.refusal(
        request.config
    )


class Rank:
    """A process of the world of a request. One GPU is a world of one, without a process group.

    The process sees one device, so that its local rank is 0 in any world.
    """

    def __init__(
        self, request: ProbeRequest, device: torch.device, seat: Seat | None = None
    ) -> None:
        """Join nothing yet. `seat` is the place in a world of real ranks."""
        self.size = request.parallelism.num_gpus
        self.number = seat.number if seat else 0
        self.is_fake = request.plays_a_rank
        self._shards = request.parallelism.shards
        self._uses_deepspeed = request.parallelism.strategy in ZERO
        self._offloads = request.parallelism.offload
        self._device = device
        self._meeting = seat.meeting if seat else None
        self._environment: dict[str, str] | None = None  # as it was before
        self._prepare_backend: Any = None  # accelerate's own
        self._store: Any = None  # what real ranks tell each other
        self._asked = 0

    def join(self) -> None:
        """Join the world; real ranks wait for each other here. Raises RuntimeError without a seat among real ranks."""
        if self.size == 1:
            return
        if self._uses_deepspeed:
            _number_from_zero()
        self._environment = dict(os.environ)
        os.environ |= self._variables()
        if self.is_fake:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=0, world_size=self.size, store=FakeStore())
        else:
            if self._meeting is None:
                raise RuntimeError(
                    f"a world of {self.size} real ranks has {self.size} processes, not one"
                )
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            if self._offloads:  # the norm of gradients is added up where they are
                backend = "cuda:nccl,cpu:gloo"
            self._store = dist.FileStore(self._meeting, self.size)
            dist.init_process_group(
                backend, rank=self.number, world_size=self.size, store=self._store
            )
            # NCCL takes its memory at the first collective: before a limit is set.
            dist.all_reduce(torch.zeros(1, device=self._device))
        if self._shards and self._device.type == "cpu":
            self._let_accelerate_shard_on_a_cpu()

    def _variables(self) -> dict[str, str]:
        """Environment variables by which accelerate knows of the world."""
        variables = {"RANK": str(self.number), "WORLD_SIZE": str(self.size)}
        variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(self.size)}
        if self._device.type == "cpu":
            # Without them accelerate would change the number of threads, and look for a GPU.
            variables |= {
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
                "ACCELERATE_TORCH_DEVICE": "cpu",
            }
        return variables

    def _let_accelerate_shard_on_a_cpu(self) -> None:
        """Have accelerate take a CPU for a GPU: it shards on GPUs alone, by code that runs on a CPU as it is."""
        from accelerate.state import DistributedType, PartialState

        self._prepare_backend = PartialState._prepare_backend
        PartialState._prepare_backend = lambda *_, **__: (
            dist.get_backend(),
            DistributedType.MULTI_GPU,
        )

    def adopt(self, model: nn.Module, end_micro_batch: Callable[[], None]) -> None:
        """The Trainer has shared out `model`: what else that needs.

        DDP waits for the result of a reduction, of which a fake one has none. DeepSpeed takes the optimizer's step at
        the end of the backward pass of the last micro batch, which ends before.
        """
        if self.is_fake and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, _already_reduced)
        if self._uses_deepspeed:
            step = model.step

            def step_after_micro_batch() -> None:
                end_micro_batch()
                step()

            model.step = step_after_micro_batch

    def largest(self, value: float) -> float:
        """The largest of the values of all ranks, which wait for each other.

        No collective tells it, for that would let NCCL free early what it holds from the one before.
        """
        if self._store is None:
            return value
        self._asked += 1
        self._store.set(f"largest {self._asked} {self.number}", repr(value))
        return max(
            float(self._store.get(f"largest {self._asked} {rank}")) for rank in range(self.size)
        )

    def leave(self) -> None:
        """Leave the world, which nothing may use any more. Real ranks must all leave it, or none."""
        if self._prepare_backend is not None:
            from accelerate.state import PartialState

            PartialState._prepare_backend, self._prepare_backend = self._prepare_backend, None
        comm: Any = sys.modules.get("deepspeed.comm.comm")
        if comm is not None and comm.cdb is not None:
            comm.destroy_process_group()
            comm.cdb = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        if self._environment is not None:
            os.environ.clear()
            os.environ.update(self._environment)
            self._environment = None


def _number_from_zero() -> None:
    """Have DeepSpeed number modules and parameters anew: ranks compare them, and may have trained others before."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counter[0] = 0


def _already_reduced(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A comm hook of DDP that leaves the gradients as they are."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

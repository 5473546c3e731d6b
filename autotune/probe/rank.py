"""Makes this process a rank, which joins the process group (the world) of a probe on several GPUs.

In a fake process group, one process simulates rank 0: a collective only copies data on the device
and never blocks. A test on two H200s showed that this process takes exactly the memory of a real
rank. Copies of its own data replace the data of the other ranks, so the losses have no meaning.
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
from autotune.core.probe_types import ProbeRequest, RankAddress
from autotune.core.untested import untested
from autotune.trainer.ranks import loopback_variables


def refusal(request: ProbeRequest) -> str | None:
    """The reason why a request for several GPUs cannot be probed, or None if it can be probed."""
    parallelism = request.parallelism
    if parallelism.num_gpus == 1:
        return None
    if parallelism.strategy in ZERO and find_spec("deepspeed") is None:
        return f"{parallelism.strategy} needs DeepSpeed: pip install deepspeed"
    return untested("trainer", request.trainer, "several_gpus") or parallelism.refusal(
        request.config
    )


class Rank:
    """This process as one rank of a probe; a probe on one GPU has no process group.

    Each process sees only its own device, so LOCAL_RANK is 0 in all processes.
    """

    def __init__(
        self, request: ProbeRequest, device: torch.device, address: RankAddress | None = None
    ) -> None:
        """Prepare to `join` the process group; only a real rank has an `address`."""
        self.size = request.parallelism.num_gpus
        self.number = address.number if address else 0
        self.is_fake = request.simulates_rank
        self._shards = request.parallelism.shards
        self._uses_deepspeed = request.parallelism.strategy in ZERO
        self._offloads = request.parallelism.offload

        self._device = device
        self._meeting = address.meeting if address else None
        # The environment variables before `join` changed them.
        self._environment: dict[str, str] | None = None
        self._prepare_backend: Any = None  # accelerate's own method, while it is replaced
        self._store: Any = None  # the store for values that real ranks share
        self._num_exchanges = 0

    def join(self) -> None:
        """Join the process group. A real rank waits here for all other real ranks.

        Raises RuntimeError for a real rank without an address.
        """
        if self.size == 1:
            return
        if self._uses_deepspeed:
            _reset_numbering()

        self._environment = dict(os.environ)
        os.environ |= self._variables()

        if self.is_fake:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=0, world_size=self.size, store=FakeStore())
        else:
            self._join_real_ranks()

        if self._shards and self._device.type == "cpu":
            self._allow_cpu_sharding()

    def _join_real_ranks(self) -> None:
        if self._meeting is None:
            raise RuntimeError(
                f"{self.size} real ranks need {self.size} processes, but this probe has one"
            )
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if self._offloads and backend == "nccl":
            # gloo sums the norms of offloaded gradients on the host
            backend = "cuda:nccl,cpu:gloo"
        self._store = dist.FileStore(self._meeting, self.size)
        dist.init_process_group(backend, rank=self.number, world_size=self.size, store=self._store)
        # NCCL allocates its memory at the first collective. So this collective runs before memory
        # is limited.
        dist.all_reduce(torch.zeros(1, device=self._device))

    def _variables(self) -> dict[str, str]:
        """The environment variables that tell accelerate about the process group."""
        variables = {"RANK": str(self.number), "WORLD_SIZE": str(self.size)}
        variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(self.size)} | loopback_variables()
        if self._device.type == "cpu":
            # Without these variables, accelerate would change the number of threads and look for a
            # GPU.
            variables |= {
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
                "ACCELERATE_TORCH_DEVICE": "cpu",
            }
        return variables

    def _allow_cpu_sharding(self) -> None:
        """Make accelerate treat a CPU like a GPU.

        accelerate refuses to shard on a CPU, although its sharding code also runs there.
        """
        from accelerate.state import DistributedType, PartialState

        self._prepare_backend = PartialState._prepare_backend
        PartialState._prepare_backend = lambda *_, **__: (
            dist.get_backend(),
            DistributedType.MULTI_GPU,
        )

    def adopt(self, model: nn.Module, end_micro_batch: Callable[[], None]) -> None:
        """Prepare the `model` that the Trainer has distributed among the ranks.

        In a fake process group, DDP would wait forever for the result of a reduction, so a hook
        skips reductions. DeepSpeed steps the optimizer at the end of the last micro batch's
        backward pass, so the recorder must end this micro batch before the step.
        """
        if self.is_fake and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, _skip_reduction)
        if self._uses_deepspeed:
            step = model.step

            def step_after_micro_batch() -> None:
                end_micro_batch()
                step()

            model.step = step_after_micro_batch

    def largest(self, value: float) -> float:
        """The largest of the ranks' values. All ranks must call this method together.

        The ranks exchange the values without a collective. A collective here would make NCCL free
        the previous collective's memory earlier than in the full run.
        """
        if self._store is None:
            return value
        self._num_exchanges += 1
        exchange = f"largest {self._num_exchanges}"
        self._store.set(f"{exchange} {self.number}", repr(value))
        return max(float(self._store.get(f"{exchange} {rank}")) for rank in range(self.size))

    def leave(self) -> None:
        """Leave the process group, while no collective runs. All real ranks must leave together."""
        if self._prepare_backend is not None:
            from accelerate.state import PartialState

            PartialState._prepare_backend = self._prepare_backend
            self._prepare_backend = None

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


def _reset_numbering() -> None:
    """Make DeepSpeed number modules and parameters from zero again.

    Ranks compare these numbers. Without the reset, the numbers would differ if the ranks had
    trained different models before.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counter[0] = 0


def _skip_reduction(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A comm hook of DDP that keeps the gradients unchanged."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

"""The profile of one micro batch: the device's time by kind of kernel and by part of the model.

Processes exchange the profile as JSON. Times are seconds on the device; an unknown value is None.
"""

from dataclasses import dataclass
from enum import StrEnum


class KernelClass(StrEnum):
    """The kind of work that a kernel does; on a CPU, the kind of operator."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    FUSED = "fused and element-wise"
    UNPACKING = "unpacking of weights"
    OPTIMIZER = "optimizer"
    COPIES = "copies and casts"
    COLLECTIVES = "collectives"
    OTHER = "other"


class Part(StrEnum):
    """The part of a model that launched a kernel."""

    PROJECTIONS = "attention projections"
    ATTENTION = "attention itself"
    MLP = "MLP"
    NORMS = "norms and residuals"
    ADAPTERS = "adapters"
    EMBEDDING = "embedding"
    HEAD = "head and loss"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Stage(StrEnum):
    """The stage of a training step.

    Recomputation by checkpointing is a separate stage. In compiled layers, recomputation counts as
    part of the backward pass.
    """

    FORWARD = "forward"
    RECOMPUTED = "recomputed"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledWork:
    """The total seconds and number of kernels of one class, part of the model and stage.

    `part` is None if compiled code hides the part of the model.
    """

    part: Part | None
    stage: Stage
    kind: KernelClass
    seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTotal:
    """The total seconds and number of all kernels with one name.

    `fuses` has the operators that a kernel of Inductor combines; the kernel's name lists them.
    """

    name: str
    kind: KernelClass
    seconds: float
    count: int
    fuses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchProfile:
    """One micro batch of `rows` rows of `length` tokens, and the optimizer step after it.

    `micro_s` is the time of the micro batch without profiling, and `profiled_s` is its time with
    profiling. `busy_s` is the time within the micro batch during which a GPU ran any kernel. On a
    CPU (`on_gpu` is false), `busy_s` is the total time of all operators. `longest` has the kernel
    names with the largest total times. `loader_rows_per_s` is the speed of the data loader: the
    rows per second that it makes from tokenised examples.
    """

    on_gpu: bool
    rows: int
    length: int
    micro_s: float
    profiled_s: float
    busy_s: float
    num_kernels: int
    work: tuple[ProfiledWork, ...]
    longest: tuple[KernelTotal, ...]
    loader_rows_per_s: float | None

    @property
    def micro_work(self) -> tuple[ProfiledWork, ...]:
        """The work of the micro batch, without the optimizer step."""
        return tuple(one for one in self.work if one.stage is not Stage.OPTIMIZER)

    @property
    def optimizer_s(self) -> float:
        """The time of the optimizer step on the device."""
        return sum(one.seconds for one in self.work if one.stage is Stage.OPTIMIZER)

    @property
    def idle_s(self) -> float:
        """The device's idle time in an unprofiled micro batch, mostly a wait for the host."""
        return max(self.micro_s - self.busy_s, 0.0)

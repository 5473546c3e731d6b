"""What a profile of one micro batch found: the device's time by what its kernels do, and by part of the model.

It crosses the process boundary as JSON. Seconds are the device's own; None is unknown.
"""

from dataclasses import dataclass
from enum import StrEnum


class KernelClass(StrEnum):
    """What a kernel does; on a CPU an operator."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention"
    FUSED = "fused and element-wise"
    UNPACKING = "unpacking of weights"
    OPTIMIZER = "optimizer"
    COPIES = "copies and casts"
    COLLECTIVES = "collectives"
    OTHER = "other"


class Part(StrEnum):
    """The part of a model that had a kernel run."""

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
    """When in a step. What checkpointing computes again stands apart, but for compiled layers: there it is backward."""

    FORWARD = "forward"
    RECOMPUTED = "recomputed"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledWork:
    """What all kernels of a class took for a part in a stage. `part` is None where compiled code hides it."""

    part: Part | None
    stage: Stage
    kind: KernelClass
    seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTotal:
    """All kernels of one name. `fuses` are the operators that a kernel of Inductor computes, as its name tells them."""

    name: str
    kind: KernelClass
    seconds: float
    count: int
    fuses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchProfile:
    """One micro batch of `rows` rows of `length` tokens, and the optimizer step after it.

    `micro_s` is what the micro batch takes when it is not profiled, `profiled_s` what it took. `busy_s` is the time of
    it in which a GPU ran any kernel; on a CPU (`on_gpu` is false) that of all operators. `longest` are the names that
    took longest. `loader_rows_per_s` is how fast the loader makes rows of examples that are tokenised.
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
        """What a micro batch that is not profiled takes beyond the work: the device waits, mostly for the host."""
        return max(self.micro_s - self.busy_s, 0.0)

"""A profiled micro batch, as a value: its kinds of work, the best a device could do, and the needs of the host."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from autotune.catalog import DeviceSpec
from autotune.core.json_view import Native, also, keys
from autotune.core.micro_profile import MicroBatchProfile
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One kind of work in a micro batch: the seconds it took, and `best_s` that the device needs for it at least.

    `flops` and `moved_bytes` are what was counted, None where that is not known.
    """

    JSON: ClassVar = also("lost_s")

    work: str
    seconds: float
    flops: float | None
    moved_bytes: float | None
    best_s: float | None

    @property
    def lost_s(self) -> float | None:
        """The seconds beyond the best."""
        return None if self.best_s is None else max(self.seconds - self.best_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """What a run needs of a part of the machine, and what is there; None is not known."""

    JSON: ClassVar = also("suffices")

    part: str
    found: float | None
    needed: float
    unit: str
    why: str

    @property
    def suffices(self) -> bool | None:
        """Whether there is enough of it."""
        return None if self.found is None else self.found >= self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """A profiled micro batch of a study's configuration. `uncounted` says why there is no best, in a sentence."""

    JSON: ClassVar = keys(
        *("study", "config", "accumulation", "evidence", "of", "idle_s", "bounds", "uncounted", "trace"),
        device="device.name",
        profile=Native("profile"),
        optimizer_s="profile.optimizer_s",
        host="needs",
    )
    evidence: ClassVar[Evidence] = Evidence.MEASURED

    study: str
    device: DeviceSpec
    config: TrainConfig
    accumulation: int
    profile: MicroBatchProfile
    bounds: tuple[Bound, ...]
    needs: tuple[HostNeed, ...]
    trace: str
    uncounted: str | None = None

    @property
    def idle_s(self) -> float | None:
        """Seconds of a micro batch in which the GPU runs nothing; a CPU is never without work."""
        return self.profile.idle_s if self.profile.on_gpu else None

    @property
    def of(self) -> Literal["kernels", "operators"]:
        """The parts of the profile: a CPU has no kernels."""
        return "kernels" if self.profile.on_gpu else "operators"

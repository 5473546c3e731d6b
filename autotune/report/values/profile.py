"""The profile of a micro batch, compared with the limits of the device and the host.

The profile has the time of each kind of work, the least possible time on the device, and the run's
needs for parts of the host.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from autotune.catalog import DeviceSpec
from autotune.core.json_view import Native, fields_plus, keys
from autotune.core.micro_profile import MicroBatchProfile
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One kind of work in a micro batch: its seconds, and `best_s`, the least time on this device.

    `flops` and `moved_bytes` are the amount of work, or None if the amount is unknown. A dry probe,
    which runs on the meta device, computes them.
    """

    JSON: ClassVar = fields_plus("lost_s")

    work: str
    seconds: float
    flops: float | None
    moved_bytes: float | None
    best_s: float | None

    @property
    def lost_s(self) -> float | None:
        """The seconds beyond `best_s`, or None if `best_s` is unknown."""
        return None if self.best_s is None else max(self.seconds - self.best_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """A run's need for one part of the machine, such as host memory or the disk's rate.

    `needed` is the amount that the run needs. `found` is the amount that the machine has, or None
    if this amount is unknown.
    """

    JSON: ClassVar = fields_plus("suffices")

    part: str
    found: float | None
    needed: float
    unit: str
    why: str

    @property
    def suffices(self) -> bool | None:
        """Whether the machine has enough of the part, or None if that is unknown."""
        return None if self.found is None else self.found >= self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """A profiled micro batch of a study's configuration.

    `uncounted` is a sentence that says why the least possible times are unknown.
    """

    JSON: ClassVar = keys(
        *(
            "study",
            "config",
            "accumulation",
            "evidence",
            "of",
            "idle_s",
            "bounds",
            "uncounted",
            "trace",
        ),
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
        """The idle seconds of the GPU in a micro batch, or None on a CPU."""
        return self.profile.idle_s if self.profile.on_gpu else None

    @property
    def of(self) -> Literal["kernels", "operators"]:
        """The unit of the profile: kernels on a GPU, and operators on a CPU."""
        return "kernels" if self.profile.on_gpu else "operators"

"""The estimate of one configuration, without a probe."""

from dataclasses import dataclass

from autotune.catalog import DeviceSpec, Price
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import MemoryBreakdown
from autotune.prediction.transfer import calibrated_parts, calibrates, is_measured_kind
from autotune.problem.calibration import Calibration
from autotune.problem.run_cost import CostProjection


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One configuration on one device: whether it fits, how fast it trains, and what the full run costs.

    `state` is FITS, TIGHT, OOM, or what the device lacks. `need_gib` is reserved at the peak, of the `limit_gib` that
    tensors may take; `memory` is what it consists of, None where it was measured. `tokens_per_s` are useful tokens of
    one device, and 80 % of cases lie in `interval`. Unknown speeds and costs are None. `num_observations` counts the
    measurements by others on this device that the speed rests on; `calibration` is what it rests on too.
    """

    device: DeviceSpec
    config: TrainConfig
    state: str
    need_gib: float
    limit_gib: float
    price: Price | None = None
    memory: MemoryBreakdown | None = None
    tokens_per_s: float | None = None
    interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    cost: CostProjection | None = None
    num_observations: int = 0
    calibration: Calibration | None = None

    @property
    def margin(self) -> float:
        """Signed: need / limit - 1."""
        return self.need_gib / self.limit_gib - 1

    @property
    def memory_by(self) -> str | None:
        """What `need_gib` rests on: the formula, or the count of a dry probe; None where it was measured."""
        return None if self.memory is None else "counted" if self.memory.counted else "formula"

    @property
    def is_guess(self) -> bool:
        """Whether the speed rests on data sheets alone: no card of this kind was measured by anybody."""
        measured = self.num_observations or is_measured_kind(self.device) or calibrates(self.calibration, self.device)
        return self.interval is not None and not measured

    @property
    def calibrated(self) -> str | None:
        """What of the speed a calibration measured, and when; None without one."""
        return calibrated_parts(self.calibration, self.device)

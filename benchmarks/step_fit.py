"""Fit the constants of the step time formula to measured micro batches.

`step_time.MOVED` holds the constants. The time of a micro batch is linear in them, so a fit is a
linear regression. A model is left out by fitting the constants to all other models.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.catalog import ModelSpec, resolve_device
from autotune.catalog.model_sizes import Sizes
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import (
    MOVED,
    StepTimeEstimate,
    estimate_step_time,
    fitted_quantities,
)
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.problem.speed_transfer import SpeedTransfer

# A larger share of the host in the predicted time says little about the device, and the host's
# uncertainty shows.
HOST_BOUND = 0.1
ROUNDS = 30  # of a regression of least absolute deviations
SMALLEST = 0.01  # relative error, below which a smaller error does not count more


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The measured seconds of a micro batch of a model.

    If `profiled` is true, the seconds are the device's time only, from a profile.
    """

    model: ModelSpec
    config: TrainConfig
    gpu: str
    seconds: float
    profiled: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """What tells this measurement from all others."""
        layers, seconds = str(self.model.num_layers), f"{self.seconds:.6g}"
        return self.gpu, self.model.short, layers, self.config.label(), seconds

    def estimate(self, constants: Mapping[str, float] = MOVED) -> StepTimeEstimate:
        """Predict the time with these constants, on the GPU of the measurement."""
        bytes_s = sum(
            (constants[name] - MOVED[name]) * seconds for name, seconds in self.per_constant.items()
        )
        return replace(self.known, bytes_s=self.known.bytes_s + bytes_s)

    def predicted_s(self, constants: Mapping[str, float] = MOVED) -> float:
        found = self.estimate(constants)
        return found.device_s if self.profiled else found.micro_s

    @property
    def known(self) -> StepTimeEstimate:
        """The prediction with the constants of the product."""
        return _known(self.model, self.config, self.gpu)

    @property
    def per_constant(self) -> dict[str, float]:
        """The seconds that one unit of each constant adds to the device's time."""
        sizes, transfer = Sizes.of(self.model), _transfer(self.gpu)
        assert sizes is not None
        bandwidth = 1e9 * (resolve_device(REFERENCE).bandwidth_gb_s or math.nan) * transfer.bytes
        quantities = fitted_quantities(sizes, self.config)
        return {name: quantity / bandwidth for name, quantity in quantities.items()}


@functools.cache
def _transfer(gpu: str) -> SpeedTransfer:
    found = speed_transfer(resolve_device(REFERENCE), resolve_device(gpu))
    assert found is not None
    return found


def _known(model: ModelSpec, config: TrainConfig, gpu: str) -> StepTimeEstimate:
    found = estimate_step_time(model, config)
    assert found is not None
    return found.convert(_transfer(gpu))


def is_gpu_bound(timed: Timed) -> bool:
    """Return whether the GPU sets the pace of a micro batch, by the formula."""
    return timed.known.host_share < HOST_BOUND


def fit(rows: Sequence[Timed]) -> dict[str, float]:
    """Return the constants with the least absolute relative errors over GPU-bound rows.

    Each model counts once, however many rows it has.
    """
    rows = [row for row in rows if is_gpu_bound(row)]
    names = list(MOVED)
    each = [row.per_constant for row in rows]
    by_constant = np.array([[one.get(name, 0.0) for name in names] for one in each])
    fixed_s = np.array([row.estimate(dict.fromkeys(names, 0.0)).device_s for row in rows])
    device_s = np.array([_device_s(row) for row in rows])
    counts = Counter(row.model.short for row in rows)
    of_models = np.array([1 / counts[row.model.short] for row in rows])

    # Least absolute deviations by least squares, each row weighted by its last error
    target = (device_s - fixed_s) / device_s
    features, weights = by_constant / device_s[:, None], of_models
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(features * root[:, None], target * root, rcond=None)[0]
        weights = of_models / np.maximum(np.abs(features @ found - target), SMALLEST)
    return dict(zip(names, map(float, found), strict=True))


def _device_s(timed: Timed) -> float:
    """Return the measured device time, without the share of the host by the formula."""
    if timed.profiled:
        return timed.seconds
    return math.pow(max(timed.seconds**4 - timed.known.host_s**4, 0.0), 0.25)


def leave_out(rows: Sequence[Timed]) -> dict[str, dict[str, float]]:
    """Return for each model the constants that fit all other models."""
    models = dict.fromkeys(row.model.short for row in rows)
    return {name: fit([row for row in rows if row.model.short != name]) for name in models}

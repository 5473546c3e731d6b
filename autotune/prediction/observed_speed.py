"""Uses other users' measurements to correct a speed that was converted from another card."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, resolve_device, resolve_model
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import UNKNOWN_HOST, estimate_step_time
from autotune.prediction.transfer import BETWEEN, REFERENCE, WITHIN, speed_transfer
from autotune.problem.calibration import Calibration
from autotune.problem.speed_transfer import SpeedTransfer

# The conversion is cached, because thousands of configurations share a few conversions. With a
# calibration, the conversion also depends on the size of the configuration's products.
_uncalibrated = functools.lru_cache(maxsize=1024)(speed_transfer)
# The training method and the quantisation of the short training in a calibration
CALIBRATED_METHOD = ("lora", "none")
# An observation is ignored if it deviates from the formula's speed by more than this number of
# standard deviations.
MAX_DEVIATIONS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Another user's measurement of one configuration on one card.

    `tokens_per_s` includes padding, because the share of useful tokens depends on the data.
    `tokens_per_row` is the mean length of a padded row, or None if all rows have `seq_len` tokens.
    `model` is a name in the catalogue. If the catalogue lacks the model, `model` is None and
    `model_digest` identifies the model's shape.
    """

    device: str
    model: str | None
    model_digest: str | None
    config: TrainConfig
    accumulation: int
    tokens_per_s: float
    step_time_s: float | None
    peak_reserved_gib: float | None
    source: str
    as_of: str | None
    tokens_per_row: float | None = None
    trainer: str = "transformers"
    evidence: Evidence = Evidence.MEASURED


def measured_ratios(
    observations: Sequence[Observation],
    device: DeviceSpec,
    method: str,
    quantization: str,
    fp8_products: str = "none",
) -> list[float]:
    """Return the ratios of measured speeds on this device to the speeds that the formula predicts.

    Measurements with another trainer than transformers' Trainer, with another method, with another
    quantization or with other `fp8_products` are ignored.
    """
    ratios = []
    for observed in observations:
        is_same = _kind(observed.config) == (method, quantization, fp8_products)
        is_complete = observed.evidence is Evidence.MEASURED and observed.trainer == "transformers"
        if (
            observed.device != device.name
            or observed.model is None
            or not is_same
            or not is_complete
        ):
            continue

        ratio = _ratio_to_formula(observed)
        # The speed ratio of every published pair of cards is within MAX_DEVIATIONS standard
        # deviations of the formula, so an observation that deviates more is treated as a mistake.
        if ratio and abs(math.log(ratio)) <= MAX_DEVIATIONS * math.hypot(BETWEEN, WITHIN):
            ratios.append(ratio)
    return ratios


def _kind(config: TrainConfig) -> tuple[str, str, str]:
    return config.method, config.quantization, config.fp8_products


@functools.cache
def _ratio_to_formula(observed: Observation) -> float | None:
    config = replace(
        observed.config, seq_len=round(observed.tokens_per_row or observed.config.seq_len)
    )

    step_time = estimate_step_time(resolve_model(observed.model or ""), config, UNKNOWN_HOST)
    precision = "fp8" if config.multiplies_in_fp8 else "bf16"
    transfer = speed_transfer(
        resolve_device(REFERENCE), resolve_device(observed.device), precision=precision
    )
    if step_time is None or transfer is None:
        return None

    step_time = step_time.convert(transfer)
    measured_s = observed.accumulation * config.tokens / observed.tokens_per_s
    if 2 * observed.accumulation * step_time.host_s > measured_s:
        # The run may have been CPU-bound, and its speed then says little about the card.
        return None
    return (observed.accumulation * step_time.device_s + step_time.rest_s) / measured_s


def observed_transfer(
    source: DeviceSpec,
    target: DeviceSpec,
    config: TrainConfig,
    observations: Sequence[Observation],
    calibration: Calibration | None = None,
    *,
    side: float | None = None,
) -> SpeedTransfer | None:
    """Return the speed conversion between two cards, corrected by observations on the target card.

    Observations with another method, quantization or `fp8_products` than the configuration's are
    ignored. Either card may be calibrated. The result is None if a rate of either card is unknown.
    """
    kind = _kind(config)
    known = tuple(measured_ratios(observations, target, *kind))
    precision = "fp8" if config.multiplies_in_fp8 else "bf16"
    if calibration is None:
        return _uncalibrated(source, target, known, precision=precision)
    return speed_transfer(
        source,
        target,
        known,
        precision=precision,
        calibration=calibration,
        side=side,
        alike=(config.method, config.quantization) == CALIBRATED_METHOD,
    )

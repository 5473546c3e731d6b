"""Speeds that others measured on a device, and how they correct the conversion of a speed to it."""

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

CALIBRATED_METHOD = ("lora", "none")  # method and quantisation of the training in a calibration
MAX_DEVIATIONS = 6.0  # an observation further from the expected speed than so many standard deviations is ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement that somebody made of a configuration on a card.

    `tokens_per_s` counts whole rows, padding included: how many tokens are useful depends on somebody's data.
    `tokens_per_row` is their mean length, None where all have seq_len. `model` is a name of the catalogue; None for
    another model, of which `model_digest` describes the shape.
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
    observations: Sequence[Observation], device: DeviceSpec, method: str, quantization: str
) -> list[float]:
    """How many times as fast as the formula expects others measured this device to be.

    Only what was measured in full, by transformers' Trainer, with the same method and base counts.
    """
    ratios = []
    for observed in observations:
        same = (observed.config.method, observed.config.quantization) == (method, quantization)
        complete = observed.evidence is Evidence.MEASURED and observed.trainer == "transformers"
        if observed.device != device.name or observed.model is None or not same or not complete:
            continue
        ratio = _ratio_to_formula(observed)
        # A measurement further off than any pair of cards in the published data is a mistake.
        if ratio and abs(math.log(ratio)) <= MAX_DEVIATIONS * math.hypot(BETWEEN, WITHIN):
            ratios.append(ratio)
    return ratios


@functools.cache
def _ratio_to_formula(observed: Observation) -> float | None:
    config = replace(
        observed.config, seq_len=round(observed.tokens_per_row or observed.config.seq_len)
    )
    step_time = estimate_step_time(resolve_model(observed.model or ""), config, UNKNOWN_HOST)
    precision = "fp8" if config.quantization == "fp8" else "bf16"
    transfer = speed_transfer(
        resolve_device(REFERENCE), resolve_device(observed.device), precision=precision
    )
    if step_time is None or transfer is None:
        return None
    step_time = step_time.on(transfer)
    took_s = observed.accumulation * config.tokens / observed.tokens_per_s
    if 2 * observed.accumulation * step_time.host_s > took_s:
        return None  # where the host may have set the pace, it says little of the card
    return (observed.accumulation * step_time.device_s + step_time.rest_s) / took_s


def observed_transfer(
    source: DeviceSpec,
    target: DeviceSpec,
    config: TrainConfig,
    observations: Sequence[Observation],
    calibration: Calibration | None = None,
    *,
    side: float | None = None,
) -> SpeedTransfer | None:
    """How a speed transfers between two cards, corrected by what was measured on the target with this method and base.

    Either card may be calibrated. None where a rate of either is not known.
    """
    kind = config.method, config.quantization
    return speed_transfer(
        source,
        target,
        measured_ratios(observations, target, *kind),
        precision="fp8" if config.quantization == "fp8" else "bf16",
        calibration=calibration,
        side=side,
        alike=kind == CALIBRATED_METHOD,
    )

"""What truncated models predict for the whole model of one study, corrected by the whole models that it measured."""

import statistics
from dataclasses import replace
from typing import Any

from autotune.core.knobs import KNOBS, affecting
from autotune.core.probe_types import Evidence, Measurement, ModelShape, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import Extrapolation, extrapolate


class DepthPredictor:
    """Collects the measurements of one model, whose layers repeat as `shape` says, and predicts its whole depth."""

    def __init__(self, shape: ModelShape | None) -> None:
        self._shape = shape
        # By configuration and micro steps, then by the number of layers.
        self._truncated: dict[tuple[TrainConfig, int], dict[int, Measurement]] = {}
        # Measured over extrapolated time of a micro batch, by the kind of compute, then by configuration.
        self._ratios: dict[tuple[Any, ...], dict[TrainConfig, float]] = {}
        self._whole: dict[tuple[Any, ...], Measurement] = {}  # whole models, by what determines a micro batch

    def learn(self, result: ProbeResult, measurement: Measurement) -> None:
        """Take over the measurement of a successful probe, truncated or whole."""
        config, micro_steps = result.config, measurement.micro_steps
        if result.depth is not None:
            self._truncated.setdefault((config, micro_steps), {})[result.depth] = measurement
        elif result.evidence is Evidence.MEASURED:
            self._whole[_micro_batch_signature(config, micro_steps)] = measurement
            predicted = self.extrapolated(config, micro_steps)
            if predicted is not None:
                # The median, which scores count: one hiccup of a whole model must not make all others look slow.
                ratio = statistics.median(measurement.micro_step_s) / predicted.measurement.micro_step_s[0]
                self._ratios.setdefault(_compute_signature(config, predicted), {})[config] = ratio

    def extrapolated(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """The whole model from two truncated probes of this configuration; None if there are not two."""
        truncated = sorted(self._truncated.get((config, micro_steps), {}).items())
        if self._shape is None or len(truncated) != 2:
            return None
        return extrapolate(truncated, self._shape.num_layers)

    def predict(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """The same, its time corrected by whole models: with the same micro batches, or of the same kind of compute."""
        predicted = self.extrapolated(config, micro_steps)
        if predicted is None:
            return None
        ratios = self._ratios.get(_compute_signature(config, predicted))
        if ratios:
            predicted = predicted.corrected(list(ratios.values()))
        whole = self._whole.get(_micro_batch_signature(config, micro_steps))
        return predicted.with_micro_batches_of(whole) if whole is not None and whole.rest_s else predicted


def _compute_signature(config: TrainConfig, predicted: Extrapolation) -> tuple[Any, ...]:
    """What steps have in common whose extrapolated time is off by the same ratio."""
    values = [getattr(config, name) for name in affecting("depth_error")]
    return (*values, predicted.measurement.host_bound, predicted.shortest)


def _micro_batch_signature(config: TrainConfig, micro_steps: int) -> tuple[Any, ...]:
    """What determines a micro batch: the optimizer, which runs after it, does not."""
    only_after = set(affecting("rest_of_step")) - set(affecting("micro_time"))
    return micro_steps, replace(config, **{name: KNOBS[name].default for name in only_after})

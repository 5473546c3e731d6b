"""Predict how long a probe of a whole model takes.

The prediction uses an earlier probe of the whole model, or probes of models with fewer layers. The
time to load the model and the time of a micro batch are assumed to be linear in the number of
layers. A probe has warm-up steps (the lead), and then rounds of steps (`probe.schedule`). The lead
and the first round together are assumed to take a time that is proportional to their number of
micro batches and to the time of a micro batch. Only complete rounds are timed, and the first round
is timed only in some probes.
"""

import statistics
from dataclasses import dataclass, field, replace

from autotune.core.probe_types import Measurement, ModelShape, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.probe.schedule import NEW_LENGTHS, NEW_LENGTHS_S, Schedule

WHOLE = 0  # the key for all layers, in dictionaries whose keys are numbers of layers
# The evaluation of a micro batch is only a forward pass, which takes at most this share of the time
# to train on the micro batch.
EVALUATED = 0.5
# The warm-up steps and the first timed round are assumed to take at most as long as this number of
# average micro batches. The rest of their measured time is attributed to compilation.
FIRST_MICROS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeTime:
    """The times of one probe in seconds. A step has `micro_steps` micro batches.

    `micro_s` is the mean time of a micro batch. `first_s` is the time of the warm-up steps and of
    the first timed round. `new_length_s` is the additional time of a micro batch with a new length,
    or None if no new length was tried.
    """

    micro_s: float
    first_s: float
    micro_steps: int
    new_length_s: float | None


@dataclass(slots=True)
class ProbeTimes:
    """The times of the probes of one model, by configuration and number of layers.

    `shape` has the number of layers of the whole model.
    """

    shape: ModelShape | None
    _times_of: dict[TrainConfig, dict[int, _ProbeTime]] = field(default_factory=dict)
    # For each number of layers, the longest time to load the model. The longest time is kept,
    # because loading is faster if the same model was loaded before.
    _loads_s: dict[int, float] = field(default_factory=dict)
    # The longest time in which the ranks of several GPUs joined each other. It does not depend on
    # the number of layers.
    _join_s: float = 0.0

    def learn(self, result: ProbeResult, measurement: Measurement) -> None:
        """Learn the times of a successful probe."""
        seconds = result.seconds
        depth = result.depth or WHOLE
        if "total" not in seconds:
            return

        micro_s = statistics.fmean(measurement.micro_step_s)
        first_s = seconds.get("first_step", seconds["total"])
        # The compilation is left out, because later probes reuse the compiled code.
        if result.config.compile != "none":
            first_s = min(first_s, FIRST_MICROS * micro_s)

        probed = _ProbeTime(
            micro_s=micro_s,
            first_s=first_s,
            micro_steps=measurement.micro_steps,
            new_length_s=measurement.new_length_s,
        )
        self._times_of.setdefault(result.config, {})[depth] = probed
        self._loads_s[depth] = max(self._loads_s.get(depth, 0.0), seconds.get("load", 0.0))
        self._join_s = max(self._join_s, seconds.get("join", 0.0))

    def whole_s(self, request: ProbeRequest) -> float | None:
        """The predicted seconds of a probe of the whole model.

        The result is None if this configuration was never probed.
        """
        probed = self._times_of.get(request.config, {})
        known = probed.get(WHOLE) or (probed[max(probed)] if probed else None)
        if known is None:
            return None

        micros = {depth: one.micro_s for depth, one in probed.items()}
        micro_s = micros[WHOLE] if WHOLE in micros else self._extrapolate(micros)

        # The schedules of this request and of the known probe. Both assume that the attention
        # kernels already have a plan for each row length, because the known probe made these plans.
        schedule = Schedule.plan(request, planned=True)
        known_schedule = Schedule.plan(
            replace(request, micro_steps=known.micro_steps), planned=True
        )
        ratio = (schedule.lead_micros + schedule.round_micros) / (
            known_schedule.lead_micros + known_schedule.round_micros
        )

        first_s = known.first_s * micro_s / known.micro_s * ratio
        round_s = schedule.round_micros * micro_s
        num_rounds = schedule.rounds_to_time(
            request, round_s / len(schedule.round), request.min_timed_s
        )
        timed_s = (num_rounds - schedule.first_counts(micro_s)) * round_s

        load_s = (
            self._loads_s[WHOLE] if WHOLE in self._loads_s else self._extrapolate(self._loads_s)
        )
        evaluated_s = schedule.evaluation_micros * micro_s * EVALUATED if request.evaluate else 0.0

        new_lengths_s = 0.0
        plans_s = [one.new_length_s for one in probed.values() if one.new_length_s is not None]
        if plans_s:
            each_s = micro_s + plans_s[-1]
            new_lengths_s = min(NEW_LENGTHS * each_s, NEW_LENGTHS_S + each_s)
        return self._join_s + load_s + first_s + timed_s + new_lengths_s + evaluated_s

    def _extrapolate(self, by_depth: dict[int, float]) -> float:
        """Extrapolate a time linearly from two numbers of layers to the whole model.

        If only one number of layers was probed, the time is assumed to be proportional to the
        number of layers.
        """
        wide = max(by_depth)
        num_layers = self.shape.num_layers if self.shape else wide
        shallow = min(by_depth)
        if shallow == wide:
            return by_depth[wide] * num_layers / wide
        slope = (by_depth[wide] - by_depth[shallow]) / (wide - shallow)
        return by_depth[wide] + max(slope, 0.0) * (num_layers - wide)

"""How long a probe of a whole model will take, before it begins: from probes of a few of its layers, or an earlier one.

Loading and a micro batch are linear in the number of layers. The lead and the first round take as long as they did,
times the ratio of the micro batches and of their tokens. Whole rounds are timed; the first may count.
"""

import statistics
from dataclasses import dataclass, field, replace

from autotune.core.probe_types import Measurement, ModelShape, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.probe.schedule import NEW_LENGTHS, NEW_LENGTHS_S, Schedule

WHOLE = 0  # the depth of a whole model here
EVALUATED = 0.5  # at most of the time of a micro batch that is trained on: its forward pass
FIRST_MICROS = 12  # at most so many average micro batches are in lead and first round; the rest of their time compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probed:
    """Seconds of a micro batch on average, and of the lead and the first round, with so many in a step.

    `new_length_s` is how much longer one of a new length takes, None where that is not tried.
    """

    micro_s: float
    first_s: float
    micro_steps: int
    new_length_s: float | None


@dataclass(slots=True)
class ProbeTimes:
    """What the probes of one model took, by configuration and depth. `shape` says how many layers it has."""

    shape: ModelShape | None
    _probed: dict[TrainConfig, dict[int, _Probed]] = field(default_factory=dict)
    _loads_s: dict[int, float] = field(
        default_factory=dict
    )  # the longest by depth: a model may be there already

    def learn(self, result: ProbeResult, measurement: Measurement) -> None:
        """Take over what a successful probe took."""
        seconds, depth, steps = result.seconds, result.depth or WHOLE, measurement.micro_steps
        if "total" not in seconds:
            return
        micro_s = statistics.fmean(measurement.micro_step_s)
        first_s = seconds.get("first_step", seconds["total"])
        if result.config.compile != "none":  # compiled code is there the next time
            first_s = min(first_s, FIRST_MICROS * micro_s)
        probed = _Probed(
            micro_s=micro_s,
            first_s=first_s,
            micro_steps=steps,
            new_length_s=measurement.new_length_s,
        )
        self._probed.setdefault(result.config, {})[depth] = probed
        self._loads_s[depth] = max(self._loads_s.get(depth, 0.0), seconds.get("load", 0.0))

    def whole_s(self, request: ProbeRequest) -> float | None:
        """Seconds of a probe of the whole model; None where nothing is known of the configuration."""
        probed = self._probed.get(request.config, {})
        known = probed.get(WHOLE) or (probed[max(probed)] if probed else None)
        if known is None:
            return None
        micros = {depth: one.micro_s for depth, one in probed.items()}
        micro_s = micros[WHOLE] if WHOLE in micros else self._line(micros)
        schedule = Schedule.plan(request, planned=True)  # by the probes that are known
        then = Schedule.plan(replace(request, micro_steps=known.micro_steps), planned=True)
        ratio = (schedule.lead_micros + schedule.round_micros) / (
            then.lead_micros + then.round_micros
        )
        first_s = known.first_s * micro_s / known.micro_s * ratio
        round_s = schedule.round_micros * micro_s
        num_rounds = schedule.rounds_to_time(
            request, round_s / len(schedule.round), request.min_timed_s
        )
        timed_s = (num_rounds - schedule.first_counts(micro_s)) * round_s
        load_s = self._loads_s[WHOLE] if WHOLE in self._loads_s else self._line(self._loads_s)
        evaluated_s = schedule.evaluation_micros * micro_s * EVALUATED if request.evaluate else 0.0
        new_lengths_s = 0.0
        plans_s = [one.new_length_s for one in probed.values() if one.new_length_s is not None]
        if plans_s:
            each_s = micro_s + plans_s[-1]
            new_lengths_s = min(NEW_LENGTHS * each_s, NEW_LENGTHS_S + each_s)
        return load_s + first_s + timed_s + new_lengths_s + evaluated_s

    def _line(self, by_depth: dict[int, float]) -> float:
        """The value of the whole model on the line through two depths; in proportion where there is one."""
        num_layers, wide = self.shape.num_layers if self.shape else max(by_depth), max(by_depth)
        shallow = min(by_depth)
        if shallow == wide:
            return by_depth[wide] * num_layers / wide
        slope = (by_depth[wide] - by_depth[shallow]) / (wide - shallow)
        return by_depth[wide] + max(slope, 0.0) * (num_layers - wide)

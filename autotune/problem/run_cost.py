"""The cost of the full run in hours, USD and kWh, computed from a step time.

The cost in USD is None if the price is unknown, and the kWh are None if the power is unknown.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.catalog import Price
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Evidence, Measurement
from autotune.core.train_config import TrainConfig
from autotune.problem.interruptions import Interruptions, interruptions_of
from autotune.problem.performance import Performance
from autotune.problem.run_options import KEPT_CHECKPOINTS, RunOptions
from autotune.problem.workload import RunShape, Workload

FITS = "fits"
TIGHT = "tight"
OOM = "out of memory"
# The host's speed changes with time, so the time of a CPU-bound step may later be longer or shorter
# by up to this fraction. On rented H200s, nine mostly CPU-bound runs of a 1.5B model were compared
# with their projected times, all within one hour. Seven runs took between 7 % less and 7 % more
# time than projected, and two took 13 and 14 % more. A run of a 3B model that was CPU-bound half of
# the time took 7 % more time than projected.
HOST_DRIFT = 0.15
# CPU_DRIFT is the same fraction for training on a CPU, which may slow down under load. Five passes
# of 40 s on two virtual processors took from 10 % less to 22 % more time than projected from the
# first seconds. Some passes became slower after ten seconds.
CPU_DRIFT = 0.2
TABLE_EXAMPLES = (10_000, 50_000, 100_000)  # the numbers of examples in a report's table of costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """The evaluations and checkpoints of a run.

    `evaluation_s` and `checkpoint_s` are total seconds, or None if unknown.

    `disk_gib` is the largest total size on disk: the kept checkpoints, and one more while it is
    being written.
    """

    num_evaluations: int
    evaluation_s: float | None
    num_checkpoints: int
    checkpoint_s: float | None
    checkpoint_gib: float

    @property
    def known_s(self) -> float:
        """The seconds of all evaluations and checkpoints whose time is known."""
        return (self.evaluation_s or 0.0) + (self.checkpoint_s or 0.0)

    @property
    def disk_gib(self) -> float:
        """The GiB of the checkpoints on disk."""
        return self.checkpoint_gib * min(self.num_checkpoints, KEPT_CHECKPOINTS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProjection:
    """The cost of the full run without its start-up, which takes `startup_s` seconds.

    The times of evaluations and checkpoints are included if they are known, and left out if
    `pauses` is None. `startup_s` is None if unknown. Each interval is (low, high), and covers the
    spread of the measured steps. If steps are CPU-bound, the interval also covers the drift of the
    host's speed. `spot_usd` is the expected cost on spot instances, with `interruptions`. It is
    None if the price is unknown, or if the run practically never ends.
    """

    examples: int
    epochs: float
    num_steps: int
    full_run_hours: float
    interval_hours: tuple[float, float]
    usd_per_hour: float | None
    full_run_usd: float | None
    interval_usd: tuple[float, float] | None
    spot_usd: float | None
    cost_per_1000_samples_usd: float | None
    kwh: float | None
    evidence: Evidence = Evidence.MEASURED
    startup_s: float | None = None
    pauses: Pauses | None = None
    interruptions: Interruptions | None = None

    def spot_cost(self, usd_per_hour: float | None) -> float | None:
        """Return the expected USD of the run at a spot price, or None if it is unknown."""
        return _spot_cost(self.interruptions, self.full_run_hours, usd_per_hour)

    def spot_interval(self, usd_per_hour: float | None) -> tuple[float, float] | None:
        """Return the interval of `spot_cost`, or None if it is unknown."""
        lost = self.interruptions
        hours = lost.paid_interval(*self.interval_hours) if lost else self.interval_hours
        if usd_per_hour is None or hours is None:
            return None
        return hours[0] * usd_per_hour, hours[1] * usd_per_hour

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parts of the run whose time is not included."""
        pauses = self.pauses
        evaluates = pauses is None or (pauses.num_evaluations and pauses.evaluation_s is None)
        saves = pauses is None or pauses.checkpoint_s is None
        return ("start-up", *["checkpoint saves"] * bool(saves), *["evaluation"] * bool(evaluates))


def _spot_cost(
    lost: Interruptions | None, hours: float, usd_per_hour: float | None
) -> float | None:
    if usd_per_hour is None:
        return None
    paid_hours = lost.paid_hours(hours) if lost else hours
    return None if paid_hours is None else paid_hours * usd_per_hour


def run_cost(
    shape: RunShape,
    performance: Performance,
    price: Price | None,
    power_w: float | None = None,
    *,
    num_steps: int | None = None,
    pauses: Pauses | None = None,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    evidence: Evidence = Evidence.MEASURED,
) -> CostProjection:
    """Return the cost of a run of this shape, or of its first `num_steps` optimizer steps.

    `performance`, `price` and `power_w` are totals for all devices of the run. The last step of a
    pass takes the time of the micro batches that are left (`RunShape.whole_steps`).
    """
    num_steps = shape.num_steps if num_steps is None else num_steps
    training = shape.whole_steps(num_steps) * performance.step_time_s / 3600
    pausing = (pauses.known_s if pauses else 0.0) / 3600
    low, high = performance.spread
    hours = training + pausing
    interval = (training * (1 + low) + pausing, training * (1 + high) + pausing)
    usd_per_hour = price.usd_per_hour if price else None
    spot = price.spot_usd_per_hour if price else None
    hours_per_sample = 1 / performance.samples_per_second / 3600
    interruptions = interruptions_of(options, hours, num_steps)

    return CostProjection(
        examples=shape.examples,
        epochs=shape.epochs,
        num_steps=num_steps,
        full_run_hours=hours,
        interval_hours=interval,
        usd_per_hour=usd_per_hour,
        full_run_usd=None if usd_per_hour is None else hours * usd_per_hour,
        interval_usd=None
        if usd_per_hour is None
        else (interval[0] * usd_per_hour, interval[1] * usd_per_hour),
        spot_usd=_spot_cost(interruptions, hours, spot),
        cost_per_1000_samples_usd=None
        if usd_per_hour is None
        else 1000 * hours_per_sample * usd_per_hour,
        kwh=None if power_w is None else power_w * hours / 1000,
        evidence=evidence,
        pauses=pauses,
        interruptions=interruptions,
    )


def project(
    workload: Workload,
    config: TrainConfig,
    performance: Performance,
    price: Price | None,
    power_w: float | None = None,
    *,
    examples: int | None = None,
    options: RunOptions | None = None,
    measurements: Sequence[Measurement] = (),
    on_cpu: bool = False,
    on_target: bool = True,
) -> CostProjection:
    """Return the cost of training `workload` with `config` at the measured performance.

    `examples` replaces the number of examples in `workload`. If `options` is given, the result
    includes evaluations and checkpoints, with the times in `measurements`, unless the measurements
    are not of the target's GPUs (`on_target`).
    """
    examples = examples or workload.examples
    held_out = workload.held_out(examples)
    shape = replace(workload.run_shape(config), examples=examples - held_out)

    pauses = None
    if options is not None and measurements and on_target:
        largest_gib = max(checkpoint_gib(config, one) for one in measurements)
        pauses = _pauses(
            shape, held_out, options, performance.step_time_s, measurements, largest_gib
        )
    if on_cpu:
        drift = CPU_DRIFT
    else:
        drift = HOST_DRIFT * min(_median([one.host_share for one in measurements]) or 0.0, 1.0)

    low, high = performance.spread
    performance = replace(performance, spread=(min(low, -drift), max(high, drift)))
    cost = run_cost(
        shape, performance, price, power_w, pauses=pauses, options=options or RunOptions()
    )
    return replace(cost, examples=examples)


def checkpoint_gib(config: TrainConfig, measured: Measurement) -> float:
    """Return the GiB of a checkpoint, computed from the memory of one rank.

    If the strategy shards the model, a rank holds only a part of the optimizer state and of the
    weights. In DeepSpeed's stages 1 and 2, each rank holds all weights.
    """
    trained_gib = measured.adapters_gib or measured.model_gib
    whole = trained_gib if config.sharding in ("none", "ddp", "zero1", "zero2") else 0.0
    parallelism = Parallelism.of(config)
    shares = parallelism.num_shards if parallelism.shards else 1
    return whole + shares * (measured.checkpoint_gib - whole)


def _pauses(
    shape: RunShape,
    held_out: int,
    options: RunOptions,
    step_time_s: float,
    measurements: Sequence[Measurement],
    largest_gib: float,
) -> Pauses:
    """Count the evaluations and checkpoints of a run, including those at its end."""
    num_steps = shape.num_steps

    eval_interval = options.steps_between_evaluations(num_steps, step_time_s)
    num_evaluations = math.ceil(num_steps / eval_interval) if held_out else 0
    num_checkpoints = math.ceil(num_steps / options.steps_between_saves(num_steps, step_time_s))
    micro_batches = math.ceil(round(held_out / shape.examples_per_row, 6) / shape.micro_batch_size)
    evaluation_s = _median([one.evaluation_s for one in measurements])
    checkpoint_s = _median([one.checkpoint_s for one in measurements])

    return Pauses(
        num_evaluations=num_evaluations,
        evaluation_s=None
        if evaluation_s is None
        else num_evaluations * micro_batches * evaluation_s,
        num_checkpoints=num_checkpoints,
        checkpoint_s=None if checkpoint_s is None else num_checkpoints * checkpoint_s,
        checkpoint_gib=largest_gib,
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

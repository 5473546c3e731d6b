"""Compute the full run's speed from probes on another card, or on one GPU that simulates a rank."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from autotune.catalog import resolve_device
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Measurement, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.prediction.collectives import (
    TOGETHER,
    Traffic,
    added_s,
    counted_traffic,
    slowest_link,
    traffic,
)
from autotune.prediction.step_time import divide_step_time, estimate_step_time
from autotune.prediction.transfer import (
    REFERENCE,
    host_transfer,
    interval,
    peak_tflops,
    speed_transfer,
)
from autotune.problem.performance import Performance, performance, tokens_per_s
from autotune.problem.setup import Setup
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import kept_calibration
from autotune.problem.task import Task


def with_transfer(setup: Setup, spec: StudySpec) -> Setup:
    """Add the speed conversion from the card that runs the probes to the study's device.

    If the spec names a calibration of the device, and this machine is calibrated too, the
    conversion includes the ratio of the two hosts' speeds, which the calibrations measured.
    """
    task = setup.task
    if task.measured_on is None:
        return setup
    transfer = speed_transfer(task.measured_on, task.device, calibration=task.calibration)
    if transfer is not None and spec.calibration is not None:
        host_calibration = kept_calibration(task.measured_on)
        transfer = replace(transfer, host=host_transfer(host_calibration, task.calibration))
    return replace(setup, task=replace(task, carried=transfer))


def run_performance(
    task: Task, config: TrainConfig, measurements: Sequence[Measurement]
) -> Performance:
    """Return the full run's performance on the task's device, from probes of a configuration."""
    # The model FLOPs utilisation (MFU) needs a single peak and the number of operations. No data
    # sheet states the peak of a CPU. With fp8 products, a part of the arithmetic runs at twice the
    # bf16 rate, so there is no single peak. For objectives other than SFT, the number of operations
    # is unknown.
    is_counted = not config.multiplies_in_fp8 and task.workload.objective is Objective.SFT
    peak = peak_tflops(task.device) if is_counted else None
    speed = performance(
        config,
        [_device_measurement(task, config, measurement)[0] for measurement in measurements],
        task.workload,
        flops_per_token=task.model.flops_per_token(
            config.method, task.workload.mean_attention_length(config)
        ),
        peak_tflops=peak,
    )

    if task.is_simulated(config):
        waiting = _with_waiting(task, config, measurements[0])
        with_link = speed.widen_spread(*_link_error(task, config, speed.step_time_s, waiting))
        return with_link.widen_spread(-TOGETHER, TOGETHER)
    if task.carried is None:
        return speed
    return widen_by_conversion(speed, _device_measurement(task, config, measurements[0])[1])


def widen_by_conversion(speed: Performance, error: float) -> Performance:
    """Widen the spread of a performance by the error of its speed conversion.

    `error` is the standard deviation of the speed's logarithm.
    """
    less, more = interval(1.0, error)
    return replace(speed.widen_spread(less - 1, more - 1), mfu=None, own_spread=speed.spread)


def run_tokens_per_s(task: Task, result: ProbeResult) -> float | None:
    """Return the full run's useful tokens per second on the device, or None for a failed probe."""
    if result.measurement is not None:
        result = replace(
            result, measurement=_device_measurement(task, result.config, result.measurement)[0]
        )
    return tokens_per_s(result, task.workload)


def _device_measurement(
    task: Task, config: TrainConfig, measurement: Measurement
) -> tuple[Measurement, float]:
    """Return the measurement with times converted to the device, and the conversion's error."""
    if config.num_gpus > 1:
        waiting = _with_waiting(task, config, measurement)
        if task.is_simulated(config):
            return _with_communication(task, config, waiting), 0.0
        return waiting, 0.0
    if task.carried is None:
        return measurement, 0.0

    mean = task.workload.mean_row_config(config)
    objective = task.workload.objective
    by_formula = estimate_step_time(task.model, mean, objective=objective)
    source = task.measured_on or task.device
    to_source = speed_transfer(resolve_device(REFERENCE), source, calibration=task.calibration)
    if by_formula is not None and to_source is not None:
        by_formula = by_formula.convert(to_source)

    measured_time = divide_step_time(measurement, by_formula)
    converted = measured_time.convert(task.carried)
    slower = converted.micro_s / measured_time.micro_s
    expected = replace(
        measurement,
        micro_step_s=tuple(slower * seconds for seconds in measurement.micro_step_s),
        rest_s=tuple(seconds / task.carried.bytes for seconds in measurement.rest_s),
    )
    return expected, converted.error


def _with_waiting(task: Task, config: TrainConfig, measurement: Measurement) -> Measurement:
    """Add the wait for the rank with the longest rows; a probe gives all ranks equal rows."""
    share = task.workload.waiting_share(config)
    longer = tuple((1 + share) * seconds for seconds in measurement.micro_step_s)
    return replace(measurement, micro_step_s=longer) if share else measurement


def _with_communication(task: Task, config: TrainConfig, measurement: Measurement) -> Measurement:
    """Add the communication between ranks to the times of a simulated rank."""
    sent, link = _rank_traffic(task, config, measurement)
    each_s, once_s = added_s(statistics.median(measurement.micro_step_s), config, sent, link)
    return replace(
        measurement,
        micro_step_s=tuple(seconds + each_s for seconds in measurement.micro_step_s),
        rest_s=tuple(seconds + once_s for seconds in measurement.rest_s or (0.0,)),
    )


def _link_error(
    task: Task, config: TrainConfig, step_s: float, simulated: Measurement
) -> tuple[float, float]:
    """Return the range of the step time, relative to `step_s`, that the uncertain link causes.

    The lower end of the range assumes that communication takes no extra time. The upper end assumes
    that no communication overlaps with computation, and that the link is as slow as `slowest_link`
    says.
    """
    sent, link = _rank_traffic(task, config, simulated)
    accumulation = task.workload.run_shape(config).accumulation

    each_s, once_s = added_s(statistics.median(simulated.micro_step_s), config, sent, link)
    computed_s = step_s - accumulation * each_s - once_s
    slowest_s = computed_s + slowest_link(task, Parallelism.of(config)) * sent.step_bytes(
        accumulation
    ) / (1e9 * link)
    return computed_s / step_s - 1, max(slowest_s / step_s - 1, 0.0)


def _rank_traffic(
    task: Task, config: TrainConfig, measurement: Measurement
) -> tuple[Traffic, float]:
    """Return a rank's traffic in a step, and the GB/s of the rank's link.

    Raises ValueError if the link's bandwidth is unknown.
    """
    parallelism = Parallelism.of(config)
    sent = traffic(task.model, config, parallelism)
    link = task.link_gb_s(parallelism)
    if link is None:
        raise ValueError("the link's bandwidth is unknown, so a simulated rank has no speed")
    return sent or counted_traffic(task.model, config, measurement), link

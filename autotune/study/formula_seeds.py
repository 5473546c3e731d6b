"""Warm start by formula: the fastest configuration that fits, for each speed that the host may have.

If the device is the bottleneck, the formulas are within a few percent (`step_time`). How long the host needs to issue
the work is unknown unless it was calibrated, and where memory is short it decides whether small micro batches or
recomputation pay. Probes tell which of these seeds is right, and coordinate search continues from there. Only the knobs
in VARIED change.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from autotune.catalog import resolve_device
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig
from autotune.prediction.collectives import rank_step_time, traffic
from autotune.prediction.sharded_memory import breakdown_of
from autotune.prediction.step_time import MEASURED_HOST, Host, estimate_step_time, host_of
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.task import Task
from autotune.problem.workload import RunShape
from autotune.study.neighbours import by_distance

VARIED = (
    *("micro_batch_size", "checkpointing", "precision", "compile", "loss"),
    *("packing", "packed_attention", "padding", "sharding", "lora_kernels"),
)
HOSTS = (1.0, 0.67, 0.5)  # relative to the host speed that the step time formula assumes
MAX_CONFIGS = 20_000  # how many configurations the formulas look at: about 5 s


def formula_seeds(task: Task, current: TrainConfig, limit_gib: float) -> Iterator[TrainConfig]:
    """Yield the seeds, the slowest host's first, each once and without `current`.

    Nothing is yielded if the formulas do not know the model or the card.
    """
    device, calibration = task.measured_on or task.device, task.calibration
    transfer = speed_transfer(resolve_device(REFERENCE), device, calibration=calibration)
    if transfer is None:
        return
    own_host = calibration is not None and calibration.device == device.name
    hosts = (host_of(calibration).scale,) if own_host else HOSTS
    fitting: dict[TrainConfig, tuple[RunShape, float]] = {}  # with the memory that it needs, in GiB
    for config in _candidates(task, current):
        shape = task.workload.run_shape(config)
        need = breakdown_of(
            task.model,
            task.workload.at_longest(config),
            shape.probe_micro_steps,
            objective=task.workload.objective,
        )
        if need is not None and need.peak_reserved_gib <= limit_gib:
            fitting[config] = shape, need.peak_reserved_gib
    yielded = {current}
    for host in hosts:

        def predicted(config: TrainConfig, scale: float = host) -> tuple[float, float]:
            """Useful tokens/s; of equals the configuration that needs less memory."""
            shape, need_gib = fitting[config]
            return formula_speed(task, config, shape, replace(MEASURED_HOST, scale=scale), transfer), -need_gib

        best = max(fitting, key=predicted, default=current)
        if best not in yielded:
            yielded.add(best)
            yield best


def formula_speed(
    task: Task,
    config: TrainConfig,
    shape: RunShape,
    host: Host = MEASURED_HOST,
    transfer: SpeedTransfer | None = None,
) -> float:
    """Useful tokens/s by formula, on the reference card or where `transfer` leads; 0 for what it does not know."""
    time = estimate_step_time(task.model, task.workload.at_mean(config), host, task.workload.objective)
    if time is None:
        return 0.0
    if transfer is not None:
        time = time.on(transfer)
    time = time.longer(1 + task.workload.waiting_share(config))
    parallelism = Parallelism.of(config)
    link_gb_s = task.link_gb_s(parallelism)
    sent = traffic(task.model, config, parallelism)
    if sent is None or link_gb_s is None:
        return shape.useful_tokens_per_step / (shape.accumulation * time.micro_s + time.rest_s)
    step = rank_step_time(time, config, parallelism, sent, accumulation=shape.accumulation, link_gb_s=link_gb_s)
    return shape.useful_tokens_per_step / step.step_s


def _candidates(task: Task, current: TrainConfig) -> dict[TrainConfig, None]:
    """The configurations that differ from `current` in VARIED knobs only; if there are too many, the nearest ones."""
    space = task.space
    for knob in space.knobs:
        value = getattr(current, knob.name)
        if knob.name not in VARIED and value is not None:  # there is no rank where everything is trained
            space = space.pin(knob.name, value)
    choices = space.enumerate() if space.size() <= MAX_CONFIGS else by_distance(space, current)
    return dict.fromkeys(space.config(chosen) for chosen in islice(choices, MAX_CONFIGS))

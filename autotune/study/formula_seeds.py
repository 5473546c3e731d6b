"""Warm start by formula: the fastest configuration that fits, for each speed that the host may have.

If the device is the bottleneck, the formulas are within a few percent (`step_time`). How long the host needs to issue
the work is unknown unless it was calibrated, and where memory is short it decides whether small micro batches or
recomputation pay. Probes tell which of these seeds is right, and coordinate search continues from there. Only the knobs
in VARIED change.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from autotune.catalog import resolve_device
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate, estimate, refusal
from autotune.prediction.step_time import MEASURED_HOST, Host, host_of
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.problem.task import Task
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
    if speed_transfer(resolve_device(REFERENCE), device, calibration=calibration) is None:
        return
    probing = replace(task, device=device)
    own_host = calibration is not None and calibration.device == device.name
    scales = (host_of(calibration).scale,) if own_host else HOSTS
    fitting = dict.fromkeys(_fitting(task, _candidates(task, current), limit_gib))

    yielded = {current}
    for scale in scales:
        host = replace(MEASURED_HOST, scale=scale)

        def predicted(config: TrainConfig, host: Host = host) -> tuple[float, float]:
            """Useful tokens/s; ties go to the configuration that needs less memory."""
            found = estimate(probing, config, limit_gib, host=host)
            return (_tokens_per_s(probing, found), -found.need_gib) if found else (0.0, 0.0)

        best = max(fitting, key=predicted, default=current)
        if best not in yielded:
            yielded.add(best)
            yield best


def _fitting(task: Task, configs: Iterable[TrainConfig], limit_gib: float) -> Iterator[TrainConfig]:
    """The configurations whose need is within the limit, by formula."""
    for config in configs:
        if refusal(config, Parallelism.of(config), task.workload.objective) is None:
            found = estimate(task, config, limit_gib, clock=lambda: None)
            if found is not None and found.need_gib <= limit_gib:
                yield config


def formula_speed(task: Task, config: TrainConfig) -> float:
    """Predicted useful tokens/s on the reference GPU, with the link of the device; 0 without a prediction."""
    link_gb_s = task.link_gb_s(Parallelism.of(config))
    reference = replace(task, device=replace(resolve_device(REFERENCE), link_gb_s=link_gb_s), calibration=None)
    if refusal(config, Parallelism.of(config), task.workload.objective) is not None:
        return 0.0
    return _tokens_per_s(reference, estimate(reference, config, math.inf, host=MEASURED_HOST))


def _tokens_per_s(task: Task, found: Estimate | None) -> float:
    """Useful tokens/s of all GPUs, without communication if their link is unknown; 0 without a prediction."""
    if found is None or found.single_gpu is None:
        return 0.0
    config = found.config
    if found.tokens_per_s is not None:
        return config.num_gpus * found.tokens_per_s
    shape = task.workload.run_shape(config)
    computed = found.single_gpu.longer(1 + task.workload.waiting_share(config))
    return shape.useful_tokens_per_step / (shape.accumulation * computed.micro_s + computed.rest_s)


def _candidates(task: Task, current: TrainConfig) -> dict[TrainConfig, None]:
    """The configurations that differ from `current` in VARIED knobs only; if there are too many, the nearest ones."""
    space = task.space
    for knob in space.knobs:
        value = getattr(current, knob.name)
        if knob.name not in VARIED and value is not None:  # there is no rank where everything is trained
            space = space.pin(knob.name, value)
    choices = space.enumerate() if space.size() <= MAX_CONFIGS else by_distance(space, current)
    return dict.fromkeys(space.config(chosen) for chosen in islice(choices, MAX_CONFIGS))

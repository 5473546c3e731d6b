"""Start a search from the configurations that formulas predict to be the fastest.

For GPU-bound steps, the error of the formulas is a few percent (`prediction.step_time`). Without a
calibration, the time that the host needs to launch the kernels is unknown. If memory is short, this
time decides whether small micro batches or recomputation are faster. So for each of several host
speeds, the formulas give the fastest configuration that fits in memory, called a seed. The search
probes the seeds, and coordinate search continues from the fastest seed. A seed differs from the
search's current configuration only in the knobs of VARIED.
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
from autotune.study.neighbours import choices_by_distance

VARIED = (
    *("micro_batch_size", "checkpointing", "precision", "compile", "loss"),
    *("packing", "packed_attention", "padding", "sharding", "lora_kernels"),
)
# Assumed times that the host needs to launch kernels, as multiples of the time in the formula.
HOSTS = (1.0, 0.67, 0.5)
MAX_CONFIGS = 20_000  # the formulas rank at most this number of configurations, in about 5 s


def formula_seeds(task: Task, current: TrainConfig, limit_gib: float) -> Iterator[TrainConfig]:
    """Yield each seed once, beginning with the seed for the slowest host; leave out `current`.

    Yields no seed if the formulas do not know the model or the card.
    """
    device = task.measured_on or task.device
    calibration = task.calibration
    if speed_transfer(resolve_device(REFERENCE), device, calibration=calibration) is None:
        return

    probing = replace(task, device=device)
    own_host = calibration is not None and calibration.device == device.name
    scales = (host_of(calibration).scale,) if own_host else HOSTS
    fitting = dict.fromkeys(_fitting_configs(task, _candidates(task, current), limit_gib))

    seen = {current}
    for scale in scales:
        host = replace(MEASURED_HOST, scale=scale)

        def predicted(config: TrainConfig, host: Host = host) -> tuple[float, float]:
            """Return (useful tokens/s, -memory in GiB): at equal speed, less memory wins."""
            prediction = estimate(probing, config, limit_gib, host=host)
            return (
                (_tokens_per_s(probing, prediction), -prediction.need_gib)
                if prediction
                else (0.0, 0.0)
            )

        best = max(fitting, key=predicted, default=current)
        if best not in seen:
            seen.add(best)
            yield best


def _fitting_configs(
    task: Task, configs: Iterable[TrainConfig], limit_gib: float
) -> Iterator[TrainConfig]:
    """Yield the configurations that the formula predicts to fit into the memory limit."""
    for config in configs:
        if refusal(config, Parallelism.of(config), task.workload.objective) is None:
            prediction = estimate(task, config, limit_gib, clock=lambda: None)
            if prediction is not None and prediction.need_gib <= limit_gib:
                yield config


def formula_speed(task: Task, config: TrainConfig) -> float:
    """Predict the useful tokens/s on the reference GPU, or return 0 if they cannot be predicted.

    The prediction assumes the interconnect of the target device.
    """
    link_gb_s = task.link_gb_s(Parallelism.of(config))
    reference = replace(
        task, device=replace(resolve_device(REFERENCE), link_gb_s=link_gb_s), calibration=None
    )
    if refusal(config, Parallelism.of(config), task.workload.objective) is not None:
        return 0.0
    return _tokens_per_s(reference, estimate(reference, config, math.inf, host=MEASURED_HOST))


def _tokens_per_s(task: Task, prediction: Estimate | None) -> float:
    """The useful tokens/s of all GPUs together; 0 if `prediction` is None.

    If the interconnect's bandwidth is unknown, communication is assumed to take no time.
    """
    if prediction is None or prediction.single_gpu is None:
        return 0.0
    config = prediction.config
    if prediction.tokens_per_s is not None:
        return config.num_gpus * prediction.tokens_per_s
    shape = task.workload.run_shape(config)
    computed = prediction.single_gpu.longer(1 + task.workload.waiting_share(config))
    return shape.useful_tokens_per_step / (shape.accumulation * computed.micro_s + computed.rest_s)


def _candidates(task: Task, current: TrainConfig) -> dict[TrainConfig, None]:
    """Return the space's configurations that differ from `current` only in the knobs of VARIED.

    If there are more than MAX_CONFIGS, return the MAX_CONFIGS with the fewest differences.
    """
    space = task.space
    for knob in space.knobs:
        value = getattr(current, knob.name)
        # A LoRA rank of None (full fine-tuning) cannot be pinned in a space.
        if knob.name not in VARIED and value is not None:
            space = space.pin(knob.name, value)
    choices = (
        space.enumerate() if space.size() <= MAX_CONFIGS else choices_by_distance(space, current)
    )
    return dict.fromkeys(space.config(chosen) for chosen in islice(choices, MAX_CONFIGS))

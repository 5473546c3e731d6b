"""What the formulas would try first: the fastest configuration that fits by them, at each pace that a host may have.

Where the device decides they are within a few percent (`pace`); what the host needs to issue the work is anybody's
guess, and where memory is short it decides whether small micro batches pay or recomputation does. Probes tell which of
these is right, and the climb goes on from there. Learning knobs stay, as in the climb.
"""

from collections.abc import Iterator

from autotune.catalog import resolve_device
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import footprint
from autotune.prediction.step_time import REFERENCE, pace
from autotune.prediction.transfer import carry
from autotune.problem.run_shape import RunShape
from autotune.problem.task import Task

VARIED = ("micro_batch_size", "checkpointing", "precision", "compile", "loss", "packing")
HOSTS = (1.0, 0.67, 0.5)  # times what `pace` assumes that a host needs


def formula_seeds(task: Task, here: TrainConfig, limit_gib: float) -> Iterator[TrainConfig]:
    """The slowest host's first, each once, without `here`. Nothing where the formulas do not know the model or card."""
    card = task.measured_on or task.device
    carried = carry(resolve_device(REFERENCE), card)
    if carried is None:
        return
    space, workload = task.space, task.workload
    for knob in space.knobs:
        if knob.name not in VARIED and (value := getattr(here, knob.name)) is not None:  # no rank where all is trained
            space = space.pin(knob.name, value)
    fitting: dict[TrainConfig, float] = {}
    shapes: dict[TrainConfig, RunShape] = {}
    for config in dict.fromkeys(space.config(chosen) for chosen in space.enumerate()):
        shape = workload.run_shape(config)
        need = footprint(task.model, config, shape.probe_micro_steps)
        if need is not None and need.peak_reserved_gib <= limit_gib:
            fitting[config] = need.peak_reserved_gib
            shapes[config] = shape
    seen = {here}
    for host in HOSTS:

        def promise(config: TrainConfig, host_pace: float = host * carried.ratio) -> tuple[float, float]:
            """Useful tokens/s; of equals the one that needs less."""
            took = pace(task.model, config, host_pace)
            if took is None:
                return 0.0, 0.0
            shape = shapes[config]
            step_s = shape.step_time_s(took.micro_s, took.rest_s)
            return shape.useful_tokens_per_step / step_s, -fitting[config]

        best = max(fitting, key=promise, default=here)
        if best not in seen:
            seen.add(best)
            yield best

"""What a reader of a recipe should know: the assumptions about data and device that its numbers rest on."""

from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import SAYS
from autotune.problem.task import Task


def assumptions(task: Task, config: TrainConfig) -> list[str]:
    """What the numbers of a winner assume without having been told, in sentences."""
    workload, lengths = task.workload, task.workload.lengths
    found = []
    if lengths.source == "assumed":
        found.append(
            f"the length of an example was not given: {lengths.longest:,} tokens are assumed "
            "(--dataset, --lengths or --tokens-per-example)"
        )
    if lengths.source in ("characters", "summary"):
        found.append(f"the lengths of the examples are {SAYS[lengths.source]}, not counted")
    if workload.examples_assumed:
        found.append(f"the number of examples was not given: {workload.examples:,} are assumed (--examples)")
    if task.measured_on is not None and task.carried is not None:
        low, high = task.carried.interval
        found.append(
            f"probed on {task.measured_on.name} with its memory capped to what {task.device.name} offers: memory is "
            f"measured; speeds are projected, {task.carried.ratio:.3g} times those there ({low:.3g} to {high:.3g} in "
            "80 % of cases); power, clocks and kernels are those of the card that probed"
        )
    if task.device.kind == "cpu":
        found.append(
            "on a CPU, probes give large blocks of memory straight back to the kernel, so that peaks repeat; the "
            "full run does not, and can be twice as fast"
        )
    cut = workload.truncated(config.seq_len)
    if cut > 0:
        longer = lengths.longer(config.seq_len)
        found.append(
            f"{cut:.1%} of the tokens are cut off at seq_len {config.seq_len}, from {longer:.1%} of the examples"
        )
    if config.packing:
        per_step = workload.run_shape(config).examples_per_step
        found.append(
            f"rows are packed: {workload.examples_per_row(config):.1f} examples each on average, "
            f"{workload.fill(config):.1%} of them filled; a step has {per_step:.1f} "
            f"examples on average, {workload.global_batch} were asked for"
        )
    elif len(lengths.counts) > 1:
        found.append(
            f"{1 - workload.fill(config):.0%} of each row of {config.seq_len} tokens is padding, "
            "which tokens/s leave out"
        )
    return found

"""Chooses among the few configurations that a plan counts if no formula covers the model.

A dry probe of a configuration takes seconds, so only a few are counted: the baseline, a mixture's
fastest kernels, and the configuration that needs the least memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate
from autotune.problem.run_cost import FITS
from autotune.problem.task import Task
from autotune.study.neighbours import grouped_variants, leaner_optimizer

# Returns the estimate of a configuration by a dry probe, or None if it cannot be estimated.
Estimator = Callable[[TrainConfig], Estimate | None]


def count_best(task: Task, estimate_of: Estimator) -> Estimate | None:
    """Return the fastest counted configuration that fits, or the one that needs the least memory.

    The result is None if none of the configurations can be estimated.
    """
    baseline = largest_that_fits(task.baselines, estimate_of)
    grouped = count_grouped(task, estimate_of)
    fitting = [one for one in (grouped, baseline) if one is not None and one.state == FITS]
    if fitting:
        return max(fitting, key=lambda one: one.tokens_per_s or 0.0)
    return count_leanest(task, estimate_of) or baseline


def count_grouped(task: Task, estimate_of: Estimator) -> Estimate | None:
    """Estimate compiled layers with grouped matrix products, or return None if that is impossible.

    A grouped matrix product computes all experts of a layer in one kernel. The micro batch is the
    largest of the baseline's micro batches that fits. If it is not the very largest, an optimizer
    with less state is tried too, and the faster configuration is returned. If nothing fits, experts
    quantised to 4 bits are tried if the space has them.
    """
    if not task.model.has_experts:
        return None
    space = task.space
    fallback = None
    for in_4_bits in (False, True):
        if in_4_bits not in space.choices("quantize_experts"):
            continue
        starts = [replace(one, quantize_experts=in_4_bits) for one in task.baselines]
        configs = grouped_variants(space, starts)
        leaner = [one for config in configs for one in leaner_optimizer(space, config)]
        fitting = []
        for variants in (configs, leaner):
            found = largest_that_fits(variants, estimate_of)
            fallback = fallback or found
            if found is not None and found.state == FITS:
                fitting.append(found)
                if found.config == configs[0]:
                    break
        if fitting:
            return max(fitting, key=lambda one: one.tokens_per_s or 0.0)
    return fallback


def count_leanest(task: Task, estimate_of: Estimator) -> Estimate | None:
    """Estimate the configuration that needs the least memory.

    Returns None if no such configuration can be estimated.
    """
    space = task.space
    if "peft" in space.choices("lora_kernels"):
        # Grouped matrix products (one kernel for all experts) need adapters on experts. Whether a
        # model can have such adapters is known only after the model is built. So grouped products
        # are left out. They would save little memory: 0 % for Qwen3-30B-A3B, and 4 % for OLMoE.
        space = space.pin("lora_kernels", "peft")
    spaces = [space]
    if space.choices("quantize_experts") == (False, True):
        # Whether the model's experts can be quantised is known only after the model is built. So
        # the space without quantised experts is tried, too.
        spaces.append(space.pin("quantize_experts", False))
    if "full" in space.choices("loss"):
        # For some models, the logits cannot be computed in chunks. So try the loss `full`, too.
        spaces += [one.pin("loss", "full") for one in spaces]
    configs = dict.fromkeys(space.config(space.leanest()) for space in spaces)
    estimates = map(estimate_of, configs)
    return next((estimated for estimated in estimates if estimated is not None), None)


def largest_that_fits(
    configs: Sequence[TrainConfig], estimate_of: Estimator, *, counted: bool = True
) -> Estimate | None:
    """Return the estimate of the first configuration that fits.

    `configs` are sorted by micro batch size, the largest first. If no configuration fits, return
    the first estimate that can be made, or None if no configuration can be estimated. `counted`
    says whether `estimate_of` runs dry probes.
    """
    fallback = None
    for number, config in enumerate(configs):
        estimated = estimate_of(config)
        if estimated is not None and estimated.state == FITS:
            return estimated
        fallback = fallback or estimated

        # A dry probe takes seconds. If the smallest micro batch does not fit, larger micro batches
        # do not fit either, so no dry probes are run for them.
        if counted and number == 0:
            smallest = estimate_of(configs[-1])
            fallback = fallback or smallest
            if smallest is None or smallest.state != FITS:
                break
    return fallback

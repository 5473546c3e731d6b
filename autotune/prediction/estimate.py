"""The estimate of one configuration without a probe: memory, step time and cost.

`estimate` is the only function that computes all three, for any number of GPUs and hosts. If a
formula covers the configuration, `estimate` uses the formula. Otherwise, `estimate` uses a dry
probe, which runs a training step without a GPU and computes its memory and its operations. The
caller passes the function that runs the dry probe, because this package cannot import the package
`dry`. For a run that another tool's file describes, the caller computes the memory and the step
time, and passes both to `estimate`. For a measured run, the caller passes the measured values.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from autotune.catalog import DeviceSpec, ModelSpec, Price, resolve_device
from autotune.core.json_view import keys
from autotune.core.memory_budget import PINNED
from autotune.core.notebook import ShownAsTable
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import DryCount, Evidence, ExpertShard
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_count, fmt_gib, fmt_hours, fmt_usd, gib
from autotune.core.untested import untested
from autotune.prediction.collectives import (
    SLOWEST_LINK,
    RankStepTime,
    Traffic,
    add_gradient_all_reduce,
    counted_traffic,
    rank_step_time,
    slowest_link,
    slowest_of_catalogue,
    traffic,
)
from autotune.prediction.host_exchange import host_exchange
from autotune.prediction.memory_formula import (
    ERROR,
    EVALUATES,
    KEPT_ANSWERS,
    MemoryBreakdown,
    counted_breakdown,
    memory_breakdown,
    supported,
)
from autotune.prediction.observed_speed import Observation, observed_transfer
from autotune.prediction.sharded_memory import (
    EXPORTED,
    ShardingSettings,
    counted_rank_breakdown,
    is_countable,
    offloads,
    rank_breakdown,
    sharded_precision,
)
from autotune.prediction.step_time import (
    Host,
    StepTimeEstimate,
    counted_step_time,
    estimate_step_time,
    host_of,
)
from autotune.prediction.transfer import (
    REFERENCE,
    calibrated_parts,
    interval,
    is_measured_kind,
    replaces_data_sheet,
)
from autotune.problem.calibration import Calibration
from autotune.problem.performance import Performance
from autotune.problem.run_cost import FITS, OOM, TIGHT, CostProjection, run_cost
from autotune.problem.task import Task
from autotune.problem.workload import RunShape, Workload

# A function that computes the memory and the operations of a whole model's training step in a dry
# probe, or returns None if a dry probe cannot run the step. The function's arguments are the model,
# the configuration, the number of micro batches in a step, and the objective. The keyword `experts`
# has the ExpertShard of a GPU that holds only a part of the experts.
Counter = Callable[..., DryCount | None]
KEPT_BYTES = 16  # for each token that metrics need: its prediction and its label, 8 bytes each
# A function that returns the step time of one GPU. The function is called only if the run may fit.
Clock = Callable[[], StepTimeEstimate | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The evaluations between a run's steps.

    `rows` is the number of examples in a batch, or None for the training's micro batch. `loss` is a
    value of the knob `loss`. The GPU holds the predictions and labels of `kept_tokens` tokens until
    the metrics are computed. If `answers_only` is true, only tokens that count in the loss have
    logits: between none and all of them.
    """

    rows: int | None
    loss: str
    kept_tokens: int = 0
    answers_only: bool = False

    def batch_of(self, config: TrainConfig) -> TrainConfig:
        """Return `config` with the evaluation's batch as its micro batch."""
        rows = self.rows or config.micro_batch_size
        return replace(config, micro_batch_size=rows, loss=self.loss, checkpointing="none")

    def needs_less(self, config: TrainConfig) -> bool:
        """Return whether an evaluation surely needs less memory than a training step.

        An evaluation needs less if it computes the loss as the training does, if its batch has no
        more examples than a micro batch, and if it keeps no predictions. With CUDA graphs the
        result is false, because the graphs keep the memory of a training step during the
        evaluation.
        """
        smaller = (self.rows or 1) <= config.micro_batch_size and self.loss == config.loss
        return smaller and not self.kept_tokens and config.cuda_graphs == "none"

    def with_kept(self, batch: MemoryBreakdown) -> MemoryBreakdown:
        """Return the memory of an evaluation batch plus the predictions that metrics need."""
        kept_gib = gib(KEPT_BYTES * self.kept_tokens)
        return replace(batch, activations=batch.activations + kept_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBounds:
    """The lower and the upper bound of a run's memory at the peak of a step.

    The two bounds are equal if a formula or a dry probe computed the memory. `most` is None if no
    upper bound is known.
    """

    least: MemoryBreakdown
    most: MemoryBreakdown | None

    @property
    def bounds_gib(self) -> tuple[float, float | None]:
        """The lowest and the highest possible peak in GiB."""
        return self.least.peak_reserved_gib, self.most.peak_reserved_gib if self.most else None

    @property
    def reported(self) -> MemoryBreakdown:
        """The upper bound if there is one, otherwise the lower bound."""
        return self.most or self.least

    def in_one_pool(self) -> "MemoryBounds":
        """Return the bounds for a GPU that shares one memory with its host.

        Offloaded tensors then count as memory of the GPU. Pinned blocks may be larger than the
        tensors in them, which raises the upper bound.
        """
        most = self.most
        return MemoryBounds(
            least=self.least.in_one_pool(), most=most.in_one_pool(PINNED) if most else None
        )

    def include_evaluation(self, evaluated: "MemoryBounds") -> "MemoryBounds":
        """Return the bounds of a run whose evaluations have the memory bounds `evaluated`."""
        highest = partial(max, key=lambda memory: memory.peak_reserved_gib)
        least = highest(self.least, evaluated.least)
        known = self.most is not None and evaluated.most is not None
        return MemoryBounds(least=least, most=highest(self.most, evaluated.most) if known else None)

    def state(self, limit_gib: float) -> str:
        """Return FITS or OOM if the bounds with their errors prove it, otherwise TIGHT."""
        if memory_state(self.least.needed_gib, limit_gib, self.least.error) == OOM:
            return OOM
        most = self.most
        certain = most and memory_state(most.peak_reserved_gib, limit_gib, most.error) == FITS
        return FITS if certain else TIGHT


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(ShownAsTable):
    """One configuration on one device: memory verdict, speed, and cost of the full run.

    Unknown speeds and costs are None.

    Args:
        state: FITS, TIGHT or OOM, or the name of a feature that the device lacks.
        need_gib: the reserved memory at the peak.
        limit_gib: the memory of a GPU that the run's tensors may use.
        memory: the terms of `need_gib`, or None if it was measured.
        least: the lower bound of `memory` if GPUs share out the experts of a mixture: the tokens
            are then spread evenly over the GPUs. `memory` is the upper bound.
        tokens_per_s: useful tokens per second of one device; in 80 % of cases, the true speed is in
            `interval`.
        num_observations: the number of other users' measurements on this device that corrected the
            speed.
        calibration: the calibration that the speed was computed with, or None.
        accumulation: micro batches in a step of each GPU.
        single_gpu: the step time of one GPU without communication. This time is known even if the
            bandwidth of the link is unknown.
        step: the step time of the GPUs together, with communication.
    """

    JSON: ClassVar = keys(
        "config",
        label="config.label()",
        fits="state",
        peak_reserved_gib="held_gib",
        limit_gib="limit_gib",
        memory_gib="memory",
        memory_by="memory_by",
        tokens_per_s="tokens_per_s",
        interval_tokens_per_s="interval",
        samples_per_s="samples_per_s",
        cost="cost",
        measurements_on_this_card="num_observations",
        evidence="evidence",
    )
    evidence: ClassVar[Evidence] = Evidence.ESTIMATED

    device: DeviceSpec
    config: TrainConfig
    state: str
    need_gib: float
    limit_gib: float
    price: Price | None = None
    memory: MemoryBreakdown | None = None
    least: MemoryBreakdown | None = None
    tokens_per_s: float | None = None
    interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    cost: CostProjection | None = None
    num_observations: int = 0
    calibration: Calibration | None = None
    accumulation: int | None = None
    single_gpu: StepTimeEstimate | None = None
    step: RankStepTime | None = None

    def facts(self) -> dict[str, str]:
        """Return the configuration with its memory, speed, time and cost, all estimated."""
        need = f"{fmt_gib(self.held_gib)} of {fmt_gib(self.limit_gib)}, {self.state}"
        facts = {"configuration": self.config.label(), "memory": need}
        if self.interval is not None:
            between = " to ".join(map(fmt_count, self.interval))
            facts["speed"] = f"{fmt_count(self.tokens_per_s)} useful tokens/s ({between})"
        if self.cost is not None:
            between = " to ".join(map(fmt_hours, self.cost.interval_hours))
            facts["full run"] = f"{fmt_hours(self.cost.full_run_hours)} ({between})"
            facts["cost"] = fmt_usd(self.cost.full_run_usd)
        return facts | {"evidence": self.evidence.value}

    @property
    def margin(self) -> float:
        """(Needed memory - limit) / limit, which is negative if the run fits."""
        return self.need_gib / self.limit_gib - 1

    @property
    def held_gib(self) -> float:
        """The memory that torch reports at the peak, plus NCCL's memory.

        The allocator keeps free segments, and free blocks of side streams, only as long as the GPU
        has room for them.
        """
        return self.need_gib if self.memory is None else self._held(self.memory)

    @property
    def interval_gib(self) -> tuple[float, float] | None:
        """The interval of `held_gib` if the routing of tokens decides it, otherwise None."""
        return None if self.least is None else (self._held(self.least), self.held_gib)

    def _held(self, memory: MemoryBreakdown) -> float:
        return max(memory.needed_gib, min(memory.roomy_gib, self.limit_gib))

    @property
    def memory_by(self) -> str | None:
        """The source of `need_gib`: "formula", "counted" for a dry probe, or None if measured."""
        if self.memory is None:
            return None
        return "counted" if self.memory.counted else "formula"

    @property
    def is_guess(self) -> bool:
        """Whether the speed is from data sheets only: no card of this generation was measured."""
        is_measured = (
            self.num_observations
            or is_measured_kind(self.device)
            or replaces_data_sheet(self.calibration, self.device)
        )
        return self.interval is not None and not is_measured

    @property
    def calibrated(self) -> str | None:
        """A description of the calibrated parts with the date, or None without a calibration."""
        return calibrated_parts(self.calibration, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChange:
    """Options that make a run fit, such as `--space qlora`, and the run's estimate with them."""

    options: str
    estimate: Estimate

    def __str__(self) -> str:
        """Return '--space qlora makes it fit in 17.1 GiB'."""
        return f"{self.options} makes it fit in {fmt_gib(self.estimate.held_gib)}"


def memory_state(need_gib: float, limit_gib: float, error: float = ERROR) -> str:
    """Return FITS or OOM, or TIGHT if the need differs from the limit by less than its error.

    `error` is relative to the need; by default, it is the error of the memory formula.
    """
    if need_gib * (1 - error) > limit_gib:
        return OOM
    return TIGHT if need_gib * (1 + error) > limit_gib else FITS


def refusal(config: TrainConfig, parallelism: Parallelism, objective: Objective) -> str | None:
    """Return the reason why these GPUs cannot train the configuration, or None if they can."""
    if parallelism.num_gpus > 1 and (reason := _untested_on_several_gpus(objective)):
        return reason
    return parallelism.refusal(config)


@functools.cache
def _untested_on_several_gpus(objective: Objective) -> str | None:
    return untested("objective", objective, "several_gpus")


def memory_of(
    model: ModelSpec,
    config: TrainConfig,
    micro_steps: int = 2,
    *,
    objective: Objective = Objective.SFT,
    parallelism: Parallelism | None = None,
    settings: ShardingSettings = EXPORTED,
    count: Counter | None = None,
    fullest: bool = False,
) -> MemoryBreakdown | None:
    """Return the memory of each GPU at the peak of a step, from a formula or a dry probe.

    If `micro_steps` is EVALUATES, the result is the peak of an evaluation. `count` runs the dry
    probe. The result is None if no formula covers the configuration and no dry probe can run it.
    `parallelism` replaces the parallelism in the configuration. If the GPUs share out the experts
    of a mixture, each GPU gets the mean number of tokens or, with `fullest`, the largest possible
    number. `settings` are those of the tool that shards the model. The result is also None if our
    trainer cannot train the configuration on these GPUs; for another tool, the caller knows.
    """
    parallelism = parallelism or Parallelism.of(config)
    if parallelism.strategy != "none":
        refused = refusal(config, parallelism, objective) if settings == EXPORTED else None
        if refused is not None:
            return None
        by_formula = rank_breakdown(model, config, parallelism, micro_steps, settings)
        if by_formula is not None or count is None or not is_countable(config, parallelism):
            return by_formula
        alone, counted_steps = replace(config, num_gpus=1), micro_steps
        if parallelism.shards:
            alone = sharded_precision(alone)
            counted_steps = min(micro_steps, 1) * 2  # two micro batches, or an evaluation
        if parallelism.expert_parallel > 1:
            shard = ExpertShard(num_gpus=parallelism.expert_parallel, fullest=fullest)
            count = partial(count, experts=shard)
        dry_count = count(model, alone, counted_steps, objective)
        if dry_count is None:
            return None
        return counted_rank_breakdown(model, config, parallelism, micro_steps, dry_count, settings)

    by_formula = memory_breakdown(model, config, micro_steps, objective=objective)
    if by_formula is not None or count is None:
        return by_formula
    dry_count = count(model, config, micro_steps, objective)
    return None if dry_count is None else counted_breakdown(model, config, dry_count, objective)


def step_time_of(
    model: ModelSpec,
    config: TrainConfig,
    micro_steps: int,
    host: Host,
    *,
    objective: Objective = Objective.SFT,
    shards: bool = False,
    count: Counter | None = None,
) -> StepTimeEstimate | None:
    """Return the step time of one reference GPU, from a formula or a dry probe.

    With `shards`, the GPU is one of several that share out the weights. The result is None if no
    formula covers the configuration and no dry probe can run it.
    """
    on_gpu = replace(config, checkpointing="full") if config.offloads else config
    if supported(model, on_gpu) is not None:
        found = estimate_step_time(model, on_gpu, host, objective)
        return found.with_offloading() if found and config.offloads else found
    skips_pairs = config.knows_ends or config.attention == "flex_attention"
    if count is None or (config.packing and skips_pairs):
        return None  # a dry probe treats a packed row as one long example, with too much attention

    if shards and config.method == "full":
        count = _sharded_counter(count)
    dry_count = count(model, replace(config, num_gpus=1), micro_steps, objective)
    return None if dry_count is None else counted_step_time(config, dry_count, host)


def device_step_time(
    task: Task,
    config: TrainConfig,
    on_reference: StepTimeEstimate | None,
    observations: Sequence[Observation] = (),
) -> StepTimeEstimate | None:
    """Convert a step time of the reference GPU to the task's device.

    The result is None if a rate of the device is unknown.
    """
    if on_reference is None:
        return None

    transfer = observed_transfer(
        resolve_device(REFERENCE),
        task.device,
        config,
        observations,
        task.calibration,
        side=on_reference.side,
    )
    return None if transfer is None else on_reference.convert(transfer)


def estimate(
    task: Task,
    config: TrainConfig,
    limit_gib: float,
    observations: Sequence[Observation] = (),
    *,
    parallelism: Parallelism | None = None,
    hosts: int = 1,
    network_gb_s: float | None = None,
    host: Host | None = None,
    count: Counter | None = None,
    shape: RunShape | None = None,
    num_steps: int | None = None,
    memory: MemoryBounds | None = None,
    clock: Clock | None = None,
    settings: ShardingSettings = EXPORTED,
    with_cost: bool = True,
) -> Estimate | None:
    """Estimate the memory, the speed and the total cost of a task's run with one configuration.

    Args:
        task: the model, workload, device, price and calibration.
        config: the configuration to estimate.
        limit_gib: the memory of a GPU for tensors.
        observations: speeds that others measured on the device.
        parallelism: replaces the parallelism in the configuration.
        hosts: the number of hosts that share the GPUs evenly.
        network_gb_s: the bandwidth between the hosts.
        host: the speed of the host; by default, the calibrated host, or an unknown host without a
            calibration.
        count: runs a dry probe of a configuration that no formula covers, which takes seconds.
        shape: the batch sizes and the number of examples of the run, if another tool's file sets
            them.
        num_steps: the number of steps, if another tool's file sets it.
        memory: the bounds of the memory, which replace the result of the formula.
        clock: returns the step time of one GPU of this device, which replaces the result of the
            formula.
        settings: the settings of the tool that shards or offloads the model.
        with_cost: whether to compute the cost. A plan needs only the winner's.

    Returns None if no formula covers the configuration and no dry probe can run it. Raises
    ValueError if the GPUs cannot train the configuration.
    """
    workload = task.workload
    parallelism = parallelism or Parallelism.of(config)
    if memory is None and (reason := refusal(config, parallelism, workload.objective)) is not None:
        raise ValueError(reason)

    shape = shape or workload.run_shape(config, world_size=parallelism.num_gpus)
    micro_steps = shape.probe_micro_steps
    memory = memory or _memory_by_formula(task.model, workload, config, micro_steps, parallelism)
    if memory is None and count is not None:
        memory = _memory(task.model, workload, config, micro_steps, parallelism, count)
    if memory is None:
        return None
    if task.device.unified_memory:
        memory = memory.in_one_pool()

    state = memory.state(limit_gib)
    estimated = partial(
        Estimate,
        device=task.device,
        config=config,
        state=state,
        need_gib=memory.reported.peak_reserved_gib,
        limit_gib=limit_gib,
        price=task.price,
        memory=memory.reported,
        least=memory.least if parallelism.expert_parallel > 1 else None,
        accumulation=shape.accumulation,
    )
    # The time that GPUs take to exchange the tokens of experts is unknown.
    if state == OOM or parallelism.expert_parallel > 1:
        return estimated()

    by_formula = partial(
        single_gpu_time,
        task,
        config,
        observations,
        micro_steps=micro_steps,
        host=host,
        shards=parallelism.shards,
        count=count,
    )
    single = (clock or by_formula)()
    if single is None:
        return estimated()
    step = _step_of(
        task,
        config,
        single,
        shape,
        parallelism,
        hosts,
        network_gb_s,
        settings=settings,
        count=count,
    )
    return estimated(
        single_gpu=single,
        num_observations=single.num_observations,
        calibration=task.calibration,
        **({} if step is None else _speed_and_cost(task, shape, step, num_steps, with_cost)),
    )


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _memory_by_formula(
    model: ModelSpec,
    workload: Workload,
    config: TrainConfig,
    micro_steps: int,
    parallelism: Parallelism,
) -> MemoryBounds | None:
    """Return the result of `_memory` without dry probes.

    The result is cached, because it is the same for all compared cards.
    """
    return _memory(model, workload, config, micro_steps, parallelism, None)


def _memory(
    model: ModelSpec,
    workload: Workload,
    config: TrainConfig,
    micro_steps: int,
    parallelism: Parallelism,
    count: Counter | None,
) -> MemoryBounds | None:
    """Estimate the memory of the rank that gets the longest rows.

    The result is None if no formula covers the configuration and no dry probe can run it.
    """
    query = partial(
        memory_of,
        model,
        objective=workload.objective,
        parallelism=parallelism,
        count=count,
    )

    def bounds_of(config: TrainConfig, steps: int) -> MemoryBounds | None:
        least = most = query(config, steps)
        if parallelism.expert_parallel > 1:
            most = query(config, steps, fullest=True)
        return None if least is None or most is None else MemoryBounds(least=least, most=most)

    longest = workload.longest_row_config(config)
    bounds = bounds_of(longest, micro_steps)
    if bounds is None:
        return None

    # autotune's own trainer evaluates with the micro batch size and the loss of the training.
    evaluation = Evaluation(rows=None, loss=config.loss)
    if not workload.held_out() or evaluation.needs_less(longest):
        return bounds
    batch = bounds_of(evaluation.batch_of(longest), EVALUATES)
    return None if batch is None else bounds.include_evaluation(batch)


def single_gpu_time(
    task: Task,
    config: TrainConfig,
    observations: Sequence[Observation] = (),
    *,
    micro_steps: int = 2,
    host: Host | None = None,
    shards: bool = False,
    count: Counter | None = None,
) -> StepTimeEstimate | None:
    """Estimate the step time of one GPU of the task's device, for rows of mean length.

    `micro_steps` and `shards` only matter for a dry probe (`step_time_of`). The result is None if a
    rate of the device is unknown, or if no formula covers the configuration and no dry probe can
    run it.
    """
    workload = task.workload
    host = host or host_of(task.calibration)
    on_reference = _reference_by_formula(task.model, workload, config, host)
    if on_reference is None and count is not None:
        on_reference = step_time_of(
            task.model,
            workload.mean_row_config(config),
            micro_steps,
            host,
            objective=workload.objective,
            shards=shards,
            count=count,
        )
    return device_step_time(task, config, on_reference, observations)


@functools.lru_cache(maxsize=KEPT_ANSWERS)
def _reference_by_formula(
    model: ModelSpec, workload: Workload, config: TrainConfig, host: Host
) -> StepTimeEstimate | None:
    """Return the formula's step time of one reference GPU, for rows of mean length.

    The result is cached, because it is the same for all compared cards.
    """
    mean = workload.mean_row_config(config)
    return step_time_of(model, mean, 2, host, objective=workload.objective)


def _sharded_counter(count: Counter) -> Counter:
    """Return a counter of the work of a rank that holds a shard of the weights it trains.

    Weights are cast to 16 bits when they are gathered, so products are in 16 bits. The optimizer
    updates shards in fp32.
    """

    def count_rank(
        model: ModelSpec, config: TrainConfig, micro_steps: int, objective: Objective
    ) -> DryCount | None:
        found = count(model, sharded_precision(config), micro_steps, objective)
        if found is None or config.precision == "bf16_pure":
            return found
        return replace(found, model_gib=2 * found.model_gib, optimizer_gib=2 * found.optimizer_gib)

    return count_rank


def _step_of(
    task: Task,
    config: TrainConfig,
    single: StepTimeEstimate,
    shape: RunShape,
    parallelism: Parallelism,
    hosts: int,
    network_gb_s: float | None,
    *,
    settings: ShardingSettings,
    count: Counter | None,
) -> RankStepTime | None:
    """Return the step time of the GPUs together, with communication and offloading.

    The result is None if the traffic or the link of several GPUs is unknown.
    """
    exchange = None
    if any(offloads(parallelism, settings)):
        exchange = host_exchange(task.model, config, parallelism, settings)
        if exchange is None:
            return None

    def complete(step: RankStepTime) -> RankStepTime | None:
        """Return the step time with the exchange with the host."""
        return exchange.add_to(step, task.device, shape.accumulation) if exchange else step

    if parallelism.num_gpus == 1:
        step_s = shape.accumulation * single.micro_s + single.rest_s
        bounds = interval(step_s, single.error)
        return complete(
            RankStepTime(step_s=step_s, interval_s=bounds, communication_s=0.0, exposed_s=0.0)
        )

    of_traffic = partial(_traffic_of, task, config, count, shape.probe_micro_steps)
    on_gpu = replace(parallelism, offload=False) if parallelism.offload else parallelism
    link = _link(task, of_traffic, on_gpu, hosts, network_gb_s)
    if link is None:
        return None
    sent, link_gb_s, slowest = link
    waiting = task.workload.waiting_share(config, parallelism, shape.accumulation)
    step = rank_step_time(
        single.longer(1 + waiting),
        config,
        parallelism,
        sent,
        accumulation=shape.accumulation,
        link_gb_s=link_gb_s,
        slowest_link=slowest,
    )
    return complete(step)


def _traffic_of(
    task: Task,
    config: TrainConfig,
    count: Counter | None,
    micro_steps: int,
    parallelism: Parallelism,
) -> Traffic | None:
    """Return a rank's traffic by formula or from a dry probe, or None if both are impossible."""
    by_formula = traffic(task.model, config, parallelism)
    if by_formula is not None or count is None or supported(task.model, config) is not None:
        return by_formula
    # The same dry probe has computed the step time.
    mean = replace(task.workload.mean_row_config(config), num_gpus=1)
    dry_count = count(task.model, mean, micro_steps, task.workload.objective)
    if dry_count is None:
        return None
    return counted_traffic(task.model, config, dry_count, parallelism)


def _link(
    task: Task,
    traffic_of: Callable[[Parallelism], Traffic | None],
    parallelism: Parallelism,
    hosts: int,
    network_gb_s: float | None,
) -> tuple[Traffic, float, float] | None:
    """Return a rank's traffic, the GB/s of its link, and how many times slower the link may be.

    The result is None if the traffic or the link is unknown.
    """
    sent = traffic_of(parallelism)
    link_gb_s = task.device.link_gb_s
    if network_gb_s is None:
        link_gb_s = task.link_gb_s(parallelism)
        slowest = slowest_link(task, parallelism)
        return None if sent is None or link_gb_s is None else (sent, link_gb_s, slowest)
    if sent is not None and parallelism.num_gpus == hosts:
        return sent, network_gb_s, SLOWEST_LINK  # no two GPUs share a host
    if sent is None or link_gb_s is None:
        return None

    slowest = slowest_of_catalogue(task.device)
    # If each host holds a copy of the model, the copies exchange gradients over the network. With a
    # single copy, all GPUs form one ring, and the slowest link determines the speed of the ring.
    if parallelism.copies == 1:
        return sent, min(link_gb_s, network_gb_s), slowest
    copy_traffic = traffic_of(parallelism.single_copy)
    if copy_traffic is None:
        return None
    return (
        add_gradient_all_reduce(copy_traffic, parallelism, link_gb_s / network_gb_s),
        link_gb_s,
        slowest,
    )


def _speed_and_cost(
    task: Task, shape: RunShape, step: RankStepTime, num_steps: int | None, with_cost: bool
) -> dict[str, Any]:
    """Return an Estimate's fields of speed and cost, for a run of this shape and step time."""
    step_s = step.step_s
    shortest_s, longest_s = step.interval_s
    speed = Performance.from_step_time(
        shape, step_s, spread=(shortest_s / step_s - 1, longest_s / step_s - 1)
    )

    gpus = shape.world_size
    cost = None
    if with_cost:
        power_w = task.device.tdp_w
        cost = run_cost(
            shape,
            speed,
            task.price and task.price.multiply(gpus),
            None if power_w is None else gpus * power_w,
            num_steps=num_steps,
            options=task.run_options,
            evidence=Evidence.ESTIMATED,
        )

    tokens_per_s = speed.tokens_per_second / gpus
    return {
        "step": step,
        "tokens_per_s": tokens_per_s,
        "interval": (tokens_per_s * step_s / longest_s, tokens_per_s * step_s / shortest_s),
        "samples_per_s": speed.samples_per_second / gpus,
        "cost": cost,
    }

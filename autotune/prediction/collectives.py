"""The time of an optimizer step on each of several GPUs: the computation of one GPU, and what they send each other.

Bytes on the wire follow from the strategy, their time from the bus bandwidth of the link. Communication runs beside the
computation, and the longer of the two sets the pace. What is hidden costs time all the same, because collectives take
multiprocessors and bandwidth from the kernels beside them. That ranks wait for the one
with the longest rows is in the computation that is given (`Workload.waiting_share`).
"""

from dataclasses import dataclass, replace

from autotune.catalog import ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.parallelism import FSDP2, Parallelism
from autotune.core.probe_types import Measurement
from autotune.core.train_config import TrainConfig
from autotune.prediction.sharded_memory import Shares
from autotune.prediction.step_time import StepTimeEstimate
from autotune.prediction.transfer import interval
from autotune.problem.task import Task

# The share of hidden communication that lengthens the step: 0.40 (LoRA) and 0.57 (full) for 32 layers of a 7B under
# FSDP2 on two H200s, from real steps and steps without communication.
HIDDEN_COSTS = 0.5
# How much slower than its catalogue's value a link may be: two H200s gathered at 250 GB/s where eight reach 370. The
# second is how much slower than it was measured.
SLOWEST_LINK, SLOWEST_MEASURED_LINK = 1.5, 1.1
# How much longer GPUs compute that keep each other's pace than one of them alone, and how uncertain that is: steps of
# two and four H100s and H200s, with three strategies and models, took 0.4 % less to 5.1 % more than one card played.
TOGETHER = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in a step.

    `forward`, `backward` and `ends` are those of each micro batch: beside its passes, and where nothing is left to
    compute, before the first layer and after the last. `last_backward` is beside that of the last micro batch alone,
    `after` follows it. `gradients` are those among them that FSDP2 scatters.
    """

    forward: float = 0.0
    backward: float = 0.0
    last_backward: float = 0.0
    after: float = 0.0
    ends: float = 0.0
    gradients: float = 0.0

    def of_step(self, accumulation: int) -> float:
        """Bytes of a step of so many micro batches."""
        each = self.forward + self.backward + self.ends
        return accumulation * each + self.last_backward + self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepTime:
    """Seconds of an optimizer step, 80 % of cases in `interval_s`; `communication_s` is that of all collectives.

    `exposed_s` is how much longer the step takes than its computation, at the pace of the slowest GPU.
    """

    step_s: float
    interval_s: tuple[float, float]
    communication_s: float
    exposed_s: float


def traffic(model: ModelSpec, config: TrainConfig, parallelism: Parallelism) -> Traffic | None:
    """What a rank sends in a step. It is None of one GPU, and where the model or what is trained has no formula.

    It is so too where the model waits in the host's memory, since more is sent from there and back.
    A gather or a scattering of B bytes sends (N-1)/N of them, the sum of gradients on all ranks twice as many.
    """
    sizes = Sizes.of(model)
    if (
        sizes is None
        or parallelism.num_gpus == 1
        or parallelism.offload
        or config.modules_to_save != "none"
    ):
        return None
    if not sizes.adapted(config) <= set(sizes.matrices):
        return None
    return _traffic(config, parallelism, Shares.of(sizes, config))


def counted_traffic(model: ModelSpec, config: TrainConfig, measured: Measurement) -> Traffic:
    """The same of any model, from the parameters that a probe counted: on several GPUs, as the configuration says."""
    return _traffic(config, Parallelism.of(config), Shares.counted(model, config, measured))


def _traffic(config: TrainConfig, parallelism: Parallelism, shares: Shares) -> Traffic:
    if (
        parallelism.copies > 1
    ):  # each GPU adds up its own shard with those of the other copies, over the same link
        of_copy = _traffic(config, parallelism.of_copy, shares)
        return between_copies(of_copy, parallelism, 1 / parallelism.num_shards)
    strategy = parallelism.strategy
    sent = (parallelism.num_shards - 1) / parallelism.num_shards
    if strategy == "ddp":  # the gradients have the dtype of what is trained
        return Traffic(
            last_backward=2 * (2 if config.precision == "bf16_pure" else 4) * sent * shares.trained
        )
    sent *= 4 if config.precision == "fp32" else 2
    weights, gradients = sent * (shares.base + shares.adapters), sent * shares.trained
    first = sent * (shares.embedding + shares.layer)
    last = sent * (shares.embedding if config.method == "full" else shares.trained_layer)
    if strategy in FSDP2:
        again = 0.0 if strategy == "fsdp2_keep" else weights
        if parallelism.sync_each_batch:
            return Traffic(
                forward=weights, backward=again + gradients, ends=first + last, gradients=gradients
            )
        return Traffic(
            forward=weights,
            backward=again,
            last_backward=gradients,
            ends=first + last,
            gradients=gradients,
        )
    if strategy == "zero1":
        return Traffic(last_backward=gradients, after=gradients)
    if strategy == "zero2":
        return Traffic(backward=gradients, after=gradients)
    return Traffic(forward=weights, backward=weights + gradients, ends=first + last)


def between_copies(sent: Traffic, parallelism: Parallelism, slower: float) -> Traffic:
    """What is `sent` within a copy of the shards, and the sums of gradients between copies.

    Those of all gradients of a copy together take `slower` times as long as over the link of a GPU: where hosts have
    a copy each, as many times as the network is slower, which the GPUs of a host share. Their bytes are those that the
    link would send in that time. They pass as often as gradients are divided.
    """
    whole = sent.gradients * parallelism.num_shards / (parallelism.num_shards - 1)
    added = slower * 2 * (parallelism.copies - 1) / parallelism.copies * whole
    if parallelism.sync_each_batch:
        return replace(sent, backward=sent.backward + added)
    return replace(sent, last_backward=sent.last_backward + added)


def rank_step_time(
    step_time: StepTimeEstimate,
    config: TrainConfig,
    parallelism: Parallelism,
    sent: Traffic,
    *,
    accumulation: int,
    link_gb_s: float,
    slowest_link: float = SLOWEST_LINK,
) -> RankStepTime:
    """The time of a step of `accumulation` micro batches on each GPU, from that of one GPU of this kind.

    At the fast end of the interval all communication is hidden and costs nothing; at the slow end none is hidden, and
    the link is slow.
    """
    rest_s = step_time.rest_s / (parallelism.num_shards if parallelism.shards else 1)
    computed_s = accumulation * step_time.micro_s
    each_s, once_s = added_s(step_time.micro_s, config, sent, link_gb_s)
    step_s = computed_s + accumulation * each_s + rest_s + once_s
    communication_s = sent.of_step(accumulation) / (1e9 * link_gb_s)
    fast, slow = interval(1.0, step_time.error)
    slowest = max(slow * (computed_s + rest_s) + slowest_link * communication_s, slow * step_s)
    return RankStepTime(
        step_s=step_s,
        interval_s=(fast * (computed_s + rest_s), slowest),
        communication_s=communication_s,
        exposed_s=step_s - (1 + TOGETHER) * computed_s - rest_s,
    )


def slowest_link(task: Task, parallelism: Parallelism) -> float:
    """How many times slower than `Task.link_gb_s` the link may be: less if it was calibrated."""
    return SLOWEST_LINK if task.calibrated_link_gb_s(parallelism) is None else SLOWEST_MEASURED_LINK


def added_s(
    micro_s: float, config: TrainConfig, sent: Traffic, link_gb_s: float
) -> tuple[float, float]:
    """Seconds that other GPUs add: to each micro batch, whose computation takes `micro_s`, and once to a step."""
    bandwidth = 1e9 * link_gb_s
    share = forward_share(config)
    forward_s, backward_s = share * micro_s, (1 - share) * micro_s
    every, last = (
        _beside(forward_s, sent.forward / bandwidth)
        + _beside(backward_s, (sent.backward + more) / bandwidth)
        + sent.ends / bandwidth
        for more in (0.0, sent.last_backward)
    )
    return every - (1 - TOGETHER) * micro_s, last - every + sent.after / bandwidth


def forward_share(config: TrainConfig) -> float:
    """The share of a micro batch's arithmetic in its forward pass, which a recomputed layer does twice."""
    every = config.checkpoint_every
    again = 0.0 if every is None else 1 / every
    return 1 / ((3 if config.method == "full" else 2) + again)


def _beside(computed_s: float, sent_s: float) -> float:
    """Seconds of a pass that computes and sends at the same time."""
    return max(computed_s, sent_s) + HIDDEN_COSTS * min(computed_s, sent_s)

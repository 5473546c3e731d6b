"""The time of an optimizer step on several GPUs: one GPU's computation plus the communication.

The strategy, such as DDP or FSDP2, determines the bytes that a GPU sends. These bytes divided by
the bus bandwidth of the link are the time of communication. Communication and computation overlap,
and the longer of the two determines the time of a forward or backward pass. Communication that
overlaps with computation still costs time, because collectives take multiprocessors and bandwidth
from the kernels that run at the same time. Ranks also wait for the rank with the longest rows; the
caller adds this wait (`Workload.waiting_share`) to the time of computation.
"""

from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, ModelSpec
from autotune.catalog.model_sizes import Sizes
from autotune.core.parallelism import FSDP2, Parallelism
from autotune.core.probe_types import DryCount, Measurement
from autotune.core.train_config import TrainConfig
from autotune.prediction.sharded_memory import Shares
from autotune.prediction.step_time import StepTimeEstimate
from autotune.prediction.transfer import interval
from autotune.problem.task import Task

# When communication and computation overlap, they take the time of the longer one plus this
# fraction of the shorter one's time. The fraction was measured with a 7B model of 32 layers under
# FSDP2 on two H200s, whose steps were timed with and without communication. It was 0.40 for LoRA
# and 0.57 for full fine-tuning.
HIDDEN_COSTS = 0.5
# A link may be this many times slower than the catalogue says. An all-gather between two H200s
# reached 250 GB/s. The catalogue says 370 GB/s, which eight H200s reach.
SLOWEST_LINK = 1.5
# If the catalogue's bandwidth follows from the kind and width of the link by rule, the link may be
# this many times slower. Two GPUs of a desktop often share 16 lanes: two RTX 4090s in one exchanged
# 8.4 GB/s, and the rule says 15. Eight RTX PRO 6000s reached 22 GB/s with NCCL's default settings,
# and the rule says 43.
SLOWEST_RULE = 2.0
# A calibrated link may be this many times slower than its measured bandwidth.
SLOWEST_MEASURED_LINK = 1.1
# Several GPUs wait for each other, so the computation of a step takes longer on several GPUs than
# on one GPU, by this fraction. The true fraction is between 0 and twice this value. Steps of
# several strategies and models were timed on two and four H100s or H200s, and on one card that
# simulated a rank. Compared with the one card, the several cards took between 0.4 % less and 5.1 %
# more time.
TOGETHER = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in a step.

    Each micro batch sends `forward` bytes in its forward pass and `backward` bytes in its backward
    pass. Each micro batch also sends `ends` bytes before the first layer and after the last layer,
    when no computation overlaps. The backward pass of the last micro batch sends `last_backward`
    bytes more, and `after` bytes are sent after that pass. `gradients` is the part of all these
    bytes that FSDP2 sends to reduce and scatter gradients.
    """

    forward: float = 0.0
    backward: float = 0.0
    last_backward: float = 0.0
    after: float = 0.0
    ends: float = 0.0
    gradients: float = 0.0

    def step_bytes(self, accumulation: int) -> float:
        """Return the bytes of a step with `accumulation` micro batches."""
        each = self.forward + self.backward + self.ends
        return accumulation * each + self.last_backward + self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepTime:
    """The time of an optimizer step on several GPUs.

    `interval_s` contains the true step time in 80 % of cases.

    `communication_s` is the time of all collectives. `exposed_s` is the time that communication
    adds to the step, because it does not overlap with computation or slows the computation down.
    """

    step_s: float
    interval_s: tuple[float, float]
    communication_s: float
    exposed_s: float


def traffic(model: ModelSpec, config: TrainConfig, parallelism: Parallelism) -> Traffic | None:
    """Return the bytes that a rank sends in a step.

    The result is None for one GPU, and if no formula covers the model or the modules to train. The
    result is also None if the model is offloaded: `host_exchange` has the bytes that offloading
    adds. On N GPUs, an all-gather or a reduce-scatter of B bytes sends B * (N-1)/N bytes, and an
    all-reduce sends twice this number.
    """
    sizes = Sizes.of(model)
    if (
        sizes is None
        or parallelism.num_gpus == 1
        or parallelism.offload
        or config.modules_to_save != "none"
    ):
        return None
    if not sizes.adapted(config) <= sizes.matrices.keys():
        return None
    return _traffic(config, parallelism, Shares.of(sizes, config))


def counted_traffic(
    model: ModelSpec,
    config: TrainConfig,
    measured: Measurement | DryCount,
    parallelism: Parallelism | None = None,
) -> Traffic:
    """Return the bytes that a rank sends in a step, for any model.

    The bytes are computed from the numbers of parameters that a probe counted. `parallelism`
    replaces the parallelism in the configuration.
    """
    shares = Shares.from_measurement(model, config, measured)
    return _traffic(config, parallelism or Parallelism.of(config), shares)


def _traffic(config: TrainConfig, parallelism: Parallelism, shares: Shares) -> Traffic:
    # If there are several copies of the model, each GPU also all-reduces its shard of the gradients
    # with the GPUs that hold the same shard in the other copies. The all-reduce uses the same link.
    if parallelism.copies > 1:
        copy_traffic = _traffic(config, parallelism.single_copy, shares)
        return add_gradient_all_reduce(copy_traffic, parallelism, 1 / parallelism.num_shards)
    strategy = parallelism.strategy
    sent = (parallelism.num_shards - 1) / parallelism.num_shards
    if strategy == "ddp":
        gradient_bytes = 2 if config.precision == "bf16_pure" else 4  # as the trained parameters
        return Traffic(last_backward=2 * gradient_bytes * sent * shares.trained)
    width = 2 if config.precision == "fp32" else 1  # of parameters, compared with 16 bits
    weights = sent * width * (shares.base_bytes + 2 * shares.adapters)
    layer = sent * width * shares.layer_bytes
    sent *= 2 * width
    gradients = sent * shares.trained
    first = sent * shares.embedding + layer
    last = sent * (shares.embedding if config.method == "full" else shares.trained_layer)

    if strategy in FSDP2:
        regathered = 0.0 if strategy == "fsdp2_keep" else weights
        if parallelism.sync_each_batch:
            return Traffic(
                forward=weights,
                backward=regathered + gradients,
                ends=first + last,
                gradients=gradients,
            )
        return Traffic(
            forward=weights,
            backward=regathered,
            last_backward=gradients,
            ends=first + last,
            gradients=gradients,
        )

    if strategy == "zero1":
        return Traffic(last_backward=gradients, after=gradients)
    if strategy == "zero2":
        return Traffic(backward=gradients, after=gradients)
    return Traffic(forward=weights, backward=weights + gradients, ends=first + last)


def add_gradient_all_reduce(sent: Traffic, parallelism: Parallelism, slower: float) -> Traffic:
    """Return the traffic `sent` of one copy of the model plus the all-reduce between copies.

    The all-reduce of gradients between copies runs each time after a copy has scattered its
    gradients. The all-reduce takes `slower` times as long as an all-reduce of the whole gradients
    over the link of a single GPU. If each host has a copy, `slower` is the link's bandwidth divided
    by the network's bandwidth, because the GPUs of a host share the network. The time of the
    all-reduce is expressed as the number of bytes that the link would send in this time.
    """
    whole = sent.gradients * parallelism.num_shards / (parallelism.num_shards - 1)
    added_bytes = slower * 2 * (parallelism.copies - 1) / parallelism.copies * whole
    if parallelism.sync_each_batch:
        return replace(sent, backward=sent.backward + added_bytes)
    return replace(sent, last_backward=sent.last_backward + added_bytes)


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
    """Return the step time on several GPUs, from the step time of one GPU without communication.

    A step has `accumulation` micro batches. The lower end of the interval assumes that
    communication takes no extra time. The upper end assumes that no communication overlaps with
    computation, and that the link is `slowest_link` times slower than `link_gb_s`.
    """
    rest_s = step_time.rest_s / (parallelism.num_shards if parallelism.shards else 1)
    computed_s = accumulation * step_time.micro_s
    each_s, once_s = added_s(step_time.micro_s, config, sent, link_gb_s)
    step_s = computed_s + accumulation * each_s + rest_s + once_s
    communication_s = sent.step_bytes(accumulation) / (1e9 * link_gb_s)

    fast, slow = interval(1.0, step_time.error)
    slowest = max(slow * (computed_s + rest_s) + slowest_link * communication_s, slow * step_s)
    return RankStepTime(
        step_s=step_s,
        interval_s=(fast * (computed_s + rest_s), slowest),
        communication_s=communication_s,
        exposed_s=step_s - (1 + TOGETHER) * computed_s - rest_s,
    )


def slowest_link(task: Task, parallelism: Parallelism) -> float:
    """Return the largest possible ratio of `Task.link_gb_s` to the link's true bandwidth."""
    if task.calibrated_link_gb_s(parallelism) is not None:
        return SLOWEST_MEASURED_LINK
    return slowest_of_catalogue(task.device)


def slowest_of_catalogue(device: DeviceSpec) -> float:
    """Return the largest possible ratio of a device's `link_gb_s` to the link's true bandwidth."""
    return SLOWEST_RULE if device.link_by_rule else SLOWEST_LINK


def added_s(
    micro_s: float, config: TrainConfig, sent: Traffic, link_gb_s: float
) -> tuple[float, float]:
    """Return the seconds that several GPUs add to each micro batch, and once to each step.

    The GPUs communicate and wait for each other. `micro_s` is the time that one GPU needs to
    compute a micro batch.
    """
    bandwidth = 1e9 * link_gb_s
    share = forward_share(config)
    forward_s = share * micro_s
    backward_s = (1 - share) * micro_s

    every, last = (
        _overlapped_s(forward_s, sent.forward / bandwidth)
        + _overlapped_s(backward_s, (sent.backward + more) / bandwidth)
        + sent.ends / bandwidth
        for more in (0.0, sent.last_backward)
    )
    return every - (1 - TOGETHER) * micro_s, last - every + sent.after / bandwidth


def forward_share(config: TrainConfig) -> float:
    """Return the forward pass's share of a micro batch's arithmetic.

    The arithmetic includes the second forward pass of each recomputed layer.
    """
    every = config.checkpoint_every
    recomputed = 0.0 if every is None else 1 / every
    return 1 / ((3 if config.method == "full" else 2) + recomputed)


def _overlapped_s(computed_s: float, sent_s: float) -> float:
    """Return the seconds of a forward or backward pass that computes and sends at the same time."""
    return max(computed_s, sent_s) + HIDDEN_COSTS * min(computed_s, sent_s)

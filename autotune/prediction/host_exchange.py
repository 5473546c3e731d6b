"""The time that tensors in the host's memory cost: transfers over PCIe, and the optimizer's step.

A rank copies its shards of offloaded weights to the GPU before each pass, and its gradients to the
host. The optimizer of offloaded state runs on the host. How fast both are depends on the host,
which is unknown, so the time is an interval: its fast end is hidden behind the computation.
"""

from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, ModelSpec
from autotune.catalog.links import LANE_GB_S
from autotune.catalog.model_sizes import Sizes
from autotune.core.parallelism import FSDP2, Parallelism
from autotune.core.train_config import TrainConfig
from autotune.prediction.collectives import RankStepTime
from autotune.prediction.sharded_memory import ShardingSettings, Shares, offloads

# The generation of PCIe that connects GPUs of an architecture to the host, over 16 lanes
GENERATIONS = dict.fromkeys(("volta", "turing"), "PCIe 3.0")
GENERATIONS |= dict.fromkeys(("ampere", "ada"), "PCIe 4.0")
GENERATIONS |= dict.fromkeys(("hopper", "blackwell", "cdna3", "cdna4"), "PCIe 5.0")
LANES = 16
# Pinned memory reaches this many times NCCL's rate of the lanes. Memory that is not pinned, GPUs
# that share an upstream port, and slots of fewer lanes reach a fraction.
FASTEST, SLOWEST = 1.15, 0.25
# Parameters a second that AdamW updates on a host. ZeRO-Offload's kernel updated 1e10 parameters in
# 2.5 s on two server processors, and torch's in 18 s (arXiv 2101.06840, table 4). A rank's process
# may have only a few cores.
FASTEST_UPDATES, SLOWEST_UPDATES = 4e9, 0.3e9


@dataclass(frozen=True, slots=True, kw_only=True)
class HostExchange:
    """The bytes that a rank exchanges with the host, and the parameters that the host updates.

    `each` and `once` are the bytes that a rank copies in a micro batch and in a step. `updated` is
    the number of parameters that the host updates in a step.
    """

    each: float
    once: float
    updated: float

    def add_to(
        self, step: RankStepTime, device: DeviceSpec, accumulation: int
    ) -> RankStepTime | None:
        """Return the step time with the exchange, or None if the GPU's PCIe is unknown."""
        generation = GENERATIONS.get(device.arch)
        if generation is None:
            return None
        copied_gb = (accumulation * self.each + self.once) / 1e9
        lanes_gb_s = LANES * LANE_GB_S[generation]
        fast, slow = step.interval_s
        fast = max(fast, copied_gb / (FASTEST * lanes_gb_s)) + self.updated / FASTEST_UPDATES
        slow += copied_gb / (SLOWEST * lanes_gb_s) + self.updated / SLOWEST_UPDATES
        step_s = (fast * slow) ** 0.5
        exposed_s = max(step_s - step.step_s, 0.0) + step.exposed_s
        return replace(step, step_s=step_s, interval_s=(fast, slow), exposed_s=exposed_s)


def host_exchange(
    model: ModelSpec, config: TrainConfig, parallelism: Parallelism, settings: ShardingSettings
) -> HostExchange | None:
    """Return what a rank exchanges with the host, or None for a model without a formula."""
    weights, state = offloads(parallelism, settings)
    sizes = Sizes.of(model)
    if sizes is None:
        return None
    shares = Shares.of(sizes, config, settings)
    gpus = parallelism.num_shards
    in_16_bits = shares.base_bytes + 2.0 * shares.adapters
    gathered = in_16_bits * weights
    gradients = (4.0 if parallelism.strategy in FSDP2 else 2.0) * shares.trained * state
    if parallelism.strategy in FSDP2:
        # Trained parameters are copied in 32 bits, and cast on the GPU.
        gathered += 2.0 * shares.trained * (config.precision != "bf16_pure")
    passes = 1 if parallelism.strategy == "fsdp2_keep" else 2
    each_batch = parallelism.sync_each_batch or parallelism.strategy in ("zero2", "zero3")
    # Weights on the GPU get the updated values of a step from the host.
    updated = 0.0 if weights else 2.0 * shares.trained * state
    return HostExchange(
        each=(passes * gathered + gradients * each_batch) / gpus,
        once=(gradients * (not each_batch) + updated) / gpus,
        updated=shares.trained * state,
    )

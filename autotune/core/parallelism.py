"""The number of GPUs and the sharding strategy of a run, and the settings that they exclude."""

from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.core.untested import untested_in

# The strategies: `none` is for one GPU, and `ddp` keeps the whole model on each GPU. fsdp2 shards
# weights, gradients and optimizer state with torch's fully_shard. fsdp2_keep does the same, but
# keeps weights gathered after the forward pass. zero1 to zero3 are DeepSpeed's ZeRO stages.
FSDP2 = ("fsdp2", "fsdp2_keep")
ZERO = ("zero1", "zero2", "zero3")
BUILT_AS_SHARDS = (*FSDP2, "zero3")  # a model larger than a GPU is built as shards
PROBED = ("ddp", *FSDP2)  # the strategies that a search tries by default
STRATEGIES = ("none", "ddp", *FSDP2, *ZERO)
# Knobs that only have an effect on several GPUs
SHARDING_KNOBS = ("sharding", "copies", "sync_each_batch", "offload")
# FSDP2, as accelerate configures it, and DeepSpeed train in this precision. They compute in bf16
# without autocast, and keep fp32 master weights of all trained parameters. In contrast, bf16_mixed
# has larger activations, and bf16_pure has no master weights.
SHARDED_PRECISION = "bf16_sharded"
OF_ONE_GPU = tuple(knob for knob in KNOBS.values() if knob.active_when.get("num_gpus") == 1)
BITSANDBYTES = ("adamw_8bit", "paged_adamw_8bit", "lion_8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The number of GPUs, and the strategy that divides the training among them.

    With `sync_each_batch`, FSDP2 reduces and shards the gradients after each micro batch. `offload`
    keeps weights, gradients and optimizer state in the host's memory. With several `copies` of the
    model (HSDP), the GPUs form groups, usually one on each host. Each group holds all shards of one
    copy, and the groups sum their gradients. With `expert_parallel` above 1, this number of GPUs
    share out the experts of a mixture, and each GPU holds all other weights. autotune estimates the
    memory of such a GPU, but cannot train so.

    Raises ValueError for a combination that cannot run.
    """

    num_gpus: int = 1
    strategy: str = "none"
    sync_each_batch: bool = False
    offload: bool = False
    copies: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        if (
            isinstance(self.num_gpus, bool)
            or not isinstance(self.num_gpus, int)
            or self.num_gpus < 1
        ):
            raise ValueError(f"num_gpus is a positive integer, not {self.num_gpus!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        one_gpu = self.strategy == "none" or (self.num_gpus == 1 and self.strategy in ZERO)
        if (self.num_gpus == 1) is not one_gpu:
            raise ValueError(
                f"strategy {self.strategy} does not match num_gpus {self.num_gpus}: the strategy"
                " none is for one GPU, DeepSpeed's are for any number, and the others for several"
            )

        if self.strategy not in FSDP2 and (self.sync_each_batch or self.offload or self.copies > 1):
            raise ValueError(
                f"{self.strategy} does not support sync_each_batch, offload or copies above 1;"
                " fsdp2 and fsdp2_keep do"
            )
        if self.copies < 1 or self.num_gpus % self.copies or self.num_gpus == self.copies > 1:
            raise ValueError(
                f"{self.copies} copies of the model cannot divide"
                f" {self.num_gpus} GPUs into equal groups of two or more"
            )

        if self.expert_parallel > 1 and self.strategy != "ddp":
            raise ValueError(
                f"expert_parallel {self.expert_parallel} is only estimated with ddp, not with"
                f" {self.strategy}"
            )
        if self.expert_parallel < 1 or self.num_gpus % self.expert_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} does not divide {self.num_gpus} GPUs"
            )

    @classmethod
    @lru_cache(maxsize=2**14)  # more than the configurations of a plan
    def of(cls, config: TrainConfig) -> "Parallelism":
        """Return the parallelism that the configuration sets."""
        return cls(
            num_gpus=config.num_gpus,
            strategy=config.sharding,
            sync_each_batch=config.sync_each_batch,
            offload=config.offload,
            copies=config.copies,
        )

    @property
    def name(self) -> str:
        """The name of the strategy in tables."""
        name = self.strategy.replace("fsdp2", "hsdp") if self.copies > 1 else self.strategy
        if self.expert_parallel > 1:
            return f"{name}, experts over {self.expert_parallel} GPUs"
        synced = ["sync_each_batch"] if self.sync_each_batch else []
        return ", ".join([name, *synced, *(["offloaded"] if self.offload else [])])

    @property
    def num_shards(self) -> int:
        """The number of GPUs that share one copy of the model."""
        return self.num_gpus // self.copies

    @property
    def single_copy(self) -> "Parallelism":
        """The parallelism of the GPUs that share one copy of the model."""
        return replace(self, num_gpus=self.num_shards, copies=1)

    @property
    def shards(self) -> bool:
        """Whether each GPU holds only a shard of the weights, gradients or optimizer state."""
        return self.strategy in (*FSDP2, *ZERO)

    def precision(self, config: TrainConfig) -> str:
        """Return the name of the precision that a configuration has under this strategy."""
        if self.shards and config.precision == "bf16_mixed":
            return SHARDED_PRECISION
        return config.precision

    def refusal(self, config: TrainConfig) -> str | None:
        """Return the reason why this strategy cannot train the configuration, or None if it can."""
        if self.num_gpus > 1 and config.optimizer_in_backward:
            return (
                "an optimizer in the backward pass would step before the GPUs have reduced"
                " their gradients"
            )
        if self.num_gpus > 1:
            for knob in OF_ONE_GPU:
                if (value := getattr(config, knob.name)) != knob.default:
                    return f"{knob.name} {value} works only with {KNOBS['num_gpus'].label} 1"
        if self.expert_parallel > 1 and (
            config.compile != "none" or config.lora_kernels != "peft" or config.quantize_experts
        ):
            return (
                "divided experts are only estimated in 16 bits, without compiled layers and without"
                " grouped or joined adapters"
            )
        if not self.shards:
            return None

        for pair in untested_in("sharding", self.strategy):
            if (value := getattr(config, pair.setting)) in pair.values:
                return pair.sentence(self.strategy, value)

        if (
            self.strategy == "zero3"
            and config.loss == "chunked"
            and config.modules_to_save != "none"
        ):
            return "a chunked loss cannot run a copy of the output head that zero3 shards"
        return _fsdp2_refusal(config) if self.strategy in FSDP2 else None


def _fsdp2_refusal(config: TrainConfig) -> str | None:
    """Return the reason why FSDP2 cannot train a configuration, or None if it can.

    The failures are known from bitsandbytes issues 1945 and 1633, and from runs of transformers'
    Trainer on two ranks.
    """
    if config.quantize_experts:
        return "FSDP2 loses the scales of 4-bit experts"
    if config.quantization == "int8":
        return "FSDP2 loses the quantisation state of int8 weights"
    if config.optimizer in BITSANDBYTES:
        return (
            f"{config.optimizer} of bitsandbytes has no code for sharded tensors,"
            " and breaks the GPU's context"
        )
    if config.optimizer == "adafactor":
        return "Adafactor mixes whole and sharded tensors, and fails under FSDP2"
    return None

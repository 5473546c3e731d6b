"""On how many GPUs a configuration trains and what these share out: a checked value, and what cannot be trained so."""

from dataclasses import dataclass, replace

from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.core.untested import untested_in

# `none` is one GPU; `ddp` has the whole model on each. fsdp2 shards weights, gradients and optimizer state by torch's
# fully_shard, fsdp2_keep the same without resharding after the forward pass; zero1 to zero3 are DeepSpeed's stages.
FSDP2 = ("fsdp2", "fsdp2_keep")
ZERO = ("zero1", "zero2", "zero3")
PROBED = ("ddp", *FSDP2)  # what a search chooses among unasked
STRATEGIES = ("none", "ddp", *FSDP2, *ZERO)
# FSDP2 (as accelerate sets it) and DeepSpeed compute in bf16 without autocast, and keep fp32 masters of what is
# trained. That is neither bf16_mixed, whose activations are larger, nor bf16_pure, which has no masters.
SHARDED_PRECISION = "bf16_sharded"
OF_ONE_GPU = tuple(knob for knob in KNOBS.values() if knob.active_when.get("num_gpus") == 1)
BITSANDBYTES = ("adamw_8bit", "paged_adamw_8bit", "lion_8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The number of processes, one for each GPU, and the strategy by which they share out a training.

    Under FSDP2, `sync_each_batch` divides gradients after each micro batch, and `offload` keeps what lasts in the
    host's memory; the GPUs hold all shards in each of several `copies`, mostly one for each host, which add up their
    gradients (HSDP). Raises ValueError for what cannot run.
    """

    num_gpus: int = 1
    strategy: str = "none"
    sync_each_batch: bool = False
    offload: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        if (
            isinstance(self.num_gpus, bool)
            or not isinstance(self.num_gpus, int)
            or self.num_gpus < 1
        ):
            raise ValueError(f"num_gpus is a positive integer, not {self.num_gpus!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        if (self.num_gpus == 1) is not (self.strategy == "none"):
            raise ValueError(
                f"strategy {self.strategy} is not for {self.num_gpus} GPUs: one GPU has none, several have"
            )

        if self.strategy not in FSDP2 and (self.sync_each_batch or self.offload or self.copies > 1):
            raise ValueError(
                f"{self.strategy} divides no gradients after each micro batch, offloads and copies no shards"
            )
        if self.copies < 1 or self.num_gpus % self.copies or self.num_gpus == self.copies > 1:
            raise ValueError(
                f"{self.copies} copies of the shards are not on equally many of {self.num_gpus} GPUs, or two"
            )

    @classmethod
    def of(cls, config: TrainConfig) -> "Parallelism":
        """What the configuration says."""
        return cls(
            num_gpus=config.num_gpus,
            strategy=config.sharding,
            sync_each_batch=config.sync_each_batch,
            offload=config.offload,
            copies=config.copies,
        )

    @property
    def name(self) -> str:
        """The strategy as tables show it."""
        return self.strategy.replace("fsdp2", "hsdp") if self.copies > 1 else self.strategy

    @property
    def num_shards(self) -> int:
        """On how many GPUs what is divided is divided."""
        return self.num_gpus // self.copies

    @property
    def of_copy(self) -> "Parallelism":
        """How the GPUs of one copy share it out."""
        return replace(self, num_gpus=self.num_shards, copies=1)

    @property
    def shards(self) -> bool:
        """Whether some of the model's memory is divided among the GPUs."""
        return self.strategy in (*FSDP2, *ZERO)

    def precision(self, config: TrainConfig) -> str:
        """The name of what a configuration computes in under this strategy."""
        return (
            SHARDED_PRECISION
            if self.shards and config.precision == "bf16_mixed"
            else config.precision
        )

    def refusal(self, config: TrainConfig) -> str | None:
        """Why this strategy cannot train the configuration; None if it can."""
        if self.num_gpus > 1 and config.optimizer_in_backward:
            return "an optimizer in the backward pass would step before the GPUs have shared their gradients"
        if self.num_gpus > 1:
            for knob in OF_ONE_GPU:
                if (value := getattr(config, knob.name)) != knob.default:
                    return f"{knob.name} {value} works only with {KNOBS['num_gpus'].label} 1"
        if not self.shards:
            return None

        for pair in untested_in("sharding", self.strategy):
            if (value := getattr(config, pair.setting)) in pair.values:
                return pair.sentence(self.strategy, value)

        if self.strategy == "zero3" and config.loss == "chunked":
            return "the loss in chunks needs the whole head, which zero3 shards"
        return _fsdp2_refusal(config) if self.strategy in FSDP2 else None


def _fsdp2_refusal(config: TrainConfig) -> str | None:
    """Return the reason why FSDP2 cannot train a configuration; None if it can.

    bitsandbytes#1945, #1633 and transformers' Trainer on two ranks show these failures.
    """
    if config.quantization in ("nf4", "int8"):
        return f"FSDP2 loses the statistics of {config.quantization} weights"
    if config.optimizer in BITSANDBYTES:
        return f"{config.optimizer} of bitsandbytes has no code for sharded tensors, and breaks the GPU's context"
    if config.optimizer == "adafactor":
        return "Adafactor mixes whole and sharded tensors, and fails under FSDP2"
    return None

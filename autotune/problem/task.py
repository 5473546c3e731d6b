"""Task: a study with all names resolved, and what follows from it for a probe and for its result."""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.catalog import DeviceSpec, ModelSpec, Price, find_price
from autotune.core.memory_budget import nccl_of
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import ProbeRequest, World
from autotune.core.train_config import TrainConfig, digest_of
from autotune.problem.calibration import Calibration
from autotune.problem.constraints import Floors
from autotune.problem.run_options import RunOptions
from autotune.problem.search_space import SearchSpace
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.workload import Workload

# What guides give, with the rows of the usual trainers. It is measured first, and the winner is compared with it.
BASELINE = TrainConfig(padding="masked")
MOST_SLACK = 1.0  # the largest --slack


@dataclass(frozen=True, kw_only=True)  # without slots, which leave no room for what is cached
class Task:
    """What is tuned for what: the facts that every number of the study depends on.

    `measured_on` is a larger device of this machine that probes for `device` under a memory cap, and `carried` how its
    speed transfers to `device`; both are None where the device itself probes. `calibration` is of either of the two, or
    of another card whose host is meant. In a fake `world` one device plays a rank of all: what they send each other is
    added to its times by formula. In any world so is waiting for the GPU with the longest rows. `within_hours` is the
    time that the full run may take. `example_gib` is the memory of an example card that a CPU stands for, and
    `peak_tflops` what the CPU reached in large products, since no data sheet has it.
    """

    study: str
    model: ModelSpec
    device: DeviceSpec
    price: Price | None
    workload: Workload
    floors: Floors
    space: SearchSpace
    trainer: str = "transformers"
    measured_on: DeviceSpec | None = None
    carried: SpeedTransfer | None = None
    run_options: RunOptions = RunOptions()  # noqa: RUF009 (frozen)
    calibration: Calibration | None = None
    world: World = World.REAL
    within_hours: float | None = None
    example_gib: float | None = None
    peak_tflops: float | None = None

    @property
    def numbers_of_gpus(self) -> tuple[int, ...]:
        """How many GPUs may share out a training, the fewest first."""
        return tuple(sorted(self.space.choices("num_gpus")))

    @property
    def plays_ranks(self) -> bool:
        """Whether one device probes for several."""
        return self.numbers_of_gpus[-1] > 1 and self.world is World.FAKE

    @property
    def probing_gpus(self) -> int:
        """How many GPUs a probe takes."""
        return 1 if self.plays_ranks else self.numbers_of_gpus[-1]

    def is_projected(self, config: TrainConfig) -> bool:
        """Whether its speed is that of other GPUs than what probes: of another kind, or of another number."""
        return self.measured_on is not None or self.carried is not None or self.is_played(config)

    def is_played(self, config: TrainConfig) -> bool:
        """Whether one device plays a rank of several that train this configuration."""
        return config.num_gpus > 1 and self.world is World.FAKE

    @property
    def search_price(self) -> Price | None:
        """The price of what probes, of all its GPUs together."""
        price = self.price if self.measured_on is None else find_price(self.measured_on.name)
        return price and price.of_gpus(self.probing_gpus)

    def score(self, config: TrainConfig, tokens_per_s: float, hours: float | None = None) -> float:
        """What the search maximizes for a configuration of this speed; `hours` of the run, where more than steps count.

        These are useful tokens per second: of each GPU, which is what a token costs turned upside down, where several
        numbers of GPUs are compared. Runs that miss the deadline score less than all that meet it, by more than any
        slack is worth, and among them the fastest is the best.
        """
        most = self.numbers_of_gpus[-1] if len(self.numbers_of_gpus) > 1 else 1
        if self.is_late(config, tokens_per_s, hours):
            return tokens_per_s / most / (1 + MOST_SLACK)
        return tokens_per_s / min(most, config.num_gpus)

    def is_late(self, config: TrainConfig, tokens_per_s: float, hours: float | None = None) -> bool:
        """Whether the full run, or its steps where `hours` are not known, takes longer than there is time for."""
        if self.within_hours is None:
            return False
        return (self.hours_of_steps(config, tokens_per_s) if hours is None else hours) > self.within_hours

    def hours_of_steps(self, config: TrainConfig, tokens_per_s: float) -> float:
        """The hours that all steps of the full run take at a speed, in useful tokens per second."""
        shape = self.workload.run_shape(config)
        return shape.num_steps * shape.useful_tokens_per_step / tokens_per_s / 3600

    def link_gb_s(self, parallelism: Parallelism) -> float | None:
        """The bus bandwidth between so many GPUs of one host: as calibrated, or else as the catalogue has it."""
        return self.calibrated_link_gb_s(parallelism) or self.device.link_gb_s

    def calibrated_link_gb_s(self, parallelism: Parallelism) -> float | None:
        """The calibrated bus bandwidth of these GPUs; None without a calibration of the device with this number."""
        calibration = self.calibration
        return calibration.bus_gb_s(parallelism) if calibration and calibration.device == self.device.name else None

    def request(
        self, config: TrainConfig, *, device: str, memory_gib: float, headroom: float, seed: int
    ) -> ProbeRequest:
        """The request for a probe of the whole model; `memory_gib` and `headroom` are cap and reserve of the budget.

        A played rank leaves room for NCCL, which it does without.
        """
        workload = self.workload
        if self.is_played(config) and self.device.kind != "cpu":
            memory_gib -= nccl_of(Parallelism.of(config))
        return ProbeRequest(
            config=config,
            model=self.model.config,
            weights=self.model.weights,
            device=device,
            trainer=self.trainer,
            objective=workload.objective,
            vision=workload.vision,
            micro_steps=workload.run_shape(config).probe_micro_steps,
            micro_batches=workload.micro_batches(config),
            trained_share=max(0.01, round(workload.lengths.trained_share, 2)),  # so that other data can reuse it
            memory_gib=memory_gib,
            headroom=headroom,
            seed=seed,
            profile=self.measured_on is not None,  # a projection needs to know what the device does
            flash=self.device.has_flash,
            world=self.world if self.is_played(config) else World.REAL,  # so that a GPU alone can answer again
        )

    @property
    def model_key(self) -> str:
        """A key of what is trained how: memory and depth learned from probes hold for all studies with the same key."""
        if self.workload.objective is not Objective.SFT:
            return digest_of([self.model.digest, self.trainer, self.workload.objective])
        if self.model.sees_images:
            images = [[(one.tokens, one.pixels) for one in row] for _, row in self.workload.pictured]
            return digest_of([self.model.digest, self.trainer, images, self.workload.vision])
        return self.model.digest if self.trainer == "transformers" else digest_of([self.model.digest, self.trainer])

    @cached_property
    def baselines(self) -> tuple[TrainConfig, ...]:
        """The reference configuration clipped to the space, then with smaller and smaller micro batches.

        On several GPUs by DDP, as far as the space has it, and then by FSDP2; on the fewest GPUs first.
        """
        return tuple(itertools.chain.from_iterable(map(self._baselines, self.numbers_of_gpus)))

    def _baselines(self, num_gpus: int) -> tuple[TrainConfig, ...]:
        wanted = BASELINE if "lora" in self.space.choices("method") else replace(BASELINE, method="full")
        first = self.space.config(self.space.clip(replace(wanted, num_gpus=num_gpus)))
        sizes = self.space.choices("micro_batch_size")
        smaller = sorted((size for size in sizes if size <= first.micro_batch_size), reverse=True)
        whole = tuple(replace(first, micro_batch_size=size) for size in smaller)
        # Where the whole model does not fit on each GPU, guides share it out.
        shared = "fsdp2" in self.space.choices("sharding") and first.sharding == "ddp"
        of_shards = (replace(config, sharding="fsdp2") for config in whole if shared)
        return (*whole, *(self.space.config(self.space.clip(config)) for config in of_shards))

"""Task: a study whose names are resolved to a model, a device, a dataset and so on."""

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

# The configuration that guides usually recommend, with the padding of the usual trainers. The study
# measures this configuration first, and compares the winner with it.
BASELINE = TrainConfig(padding="masked")
MOST_SLACK = 1.0  # the largest value of `slack`


@dataclass(frozen=True, kw_only=True)  # no slots, because cached properties need `__dict__`
class Task:
    """The facts that determine the numbers in a study's results.

    Args:
        measured_on: a larger device of this machine that runs the probes in place of `device`, with
            the memory of `device`; None if `device` itself runs the probes.
        carried: the conversion of speeds from `measured_on` to `device`; None if speeds are not
            converted.
        run_options: evaluations, checkpoints and reports of the full run.
        calibration: the calibration of `device`, of `measured_on`, or of another card in the same
            host.
        world: whether the other ranks of a probe are simulated (`fake`) or real. If they are
            simulated, the time of communication is added to the measured time. In both cases, the
            wait for the GPU with the longest rows is added. Formulas predict the communication and
            the wait.
        within_hours: the time limit of the full run.
        example_gib: the memory of a made-up card for demonstrations, if a CPU runs the probes in
            its place; otherwise None.
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

    @property
    def numbers_of_gpus(self) -> tuple[int, ...]:
        """The GPU counts to compare, ascending."""
        return tuple(sorted(self.space.choices("num_gpus")))

    @property
    def plays_ranks(self) -> bool:
        """Whether one device simulates a rank of several GPUs in some of the study's probes."""
        return self.numbers_of_gpus[-1] > 1 and self.world is World.FAKE

    @property
    def probing_gpus(self) -> int:
        """The number of GPUs that a probe uses."""
        return 1 if self.plays_ranks else self.numbers_of_gpus[-1]

    def is_projected(self, config: TrainConfig) -> bool:
        """Return whether the speed is predicted from probes on another kind or number of GPUs."""
        return self.measured_on is not None or self.carried is not None or self.is_simulated(config)

    def is_simulated(self, config: TrainConfig) -> bool:
        """Return whether one device simulates a rank of this configuration's several GPUs."""
        return config.num_gpus > 1 and self.world is World.FAKE

    @property
    def search_price(self) -> Price | None:
        """The total price of all GPUs that run probes."""
        price = self.price if self.measured_on is None else find_price(self.measured_on.name)
        return price and price.multiply(self.probing_gpus)

    def score(self, config: TrainConfig, tokens_per_s: float, hours: float | None = None) -> float:
        """Return the score of a configuration with this speed. The search maximizes the score.

        The score is the useful tokens per second. If several GPU counts are compared, the score is
        the speed per GPU, so that the lowest cost per token wins. A run that misses the deadline
        scores lower than every run that meets it. The gap is so large that no value of `slack` lets
        a late run win. Among late runs, the fastest has the best score. `hours` is the duration of
        the run. It is given if the run includes evaluations or checkpoints.
        """
        most = self.numbers_of_gpus[-1] if len(self.numbers_of_gpus) > 1 else 1
        if self.is_late(config, tokens_per_s, hours):
            return tokens_per_s / most / (1 + MOST_SLACK)
        return tokens_per_s / min(most, config.num_gpus)

    def is_late(self, config: TrainConfig, tokens_per_s: float, hours: float | None = None) -> bool:
        """Return whether the full run misses the deadline.

        Without `hours`, the run's duration is the time of all its optimizer steps.
        """
        if self.within_hours is None:
            return False
        if hours is None:
            hours = self.hours_of_steps(config, tokens_per_s)
        return hours > self.within_hours

    def hours_of_steps(self, config: TrainConfig, tokens_per_s: float) -> float:
        """Return the hours of all steps of the full run at a speed in useful tokens per second."""
        shape = self.workload.run_shape(config)
        return shape.whole_steps() * shape.useful_tokens_per_step / tokens_per_s / 3600

    def link_gb_s(self, parallelism: Parallelism) -> float | None:
        """Return the bus bandwidth between a host's GPUs, from the calibration or the catalogue."""
        by_catalogue = self.device.link_between(parallelism.num_gpus)
        return self.calibrated_link_gb_s(parallelism) or by_catalogue

    def is_link_by_rule(self, parallelism: Parallelism) -> bool:
        """Return whether `link_gb_s` follows from the data sheet, without a measurement."""
        return self.device.link_by_rule and self.calibrated_link_gb_s(parallelism) is None

    def calibrated_link_gb_s(self, parallelism: Parallelism) -> float | None:
        """Return the calibrated bus bandwidth of these GPUs.

        The result is None if no calibration measured this device with this number of GPUs.
        """
        calibration = self.calibration
        if calibration and calibration.device == self.device.name:
            return calibration.bus_gb_s(parallelism)
        return None

    def request(
        self, config: TrainConfig, *, device: str, memory_gib: float, headroom: float, seed: int
    ) -> ProbeRequest:
        """Return the request for a probe of the whole model.

        The probe may use `memory_gib`, but must leave the share `headroom` of this memory free. A
        simulated rank has no NCCL buffers, so the memory of these buffers is subtracted from
        `memory_gib`.
        """
        workload = self.workload
        if self.is_simulated(config) and self.device.kind != "cpu":
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
            # The share is rounded, so that studies of similar datasets can reuse the result of the
            # probe.
            trained_share=max(0.01, round(workload.lengths.trained_share, 2)),
            memory_gib=memory_gib,
            headroom=headroom,
            seed=seed,
            profile=self.measured_on is not None,  # a projection to another card needs a profile
            flash=self.device.has_flash,
            # For one GPU, `world` is always REAL, so that studies with and without simulated ranks
            # can reuse each other's results.
            world=self.world if self.is_simulated(config) else World.REAL,
        )

    @property
    def model_key(self) -> str:
        """A key of the model, the trainer and the objective.

        All studies with the same key can reuse the memory that a probe measured, and all results of
        a probe with only a few of the model's layers.
        """
        if self.workload.objective is not Objective.SFT:
            return digest_of([self.model.digest, self.trainer, self.workload.objective])
        if self.workload.pictured:
            images = [
                [(one.tokens, one.pixels) for one in row] for _, row in self.workload.pictured
            ]
            return digest_of([self.model.digest, self.trainer, images, self.workload.vision])
        if self.trainer == "transformers":
            return self.model.digest
        return digest_of([self.model.digest, self.trainer])

    @cached_property
    def baselines(self) -> tuple[TrainConfig, ...]:
        """The configurations to try as the baseline, the nearest to BASELINE first.

        The following configurations have smaller and smaller micro batches. The smallest GPU count
        comes first. On several GPUs, DDP comes before FSDP2, if the space has both.
        """
        return tuple(itertools.chain.from_iterable(map(self._baselines, self.numbers_of_gpus)))

    def _baselines(self, num_gpus: int) -> tuple[TrainConfig, ...]:
        wanted = (
            BASELINE if "lora" in self.space.choices("method") else replace(BASELINE, method="full")
        )
        first = self.space.config(self.space.clip(replace(wanted, num_gpus=num_gpus)))
        sizes = self.space.choices("micro_batch_size")
        smaller = sorted((size for size in sizes if size <= first.micro_batch_size), reverse=True)
        whole = tuple(replace(first, micro_batch_size=size) for size in smaller)
        # Guides recommend sharding if the whole model does not fit on each GPU, so FSDP2 follows
        # DDP.
        shards = "fsdp2" in self.space.choices("sharding") and first.sharding == "ddp"
        sharded = (replace(config, sharding="fsdp2") for config in whole if shards)
        return (*whole, *(self.space.config(self.space.clip(config)) for config in sharded))

"""Task: a study with all names resolved, and what follows from it for a probe and for its result."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, ModelSpec, Price, find_price
from autotune.core.probe_types import Measurement, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig, digest_of
from autotune.prediction.transfer import SpeedTransfer
from autotune.problem.constraints import Floors
from autotune.problem.performance import Performance, performance, score
from autotune.problem.run_options import RunOptions
from autotune.problem.search_space import SearchSpace
from autotune.problem.workload import Workload

BASELINE = TrainConfig()  # what guides give: it is measured first, and the winner is compared with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is tuned for what: the facts that every number of the study depends on.

    `measured_on` is a larger device of this machine that probes for `device` under a memory cap, and `carried` its
    speed's transfer to `device`; both are None where the device itself probes.
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

    @property
    def search_price(self) -> Price | None:
        """The price of the device that probes."""
        return self.price if self.measured_on is None else find_price(self.measured_on.name)

    def performance(self, config: TrainConfig, measurements: Sequence[Measurement]) -> Performance:
        """The performance of the full run on the device; projected where another device measured."""
        # With an fp8 base some of the arithmetic runs at twice the rate, so that no single peak applies.
        peak = None if config.quantization == "fp8" else self.device.bf16_tflops or self.device.fp16_tflops
        speed = performance(
            config,
            measurements,
            self.workload,
            flops_per_token=self.model.flops_per_token(config.method, self.workload.attended(config)),
            peak_tflops=peak,
        )
        return speed if self.carried is None else speed.transferred(self.carried)

    def score(self, result: ProbeResult) -> float | None:
        """Useful tokens per second of the full run on the device; None where the probe gave no measurement."""
        speed = score(result, self.workload)
        return speed if speed is None or self.carried is None else speed * self.carried.ratio

    def request(
        self, config: TrainConfig, *, device: str, memory_gib: float, headroom: float, seed: int
    ) -> ProbeRequest:
        """The request for a probe of the whole model; `memory_gib` and `headroom` are cap and reserve of the budget."""
        workload = self.workload
        return ProbeRequest(
            config=config,
            model=self.model.config,
            weights=self.model.weights,
            device=device,
            trainer=self.trainer,
            micro_steps=workload.run_shape(config).probe_micro_steps,
            micro_batches=workload.micro_batches(config),
            trained_share=max(0.01, round(workload.lengths.trained_share, 2)),  # so that other data can reuse it
            memory_gib=memory_gib,
            headroom=headroom,
            seed=seed,
        )

    @property
    def model_key(self) -> str:
        """A key of model and trainer: memory and depth learned from probes hold for all studies with the same key."""
        return self.model.digest if self.trainer == "transformers" else digest_of([self.model.digest, self.trainer])

    def baselines(self) -> list[TrainConfig]:
        """The reference configuration clipped to the space, then with smaller and smaller micro batches."""
        wanted = BASELINE if "lora" in self.space.choices("method") else replace(BASELINE, method="full")
        first = self.space.config(self.space.clip(wanted))
        sizes = self.space.choices("micro_batch_size")
        smaller = sorted((size for size in sizes if size <= first.micro_batch_size), reverse=True)
        return [replace(first, micro_batch_size=size) for size in smaller]

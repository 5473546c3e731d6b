"""Subject: what is tuned for what, and how a measurement is read as the speed of the full run on the target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.catalog import DeviceSpec, ModelSpec, Price, find_price
from autotune.core.probe_types import Measurement, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig, digest_of
from autotune.prediction.transfer import SpeedTransfer
from autotune.problem.constraints import Floors
from autotune.problem.performance import Performance, performance, score
from autotune.problem.search_space import SearchSpace
from autotune.problem.workload import Workload

# The configuration that guides give: it is measured first, and what the winner is compared with.
BASELINE = TrainConfig(
    method="lora",
    micro_batch_size=8,
    seq_len=1024,
    lora_rank=16,
    optimizer="adamw_torch_fused",
    precision="bf16_mixed",
    checkpointing="full",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is tuned for what: the facts that every number of the study depends on."""

    study: str
    model: ModelSpec
    device: DeviceSpec
    price: Price | None
    workload: Workload
    floors: Floors
    space: SearchSpace
    trainer: str = "transformers"
    measured_on: DeviceSpec | None = None  # a larger card, under a cap, that stands in for the device
    carried: SpeedTransfer | None = None  # how much faster the device is than that

    @property
    def search_price(self) -> Price | None:
        """Of the card that probes."""
        return self.price if self.measured_on is None else find_price(self.measured_on.name)

    def performance(self, config: TrainConfig, measurements: Sequence[Measurement]) -> Performance:
        """What the full run will do on the device; projected where another card measured."""
        # With an fp8 base part of the arithmetic is at twice the rate: no one peak is its measure.
        peak = None if config.quantization == "fp8" else self.device.bf16_tflops or self.device.fp16_tflops
        found = performance(
            config,
            list(measurements),
            self.workload,
            flops_per_token=self.model.flops_per_token(config.method, config.seq_len),
            peak_tflops=peak,
        )
        return found if self.carried is None else found.carried(self.carried)

    def score(self, result: ProbeResult) -> float | None:
        """Useful tokens a second of the full run; None where there is no number."""
        found = score(result, self.workload)
        return found if found is None or self.carried is None else found * self.carried.ratio

    def request(
        self, config: TrainConfig, *, device: str, memory_gib: float, headroom: float, seed: int
    ) -> ProbeRequest:
        """What a probe of the whole model is asked: two micro batches a step, of rows like the workload's."""
        workload = self.workload
        # TRL pads to the longest row of a batch, and packs in its own way: its rows are full.
        rows = workload.rows(config) if self.trainer == "transformers" else ()
        return ProbeRequest(
            config=config,
            model=self.model.config,
            weights=self.model.weights,
            device=device,
            trainer=self.trainer,
            micro_steps=workload.run_shape(config).probe_micro_steps,
            rows=rows,
            min_timed_micros=max(2, math.ceil(len(rows) / config.micro_batch_size)) if config.packing else 2,
            memory_gib=memory_gib,
            headroom=headroom,
            seed=seed,
        )

    @property
    def kin(self) -> str:
        """Whose probes tell of this study's: those of the model, in the same trainer."""
        return self.model.digest if self.trainer == "transformers" else digest_of([self.model.digest, self.trainer])

    def baselines(self) -> list[TrainConfig]:
        """The reference configuration clipped to the space, then with its micro batch halved, as a person would."""
        methods = knob.choices() if (knob := self.space.knob("method")) else ("lora",)
        wanted = BASELINE if "lora" in methods else replace(BASELINE, method="full")
        first = self.space.config(self.space.clip(wanted))
        sizes = knob.choices() if (knob := self.space.knob("micro_batch_size")) else (first.micro_batch_size,)
        smaller = sorted((size for size in sizes if size <= first.micro_batch_size), reverse=True)
        return [replace(first, micro_batch_size=size) for size in smaller]

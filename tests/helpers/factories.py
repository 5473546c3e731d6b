"""Values that several test files need: a measurement, a probe result, a whole study summary."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.micro_profile import (
    KernelClass,
    KernelTotal,
    MicroBatchProfile,
    Part,
    ProfiledWork,
    Stage,
)
from autotune.core.probe_types import (
    DeviceRates,
    Fingerprint,
    Measurement,
    OomDetail,
    Outcome,
    Phase,
    ProbeResult,
    Rung,
    Telemetry,
)
from autotune.core.train_config import TrainConfig
from autotune.planning.more_gpus import project_gpu_counts
from autotune.problem.calibration import Calibration
from autotune.problem.performance import performance
from autotune.problem.run_cost import TABLE_EXAMPLES, project
from autotune.problem.workload import Workload
from autotune.study.selection import Selection
from autotune.study.summary import Candidate, Recipe, StudySummary, TrialRecord

FINGERPRINT = Fingerprint(
    device="NVIDIA H200",
    compute_capability="9.0",
    device_memory_gib=139.8,
    driver="580.159.04",
    cuda="13.0",
    python="3.12.3",
    packages={"torch": "2.11.0", "transformers": "5.17.0", "peft": "0.21.2"},
    allocator="expandable_segments:True",
)


# The config of a model that is built and trained in milliseconds. Add `model_type` and the number
# of layers.
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "pad_token_id": 0,
}


def calibration(
    device: str = "a10",
    *,
    products: dict[str, dict[int, float]] | None = None,
    copy_gb_s: float = 500.0,
    compute_capability: str | None = "8.6",
    **changes: Any,
) -> Calibration:
    """The calibration of an A10, or of another card with the same rates."""
    products = products or {
        "bf16": {1024: 30.0, 2048: 50.0, 4096: 65.0, 8192: 70.0},
        "fp32": {1024: 9.0},
    }
    values: dict[str, Any] = {
        "device": device,
        "fingerprint": replace(
            FINGERPRINT, device="NVIDIA A10", compute_capability=compute_capability
        ),
        "rates": DeviceRates(products=products, copy_gb_s=copy_gb_s, link_gb_s=24.0, launch_us=4.0),
        "layer_ms": 8.0,
        "reference": 1.0,
        "processor": "a processor",
        "cores": 16.0,
        "memory_gib": 64.0,
        "disk_mb_s": 900.0,
        "day": date(2026, 11, 22),
    }
    return Calibration(**values | changes)


PROFILE = MicroBatchProfile(
    on_gpu=True,
    rows=4,
    length=2048,
    micro_s=0.2,
    profiled_s=0.3,
    busy_s=0.19,
    num_kernels=9,
    work=(
        ProfiledWork(
            part=Part.MLP, stage=Stage.FORWARD, kind=KernelClass.PRODUCTS, seconds=0.19, count=9
        ),
        ProfiledWork(
            part=None, stage=Stage.OPTIMIZER, kind=KernelClass.OPTIMIZER, seconds=0.01, count=1
        ),
    ),
    longest=(
        KernelTotal(
            name="triton_poi_fused_add_0",
            kind=KernelClass.FUSED,
            seconds=0.1,
            count=2,
            fuses=("add",),
        ),
    ),
    loader_rows_per_s=1000.0,
)


def measurement(micro_s: float = 0.5, peak_gib: float = 20.0, **changes: Any) -> Measurement:
    base = Measurement(
        step_s=(2 * micro_s + 0.02, 2 * micro_s + 0.021, 2 * micro_s + 0.019),
        micro_step_s=(micro_s, micro_s, micro_s),
        rest_s=(0.02, 0.021, 0.019),
        micro_steps=2,
        phase_s={
            Phase.FORWARD: micro_s * 0.3,
            Phase.BACKWARD: micro_s * 0.7,
            Phase.OPTIMIZER: 0.01,
        },
        phase_peak_gib={
            Phase.FORWARD: peak_gib * 0.9,
            Phase.BACKWARD: peak_gib,
            Phase.OPTIMIZER: peak_gib * 0.7,
        },
        model_gib=13.5,
        adapters_gib=0.16,
        gradients_gib=0.16,
        optimizer_gib=0.32,
        peak_allocated_gib=peak_gib,
        peak_reserved_gib=peak_gib * 1.02,
        limit_gib=132.0,
        context_gib=0.5,
        loss_first=10.5,
        loss_last=10.4,
        trainable_params=41_943_040,
        total_params=7_289_966_592,
        telemetry=Telemetry(
            utilization=0.99, power_w=650.0, energy_j=2000.0, temperature_c=55.0, num_samples=10
        ),
    )
    return replace(base, **changes)


def result(
    config: TrainConfig | None = None, outcome: Outcome = Outcome.OK, **changes: Any
) -> ProbeResult:
    """A probe result. OK results have a measurement, OOM results have their detail."""
    values: dict[str, Any] = {
        "request_digest": "0" * 12,
        "rung": Rung.FULL,
        "seconds": {"total": 3.0},
    }
    if outcome is Outcome.OK:
        values["measurement"] = measurement()
    if outcome is Outcome.OOM:
        values |= {
            "phase": Phase.BACKWARD,
            "reason": "out of memory in backward",
            "oom": oom_detail(),
        }
    return ProbeResult(config=config or TrainConfig(), outcome=outcome, **(values | changes))


def add_measured(selection: Selection, config: TrainConfig, measurement: Measurement) -> None:
    """Add the measurement of a whole model, without start-up times."""
    selection.add_result(result(config, measurement=measurement, seconds={}))


def oom_detail() -> OomDetail:
    return OomDetail(
        phase=Phase.BACKWARD,
        requested_gib=2.0,
        allocated_gib=131.0,
        reserved_gib=131.9,
        limit_gib=132.0,
        terms_gib={
            "weights": 13.5,
            "adapters": 0.2,
            "gradients": 0.2,
            "optimizer": 0.3,
            "activations": 108.8,
            "logits": 8.0,
        },
    )


def probes(rows: list[TrialRecord]) -> Iterator[ProbeResult]:
    """The stored probes of these trials, four seconds each, one after another.

    Refused trials have no times.
    """
    begun = datetime(2026, 11, 1, tzinfo=UTC)
    for row in rows:
        launched = row.outcome is not Outcome.REFUSED
        seconds = {"load": 0.4, "first_step": 1.5, "steady": 2.0, "cleanup": 0.1, "total": 4.0}
        started = (begun + timedelta(seconds=5 * row.number)).isoformat(timespec="milliseconds")
        yield result(
            row.config,
            row.outcome,
            rung=row.rung,
            seconds=seconds if launched else {},
            started_at=started if launched else None,
        )


def summary(
    *,
    model: str = "mistral-7b",
    device: str = "h200",
    study: str = "h200-mistral-7b",
    trials: int = 12,
) -> StudySummary:
    """A plausible finished study with fits, OOMs and refusals."""
    workload = Workload(examples=10_000)
    spec, gpu, price = (
        resolve_model(model),
        resolve_device(device),
        find_price(resolve_device(device).name),
    )

    def candidate(config: TrainConfig, micro_s: float, peak_gib: float) -> Candidate:
        measured = measurement(micro_s, peak_gib)
        flops = spec.flops_per_token(config.method, config.seq_len)
        speed = performance(
            config, [measured], workload, flops_per_token=flops, peak_tflops=gpu.bf16_tflops
        )
        cost = project(workload, config, speed, price, 650.0)
        return Candidate(config=config, performance=speed, measurement=measured, cost=cost)

    baseline = candidate(TrainConfig(), 1.02, 19.2)
    winner = candidate(
        TrainConfig(micro_batch_size=4, checkpointing="none", compile="per_layer", lora_rank=16),
        0.245,
        53.3,
    )
    rows = []
    for number in range(trials):
        config = TrainConfig(
            micro_batch_size=2 ** (number % 6),
            seq_len=(512, 1024, 2048)[number % 3],
            checkpointing=("none", "every_2", "full")[number % 3],
            lora_rank=(16, 32)[number % 2] + number // 6,
        )
        outcome = (Outcome.OK, Outcome.OK, Outcome.OOM, Outcome.OK, Outcome.REFUSED)[number % 5]
        ok = outcome is Outcome.OK
        rows.append(
            TrialRecord(
                number=number,
                config=config,
                outcome=outcome,
                rung=Rung.GATE if outcome is Outcome.REFUSED else Rung.FULL,
                reason=None
                if ok
                else "out of memory in backward"
                if outcome is Outcome.OOM
                else "larger than trial 2",
                tokens_per_second=8000.0 + 400 * number if ok else None,
                peak_reserved_gib=20.0 + number if ok else None,
                limit_gib=132.0,
                margin=-0.5 if ok else 0.02,
                oom=oom_detail() if outcome is Outcome.OOM else None,
                seconds=4.0,
                log=f"logs/trial-{number:04d}.log",
            )
        )
    recipe = Recipe(
        study=study,
        model=spec,
        device=gpu,
        price=price,
        workload=workload,
        winner=winner,
        baseline=baseline,
        reason="the cheapest above the floors; no more capable configuration costs at most 5% more",
        trainer="transformers",
        fingerprint=FINGERPRINT,
        by_examples=tuple(
            project(workload, winner.config, winner.performance, price, 650.0, examples=examples)
            for examples in TABLE_EXAMPLES
        ),
        cells=(winner, baseline),
        caveats=("nobody gave the length of an example: 1,024 tokens are assumed",),
    )
    return StudySummary(
        study=study,
        recipe=recipe,
        trials=tuple(rows),
        wall_seconds=max(75.0, 5.0 * trials),
        search_usd=0.07,
        probes=tuple(probes(rows)),
        scaling=project_gpu_counts(recipe),
    )

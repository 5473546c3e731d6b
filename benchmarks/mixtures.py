"""Measure the speed and the memory of mixtures of experts: whole optimizer steps of whole models
with random weights, under the cap of an 80 GB or a 24 GB GPU.

The configurations of one call are compared with each other: today's kernels for the adapters of
experts, and the best configuration without them. A study of the same model shows which share of the
best speed it finds. `--count` computes the memory of measured rows without a GPU.
"""

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

from bench import (
    Mode,
    Rows,
    fingerprint_of,
    finish,
    largest,
    run_program,
    run_study,
    scratch,
    table,
)

from autotune.catalog import resolve_device, resolve_model
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.probe_types import Outcome, ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryProber
from autotune.planning.counted_memory import shape_of
from autotune.planning.longest import Longest, verify
from autotune.probe.supervisor import WorkerProber
from autotune.problem.performance import step_time_s
from autotune.trainer.grouped_lora import FUSED, TRITON
from autotune.trainer.settings import PRODUCT_VARIABLE

QWEN, GPT_OSS = "qwen3-30b-a3b", "gpt-oss-20b"
ON_EXPERTS = {"lora_targets": "attention_experts", "lora_kernels": "grouped"}
FAST = {
    "micro_batch_size": 8,
    "seq_len": 1024,
    "checkpointing": "full",
    "compile": "per_layer",
    "loss": "chunked",
}
FOUR_BITS = {"quantization": "nf4", "double_quant": True, "quantize_experts": True}
SMALL = FOUR_BITS | {
    "lora_targets": "attention",
    "micro_batch_size": 1,
    "seq_len": 1024,
    "checkpointing": "full",
    "loss": "chunked",
}
BEFORE = {
    "lora_targets": "attention",
    "micro_batch_size": 2,
    "seq_len": 1024,
    "checkpointing": "none",
    "attention": "eager",
}


# The rank and the knobs of adapters, for the longest sequence in the memory of SMALL_GPU
SMALL_GPU, SMALL_GIB = "rtx-4090", 24.0
HEADROOM = 0.01  # the share of this memory that stays free
LONGEST: list[tuple[str, int, dict[str, Any]]] = [
    (QWEN, 16, {}),
    (GPT_OSS, 16, {}),
    (QWEN, 8, ON_EXPERTS | {"optimizer": "adamw_8bit"}),
]
FLEX = {"attention": "flex_attention"}
CONTEXT_GIB = 1.0  # more than CUDA's context takes on an H200


@dataclass(frozen=True)
class Case:
    """A configuration to measure.

    `group` names the rows that are compared, and `product` forces a way to compute grouped
    products.
    """

    group: str
    model: str
    knobs: dict[str, Any]
    product: str = ""
    memory_gib: float = 79.0
    headroom: float = 0.05

    @classmethod
    def within(cls, gib: float, group: str, model: str, knobs: dict[str, Any]) -> "Case":
        """Return a case whose tensors may take this many GiB, beside the CUDA context."""
        return cls(group, model, knobs, memory_gib=gib + CONTEXT_GIB, headroom=0.0)

    @property
    def request(self) -> ProbeRequest:
        """A probe of whole optimizer steps, each of one micro batch."""
        return ProbeRequest(
            config=TrainConfig(**self.knobs),
            model=resolve_model(self.model).config,
            memory_gib=self.memory_gib,
            headroom=self.headroom,
            micro_steps=1,
        )

    @property
    def key(self) -> dict[str, Any]:
        config = TrainConfig(**self.knobs)
        return {
            "group": self.group,
            "model": self.model,
            "config": config.label(),
            "product": self.product or TRITON,
        }


CASES = [
    Case("qwen", QWEN, ON_EXPERTS | FAST),
    Case("qwen", QWEN, ON_EXPERTS | FAST | {"micro_batch_size": 16}),
    Case("qwen nf4", QWEN, ON_EXPERTS | FAST | FOUR_BITS),
    Case("qwen nf4", QWEN, ON_EXPERTS | FAST | FOUR_BITS | {"micro_batch_size": 16}),
    Case("qwen", QWEN, ON_EXPERTS | FAST, product=FUSED),
    Case.within(19.0, "qwen attention", QWEN, SMALL | {"seq_len": 4096}),
    Case.within(
        21.0,
        "qwen experts",
        QWEN,
        SMALL | ON_EXPERTS | {"lora_rank": 8, "optimizer": "adamw_8bit"},
    ),
    Case.within(14.0, "gptoss 4-bit", GPT_OSS, SMALL | FLEX),
    Case("gptoss before", GPT_OSS, BEFORE),
    Case("gptoss before", GPT_OSS, BEFORE | {"compile": "per_layer", "loss": "chunked"}),
    *(
        Case("gptoss", GPT_OSS, ON_EXPERTS | FAST | FLEX | changes)
        for changes in ({}, {"micro_batch_size": 4, "checkpointing": "none"})
    ),
]


def run(args: argparse.Namespace) -> None:
    """Measure each case that has no row yet, and then a study.

    Cases of one way to compute grouped products share a worker.
    """
    rows = Rows.of(args)
    if args.count:
        add_counts(rows)
        finish(args, rows.fingerprint, rows.plain)
        return

    until = time.monotonic() + args.seconds
    for product in ("", FUSED):
        cases = [case for case in CASES if case.product == product and not rows.has(**case.key)]
        os.environ.pop(PRODUCT_VARIABLE, None)
        if product:
            os.environ[PRODUCT_VARIABLE] = product
        if not cases or time.monotonic() > until:
            continue
        with WorkerProber("cuda", scratch()) as prober:
            for case in cases:
                if time.monotonic() < until:
                    rows.add(measure(prober, case))
                    table(rows.all[-1:], ["model", "config", "tokens_per_s", "peak_gib"])

    os.environ.pop(PRODUCT_VARIABLE, None)
    if args.longest:
        with WorkerProber("cuda", scratch()) as prober:
            for name, rank, knobs in LONGEST:
                rows.add(longest(prober, name, rank, knobs))
                table(rows.all[-1:], ["model", "config", "tokens", "reserved_gib", "reason"])
    if args.budget and not rows.has(group="study"):
        rows.add(study(args.budget))
    finish(args, rows.fingerprint, rows.plain)


def measure(prober: WorkerProber, case: Case) -> dict[str, Any]:
    """Return the speed and the memory of a case, or the reason why it has none."""
    request = case.request
    result = prober.probe(request, prober.logs / "probe.log")
    row = case.key | {
        "outcome": result.outcome.value,
        "fingerprint": to_data(prober.fingerprint),
    }
    if result.outcome is not Outcome.OK or result.measurement is None:
        return row | {"reason": result.reason}

    step_s = step_time_s(result.measurement, 1)
    return row | {
        "step_s": step_s,
        "tokens_per_s": request.config.tokens / step_s,
        "peak_gib": result.measurement.peak_allocated_gib,
        "reserved_gib": result.measurement.peak_reserved_gib,
    }


def longest(prober: WorkerProber, name: str, rank: int, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return the longest sequence whose step fits the memory of a 24 GB GPU."""
    model = resolve_model(name)
    query = Longest(
        model=model,
        device=resolve_device(SMALL_GPU),
        limit_gib=memory_limit_gib(SMALL_GIB, HEADROOM, taken_gib=CONTEXT_GIB),
        headroom=HEADROOM,
        shape=shape_of(model),
        rank=rank,
        knobs=knobs,
    )
    found = verify(
        query,
        query.predict("qlora"),
        lambda request: prober.probe(request, prober.logs / "longest.log"),
        SMALL_GIB,
        timed_on="this GPU",
        most=2,
    )
    return {
        "group": "longest",
        "model": name,
        "config": TrainConfig(**found.config).label(),
        "tokens": found.tokens,
        "predicted_tokens": found.predicted_tokens,
        "reserved_gib": found.gpu_gib,
        "step_s": found.step_s,
        "reason": found.problem,
        "attempts": to_data(found.attempts),
        "fingerprint": to_data(prober.fingerprint),
    }


def add_counts(rows: Rows) -> None:
    """Add the memory that a dry probe counts, without a GPU, to the measured rows."""
    with DryProber(scratch(), shipped=False) as counter:
        for case in CASES:
            row = next((row for row in rows.all if row.items() >= case.key.items()), {})
            if "peak_gib" not in row or case.product:
                continue
            counted = counter.count(case.request).count
            if counted is not None:
                peak = counted.peak_allocated_gib
                row |= {"counted_gib": peak, "memory_error": peak / row["peak_gib"] - 1}


def study(budget: str) -> dict[str, Any]:
    """Search on this GPU, capped like an 80 GB GPU, and return the winner's speed."""
    options = ["--model", QWEN, "--memory-gib", "79", "--budget", budget]
    found = run_study(scratch(), *options)
    return {
        "group": "study",
        "model": QWEN,
        "config": TrainConfig(**found["winner"]["config"]).label(),
        "tokens_per_s": found["winner"]["performance"]["tokens_per_second"],
        "judged": found["trials"]["judged"],
        "caveats": found["caveats"],
        "fingerprint": fingerprint_of(found),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best speeds, the ratios of speeds, and the errors of memory."""

    def best(group: str, product: str = TRITON) -> float | None:
        speeds = [
            row["tokens_per_s"]
            for row in rows
            if row["group"] == group
            and row.get("product", TRITON) == product
            and row.get("tokens_per_s")
        ]
        return max(speeds, default=None)

    def ratio(one: float | None, other: float | None) -> float | None:
        return one / other if one and other else None

    forced = next((row for row in rows if row.get("product") == FUSED), {})
    same = [
        row["tokens_per_s"]
        for row in rows
        if row.get("product") == TRITON
        and row["config"] == forced.get("config")
        and "tokens_per_s" in row
    ]

    def gib(group: str) -> float | None:
        return max((row["reserved_gib"] for row in rows if row["group"] == group), default=None)

    longest_rows = [row for row in rows if row["group"] == "longest"]
    return {
        "qwen_tokens_per_s": best("qwen"),
        "qwen_nf4_tokens_per_s": best("qwen nf4"),
        "gptoss_tokens_per_s": best("gptoss"),
        "gptoss_over_before": ratio(best("gptoss"), best("gptoss before")),
        "found_share": ratio(best("study"), best("qwen")),
        "triton_over_fused": ratio(max(same, default=None), forced.get("tokens_per_s")),
        "qwen_attention_gib": gib("qwen attention"),
        "qwen_experts_gib": gib("qwen experts"),
        "gptoss_gib": gib("gptoss 4-bit"),
        "longest": {f"{row['model']} {row['config']}": row["tokens"] for row in longest_rows},
        "memory_error_max": largest(rows, "memory_error"),
    }


MODES = {
    "": Mode(
        run=run,
        result="mixtures",
        summarize=summarize,
        options={
            "--rows": None,
            "--seconds": {"type": float, "default": 300.0, "help": "start no case after this"},
            "--budget": {"default": "150s", "help": "of the study; '' runs none"},
            "--longest": {"action": "store_true", "help": "find the longest sequences in 24 GB"},
            "--count": {"action": "store_true", "help": "only add counted memory to the rows"},
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

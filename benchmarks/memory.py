"""Check the product's answers about memory limits: caps, the gate against OOM, and kinds of memory
segments.
"""

import argparse
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import (
    Mode,
    Rows,
    device_of,
    finish,
    load,
    measured,
    run_program,
    run_study,
    scratch,
    set_options,
    speed,
    table,
    worker,
)
from published import RUNS

from autotune.catalog import resolve_device, resolve_model
from autotune.core.other_trainer import OtherTrainer
from autotune.core.probe_types import Outcome, ProbeRequest, Rung
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import dry_count
from autotune.prediction.memory_formula import memory_breakdown
from autotune.probe.supervisor import WorkerProber
from autotune.problem.study_spec import make_spec
from autotune.study.evaluator import GATE_BAND, Evaluator
from autotune.study.storage.probe_store import ProbeStore

# --- cap

TARGET, HEADROOM, BAND = "a10", 0.05, 0.02
SUITE = Path(__file__).parent.parent / "studies" / "published" / "a10-mistral-7b.yaml"
AROUND: list[tuple[str, dict[str, Any]]] = [
    ("mistral-7b", {"micro_batch_size": 8, "seq_len": 1024}),
    ("mistral-7b", {"micro_batch_size": 16, "seq_len": 512, "loss": "chunked", "lora_rank": 64}),
    (
        "mistral-7b",
        {"micro_batch_size": 2, "seq_len": 512, "checkpointing": "none", "precision": "bf16_pure"},
    ),
    (
        "mistral-7b",
        {"micro_batch_size": 3, "seq_len": 1024, "quantization": "nf4", "checkpointing": "none"},
    ),
    ("llama-3.1-8b", {"micro_batch_size": 2, "seq_len": 1024, "optimizer": "adamw_8bit"}),
    ("phi-3-mini", {"micro_batch_size": 4, "seq_len": 512, "checkpointing": "none"}),
    ("phi-3-mini", {"micro_batch_size": 2, "seq_len": 2048, "checkpointing": "every_2"}),
]


def run_cap(args: argparse.Namespace) -> None:
    """Check whether a larger GPU with a memory cap gives the same outcomes as the smaller GPU that
    it emulates.

    Each configuration is probed twice: with the memory cap of an A10, as `autotune run --gpu a10`
    does, and without a cap. The memory reserved without a cap plus the CUDA context shows whether
    the configuration fits. If that sum differs from the limit by more than 2 %, the capped probe
    must give the same outcome. About half of the configurations are the published suite of the A10.
    The others need about the memory of an A10, according to the formula of `autotune plan`.
    """
    cap_gib = args.cap_gib or round(resolve_device(TARGET).usable_gib or 0.0, 2)
    spec = make_spec(SUITE, {})
    cases = [
        ("mistral-7b", spec.pins | case.knobs, case.published and case.published.outcome)
        for case in spec.configs
    ]
    cases += [(model, knobs, None) for model, knobs in AROUND]

    rows: list[dict[str, Any]] = []
    with worker(args.device) as prober:
        for model, knobs, published in cases:
            rows.append(
                probe_with_cap(prober, args, cap_gib, model, TrainConfig(**knobs))
                | {"published": published}
            )
            table(
                rows[-1:], ["model", "config", "needs_over_limit", "fits", "under_cap", "published"]
            )
        finish(args, prober.fingerprint, rows, cap_gib=cap_gib)


def summarize_cap(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts.

    A row within the band proves nothing, because its need without a cap implies no outcome.
    """
    beyond_band = [
        row
        for row in rows
        if row["needs_over_limit"] is None or abs(row["needs_over_limit"]) > BAND
    ]
    published = [row for row in rows if row["published"] is not None]
    return {
        "configs": len(rows),
        "verdicts": len(beyond_band),
        "disagreements": sum((row["under_cap"] == "ok") is not row["fits"] for row in beyond_band),
        "within_the_band": len(rows) - len(beyond_band),
        "published": len(published),
        "published_disagreements": sum(row["under_cap"] != row["published"] for row in published),
    }


def probe_with_cap(
    prober: WorkerProber, args: argparse.Namespace, cap_gib: float, model: str, config: TrainConfig
) -> dict[str, Any]:
    """Probe one configuration with and without the cap.

    Return the memory it needs and both outcomes as a row.
    """
    free, capped = (
        prober.probe(
            ProbeRequest(
                config=config,
                model=resolve_model(model).config,
                device=args.device,
                memory_gib=memory_gib,
                headroom=HEADROOM,
            ),
            prober.logs / "probe.log",
        )
        for memory_gib in (args.memory_gib, cap_gib)
    )
    row: dict[str, Any] = {
        "model": model,
        "config": config.label(),
        "under_cap": capped.outcome.value,
        "reason": capped.reason,
        "needs_gib": None,
        "needs_over_limit": None,
        "fits": False,
    }
    found = free.measurement
    if free.outcome is Outcome.OK and found is not None:
        assert found.context_gib is not None, "the memory of the CUDA context was not measured"
        needed_gib = found.peak_reserved_gib + found.context_gib + found.managed_gib
        over = needed_gib / (cap_gib * (1 - HEADROOM)) - 1
        row |= {"needs_gib": needed_gib, "needs_over_limit": over, "fits": over <= 0}
    return row


# --- advice

ADVICE = TrainConfig(micro_batch_size=8, seq_len=512, optimizer="paged_adamw_8bit")


def run_advice(args: argparse.Namespace) -> None:
    """Compare the winner of a study with the advice published for an A10, in the memory of a 24 GB
    GPU.

    Both run with a cap of 21.5 GiB on any GPU and are measured at full depth in one session: rows
    of 512 tokens, rank 16 and an unquantised base model. The advice recomputes every layer and uses
    micro batches of 8, paged 8-bit AdamW and autocast. It also says that checkpointing cannot be
    switched off. This is true only of such micro batches.
    """
    options = [
        "--gpu",
        args.gpu,
        "--model",
        args.model,
        "--memory-gib",
        str(args.memory_gib),
        "--budget",
        args.budget,
    ]
    options += [
        "--space",
        "lora",
        "--tokens-per-example",
        "512",
        *set_options({"seq_len": 512, "lora_rank": 16}),
    ]
    winner = run_study(scratch(), *options, "--out", "study")["winner"]
    configs = {
        "the advice": ADVICE,
        "the advice without checkpointing": replace(ADVICE, checkpointing="none"),
        "the study's winner": TrainConfig(**winner["config"]),
    }

    model, device = resolve_model(args.model), resolve_device(args.gpu)
    with worker(device_of(device)) as prober:
        rows = [
            {"who": name, **speed(prober, model, device, config, args.memory_gib)}
            for name, config in configs.items()
        ]
        columns = ["who", "config", "outcome", "tokens_per_s", "peak_reserved_gib"]
        finish(
            args,
            prober.fingerprint,
            rows,
            columns,
            study_tokens_per_s=winner["performance"]["tokens_per_second"],
        )


def summarize_advice(rows: list[dict[str, Any]]) -> dict[str, Any]:
    advice, best = rows[0].get("tokens_per_s"), rows[-1].get("tokens_per_s")
    return {
        "winner_tokens_per_s": best,
        "advice_tokens_per_s": advice,
        "ratio": best / advice if best and advice else None,
        "winner": rows[-1]["config"],
    }


# --- gate

CAPS_GIB = (22.0, 40.0, 80.0)
GRID = {
    "micro_batch_size": (1, 2, 4, 8, 16),
    "seq_len": (1024, 2048),
    "checkpointing": ("none", "every_2", "full"),
    "lora_rank": (16,),
}
EXTRA = [
    {"lora_rank": 64, "micro_batch_size": size, "seq_len": 1024, "checkpointing": "none"}
    for size in (2, 4, 8)
]


def run_gate(args: argparse.Namespace) -> None:
    """Check that the memory gate and the shallow probes stop every configuration that does not fit,
    and no other.

    The evaluator gets a grid of configurations around the limit, with memory caps of 22, 40 and 80
    GiB. Each cap has its own probe store, so it starts without knowledge. The reference is the
    memory that a full-depth probe reserves without a cap. If it is within a tenth of the limit, a
    full-depth probe with the cap decides.
    """
    until = time.monotonic() + args.seconds
    stored = Rows.of(args)
    with worker(args.device) as prober:
        for config in configs():
            if not stored.has(truth=config.label()):
                stored.add(truth(prober, args, config))
        for cap in args.caps:
            if time.monotonic() < until and not stored.has(cap_gib=cap):
                for row in evaluate_under_cap(prober, args, cap, stored):
                    stored.add(row)
                    table(
                        [row], ["cap_gib", "config", "needs_over_limit", "fits", "rung", "outcome"]
                    )
        finish(args, prober.fingerprint, [row for row in stored.all if "cap_gib" in row])


def summarize_gate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "configs": len(rows),
        # Stopped although the configuration fits by more than the uncertainty band.
        "false_refusals": sum(
            row["stopped"] and row["fits"] and not row["in_band"] for row in rows
        ),
        "missed_ooms": sum(not row["fits"] and not row["stopped"] for row in rows),
        "stopped_within_the_band_though_it_fits": sum(
            row["stopped"] and row["fits"] and row["in_band"] for row in rows
        ),
        "do_not_fit": sum(not row["fits"] for row in rows),
        "by_rung_and_outcome": dict(Counter(f"{row['rung']} {row['outcome']}" for row in rows)),
    }


NEAR_LIMIT = 0.1


def configs() -> list[TrainConfig]:
    grid = (dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values()))
    return [TrainConfig(**settings) for settings in (*grid, *EXTRA)]


def request_of(args: argparse.Namespace, config: TrainConfig, memory_gib: float) -> ProbeRequest:
    """Return the shortest probe, because only its memory counts."""
    model = resolve_model(args.model).config
    return ProbeRequest(
        config=config, model=model, device=args.device, memory_gib=memory_gib, min_timed_s=0.0
    )


def truth(prober: WorkerProber, args: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    """Measure the memory that the whole model reserves without a cap, and the memory of its CUDA
    context.
    """
    result = prober.probe(request_of(args, config, args.memory_gib), prober.logs / "truth.log")
    assert result.outcome in (Outcome.OK, Outcome.OOM), result.reason
    measurement = result.measurement if result.outcome is Outcome.OK else None
    return {
        "truth": config.label(),
        "reserved_gib": measurement.peak_reserved_gib if measurement else None,
        "context_gib": measurement.context_gib if measurement else 0.0,
    }


def evaluate_under_cap(
    prober: WorkerProber, args: argparse.Namespace, cap: float, stored: Rows
) -> Iterator[dict[str, Any]]:
    """Evaluate each configuration under one cap, in random order.

    Yield rows that compare outcome and reference.
    """
    model = resolve_model(args.model)
    store = ProbeStore(f"sqlite:///{prober.logs}/gate-{cap:g}.db")
    evaluator = Evaluator(
        prober,
        store,
        study="gate",
        logs=prober.logs,
        request=lambda config: request_of(args, config, cap),
        model=model.digest,
        shape=prober.describe(model.config),
    )
    references = {row["truth"]: row for row in stored.all if "truth" in row}
    everything = configs()
    for number, config in enumerate(random.Random(0).sample(everything, len(everything))):
        result = evaluator.evaluate(config, number).result
        assert result.outcome in (Outcome.OK, Outcome.OOM, Outcome.REFUSED), result.reason
        reference = references[config.label()]
        assert reference["context_gib"] is not None, (
            "this machine does not report the size of the CUDA context"
        )
        limit = cap * 0.95 - reference["context_gib"]
        over = None if reference["reserved_gib"] is None else reference["reserved_gib"] / limit - 1
        fits = over is not None and over <= 0
        if over is not None and abs(over) < NEAR_LIMIT and result.rung is not Rung.FULL:
            fits = (
                prober.probe(request_of(args, config, cap), prober.logs / "truth.log").outcome
                is Outcome.OK
            )
        elif result.rung is Rung.FULL:
            fits = result.outcome is Outcome.OK
        yield {
            "cap_gib": cap,
            "config": config.label(),
            "needs_over_limit": over,
            "fits": fits,
            "in_band": over is not None and abs(over) <= GATE_BAND,
            "stopped": result.rung is not Rung.FULL,
            "rung": result.rung.value,
            "outcome": result.outcome.value,
            "reason": result.reason,
        }
    store.close()


# --- allocator

LAYERS = 4
KEPT, RECOMPUTED = {"checkpointing": "none"}, {"checkpointing": "full"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2.5-0.5b", KEPT | {"micro_batch_size": 4}),
    ("qwen2.5-0.5b", RECOMPUTED | {"micro_batch_size": 8, "method": "full"}),
    ("mistral-7b", KEPT | {"micro_batch_size": 2}),
    ("mistral-7b", RECOMPUTED | {"micro_batch_size": 8}),
    ("mistral-7b", KEPT | {"micro_batch_size": 4, "loss": "chunked"}),
    ("mistral-7b", RECOMPUTED | {"micro_batch_size": 4, "quantization": "nf4"}),
    ("llama-3.2-1b", KEPT | {"micro_batch_size": 8, "method": "full"}),
    ("llama-3.2-1b", KEPT | {"micro_batch_size": 4, "compile": "per_layer"}),
    ("llama-3.2-1b", RECOMPUTED | {"micro_batch_size": 16, "seq_len": 2048}),
]
COLUMNS = ["model", "config", "expandable_gib", "fixed_gib", "planned_gib", "error"]
COLUMNS += ["counted_gib", "counted_error"]


def run_allocator(args: argparse.Namespace) -> None:
    """Compare the memory that a step reserves in expandable segments with its memory in fixed
    segments.

    Each configuration of four layers is probed twice by the same warm worker, with all memory of
    the GPU. An error is the reserved memory that the formula predicts for fixed segments, divided
    by the measurement, minus 1. The formula's `FIXED_SHARE` was chosen by these rows: each
    configuration holds at most the predicted memory. `counted_error` is the error of a dry probe,
    which repeats the requests of a step by the allocator's rules. These rows chose nothing of it.
    Further rows are whole models whose reserved memory others published (`published_2026.yaml`).
    """
    stored = Rows.of(args)
    measure_allocator(args, stored)
    rows = [compare_allocator(row) for row in stored.all]
    rows += [compare_reserved(row) for row in load(RUNS) if "reserved_gib" in row]
    finish(args, stored.fingerprint, rows, COLUMNS)


def measure_allocator(args: argparse.Namespace, stored: Rows) -> None:
    """Probe the cases that no stored row has."""
    until = time.monotonic() + args.seconds
    missing = [(name, knobs) for name, knobs in CASES if not stored.has(model=name, knobs=knobs)]
    with worker("cuda") as prober:
        for name, knobs in missing:
            if time.monotonic() < until:
                peaks = {
                    f"{kind}_gib": allocated_and_reserved(
                        prober, name, allocator_config(knobs, kind), args.memory_gib
                    )
                    for kind in ("expandable", "fixed")
                }
                stored.add(
                    {
                        "model": name,
                        "knobs": knobs,
                        **peaks,
                        "fingerprint": to_data(prober.fingerprint),
                    }
                )


def allocator_config(knobs: dict[str, Any], allocator: str) -> TrainConfig:
    return TrainConfig(**({"seq_len": 1024, "loss": "full", "allocator": allocator} | knobs))


def allocated_and_reserved(
    prober: WorkerProber, name: str, config: TrainConfig, memory_gib: float
) -> list[float]:
    """Return the allocated and the reserved GiB at the peak. Raises Failed."""
    found = measured(
        prober,
        ProbeRequest(
            config=config,
            model=resolve_model(name).config,
            device="cuda",
            memory_gib=memory_gib,
            headroom=0.0,
            micro_steps=2,
            min_timed_s=0.3,
            depth=LAYERS,
        ),
    )
    return [found.peak_allocated_gib, found.peak_reserved_gib]


def compare_allocator(row: dict[str, Any]) -> dict[str, Any]:
    """Add the prediction of the formula for fixed segments to a row."""
    model = resolve_model(row["model"])
    model = replace(model, params=None, config=model.config | {"num_hidden_layers": LAYERS})
    config = allocator_config(row["knobs"], "fixed")
    planned = memory_breakdown(model, config, 2)
    counted = dry_count(model, config, 2, depth=LAYERS).count
    assert planned is not None and counted is not None and counted.reserved_gib is not None
    return row | {
        "config": config.label(),
        "planned_gib": planned.peak_reserved_gib,
        "error": planned.peak_reserved_gib / row["fixed_gib"][1] - 1,
        "counted_gib": counted.reserved_gib,
        "counted_error": counted.reserved_gib / row["fixed_gib"][1] - 1,
    }


def compare_reserved(row: dict[str, Any]) -> dict[str, Any]:
    """Return a published run with its reserved memory, counted as its trainer computes a step."""
    model = resolve_model(row["model"]).with_overrides(row.get("model_overrides", {}))
    config = TrainConfig(**row["config"])
    trainer = OtherTrainer(**row["trainer"])
    counted = dry_count(model, config, 1, depth=model.num_layers, other=trainer).count
    assert counted is not None and counted.reserved_gib is not None
    return {
        "source": row["source"],
        "model": row["model"],
        "config": config.label(),
        "published_gib": row["reserved_gib"],
        "counted_gib": counted.reserved_gib,
        "counted_error": counted.reserved_gib / row["reserved_gib"] - 1,
    }


def summarize_allocator(rows: list[dict[str, Any]]) -> dict[str, Any]:
    published = [row["counted_error"] for row in rows if "published_gib" in row]
    rows = [row for row in rows if "published_gib" not in row]

    def unused_max(kind: str) -> float:
        return max(row[kind][1] / row[kind][0] - 1 for row in rows)

    return {
        "configs": len(rows),
        "unused_max_expandable": unused_max("expandable_gib"),
        "unused_max_fixed": unused_max("fixed_gib"),
        "error_min": min(row["error"] for row in rows),
        "error_max": max(row["error"] for row in rows),
        "counted_error_median": statistics.median(abs(row["counted_error"]) for row in rows),
        "counted_error_min": min(row["counted_error"] for row in rows),
        "counted_error_max": max(row["counted_error"] for row in rows),
        "published_configs": len(published),
        "published_error_median": statistics.median(map(abs, published)),
        "published_error_max": max(map(abs, published)),
    }


MODES = {
    "cap": Mode(
        run=run_cap,
        result="cap",
        summarize=summarize_cap,
        options={
            "--device": "cuda",
            "--memory-gib": {"default": 135.0, "help": "memory of the GPU that emulates the A10"},
            "--cap-gib": {"type": float, "help": "memory cap [usable memory of an A10]"},
        },
    ),
    "advice": Mode(
        run=run_advice,
        result="cap22",
        summarize=summarize_advice,
        options={"--gpu": "h200", "--model": "mistral-7b", "--memory-gib": 21.5, "--budget": "4m"},
    ),
    "gate": Mode(
        run=run_gate,
        result="oom_gate",
        summarize=summarize_gate,
        options={
            "--model": "mistral-7b",
            "--device": "cuda",
            "--memory-gib": 135.0,
            "--caps": {
                "type": float,
                "nargs": "*",
                "default": list(CAPS_GIB),
                "help": "memory caps in GiB",
            },
            "--rows": None,
            "--seconds": 540.0,
        },
    ),
    "allocator": Mode(
        run=run_allocator,
        result="allocator",
        summarize=summarize_allocator,
        options={"--rows": None, "--seconds": 300.0, "--memory-gib": 75.0},
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

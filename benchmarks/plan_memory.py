"""Compare the peak memory and step time that the formulas of `autotune plan` estimate with measured whole models.

The measurements are those of `depth_extrapolation` and of the table of `search_efficiency`, which helped to write the
formula, and those of held-out models, which did not. `--probe` measures held-out models on the local GPU. Without
`--probe` no GPU is needed.

Rows with nf4 that were measured before version 3 of the probe count the statistics of the base model twice. The
benchmark subtracts the second copy.

`--count` counts the held-out models by dry probes too, as is done for models without a formula.

The benchmark also compares the formula with published tables for 8,192 tokens, made with transformers 4.49
(`studies/published/*-8k.yaml`): once as `autotune plan` uses it, and once as the older stack probably computed
(`as_they_ran`).
The second has three differences. They were inferred from the same rows and are documented nowhere.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, Rows, save, table
from depth_extrapolation import CONFIGS, EAGER

from autotune.catalog import ModelSpec, resolve_device, resolve_model
from autotune.core.probe_types import Fingerprint, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.dry.prober import DryProber
from autotune.planning.device_estimate import device_limit_gib
from autotune.prediction.memory_formula import NF4_STATISTICS, Sizes, kept_bytes, memory_breakdown, moving_bytes
from autotune.prediction.step_time import estimate_step_time
from autotune.prediction.transfer import interval
from autotune.probe.supervisor import WorkerProber
from autotune.problem.study_spec import make_spec

STUDIES = Path(__file__).parent.parent / "studies" / "published"

# The formula was written with measurements of these models. All others are held out, Llama 3.1 among them.
CALIBRATION = ("mistral-7b", "phi-3-mini", "gemma-2-9b")
HELD_OUT = (
    "qwen2.5-7b",
    "qwen3-8b",
    "gemma-7b",
    "llama-2-13b",
    "smollm2-1.7b",
    "tinyllama",
    "mistral-nemo",
    "gemma-2-2b",
    "phi-4",
    "qwen3-1.7b",
)
NEW_CONFIGS: list[dict[str, Any]] = [
    {"micro_batch_size": 4, "seq_len": 1024},
    {"micro_batch_size": 2, "seq_len": 2048, "checkpointing": "none", "compile": "per_layer", "loss": "chunked"},
    {"micro_batch_size": 2, "seq_len": 1024, "checkpointing": "none", "lora_rank": 64},
    {"micro_batch_size": 4, "seq_len": 2048, "checkpointing": "every_2", "precision": "bf16_pure"},
    {"micro_batch_size": 2, "seq_len": 1024, "quantization": "nf4", "double_quant": True, "checkpointing": "none"},
    {"method": "full", "micro_batch_size": 2, "seq_len": 1024, "precision": "bf16_pure", "optimizer": "adamw_8bit"},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured whole model: memory in GiB, seconds of a micro batch, and the version of the probe."""

    model: ModelSpec
    config: TrainConfig
    micro_steps: int
    peak_gib: float
    reserved_gib: float
    micro_s: float
    probe: int
    held_out: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", nargs="*", help="measure these models now [ten models of all families]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="start no probe after this time; 0 measures nothing"
    )
    parser.add_argument("--count", action="store_true", help="count the held-out models by dry probes now")
    parser.add_argument("--counted", type=Path, help="a result of an earlier call, of which the counts are taken")
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call to continue")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    stored, fingerprint = stored_measurements()
    new = [] if args.probe is None and args.rows is None else probe_models(args)
    counted = counted_gib(args, [*stored, *new])
    tables = [row for card in ("h100", "a100") for row in compare_published(card)]
    rows = [row for measured in (*stored, *new) if (row := compare(measured, counted)) is not None]
    table(sorted(rows, key=lambda row: -abs(row["error"]))[:12], ["model", "config", "peak_gib", "error"])
    table(tables, ["card", "model", "config", "published_gib", "error", "error_as_they_ran", "same_verdict"])
    summary = summarize([*rows, *tables])
    save("plan_memory", fingerprint, summary, [*rows, *tables], args.out)
    print(summary)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize rows of models that fitted constants, of held-out models (`heldout_`) and of tables (`published_`)."""
    measured, tables = [row for row in rows if "card" not in row], [row for row in rows if "card" in row]
    fitted, held_out = ([row for row in measured if row["held_out"] is side] for side in (False, True))
    by_model = Counter(row["model"] for row in measured)
    summary: dict[str, Any] = {
        "configs": len(measured),
        "fitted_configs": len(fitted),
        "heldout_configs": len(held_out),
        "models": len(by_model),
        "fitted_models": len({row["model"] for row in fitted}),
        "heldout_models": len({row["model"] for row in held_out}),
        "configs_of_the_most_frequent_model": max(by_model.values()),
    }
    for name, group in (("", fitted), ("heldout_", held_out)):
        for key in ("error", "counted_error", "reserved_error", "pace_error"):
            errors = [row[key] for row in group if row[key] is not None]
            if not errors:
                continue
            summary[f"{name}{key}_median"] = statistics.median(map(abs, errors))
            summary[f"{name}{key}_max"] = max(map(abs, errors))
        summary[f"{name}pace_bias"] = statistics.fmean(
            row["pace_error"] for row in group if row["pace_error"] is not None
        )
    for name, group in (("", measured), ("heldout_", held_out)):
        insides = [row["pace_inside"] for row in group if row["pace_inside"] is not None]
        summary[f"{name}pace_within_80"] = statistics.fmean(insides)
    compared = [row for row in tables if row["error"] is not None]
    summary["published_configs"] = len(compared)
    summary["published_error_max"] = max(abs(row["error"]) for row in compared)
    summary["published_error_max_as_they_ran"] = max(abs(row["error_as_they_ran"]) for row in compared)
    summary["published_verdicts"] = len(tables)
    summary["published_verdicts_wrong"] = sum(not row["same_verdict"] for row in tables)
    summary["published_nf4_verdicts"] = sum("nf4" in row["config"] for row in tables)
    summary["published_nf4_verdicts_wrong"] = sum("nf4" in row["config"] and not row["same_verdict"] for row in tables)
    return summary


def compare(measured: Measured, counted: dict[tuple[str, str], float]) -> dict[str, Any] | None:
    """Compare the formulas, and what was counted, with a measurement. None if there is no formula for it."""
    memory = memory_breakdown(measured.model, measured.config, measured.micro_steps)
    step = estimate_step_time(measured.model, measured.config)
    if memory is None:
        return None
    second_copy_gib = 0.0
    if measured.config.quantization == "nf4" and measured.probe < 3:
        sizes = Sizes.of(measured.model)
        assert sizes is not None
        second_copy_gib = gib(sizes.linear_params * NF4_STATISTICS[measured.config.double_quant])
    peak, reserved = measured.peak_gib - second_copy_gib, measured.reserved_gib - second_copy_gib
    count = counted.get((measured.model.short, measured.config.label()))
    low, high = interval(step.micro_s, step.error) if step else (0.0, 0.0)
    return {
        "model": measured.model.short,
        "config": measured.config.label(),
        "held_out": measured.held_out,
        "peak_gib": peak,
        "planned_gib": memory.peak_gib,
        "error": memory.peak_gib / peak - 1,
        "counted_gib": count,
        "counted_error": None if count is None else count / peak - 1,
        "reserved_gib": reserved,
        "reserved_error": memory.peak_reserved_gib / reserved - 1,
        "micro_s": measured.micro_s,
        "pace_error": step and step.micro_s / measured.micro_s - 1,
        "pace_inside": step and low <= measured.micro_s <= high,
        "host_bound": step and step.host_share > 0.5,
    }


def counted_gib(args: argparse.Namespace, every: Sequence[Measured]) -> dict[tuple[str, str], float]:
    """The peaks of held-out models by name and configuration, as dry probes count them, or an earlier call did."""
    if args.counted:
        rows = json.loads(args.counted.read_text())["rows"]
        return {(row["model"], row["config"]): row["counted_gib"] for row in rows if row.get("counted_gib")}
    found = {}
    with DryProber(shipped=False) as prober:
        for measured in every if args.count else ():
            if not measured.held_out:
                continue
            model, config = measured.model, measured.config
            asked = ProbeRequest(config=config, model=model.config, memory_gib=1.0, micro_steps=measured.micro_steps)
            if (count := prober.count(asked).count) is not None:
                found[model.short, config.label()] = count.peak_allocated_gib
    return found


def compare_published(card: str) -> list[dict[str, Any]]:
    """Compare the formula with published rows of this card.

    The code of the nf4 rows is unknown, so that only their outcome is compared.
    """
    spec, rows = make_spec(STUDIES / f"{card}-8k.yaml", {}), []
    limit_gib = device_limit_gib(resolve_device(card), spec.headroom)
    for case in spec.configs:
        model, config = resolve_model(case.model or spec.model), TrainConfig(**spec.pins | case.knobs)
        memory = memory_breakdown(model, config, min(case.accumulation, 2))
        assert memory is not None and case.published is not None
        peak = case.published.peak_gib
        compared = peak is not None and config.quantization == "none"
        rows.append(
            {
                "card": card,
                "model": model.short,
                "config": config.label(),
                "published_gib": peak,
                "planned_gib": memory.peak_gib,
                "error": memory.peak_gib / peak - 1 if compared else None,
                "error_as_they_ran": as_they_ran(model, config) / peak - 1 if compared else None,
                "same_verdict": (memory.peak_reserved_gib <= limit_gib) is (case.published.outcome != "oom"),
            }
        )
    return rows


def as_they_ran(model: ModelSpec, config: TrainConfig) -> float:
    """Estimate the peak in GiB with three differences that explain the published tables.

    The loss stays in bf16: logits, their logarithms and the gradients of both take 8 bytes. The adapters are fp32 on a
    bf16 base without autocast: each casts its input and has an fp32 output. Gradients are set to zero instead of freed.
    """
    sizes, memory = Sizes.of(model), memory_breakdown(model, config)
    assert sizes is not None and memory is not None
    casts = 4 * sum(map(sum, sizes.matrices.values())) if config.method == "lora" else 0
    body = 2 * sizes.layers * sizes.hidden
    capped = 2 if sizes.family == "gemma2" else 0
    head = body + 4 * sizes.hidden + (8 + capped) * sizes.vocab
    layers = body + kept_bytes(sizes, config) + casts + moving_bytes(sizes, config)
    states = memory.weights + memory.adapters + memory.gradients + memory.optimizer
    return states + gib(config.tokens * max(head, layers))


def stored_measurements() -> tuple[list[Measured], Fingerprint]:
    """Read the whole models that other benchmarks measured."""
    measurements = []
    result = json.loads((RESULTS / "depth_extrapolation.json").read_text())
    for row in result["rows"]:
        attention = {"attention": "eager"} if row["model"] in EAGER else {}
        configs = [TrainConfig(**settings, **attention) for settings in CONFIGS]
        config = next(config for config in configs if config.label() == row["config"])
        if "peak_gib" in row:
            measurements.append(
                Measured(
                    model=resolve_model(row["model"]),
                    config=config,
                    micro_steps=2,
                    peak_gib=row["peak_gib"],
                    reserved_gib=row["reserved_gib"],
                    micro_s=statistics.fmean(row["micro_s"][-1]),
                    probe=result["fingerprint"].get("probe", 1),
                    held_out=row["model"] not in CALIBRATION,
                )
            )
    head, *lines = (Path(__file__).with_name("data") / "mistral_7b_h200.jsonl").read_text().splitlines()
    fingerprint = from_data(Fingerprint, json.loads(head)["fingerprint"])
    for line in lines:
        for result in json.loads(line).get("results", ()):
            if result["rung"] == "full" and result["outcome"] == "ok":
                measured = result["measurement"]
                measurements.append(
                    Measured(
                        model=resolve_model("mistral-7b"),
                        config=TrainConfig(**result["config"]),
                        micro_steps=measured["micro_steps"],
                        peak_gib=measured["peak_allocated_gib"],
                        reserved_gib=measured["peak_reserved_gib"],
                        micro_s=statistics.fmean(measured["micro_step_s"]),
                        probe=fingerprint.probe,
                        held_out=False,
                    )
                )
    return measurements, fingerprint


def probe_models(args: argparse.Namespace) -> list[Measured]:
    """Measure whole held-out models, each with several configurations."""
    rows, until = Rows("plan_memory", args.out, args.rows), time.monotonic() + args.seconds
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    missing = []
    for name, settings in itertools.product(args.probe or HELD_OUT, NEW_CONFIGS):
        eager = {"attention": "eager"} if resolve_model(name).config["model_type"] == "gemma2" else {}
        config = TrainConfig(**settings, **eager)
        if not rows.has(model=name, config=to_data(config)):
            missing.append((name, config))
    if missing and args.seconds:
        with WorkerProber(args.device, logs) as prober:
            for name, config in missing:
                if time.monotonic() < until:
                    rows.add(probe_model(prober, args, name, config, logs))
                    print(name, config.label(), rows.all[-1]["outcome"], rows.all[-1].get("peak_gib"), flush=True)
    return [
        Measured(
            model=resolve_model(row["model"]),
            config=from_data(TrainConfig, row["config"]),
            micro_steps=row["micro_steps"],
            peak_gib=row["peak_gib"],
            reserved_gib=row["reserved_gib"],
            micro_s=row["micro_s"],
            probe=row["fingerprint"].get("probe", 1),
            held_out=row["model"] not in CALIBRATION,
        )
        for row in rows.all
        if row["outcome"] == "ok"
    ]


def probe_model(
    prober: WorkerProber, args: argparse.Namespace, name: str, config: TrainConfig, logs: Path
) -> dict[str, Any]:
    """Probe one whole model and return its memory and time as a row."""
    request = ProbeRequest(
        config=config, model=resolve_model(name).config, device=args.device, memory_gib=args.memory_gib
    )
    result = prober.probe(request, logs / "probe.log")
    row: dict[str, Any] = {"model": name, "config": to_data(config), "outcome": result.outcome.value}
    if result.outcome is Outcome.OK and result.measurement is not None:
        measurement = result.measurement
        row |= {"micro_steps": measurement.micro_steps, "micro_s": statistics.fmean(measurement.micro_step_s)}
        row |= {"peak_gib": measurement.peak_allocated_gib, "reserved_gib": measurement.peak_reserved_gib}
    return row | {"reason": result.reason, "fingerprint": to_data(prober.fingerprint)}


if __name__ == "__main__":
    main()

"""Does the formula of `autotune plan` tell the peak that whole models have? And how long they take?

Held against every whole model that was measured here: those of `depth_extrapolation` and of the table of
`search_efficiency`, from which what the autograd graph does not tell was read, and models that nobody looked at for it.
`--probe` measures such models now, on the GPU here; without it no GPU is needed.

nf4 rows measured before version 3 of the probe hold the statistics of the base twice, which is taken off.

Beside that stand the published tables of 8,192 tokens, of transformers 4.49 (`studies/h100-8k`), held against today's
formula, which is what `autotune plan` says, and against the same formula as that stack may have computed
(`as_they_ran`): three differences, inferred from these very rows and documented nowhere.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
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
from autotune.planning.device_estimate import memory_limit_gib
from autotune.prediction.memory_formula import NF4_STATISTICS, Sizes, kept_bytes, memory_breakdown, moving_bytes
from autotune.prediction.step_time import estimate_step_time
from autotune.probe.supervisor import WorkerProber
from autotune.problem.study_spec import make_spec

STUDIES = Path(__file__).parent.parent / "studies" / "h100-8k"

# What the formula was made with; all other models are held out. Llama 3.1 was measured, and not looked at.
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
    """A whole model that came through: GiB, seconds of a micro batch, and of which version the probe was."""

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
    parser.add_argument("--probe", nargs="*", help="measure these models now [ten of all families]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument("--seconds", type=float, default=540.0, help="stop measuring after so long; 0 measures nothing")
    parser.add_argument("--rows", type=Path, help="the .jsonl of an earlier call, to go on from")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    new = [] if args.probe is None and args.rows is None else probed(args)
    tables = [row for card in ("h100", "a100") for row in published(card)]
    found, fingerprint = stored()
    rows = [row for one in (*found, *new) if (row := held_against(one)) is not None]
    inside, out = ([row for row in rows if row["held_out"] is side] for side in (False, True))
    summary: dict[str, Any] = {"configs": len(rows), "heldout_configs": len(out)}
    summary["models"] = len({row["model"] for row in rows})
    for name, group in (("", inside), ("heldout_", out)):
        for key, column in (("error", "error"), ("reserved_error", "reserved_error"), ("pace_error", "pace_error")):
            errors = [abs(row[column]) for row in group if row[column] is not None]
            summary[f"{name}{key}_median"] = statistics.median(errors)
            summary[f"{name}{key}_max"] = max(errors)
    paced = [row for row in rows if row["pace_error"] is not None]
    summary["pace_within_80"] = statistics.fmean(row["pace_inside"] for row in paced)
    told = [row for row in tables if row["error"] is not None]
    summary["published_configs"] = len(told)
    summary["published_error_max"] = max(abs(row["error"]) for row in told)
    summary["published_error_max_as_they_ran"] = max(abs(row["error_as_they_ran"]) for row in told)
    summary["published_nf4_verdicts"] = sum("nf4" in row["config"] for row in tables)
    summary["published_nf4_verdicts_wrong"] = sum("nf4" in row["config"] and not row["same_verdict"] for row in tables)
    table(sorted(rows, key=lambda row: -abs(row["error"]))[:12], ["model", "config", "peak_gib", "error"])
    table(tables, ["card", "model", "config", "published_gib", "error", "error_as_they_ran", "same_verdict"])
    save("plan_memory", fingerprint, summary, [*rows, *tables], args.out)
    print(summary)


def held_against(one: Measured) -> dict[str, Any] | None:
    """The plan against what was measured; None where the formula knows nothing."""
    told, took = memory_breakdown(one.model, one.config, one.micro_steps), estimate_step_time(one.model, one.config)
    if told is None:
        return None
    twice = 0.0
    if one.config.quantization == "nf4" and one.probe < 3:
        sizes = Sizes.of(one.model)
        assert sizes is not None
        twice = gib(sizes.linear_params * NF4_STATISTICS[one.config.double_quant])
    peak, reserved = one.peak_gib - twice, one.reserved_gib - twice
    return {
        "model": one.model.short,
        "config": one.config.label(),
        "held_out": one.held_out,
        "peak_gib": peak,
        "planned_gib": told.peak_gib,
        "error": told.peak_gib / peak - 1,
        "reserved_gib": reserved,
        "reserved_error": told.peak_reserved_gib / reserved - 1,
        "micro_s": one.micro_s,
        "pace_error": took and took.micro_s / one.micro_s - 1,
        "pace_inside": took and took.interval[0] <= one.micro_s <= took.interval[1],
        "host_bound": took and took.host_bound,
    }


def published(card: str) -> list[dict[str, Any]]:
    """What others measured on this card, against the formula. Of their nf4 rows, whose code is unknown, the verdict."""
    spec, found = make_spec(STUDIES / f"{card}.yaml", {}), []
    limit_gib = memory_limit_gib(resolve_device(card), spec.headroom)
    for case in spec.configs:
        model, config = resolve_model(case.model or spec.model), TrainConfig(**spec.pins | case.knobs)
        told = memory_breakdown(model, config, min(case.accumulation, 2))
        assert told is not None
        peak = case.published.peak_gib
        compared = peak is not None and config.quantization == "none"
        found.append(
            {
                "card": card,
                "model": model.short,
                "config": config.label(),
                "published_gib": peak,
                "planned_gib": told.peak_gib,
                "error": told.peak_gib / peak - 1 if compared else None,
                "error_as_they_ran": as_they_ran(model, config) / peak - 1 if compared else None,
                "same_verdict": (told.peak_reserved_gib <= limit_gib) is (case.published.outcome != "oom"),
            }
        )
    return found


def as_they_ran(model: ModelSpec, config: TrainConfig) -> float:
    """GiB at the peak with three differences that explain those tables.

    The loss stays in bf16: logits, their logarithms, and the gradients of both, 8 bytes. Adapters are fp32 beside a
    bf16 base without autocast: each casts its input and has an fp32 output. Gradients are zeroed and not freed.
    """
    sizes, told = Sizes.of(model), memory_breakdown(model, config)
    assert sizes is not None and told is not None
    casts = 4 * sum(map(sum, sizes.linears)) if config.method == "lora" else 0
    body = 2 * sizes.layers * sizes.hidden
    capped = 2 if sizes.family == "gemma2" else 0
    head = body + 4 * sizes.hidden + (8 + capped) * sizes.vocab
    layers = body + kept_bytes(sizes, config) + casts + moving_bytes(sizes, config)
    held = told.weights + told.adapters + told.gradients + told.optimizer
    return held + gib(config.tokens * max(head, layers))


def stored() -> tuple[list[Measured], Fingerprint]:
    """What other benchmarks measured of whole models."""
    found = []
    result = json.loads((RESULTS / "depth_extrapolation.json").read_text())
    for row in result["rows"]:
        attention = {"attention": "eager"} if row["model"] in EAGER else {}
        configs = [TrainConfig(**settings, **attention) for settings in CONFIGS]
        config = next(config for config in configs if config.label() == row["config"])
        if "peak_gib" in row:
            found.append(
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
        for probe in json.loads(line).get("results", ()):
            if probe["rung"] == "full" and probe["outcome"] == "ok":
                measured = probe["measurement"]
                found.append(
                    Measured(
                        model=resolve_model("mistral-7b"),
                        config=TrainConfig(**probe["config"]),
                        micro_steps=measured["micro_steps"],
                        peak_gib=measured["peak_allocated_gib"],
                        reserved_gib=measured["peak_reserved_gib"],
                        micro_s=statistics.fmean(measured["micro_step_s"]),
                        probe=fingerprint.probe,
                        held_out=False,
                    )
                )
    return found, fingerprint


def probed(args: argparse.Namespace) -> list[Measured]:
    """Models that the formula was not made with, whole, each in several ways."""
    kept, until = Rows("plan_memory", args.out, args.rows), time.monotonic() + args.seconds
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    asked = []
    for name, settings in itertools.product(args.probe or HELD_OUT, NEW_CONFIGS):
        eager = {"attention": "eager"} if resolve_model(name).config["model_type"] == "gemma2" else {}
        config = TrainConfig(**settings, **eager)
        if not kept.has(model=name, config=to_data(config)):
            asked.append((name, config))
    if asked and args.seconds:
        with WorkerProber(args.device, logs) as prober:
            for name, config in asked:
                if time.monotonic() < until:
                    kept.add(probe(prober, args, name, config, logs))
                    print(name, config.label(), kept.all[-1]["outcome"], kept.all[-1].get("peak_gib"), flush=True)
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
        for row in kept.all
        if row["outcome"] == "ok"
    ]


def probe(prober: WorkerProber, args: argparse.Namespace, name: str, config: TrainConfig, logs: Path) -> dict[str, Any]:
    """What one whole model was measured to take."""
    request = ProbeRequest(
        config=config, model=resolve_model(name).config, device=args.device, memory_gib=args.memory_gib
    )
    result = prober.probe(request, logs / "probe.log")
    row: dict[str, Any] = {"model": name, "config": to_data(config), "outcome": result.outcome.value}
    if result.outcome is Outcome.OK and result.measurement is not None:
        one = result.measurement
        row |= {"micro_steps": one.micro_steps, "micro_s": statistics.fmean(one.micro_step_s)}
        row |= {"peak_gib": one.peak_allocated_gib, "reserved_gib": one.peak_reserved_gib}
    return row | {"reason": result.reason, "fingerprint": to_data(prober.fingerprint)}


if __name__ == "__main__":
    main()

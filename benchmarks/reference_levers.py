"""Measure the effect of each lever on the guides' reference configuration: alone, together, and in a study's winner.

The studies are plain calls of `autotune run` for LoRA of rank 16 on rows of 2,048 tokens: one with the defaults and one
that also allows 8-bit floats. All measurements are at full depth.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Rows, run_study, save, speed, table

from autotune.catalog import resolve_device, resolve_model
from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber

MODELS = ("mistral-7b", "llama-3.1-8b")
# The reference recomputes every layer and uses autocast over a bf16 base, with rank 16 on all linear layers.
LORA = TrainConfig(micro_batch_size=4, seq_len=2048)
FULL = TrainConfig(method="full", micro_batch_size=4, seq_len=2048, precision="bf16_pure")
TOGETHER = {"checkpointing": "none", "compile": "per_layer", "loss": "chunked"}  # no other number format
LEVERS: dict[str, dict[str, Any]] = {
    "reference": {},
    "no checkpointing": {"checkpointing": "none"},
    "offloaded checkpoints": {"checkpointing": "offload"},
    "bf16 adapters": {"precision": "bf16_pure"},
    "layers compiled": {"compile": "per_layer"},
    "loss in chunks": {"loss": "chunked"},
    "cuDNN's attention": {"attention": "sdpa_cudnn"},
    "Liger's kernels": {"kernels": "liger"},
    "fp8 base": {"quantization": "fp8"},
    "8-bit AdamW": {"optimizer": "adamw_8bit"},
    "micro batch of 1": {"micro_batch_size": 1},
    "together": TOGETHER,
    "together, bf16 adapters": TOGETHER | {"precision": "bf16_pure"},
    "together, cuDNN's attention": TOGETHER | {"attention": "sdpa_cudnn"},
    "together, fp8 base": TOGETHER | {"quantization": "fp8"},
    "together, Liger's kernels, not compiled": TOGETHER | {"kernels": "liger", "compile": "none"},
    "together, micro batch of 1": TOGETHER | {"micro_batch_size": 1},
    "together, micro batch of 8": TOGETHER | {"micro_batch_size": 8},
}
# As a person would call it; what is learnt changes with 8-bit floats, which is why they have to be allowed.
STUDIES: dict[str, list[str]] = {
    "the study's winner": [],
    "the study's winner, fp8 allowed": ["--allow-quantized"],
}
COLUMNS = ["lever", "config", "tokens_per_s", "mfu", "peak_reserved_gib"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument("--budget", default="4m", help="time for each of the two studies")
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call on the same machine to continue")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no measurement after this time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    rows = Rows("reference_levers", args.out, args.rows)
    # The studies run right after the first reference, so that both are measured within the same minutes.
    first, *others = [(name, reference) for name in args.models for reference in (LORA, FULL)]
    levers(rows, args, [first], until)
    for name, options in STUDIES.items():
        if time.monotonic() < until and not rows.has(lever=name):
            rows.add(study(args, name, options))
            table(rows.all[-1:], COLUMNS)
    levers(rows, args, others, until)
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows.all]
    summary = summarize(shown)
    save("reference_levers", from_data(Fingerprint, rows.all[0]["fingerprint"]), summary, shown, args.out)
    print(summary)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_lever = {row["lever"]: row for row in reversed(rows)}  # the first row of a lever: LoRA of the first model
    winner, reference = by_lever.get("the study's winner", {}), by_lever["reference"]
    in_fp8 = by_lever.get("the study's winner, fp8 allowed", {})

    def ratio(row: dict[str, Any]) -> float | None:
        return row["tokens_per_s"] / reference["tokens_per_s"] if row and reference.get("tokens_per_s") else None

    return {
        "winner_tokens_per_s": winner.get("tokens_per_s"),
        "reference_tokens_per_s": reference.get("tokens_per_s"),
        "ratio": ratio(winner),
        "mfu": winner.get("mfu"),
        "winner": winner.get("config"),
        "fp8_winner_tokens_per_s": in_fp8.get("tokens_per_s"),
        "fp8_ratio": ratio(in_fp8),
        "fp8_winner": in_fp8.get("config"),
    }


def levers(rows: Rows, args: argparse.Namespace, cases: list[tuple[str, TrainConfig]], until: float) -> None:
    """Measure each lever on each of these references, unless its row exists or the time is over."""
    device, folder = resolve_device(args.gpu), Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    missing: dict[tuple[str, str], tuple[str, TrainConfig]] = {}  # several levers may give the same configuration
    for name, reference in cases:
        for lever, changes in LEVERS.items():
            config = replace(reference, **changes)
            if not rows.has(model=resolve_model(name).short, config=config.label()):
                missing.setdefault((name, config.label()), (lever, config))
    if not missing or time.monotonic() > until:
        return
    with WorkerProber("cpu" if device.kind == "cpu" else "cuda", folder) as prober:
        fingerprint = to_data(prober.fingerprint)
        for (name, _), (lever, config) in missing.items():
            if time.monotonic() < until:
                measured = speed(prober, resolve_model(name), device, config, args.memory_gib)
                rows.add({"lever": lever, **measured, "fingerprint": fingerprint})
                table(rows.all[-1:], COLUMNS)


def study(args: argparse.Namespace, name: str, options: list[str]) -> dict[str, Any]:
    """Run a study and return its winner with the study's own measurements as a row."""
    task = ["--gpu", args.gpu, "--model", args.models[0], "--tokens-per-example", "2048", "--budget", args.budget]
    task += ["--set", "seq_len=2048", "--set", "lora_rank=16", "--out", "study", *options]
    summary = run_study(Path(tempfile.mkdtemp(prefix="autotune-bench-")), *task)
    winner = summary["winner"]
    return {
        "lever": name,
        "model": args.models[0],
        "config": TrainConfig(**winner["config"]).label(),
        "tokens_per_s": winner["performance"]["tokens_per_second"],
        "mfu": winner["performance"]["mfu"],
        "peak_reserved_gib": winner["memory"]["peak_reserved_gib"],
        "fingerprint": {key: value for key, value in summary["fingerprint"].items() if key != "digest"},
    }


if __name__ == "__main__":
    main()

"""Compare estimators of training memory on trainings whose peak was measured."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import RESULTS, Mode, finish, load, run_program
from estimators_tool import TOOLS
from plan import CALIBRATION, Measured, stored_measurements

from autotune.catalog import ModelSpec, resolve_device, resolve_model
from autotune.core.lora_targets import ALL_LINEAR, target_modules
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.planning.named_estimates import estimate_named_configs
from autotune.prediction.memory_formula import CONTEXT_GIB, memory_breakdown
from autotune.problem.study_spec import Published, make_spec, shipped_suites
from autotune.study.named_configs import ConfigResult

OURS = "autotune"
# A run is started with about this share of the memory free, so a larger error means out of memory.
TOO_LOW = -0.05
# These tools count the CUDA context. Their estimates are compared with the memory of the process.
WITH_CONTEXT = {"fitcheck-llm", "fitscout", "canifinetune", "unsloth"}
GPU = "h200"  # of our measurements
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def run(args: argparse.Namespace) -> None:
    """Compare estimators of training memory on trainings whose peak was measured.

    The trainings are whole models that other benchmarks measured, and suites of published results
    (`studies/published`). A training counts if its settings are those that all the tools know:
    LoRA, QLoRA or full fine-tuning in bf16 on one GPU, all or no layers recomputed, and PyTorch's
    own kernels and loss. Published runs that computed something else than their settings say do not
    count; the suites say which. Some of our measurements helped to write autotune's formula
    (`fitted`). `--packages` is a folder that has the packages of the tools:

        pip install --no-deps --target DIR fitcheck-llm fitscout canifinetune hf-vram-calc unsloth
    """
    rows = [*measured_rows(), *published_rows()]
    program = Path(__file__).with_name("estimators_tool.py")
    environment = os.environ | {"PYTHONPATH": str(args.packages), "HF_HUB_OFFLINE": "1"}
    asked = subprocess.run(
        [sys.executable, program],
        input=json.dumps([row | row.pop("asked") for row in rows]),
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    answer = json.loads(asked.stdout)
    for row, of_tools in zip(rows, answer["answers"], strict=True):
        row["estimates"] |= {tool: found.get("gib") for tool, found in of_tools.items()}
        row["refusals"] = {
            tool: found["refused"] for tool, found in of_tools.items() if "refused" in found
        }
        del row["config"]
    finish(args, None, rows, versions=answer["versions"])


def measured_rows() -> Iterator[dict[str, Any]]:
    """Yield our measurements. The peak is what torch reserved."""
    stored, _ = stored_measurements()
    probed = [
        Measured(
            model=resolve_model(row["model"]),
            config=from_data(TrainConfig, row["config"]),
            probe=row["fingerprint"].get("probe", 1),
            held_out=row["model"] not in CALIBRATION,
            **{key: row[key] for key in ("micro_steps", "peak_gib", "reserved_gib", "micro_s")},
        )
        for row in load(RESULTS / "plan_memory.jsonl")
        if row["outcome"] == "ok"
    ]
    for one in [*stored, *probed]:
        # Before version 3, probes of nf4 bases held a second copy of the statistics.
        if is_plain(one.config) and (one.config.quantization == "none" or one.probe >= 3):
            memory = memory_breakdown(one.model, one.config, one.micro_steps)
            yield {
                **_asked(one.model, one.config, one.micro_steps, GPU),
                "source": "ours, held out" if one.held_out else "ours, fitted",
                "measured_gib": one.reserved_gib,
                "context_gib": CONTEXT_GIB,
                "estimates": {OURS: memory and memory.peak_reserved_gib},
            }


def published_rows() -> Iterator[dict[str, Any]]:
    """Yield published peaks of one GPU: allocated or reserved by torch, or of the process."""
    for name, path in shipped_suites().items():
        spec = make_spec(path, {})
        if "https://" not in (spec.source or ""):  # no reader could look up the numbers
            continue
        for found in estimate_named_configs(spec, device=resolve_device(spec.gpu)):
            config = found.config
            if found.case.excluded or not is_plain(config) or config.num_gpus > 1:
                continue
            if found.case.differs:  # it computed something else than its settings say
                continue
            peak = published_peak(found)
            if peak is None:
                continue
            model = resolve_model(found.case.model or spec.model)
            if found.case.model_overrides:  # nobody publishes the number of parameters
                model = replace(
                    model, config={**model.config, **found.case.model_overrides}, params=None
                )
            yield {
                **_asked(model, config, found.case.accumulation, spec.gpu),
                "source": f"public, {name}",
                **peak,
            }


def published_peak(found: ConfigResult) -> dict[str, Any] | None:
    """Return the published peak, the CUDA context that it lacks, and our estimate of it."""
    theirs = found.case.published or Published()
    for gb, gib, ours, context_gib in (
        (theirs.peak_gb, theirs.process_gib, found.with_context_gib, 0.0),
        (theirs.reserved_gb, theirs.reserved_gib, found.peak_reserved_gib, CONTEXT_GIB),
        (None, theirs.peak_gib, found.peak_allocated_gib, CONTEXT_GIB),
    ):
        measured = gib if gb is None else gb * 1e9 / GIB
        if measured is not None and ours is not None:
            return {
                "measured_gib": measured,
                "context_gib": context_gib,
                "estimates": {OURS: ours},
            }
    return None


def is_plain(config: TrainConfig) -> bool:
    """Return whether all tools know the settings of a configuration."""
    return (
        (config.loss, config.compile, config.kernels) == ("full", "none", "torch")
        and config.checkpointing in ("none", "full")
        and config.precision in ("bf16_mixed", "bf16_pure")
        and config.quantization in ("none", "nf4")
        and (config.modules_to_save, config.lora_kernels) == ("none", "peft")
        and not (config.packing or config.dora)
    )


def _asked(model: ModelSpec, config: TrainConfig, accumulation: int, gpu: str) -> dict[str, Any]:
    """Return what identifies a training, and what the tools are asked."""
    named = target_modules(model.text_type, config.lora_targets)
    return {
        "model": model.short,
        "gpu": gpu,
        "label": config.label(),
        "config": None,
        "asked": {
            "config": asdict(config),
            "model_config": dict(model.config),
            "params": model.params,
            "targets": list(LINEAR if config.lora_targets == ALL_LINEAR else named or ()),
            "accumulation": accumulation,
            "gpu_gib": resolve_device(gpu).memory_gib,
        },
    }


def error(row: dict[str, Any], tool: str) -> float | None:
    """Return a tool's estimate divided by the measured peak, minus 1."""
    estimate = row["estimates"][tool]
    context = row["context_gib"] if tool in WITH_CONTEXT else 0.0
    return None if estimate is None else estimate / (row["measured_gib"] + context) - 1


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the errors of each tool.

    `worst` is the largest error, `worst_low` the largest underestimate, and `too_low` the share of
    estimates that are more than 5 % below the peak. `unseen` has the same for the trainings that no
    constant of autotune was fitted to.
    """
    unseen = [row for row in rows if row["source"] != "ours, fitted"]
    return {
        "rows": len(rows),
        "unseen_rows": len(unseen),
        "public_rows": sum(row["source"].startswith("public") for row in rows),
        "models": len({row["model"] for row in rows}),
        "others": len(TOOLS),
        "tools": {tool: _summary(rows, tool) for tool in (OURS, *TOOLS)},
        "unseen": {tool: _summary(unseen, tool) for tool in (OURS, *TOOLS)},
    }


def _summary(rows: list[dict[str, Any]], tool: str) -> dict[str, Any]:
    errors = [found for row in rows if (found := error(row, tool)) is not None]
    return {
        "rows": len(errors),
        "median": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "worst_low": min(errors),
        "too_low": statistics.fmean(found < TOO_LOW for found in errors),
    }


MODES = {
    "": Mode(
        run=run,
        result="estimators",
        summarize=summarize,
        options={"--packages": {"type": Path, "required": True, "metavar": "DIR"}},
    )
}

if __name__ == "__main__":
    run_program(MODES, run.__doc__)

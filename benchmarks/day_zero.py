"""Today's model types: which of them `plan` answers, and how
exactly probes predict them on a GPU.
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import Failed, Mode, finish, largest, measured, predicted, run_program, worker

from autotune.catalog import list_models, resolve_model
from autotune.core.errors import UsageError
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryProber
from autotune.problem.performance import step_time_s

NAMED = (
    *(
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
    ),
    *(
        "gemma3n",
        "ministral3",
        "mistral3",
        "mistral4",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "olmo_hybrid",
        "exaone4",
    ),
    *(
        "qwen3_vl",
        "seed_oss",
        "muse_glimmer",
        "phi4_multimodal",
        "hunyuan_v1_dense",
        "glm4_moe_lite",
    ),
    *("glm_moe_dsa", "kimi_linear", "deepseek_v4", "minimax_m2", "ernie4_5_moe", "nemotron_h"),
    *("granitemoehybrid", "llama4"),
)
# The reasons for a refusal, each with the words that mark it
REASONS = {
    "remote code": "remote code is never run",
    "encoder-decoder": "encoder-decoder model",
    "no causal model": "sees those after it",
    "no config of a language model": "has no positive integer",
    "a package is missing": "pip install",
    "transformers cannot build it": "cannot build a",
    "transformers cannot train it on text alone": "cannot train this model on text alone",
    "transformers has no causal class": "has no causal language model",
    "no recomputation": "does not support activation checkpointing",
    "no linear layers with the usual names": "not found in the base model",
}
CONFIG = {"seq_len": 1024, "micro_batch_size": 1, "precision": "bf16_pure", "checkpointing": "none"}

# Small models of new families: changes to transformers' default config, for 80 GB.
ON_GPU: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5": {},  # a wrapper, whose class for text leaves the tower out
    "gemma4": {},
    "gemma3": {},  # a wrapper whose tower is loaded
    "ministral3": {},
    "mistral3": {},  # a wrapper whose tower is loaded
    "lfm2": {},
    "olmo_hybrid": {},
    "granitemoehybrid": {},
    "qwen3_5_moe_text": {"num_hidden_layers": 12},
    "glm4_moe_lite": {"num_hidden_layers": 13},
    "seed_oss": {"num_hidden_layers": 16},
}
WAYS = {
    "LoRA": {
        "micro_batch_size": 4,
        "seq_len": 1024,
        "precision": "bf16_pure",
        "checkpointing": "none",
    },
    "recomputed": {
        "micro_batch_size": 8,
        "seq_len": 1024,
        "precision": "bf16_pure",
        "checkpointing": "full",
    },
}


def default_configs(folder: Path) -> Iterator[tuple[str, Path | str]]:
    """Yield each causal and image-text-to-text model type with the directory of its default config.

    If transformers cannot make the default config, its error stands in the directory's place.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    for name in sorted(
        {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    ):
        try:
            CONFIG_MAPPING[name]().save_pretrained(folder / name)
        except Exception as error:
            yield name, f"transformers cannot build a config of this type: {error}"
        else:
            yield name, folder / name


def answer(directory: Path, prober: DryProber) -> dict[str, Any]:
    """Count a training step of this model, with adapters in a way that PEFT allows."""
    try:
        model = resolve_model(str(directory))
    except UsageError as error:
        return {"refused": str(error)}

    refused = ""
    for changes in ({}, {"attention": "eager"}, {"lora_targets": "attention"}, {"method": "full"}):
        config = TrainConfig(**CONFIG | changes)
        counted = prober.count(ProbeRequest(config=config, model=model.config, memory_gib=1.0))
        if counted.count is not None:
            return {"peak_gib": counted.count.peak_allocated_gib, "changes": changes}
        refused = refused or counted.refused or ""
    return {"refused": refused}


def run_types(args: argparse.Namespace) -> None:
    """Ask for the memory of every model type of the installed transformers, with its default
    config.

    A default config is what transformers makes without arguments. Some of them cannot be built.
    """
    warnings.filterwarnings("ignore")
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        DryProber(Path(folder, "dry"), shipped=False) as prober,
    ):
        for name, directory in default_configs(Path(folder)):
            found = (
                {"refused": directory} if isinstance(directory, str) else answer(directory, prober)
            )
            if (text := found.get("refused")) is not None:
                found["reason"] = next(
                    (one for one, words in REASONS.items() if words in text), None
                )
                found["refused"] = text.replace(folder, "").strip()
            rows.append({"type": name, "named": name in NAMED} | found)
            print(json.dumps(rows[-1]), flush=True)
    finish(args, None, rows)


def summarize_types(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count answers and refusals. A refusal without a known reason is an error."""
    answered = [row for row in rows if "peak_gib" in row]
    refused = [row for row in rows if row.get("reason")]
    return {
        "types": len(rows),
        "answered": len(answered),
        "answered_share": len(answered) / max(len(rows), 1),
        "refused": len(refused),
        "errors": len(rows) - len(answered) - len(refused),
        "named": len(NAMED),
        "named_answered": sum(row["named"] for row in answered),
        "recalled": sum(model.source is None for model in list_models()),
    }


def run_gpu(args: argparse.Namespace) -> None:
    """Predict small models of new families from two truncated
    depths, and measure the whole models.
    """
    from transformers import CONFIG_MAPPING

    rows: list[dict[str, Any]] = []
    fingerprint = None
    with (
        tempfile.TemporaryDirectory() as folder,
        worker(args.device) as prober,
        DryProber(Path(folder, "dry"), shipped=False) as counter,
    ):
        for name, changes in ON_GPU.items():
            for way, knobs in WAYS.items():
                row: dict[str, Any] = {"family": name, "way": way}
                try:
                    CONFIG_MAPPING[name](**changes).save_pretrained(Path(folder, name))
                    model = resolve_model(str(Path(folder, name)))
                    shape = prober.describe(model.config)
                    attention = "sdpa" if shape is None or shape.sdpa else "eager"
                    config = TrainConfig(**knobs, attention=attention)
                    request = ProbeRequest(
                        config=config,
                        model=model.config,
                        device=args.device,
                        memory_gib=args.memory_gib,
                    )
                    row |= compare(prober, counter, request)
                except (Failed, UsageError, ValueError, KeyError) as error:
                    row["failed"] = str(error)[:300]
                fingerprint = prober.fingerprint
                rows.append(row)
                print(json.dumps(row), flush=True)
    finish(args, fingerprint, rows)


def compare(prober: Any, counter: DryProber, request: ProbeRequest) -> dict[str, Any]:
    """Return the errors of the prediction and of the dry count against the measured whole model."""
    prediction, depths = predicted(prober, request)
    whole = measured(prober, request)
    counted = counter.count(replace(request, memory_gib=1.0))
    micros = 4
    seconds = step_time_s(whole, micros)
    row = {
        "depths": depths,
        "peak_gib": whole.peak_allocated_gib,
        "predicted_gib": prediction.peak_allocated_gib,
        "prediction_error": prediction.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "seconds": seconds,
        "time_error": step_time_s(prediction, micros) / seconds - 1,
        "host_bound": whole.host_bound,
    }
    if counted.count is None:
        return row | {"not_counted": counted.refused}
    peak = counted.count.peak_allocated_gib
    return row | {"counted_gib": peak, "memory_error": peak / whole.peak_allocated_gib - 1}


def summarize_gpu(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the errors; times count if the device sets the pace."""
    known = [row for row in rows if "memory_error" in row]
    timed = [row for row in known if not row["host_bound"]]

    def median(counted: list[dict[str, Any]], key: str) -> float | None:
        return statistics.median(abs(row[key]) for row in counted) if counted else None

    return {
        "families": len({row["family"] for row in known}),
        "configs": len(known),
        "memory_error_median": median(known, "memory_error"),
        "memory_error_max": largest(known, "memory_error"),
        "prediction_error_max": largest(known, "prediction_error"),
        "timed": len(timed),
        "time_error_median": median(timed, "time_error"),
        "time_error_max": largest(timed, "time_error"),
        "failed": sum("failed" in row for row in rows),
    }


MODES = {
    "types": Mode(run=run_types, result="day_zero", summarize=summarize_types),
    "gpu": Mode(
        run=run_gpu,
        result="day_zero_gpu",
        summarize=summarize_gpu,
        options={"--device": "cuda", "--memory-gib": 75.0},
    ),
}

if __name__ == "__main__":
    run_program(MODES, __doc__)

"""Today's model types: which of them `plan` answers, and how
exactly probes predict them on a GPU.

Some types need further packages: timm and torchvision.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import (
    DATA,
    Failed,
    Mode,
    Rows,
    finish,
    largest,
    load,
    measured,
    predicted,
    run_program,
    save,
    worker,
)

from autotune.catalog import ModelSpec, list_models, resolve_model
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
    "no causal model": "a token sees later tokens",
    "no config of a language model": "has no positive integer",
    "a package is missing": "pip install",
    "transformers cannot build it": "cannot build a",
    "transformers cannot train it on text alone": "cannot train this model on text alone",
    "its code reads values, which a count lacks": "reads the values of tensors",
    "transformers has no causal class": "has no causal language model",
    "no recomputation": "does not support activation checkpointing",
    "no linear layers with the usual names": "not found in the base model",
}
CONFIG = {"seq_len": 1024, "micro_batch_size": 1, "precision": "bf16_pure", "checkpointing": "none"}
# Without fast kernels, some layers compute token by token, so the types are counted in short rows.
SHORT = CONFIG | {"seq_len": 256}

# Models of new families for 80 GB: changes to transformers' default config, or a name in the
# catalogue.
ON_GPU: dict[str, dict[str, Any] | str] = {
    "qwen3_5_text": {},
    "qwen3_5": {},  # a wrapper, whose class for text leaves the tower out
    "gemma4": {},
    # a wrapper whose tower is loaded; a pattern of six layers
    "gemma3": {"text_config": {"num_hidden_layers": 24}},
    "ministral3": {},
    # trained after transformers has converted it to 16 bits
    "ministral3 in FP8": {
        "model_type": "ministral3",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "mistral3": {},  # a wrapper whose tower is loaded
    "lfm2": {},
    "olmo_hybrid": {},
    "granitemoehybrid": {"num_hidden_layers": 8},
    "qwen3_5_moe_text": {"num_hidden_layers": 16},
    "glm4_moe_lite": {"num_hidden_layers": 13},
    "seed_oss": {"num_hidden_layers": 16},
}
FAST = ("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")  # gated delta nets
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
GPU_BOUND = 0.5  # the host needs less than this share of a micro batch's time
FITS = 0.9  # a configuration is tried if its dry count is at most this share of the GPU's memory


def model_types() -> list[str]:
    """Return each causal and image-text-to-text model type, the named types first."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    types = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted(types, key=lambda name: (name not in NAMED, name))


def stand_ins(name: str, reason: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return configs that stand in for a default config that was refused for this reason.

    A decoder stands in for an encoder, if the type has a causal class and a key `is_decoder`. The
    smallest released model stands in for a default that transformers cannot use. Both come before
    the configs of type_configs.yaml.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: list[tuple[str, dict[str, Any]]] = []
    if reason in ("encoder-decoder", "no causal model"):
        is_causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if is_causal and hasattr(CONFIG_MAPPING[name](), "is_decoder"):
            decoder = CONFIG_MAPPING[name](is_decoder=True, is_encoder_decoder=False)
            found = [("default decoder", json.loads(decoder.to_json_string()))]
    else:
        released = [model for model in list_models() if model.config["model_type"] == name]
        released.sort(key=lambda model: model.params or 0)
        found = [(model.name, model.config) for model in released[:1]]
    rows = [row for row in load(DATA / "type_configs.yaml") if row["config"]["model_type"] == name]
    return found + [(row["source"], row["config"]) for row in rows]


def answer(name: str, folder: Path, prober: DryProber) -> dict[str, Any]:
    """Answer for the default config of this type, or for a config that stands in for it."""
    from transformers import CONFIG_MAPPING

    try:
        default = json.loads(CONFIG_MAPPING[name]().to_json_string())
    except Exception as error:
        refused = {"refused": f"transformers cannot build a config of this type: {error}"}
    else:
        found = count(default, folder / name, prober)
        if "refused" not in found:
            return found
        refused = found

    refused["reason"] = reason_of(refused["refused"])
    for source, config in stand_ins(name, refused["reason"]):
        found = count(config, folder / name, prober)
        if "refused" not in found:
            return found | {"config": source, "default_refused": refused["refused"]}
    return refused


def reason_of(text: str) -> str | None:
    """Return the reason on the closed list for a refusal, or None."""
    return next((reason for reason, words in REASONS.items() if words in text), None)


def count(config: dict[str, Any], directory: Path, prober: DryProber) -> dict[str, Any]:
    """Count a training step of a config directory, with adapters if PEFT allows them.

    A type whose code cannot compute in bf16 alone is counted in mixed precision.
    """
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        model = resolve_model(str(directory))
    except UsageError as error:
        return {"refused": str(error).replace(f"{directory.parent}/", "")}

    attention = "eager" if model.lacks("sdpa") else "sdpa"
    refused = ""
    for changes in (
        {},
        {"lora_targets": "attention"},
        {"method": "full"},
        {"precision": "bf16_mixed"},
    ):
        knobs = TrainConfig(**SHORT | {"attention": attention} | changes)
        counted = prober.count(ProbeRequest(config=knobs, model=model.config, memory_gib=1.0))
        if (found := counted.count) is not None:
            return {
                "config": "default",
                "seq_len": knobs.seq_len,
                "peak_gib": found.peak_allocated_gib,
                "attention": attention,
                "changes": changes,
            }
        refused = counted.refused or refused
    return {"refused": refused}


def run_types(args: argparse.Namespace) -> None:
    """Ask for the memory of every model type of the installed transformers, with its default
    config.

    transformers makes a default config without arguments. If it is no causal model, or cannot be
    built, another config stands in, and the row names it.
    """
    warnings.filterwarnings("ignore")
    rows = Rows.of(args)
    with (
        tempfile.TemporaryDirectory() as folder,
        DryProber(Path(folder, "dry"), shipped=False) as prober,
    ):
        for name in model_types():
            if rows.has(type=name):
                continue
            row: dict[str, Any] = {"type": name, "named": name in NAMED}
            began = time.monotonic()
            try:
                row |= answer(name, Path(folder), prober)
            except Exception as error:  # a type must never end in a Python error
                row["error"] = repr(error)[:300]
            rows.add(row | {"seconds": round(time.monotonic() - began, 1)})
            print(json.dumps(rows.all[-1]), flush=True)
    finish(args, None, rows.all)


def summarize_types(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count answers and refusals. A refusal without a known reason is an error."""
    answered = [row for row in rows if "peak_gib" in row]
    refused = [row for row in rows if row.get("reason")]
    return {
        "types": len(rows),
        "answered": len(answered),
        "answered_share": len(answered) / max(len(rows), 1),
        "answered_by_default": sum(row["config"] == "default" for row in answered),
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
    predict_and_measure(args, {name: ON_GPU[name] for name in args.families})


def run_fast(args: argparse.Namespace) -> None:
    """Predict and measure the models whose layers have fast kernels in flash-linear-attention."""
    if find_spec("fla") is None:
        raise SystemExit("pip install flash-linear-attention")
    predict_and_measure(args, {name: ON_GPU[name] for name in FAST})


def predict_and_measure(args: argparse.Namespace, models: dict[str, dict[str, Any] | str]) -> None:
    """Predict and measure each model in each way, and save a row for each."""
    rows: list[dict[str, Any]] = []
    fingerprint = None
    with (
        tempfile.TemporaryDirectory() as folder,
        worker(args.device) as prober,
        DryProber(Path(folder, "dry"), shipped=False) as counter,
    ):
        for name, changes in models.items():
            for way, knobs in WAYS.items():
                row: dict[str, Any] = {"family": name, "way": way}
                try:
                    model = model_on_gpu(Path(folder, name), changes)
                    shape = prober.describe(model.config)
                    attention = "sdpa" if shape is None or shape.sdpa else "eager"
                    config = TrainConfig(**knobs, attention=attention)
                    request = ProbeRequest(
                        config=config,
                        model=model.config,
                        device=args.device,
                        memory_gib=args.memory_gib,
                    )
                    request = that_fits(counter, request)
                    row |= {
                        "micro_batch_size": request.config.micro_batch_size,
                        "seq_len": request.config.seq_len,
                    }
                    row |= compare(prober, counter, request)
                except (Failed, UsageError, ValueError, KeyError) as error:
                    row["failed"] = str(error)[:300]
                fingerprint = prober.fingerprint
                rows.append(row)
                print(json.dumps(row), flush=True)
                save(args, fingerprint, rows)
    finish(args, fingerprint, rows)


def model_on_gpu(folder: Path, changes: dict[str, Any] | str) -> ModelSpec:
    """Return a model of the catalogue, or the one whose changed default config goes to `folder`."""
    from transformers import CONFIG_MAPPING

    if isinstance(changes, str):
        return resolve_model(changes)
    CONFIG_MAPPING[changes.get("model_type", folder.name)](**changes).save_pretrained(folder)
    return resolve_model(str(folder))


def that_fits(counter: DryProber, request: ProbeRequest) -> ProbeRequest:
    """Halve the micro batch, and then the sequences, until the dry count fits the GPU.

    Without the packages with fast kernels, layers with a recurrence hold several times the memory.
    """
    while True:
        config = request.config
        counted = counter.count(replace(request, memory_gib=1.0)).count
        peak = 0.0 if counted is None else counted.peak_allocated_gib
        if peak <= FITS * request.memory_gib or config.tokens <= 128:
            return request
        if config.micro_batch_size > 1:
            config = replace(config, micro_batch_size=config.micro_batch_size // 2)
        else:
            config = replace(config, seq_len=config.seq_len // 2)
        request = replace(request, config=config)


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
        "time_interval": prediction.time_error,
        # a whole model fills the device's queue, so only truncated models show the host's own time
        "host_share": prediction.host_share,
    }
    if counted.count is None:
        return row | {"not_counted": counted.refused}
    peak = counted.count.peak_allocated_gib
    return row | {"counted_gib": peak, "memory_error": peak / whole.peak_allocated_gib - 1}


def summarize_gpu(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the errors, and count the times outside their stated intervals.

    Errors of time are those of rows whose time depends on the GPU, not on the host.
    """
    known = [row for row in rows if "memory_error" in row]
    gpu_bound = [row for row in known if row["host_share"] < GPU_BOUND]

    def median(counted: list[dict[str, Any]], key: str) -> float | None:
        return statistics.median(abs(row[key]) for row in counted) if counted else None

    return {
        "families": len({row["family"] for row in known}),
        "configs": len(known),
        "memory_error_median": median(known, "memory_error"),
        "memory_error_max": largest(known, "memory_error"),
        "prediction_error_max": largest(known, "prediction_error"),
        "gpu_bound": len(gpu_bound),
        "time_error_median": median(gpu_bound, "time_error"),
        "time_error_max": largest(gpu_bound, "time_error"),
        "outside_interval": sum(abs(row["time_error"]) > row["time_interval"] for row in known),
        "failed": sum("failed" in row for row in rows),
    }


MODES = {
    "types": Mode(
        run=run_types, result="day_zero", summarize=summarize_types, options={"--rows": None}
    ),
    "gpu": Mode(
        run=run_gpu,
        result="day_zero_gpu",
        summarize=summarize_gpu,
        options={
            "--device": "cuda",
            "--memory-gib": 75.0,
            "--families": {"nargs": "*", "default": list(ON_GPU), "choices": list(ON_GPU)},
        },
    ),
    "fast": Mode(
        run=run_fast,
        result="day_zero_fast",
        summarize=summarize_gpu,
        options={"--device": "cuda", "--memory-gib": 75.0},
    ),
}

if __name__ == "__main__":
    run_program(MODES, __doc__)

"""Compare predictions with measurements for each objective: whole models, and exported runs."""

import argparse
import time
from dataclasses import replace
from typing import Any

from bench import (
    Failed,
    Mode,
    Rows,
    fingerprint_of,
    finish,
    largest,
    measured,
    predicted,
    run_program,
    run_study,
    scratch,
    table,
    worker,
)

from autotune.catalog import resolve_model
from autotune.core.errors import AutotuneError
from autotune.core.images import picture_of, sees_images
from autotune.core.objective import Objective
from autotune.core.probe_types import MicroBatch, ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.performance import step_time_s

# --- depth

MICROS = 4  # micro batches of a step
MODELS = ("llama-3.2-3b", "qwen2.5-3b", "qwen3-4b", "gemma-2-2b", "phi-3.5-mini", "mistral-7b")
SEEING = ("qwen2.5-vl-3b", "gemma-3-4b", "smolvlm")
IMAGE, SMALL_IMAGE, TEXT = (896, 672), (224, 168), 256  # width and height; tokens beside the image
ROWS, LENGTH = 16, 1024
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL |= {"head_dim": 32, "num_hidden_layers": 8, "vocab_size": 512}
SMALL_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_heads": 2,
    "depth": 2,
}
SMALL_VISION |= {"num_hidden_layers": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
SMALL_SIDES = {"gemma3": {"image_size": 224}, "idefics3": {"image_size": 168}}
SMALL_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    },
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 4},
}
DEPTH_COLUMNS = [
    "model",
    "objective",
    "peak_gib",
    "memory_error",
    "step_s",
    "time_error",
    "host_share",
    "seconds",
    "failed",
]


def run_depth(args: argparse.Namespace) -> None:
    """Predict whole models from two truncated depths, for each objective and several families, and
    measure them.

    The exported runs use the same trainers: TRL's for pairs and for wanted answers, transformers'
    for next-token training and for labels. A micro batch has 16 rows of 1,024 tokens, and half of
    each row is an answer; a pair has two rows. Models with images train on 256 tokens beside an
    image of 896 by 672 pixels, with a frozen vision tower. Every layer is recomputed. An error is
    the prediction divided by the measurement of the whole model, minus 1, for the allocated peak
    and for the time of a step of four micro batches. Times of CPU-bound configurations
    (`host_bound`) follow no line in depth, and a search measures them on the whole model.

    On a CPU it makes a trial run with tiny models of the same families.
    """
    rows, began = Rows.of(args), time.monotonic()
    with worker(args.device) as prober:
        for name in args.models:
            for objective in (Objective.SFT,) if resolve_model(name).sees_images else Objective:
                if time.monotonic() - began > args.seconds or rows.has(
                    model=name, objective=str(objective)
                ):
                    continue
                rows.add(compare(prober, name, objective))
                print(
                    ", ".join(f"{key} {rows.all[-1].get(key)}" for key in DEPTH_COLUMNS), flush=True
                )
        finish(args, prober.fingerprint, rows.all, DEPTH_COLUMNS)


def compare(prober: WorkerProber, name: str, objective: Objective) -> dict[str, Any]:
    """Return a row with the errors of a prediction, or with the reason of a failed probe."""
    began, on_cpu = time.monotonic(), prober.device == "cpu"
    model = dict(resolve_model(name).config)
    knobs: dict[str, Any] = {"precision": "fp32", "seq_len": 64} if on_cpu else {"seq_len": LENGTH}
    request = ProbeRequest(
        config=TrainConfig(
            micro_batch_size=ROWS // objective.rows_per_example, checkpointing="full", **knobs
        ),
        model=_small(model) if on_cpu else model,
        device=prober.device,
        memory_gib=8.0 if on_cpu else prober.memory_gib,
        trainer=objective.trainers[0],
        objective=objective,
        trained_share=0.5,
    )
    if sees_images(request.model):
        request = _with_images(request)
    row: dict[str, Any] = {
        "model": name,
        "objective": str(objective),
        "config": request.config.label(),
    }
    try:
        shape = prober.describe(request.model)
        if shape is not None and not shape.sdpa:
            request = replace(request, config=replace(request.config, attention="eager"))
        from_two, found_at = predicted(prober, request)
        whole = measured(prober, replace(request, min_timed_s=2.0))
    except (Failed, AutotuneError) as error:
        return row | {"failed": str(error), "seconds": time.monotonic() - began}
    pace = "host_bound_" if from_two.host_bound else ""
    return row | {
        "depths": found_at,
        "peak_gib": whole.peak_allocated_gib,
        "memory_error": from_two.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "step_s": step_time_s(whole, MICROS),
        "host_share": from_two.host_share,
        f"{pace}time_error": step_time_s(from_two, MICROS) / step_time_s(whole, MICROS) - 1,
        "seconds": time.monotonic() - began,
        "fingerprint": to_data(prober.fingerprint),
    }


def _with_images(request: ProbeRequest) -> ProbeRequest:
    """Add an image, and room for it, to each row."""
    size = SMALL_IMAGE if request.device == "cpu" else IMAGE
    picture, rows = picture_of(request.model, *size), request.config.micro_batch_size
    length = picture.length + TEXT
    kind = MicroBatch(
        rows=((length,),) * rows, length=length, share=1.0, images=((picture,),) * rows
    )
    return replace(
        request,
        config=replace(request.config, seq_len=length),
        micro_batches=(kind,),
        trained_share=1.0,
    )


def _small(model: dict[str, Any]) -> dict[str, Any]:
    if sees_images(model):
        ends = {name: 500 + place for place, name in enumerate(model) if "_token_i" in name}
        vision = model["vision_config"]
        small = {name: value for name, value in SMALL_VISION.items() if name in vision}
        more, side = (
            SMALL_TEXT.get(model["model_type"], {}),
            SMALL_SIDES.get(model["model_type"], {}),
        )
        return (
            model
            | ends
            | {
                "text_config": _small(model["text_config"]) | more,
                "vision_config": vision | small | side,
            }
        )
    kept = {
        key: value
        for key, value in model.items()
        if key not in ("layer_types", "rope_scaling", "rope_parameters")
    }
    return kept | SMALL


def summarize_depth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    compared = [row for row in rows if "memory_error" in row]
    return {
        "families": len({row["model"] for row in compared}),
        "objectives": len({row["objective"] for row in compared}),
        "configs": len(compared),
        "failed": sum("failed" in row for row in rows),
        "host_bound": sum("host_bound_time_error" in row for row in rows),
        "memory_error_max": largest(rows, "memory_error"),
        "time_error_max": largest(rows, "time_error"),
        "host_bound_time_error_max": largest(rows, "host_bound_time_error"),
    }


# --- exported

EXPORTED_COLUMNS = [
    "objective",
    "file",
    "promised_tokens_per_s",
    "tokens_per_s",
    "speed_error",
    "promised_gib",
]
EXPORTED_COLUMNS += ["reserved_gib", "memory_error"]


def run_exported(args: argparse.Namespace) -> None:
    """Search with other objectives, run the exported files, and compare predicted with measured
    speed and memory.

    Each objective is one call of `autotune run --objective X --verify`, whose exported file trains
    for 200 micro batches. An error is the prediction divided by the measurement, minus 1.
    """
    rows = Rows.of(args)
    for objective in args.objectives:
        if not rows.has(objective=objective):
            rows.add(exported(objective, args))
            table(rows.all[-1:], EXPORTED_COLUMNS)
    finish(args, rows.fingerprint, rows.plain)


def exported(objective: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a row with the study's prediction for its winner and the measurement of the exported
    run.
    """
    options = [
        "--gpu",
        args.gpu,
        "--model",
        args.model,
        "--objective",
        objective,
        "--budget",
        args.budget,
        "--verify",
    ]
    study = run_study(scratch(), *options, "--out", "out")
    done = study["verification"]
    speed = done["promised_tokens_per_s"] * done["promised_step_s"] / done["seconds_per_step"]
    return {
        "objective": objective,
        "model": args.model,
        "config": TrainConfig(**done["config"]).label(),
        "file": done["file"],
        "micro_steps": done["micro_steps"],
        "promised_tokens_per_s": done["promised_tokens_per_s"],
        "tokens_per_s": speed,
        "speed_error": done["promised_tokens_per_s"] / speed - 1,
        "promised_gib": done["promised_gib"],
        "reserved_gib": done["reserved_gib"],
        "memory_error": done["promised_gib"] / done["reserved_gib"] - 1,
        "fingerprint": fingerprint_of(study),
    }


def summarize_exported(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "objectives": len(rows),
        "speed_error_max": largest(rows, "speed_error"),
        "memory_error_max": largest(rows, "memory_error"),
    }


MODES = {
    "depth": Mode(
        run=run_depth,
        result="objectives",
        summarize=summarize_depth,
        options={
            "--device": "cuda",
            "--models": [*MODELS, *SEEING],
            "--seconds": 3600.0,
            "--rows": None,
        },
    ),
    "exported": Mode(
        run=run_exported,
        result="exported_objectives",
        summarize=summarize_exported,
        options={
            "--gpu": "auto",
            "--model": "qwen2.5-3b",
            "--budget": "55s",
            "--objectives": {"nargs": "*", "default": ["reward", "classification", "dpo"]},
            "--rows": None,
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

"""Predict whole models from two truncated depths, for each objective and several families, and measure them.

Each is trained through the trainer that people use for it: TRL's for pairs and wanted answers, transformers' for the
next token and for labels. A micro batch has 16 rows of 1,024 tokens, half of which are an answer; a pair has two of
them. Models that take images are trained on 256 tokens beside an image of 896 by 672 pixels, with the vision tower
frozen. Every layer is recomputed. An error is the prediction divided by what the whole model took, minus 1: of the
allocated peak, and of the time of a step of four micro batches. Where the host sets the pace (`host_bound`) no line in
depth holds for times, and a search measures them whole.

On a CPU it is a trial run with tiny models of the same families.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Failed, Rows, largest, save, table

from autotune.catalog import resolve_model
from autotune.core.errors import AutotuneError
from autotune.core.images import picture_of, sees_images
from autotune.core.objective import Objective
from autotune.core.probe_types import Measurement, MicroBatch, Outcome, ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import depths, extrapolate
from autotune.probe.supervisor import WorkerProber
from autotune.problem.performance import step_time_s
from autotune.study.evaluator import shortened

MICROS = 4  # micro batches of a step
MODELS = ("llama-3.2-3b", "qwen2.5-3b", "qwen3-4b", "gemma-2-2b", "phi-3.5-mini", "mistral-7b")
SEEING = ("qwen2.5-vl-3b", "gemma-3-4b", "smolvlm")
IMAGE, SMALL_IMAGE, TEXT = (896, 672), (224, 168), 256  # width and height; tokens beside the image
ROWS, LENGTH = 16, 1024
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"head_dim": 32, "num_hidden_layers": 8, "vocab_size": 512}
SMALL_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_heads": 2, "depth": 2}
SMALL_VISION |= {"num_hidden_layers": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
SMALL_SIDES = {"gemma3": {"image_size": 224}, "idefics3": {"image_size": 168}}
SMALL_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 4},
}
COLUMNS = ["model", "objective", "peak_gib", "memory_error", "step_s", "time_error", "host_share", "seconds", "failed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try it with tiny models")
    parser.add_argument("--models", nargs="*", default=[*MODELS, *SEEING])
    parser.add_argument("--limit-s", type=float, default=3600.0, help="begin no other model after this time")
    parser.add_argument("--earlier", type=Path, help="objectives.jsonl of an earlier call")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows, began = Rows("objectives", args.out, args.earlier), time.monotonic()
    with WorkerProber(args.device, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as prober:
        for name in args.models:
            for objective in (Objective.SFT,) if resolve_model(name).sees_images else Objective:
                if time.monotonic() - began > args.limit_s or rows.has(model=name, objective=str(objective)):
                    continue
                rows.add(compare(prober, name, objective))
                print(", ".join(f"{key} {rows.all[-1].get(key)}" for key in COLUMNS), flush=True)
        table(rows.all, COLUMNS)
        save("objectives", prober.fingerprint, summarize(rows.all), rows.all, args.out)
    print(summarize(rows.all))


def compare(prober: WorkerProber, name: str, objective: Objective) -> dict[str, Any]:
    """A row with the errors of a prediction; where a probe fails, with its reason."""
    began, on_cpu = time.monotonic(), prober.device == "cpu"
    model = dict(resolve_model(name).config)
    knobs: dict[str, Any] = {"precision": "fp32", "seq_len": 64} if on_cpu else {"seq_len": LENGTH}
    request = ProbeRequest(
        config=TrainConfig(micro_batch_size=ROWS // objective.rows_per_example, checkpointing="full", **knobs),
        model=_small(model) if on_cpu else model,
        device=prober.device,
        memory_gib=8.0 if on_cpu else prober.memory_gib,
        trainer=objective.trainers[0],
        objective=objective,
        trained_share=0.5,
    )
    if sees_images(request.model):
        request = _with_images(request)
    row: dict[str, Any] = {"model": name, "objective": str(objective), "config": request.config.label()}
    try:
        shape = prober.describe(request.model)
        if shape is not None and not shape.sdpa:
            request = replace(request, config=replace(request.config, attention="eager"))
        pair = depths(shape, request.config.checkpoint_every) if shape else None
        if shape is None or pair is None:
            raise Failed("no two depths are known for this model")
        found = extrapolate([(depth, measured(prober, shortened(request, depth))) for depth in pair], shape.num_layers)
        whole = measured(prober, replace(request, min_timed_s=2.0))
    except (Failed, AutotuneError) as error:
        return row | {"failed": str(error), "seconds": time.monotonic() - began}
    predicted = found.measurement
    pace = "host_bound_" if predicted.host_bound else ""
    return row | {
        "depths": [*pair, shape.num_layers],
        "peak_gib": whole.peak_allocated_gib,
        "memory_error": predicted.peak_allocated_gib / whole.peak_allocated_gib - 1,
        "step_s": step_time_s(whole, MICROS),
        "host_share": predicted.host_share,
        f"{pace}time_error": step_time_s(predicted, MICROS) / step_time_s(whole, MICROS) - 1,
        "seconds": time.monotonic() - began,
        "fingerprint": to_data(prober.fingerprint),
    }


def _with_images(request: ProbeRequest) -> ProbeRequest:
    """The same with an image in each row, and room for it."""
    size = SMALL_IMAGE if request.device == "cpu" else IMAGE
    picture, rows = picture_of(request.model, *size), request.config.micro_batch_size
    length = picture.length + TEXT
    kind = MicroBatch(rows=((length,),) * rows, length=length, share=1.0, images=((picture,),) * rows)
    return replace(request, config=replace(request.config, seq_len=length), micro_batches=(kind,), trained_share=1.0)


def _small(model: dict[str, Any]) -> dict[str, Any]:
    if sees_images(model):
        ends = {name: 500 + place for place, name in enumerate(model) if "_token_i" in name}
        vision = model["vision_config"]
        small = {name: value for name, value in SMALL_VISION.items() if name in vision}
        more, side = SMALL_TEXT.get(model["model_type"], {}), SMALL_SIDES.get(model["model_type"], {})
        return (
            model | ends | {"text_config": _small(model["text_config"]) | more, "vision_config": vision | small | side}
        )
    kept = {key: value for key, value in model.items() if key not in ("layer_types", "rope_scaling", "rope_parameters")}
    return kept | SMALL


def measured(prober: WorkerProber, request: ProbeRequest) -> Measurement:
    """What a probe measured. Raises Failed."""
    result = prober.probe(request, prober.logs / "probe.log")
    if result.outcome is not Outcome.OK or result.measurement is None:
        raise Failed(f"{result.outcome}: {result.reason}")
    return result.measurement


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if "memory_error" in row]
    return {
        "families": len({row["model"] for row in measured}),
        "objectives": len({row["objective"] for row in measured}),
        "configs": len(measured),
        "failed": sum("failed" in row for row in rows),
        "host_bound": sum("host_bound_time_error" in row for row in rows),
        "memory_error_max": largest(rows, "memory_error"),
        "time_error_max": largest(rows, "time_error"),
        "host_bound_time_error_max": largest(rows, "host_bound_time_error"),
    }


if __name__ == "__main__":
    main()

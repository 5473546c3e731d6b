"""Compare what `autotune plan --objective` estimates with whole models that were measured for each objective.

The measurements are those of `objectives`: peaks of memory, and times of a step of four micro batches. The formulas
had been made by others of the same models, on an H100, with half as many rows of half as many tokens and nothing
recomputed. A dry probe counts the same trainings, by the steps of the same trainers. `as_sft_error` is what the
formula of the next token says for as many rows.

Gemma 2 is counted with torch's attention and without its cap of the scores, as transformers 5.17, which measured,
allows and later versions do not: its measurements agree with that alone. No GPU is needed.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, save, table
from objectives import LENGTH, MICROS, ROWS

from autotune.catalog import ModelSpec, resolve_device, resolve_model
from autotune.core.objective import Objective
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import memory_breakdown
from autotune.prediction.step_time import UNKNOWN_HOST, estimate_step_time
from autotune.prediction.transfer import REFERENCE, interval, speed_transfer

MICRO_STEPS = 2  # of a probe
COLUMNS = ["model", "objective", "peak_gib", "error", "counted_error", "as_sft_error", "time_error", "time_inside"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counted", type=Path, help="a result of an earlier call, of which the counts are taken")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured = json.loads((RESULTS / "objectives.json").read_text())["rows"]
    earlier = json.loads(args.counted.read_text())["rows"] if args.counted else []
    counts = {(row["model"], row["objective"]): row["counted_gib"] for row in earlier}
    rows = [
        compare(row, counts) for row in measured if "peak_gib" in row and not resolve_model(row["model"]).sees_images
    ]
    table(rows, COLUMNS)
    save("plan_objectives", None, summarize(rows), rows, args.out)
    print(summarize(rows))


def compare(row: dict[str, Any], counts: dict[tuple[str, str], float]) -> dict[str, Any]:
    """What was measured, and how far the formulas and the count are off."""
    model, objective = resolve_model(row["model"]), Objective(row["objective"])
    as_rows = TrainConfig(micro_batch_size=ROWS, seq_len=LENGTH, checkpointing="full")
    config = replace(as_rows, micro_batch_size=ROWS // objective.rows_per_example)
    memory = memory_breakdown(model, config, MICRO_STEPS, objective=objective)
    as_sft = memory_breakdown(model, as_rows)
    step = estimate_step_time(model, config, UNKNOWN_HOST, objective)
    transfer = speed_transfer(resolve_device(REFERENCE), resolve_device(row["fingerprint"]["device"]))
    assert memory and as_sft and step and transfer
    step, peak = step.on(transfer), row["peak_gib"]
    step_s = MICROS * step.micro_s + step.rest_s
    low, high = interval(step_s, step.error)
    counted = counts.get((row["model"], row["objective"])) or count(model, config, objective)
    return {
        "model": row["model"],
        "objective": row["objective"],
        "config": row["config"],
        "peak_gib": peak,
        "planned_gib": memory.peak_gib,
        "error": memory.peak_gib / peak - 1,
        "counted_gib": counted,
        "counted_error": counted / peak - 1,
        "as_sft_error": as_sft.peak_gib / peak - 1,
        "step_s": row["step_s"],
        "time_error": step_s / row["step_s"] - 1,
        "time_inside": low <= row["step_s"] <= high,
        "host_share": row["host_share"],
    }


def count(model: ModelSpec, config: TrainConfig, objective: Objective) -> float:
    """The peak in GiB as a dry probe of the whole model counts it."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

    from autotune.dry.counting import dry_probe

    shape = dict(model.config)
    if shape["model_type"] == "gemma2":
        Gemma2PreTrainedModel._supports_sdpa, shape["attn_logit_softcapping"] = True, None
    trainer = objective.trainers[0]
    request = ProbeRequest(config=config, model=shape, memory_gib=1.0, trainer=trainer, objective=objective)
    return dry_probe(request).peak_allocated_gib


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the other objectives than the next token, and of that (`sft_`)."""
    summary: dict[str, Any] = {"models": len({row["model"] for row in rows if row["objective"] != "sft"})}
    for name, group in (
        ("", [row for row in rows if row["objective"] != "sft"]),
        ("sft_", [row for row in rows if row["objective"] == "sft"]),
    ):
        summary[f"{name}configs"] = len(group)
        for key in ("error", "counted_error", "as_sft_error", "time_error"):
            errors = [abs(row[key]) for row in group]
            summary |= {f"{name}{key}_median": statistics.median(errors), f"{name}{key}_max": max(errors)}
        summary[f"{name}time_inside"] = sum(row["time_inside"] for row in group)
    return summary


if __name__ == "__main__":
    main()

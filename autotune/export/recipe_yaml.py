"""Writes recipe.yaml: the complete result in autotune's own format, which no trainer reads."""

import json
from typing import Any

import yaml

from autotune.core.json_view import json_data
from autotune.core.serialization import to_data
from autotune.export.header import allocator, comment, eval_steps, save_steps, summary_lines
from autotune.study.summary import Recipe

SCHEMA_VERSION = 1


def export(recipe: Recipe) -> dict[str, str]:
    """Return the text of `recipe.yaml`.

    The file has every knob, the measured values, the cost, the baseline, and the environment of the
    measurement.
    """
    # If one object occurred twice, YAML would write an anchor and an alias. The conversion to JSON
    # and back copies every object, so this cannot happen.
    data = json.loads(json.dumps(_data(recipe)))
    body = yaml.safe_dump(data, sort_keys=False, width=120)
    return {"recipe.yaml": f"{comment(summary_lines(recipe))}\n{body}"}


def _data(recipe: Recipe) -> dict[str, Any]:
    workload = recipe.workload
    model = recipe.model
    device = recipe.device
    winner = json_data(recipe.winner)

    return {
        "schema_version": SCHEMA_VERSION,
        "study": recipe.study,
        "model": {
            "name": model.name,
            "params": model.params,
            "weights": model.weights,
            "config": model.config,
        },
        "device": {"name": device.name, "memory_gib": device.memory_gib},
        "workload": workload.facts()
        | {
            "global_batch": {
                "sequences": workload.global_batch,
                "mean_examples": recipe.shape.examples_per_step,
                "micro_batch_size": recipe.config.micro_batch_size,
                "accumulation": recipe.accumulation,
            },
            "num_steps": recipe.winner.cost.num_steps,
        },
        "run": {
            "eval_steps": eval_steps(recipe) if recipe.workload.held_out() else None,
            "save_steps": save_steps(recipe),
            "report_to": recipe.run_options.report_to,
        },
        "config": winner["config"],
        "evidence": winner["evidence"],
        "performance": winner["performance"],
        "memory": winner["memory"],
        "cost": winner["cost"] | {"evidence": recipe.winner.cost.evidence.value},
        "price": None if recipe.price is None else to_data(recipe.price),
        "baseline": None if recipe.baseline is None else json_data(recipe.baseline),
        "speedup": recipe.speedup,
        "speedup_interval": recipe.speedup_interval,
        "speedup_evidence": recipe.speedup_evidence.value if recipe.baseline else None,
        "reason": recipe.reason,
        "numerics": recipe.numerics,
        "caveats": list(recipe.caveats),
        "trainer": recipe.trainer,
        "environment": dict([allocator(recipe)]),
        "fingerprint": {"digest": recipe.fingerprint.digest, **to_data(recipe.fingerprint)},
    }

"""train.py and what goes with it: plain transformers and peft, training exactly what was probed."""

import json
import math
import re
import shlex
from importlib import resources
from typing import Any

from autotune.core.train_config import TrainConfig
from autotune.export.header import (
    ALLOCATOR,
    ALLOCATOR_VARIABLE,
    LIGER,
    base_dtype,
    comment,
    facts,
    has_published_weights,
    learning_rate,
    model_source,
    save_steps,
    warmup_steps,
)
from autotune.study.summary import Recipe

_LINE = 116
SAMPLED = 16  # lengths that stand for all of them


def export(recipe: Recipe) -> dict[str, str]:
    """The script and what it imports, its launcher (executable), and the shape for random weights."""
    lines = facts(recipe)
    head = comment("; ".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True))  # the script is to stay short
    if recipe.trainer != "transformers":
        head += "\n" + comment(
            ["Measured with TRL's SFTTrainer, not with this script: its speed and its peak are others."]
        )
    parts = {
        "HEADER": head,
        "SETTINGS": _literal(_settings(recipe)),
        "ALLOCATOR_VARIABLE": ALLOCATOR_VARIABLE,
        "ALLOCATOR": ALLOCATOR,
    }
    template = resources.files("autotune.export").joinpath("train_template.py.txt").read_text(encoding="utf-8")
    # One pass: a name that looks like a placeholder stays a name.
    script = re.sub(r"@([A-Z_]+)@", lambda match: parts[match[1]], template)
    beside = {f"{name}.py": ("autotune.export", f"{name}_template.py.txt") for name in ("rows", "clock")}
    beside["lean.py"] = ("autotune.probe.runtime", "lean_trainer.py")
    if recipe.winner.config.loss == "chunked":
        beside["chunked_loss.py"] = ("autotune.probe.runtime", "chunked_loss.py")
    if _levers(recipe.winner.config):
        beside["levers.py"] = ("autotune.probe.runtime", "patches.py")
    return {
        "train.py": script,
        **{
            name: f"{head}\n{resources.files(at).joinpath(file).read_text('utf-8')}"
            for name, (at, file) in beside.items()
        },
        "launch.sh": _launcher(head),
        "model_config.json": json.dumps(recipe.model.config, indent=2) + "\n",
    }


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Every knob under its own name, and what follows from them, so that the script decides nothing."""
    config = recipe.winner.config
    lengths = recipe.workload.lengths.sample(SAMPLED, config.seq_len)  # of random examples
    lengths = lengths if len(set(lengths)) > 1 else lengths[:1]
    # Fewer examples would be no batch at all.
    least = math.ceil(2 * recipe.shape.examples_per_step) if config.packing else config.micro_batch_size
    bitsandbytes: dict[str, Any] | None = None
    linear: dict[str, Any] = {}
    lora: dict[str, Any] | None = None
    if config.method == "lora":
        lora = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": 0.0}
        lora |= {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        lora |= {"use_dora": config.dora, "use_rslora": config.rslora}
    if config.quantization == "nf4":
        bitsandbytes = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": config.double_quant,
        }
        linear = {"compress_statistics": config.double_quant, "quant_type": "nf4"}
    elif config.quantization == "int8":
        bitsandbytes = {"load_in_8bit": True}
        linear = {"has_fp16_weights": False, "threshold": 6.0}
    return {
        "model": model_source(recipe),
        "has_weights": has_published_weights(recipe),
        **config.as_dict(),
        "quantization": config.quantization,
        "base_dtype": base_dtype(config),
        "levers": _levers(config),
        "kernels": config.kernels,
        "liger": LIGER,
        "bitsandbytes": bitsandbytes,
        **({"linear": linear} if linear else {}),
        "lora": lora,
        "checkpoint_every": config.checkpoint_every,
        "examples": max(recipe.workload.examples, least),
        "lengths": lengths,
        "epochs": recipe.workload.epochs,
        "accumulation": recipe.accumulation,
        "learning_rate": learning_rate(config),
        "warmup_steps": warmup_steps(recipe),
        "save_steps": save_steps(recipe),
    }


def _levers(config: TrainConfig) -> list[str]:
    """What of `levers.py` the script needs."""
    used = {"fp8": config.quantization == "fp8", "cudnn": config.attention == "sdpa_cudnn", "offload": config.offloads}
    return [name for name, is_used in used.items() if is_used]


def _literal(values: dict[str, Any]) -> str:
    """A dict as an ASCII Python literal, several items a line; only `repr` decides how a value is written."""
    lines = ["{"]
    for key, value in values.items():
        item = f"{key!r}: {value!r},".encode("ascii", "backslashreplace").decode("ascii")
        if len(lines) > 1 and len(lines[-1]) + len(item) < _LINE:
            lines[-1] += f" {item}"
        else:
            lines.append(f"    {item}")
    return "\n".join(lines).removesuffix(",") + "}"


def _launcher(head: str) -> str:
    return f"""#!/usr/bin/env bash
{head}
set -euo pipefail
export {ALLOCATOR_VARIABLE}={shlex.quote(ALLOCATOR)}
exec "${{PYTHON:-python3}}" "$(dirname -- "${{BASH_SOURCE[0]}}")/train.py" "$@"
"""

"""Writes train.py and its folder: a training script that needs only transformers and peft.

The script reads the configuration from train_config.json.
"""

import json
import math
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

from autotune.core.parallelism import BUILT_AS_SHARDS
from autotune.export.header import (
    allocator,
    eval_steps,
    has_published_weights,
    model_source,
    on_cpu,
    save_steps,
    summary_lines,
    warmup_steps,
)
from autotune.prediction.memory_formula import NF4_STATISTICS
from autotune.probe.model_settings import model_settings
from autotune.problem.images import images_of
from autotune.problem.run_options import KEPT_CHECKPOINTS
from autotune.study.summary import Recipe
from autotune.trainer.settings import UNSHARDED_SHARE, RunSettings

# The number of row lengths in the sample that represents the run. The sample always contains the
# longest length, whose share would be too large in a smaller sample.
SAMPLED = 1024
# If the first line of a script sets the encoding, Python ignores an encoding in the second line.
ENCODING = "# -*- coding: utf-8 -*-\n"
SCRIPT = '''\
"""Fine-tune with exactly the configuration that was measured. For its options: \
python train.py --help

The configuration is in train_config.json, the training in runtime/train.py.
"""

from pathlib import Path

from runtime.command_line import start

if __name__ == "__main__":
    start(Path(__file__).parent)
'''
LAUNCHER = """\
#!/usr/bin/env bash
# Run train.py beside this file with the interpreter in $PYTHON, or python3; options are passed on.
set -euo pipefail
export {allocator}
exec "${{PYTHON:-python3}}" -- "$(dirname -- "${{BASH_SOURCE[0]}}")/train.py" "$@"
"""


def export(recipe: Recipe) -> dict[str, str]:
    """Return the script, its launcher, its modules, its settings and the model's config, as texts.

    The script needs the model's config to make random weights. Only the JSON files contain names
    that users or model authors chose.
    """
    return {
        "train.py": ENCODING + SCRIPT,
        "train_config.json": settings(recipe).to_json(),
        "launch.sh": LAUNCHER.format(allocator="=".join(allocator(recipe))),
        "model_config.json": json.dumps(recipe.model.config, indent=2) + "\n",
        **runtime_files(),
    }


@cache
def runtime_files() -> dict[str, str]:
    """Return the modules of `trainer` by their names in the exported folder."""
    files = sorted(resources.files("autotune.trainer").iterdir(), key=lambda file: file.name)
    python = [file for file in files if file.name.endswith(".py")]
    return {f"runtime/{file.name}": ENCODING + file.read_text(encoding="utf-8") for file in python}


def settings(recipe: Recipe) -> RunSettings:
    """Return the content of train_config.json for this recipe."""
    config = recipe.config
    workload = recipe.workload
    about = summary_lines(recipe)
    if recipe.trainer != "transformers":
        about.append(
            "Measured with TRL's SFTTrainer, not with this script, whose speed and peak memory"
            " differ."
        )

    # There must be enough examples to fill one batch.
    one_batch = (
        math.ceil(2 * recipe.shape.examples_per_step) if config.packing else config.micro_batch_size
    )
    examples = max(recipe.workload.trained, one_batch)
    lengths = sample(recipe, min(SAMPLED, examples))
    lengths = lengths if len(set(lengths)) > 1 else lengths[:1]

    return RunSettings(
        about=about,
        versions={"python": recipe.fingerprint.python, **recipe.fingerprint.packages},
        model=model_source(recipe),
        has_published_weights=has_published_weights(recipe),
        use_cpu=on_cpu(recipe),
        model_settings=model_settings(
            config, recipe.model.text_type, workload.objective, workload.vision
        ),
        method=config.method,
        precision=config.precision,
        micro_batch_size=config.micro_batch_size,
        accumulation=recipe.accumulation,
        seq_len=config.seq_len,
        packing=config.packing,
        objective=str(recipe.workload.objective),
        loss_on=recipe.workload.loss_on,
        trained_share=recipe.workload.lengths.trained_share,
        padding=config.padding,
        padded_lengths=_padded_lengths(recipe),
        group_by_length=config.group_by_length,
        dealt=recipe.workload.deals(config),
        optimizer=config.optimizer,
        optimizer_in_backward=config.optimizer_in_backward,
        cuda_graphs=config.cuda_graphs,
        loss=config.loss,
        kernels=config.kernels,
        compile=config.compile,
        loader_workers=config.loader_workers,
        allocator=config.allocator,
        num_gpus=config.num_gpus,
        sharding=config.sharding,
        copies=config.copies,
        sync_each_batch=config.sync_each_batch,
        offload=config.offload,
        is_larger_than_gpu=_is_larger_than_gpu(recipe),
        epochs=recipe.workload.epochs,
        learning_rate=recipe.learning_rate,
        warmup_steps=warmup_steps(recipe),
        save_steps=save_steps(recipe),
        save_total_limit=KEPT_CHECKPOINTS,
        checkpoints_gib=pauses.disk_gib if (pauses := recipe.winner.cost.pauses) else None,
        eval_share=recipe.workload.eval_share,
        eval_steps=eval_steps(recipe),
        report_to=recipe.run_options.report_to,
        run_name=recipe.study,
        examples=examples,
        lengths=lengths,
        images=_images(recipe, lengths),
        dataset=recipe.data.path if recipe.data else None,
        split=recipe.data.split if recipe.data else None,
    )


def _images(recipe: Recipe, lengths: list[int]) -> list[list[dict[str, Any]]]:
    """Return the images for a row of each length; the longest row gets the largest images.

    The list is empty if the study's examples have no images.
    """
    if not recipe.workload.pictured:
        return []
    pictured = recipe.workload.pictured
    longest = max(lengths)
    return [
        [asdict(picture) for picture in images_of(pictured, length, largest=length == longest)]
        for length in lengths
    ]


def _is_larger_than_gpu(recipe: Recipe) -> bool:
    """Return whether each GPU holds only a shard of a model that is too large for one GPU.

    In full fine-tuning, the model's size is the size of its fp32 master weights.
    """
    config = recipe.config
    measured = recipe.winner.measurement
    element_bytes = 2.0 if config.method == "lora" and config.base_dtype != "float32" else 4.0
    if config.quantization == "nf4":
        element_bytes = 0.5 + NF4_STATISTICS[config.double_quant]
    whole_gib = element_bytes * measured.total_params / 2**30
    return config.sharding in BUILT_AS_SHARDS and whole_gib > UNSHARDED_SHARE * measured.limit_gib


def sample(recipe: Recipe, number: int) -> list[int]:
    """Return `number` row lengths, in tokens, that represent the run.

    The longest length is included, because it determines the peak memory.
    """
    lengths = recipe.workload.lengths.sample(number, recipe.config.seq_len)
    lengths[lengths.index(max(lengths))] = min(
        recipe.workload.lengths.longest, recipe.config.seq_len
    )
    return lengths


def _padded_lengths(recipe: Recipe) -> list[int]:
    """Return the fixed lengths that rows are padded to, up to seq_len.

    `seq_len` is always included, because the full data may have longer rows than the study read.
    """
    lengths = recipe.workload.padded_lengths(recipe.config)
    if lengths and lengths[-1] < recipe.config.seq_len:
        return [*lengths, recipe.config.seq_len]
    return list(lengths)

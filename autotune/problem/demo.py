"""The demo model: a tiny model with trained weights and a tokenizer, made on its first use.

The demo model's shape is in the catalogue, so a study without a dataset needs no weights. With a
dataset, `probe.demo_model` trains the weights in a separate process. The weights are kept in the
user's cache.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.catalog import ModelSpec, resolve_model
from autotune.core.child_environment import child_environment
from autotune.core.errors import EnvironmentProblem
from autotune.core.files import write_errors
from autotune.core.process import module_command
from autotune.trainer.cache_folders import user_cache

NAME = "demo-3m"
VERSION = 1  # increase this version if `probe.demo_model` changes so that it makes other weights
TOY = (
    f"{NAME} is a toy: it learned some words from this program's own texts, and knows nothing."
    " It shows that each step works, not what a fine-tuned model can do"
)


def is_demo(model: ModelSpec) -> bool:
    """Return whether this is the demo model, with or without its weights."""
    return model.name == NAME


def with_weights(model: ModelSpec, say: Callable[[str], None]) -> ModelSpec:
    """Return the demo model with its weights and tokenizer, and any other model unchanged."""
    if not is_demo(model) or model.weights is not None:
        return model
    folder = str(demo_model(say))
    return replace(model, weights=folder, tokenizer=folder)


def demo_model(say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the directory of the demo model; train the model first if it is missing.

    Raises EnvironmentProblem if it cannot be trained, and StorageError if it cannot be written.
    """
    folder = user_cache() / "demo" / str(VERSION) / NAME
    if (folder / "config.json").is_file():
        return folder

    say(f"making the demo model {NAME}, once, in {folder}; this takes some seconds")
    with write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        done = subprocess.run(
            [*module_command("autotune.probe.demo_model"), str(scratch)],
            input=json.dumps(resolve_model(NAME).config),
            capture_output=True,
            text=True,
            check=False,
            env=child_environment(os.environ, "cpu"),
        )
        if done.returncode:
            reason = (done.stderr.strip() or "no output").splitlines()[-1]
            raise EnvironmentProblem(
                f"the demo model cannot be made: {reason}",
                remedy="`autotune doctor` shows what is missing",
            )
        if not folder.exists():  # another process may have made the model meanwhile
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder

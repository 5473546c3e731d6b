# -*- coding: utf-8 -*-
"""Describes the origin of a run: its data, tokenizer, weights and settings.

Checkpoints store the origin, and a run continues only from a checkpoint with the same origin.
Datasets are compared by the content of the files that hold the rows. Image files are not compared.
Weights in a directory are compared by their config and the sizes of their files.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_callback import ExportableState

from .reading import find_files
from .settings import Options, RunSettings
from .token_cache import tokenizer_facts

# Settings that are not compared: they do not change the trained weights, or are included in other
# values that are compared
FREE = {"about", "versions", "method", "model", "has_published_weights", "report_to", "run_name"}
FREE |= {"save_steps", "save_total_limit", "checkpoints_gib", "loader_workers", "allocator"}
ROWS = ("examples", "lengths", "images")  # settings that describe random rows
SHOWN = 8  # the number of digits of a digest that a message shows


class Origin(TrainerCallback, ExportableState):
    """Makes the Trainer store a run's origin in the trainer_state.json of each checkpoint."""

    def __init__(self, facts: dict[str, Any]) -> None:
        """`facts` is the result of `describe`."""
        self._facts = facts

    def state(self) -> dict[str, Any]:
        """Return the facts in the form that the Trainer stores."""
        return {"args": {}, "attributes": self._facts}


def describe(settings: RunSettings, options: Options) -> dict[str, Any]:
    """Return the settings, and the names and digests of the dataset, the tokenizer and the model.

    Raises BadDataset if the dataset has no files.
    """
    values = {name: value for name, value in asdict(settings).items() if name not in FREE}
    random_rows = {name: values.pop(name) for name in ROWS}
    values |= values.pop("model_settings")
    values |= {"held_out": options.held_out}

    if options.dataset is None:
        lengths = [Path(options.lengths)] if options.lengths else []
        data = ["random rows", _digest(random_rows, _contents(lengths))]
        return {"dataset": data, "settings": values}

    name = options.dataset + (f" (split {options.split})" if options.split else "")
    files = find_files(Path(options.dataset), options.split)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    return {
        "dataset": [name, _digest(_contents(files))],
        "tokenizer": [options.model, _digest(tokenizer_facts(tokenizer))],
        "model": [options.model, _digest(_weights(Path(options.model)))],
        "settings": values,
    }


def find_difference(checkpoint: str, facts: dict[str, Any]) -> str | None:
    """Return a sentence about the first fact that differs from the checkpoint's, or None.

    A checkpoint of an earlier version of autotune has no facts; then the sentence says so.
    """
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    stored = (state.get("stateful_callbacks") or {}).get(Origin.__name__)
    start = f"give another --output-dir: {checkpoint}"
    if stored is None:
        return f"{start} does not say on which data it was trained"
    stored = stored["attributes"]

    phrases = {
        "dataset": "on",
        "tokenizer": "with the tokenizer of",
        "model": "from the weights of",
    }
    for key, phrase in phrases.items():
        before, now = (one.get(key, ["nothing", ""]) for one in (stored, facts))
        if before[1] != now[1]:
            return f"{start} was trained {phrase} {_show(before)}, not {phrase} {_show(now)}"

    # The checkpoint's JSON has lists instead of tuples.
    settings = json.loads(json.dumps(facts["settings"]))
    for key in sorted(stored["settings"] | settings):
        before, now = (one.get(key) for one in (stored["settings"], settings))
        if before != now:
            return f"{start} was trained with {key} {before}, not {now}"
    return None


def _show(fact: list[str]) -> str:
    name, digest = fact
    return f"{name} ({digest[:SHOWN]})" if digest else name


def _contents(files: Iterable[Path]) -> list[str]:
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests


def _weights(model: Path) -> Any:
    """Return the facts about the weights in a directory.

    If there is no directory, return the Hub name.
    """
    if not model.is_dir():
        return str(model)
    sizes = sorted((file.name, file.stat().st_size) for file in model.glob("*.safetensors"))
    return [sizes, _contents([model / "config.json"])]


def _digest(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()

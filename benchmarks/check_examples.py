"""What `autotune check` answers to the example files that Axolotl, LLaMA-Factory and TRL ship.

Each file is checked on one H100, as the command does it, but without a GPU and without the Hub: a
model that is not in the catalogue counts as refused. The answers need `examples` of the three
repositories, in folders of their own. A model without a formula is counted once, and the count
stays in the user's cache.
"""

import argparse
import json
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from bench import Mode, Rows, finish, run_program, table

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported


from autotune.core.errors import AutotuneError
from autotune.planning.run_check import check
from autotune.report.values.check import VERDICTS
from tests.helpers.mutations import is_plain

CARD, SAMPLED = "h100", 20
# Kinds of refusals by their text, in this order. Any other text is a value that is not supported.
REASONS = {
    "no training": "describes no training|trains nothing",
    "tool": "cannot tell which tool",
    "model": "neither in the catalogue nor a directory",
    "objective": "another objective|no probe trains for|for another objective",
    "no count": "cannot be counted",
}

BY_HAND = (
    "The method, rank, targets, batch, length, precision, optimizer, quantisation, checkpointing,"
    f" packing and attention of two samples of {SAMPLED} files were compared with the rows, key"
    " by key. 34 of the 40 files agreed. The others led to corrections: Axolotl's experts in 4"
    " bits are counted although the file also switches Liger's kernels on; layers that a model of"
    " GLM-4 lacks get no adapters; BAdam keeps weights in bf16; Axolotl pads the rows of reward"
    " models; and float16 has a note. One difference is left: torchao's 8-bit AdamW is counted as"
    " that of bitsandbytes."
)


def row_of(folder: Path, file: Path) -> dict[str, Any]:
    """Return the answer to one file: the settings and the verdict, or the reason of a refusal."""
    row: dict[str, Any] = {"file": name_of(folder, file)}
    try:
        report = check(file, {"gpu": CARD})
    except AutotuneError as error:
        message = str(error).replace(str(file), "FILE")
        outcome = "refused" if is_plain(error) else "unanswered"
        return row | {"outcome": outcome, "reason": reason_of(message), "why": message}
    except Exception as error:  # the program's own fault, which the summary counts
        return row | {"outcome": "unanswered", "reason": "error", "why": repr(error)}
    run = report.checked.run
    return row | {
        "outcome": "answered",
        "format": run.format,
        "model": report.model.name,
        "label": run.config.label(),
        "accumulation": run.accumulation,
        "verdict": VERDICTS[report.checked.state],
        "need_gib": round(report.checked.bounds.reported.peak_reserved_gib, 2),
        "notes": list(run.notes),
    }


def name_of(folder: Path, file: Path) -> str:
    """Return the path of a file from the folder that its repository's folder is in."""
    return str(Path(folder.name) / file.relative_to(folder))


def reason_of(message: str) -> str:
    """The kind of a refusal."""
    return next(
        (name for name, pattern in REASONS.items() if re.search(pattern, message)), "not supported"
    )


def mutants(files: list[Path], folder: Path) -> list[dict[str, Any]]:
    """Check mutated copies of answered files in a folder, and say whether each fault is detected.

    The mutations are a renamed key, a value out of range, and a removed file that the run names.
    """
    chosen = random.Random(0)
    rows = []
    for mutation, mutate in MUTATIONS.items():
        shuffled = chosen.sample(files, len(files))
        made = (
            row for file in shuffled for row in [mutate(chosen, file, folder)] if row is not None
        )
        rows += [{"mutation": mutation} | row for row in islice(made, MUTANTS)]
    return rows


def renamed(chosen: random.Random, file: Path, folder: Path) -> dict[str, Any]:
    """Rename a key, by one letter twice. The answer has to name the new key."""
    data = yaml.safe_load(file.read_text())
    key = chosen.choice([key for key, value in data.items() if len(key) > 3 and value is not None])
    place = chosen.randrange(1, len(key))
    name = key[:place] + key[place - 1] + key[place:]
    said = said_of(
        {name if one == key else one: value for one, value in data.items()}, folder / file.name
    )
    return {
        "file": file.name,
        "change": f"{key} is {name}",
        "detected": repr(name) in said or name in said,
        "said": said,
    }


def out_of_range(chosen: random.Random, file: Path, folder: Path) -> dict[str, Any] | None:
    """Give a key a value that it cannot have. A refusal has to name the key."""
    data = yaml.safe_load(file.read_text())
    if not (keys := [key for key in RANGES if key in data]):
        return None
    key = chosen.choice(keys)
    said = said_of(data | {key: RANGES[key]}, folder / file.name)
    detected = said.startswith("refused: ") and key in said
    return {
        "file": file.name,
        "change": f"{key} is {RANGES[key]}",
        "detected": detected,
        "said": said,
    }


def removed(chosen: random.Random, file: Path, folder: Path) -> dict[str, Any] | None:
    """Name a file of DeepSpeed, and remove it. The answer has to name it, and only then."""
    data = yaml.safe_load(file.read_text()) | {"deepspeed": "settings/zero.json"}
    beside = folder / "settings" / "zero.json"
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}))
    present = said_of(data, folder / file.name)
    beside.unlink()
    absent = said_of(data, folder / file.name)
    if present.startswith("refused: "):  # DeepSpeed does not go with this file
        return None
    name = "'settings/zero.json' was found neither"
    detected = name in absent and name not in present
    return {
        "file": file.name,
        "change": "settings/zero.json is removed",
        "detected": detected,
        "said": absent,
    }


def said_of(data: dict[str, Any], path: Path) -> str:
    """Return the notes of the answer to a file with this content, or the reason of a refusal."""
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    try:
        report = check(path, {"gpu": CARD})
    except AutotuneError as error:
        return f"refused: {error}".replace(str(path), "FILE")
    return "; ".join(report.notes)


MUTATIONS: dict[str, Callable[[random.Random, Path, Path], dict[str, Any] | None]] = {
    "a key renamed": renamed,
    "a value out of range": out_of_range,
    "a file removed": removed,
}
MUTANTS = 10  # of each mutation
RANGES: dict[str, Any] = {
    "cutoff_len": 0,
    "gradient_accumulation_steps": -2,
    "learning_rate": -1e-4,
    "lora_dropout": 1.5,
    "lora_r": -8,
    "lora_rank": 0,
    "micro_batch_size": 0,
    "num_epochs": -1,
    "num_train_epochs": -1,
    "per_device_train_batch_size": 0,
    "sequence_len": -4096,
    "val_set_size": -0.5,
    "val_size": -0.5,
    "warmup_ratio": 1.5,
    "weight_decay": -0.1,
}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many files were answered, refused by reason, and neither; how many mutants detected."""
    mutated = [row for row in rows if "mutation" in row]
    rows = [row for row in rows if "mutation" not in row]
    outcomes = Counter(row["outcome"] for row in rows)
    return {
        "files": len(rows),
        **{outcome: outcomes[outcome] for outcome in ("answered", "refused", "unanswered")},
        "by_reason": dict(
            Counter(row["reason"] for row in rows if row["outcome"] == "refused").most_common()
        ),
        "by_verdict": dict(
            Counter(row["verdict"] for row in rows if row["outcome"] == "answered").most_common()
        ),
        "mutants": len(mutated),
        "detected": sum(row["detected"] for row in mutated),
        "notes": BY_HAND,
    }


def sample(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that are compared with their files by hand, drawn with a seed."""
    return random.Random(0).sample([row for row in rows if row["outcome"] == "answered"], SAMPLED)


def run(args: argparse.Namespace) -> None:
    """Check all files of the folders."""
    found = Rows.of(args)
    for folder in args.folders:
        for file in sorted(path for path in folder.rglob("*") if path.suffix in (".yml", ".yaml")):
            if not found.has(file=name_of(folder, file)):
                found.add(row_of(folder, file))
    rows = found.all
    answered = [row["file"] for row in rows if row["outcome"] == "answered"]
    parents = {folder.name: folder.parent for folder in args.folders}
    files = [parents[Path(name).parts[0]] / name for name in answered]
    with tempfile.TemporaryDirectory() as folder:
        mutated = mutants(files, Path(folder))
    finish(args, None, rows + mutated)
    table(sample(rows), ["file", "label", "verdict"])


MODES = {
    "": Mode(
        run=run,
        result="check_examples",
        summarize=summarize,
        options={
            "--rows": None,
            "folders": {
                "type": Path,
                "nargs": "+",
                "metavar": "DIR",
                "help": "folders of the repositories",
            },
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

"""What `autotune check` answers to the example files that Axolotl, LLaMA-Factory and TRL ship.

Each file is checked on one H100, as the command does it, but without a GPU and without the Hub: a
model that is not in the catalogue counts as refused. The answers need `examples` of the three
repositories, in folders of their own. A model without a formula is counted once, and the count
stays in the user's cache.
"""

import argparse
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from bench import Mode, finish, run_program, table

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported


from autotune.core.errors import AutotuneError
from autotune.planning.run_check import check
from autotune.report.values.check import VERDICTS

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
    " packing and attention"
    f" of {SAMPLED} sampled files were compared with the rows, key by key, and so were four files"
    " for other objectives:"
    " Axolotl's of DPO on an int8 base and in full fine-tuning, of KTO on nf4, and of a reward"
    " model. An earlier sample"
    " had one key that was passed over, activation_checkpointing inside Axolotl's fsdp_config,"
    " which is read since; in"
    " this one all agreed. TRL's rule against KTO with a single row had been applied to"
    " LLaMA-Factory too, which pairs"
    " the answers before it trains: found among the refusals, and mended."
)


def row_of(folder: Path, file: Path) -> dict[str, Any]:
    """Return the answer to one file: the settings and the verdict, or the reason of a refusal."""
    row: dict[str, Any] = {"file": str(Path(folder.name) / file.relative_to(folder))}
    try:
        report = check(file, {"gpu": CARD})
    except AutotuneError as error:
        message = str(error).replace(str(file), "FILE")
        return row | {
            "outcome": "refused" if message else "unanswered",
            "reason": reason_of(message),
            "why": message,
        }
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


def reason_of(message: str) -> str:
    """The kind of a refusal."""
    return next(
        (name for name, pattern in REASONS.items() if re.search(pattern, message)), "not supported"
    )


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many files were answered, refused by reason, and neither."""
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
        "notes": BY_HAND,
    }


def sample(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that are compared with their files by hand, drawn with a seed."""
    return random.Random(0).sample([row for row in rows if row["outcome"] == "answered"], SAMPLED)


def run(args: argparse.Namespace) -> None:
    """Check all files of the folders."""
    rows = [
        row_of(folder, file)
        for folder in args.folders
        for file in sorted(path for path in folder.rglob("*") if path.suffix in (".yml", ".yaml"))
    ]
    finish(args, None, rows)
    table(sample(rows), ["file", "label", "verdict"])


MODES = {
    "": Mode(
        run=run,
        result="check_examples",
        summarize=summarize,
        options={
            "folders": {
                "type": Path,
                "nargs": "+",
                "metavar": "DIR",
                "help": "folders of the repositories",
            }
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

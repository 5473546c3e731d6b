"""Try random conversations, and mutated datasets and files. The tests try 200 of each."""

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench import Mode, finish, run_program

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported

from tests.helpers.conversations import judged
from tests.helpers.mutations import fuzzed


def run_lost(args: argparse.Namespace) -> None:
    """Encode random conversations with each chat template that
    TRL ships, and look for lost text.
    """
    tried = list(judged(args.number, args.seed))
    finish(
        args,
        None,
        _rows(tried, "template"),
        ["template", "encoded", "refused", "faults"],
        seed=args.seed,
    )


def run_fuzz(args: argparse.Namespace) -> None:
    """Read mutated datasets and files, and look for errors of Python and for hangs."""
    with tempfile.TemporaryDirectory() as folder:
        tried = list(fuzzed(args.number, args.seed, Path(folder)))
    finish(
        args, None, _rows(tried, "kind"), ["kind", "answered", "refused", "faults"], seed=args.seed
    )


def _rows(tried: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return a row for each template or kind, with its numbers and its faults."""
    names = dict.fromkeys(one[key] for one in tried)
    rows = []
    for name in names:
        found = [one for one in tried if one[key] == name]
        outcomes = Counter(one["outcome"] for one in found)
        numbers = {
            outcome: outcomes[outcome]
            for outcome in ("encoded", "answered", "refused")
            if outcomes[outcome]
        }
        faults = [one for one in found if one["outcome"] == "fault"]
        rows.append(
            {
                key: name,
                "tried": len(found),
                **numbers,
                "faults": len(faults),
                "examples": faults[:3],
            }
        )
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over the templates or kinds."""
    names = ("tried", "encoded", "answered", "refused", "faults")
    return {
        name: sum(row.get(name, 0) for row in rows)
        for name in names
        if any(name in row for row in rows)
    }


MODES = {
    "lost": Mode(
        run=run_lost,
        result="lost_text",
        summarize=summarize,
        options={"--number": 5000, "--seed": 0},
    ),
    "fuzz": Mode(
        run=run_fuzz, result="fuzz", summarize=summarize, options={"--number": 3000, "--seed": 0}
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

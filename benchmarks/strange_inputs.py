"""Try damaged dataset files and random command lines, each in a process that may crash or hang.

`tests/helpers/strange_inputs.py` makes the files, and `tests/helpers/command_lines.py` the lines.
The tests try 200 files and 100 command lines.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import Mode, finish, run_program

from autotune.cli.app import COMMANDS
from tests.helpers.command_lines import command_lines, enter, run_command, store_study
from tests.helpers.strange_inputs import ENDS, FileReader, Trial, files, tried

COLUMNS = ("kind", "inputs", "answers", "errors", *ENDS, "seconds_max")


def run(args: argparse.Namespace) -> None:
    """Try the inputs in an empty folder, without a network."""
    folder = Path(tempfile.mkdtemp())
    os.environ |= enter(folder)
    store_study()
    trials = {
        "file": tried(files(args.files), FileReader(Path.cwd()).read),
        "command line": tried(command_lines(args.commands), run_command, name=json.dumps),
    }

    rows = []
    for what, found in trials.items():
        kinds = dict.fromkeys(kind_of(what, trial) for trial in found)
        rows += [
            counted(what, kind, [one for one in found if kind_of(what, one) == kind])
            for kind in sorted(kinds)
        ]
        for trial in found:
            if trial.end in ENDS:
                print(f"{trial.end}: {trial.input[:300]}\n{trial.text}", flush=True)
    finish(args, None, rows, COLUMNS)


def kind_of(what: str, trial: Trial) -> str:
    """Return the kind of a file, or the command of a command line."""
    if what == "file":
        return trial.input.partition(" ")[0]
    first = str(json.loads(trial.input)[0])
    return first if first in COMMANDS else "no command"


def counted(what: str, kind: str, trials: Iterable[Trial]) -> dict[str, Any]:
    """Return how the inputs of one kind ended."""
    found = list(trials)
    ends = {end: sum(trial.end == end for trial in found) for end in ENDS}
    return {
        "what": what,
        "kind": kind,
        "inputs": len(found),
        "answers": sum(trial.end == "answer" for trial in found),
        "errors": sum(trial.end == "error" for trial in found),
        **ends,
        "seconds_max": round(max(trial.seconds for trial in found), 2),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the inputs, the answers, and the faults by their kinds."""
    numbers: dict[str, Any] = {}
    for what in ("file", "command line"):
        found = [row for row in rows if row["what"] == what]
        name = f"{what.replace(' ', '_')}s"
        numbers[name] = sum(row["inputs"] for row in found)
        numbers[f"answered_{name}"] = sum(row["answers"] for row in found)

    faults = {end: sum(row[end] for row in rows) for end in ENDS}
    return numbers | faults | {"seconds_max": max(row["seconds_max"] for row in rows)}


MODES = {
    "": Mode(
        run=run,
        result="strange_inputs",
        summarize=summarize,
        options={"--files": 2000, "--commands": 2000},
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

"""The commands that a command prints for its user: found in its output, and run as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

Ended = subprocess.CompletedProcess[str]

# A command has a line of its own, or ends the line with the remedy of an error.
PRINTED = re.compile(
    r"^ +(?:try: .*: )?`?((?:cd \S+ && .*)?(?:autotune [a-z]|trl ).*?)`?$", re.MULTILINE
)
# How the shell would start a program. Tests fork these processes from one with the libraries.
PROGRAMS = {
    "autotune": ["-m", "autotune"],
    "trl": ["-c", "import sys; from trl.cli import main; sys.exit(main())"],
}
# Options that only save time. A busy machine is no failure of an export.
ADDED = {
    "train": ["--max-steps", "3"],
    "verify": ["--micro-steps", "4", "--tolerance", "99"],
    "sft": ["--max_steps", "3"],
    "dpo": ["--max_steps", "3"],
}


def next_commands(shown: str) -> list[str]:
    """Return the commands in the output of a command, in their order."""
    return PRINTED.findall(shown)


def run_next(shown: str, folder: Path) -> dict[str, Ended]:
    """Run each command that an output shows, and each that these show, in their order.

    Fails if a command fails.
    """
    waiting = next_commands(shown)
    ended: dict[str, Ended] = {}
    while waiting:
        command = waiting.pop(0)
        if command not in ended:
            ended[command] = run_printed(command, folder)
            waiting += next_commands(ended[command].stdout + ended[command].stderr)
    return ended


def run_printed(command: str, folder: Path, *more: str) -> Ended:
    """Run a printed command with `more` options. Fails if it fails."""
    words = shlex.split(command)
    if words[0] == "cd":
        folder = folder / words[1]
        words = words[words.index("&&") + 1 :]
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value

    program, verb, *options = words
    line = [sys.executable, *PROGRAMS[program], verb, *options, *ADDED.get(verb, ()), *more]
    ended = subprocess.run(
        line,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=stranger() | variables,
    )
    assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
    return ended


def stranger() -> dict[str, str]:
    """Return the environment of a user who has not named a database."""
    return {name: value for name, value in os.environ.items() if name != "AUTOTUNE_STORAGE"}

"""Reads a training from the arguments of a command, in a shell script, or from ms-swift's keys.

The script is not executed. ms-swift wraps TRL's GRPO trainer, so its arguments are translated to
TRL's keys.
"""

import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import load_data, load_yaml, read_user_text
from autotune.planning.foreign_file import quote
from autotune.report.values.check import SWIFT

SCRIPTS = (".sh", ".bash")
# The commands whose arguments are read, with the objective that each command trains for
_COMMANDS = {("trl", "grpo"): "grpo", ("trl", "sft"): "sft", ("trl", "dpo"): "dpo"}
_SWIFT = ("swift", "rlhf")
_PROCESSES = re.compile(r"(?:NPROC_PER_NODE=|--(?:num_processes|nproc_per_node)[= ])(\d+)")


def read_script(path: Path) -> dict[str, Any]:
    """Return the arguments of the training command in a shell script, as keys with values.

    Raises UsageError if the script has no such command, or if an argument is a variable.
    """
    text = read_user_text(path).replace("\\\n", " ")
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for place, pair in enumerate(pairwise(words)):
            if pair == _SWIFT or pair in _COMMANDS:
                values = _arguments(path, words[place + 2 :])
                if processes := _PROCESSES.search(line):
                    values.setdefault("num_processes", int(processes[1]))
                return values | ({"objective": _COMMANDS[pair]} if pair in _COMMANDS else {})
    raise UsageError(
        f"{path} has no command `swift rlhf` or `trl grpo`",
        remedy="pass the script that starts the training, or the YAML file that it reads",
    )


def _arguments(path: Path, words: list[str]) -> dict[str, Any]:
    """Return {key: value} of `--key value` arguments; a key without a value is true."""
    values: dict[str, Any] = {}
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, _, value = word.removeprefix("--").partition("=")
            found[key] = [value] if value else []
        elif word in (";", "&&", "|", "&", ">", "2>&1"):
            break
        elif key:
            found[key].append(word)
    for key, given in found.items():
        if any("$" in word for word in given):
            raise UsageError(
                f"{path}: --{key} {' '.join(given)}: the script is not executed, so the value of "
                "the variable is unknown",
                remedy="write the value itself",
            )
        parsed = [load_yaml(word) if word else word for word in given]
        values[key] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return values


def is_swift(values: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of ms-swift for GRPO."""
    return values.get("rlhf_type") == "grpo"


def swift_as_trl(values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return ms-swift's arguments as TRL's keys, and a sentence about arguments that are not read.

    Raises UsageError for a value that no key of TRL has.
    """
    table = _table()
    given = {key: value for key, value in values.items() if value is not None}
    if "tuner_type" in given:
        given["train_type"] = given.pop("tuner_type")
    complete = table["defaults"] | given
    translated: dict[str, Any] = {"objective": "grpo", SWIFT: True}
    unread = []
    for key, value in complete.items():
        if key in table["values"]:
            known = table["values"][key]
            if value not in known:
                raise UsageError(
                    f"{key}: {quote(value)} is not supported",
                    remedy=f"write one of {', '.join(map(str, known))}",
                )
            translated |= known[value]
        elif key in table["keys"]:
            translated[table["keys"][key]] = value
        elif key not in table["without_effect"]:
            unread.append(key)
    attention = translated.get("attn_implementation")
    if attention is not None:
        translated["attn_implementation"] = table["attentions"].get(attention, attention)
    if not translated["use_peft"]:
        for key in ("lora_r", "lora_target_modules", "lora_dropout", "lora_alpha"):
            translated.pop(key, None)
    return translated, f"not counted: {', '.join(sorted(unread))}" if unread else ""


def trl_as_swift(edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return edits of TRL's keys as edits of ms-swift's arguments."""
    table = _table()
    names = {theirs: ours for ours, theirs in table["keys"].items()}
    written: dict[str, Any] = {}
    for key, value in edits.items():
        found = next(
            (
                (ours, choice)
                for ours, choices in table["values"].items()
                for choice, trl in choices.items()
                if trl == {key: value}
            ),
            (names.get(key, key), value),
        )
        written[found[0]] = found[1]
    return written


def _table() -> dict[str, Any]:
    return dict(load_data("autotune.planning", "swift_keys"))

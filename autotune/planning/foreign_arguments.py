"""Reads a training from the arguments of a command, in a shell script, or from ms-swift's keys.

The script is not executed. ms-swift wraps TRL's GRPO trainer, so its arguments are translated to
TRL's keys.
"""

import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import is_file, load_data, load_yaml, read_user_text
from autotune.planning.foreign_file import quote
from autotune.planning.foreign_python import read_program
from autotune.planning.program_arguments import Command
from autotune.report.values.check import SWIFT

SCRIPTS = (".sh", ".bash")
# The commands whose arguments are read. For a command of TRL, the group is the objective.
_COMMAND = re.compile(
    r"(?:\bswift\s+rlhf\b|\bswift/cli/rlhf\.py\b|\btrl\s+(grpo|sft|dpo|kto|reward)\b)"
)
_ACCEPTED = "`swift rlhf`, `trl sft`, `trl dpo`, `trl kto`, `trl reward` or `trl grpo`"
# A Python program that a command starts
_PROGRAM = re.compile(r"\b(?:python3?|torchrun|accelerate|deepspeed)\b[^#;&|]*?\s([\w./-]+\.py)\b")
_MEGATRON = re.compile(r"\bmegatron\s+rlhf\b|_megatron/rlhf\.py\b")
# accelerate counts the processes of all hosts, and the other tools those of each host.
_PROCESSES = re.compile(r"--num[-_]processes[=\s]\s*['\"]?(\d{1,6}\b|\$[^\s'\"]+)")
_PROCESSES_OF_HOST = re.compile(
    r"(?:NPROC_PER_NODE=|--(?:nproc[-_]per[-_]node|num[-_]gpus)[=\s]\s*)(\d{1,6})\b"
)
_HOSTS = re.compile(r"(?:NNODES=|--nnodes[=\s]\s*)(\d{1,6})\b")
_ACCELERATE = re.compile(r"--config[-_]file[=\s]\s*['\"]?([^\s'\"]+)")
# What accelerate shares and offloads, as arguments of its command instead of keys of its file
_SHARING = re.compile(
    r"--((?:use[-_](?:fsdp|deepspeed)|fsdp[-_]|deepspeed[-_]|zero[-_]?3|zero[-_]stage|offload[-_])"
    r"[\w-]*)"
)
# A variable of the shell, a line that sets one, and the names that a line sets
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SET = re.compile(r"(?:export\s+)?(\w+)=('[^'$]*'|\"[^\"$`]*\"|[^\s'\"$`;&|()]*)\s*(?:#.*)?;?")
_SETS = re.compile(r"(?:^|[\s;&(])(?:export\s+|read\s+|for\s+)?(\w+)(?=\+?=|\s+in\s)")
_PREFIX = re.compile(r"(?:^|\s)(\w+)=([^\s'\"$]+)(?=\s)")
_ENDS = (";", "&&", "||", "|", "&", ">", ">>", "2>&1")  # words after which a command has ended
SWIFT_ROWS = 16  # the sequences of a step, if ms-swift's file does not set the accumulation


def read_script(path: Path) -> tuple[dict[str, Any], str]:
    """Return the training that a shell script starts, as keys with values.

    The script has a command of TRL or ms-swift, or it starts a Python program beside it. The second
    value is a sentence about arguments of the program that are not counted. Raises UsageError if
    the script starts no training.
    """
    text = read_user_text(path).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    variables = _variables(lines)
    lines = [_VARIABLE.sub(partial(_substituted, variables), line) for line in lines]
    for line in lines:
        command = _COMMAND.search(line)
        if command is None:
            continue
        values = _arguments(_words(path, line[command.end() :]))
        _add_launcher(values, line[: command.start()], path)
        return values | ({"objective": command[1]} if command[1] else {}), ""

    if any(map(_MEGATRON.search, lines)):
        raise UsageError(
            f"{path}: Megatron splits the model in its own way, which is not supported",
            remedy=f"pass a script of {_ACCEPTED}",
        )
    for line in lines:
        started = _PROGRAM.search(line)
        if started and is_file(program := path.parent / started[1]):
            start = Command(
                words=_words(path, line[started.end() :]),
                environment=variables | _environment(line[: started.start(1)]),
            )
            values, ignored = read_program(program, start)
            _add_launcher(values, line[: started.start(1)], path)
            return values, ignored
    raise UsageError(
        f"{path} has no command {_ACCEPTED}, and starts no Python program beside it",
        remedy="pass the script that starts the training, or the YAML file that it reads",
    )


def _add_launcher(values: dict[str, Any], launcher: str, path: Path) -> None:
    """Add what the words before the training command say about several GPUs.

    Raises UsageError for an argument of accelerate that decides how they share the work.
    """
    if "accelerate" in launcher and (sharing := _SHARING.search(launcher)):
        raise UsageError(
            f"{path}: accelerate's argument --{sharing[1]} is not read",
            remedy="put how the GPUs share the work into accelerate's file (--config_file)",
        )
    number = _processes(launcher)
    if number is not None:
        values.setdefault("num_processes", number)
    if (settings := _ACCELERATE.search(launcher)) and "fsdp" not in values:
        values.setdefault("accelerate_config", settings[1])


def _processes(launcher: str) -> int | str | None:
    """Return the number of processes that the words before the training command start, if given.

    A variable of the shell is returned only beside a file of accelerate: the variable, not the
    file, gives the number.
    """
    file = _ACCELERATE.search(launcher)
    if total := _PROCESSES.search(launcher):
        if total[1].isdecimal():
            return int(total[1])
        return total[1] if file else None
    of_host, hosts = _PROCESSES_OF_HOST.search(launcher), _HOSTS.search(launcher)
    if of_host is None or file:  # accelerate does not read these
        return None
    return int(of_host[1]) * (int(hosts[1]) if hosts else 1)


def _words(path: Path, text: str) -> list[str]:
    """Return the words of a command, up to its end."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{path}: {error}", remedy="correct the quotation marks") from None
    ends = (at for at, word in enumerate(words) if word in _ENDS or word.startswith("#"))
    return words[: next(ends, None)]


def _variables(lines: list[str]) -> dict[str, str]:
    """Return the variables that a script sets once, to a value that no other part of it changes."""
    found: dict[str, str | None] = {}
    for line in lines:
        for name in _SETS.findall(line):
            whole = _SET.fullmatch(line)
            is_known = whole is not None and whole[1] == name and name not in found
            found[name] = whole[2].strip("'\"") if is_known and whole else None
    return {name: value for name, value in found.items() if value is not None}


def _substituted(variables: Mapping[str, str], use: re.Match[str]) -> str:
    """Return the value of a variable of the shell, or its own text if the value is unknown."""
    return variables.get(use[1] or use[2], use[0])


def _environment(launcher: str) -> dict[str, str]:
    """Return the variables that the words before a program set for it."""
    given = dict(_PREFIX.findall(launcher))
    processes = _processes(launcher)
    return given | ({"WORLD_SIZE": str(processes)} if isinstance(processes, int) else {})


def _arguments(words: list[str]) -> dict[str, Any]:
    """Return {key: value} of `--key value` arguments; a key without a value is true."""
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, _, value = word.removeprefix("--").partition("=")
            found[key] = [value] if value else []
        elif key:
            found[key].append(word)
    values: dict[str, Any] = {}
    for key, given in found.items():
        parsed = list(map(_value, given))
        values[key] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return values


def _value(word: str) -> Any:
    """Return the value of a word: a number or a truth value if it is one in YAML, else a text."""
    try:
        return word if "$" in word else load_yaml(word)
    except Exception:  # no YAML, such as a prompt in brackets
        return word


def refuse_variables(values: Mapping[str, Any]) -> None:
    """Raise UsageError if a value is a variable of the shell."""
    for key, value in values.items():
        if "$" in str(value):
            raise UsageError(
                f"{key}: the script is not executed, so the value of {value} is unknown",
                remedy="write the value itself",
            )


def is_swift(values: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of ms-swift for GRPO.

    Raises UsageError for another objective of ms-swift.
    """
    kind = values.get("rlhf_type")
    if kind is not None and kind != "grpo":
        raise UsageError(
            f"rlhf_type: of ms-swift, only grpo is supported, not {quote(kind)}",
            remedy="pass the file of a run for grpo, or of another tool",
        )
    return kind == "grpo"


def swift_as_trl(values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return ms-swift's arguments as TRL's keys, and a sentence about arguments that are not read.

    Raises UsageError for a value that no key of TRL has.
    """
    table = _table()
    given = {
        key: value
        for key, value in values.items()
        if value is not None and key not in table["without_effect"]
    }
    refuse_variables(given)
    if "tuner_type" in given:
        given["train_type"] = given.pop("tuner_type")
    complete = table["defaults"] | given
    complete.setdefault("gradient_accumulation_steps", _accumulation(complete))
    translated: dict[str, Any] = {"objective": "grpo", SWIFT: True}
    unread = []
    for key, value in complete.items():
        if key in table["values"]:
            known = table["values"][key]
            meaning = next((trl for choice, trl in known.items() if choice == value), None)
            if meaning is None:
                raise UsageError(
                    f"{key}: {quote(value)} is not supported",
                    remedy=f"write one of {', '.join(map(str, known))}",
                )
            translated |= meaning
        elif key in table["keys"]:
            translated[table["keys"][key]] = value
        else:
            unread.append(key)
    attention = translated.get("attn_implementation")
    if isinstance(attention, str):
        translated["attn_implementation"] = table["attentions"].get(attention, attention)
    if not translated["use_peft"]:
        for key in ("lora_r", "lora_target_modules", "lora_dropout", "lora_alpha"):
            translated.pop(key, None)
    return translated, f"not counted: {', '.join(sorted(unread))}" if unread else ""


def _accumulation(values: Mapping[str, Any]) -> int:
    """Return the micro batches of a step, if ms-swift's file does not give their number."""
    rows, processes = values["per_device_train_batch_size"], values.get("num_processes", 1)
    if not isinstance(rows, int) or not isinstance(processes, int) or rows < 1 or processes < 1:
        return 1
    return -(-SWIFT_ROWS // (rows * processes))  # rounded up


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

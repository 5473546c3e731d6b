"""Reads a training from the arguments of a command in a shell script, which is not executed."""

import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import is_file, load_yaml, read_user_text
from autotune.planning.foreign_python import read_program
from autotune.planning.program_arguments import Command
from autotune.report.values.check import SWIFT

SCRIPTS = (".sh", ".bash")
# The commands whose arguments are read
_COMMAND = re.compile(
    r"\bswift(?:\s+|/cli/)(?P<swift>sft|pt|rlhf)\b"
    r"|\btrl\s+(?P<objective>grpo|sft|dpo|kto|reward)\b"
)
_ACCEPTED = (
    "`swift sft`, `swift pt`, `swift rlhf`, `trl sft`, `trl dpo`, `trl kto`, `trl reward` or "
    "`trl grpo`"
)
# A Python program that a command starts
_PROGRAM = re.compile(r"\b(?:python3?|torchrun|accelerate|deepspeed)\b[^#;&|]*?\s([\w./-]+\.py)\b")
_MEGATRON = re.compile(r"\bmegatron\s+(?:sft|pt|rlhf)\b|_megatron/(?:sft|pt|rlhf)\.py\b")
# accelerate counts the processes of all hosts, and the other tools those of each host.
_PROCESSES = re.compile(r"--num[-_]processes[=\s]\s*['\"]?(\d{1,6}\b|\$[^\s'\"]+)")
_PROCESSES_OF_HOST = re.compile(
    r"(?:NPROC_PER_NODE=|--(?:nproc[-_]per[-_]node|num[-_]gpus)[=\s]\s*)(\d{1,6})\b"
)
_VISIBLE = re.compile(r"CUDA_VISIBLE_DEVICES=['\"]?([\d,]+)")
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
# A computation with whole numbers, as in $(expr 16 / 4) and $((16 / 4))
_COMPUTED = re.compile(r"\$\((?:expr\s+|\()([-+*/\\\d\s]{1,99})\)?\)")
_PREFIX = re.compile(r"(?:^|\s)(\w+)=([^\s'\"$]+)(?=\s)")
_ENDS = (";", "&&", "||", "|", "&", ">", ">>", "2>&1")  # words after which a command has ended


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
    lines = [_COMPUTED.sub(_computed, line) for line in lines]
    for line in lines:
        command = _COMMAND.search(line)
        if command is None:
            continue
        values = _arguments(_words(path, line[command.end() :]))
        launcher = line[: command.start()]
        _add_launcher(values, launcher, path)
        if command["objective"]:
            return values | {"objective": command["objective"]}, ""
        _refuse_split_layers(launcher, path)
        return values | {SWIFT: command["swift"]}, ""

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
    """Add the settings for several GPUs from the words before the training command.

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


def _refuse_split_layers(launcher: str, path: Path) -> None:
    """Raise UsageError if ms-swift's processes have several GPUs each.

    Each process then puts the first layers on its first GPU, and the last on its last.
    """
    if "accelerate" in launcher or "deepspeed" in launcher:
        return  # their own files or defaults say how many processes start
    visible = _VISIBLE.search(launcher)
    processes = _PROCESSES_OF_HOST.search(launcher)
    if visible and len(visible[1].strip(",").split(",")) > (int(processes[1]) if processes else 1):
        raise UsageError(
            f"{path}: more GPUs are visible than processes start, so ms-swift puts the layers on "
            "several GPUs one after another, which is not supported",
            remedy="set NPROC_PER_NODE to the number of GPUs in CUDA_VISIBLE_DEVICES",
        )


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


def _computed(match: re.Match[str]) -> str:
    """Return the value of a computation, as the shell computes it, or its own text."""
    text = match[1].replace("\\*", "*")
    for signs in ("*/", "-+"):
        while pair := re.search(rf"(\d+)\s*([{signs}])\s*(\d+)", text):
            first, sign, second = int(pair[1]), pair[2], int(pair[3])
            if sign == "/" and not second:
                return match[0]
            values = {"*": first * second, "-": first - second, "+": first + second}
            value = first // second if sign == "/" else values[sign]
            text = f"{text[: pair.start()]}{value}{text[pair.end() :]}"
    return text.strip() if text.strip().isdecimal() else match[0]


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

"""Reads a training from the arguments of a command in a shell script, which is not executed."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.child_environment import is_secret
from autotune.core.errors import UsageError
from autotune.core.files import is_file, load_yaml, read_user_text
from autotune.planning.foreign_file import SHELL
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
# A variable of the shell, as in $X, ${X}, ${X:-4}, ${X:=4}, ${X:?set X} and ${X:+--flag}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?)([-=+?])([^{}]*))?\})")
# A line that sets a variable, and the names that a line sets
_SET = re.compile(
    r"(?:export\s+)?(\w+)(\+?)="
    r"('[^'$]*'|\"[^\"$`]*\"|[^\s'\"$`;&|()]*|\([^$`()]*\))\s*(?:#.*)?;?"
)
# An array, which may have several lines, and a use of all its words
_ARRAY = re.compile(r"(?<=[^$\s]=\()[^()]*(?=\))")
_WORDS_OF = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
# A word of a command that is a variable, and the words that the script itself gets
_WHOLE = re.compile(r"\$\{?(\w+)(\[[@*]\])?\}?")
_OWN_WORDS = re.compile(r"\$\{?[@*](?::\d+)?\}?")
_SETS = re.compile(r"(?:^|[\s;&(])(?:export\s+|read\s+|for\s+)?(\w+)(?=\+?=|\s+in\s)")
_DEPTH = 4  # variables inside the defaults of variables
HIDDEN = "<hidden>"
# A computation with whole numbers, as in $(expr 16 / 4) and $((16 / 4))
_COMPUTED = re.compile(r"\$\((?:expr\s+|\()([-+*/\\\w\s]{1,99})\)?\)")
_UNKNOWN = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)")
_PREFIX = re.compile(r"(?:^|\s)(\w+)=([^\s'\"$]+)(?=\s)")
_ENDS = (";", "&&", "||", "|", "&", ">", ">>", "2>&1")  # words after which a command has ended


def read_script(path: Path) -> tuple[dict[str, Any], str]:
    """Return the training that a shell script starts, as keys with values.

    The script has a command of TRL or ms-swift, or it starts a Python program beside it. The second
    value is a sentence about arguments of the program that are not counted. Raises UsageError if
    the script starts no training.
    """
    text = read_user_text(path).replace("\\\n", " ")
    text = _ARRAY.sub(lambda words: re.sub(r"(?:^|\s+)#.*|\s+", " ", words[0]), text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    shell = _shell(lines)
    values, ignored = _training(path, list(map(shell.expand, lines)), shell)
    if shell.assumed:
        of_shell = [f"{name}={value}" for name, value in shell.assumed.items()]
        values[SHELL] = ", ".join(filter(None, [*of_shell, values.get(SHELL)]))
    return values, ignored


def _training(path: Path, lines: list[str], shell: "_Shell") -> tuple[dict[str, Any], str]:
    """Return what `read_script` returns, from lines that the shell expanded."""
    for line in lines:
        command = _COMMAND.search(line)
        if command is None:
            continue
        values = _arguments(shell.words(path, line[command.end() :]))
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
                words=shell.words(path, line[started.end() :]),
                environment=shell.known() | _environment(line[: started.start(1)]),
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
        # A computation whose value is unknown stays one word.
        words = shlex.split(_UNKNOWN.sub(lambda part: re.sub(r"\s", "", part[0]), text))
    except ValueError as error:
        raise UsageError(f"{path}: {error}", remedy="correct the quotation marks") from None
    ends = (at for at, word in enumerate(words) if word in _ENDS or word.startswith("#"))
    return words[: next(ends, None)]


@dataclass(frozen=True, slots=True)
class _Shell:
    """The variables of a script.

    `given` has the variables that the script sets, with None for a value that is unknown.
    `assumed` collects the variables with a value that the script only has by default, or that the
    shell's environment has. A note shows them, so HIDDEN takes the place of a secret. A number is
    no secret, although a name such as MAX_TOKENS looks like one.
    """

    given: dict[str, str | None] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)

    def known(self) -> dict[str, str]:
        """Return the variables that the script sets to a known value."""
        return {name: value for name, value in self.given.items() if value is not None}

    def expand(self, line: str) -> str:
        """Return the line with known values instead of variables and of computations."""
        line = _WORDS_OF.sub(lambda use: self.known().get(use[1], use[0]), line)
        for _ in range(_DEPTH):
            line = _VARIABLE.sub(self._value, line)
        return _COMPUTED.sub(self._computed, line)

    def words(self, path: Path, text: str) -> list[str]:
        """Return the words of a command, up to its end.

        A variable that is neither set nor the value of an option is no word, as in the shell.
        Raises UsageError if its words are unknown.
        """
        found: list[str] = []
        for word in _words(path, text):
            use = _WHOLE.fullmatch(word)
            is_value = found and found[-1].startswith("-") and "=" not in found[-1]
            if use and (use[2] or not is_value):
                if use[1] in self.given:
                    raise UsageError(
                        f"{path}: the script is not executed, so the words of {word} are unknown",
                        remedy="write the words themselves into the command",
                    )
                self.assumed[use[1]] = ""
            elif not _OWN_WORDS.fullmatch(word):
                found.append(word)
        return found

    def _computed(self, match: re.Match[str]) -> str:
        """Return the value of a computation, or its own text if it has an unknown value."""
        names = re.compile(r"[A-Za-z_]\w*")
        return _COMPUTED.sub(
            _computed, names.sub(lambda name: self.known().get(name[0], name[0]), match[0])
        )

    def _value(self, use: re.Match[str]) -> str:
        """Return the value that the shell uses for a variable, or its own text if unknown."""
        plain, braced, colon, sign, other = use.groups()
        name = plain or braced
        value = self.given.get(name, os.environ.get(name))
        if name in self.given and value is None:
            return use[0]
        is_set = value is not None and (value != "" or not colon)
        if sign == "+":
            return str(other) if is_set else ""
        if not is_set:
            if sign in (None, "?"):
                return use[0]
            value = other
        if name not in self.given:
            value = str(value)
            if is_secret(name, value) and not value.isdigit():
                return HIDDEN
            self.assumed[name] = value
        if sign == "=":
            self.given[name] = value
        return str(value)


def _shell(lines: list[str]) -> _Shell:
    """Return the variables that a script sets.

    A value is known if the script sets the variable once, and no other part of it changes it
    except by adding to it.
    """
    shell = _Shell()
    for line in lines:
        whole = _SET.fullmatch(shell.expand(line))
        for name in _SETS.findall(line):
            is_known = (
                whole is not None and whole[1] == name and bool(whole[2]) == (name in shell.given)
            )
            before = shell.given.get(name, "")
            value = whole[3] if is_known and whole and before is not None else None
            if value is not None and value.startswith("("):
                value = f" {value[1:-1]}"
            elif value is not None:
                value = value.strip("'\"")
            shell.given[name] = None if value is None else f"{before}{value}"
    return shell


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
                remedy="write the value itself, or set the variable where you run this check",
            )

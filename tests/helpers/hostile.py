"""Hostile input for the fuzz tests: values, mutated files, and a guard that watches the side
effects of the product.

AUTOTUNE_FUZZ=20 tries twenty times as many inputs, with a new random seed at every run.
"""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("AUTOTUNE_FUZZ", "1"))
HANG_S = 20.0  # processor time allowed for one input, which needs milliseconds

WORDS = (
    *("../../x", "/etc/passwd", "~root/x", "~", ".", "", "a/b", "-rf", "--help", "con", "🙂", "ﬀ",
    "İ", "۱۲"),
    *("\x00", "\x1b[2J", "\u202e", "\u2028", "\ud800", "\r\n", "\t", "$(touch x)", "`id`",
    "; touch x", "{{7*7}}"),
    *("nan", ".nan", ".inf", "-.inf", "1e999", "1_000", "0x10", "0o17", "1:30", "2026-13-45",
    "2026-11-22", "yes"),
    *("auto", "cpu", "a10", "lora", "full", "demo-3m", "mistral-7b", "every_1", "every_99999",
    "15m", "x" * 5000),
    *("sqlite:///x.db", "postgresql://u:p@h/d", "<script>", "%s%n", "a=b", "*", "?", "[a]",
    "!!python/none"),
)  # fmt: skip
NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    2**24,
    2**24 + 1,
    2**31,
    2**63,
    10**15,
    10**16,
    10**308,
    10**400,
    -(10**400),
    0.5,
    1e-320,
    1e308,
)
SNIPPETS = (
    *("&a", "*a", "&a [*a]", "<<: *a", "<<: {a: 1}", "? [a]", "- ", ": ", "#", "---", "...",
    "%YAML 9.9", "{", "["),
    *("!!python/object/apply:os.system [id]", "!!python/name:os.system", "!!bool maybe", "!!int x",
    "!!set"),
    *("!!timestamp x", "!!binary ==", "!!omap [a]", "!!null x", "!x y", "\t", "'", '"', "|", ">",
    "@", "`", "\ufeff"),
    *("9" * 5000, "2026-11-22T25:00:00Z", "0001-01-01", "\x00", "\x85", "𝟙"),
)  # fmt: skip
# Names with a canary command in every syntax that an exported file is read as: bash, Python, YAML,
# Markdown. In a comment of the first two lines, those with `coding` would choose how Python decodes
# a file.
NAMES = (
    "a'; touch CANARY; echo '\n\"\"\"; open('CANARY', 'w')\n"
    '$(touch CANARY) `touch CANARY` "$(touch CANARY)"'
    "\r\n- !!python/object/apply:os.system ['touch CANARY']\n{x} %s %(prog)s \\N{BELL} \u2028"
    "open('CANARY', 'w')\x85touch CANARY\x00 \u202e é #: 'b' \\",
    "my-coding",
    "my-coding: latin-1, not utf-8 é",
    "m coding:unicode_escape \"'});__import__('os').system('touch CANARY')#",
    "m coding:unicode_escape \\x0aopen('CANARY','w')\\x0a#",
    "m coding:utf-7 +AAo-open('CANARY','w')+AAo-#",
    "-rf $(touch CANARY)",
    "--wrap='touch CANARY'",
    "模型 é\n#SBATCH --wrap=touch",
    "a\n```\nb <script>[x](y)",
    "${oc.env:HOME} {0} %(x)s &a *a !!python/name:os.system",
    "7B",
    "null",
)
DEEP = tuple(part * 400 for part in ("[", "{a: ", "- ", "? ", "&a [*a, "))

scalars = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(NUMBERS),
    st.none() | st.booleans(),
    st.integers(-10, 5000) | st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.dates(),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | scalars, inner, max_size=3)
    ),
    max_leaves=6,
)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Try this many inputs, the same at every run.

    AUTOTUNE_FUZZ multiplies the number and makes them random.
    """
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def mutated(draw: Any, originals: tuple[Any, ...]) -> Any:
    """One of these values with a few of its parts replaced, removed, copied or added."""
    data = copy.deepcopy(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(list(_places({"": data}))))
        mutation = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "move")))
        if mutation == "add" and isinstance(holder[key], dict):
            holder[key][draw(scalars)] = draw(values)
        elif mutation == "add" and isinstance(holder[key], list):
            holder[key].append(draw(values))
        elif mutation == "remove" and key != "":
            del holder[key]
        elif mutation == "move":
            other, name = draw(st.sampled_from(list(_places({"": data}))))
            holder[key] = copy.deepcopy(other[name])
        else:
            holder[key] = draw(values)
        if key == "":
            data = holder[key]
    return data


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


@st.composite
def yaml_files(draw: Any, originals: tuple[Any, ...]) -> bytes:
    """A mutated YAML file: changed data, foreign snippets in the text, or no YAML at all."""
    mutation = draw(st.sampled_from(("data", "data", "data", "text", "noise")))
    if mutation == "noise":
        parts = st.lists(st.sampled_from(SNIPPETS), max_size=4) | st.sampled_from(DEEP).map(
            lambda deep: [deep]
        )
        return draw(st.binary(max_size=60) | parts.map(_joined))
    data = draw(mutated(originals) if mutation == "data" else st.sampled_from(originals))
    text = yaml.safe_dump(data, allow_unicode=draw(st.booleans()), sort_keys=False)
    if mutation == "text":
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(text)))
            text = (
                text[:at]
                + draw(st.sampled_from(("", "\n", " ")))
                + draw(st.sampled_from(SNIPPETS))
                + text[at:]
            )
    return text.encode(errors="surrogatepass")


def _joined(parts: list[str]) -> bytes:
    return "\n".join(parts).encode(errors="surrogatepass")


# The watched audit events, with the index of the path among their arguments.
_WRITES = {
    "os.mkdir": 0,
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.symlink": 1,
    "os.link": 1,
    "os.chmod": 0,
}
_WRITES |= {"os.truncate": 0, "os.mkfifo": 0, "sqlite3.connect": 0}
_FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "socket.getaddrinfo",
)
_allowed: Path | None = None
_violations: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _allowed is None:
        return
    if event in _FORBIDDEN:
        _violations.append(f"{event} {arguments!r}")
    path = arguments[_WRITES[event]] if event in _WRITES else None
    if (
        event == "open"
        and isinstance(arguments[2], int)
        and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        path = arguments[0]
    if isinstance(path, str | bytes | os.PathLike):
        full = os.path.realpath(os.fsdecode(path))
        if not full.startswith((f"{_allowed}/", "/dev/")) and full != str(_allowed):
            _violations.append(f"{event} {full}")


def _raise_timeout(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {HANG_S:.0f} s of processor time")


sys.addaudithook(_audit)


def arguments_of_autotune(command: str, folder: Path) -> list[str]:
    """The arguments with which a shell calls autotune for a printed command.

    It may call nothing else.
    """
    program = folder / "bin" / "autotune"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", command],
        env={"PATH": str(program.parent)},
        cwd=folder,
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise TimeoutError in a block that does not end."""
    before = signal.signal(signal.SIGVTALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def guarded(allowed: Path) -> Iterator[None]:
    """Fail if the block writes outside `allowed`, starts a process, opens a connection, or does not
    end.
    """
    global _allowed
    bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # imports must not write bytecode
    _allowed = allowed.resolve()
    _violations.clear()
    try:
        with time_limit():
            yield
    finally:
        _allowed = None
        sys.dont_write_bytecode = bytecode
    assert _violations == [], _violations

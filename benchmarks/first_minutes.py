"""Record the first minutes: README's first line in a terminal of 100 and of 160 columns, by a real clock.

Writes an asciinema recording of each (`asciinema play FILE`), and when the first speed and the answer were on screen.
Options of `autotune run` after `--` record another line. Its rows and recordings have a name of their own:
`--name h100 --earlier first_minutes.json -- --gpu auto --model mistral-7b --budget 90s`.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, save, table

from autotune.core.files import write_atomic
from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data, to_data
from autotune.probe.supervisor import WorkerProber

SIZES = ((100, 30), (160, 50))  # columns and rows
FRAME_S = 0.2  # what is drawn within this time is one frame
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
# What is on screen at each moment that a reader waits for.
MOMENTS = {
    "plan_s": r"(?m)^ baseline  ",
    "first_number_s": r"[0-9,]+ tokens/s",
    "first_oom_s": r"(?m)^ *[0-9]+ .* oom ",
    "answer_s": r"(?m)^ +next  ",
}
README = "readme"  # the name of its first line
USER, HOST, HOME = "you", "gpu-box", "/home/you"  # in place of this machine's


@dataclass(slots=True)
class Recording:
    """What a terminal was sent: pairs of a time in seconds since the start, and text."""

    frames: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    def moment(self, pattern: str) -> float | None:
        """When the text so far first matched; None if it never did."""
        text = ""
        for seconds, drawn in self.frames:
            text += CONTROL.sub("", drawn).replace("\r", "\n")
            if re.search(pattern, text):
                return seconds
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder of the result and the recordings")
    parser.add_argument("--name", default=README, help="of the recorded line")
    parser.add_argument("--earlier", type=Path, help="the result to which these rows are added")
    parser.add_argument("--keep", type=Path, help="a folder for the last study")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="of `autotune run`, instead of README's")
    args = parser.parse_args()
    options = args.options or readme_options()
    on_cpu = "cpu" in options
    rows = json.loads(args.earlier.read_text(encoding="utf-8"))["rows"] if args.earlier else []
    rows = [row for row in rows if row["name"] != args.name]
    with tempfile.TemporaryDirectory() as folder, WorkerProber("cpu" if on_cpu else "cuda", Path(folder)) as prober:
        fingerprint = to_data(prober.fingerprint)
    for columns, lines in SIZES:
        load = os.getloadavg()[0]  # of other work on this machine, per minute
        with tempfile.TemporaryDirectory() as folder:
            recording = record(["run", *options], Path(folder).resolve(), columns, lines)
            if args.keep:
                shutil.copytree(folder, args.keep, dirs_exist_ok=True)
        called = f"first-minutes-{columns}" if args.name == README else f"first-minutes-{args.name}-{columns}"
        file = (args.out or ROOT / "docs" / "recordings") / f"{called}.cast"
        write_atomic(file, as_cast(recording, columns, lines, shlex.join(["autotune", "run", *options])))
        row = {"name": args.name, "columns": columns, "lines": lines, "load_before": load}
        row |= {name: recording.moment(pattern) for name, pattern in MOMENTS.items()}
        rows.append(row | {"seconds": recording.seconds, "fingerprint": fingerprint})
        save("first_minutes", from_data(Fingerprint, rows[0]["fingerprint"]), summarize(rows), rows, args.out)
    table(rows, [name for name in rows[0] if name != "fingerprint"])


def readme_options() -> list[str]:
    """What README's first command line gives to `autotune run`."""
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install"))
    return shlex.split(line.partition("&& autotune run ")[2])


def record(arguments: list[str], folder: Path, columns: int, lines: int) -> Recording:
    """Run autotune in `folder` on a terminal of this size. Raises SystemExit if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"TERM": "xterm-256color", "LOGNAME": USER, "PYTHONPATH": path}
    dropped = ("COLUMNS", "LINES", "NO_COLOR", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "AUTOTUNE_STORAGE")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        os.execve(sys.executable, [sys.executable, "-m", "autotune", *arguments], kept | environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    os.kill(process, signal.SIGWINCH)
    recording, began = Recording(), time.monotonic()
    while drawn := _frame(terminal):
        text = drawn.decode(errors="replace").replace(str(folder), HOME)
        text = text.replace(f"@{socket.gethostname()}:", f"@{HOST}:")
        recording.frames.append((round(time.monotonic() - began, 2), text))
    recording.seconds = round(time.monotonic() - began, 1)
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit(f"autotune {shlex.join(arguments)} failed:\n{''.join(text for _, text in recording.frames)}")
    return recording


def _frame(terminal: int) -> bytes:
    """What the terminal is sent within FRAME_S of the first character; empty at the end."""
    drawn, until = b"", None
    while until is None or (left := until - time.monotonic()) > 0:
        if until is not None and not select.select([terminal], [], [], left)[0]:
            break
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the process has ended
            break
        if not part:
            break
        drawn, until = drawn + part, until or time.monotonic() + FRAME_S
    return drawn


def as_cast(recording: Recording, columns: int, lines: int, command: str) -> str:
    """An asciinema file, version 2. Raises SystemExit where it would tell of this machine."""
    text = "".join(drawn for _, drawn in recording.frames)
    private = {str(Path.home()), str(ROOT), tempfile.gettempdir(), socket.gethostname()}
    if found := [word for word in private if len(word) > 2 and word in text]:
        raise SystemExit(f"the recording has words of this machine: {', '.join(found)}")
    header = {"version": 2, "width": columns, "height": lines, "command": command, "title": "autotune"}
    events = [[seconds, "o", drawn] for seconds, drawn in recording.frames]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [header, *events])


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The longest of both terminals: of README's line, and of each other by its name."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        for key in ("first_number_s", "answer_s"):
            seconds = [row[key] for row in rows if row["name"] == name and row[key] is not None]
            found[key if name == README else f"{name}_{key}"] = max(seconds, default=None)
    return found


if __name__ == "__main__":
    main()

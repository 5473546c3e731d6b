"""Time a newcomer's first minutes: README's first command, the speed that it predicts, and a light
install.
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
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import (
    ROOT,
    Mode,
    fingerprint_of,
    finish,
    load,
    run_exported,
    run_program,
    run_study,
    save,
    scratch,
    table,
    worker,
)

from autotune.core.files import write_atomic
from autotune.core.serialization import to_data

# --- record

SIZES = ((100, 30), (160, 50))  # columns and rows
FRAME_S = 0.2  # output within this time is one frame
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
# The text on screen at each moment that a reader waits for.
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
    """The output to a terminal: pairs of a time in seconds since the start, and text."""

    frames: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    def moment(self, pattern: str) -> float | None:
        """Return the time of the first match of the text so far, if any."""
        text = ""
        for seconds, drawn in self.frames:
            text += CONTROL.sub("", drawn).replace("\r", "\n")
            if re.search(pattern, text):
                return seconds
        return None


def run_record(args: argparse.Namespace) -> None:
    """Record the first minutes: README's first command in terminals of 100 and of 160 columns, by a
    real clock.

    It writes an asciinema recording of each (`asciinema play FILE`) and the seconds until the first
    speed and the answer were on screen. Options of `autotune run` after `--` record another
    command. Its rows and recordings have a name of their own:

        record --name h100 --rows first_minutes.json -- --gpu auto --model mistral-7b --budget 90s
    """
    options = args.options or readme_options()
    rows = load(args.rows) if args.rows else []
    rows = [row for row in rows if row["name"] != args.name]
    with worker("cpu" if "cpu" in options else "cuda") as prober:
        fingerprint = to_data(prober.fingerprint)
    for columns, lines in SIZES:
        load_before = os.getloadavg()[0]  # of other work on this machine, per minute
        with tempfile.TemporaryDirectory() as folder:
            recording = record(["run", *options], Path(folder).resolve(), columns, lines)
            if args.keep:
                shutil.copytree(folder, args.keep, dirs_exist_ok=True)
        called = (
            f"first-minutes-{columns}"
            if args.name == README
            else f"first-minutes-{args.name}-{columns}"
        )
        file = (args.out or ROOT / "docs" / "recordings") / f"{called}.cast"
        write_atomic(
            file, as_cast(recording, columns, lines, shlex.join(["autotune", "run", *options]))
        )
        row = {"name": args.name, "columns": columns, "lines": lines, "load_before": load_before}
        row |= {name: recording.moment(pattern) for name, pattern in MOMENTS.items()}
        rows.append(row | {"seconds": recording.seconds, "fingerprint": fingerprint})
        save(args, rows[0]["fingerprint"], rows)
    table(rows, [name for name in rows[0] if name != "fingerprint"])


def readme_options() -> list[str]:
    """Return the options of `autotune run` in README's first command."""
    line = next(
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("pip install")
    )
    return shlex.split(line.partition("&& autotune run ")[2])


def record(arguments: list[str], folder: Path, columns: int, lines: int) -> Recording:
    """Run autotune in `folder` on a terminal of this size. Raises SystemExit if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"TERM": "xterm-256color", "LOGNAME": USER, "PYTHONPATH": path}
    dropped = (
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "DISPLAY",
        "WAYLAND_DISPLAY",
        "SSH_CONNECTION",
        "AUTOTUNE_STORAGE",
    )
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        os.execve(
            sys.executable, [sys.executable, "-m", "autotune", *arguments], kept | environment
        )
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
        raise SystemExit(
            f"autotune {shlex.join(arguments)} failed:\n"
            f"{''.join(text for _, text in recording.frames)}"
        )
    return recording


def _frame(terminal: int) -> bytes:
    """Return the output within FRAME_S of the first character. It is empty at the end."""
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
    """An asciinema file, version 2. Raises SystemExit if it would describe this machine."""
    text = "".join(drawn for _, drawn in recording.frames)
    private = {str(Path.home()), str(ROOT), tempfile.gettempdir(), socket.gethostname()}
    if found := [word for word in private if len(word) > 2 and word in text]:
        raise SystemExit(f"the recording has words of this machine: {', '.join(found)}")
    header = {
        "version": 2,
        "width": columns,
        "height": lines,
        "command": command,
        "title": "autotune",
    }
    events = [[seconds, "o", drawn] for seconds, drawn in recording.frames]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [header, *events])


def summarize_record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The longest of both terminals: of README's line, and of each other by its name."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        for key in ("first_number_s", "answer_s"):
            seconds = [row[key] for row in rows if row["name"] == name and row[key] is not None]
            found[key if name == README else f"{name}_{key}"] = max(seconds, default=None)
    return found


# --- truth


def run_truth(args: argparse.Namespace) -> None:
    """Compare the speed that README's first command predicts on a CPU with the speed of the script
    that it exports.

    Each repetition is a study of its own and passes over all examples. The machine should do
    nothing else. `ratio` is the predicted speed divided by the measured speed, both in useful
    tokens per second: the median of the repetitions.
    """
    rows: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        folder = scratch()
        study = run_study(folder, *readme_options(), "--out", "out")
        rows.append(truth_of(study["winner"], run_exported(folder, "--output-dir", "")))
        table(rows[-1:], ["config", "said", "measured", "ratio", "low", "high"])
    finish(args, fingerprint_of(study), rows)


def truth_of(winner: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    """Return the predicted speed of a winner with its interval, and the measured one, in tokens per
    second.
    """
    said, found = winner["performance"]["tokens_per_second"], done["tokens_per_second"]
    hours, interval = winner["cost"]["full_run_hours"], winner["cost"]["interval_hours"]
    return {
        "config": winner["config"],
        "said": said,
        "low": said * hours / interval[1],
        "high": said * hours / interval[0],
        "measured": found,
        "steps": done["steps"],
        "ratio": said / found,
    }


def summarize_truth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows]
    return {
        "repeats": len(rows),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "inside": sum(row["low"] <= row["measured"] <= row["high"] for row in rows),
    }


# --- light

PLAN = ["plan", "--model", "mistral-7b", "--gpu", "rtx-4090"]
# The other commands of a light install
OTHERS = [
    ["compare", "--model", "mistral-7b", "--gpus", "a100,h100"],
    ["check", "run.yaml", "--gpu", "h100"],
    ["longest", "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--method", "qlora"],
    *(["models"], ["gpus"], ["prices"], ["suites"]),
]
# Files that the extra `data` reads, and the number of their examples
TABLES = {"rows.parquet": 500, "rows.arrow": 700}
RUN_YAML = "base_model: mistralai/Mistral-7B-v0.3\nadapter: lora\nlora_r: 16\n"
IN_EVERY_ENVIRONMENT = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils")


def run_light(args: argparse.Namespace) -> None:
    """Install the package without extras in a new virtual environment, and run its commands.

    pip downloads every package anew. Building the wheel and making the environment are not timed,
    because PyPI has the wheel and a user has an environment. `mb` are the megabytes of the packages
    as their wheels hold them; `bytecode_mb` is what pip compiles beside them. `data_mb` includes
    the extra `data`, with which `plan` reads the lengths of compressed Parquet and Arrow files.
    """
    with worker("cpu") as prober:
        fingerprint = to_data(prober.fingerprint)
    wheels = scratch()
    _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)])
    (wheel,) = wheels.glob("*.whl")
    rows: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            row = {"load_before": os.getloadavg()[0], **light_row(wheel, Path(folder))}
        rows.append(row)
        table(rows[-1:], ["load_before", "install_s", "plan_s", "mb", "bytecode_mb", "data_mb"])
    finish(args, fingerprint, rows)


def light_row(wheel: Path, folder: Path) -> dict[str, Any]:
    """Install the wheel in a new environment in `folder`; return the times and sizes."""
    environment = folder / "environment"
    _run([sys.executable, "-m", "venv", str(environment)])
    pip = [str(environment / "bin" / "pip"), "--disable-pip-version-check", "install", "-q"]
    install_s = _run([*pip, "--no-cache-dir", str(wheel)])
    program = str(environment / "bin" / "autotune-llm")
    plan_s = _run([program, *PLAN], folder)
    (site,) = environment.glob("lib/python*/site-packages")
    mb, bytecode_mb = installed_mb(site)

    (folder / "run.yaml").write_text(RUN_YAML, encoding="utf-8")
    seconds = {words[0]: _run([program, *words], folder) for words in OTHERS}
    data_install_s = _run([*pip, "--no-cache-dir", f"{wheel}[data]"])
    write_tables(folder)
    examples = {name: _examples(program, folder / name) for name in TABLES}
    return {
        "install_s": install_s,
        "plan_s": plan_s,
        "mb": mb,
        "bytecode_mb": bytecode_mb,
        "seconds": seconds,
        "data_install_s": data_install_s,
        "data_mb": installed_mb(site)[0],
        "examples": examples,
    }


def write_tables(folder: Path) -> None:
    """Write the files in TABLES, which are compressed: Parquet with snappy, and Arrow with zstd."""
    import pyarrow
    import pyarrow.parquet

    for name, number in TABLES.items():
        rows = [
            {"prompt": f"question {row}", "completion": "answer " * row} for row in range(number)
        ]
        made = pyarrow.Table.from_pylist(rows)
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(made, folder / name)
        else:
            options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
            path = str(folder / name)
            with pyarrow.ipc.new_stream(path, made.schema, options=options) as writer:
                writer.write_table(made)


def _examples(program: str, path: Path) -> int:
    """Return the number of examples that `plan` found in a file. Raises SystemExit if it failed."""
    command = [program, *PLAN, "--dataset", str(path), "--json"]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}")
    return int(json.loads(done.stdout)["workload"]["examples"])


def _run(command: list[str], folder: Path | None = None) -> float:
    """Run a command without the packages of this environment; return its seconds."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    began = time.monotonic()
    subprocess.run(
        command, cwd=folder, env=outside, check=True, stdout=subprocess.DEVNULL, timeout=600
    )
    return round(time.monotonic() - began, 2)


def installed_mb(site: Path) -> tuple[float, float]:
    """Return the megabytes of files, and of bytecode, without pip and setuptools."""
    sizes = {True: 0, False: 0}
    for path in site.rglob("*"):
        top = path.relative_to(site).parts[0].partition("-")[0]
        if path.is_file() and top not in IN_EVERY_ENVIRONMENT:
            sizes[path.suffix == ".pyc"] += path.stat().st_size
    return sizes[False] / 1e6, sizes[True] / 1e6


def summarize_light(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest and the largest of all repetitions."""
    names = {"light_install_s": "install_s", "plan_answer_s": "plan_s", "light_mb": "mb"}
    names |= {"light_bytecode_mb": "bytecode_mb", "data_mb": "data_mb"}
    names |= {"data_install_s": "data_install_s"}
    return {name: max((row[key] for row in rows), default=None) for name, key in names.items()} | {
        "commands": len(OTHERS) + 1,
        "tables_read": all(row["examples"] == TABLES for row in rows),
    }


MODES = {
    "light": Mode(
        run=run_light,
        result="light_install",
        summarize=summarize_light,
        options={"--repeats": 3},
    ),
    "record": Mode(
        run=run_record,
        result="first_minutes",
        summarize=summarize_record,
        options={
            "--name": {"default": README, "help": "name of the recorded command"},
            "--rows": {"help": "the result that gets these rows"},
            "--keep": {"help": "a folder for the last study"},
            "options": {
                "nargs": "*",
                "metavar": "-- OPTIONS",
                "help": "of `autotune run`, instead of README's",
            },
        },
    ),
    "truth": Mode(
        run=run_truth, result="cpu_truth", summarize=summarize_truth, options={"--repeats": 3}
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

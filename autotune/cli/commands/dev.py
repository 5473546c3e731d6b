"""`autotune dev inject`: inject faults into small real studies, and check how each study ends.

Each study is a process in a temporary directory. `probe.fault_injection` injects the faults in
probes, and this module injects the faults of the disk and the database.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import Json
from autotune.cli.terminal import print_json, print_table
from autotune.core.errors import TooManyFailures, UsageError, did_you_mean
from autotune.core.process import module_command
from autotune.core.scratch import scratch_directory

TRIALS = 4
FULL = 200_000  # bytes; a file cannot grow beyond this size on the simulated full disk
STRUCK = 1  # the number of the trial that gets the fault
SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [4, 8]}
  seq_len: 64
  lora_rank: {values: [16, 32], kind: learning}
  checkpointing: {values: [none, full]}
"""
# The expected outcome of the trial with the fault
OUTCOMES = {
    **dict.fromkeys(("oom", "host-oom"), "oom"),
    **dict.fromkeys(("crash", "ecc", "exit", "sigkill", "sigsegv"), "crash"),
    **dict.fromkeys(("slow", "throttle"), "ok"),
    **{"nan": "numerics", "hang": "timeout"},
}
# For some faults, a text that the reason for the faulty trial's failure must contain
REASONS = {
    **dict.fromkeys(("crash", "ecc", "exit", "sigkill", "sigsegv"), "tried twice"),
    "throttle": "slowed down",
}
OUTSIDE_PROBES = ("disk-full", "db-gone")
# The faults that are injected by default; "hang" is left out, because its timeout takes 15 minutes.
USUAL = (*(name for name in OUTCOMES if name != "hang"), *OUTSIDE_PROBES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a study with an injected fault.

    `lost` is the number of missing trials, and `orphans` is the number of processes that still run.
    """

    fault: str
    happened: str
    survived: bool
    lost: int
    orphans: int

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a row in the printed table."""
        return (
            self.fault,
            self.happened,
            "yes" if self.survived else "NO",
            str(self.lost),
            str(self.orphans),
        )


dev = typer.Typer(
    help="Tests of a machine or a fleet.", invoke_without_command=True, rich_markup_mode=None
)


@dev.callback()
def _commands(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@dev.command(help="Inject faults into small studies, and print how each ended.")
def inject(
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="oom, host-oom, crash, ecc, exit, sigkill, sigsegv, nan, slow, throttle, hang, "
            "disk-full, db-gone; repeatable.",
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Device of the small studies: auto or cpu.")] = "cpu",
    json_: Json = False,
) -> None:
    """Inject the faults, and print how each study ended.

    Raises:
        UsageError: there is no such fault.
        TooManyFailures: a study ended wrongly, lost a trial, or left a process running.
    """
    faults = (*OUTCOMES, *OUTSIDE_PROBES)
    for name in fault or ():
        if name not in faults:
            raise UsageError(
                f"there is no fault {name!r}{did_you_mean(name, faults)}",
                remedy=f"the faults are {', '.join(faults)}",
            )

    rows: list[Row] = []
    for name in fault or USUAL:
        print(f"injecting {name}", file=sys.stderr)
        with scratch_directory() as folder:
            rows.append(_strike(name, gpu, Path(folder)))

    if json_:
        print_json([asdict(row) for row in rows])
    else:
        columns = {
            "fault": "left",
            "what happened": "left",
            "survived": "left",
            "lost": "right",
            "orphans": "right",
        }
        print_table(None, columns, [row.cells() for row in rows])

    failed_faults = [row.fault for row in rows if not row.survived or row.lost or row.orphans]
    if failed_faults:
        raise TooManyFailures(
            f"studies did not survive {', '.join(failed_faults)}", remedy="see the table above"
        )


def _strike(fault: str, gpu: str, folder: Path) -> Row:
    """Run a small study with a fault, and return how the study ended."""
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    (folder / "tmp").mkdir()

    if fault in OUTCOMES:
        code = _study(folder, gpu, f"{fault}:{STRUCK}")
        trials = _trials(folder)
        row = next((row for row in trials if row["number"] == STRUCK), {})
        outcome = row.get("outcome", "none")
        reason = row.get("reason") or ""
        happened = f"trial {STRUCK}: {outcome}"
        expected = REASONS.get(fault, "")
        if expected and expected in reason:
            happened += f", {expected}"
        survived = code == 0 and outcome == OUTCOMES[fault] and expected in reason
    else:
        if fault == "disk-full":  # the limit is little more than the size of an empty database
            first_code = _study(
                folder, gpu, limit=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (FULL, FULL))
            )
        else:
            first_code = _without_database(folder, gpu)
        code = _study(folder, gpu)  # run the same command again, as the remedy of the error says
        trials = _trials(folder)
        happened = f"exit {first_code}, then continued: exit {code}"
        survived = (first_code, code) == (6, 0)

    return Row(
        fault=fault,
        happened=happened,
        survived=survived,
        lost=TRIALS - len(trials),
        orphans=_orphans(folder),
    )


def _without_database(folder: Path, gpu: str) -> int:
    """Run a study whose database is replaced by a directory after the first trial.

    Returns the study's exit code. The database is restored after the study has ended.
    """
    database = folder / "study.db"
    hidden_database = folder / "aside.db"

    def take() -> None:
        if _trials(folder) and not hidden_database.exists():
            database.rename(hidden_database)
            database.mkdir()

    code = _study(folder, gpu, meanwhile=take)
    if hidden_database.exists():
        database.rmdir()
        hidden_database.rename(database)
    return code


def _study(
    folder: Path,
    gpu: str,
    struck: str = "",
    *,
    limit: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Run or continue the study in `folder`, and return the exit code.

    `meanwhile` is called repeatedly until the study ends.
    """
    from autotune.probe.fault_injection import VARIABLE

    command = [*module_command("autotune"), "run", "--quiet", "--gpu", gpu, "--model", "demo-3m"]
    command += ["--space", "space.yaml", "--trials", str(TRIALS), "--study", "injected"]
    command += ["--out", "out"]
    command += ["--storage", "sqlite:///study.db"]

    environment = os.environ | {VARIABLE: struck, "TMPDIR": str(folder / "tmp")}
    with (folder / "study.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=limit
        )
        while process.poll() is None:
            meanwhile()
            time.sleep(0.02)
    return process.returncode


def _trials(folder: Path) -> list[dict[str, Any]]:
    try:
        return [
            json.loads(line)
            for line in (folder / "out" / "trials.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, ValueError):  # the file does not exist yet, or its last line is incomplete
        return []


def _orphans(folder: Path) -> int:
    """Count the processes, such as workers, whose command line contains the directory."""
    import psutil

    return sum(
        str(folder) in " ".join(one.info["cmdline"] or ())
        for one in psutil.process_iter(["cmdline"])
    )

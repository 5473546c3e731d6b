"""The command line: lists the commands, and imports the file of a command that the user runs.

This module prints the error of a command that fails, and exits the process. Only `cli.stop` also
ends the process, at a second signal. The exit codes of errors are 1 unexpected error, 2 wrong usage
or file, 3 problem of the environment, 4 nothing fits, 5 too many failures, 6 storage error and 7
budget too short. A stopped process ends with 75 preempted, 130 or 143 stopped by a signal, or 141
the reader of a pipe ended.
"""

import atexit
import gc
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from autotune.cli.help import START, PanelCommand, write_groups
from autotune.cli.terminal import ReaderEnded, guard
from autotune.cli.usage import CLICK_USAGE_ERROR, no_such_command, with_remedy
from autotune.core.errors import AutotuneError, EnvironmentProblem, StorageError
from autotune.core.installed import NotInstalled, is_installed, missing
from autotune.core.version import __version__

# For each command: its function, as module:name in autotune.cli.commands, and its help text
COMMANDS = {
    "run": (
        "run:run",
        "Search for the best configuration with real probes, confirm it, and export it with its "
        "cost.\n\nThere is no dry run: `autotune plan` estimates the same run without a probe."
        "\n\n\b\nExamples:\n"
        "  autotune run --model qwen3-8b --dataset data.jsonl --budget 15m\n"
        "  autotune run --model llama-3.1-8b --gpu a10 --space qlora --examples 50000\n"
        "  autotune run --model mistral-7b --gpus 2 --space full --set seed=7",
    ),
    "plan": (
        "plan:plan_command",
        "Estimate which configuration fits a GPU, its speed and its cost; needs no GPU.",
    ),
    "compare": (
        "compare:compare_command",
        "Compare GPUs for the same run: memory, speed and cost; needs no GPU.",
    ),
    "check": (
        "check:check_command",
        "Check whether the run that another tool's YAML describes fits a GPU, how long it takes "
        "and what to change; needs no GPU.",
    ),
    "status": ("studies:status", "Show a study's progress, and its best configuration so far."),
    "list": ("studies:list_all", "List the studies of a database."),
    "resume": (
        "run:resume",
        "Continue a study that was stopped, with its original options.",
    ),
    "delete": (
        "studies:delete",
        "Delete a study and its probes from the database; its files stay.",
    ),
    "explain": (
        "analysis:explain",
        "Probe a study's winner again, each time with one setting changed back to the baseline's "
        "value, and print each setting's gain.",
    ),
    "verify": (
        "analysis:verify",
        "Run a study's export, and compare its speed and memory with the study's numbers.",
    ),
    "learn": (
        "learn:learn",
        "Find the learning rate of a study's winner by short real trainings on your own examples "
        "and weights.",
    ),
    "train": (
        "train:train",
        "Start the full run with a study's winner; shows its progress and its cost.",
    ),
    "worker": (
        "worker:worker",
        "Join a running study with this machine's GPU, until its search is over.",
    ),
    "fleet": (
        "studies:fleet",
        "Write files that start workers of a study on Kubernetes, SkyPilot or Slurm; the "
        "files do not contain the database's URL.",
    ),
    "oom": (
        "studies:oom",
        "Explain why trials of a study ran out of memory or were refused, and what to change.",
    ),
    "export": ("studies:export", "Write the winner's configuration for a trainer."),
    "report": (
        "studies:report",
        "Write report.html and the other files of a study again, or compare two studies.",
    ),
    "dashboard": (
        "dashboard:dashboard",
        "Show a study in optuna-dashboard, read-only and on this machine alone (pip install "
        "optuna-dashboard).\n\nIt shows a copy in memory, with notes, figures and reports; the "
        "database is only read. A study that still runs is read again every 5 seconds while the "
        "page is open.",
    ),
    "longest": (
        "longest:longest",
        "Find the longest sequence that fits a GPU, for each training method. If this machine has "
        "the GPU, real steps verify the predicted length.",
    ),
    "calibrate": (
        "calibrate:calibrate",
        "Measure this machine in about 30 seconds: GPU, host, disk and link. Later "
        "estimates for this machine use these rates.",
    ),
    "doctor": ("doctor:doctor", "Check whether this machine can run a study."),
    "gpus": ("catalogs:gpus", "List the GPUs of the catalogue."),
    "models": ("catalogs:models", "List the models of the catalogue."),
    "prices": ("catalogs:prices", "List the price of a GPU hour, and the age of each price."),
    "submit": (
        "share:submit",
        "Write a study's winner and baseline to a file that you can share: it has no private data.",
    ),
    "import": (
        "share:import_",
        "Check a file, or a folder of files, that others submitted, and store it as evidence.",
    ),
    "spaces": ("catalogs:spaces", "List the search spaces that come with the package."),
    "suites": (
        "catalogs:suites",
        "List the published results that come with the package, to compare estimates with them.",
    ),
    "schema": ("catalogs:schema", "Print the JSON Schema of a command's --json output."),
    "mcp": (
        "agents:mcp",
        "Serve plan, compare, check, longest, status and run to agents, over stdin and stdout "
        "(Model Context Protocol).",
    ),
    "skill": ("agents:skill", "Print SKILL.md, which tells an agent how to use autotune."),
    "dev": ("dev:dev", "Tests of a machine or a fleet."),
}
# The commands that run on any system, without the packages of the extra `run`
ANYWHERE = frozenset(
    {"plan", "compare", "check", "longest", "models", "gpus", "prices", "spaces", "suites"}
    | {"import", "schema", "mcp", "skill"}
)
HELP = ("--help", "-h")
BROKEN_PIPE = 128 + 13  # the status that a shell gives a program that SIGPIPE ended


def function_of(name: str) -> Any:
    """Import the file of a command, and return the command's function."""
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(import_module(f"autotune.cli.commands.{module}"), function)


class LazyGroup(TyperGroup):
    """The command line's group of commands, from the table COMMANDS.

    The file of a command is imported only when the command runs. The list of commands in --help
    needs only the help texts.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=text) for name, (_, text) in COMMANDS.items()
        }

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups, with whole descriptions."""
        write_groups(self.commands, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Import the file of the command that the arguments name, and return the command."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise no_such_command(args[0], "autotune", self.commands)
        name, entry, rest = super().resolve_command(ctx, args)
        if entry is None:
            return name, entry, rest
        is_run = not ctx.resilient_parsing and not any(word in HELP for word in rest)
        if is_run and entry.name not in ANYWHERE:
            _check_machine(f"autotune {entry.name}")

        _, text = COMMANDS[entry.name or ""]
        target = function_of(entry.name or "")
        if isinstance(target, typer.Typer):
            return name, typer.main.get_group(target), rest

        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name, help=text, cls=PanelCommand)(target)
        return name, typer.main.get_command(single), rest


app = typer.Typer(
    name="autotune",
    cls=LazyGroup,
    help="Find the best fine-tuning configuration for a model on a GPU, by short real probes.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP)},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(START)


def _check_machine(command: str) -> None:
    """Raise an error unless this system and its packages can run studies."""
    if sys.platform != "linux":
        raise EnvironmentProblem(
            f"{command} runs on Linux only",
            remedy="use WSL 2 (Windows Subsystem for Linux)"
            if sys.platform == "win32"
            else "use a machine or a container with Linux",
        )
    # If one package of the extra `run` is missing, usually all are missing, so checking optuna is
    # enough. A command that needs another missing package fails when it imports the package.
    # `autotune doctor` reports missing packages itself.
    if command != "autotune doctor" and not is_installed("optuna"):
        raise NotInstalled(command)


def collect_rarely() -> None:
    """Collect garbage rarely, and not at exit. A short command then needs half the CPU time."""
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)


def main() -> None:
    """Run the command line. Print a failure as one message and one remedy, and set the exit code.

    A traceback is printed only with --debug.
    """
    guard()
    collect_rarely()
    debug = "--debug" in sys.argv[1:]
    if debug:
        sys.argv = [sys.argv[0], "--debug", *(arg for arg in sys.argv[1:] if arg != "--debug")]

    try:
        code = app(prog_name="autotune", standalone_mode=False) or 0
        sys.stdout.flush()  # a closed pipe raises ReaderEnded here, not an error at Python's exit
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except ReaderEnded:
        # At its exit, Python writes the rest of the stream's buffer, so send it to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except typer.Abort:
        sys.exit("Aborted.")
    except Exception as error:
        if debug:
            traceback.print_exc()
        ours = _with_remedy(error)
        print(f"error: {ours}", file=sys.stderr)
        if ours.remedy:
            print(f"  try: {ours.remedy}", file=sys.stderr)
        if ours.explained:
            from autotune.core.files import document

            print(f"  see: {document('errors.md')}#{ours.explained}", file=sys.stderr)
        sys.exit(ours.exit_code)


def _with_remedy(error: Exception) -> AutotuneError:
    """Return any error as an AutotuneError; an unexpected error gets a general remedy."""
    if isinstance(error, AutotuneError):
        return error
    if isinstance(error, CLICK_USAGE_ERROR):
        return with_remedy(error, sys.argv[1:], COMMANDS)
    if (not_installed := missing(error, "this command")) is not None:
        return not_installed
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
        place = "" if error.filename is None else f"{error.filename}: "
        return StorageError(
            f"{place}{error.strerror}",
            remedy="check that this path exists, and can be read and written",
        )
    unexpected = AutotuneError(
        f"unexpected {type(error).__name__}: {error}",
        remedy="run again with --debug and report the traceback",
    )
    unexpected.explained = "unexpected"
    return unexpected


if __name__ == "__main__":
    main()

"""The command line: names the commands and loads a command's file on use. The only place that prints errors and exits.

Exit codes: 0 done, 1 unexpected, 2 usage or config, 3 environment, 4 nothing fits, 5 too many failures, 6 storage,
75 preempted, 130 and 143 stopped by a signal.
"""

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune import __version__
from autotune.cli.options import (
    ALL,
    CARD,
    LENGTHS,
    PLANNED,
    Evidence,
    Gpu,
    Json,
    Quiet,
    Storage,
    StudyName,
    spec_of,
    with_study_options,
)
from autotune.core.errors import AutotuneError, UsageError

EVIDENCE = Path("runs/evidence")
EXPORTS = (
    "recipe, trl, train, axolotl, llamafactory (these by default), transformers, accelerate, kubernetes, skypilot, "
    "slurm, torchtune; repeatable."
)

app = typer.Typer(
    name="autotune",
    help="Find the best fine-tuning configuration for a model on a GPU, by short real probes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    pass


@app.command()
@with_study_options(*ALL)
def run(
    json_: Json = False,
    events: Annotated[
        bool, typer.Option("--events", help="Print a line of JSON on stdout for each event, the result last.")
    ] = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Search for the best configuration with real probes, confirm it, and export it with its cost."""
    from autotune.cli.commands.run import run as command

    if json_ and events:
        raise UsageError("--events ends with what --json prints", remedy="leave one of them out")
    command(spec_of(options), as_json=json_, quiet=quiet, events=events)


@app.command()
@with_study_options("model", *PLANNED)
def plan(gpu: Gpu = None, evidence: Evidence = EVIDENCE, json_: Json = False, **options: Any) -> None:
    """Estimate what fits a GPU, how fast it trains and what that costs; needs no GPU."""
    from autotune.cli.commands.plan import plan as command

    command(spec_of(options | {"gpu": gpu}), evidence=evidence, as_json=json_)


@app.command()
@with_study_options(*PLANNED)
def compare(
    gpus: Annotated[list[str], typer.Option("--gpus", metavar="NAMES", help="Separated by commas; repeatable.")],
    model: Annotated[list[str] | None, typer.Option(help="As for `run`; repeatable.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Each by itself: lora, qlora, full. [what --space has]")
    ] = None,
    max_usd: Annotated[float | None, typer.Option(help="What the run may cost.")] = None,
    max_hours: Annotated[float | None, typer.Option(help="How long the run may take.")] = None,
    owned: Annotated[str | None, typer.Option(metavar="GPU", help="A card of your own, or one you may buy.")] = None,
    owned_usd: Annotated[float | None, typer.Option(help="What that card costs.")] = None,
    owned_hours: Annotated[float, typer.Option(help="Hours of use over which its cost is spread.")] = 10_000,
    usd_per_kwh: Annotated[float, typer.Option(help="What its electricity costs.")] = 0.30,
    format_: Annotated[
        str | None, typer.Option("--format", help="table, markdown, csv, html or json. [by --out, or table]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the comparison to this file.")] = None,
    evidence: Evidence = EVIDENCE,
    **options: Any,
) -> None:
    """Compare GPUs for the same run: what fits, how fast it is, and what it costs; needs no GPU."""
    from autotune.cli.commands.compare import compare as command

    command(
        [spec_of(options | {"model": name}) for name in model or (None,)],
        gpus=gpus,
        methods=methods or [],
        budget=(max_usd, max_hours),
        owned=(owned, owned_usd, owned_hours, usd_per_kwh),
        evidence=evidence,
        form=format_,
        out=out,
    )


@app.command()
@with_study_options(*LENGTHS, *CARD)
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML that TRL, Axolotl or LLaMA-Factory reads.")],
    gpu: Gpu = None,
    model: Annotated[str | None, typer.Option(help="A model of the same shape. [the file's]")] = None,
    evidence: Evidence = EVIDENCE,
    json_: Json = False,
    **options: Any,
) -> None:
    """Check whether the run of another tool's YAML fits a GPU, how long it takes and what to change; needs no GPU."""
    from autotune.cli.commands.check import check_file

    check_file(file, options | {"gpu": gpu, "model": model}, evidence=evidence, as_json=json_)


@app.command()
def status(study: StudyName = None, storage: Storage = None, json_: Json = False) -> None:
    """Show how far a study is, and its best configuration so far."""
    from autotune.cli.commands import studies

    studies.status(study, storage, json_)


@app.command("list")
def list_(storage: Storage = None, json_: Json = False) -> None:
    """List the studies of a database."""
    from autotune.cli.commands import studies

    studies.list_all(storage, json_)


@app.command()
def resume(
    study: StudyName = None,
    budget: Annotated[str | None, typer.Option(help="Wall time from now: 90s, 15m, 1h. [as before]")] = None,
    trials: Annotated[int | None, typer.Option(help="Total number of trials, over all sessions. [as before]")] = None,
    workers: Annotated[int | None, typer.Option(help="GPUs of this machine to probe on. [as before]")] = None,
    storage: Storage = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a study that was stopped, with the options it was begun with."""
    from autotune.cli.commands import studies

    changes = {"budget": budget, "trials": trials, "workers": workers}
    studies.resume(study, storage, changes, as_json=json_, quiet=quiet)


@app.command()
def delete(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage: Storage = None,
) -> None:
    """Delete a study and its probes from the database; its files stay."""
    from autotune.cli.commands import studies

    studies.delete(study, storage, sure=yes)


@app.command()
def explain(study: StudyName = None, storage: Storage = None, json_: Json = False) -> None:
    """Probe a study's winner with one knob after another set back, and print what each is worth."""
    from autotune.cli.commands.analysis import explain_study

    explain_study(study, storage, as_json=json_)


@app.command()
def verify(
    study: StudyName = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="What to run: train (train.py) or trl (trl_sft.yaml). [as probed]")
    ] = None,
    soak: Annotated[
        bool, typer.Option("--soak", help="Mix the longest possible rows with short ones; memory must not grow.")
    ] = False,
    micro_steps: Annotated[int, typer.Option(help="Micro batches to run, at least.")] = 200,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference allowed.")] = 0.05,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Run what a study exported, and compare its speed and memory with the study's numbers."""
    from autotune.cli.commands.analysis import verify_study

    verify_study(study, storage, form=format_, soak=soak, micro_steps=micro_steps, tolerance=tolerance, as_json=json_)


@app.command()
def train(
    study: StudyName = None,
    dataset: Annotated[Path | None, typer.Option(metavar="FILE", help="Lines of JSON to train on.")] = None,
    model: Annotated[str | None, typer.Option(help="Directory or Hub name of the weights. [the study's]")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Try the speed, without data.")] = False,
    output: Annotated[Path | None, typer.Option("--output-dir", help="[trained/ in the study's directory]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint, if any.")] = False,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many optimizer steps.")] = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Start the full run with a study's winner; shows its progress and its cost."""
    from autotune.cli.commands.train import command

    options: dict[str, Any] = {"dataset": dataset, "model": model, "output": output, "max_steps": max_steps}
    command(study, storage, random_weights=random_weights, resume=resume, as_json=json_, **options)


@app.command()
def worker(
    study: Annotated[str, typer.Option(help="Name of the study that `autotune run` leads.")],
    storage: Storage = None,
    out: Annotated[Path | None, typer.Option(help="Directory for logs. [the study's]")] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Join although this machine differs from the others.")
    ] = False,
    wait: Annotated[str | None, typer.Option(help="How long to wait for the study to begin, such as 15m.")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True, help="End with this process.")] = None,
    quiet: Quiet = False,
) -> None:
    """Help with a study that another process leads, on the GPU of this machine, until its search is over."""
    from autotune.cli.commands.worker import worker as command

    command(study, storage, out=out, allow_mixed=allow_mixed, parent=parent, quiet=quiet, wait=wait)


@app.command()
def fleet(
    study: StudyName = None,
    workers: Annotated[int, typer.Option(min=1, help="How many workers, besides the `autotune run` that leads.")] = 1,
    format_: Annotated[
        list[str] | None, typer.Option("--format", help="kubernetes, skypilot, slurm (all by default); repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory. [the study's]")] = None,
    storage: Storage = None,
) -> None:
    """Write files that start workers of a study on Kubernetes, SkyPilot or Slurm; none contains the database's URL."""
    from autotune.cli.commands import studies

    studies.fleet(study, storage, workers=workers, formats=format_ or [], out=out)


@app.command()
def oom(study: StudyName = None, storage: Storage = None, json_: Json = False) -> None:
    """Explain every out-of-memory and refusal of a study, and what to change."""
    from autotune.cli.commands import studies

    studies.oom(study, storage, json_)


@app.command()
def export(
    study: StudyName = None,
    format_: Annotated[list[str] | None, typer.Option("--format", help=EXPORTS)] = None,
    out: Annotated[Path | None, typer.Option(help="Directory. [the study's]")] = None,
    storage: Storage = None,
) -> None:
    """Write the winner's configuration for a trainer."""
    from autotune.cli.commands import studies

    studies.export(study, storage, format_ or [], out)


@app.command()
def report(
    study: StudyName = None,
    out: Annotated[Path | None, typer.Option(help="Directory. [the study's]")] = None,
    storage: Storage = None,
) -> None:
    """Write report.html and the other files of a study again."""
    from autotune.cli.commands import studies

    studies.report(study, storage, out)


@app.command()
def dashboard(
    study: StudyName = None,
    host: Annotated[str, typer.Option(help="Address of this machine to listen at; loopback only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; where it is taken, one that is free.")] = 8080,
    storage: Storage = None,
) -> None:
    """Show a study in optuna-dashboard, read-only and on this machine alone (pip install optuna-dashboard).

    It shows a copy in memory, with notes, figures and reports; the database is only read. A study that still runs is
    read again every 5 seconds while the page is open.
    """
    from autotune.cli.commands.dashboard import dashboard as command

    command(study, storage, host=host, port=port)


@app.command()
def doctor(storage: Storage = None, json_: Json = False) -> None:
    """Check whether this machine has what a study needs."""
    from autotune.cli.commands.doctor import doctor as command

    command(storage, json_)


@app.command()
def gpus(json_: Json = False) -> None:
    """List the GPUs of the catalogue."""
    from autotune.cli.commands import catalogs

    catalogs.gpus(json_)


@app.command()
def models(json_: Json = False) -> None:
    """List the models of the catalogue."""
    from autotune.cli.commands import catalogs

    catalogs.models(json_)


@app.command()
def prices(
    gpu: Annotated[str | None, typer.Argument(help="Name of a GPU; all by default.")] = None,
    own: Annotated[
        Path | None, typer.Option("--prices", metavar="FILE", help="Your own prices, which come first.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask what clouds charge today (pip install gpuhunt).")] = False,
    json_: Json = False,
) -> None:
    """List what an hour of a GPU costs, and how old each price is."""
    from autotune.cli.commands.prices import prices as command

    command(gpu, own, live, json_)


@app.command()
def submit(
    study: StudyName = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="[the study's submission.json]")] = None,
    storage: Storage = None,
) -> None:
    """Write a study's winner and baseline to a file for others, without anything private."""
    from autotune.cli.commands import share

    share.submit(study, storage, out)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `autotune submit` wrote.")],
    evidence: Annotated[Path | None, typer.Option(metavar="DIR", help="[runs/evidence]")] = None,
) -> None:
    """Check a file that somebody else submitted, and store it as evidence."""
    from autotune.cli.commands import share

    share.import_(file, evidence)


@app.command()
def spaces(json_: Json = False) -> None:
    """List the search spaces that come with the package."""
    from autotune.cli.commands import catalogs

    catalogs.spaces(json_)


dev = typer.Typer(help="Tests of a machine or a fleet.", no_args_is_help=True)
app.add_typer(dev, name="dev")


@dev.command()
def inject(
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="oom, host-oom, crash, ecc, exit, sigkill, sigsegv, nan, slow, throttle, hang, disk-full, db-gone; "
            "repeatable."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="What small studies run on: auto, or cpu.")] = "cpu",
    json_: Json = False,
) -> None:
    """Inject faults into small studies, and print how each ended."""
    from autotune.cli.commands.dev import inject as command

    command(fault or [], gpu, as_json=json_)


def main() -> None:
    """Entry point: one clear error, a remedy and a documented exit code; a traceback only with --debug."""
    debug = "--debug" in sys.argv[1:]
    if debug:
        sys.argv = [sys.argv[0], "--debug", *(arg for arg in sys.argv[1:] if arg != "--debug")]
    try:
        app(standalone_mode=True)
    except AutotuneError as error:
        if debug:
            traceback.print_exc()
        _print_error(str(error), error.remedy, error.explained)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if debug:
            traceback.print_exc()
        _print_error(
            f"unexpected {type(error).__name__}: {error}",
            "run again with --debug and report the traceback",
            "unexpected",
        )
        sys.exit(1)


def _print_error(message: str, remedy: str | None, explained: str | None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if remedy:
        print(f"  try: {remedy}", file=sys.stderr)
    if explained:
        print(f"  see: docs/errors.md#{explained}", file=sys.stderr)


if __name__ == "__main__":
    main()

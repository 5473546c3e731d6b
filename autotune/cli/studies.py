"""The commands about a study that exists. Part of the command line; each loads its file on use."""

from pathlib import Path
from typing import Annotated, Any

import typer

studies = typer.Typer()

EXPORTS = (
    "recipe, trl, train, axolotl, llamafactory (these by default), transformers, accelerate, kubernetes, skypilot, "
    "slurm, torchtune; repeatable."
)
StudyName = Annotated[str | None, typer.Argument(help="Name of the study; the newest by default.")]
Storage = Annotated[
    str | None,
    typer.Option(help="Database URL, or AUTOTUNE_STORAGE. [default: sqlite:///runs/autotune.db]", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@studies.command()
def status(study: StudyName = None, storage: Storage = None, json_: Json = False) -> None:
    """Say how far a study is, and its best so far."""
    from autotune.cli.commands import studies

    studies.status(study, storage, json_)


@studies.command("list")
def list_(storage: Storage = None, json_: Json = False) -> None:
    """List the studies of a database, and their best."""
    from autotune.cli.commands import studies

    studies.list_all(storage, json_)


@studies.command()
def resume(
    study: StudyName = None,
    budget: Annotated[str | None, typer.Option(help="Wall time from now: 90s, 15m, 1h. [as before]")] = None,
    trials: Annotated[int | None, typer.Option(help="Total number of trials, over all sessions. [as before]")] = None,
    workers: Annotated[int | None, typer.Option(help="GPUs of this machine to probe on. [as before]")] = None,
    storage: Storage = None,
    json_: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Continue a study that was stopped, with the options it was begun with."""
    from autotune.cli.commands import studies

    changes = {"budget": budget, "trials": trials, "workers": workers}
    studies.resume(study, storage, changes, as_json=json_, quiet=quiet)


@studies.command()
def delete(
    study: Annotated[str, typer.Argument(help="Name of the study.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage: Storage = None,
) -> None:
    """Forget a study and its probes; its files stay."""
    from autotune.cli.commands import studies

    studies.delete(study, storage, sure=yes)


@studies.command()
def explain(study: StudyName = None, storage: Storage = None, json_: Json = False) -> None:
    """Probe a study's winner with one knob after another set back, and say what each is worth."""
    from autotune.cli.commands.analysis import explain_study

    explain_study(study, storage, as_json=json_)


@studies.command()
def verify(
    study: StudyName = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="What to run: train (train.py) or trl (trl_sft.yaml). [as probed]")
    ] = None,
    soak: Annotated[
        bool, typer.Option("--soak", help="Rows as long as can be among short ones; memory must not creep.")
    ] = False,
    micro_steps: Annotated[int, typer.Option(help="Micro batches to run, at least.")] = 200,
    tolerance: Annotated[float, typer.Option(help="Share by which it may be off.")] = 0.05,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Run what a study exported, and hold its speed and memory against what the study said."""
    from autotune.cli.commands.analysis import verify_study

    verify_study(study, storage, form=format_, soak=soak, micro_steps=micro_steps, tolerance=tolerance, as_json=json_)


@studies.command()
def train(
    study: StudyName = None,
    dataset: Annotated[Path | None, typer.Option(metavar="FILE", help="Lines of JSON to train on.")] = None,
    model: Annotated[str | None, typer.Option(help="Directory or Hub name of the weights. [the study's]")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Try the speed, without data.")] = False,
    output: Annotated[Path | None, typer.Option("--output-dir", help="[trained/ in the study's directory]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint there, if any.")] = False,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many optimizer steps.")] = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Start the full run with a study's winner; says how far it is and what it has cost."""
    from autotune.cli.commands.train import command

    options: dict[str, Any] = {"dataset": dataset, "model": model, "output": output, "max_steps": max_steps}
    command(study, storage, random_weights=random_weights, resume=resume, as_json=json_, **options)


@studies.command()
def worker(
    study: Annotated[str, typer.Option(help="Name of the study, which `autotune run` began.")],
    storage: Storage = None,
    out: Annotated[Path | None, typer.Option(help="Directory for logs. [the study's]")] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Join though this machine is not like the others.")
    ] = False,
    wait: Annotated[str | None, typer.Option(help="For a study that is not begun yet, so long: 15m.")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True, help="End with this process.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Probe for a study that another process leads, on the GPU here, until there is nothing more to search."""
    from autotune.cli.commands.worker import worker as command

    command(study, storage, out=out, allow_mixed=allow_mixed, parent=parent, quiet=quiet, wait=wait)


@studies.command()
def fleet(
    study: StudyName = None,
    workers: Annotated[int, typer.Option(min=1, help="How many, beside the `autotune run` that leads.")] = 1,
    format_: Annotated[
        list[str] | None, typer.Option("--format", help="kubernetes, skypilot, slurm (all by default); repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory. [the study's]")] = None,
    storage: Storage = None,
) -> None:
    """Write what starts workers of a study on Kubernetes, SkyPilot or Slurm; the database's URL is not in it."""
    from autotune.cli.commands import studies

    studies.fleet(study, storage, workers=workers, formats=format_ or [], out=out)


@studies.command()
def oom(study: StudyName = None, storage: Storage = None, json_: Json = False) -> None:
    """Explain every out-of-memory and refusal of a study, and what to change."""
    from autotune.cli.commands import studies

    studies.oom(study, storage, json_)


@studies.command()
def export(
    study: StudyName = None,
    format_: Annotated[list[str] | None, typer.Option("--format", help=EXPORTS)] = None,
    out: Annotated[Path | None, typer.Option(help="Directory. [the study's]")] = None,
    storage: Storage = None,
) -> None:
    """Write the winner's configuration for a trainer."""
    from autotune.cli.commands import studies

    studies.export(study, storage, format_ or [], out)


@studies.command()
def report(
    study: StudyName = None,
    out: Annotated[Path | None, typer.Option(help="Directory. [the study's]")] = None,
    storage: Storage = None,
) -> None:
    """Write report.html and the other files of a study again."""
    from autotune.cli.commands import studies

    studies.report(study, storage, out)


@studies.command()
def dashboard(
    study: StudyName = None,
    host: Annotated[str, typer.Option(help="Address of this machine to listen at; loopback only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; where it is taken, one that is free.")] = 8080,
    storage: Storage = None,
) -> None:
    """Show a study in optuna-dashboard, read-only and on this machine alone (pip install optuna-dashboard).

    What is shown is a copy in memory, with notes, figures and reports; the database is only read. While somebody looks,
    a study that still runs is read again every 5 seconds.
    """
    from autotune.cli.commands.dashboard import dashboard as command

    command(study, storage, host=host, port=port)

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
from autotune.cli.options import pins_of, with_options_of
from autotune.cli.studies import Json, Storage, StudyName, studies
from autotune.core.errors import AutotuneError, UsageError

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


def _models(incomplete: str) -> list[str]:
    """For the shell's TAB, like the next two."""
    from autotune.catalog import list_models

    return [name for one in list_models() for name in (*one.aliases, one.name) if name.startswith(incomplete)]


def _gpus(incomplete: str) -> list[str]:
    from autotune.catalog import list_devices

    return [name for name in ("auto", *(one.name for one in list_devices())) if name.startswith(incomplete)]


def _spaces(incomplete: str) -> list[str]:
    from autotune.problem.search_space import shipped_spaces

    return [name for name in shipped_spaces() if name.startswith(incomplete)]


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    pass


@app.command()
def run(
    model: Annotated[
        str | None, typer.Option(help="Catalogue name, local directory, or hub id.", autocompletion=_models)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Target GPU: a name, auto (the one here), or cpu. [auto]", autocompletion=_gpus)
    ] = None,
    spec: Annotated[Path | None, typer.Option(help="Read a study spec (YAML); flags override it.")] = None,
    space: Annotated[
        str | None, typer.Option(help="Search space: a name (`autotune spaces`) or a file.", autocompletion=_spaces)
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="What trains: transformers, or trl (SFTTrainer). [transformers]")
    ] = None,
    examples: Annotated[int | None, typer.Option(help="Examples of the full run. [10000]")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over them. [1]")] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="FILE", help="Your examples (.jsonl, .parquet, .csv): how long they are.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="Counts their tokens. [the model's]")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="FILE", help="Their lengths instead, one a line.")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="Or their mean length, with --p99-tokens.")] = None,
    p99_tokens: Annotated[float | None, typer.Option(help="Their 99th percentile.")] = None,
    tokens_per_example: Annotated[int | None, typer.Option(help="Or one length for all. [1024]")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens a pass, instead of --examples.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Examples an optimizer step. [32]")] = None,
    global_batch_tokens: Annotated[
        int | None, typer.Option(help="Or so many tokens of them, as nearly as micro batches allow.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Wall time for all but --quality: 90s, 15m, 1h. [15m]")] = None,
    trials: Annotated[int | None, typer.Option(help="Total number of trials, refusals included.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many trials without a better one. [40]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Pin the sequence length.")] = None,
    rank: Annotated[int | None, typer.Option(help="Pin the LoRA rank.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Pin a knob; repeatable.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Use no more than this much device memory.")] = None,
    headroom: Annotated[float | None, typer.Option(help="Share of the memory that must stay free. [0.05]")] = None,
    price: Annotated[float | None, typer.Option(help="USD an hour, instead of the catalogue's.")] = None,
    prices: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prices of your own (`autotune prices` tells the form).")
    ] = None,
    min_rank: Annotated[int | None, typer.Option(help="Floor for the LoRA rank. [16]")] = None,
    max_truncated: Annotated[float | None, typer.Option(help="Largest share of tokens cut off. [0.01]")] = None,
    allow_quantized: Annotated[bool | None, typer.Option("--allow-quantized", help="Let quantised bases win.")] = None,
    allow_pure_bf16: Annotated[
        bool | None, typer.Option("--allow-pure-bf16", help="Full fine-tuning without fp32 master weights.")
    ] = None,
    allow_any_optimizer: Annotated[
        bool | None, typer.Option("--allow-any-optimizer", help="Let optimizers other than AdamW win.")
    ] = None,
    slack: Annotated[float | None, typer.Option(help="Extra cost a more capable config may have. [0.05]")] = None,
    shallow_only: Annotated[
        bool | None,
        typer.Option("--shallow-only", help="Judge from a few layers alone, for a model this device cannot hold."),
    ] = None,
    quality: Annotated[
        bool | None,
        typer.Option("--quality", help="Then train the finalists on --dataset, and tell their held-out losses."),
    ] = None,
    verify: Annotated[
        bool | None, typer.Option("--verify", help="Then run what was exported, and hold it against what was said.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="GPUs of this machine to probe on. [1]")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Probe on all such GPUs of a Ray cluster (pip install ray).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the search. [0]")] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study; an existing one is continued.")] = None,
    storage: Storage = None,
    out: Annotated[str | None, typer.Option(help="Study directory. [runs/<study>]")] = None,
    json_: Json = False,
    events: Annotated[
        bool, typer.Option("--events", help="Print a line of JSON on stdout for each event, the result last.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Search for the best configuration with real probes, confirm it, and export it with its cost."""
    flags = {name: value for name, value in locals().items() if name not in ("json_", "events", "quiet")}
    from autotune.cli.commands.run import run as command

    if json_ and events:
        raise UsageError("--events ends with what --json prints", remedy="leave one of them out")
    command(_spec(flags), as_json=json_, quiet=quiet, events=events)


_PLANNED = (  # of `run`, what a plan hangs on too
    *("model", "spec", "space", "examples", "epochs", "dataset", "tokenizer", "lengths", "mean_tokens", "p99_tokens"),
    *("tokens_per_example", "tokens", "global_batch", "global_batch_tokens", "seq_len", "rank", "set_", "memory_gib"),
    *("headroom", "price", "prices", "min_rank", "max_truncated", "allow_quantized", "allow_pure_bf16"),
    *("allow_any_optimizer", "slack"),
)


def _spec(flags: dict[str, Any]) -> Any:
    """The StudySpec that these flags of `run` mean."""
    from autotune.problem.study_spec import make_spec

    flags["pins"] = pins_of(flags.pop("set_") or [], seq_len=flags.pop("seq_len"), lora_rank=flags.pop("rank")) or None
    return make_spec(flags.pop("spec"), flags)


Evidence = Annotated[Path, typer.Option(metavar="DIR", help="What `autotune import` kept, which tightens the speeds.")]


@app.command()
@with_options_of(run, *_PLANNED)
def plan(
    gpu: Annotated[
        str | None, typer.Option(help="Target GPU: a name, or auto (the one here).", autocompletion=_gpus)
    ] = None,
    evidence: Evidence = Path("runs/evidence"),
    json_: Json = False,
    **flags: Any,
) -> None:
    """Say what would fit a GPU, how fast it would train and what that would cost; needs no GPU."""
    from autotune.cli.commands.plan import plan as command

    command(_spec(flags | {"gpu": gpu}), evidence=evidence, as_json=json_)


@app.command()
@with_options_of(run, *_PLANNED[1:])  # but for --model, of which there may be several
def compare(
    gpus: Annotated[list[str], typer.Option("--gpus", metavar="NAMES", help="With commas between them; repeatable.")],
    model: Annotated[list[str] | None, typer.Option(help="As of `run`; repeatable.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Each by itself: lora, qlora, full. [what --space has]")
    ] = None,
    max_usd: Annotated[float | None, typer.Option(help="What the run may cost.")] = None,
    max_hours: Annotated[float | None, typer.Option(help="How long it may take.")] = None,
    owned: Annotated[str | None, typer.Option(metavar="GPU", help="A card of your own, or one you may buy.")] = None,
    owned_usd: Annotated[float | None, typer.Option(help="What it costs.")] = None,
    owned_hours: Annotated[float, typer.Option(help="Hours of use over which that is spread.")] = 10_000,
    usd_per_kwh: Annotated[float, typer.Option(help="What its electricity costs.")] = 0.30,
    format_: Annotated[
        str | None, typer.Option("--format", help="table, markdown, csv, html or json. [by --out, or table]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there.")] = None,
    evidence: Evidence = Path("runs/evidence"),
    **flags: Any,
) -> None:
    """Hold GPUs against one another for the same run: what fits, how fast, and at what cost; needs no GPU."""
    from autotune.cli.commands.compare import compare as command

    command(
        [_spec(flags | {"model": one}) for one in model or (None,)],
        gpus=gpus,
        methods=methods or [],
        budget=(max_usd, max_hours),
        owned=(owned, owned_usd, owned_hours, usd_per_kwh),
        evidence=evidence,
        form=format_,
        out=out,
    )


_CHECKED = (  # of `run`, what a run that is described elsewhere leaves open
    *("examples", "dataset", "tokenizer", "lengths", "mean_tokens", "p99_tokens", "tokens_per_example", "tokens"),
    *("memory_gib", "headroom", "price", "prices"),
)


@app.command()
@with_options_of(run, *_CHECKED)
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML that TRL, Axolotl or LLaMA-Factory reads.")],
    gpu: Annotated[
        str | None, typer.Option(help="Target GPU: a name, or auto (the one here).", autocompletion=_gpus)
    ] = None,
    model: Annotated[str | None, typer.Option(help="What the model is shaped like. [the file's]")] = None,
    evidence: Evidence = Path("runs/evidence"),
    json_: Json = False,
    **flags: Any,
) -> None:
    """Say whether the run of another tool's YAML fits a GPU, how long it takes and what to change; needs no GPU."""
    from autotune.cli.commands.check import check_file

    check_file(file, flags | {"gpu": gpu, "model": model}, evidence=evidence, as_json=json_)


app.add_typer(studies)


@app.command()
def doctor(storage: Storage = None, json_: Json = False) -> None:
    """Check what this machine has of what a study needs."""
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
        Path | None, typer.Option("--prices", metavar="FILE", help="Prices of your own, which go first.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask what clouds charge today (pip install gpuhunt).")] = False,
    json_: Json = False,
) -> None:
    """List what an hour of a GPU costs, and how old that is."""
    from autotune.cli.commands.prices import prices as command

    command(gpu, own, live, json_)


@app.command()
def submit(
    study: StudyName = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="[the study's submission.json]")] = None,
    storage: Storage = None,
) -> None:
    """Write a study's winner and baseline for others, without anything private."""
    from autotune.cli.commands import share

    share.submit(study, storage, out)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `autotune submit` wrote.")],
    evidence: Annotated[Path | None, typer.Option(metavar="DIR", help="[runs/evidence]")] = None,
) -> None:
    """Check what somebody else measured, and keep it."""
    from autotune.cli.commands import share

    share.import_(file, evidence)


@app.command()
def spaces(json_: Json = False) -> None:
    """List the search spaces that come with the package."""
    from autotune.cli.commands import catalogs

    catalogs.spaces(json_)


dev = typer.Typer(help="For those who test a machine or a fleet.", no_args_is_help=True)
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
    """Strike small studies with faults on purpose, and say what came of each."""
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

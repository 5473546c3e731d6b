"""`autotune learn`: find and record the learning rate of a winner by short trainings."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Json, Storage, StudyName
from autotune.cli.stop import stop_on_signals
from autotune.cli.terminal import print_answer_json, print_note
from autotune.core.errors import Cancelled, Interrupted, UsageError
from autotune.study.storage.location import make_writable


def learn(
    study: StudyName = None,
    dataset: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Your examples. [the study's]")
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Split of --dataset. [the study's]")
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of the full run's steps that the search may take.")
    ] = 0.1,
    others: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of other configurations (ranks, lengths or number formats) to train, too, "
            "at the learning rate that was found.",
        ),
    ] = 0,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Find the learning rate of a study's winner with real weights and examples, and record it.

    Raises:
        UsageError: there is no such study, there are no weights or examples, or the full run has
            too few steps for a search.
        NothingFits: the study has no winner.
        EnvironmentProblem: this machine lacks the study's device.
        AutotuneError: a training failed, or all trainings diverged.
        Interrupted: stopped by a signal; nothing is recorded.
    """
    from autotune.api import load_study
    from autotune.export.run.learn import MAX_SHARE
    from autotune.export.run.learn import learn as try_rates
    from autotune.report import describe
    from autotune.study.session import amend_record, require_device

    if not 0 < share <= MAX_SHARE:
        raise UsageError("--share is a share of the full run, such as 0.1", remedy="see --help")
    result = load_study(study, storage)
    recipe = result.recipe
    spec = result.record.spec
    examples = dataset or (Path(spec.dataset) if spec.dataset else None)
    if examples is None:
        raise UsageError("the study has no dataset to learn from", remedy="give --dataset PATH")

    require_device(recipe.device, "learn there")
    make_writable(result.out)
    split = split if dataset else spec.split

    with stop_on_signals() as stop:
        try:
            learning = try_rates(
                recipe,
                examples,
                result.out,
                print_note,
                stop,
                split=split,
                share=share,
                others=others,
            )
        except Cancelled:
            raise Interrupted(
                "stopped; no rate was recorded", exit_code=128 + (stop.signal or 2)
            ) from None

    amend_record(result.url, result.record, learning=learning)
    reloaded = result.reload()
    reloaded.report()
    reloaded.export()

    if json_:
        print_answer_json(learning)
    else:
        print("\n".join(describe.learning(learning)))

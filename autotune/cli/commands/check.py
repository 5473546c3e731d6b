"""`autotune check`: say whether another tool's run fits a card, and propose changes to it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import Details, Evidence, Gpu, Json
from autotune.cli.study_options import CARD, LENGTHS, with_study_options
from autotune.cli.terminal import print_answer_json, print_note, print_text
from autotune.core.errors import NothingFits
from autotune.core.text import printable
from autotune.study.storage.location import EVIDENCE


@with_study_options("objective", *LENGTHS, *CARD)
def check_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The YAML of TRL, Axolotl, LLaMA-Factory or ms-swift, a Python program or a "
            "notebook with a trainer of TRL or transformers, or a script that starts one or has "
            "the command `trl` or `swift`.",
        ),
    ],
    gpu: Gpu = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs of one host that share the training (or --gpu 8xh100). [the file's, or 1]",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A known model of the same shape. [the file's model]")
    ] = None,
    evidence: Evidence = EVIDENCE,
    json_: Json = False,
    details: Details = False,
    **options: Any,
) -> None:
    """Print whether the run that a file describes fits the GPU that these options name.

    Raises:
        UsageError: the file cannot be read, or the model or the card is unknown.
        NothingFits: the run does not fit.
    """
    from autotune.cli.check_text import edits_text, lines
    from autotune.planning.observations import known_observations
    from autotune.planning.run_check import check
    from autotune.problem.run_cost import OOM, TIGHT

    options |= {"gpu": gpu, "gpus": gpus, "model": model}
    report = check(
        file, options, observations=known_observations(evidence, print_note), say=print_note
    )

    if json_:
        print_answer_json(report)
    else:
        for label, text in lines(report, details=details):
            print_text(printable(text), f"{label:>8}  " if label else "")

    device = report.device.name
    if report.checked.state == TIGHT:
        print(f"warning: {printable(file.name)} may run out of memory on {device}", file=sys.stderr)
    if report.checked.state == OOM:
        card = report.smallest_card
        larger = (
            f"a larger GPU, such as {card.name}" if card else "several GPUs that share the model"
        )
        remedy = f"{edits_text(report.fix.edits)}, or {larger}" if report.fix else larger
        raise NothingFits(f"{printable(file.name)} does not fit {device}", remedy=printable(remedy))

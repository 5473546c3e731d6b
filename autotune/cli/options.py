"""Options that several commands share.

The options that define a study are in `study_options`, whose import takes longer.
"""

from pathlib import Path
from typing import Annotated

import typer


def gpu_names(incomplete: str) -> list[str]:
    """Return the names of GPUs that the shell proposes when the user presses Tab."""
    from autotune.catalog import list_devices

    return [
        name
        for name in ("auto", *(device.name for device in list_devices()))
        if name.startswith(incomplete)
    ]


StudyName = Annotated[str | None, typer.Argument(help="Name of the study; the newest by default.")]
Storage = Annotated[
    str | None,
    typer.Option(
        help="Database URL; also read from AUTOTUNE_STORAGE. [default: sqlite:///runs/autotune.db]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Details = Annotated[bool, typer.Option("--details", help="Also print the basis of the answer.")]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write tables and figures to this HTML file."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="Target GPU: a name, auto (this machine's GPU), or a description of your own.",
        autocompletion=gpu_names,
    ),
]
Directory = Annotated[Path | None, typer.Option(help="Directory for the files. [the study's]")]
Evidence = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="Directory with the results of `autotune import`, which make estimated speeds more "
        "accurate.",
    ),
]

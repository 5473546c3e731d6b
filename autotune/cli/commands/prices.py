"""`autotune prices`: what an hour of a GPU costs, where, and how old that is."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from autotune.catalog import list_devices, resolve_device
from autotune.catalog.prices import Price, age, best_first, list_prices, load_prices
from autotune.cli.commands.catalogs import print_json, print_table
from autotune.cli.options import Json
from autotune.core.units import DASH, fmt_usd


def prices(
    gpu: Annotated[str | None, typer.Argument(help="Name of a GPU; all by default.")] = None,
    own: Annotated[
        Path | None, typer.Option("--prices", metavar="FILE", help="Your own prices, which come first.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask what clouds charge today (pip install gpuhunt).")] = False,
    json_: Json = False,
) -> None:
    """Print the prices of `gpu`, or of all GPUs: those of the user's file `own`, then live ones, then the seeds.

    Raises:
        UsageError: no such GPU, or a price file that cannot be read.
        EnvironmentProblem: `live` without gpuhunt or without a network.
    """
    devices = list_devices() if gpu is None else (resolve_device(gpu),)
    own_prices = load_prices(own) if own else ()
    today = date.today()
    rows: list[Price] = []
    for device in devices:
        rows += best_first(device.name, own_prices)
        if live:
            from autotune.catalog.live_prices import live_prices

            rows += live_prices(device, today=today)
        rows += best_first(device.name, list_prices())
    if json_:
        print_json([asdict(row) | {"age": age(row.as_of, today)} for row in rows])
    elif rows:
        _print(rows, today)
    else:
        print(f"no price of {devices[0].name} is known; give one with --price, or a file of your own with --prices")


def _print(rows: Sequence[Price], today: date) -> None:
    print_table(
        "USD for an hour of one GPU (seeds, not quotes; a file of your own with --prices, today's offers with --live)",
        {"GPU": "left", "provider": "left", "GPUs": "right", "on demand": "right", "spot": "right"}
        | {"age": "left", "source": "left"},
        [
            (
                row.device,
                row.provider,
                str(row.count),
                fmt_usd(row.usd_per_hour),
                DASH if row.spot_usd_per_hour is None else fmt_usd(row.spot_usd_per_hour),
                age(row.as_of, today),
                row.source if row.quotable else f"{row.source} (a reference, not a quote)",
            )
            for row in rows
        ],
    )

"""Prints lists of GPUs, models, prices, search spaces and suites, and JSON Schemas of commands."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Json
from autotune.cli.terminal import print_answer_json, print_json, print_table
from autotune.core.units import DASH, fmt_count, fmt_usd

if TYPE_CHECKING:
    from autotune.catalog import Price


def gpus(json_: Json = False) -> None:
    """Print every GPU of the catalogue with its default price per hour and its price to buy."""
    from autotune.catalog import age, find_price, find_purchase, list_devices

    rows = [
        (device, find_price(device.name), find_purchase(device.name)) for device in list_devices()
    ]

    today = date.today()
    if json_:
        from autotune.report.values.catalog import DatedPrice, Gpu

        answer = []
        for device, price, purchase in rows:
            dated_price = DatedPrice(price=price, age=age(price.as_of, today)) if price else None
            answer.append(Gpu(device=device, price=dated_price, purchase=purchase))
        print_answer_json(answer)
        return

    print_table(
        "GPUs (peak rates without sparsity; prices are no quotes, --price sets another)",
        {
            "name": "left",
            "memory GiB": "right",
            "bf16 TFLOP/s": "right",
            "GB/s": "right",
            "USD/h of one GPU": "left",
        }
        | {"USD to buy, at launch": "right"},
        [
            (
                device.name,
                DASH if device.memory_gib is None else f"{device.memory_gib:.1f}",
                fmt_count(device.bf16_tflops),
                fmt_count(device.bandwidth_gb_s),
                f"{fmt_usd(price.usd_per_hour)} ({price.provider}, {age(price.as_of, today)})"
                if price
                else DASH,
                f"{fmt_usd(purchase.usd)} ({purchase.as_of[:4]})" if purchase else DASH,
            )
            for device, price, purchase in rows
        ],
    )


def models(json_: Json = False) -> None:
    """Print every model of the catalogue."""
    from autotune.catalog import list_models

    specs = list_models()
    if json_:
        print_answer_json(specs)
        return
    print_table(
        "Models (a local directory or a Hub id works too)",
        {"alias": "left", "name": "left", "params (B)": "right"}
        | dict.fromkeys(("layers", "vocab", "context"), "right"),
        [
            (
                ", ".join(spec.aliases) or DASH,
                spec.name,
                DASH if spec.params is None else f"{spec.params / 1e9:.3g}",
                str(spec.num_layers),
                str(spec.vocab_size),
                DASH if spec.max_seq_len is None else str(spec.max_seq_len),
            )
            for spec in specs
        ],
    )


def prices(
    gpu: Annotated[str | None, typer.Argument(help="Name of a GPU; all by default.")] = None,
    own: Annotated[
        Path | None,
        typer.Option(
            "--prices", metavar="FILE", help="A file of your own prices, which are listed first."
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Ask the clouds for today's prices (pip install gpuhunt)."),
    ] = False,
    json_: Json = False,
) -> None:
    """Print the prices of `gpu`, or of all GPUs.

    Prices in the user's file `own` come first, then live prices, then the prices in the package.

    Raises:
        UsageError: there is no such GPU, or the price file cannot be read.
        EnvironmentProblem: `live` without gpuhunt or without a network.
    """
    from autotune.catalog import age, list_devices, resolve_device
    from autotune.catalog.prices import best_first, list_prices, load_prices

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
        from autotune.report.values.catalog import DatedPrice

        print_answer_json([DatedPrice(price=row, age=age(row.as_of, today)) for row in rows])
        return

    if not rows:
        print(
            f"no price of {devices[0].name} is known; give one with --price, or a file of your own "
            "with --prices"
        )
        return

    print_table(
        "USD of one GPU (no quotes; --prices reads a file of your own, --live asks for today's "
        "offers)",
        {"GPU": "left", "provider": "left", "GPUs": "right"}
        | dict.fromkeys(("an hour", "a day", "a week", "an hour at spot"), "right")
        | {"age": "left", "source": "left"},
        [
            (
                row.device,
                row.provider,
                str(row.count),
                *map(
                    fmt_usd,
                    (row.usd_per_hour, row.usd_per_day, row.usd_per_week, row.spot_usd_per_hour),
                ),
                age(row.as_of, today),
                row.source if row.quotable else f"{row.source} (a reference, not a quote)",
            )
            for row in rows
        ],
    )

    priced_names = {row.device for row in rows} | {"cpu"}
    if unpriced_names := [device.name for device in devices if device.name not in priced_names]:
        print(f"no price is known for {', '.join(unpriced_names)}")


def schema(
    command: Annotated[
        str | None,
        typer.Argument(help='A command, such as plan, "plan --gpu" or "status --nodes".'),
    ] = None,
) -> None:
    """Print the JSON Schema of a command's --json output; without a command, list the commands.

    Raises UsageError for any other command.
    """
    from autotune.report.json_forms import ANSWERS
    from autotune.report.json_forms import schema as schema_of

    if command is not None:
        print_json(schema_of(command))
        return
    print("\n".join(ANSWERS))


def spaces(json_: Json = False) -> None:
    """Print every search space that comes with the package."""
    from autotune.problem.search_space import SearchSpace, shipped_spaces

    spaces_by_name = {name: SearchSpace.load(name) for name in shipped_spaces()}
    if json_:
        print_json({name: space.describe() for name, space in spaces_by_name.items()})
        return
    print_table(
        "Search spaces (copy one, edit it, and pass it with --space FILE)",
        {"name": "left", "configurations": "right", "knobs": "left", "file": "left"},
        [
            (
                name,
                fmt_count(space.size()),
                ", ".join(knob.name for knob in space.knobs if len(knob.choices()) > 1),
                str(shipped_spaces()[name]),
            )
            for name, space in spaces_by_name.items()
        ],
    )


def suites(json_: Json = False) -> None:
    """Print every suite of published results that comes with the package."""
    from autotune.problem.study_spec import make_spec, shipped_suites

    suites_by_name = {name: (path, make_spec(path, {})) for name, path in shipped_suites().items()}
    if json_:
        from autotune.report.values.catalog import Suite

        print_answer_json(
            [
                Suite(
                    name=name,
                    gpu=spec.gpu,
                    configs=len(spec.configs),
                    source=spec.source,
                    file=str(path),
                )
                for name, (path, spec) in suites_by_name.items()
            ]
        )
        return
    print_table(
        "Published results to compare with estimates: `autotune plan --spec NAME`",
        {"name": "left", "GPU": "left", "configurations": "right", "published": "left"},
        [
            (name, spec.gpu, str(len(spec.configs)), spec.source or DASH)
            for name, (_, spec) in suites_by_name.items()
        ],
    )

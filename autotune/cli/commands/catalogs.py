"""Prints lists of GPUs, models, prices, search spaces and suites, and JSON Schemas of commands."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from autotune.cli.options import Details, Json
from autotune.cli.terminal import print_answer_json, print_json, print_table, print_text
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_usd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autotune.catalog import DeviceSpec, ModelSpec, Price

Entry = TypeVar("Entry", "DeviceSpec", "ModelSpec")


def gpus(
    name: Annotated[
        str | None, typer.Argument(help="Part of a GPU's name; all GPUs by default.")
    ] = None,
    json_: Json = False,
    details: Details = False,
) -> None:
    """Print the GPUs of the catalogue with their default price per hour and their price to buy.

    Raises UsageError if no GPU is called `name`.
    """
    from autotune.catalog import age, find_price, find_purchase, list_devices, resolve_device

    devices = _matching(list_devices(), name, resolve_device)
    rows = [(device, find_price(device.name), find_purchase(device.name)) for device in devices]

    today = date.today()
    if json_:
        from autotune.report.values.catalog import DatedPrice, Gpu

        answer = []
        for device, price, purchase in rows:
            dated_price = DatedPrice(price=price, age=age(price.as_of, today)) if price else None
            answer.append(Gpu(device=device, price=dated_price, purchase=purchase))
        print_answer_json(answer)
        return

    print_text(_memory_of(devices))
    print_text(
        "Peak rates are without sparsity. Prices are not quotes; --price sets another price."
    )
    columns = {"name": "left"} | dict.fromkeys(
        ("memory GiB", "bf16 TFLOP/s", "GB/s", "USD/h of one GPU"), "right"
    )
    cells = [
        (
            device.name,
            DASH if device.memory_gib is None else f"{device.memory_gib:.1f}",
            fmt_count(device.bf16_tflops),
            fmt_count(device.bandwidth_gb_s),
            fmt_usd(price.usd_per_hour if price else None),
        )
        for device, price, _ in rows
    ]
    if not details:
        print_table(None, columns, cells)
        print_text("--details shows who offers the price, its age, and the price to buy.")
        return

    print_table(
        None,
        columns | {"offer": "left", "USD to buy, at launch": "right"},
        [
            (
                *row,
                f"{price.provider}, {age(price.as_of, today)}" if price else DASH,
                f"{fmt_usd(purchase.usd)} ({purchase.as_of[:4]})" if purchase else DASH,
            )
            for row, (_, price, purchase) in zip(cells, rows, strict=True)
        ],
    )


def models(
    name: Annotated[
        str | None, typer.Argument(help="Part of a model's name; all models by default.")
    ] = None,
    json_: Json = False,
    details: Details = False,
) -> None:
    """Print the models of the catalogue; with `details`, also aliases, layers and vocabulary.

    Raises UsageError if no model is called `name`.
    """
    from autotune.catalog import list_models, resolve_model

    specs = _matching(list_models(), name, resolve_model)
    if json_:
        print_answer_json(specs)
        return

    sizes = [spec.params for spec in specs if spec.params]
    if len(specs) == 1:
        size = f"{fmt_count(sizes[0] / 1e9)} billion parameters" if sizes else "an unknown size"
        print_text(f"{specs[0].name} has {size}")
    else:
        least, most = (fmt_count(size / 1e9) for size in (min(sizes), max(sizes)))
        print_text(f"{len(specs)} models with {least} to {most} billion parameters are known")
    print_text("A local directory or the name of any other model on the Hub works too.")
    columns = {"name": "left", "billion": "right", "context": "right"}
    cells = [
        (
            spec.name,
            fmt_count(spec.params / 1e9 if spec.params else None),
            DASH if spec.max_seq_len is None else f"{spec.max_seq_len:,}",
        )
        for spec in specs
    ]
    if not details:
        print_table(None, columns, cells)
        print_text("--details shows short names, layers and vocabularies.")
        return

    print_table(
        None,
        columns | {"layers": "right", "vocab": "right", "alias": "left"},
        [
            (*row, str(spec.num_layers), str(spec.vocab_size), ", ".join(spec.aliases) or DASH)
            for row, spec in zip(cells, specs, strict=True)
        ],
    )


def _memory_of(devices: "Sequence[DeviceSpec]") -> str:
    """Return the answer of `gpus`: the memory of the device, or the range of several."""
    sizes = sorted(device.memory_gib for device in devices if device.memory_gib)
    if len(devices) == 1:
        size = f"{fmt_gib(sizes[0])} of memory" if sizes else "the memory of the machine"
        return f"{devices[0].name} has {size}"
    number = sum(device.kind != "cpu" for device in devices)
    return f"{number} GPUs with {sizes[0]:.0f} to {sizes[-1]:.0f} GiB of memory are known"


def _matching(
    catalogue: "Sequence[Entry]", name: str | None, resolve: "Callable[[str], Entry]"
) -> "Sequence[Entry]":
    """Return the entries whose name contains `name`, or all entries if it is None.

    If there are none, return the entry that `resolve` finds. Case and punctuation do not matter.
    """
    if name is None:
        return catalogue
    part = _letters_and_digits(name)
    found = [entry for entry in catalogue if part in _letters_and_digits(entry.name)]
    return found or [resolve(name)]


def _letters_and_digits(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


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
    details: Details = False,
) -> None:
    """Print the cheapest price of each GPU, or of `gpu`, the cheapest first.

    A GPU's price comes from the first of these sources that has one: the user's file `own`, the
    live prices, and the package. `details` and `json_` show the prices of all sources.

    Raises:
        UsageError: there is no such GPU, or the price file cannot be read.
        EnvironmentProblem: `live` is set, but gpuhunt is not installed or there is no network.
    """
    from autotune.catalog import age, describe_price, list_devices, resolve_device

    devices = list_devices() if gpu is None else (resolve_device(gpu),)
    today = date.today()
    rows, cheapest = _offers(devices, own, today, live=live)

    if json_:
        from autotune.report.values.catalog import DatedPrice

        print_answer_json([DatedPrice(price=row, age=age(row.as_of, today)) for row in rows])
        return

    if not rows:
        print_text(
            f"no price of {devices[0].name} is known; give one with --price, or a file of your own "
            "with --prices"
        )
        return

    best = cheapest[0]
    if len(devices) > 1:
        print_text(f"{best.device} is the cheapest GPU: {describe_price(best, today)}")
    else:
        print_text(f"{best.device} costs {describe_price(best, today)}")
    print_text(
        "USD of one GPU (not quotes; --prices reads a file of your own, --live asks for today's "
        "offers)"
    )

    if details:
        _print_offers(rows, today)
    elif len(cheapest) > 1:
        _print_cheapest(cheapest, today)
    else:
        print_text(f"{fmt_usd(best.usd_per_day)} a day, {fmt_usd(best.usd_per_week)} a week")

    priced_names = {row.device for row in rows} | {"cpu"}
    if unpriced_names := [device.name for device in devices if device.name not in priced_names]:
        print_text(f"no price is known for {', '.join(unpriced_names)}")
    if not details:
        print_text(f"--details shows all {len(rows)} offers with their sources.")


def _offers(
    devices: "Sequence[DeviceSpec]", own: Path | None, today: date, *, live: bool
) -> "tuple[list[Price], list[Price]]":
    """Return all offers of these GPUs, and the cheapest offer of each GPU, the cheapest first.

    The cheapest offer of a GPU comes from the first source that has any: the user's file `own`,
    then live prices, then the package.
    """
    from autotune.catalog.prices import best_first, list_prices, load_prices

    own_prices = load_prices(own) if own else ()
    rows: list[Price] = []
    cheapest: list[Price] = []

    for device in devices:
        sources = [best_first(device.name, own_prices), best_first(device.name, list_prices())]
        if live:
            from autotune.catalog.live_prices import live_prices

            sources.insert(1, list(live_prices(device, today=today)))

        rows += [price for prices in sources for price in prices]
        if first := next(filter(None, sources), None):
            cheapest.append(min(first, key=lambda price: (not price.quotable, price.usd_per_hour)))
    return rows, sorted(cheapest, key=lambda price: price.usd_per_hour)


def _print_cheapest(rows: "list[Price]", today: date) -> None:
    """Print the cheapest offer of each GPU in one line.

    '1/8' marks the price of one GPU in an instance of eight.
    """
    from autotune.catalog import age

    print_table(
        None,
        {"GPU": "left", "an hour": "right", "provider": "left", "age": "left"},
        [
            (
                row.device,
                fmt_usd(row.usd_per_hour),
                row.provider
                + f", 1/{row.count}" * (row.count > 1)
                + ", no quote" * (not row.quotable),
                age(row.as_of, today),
            )
            for row in rows
        ],
    )


def _print_offers(rows: "list[Price]", today: date) -> None:
    """Print every offer of each GPU, with its source."""
    from autotune.catalog import age

    print_table(
        None,
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


def suites(json_: Json = False, details: Details = False) -> None:
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

    num_configs = sum(len(spec.configs) for _, spec in suites_by_name.values())
    print_text(f"{len(suites_by_name)} suites have {num_configs} configurations with results")
    print_text("`autotune plan --spec NAME` compares published results with estimates.")
    columns = {"name": "left", "GPU": "left", "configurations": "right"}
    rows = [
        (name, spec.gpu, str(len(spec.configs)), spec.source or DASH)
        for name, (_, spec) in suites_by_name.items()
    ]
    if details:
        print_table(None, columns | {"published": "left"}, rows)
    else:
        print_table(None, columns, [row[: len(columns)] for row in rows])
        print_text("--details shows the sources of the results.")

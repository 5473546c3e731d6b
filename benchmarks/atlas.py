"""Write `docs/atlas.md` and `docs/atlas.html`: what each model of the catalogue needs, and how fast
ten cards train it.

    python benchmarks/atlas.py

It asks what `autotune compare` asks, for three methods. No GPU is needed. What dry probes count is
kept in the user's cache, as for `compare`. Measurements that were imported on this machine do not
count, so that the pages are the same everywhere.
"""

import argparse
import html
import json
import multiprocessing
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from bench import ROOT
from shipped_counts import shipped

from autotune.catalog import (
    DeviceSpec,
    ModelSpec,
    find_price,
    list_models,
    resolve_device,
    resolve_model,
)
from autotune.catalog.model_sizes import Sizes
from autotune.core.files import write_atomic
from autotune.core.units import DASH, fmt_count, fmt_usd
from autotune.planning.observations import published_observations
from autotune.planning.trainable import entry_of
from autotune.prediction.transfer import is_measured_kind
from autotune.problem.run_cost import FITS, TIGHT
from autotune.problem.study_spec import StudySpec
from autotune.report.values.trainable import METHODS, Entry

# What people own, the largest GeForce of three generations; and what they rent, cards of data
# centres from 24 GB on, as SXM where there is a choice. Somebody measured speeds of cards of each
# of their generations.
CARDS = (
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "l4",
    "a10",
    "l40s",
    "a100-40gb-sxm",
    "a100-80gb-sxm",
    "h100-sxm",
    "h200-sxm",
)
TOKENS, EXAMPLES, GLOBAL_BATCH = 1024, 10_000, 32
PAGE = Path(__file__).parent / "data" / "atlas.html"


def models_of_pages() -> list[ModelSpec]:
    """Return the models that take text alone, if a formula covers them or the package has their
    counts.
    """
    counted = set(shipped()["models"])
    return [
        model
        for model in list_models()
        if not model.sees_images and (Sizes.of(model) or model.name in counted)
    ]


def entries_of(model: str, cards: Sequence[str]) -> list[Entry]:
    """The entries of a model, by method and card."""
    entries = []
    for method in METHODS:
        spec = StudySpec(
            model=model, tokens_per_example=TOKENS, examples=EXAMPLES, global_batch=GLOBAL_BATCH
        )
        entries += [
            entry_of(spec, method, device, published_observations())
            for device in map(resolve_device, cards)
        ]
    return entries


def make_atlas(models: Sequence[str], cards: Sequence[str], processes: int) -> list[Entry]:
    """The entries of all models, in the order of these. Progress is printed."""
    started, found = time.monotonic(), {}
    # Counted models first: they take longest, and both processes then end at about the same time.
    order = sorted(models, key=lambda name: Sizes.of(resolve_model(name)) is not None)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(entries_of, name, cards): name for name in order}
        for done in as_completed(pending):
            name = pending[done]
            found[name] = done.result()
            print(
                f"{len(found):>3} of {len(models)}, {time.monotonic() - started:>4.0f} s: {name}",
                flush=True,
            )
    return [entry for name in models for entry in found[name]]


# --- pages


def assumptions(cards: Sequence[DeviceSpec]) -> list[str]:
    """What all numbers rest on, in sentences."""
    guesses = [card.name for card in cards if not is_measured_kind(card)]
    guess = (
        f" Cards like {' and '.join(guesses)} were never measured: their speeds are guesses."
        if guesses
        else ""
    )
    return [
        f"The run: one card, examples of {TOKENS:,} tokens, {GLOBAL_BATCH} examples in an optimizer"
        " step. 5 % of the card's memory stays free.",
        "All numbers are estimated, without a run. The column `by` says whether memory is by a"
        " formula or counted by a dry probe of the model. Speeds are estimated for an H200 and"
        " projected to the other cards; costs follow from speeds."
        f" [Evidence](evidence.md) has the errors.{guess}",
        "With a formula, a cell has the best configuration that `autotune plan` finds in the spaces"
        " `lora`, `qlora` and `full`: LoRA of rank 16 to 64 on all linear layers, and any choice of"
        " micro batch, recomputation, compilation, loss and optimizer. Without a formula, a cell"
        " has the configuration of guides. If that does not fit, it has the configuration with the"
        " least memory. Faster configurations may exist.",
        f"`{DASH}`: does not fit. `tight`: too close to tell. `fits, ?`: fits, at an unknown speed."
        " `refused`: cannot be trained in this way. atlas.md has the reason below the table;"
        " atlas.html shows it when you point at the cell. `*`: fits only with pure bf16 or another"
        " optimizer than AdamW, which learn differently. Without a price, a cell has no cost.",
        "Prices are on demand and come with the package, each with its date.",
    ]


def price_line(card: DeviceSpec) -> str:
    """'| l4 | 22.5 | 121 | $0.60 | oci, 2026-01 |': a row of the table of cards."""
    price = find_price(card.name)
    usd = DASH if price is None else fmt_usd(price.usd_per_hour)
    source = (
        "no price is known" if price is None else f"{price.provider}, {price.as_of or 'undated'}"
    )
    source += "" if price is None or price.quotable else ", a reference and not a quote"
    memory = DASH if card.memory_gib is None else f"{card.memory_gib:.1f}"
    return f"| {card.name} | {memory} | {fmt_count(card.bf16_tflops)} | {usd} | {source} |"


def cell(entry: Entry) -> str:
    """'12,345 · $0.045', '1,725', 'fits, ?', 'tight', 'refused', or a dash."""
    if entry.problem:
        return "refused"
    if entry.state == TIGHT:
        return "tight"
    if entry.state != FITS:
        return DASH
    if entry.tokens_per_s is None:
        return "fits, ?"
    cost = "" if entry.usd_per_1000 is None else f" · {fmt_usd(entry.usd_per_1000)}"
    return fmt_count(entry.tokens_per_s) + cost + "*" * entry.learns_differently


def markdown(
    entries: Sequence[Entry], models: Sequence[ModelSpec], cards: Sequence[DeviceSpec]
) -> str:
    """The page for reading: a table for each method, models by their size."""
    lines = [
        "# Atlas",
        "",
        "Find your model and your card: a cell has the tokens/s, and the USD for 1,000 examples.",
        f"The tables have {len(models)} models of the catalogue on {len(cards)} cards: the models"
        " that take only text",
        "and whose memory a formula or a stored count gives.",
        "",
        "[atlas.html](atlas.html) sorts and filters the same numbers, and shows the memory, range"
        " and configuration",
        "of each cell. It needs no network. `autotune compare` answers for other lengths, batches"
        " and cards, and",
        "`autotune run` measures.",
        "",
        *(f"- {sentence}" for sentence in assumptions(cards)),
        "",
        "| card | GiB | bf16 TFLOP/s | USD/h | price |",
        "|---|--:|--:|--:|---|",
        *map(price_line, cards),
    ]
    of = {(entry.model, entry.method, entry.card): entry for entry in entries}
    for method, title in METHODS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "`GiB` is the need of the leanest configuration, including configurations marked `*`.",
            "",
        ]
        lines.append(f"| model | billion | GiB | by | {' | '.join(card.name for card in cards)} |")
        lines.append("|---|--:|--:|---|" + "--:|" * len(cards))
        for model in models:
            row = [of[model.name, method, card.name] for card in cards]
            head = f"{model.short} | {size(model)} | {least(row)} | {row[0].memory_by or DASH}"
            lines.append(f"| {head} | {' | '.join(map(cell, row))} |")
        refused = {model.short: of[model.name, method, cards[0].name].problem for model in models}
        if reasons := [f"- {name}: {problem}." for name, problem in refused.items() if problem]:
            lines += ["", *reasons]
    return "\n".join(lines) + "\n"


def size(model: ModelSpec) -> str:
    """Parameters in billions."""
    return DASH if model.params is None else f"{model.params / 1e9:.3g}"


def least(row: Iterable[Entry]) -> str:
    """The least memory that was found, in GiB."""
    needs = [entry.least_gib for entry in row if entry.least_gib is not None]
    return f"{min(needs):,.1f}" if needs else DASH


def html_page(
    entries: Sequence[Entry], models: Sequence[ModelSpec], cards: Sequence[DeviceSpec]
) -> str:
    """One page that sorts and filters without a network."""
    configs: dict[str | None, int] = {}
    of: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        # cells have its number, which halves the page
        configs.setdefault(entry.config, len(configs))
        of.setdefault((entry.model, entry.method), []).append(entry)
    data = {
        "cards": [card.name for card in cards],
        "methods": METHODS,
        "configs": list(configs),
        "models": [[model.short, model.params] for model in models],
        "rows": {
            method: [
                [
                    rounded(row[0].least_gib),
                    row[0].memory_by,
                    [cell_data(one, configs) for one in row],
                    row[0].problem,
                ]
                for row in (of[model.name, method] for model in models)
            ]
            for method in METHODS
        },
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    notes = "".join(f"<li>{html_of(sentence)}</li>\n" for sentence in assumptions(cards))
    page = PAGE.read_text(encoding="utf-8")
    return (
        page.replace("__NOTES__", notes)
        .replace("__PRICES__", html_prices(cards))
        .replace("__DATA__", text)
    )


def cell_data(entry: Entry, configs: dict[str | None, int]) -> list[object]:
    """Return state, GiB and configuration of an entry, and tokens/s, their range and USD as far as
    they are known. The list is empty if the model does not fit.
    """
    if entry.state not in (FITS, TIGHT):
        return []
    found: list[object] = [
        entry.state + "*" * entry.learns_differently,
        rounded(entry.need_gib),
        configs[entry.config],
    ]
    if entry.tokens_per_s is None or entry.interval is None:
        return found
    return [*found, *map(rounded, (entry.tokens_per_s, *entry.interval, entry.usd_per_1000))]


def rounded(value: float | None) -> float | None:
    """Four digits, which is more than is known."""
    short = None if value is None else float(f"{value:.4g}")
    return int(short) if short is not None and short.is_integer() else short


def html_of(text: str) -> str:
    """The marks of Markdown that the sentences have, as HTML."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\[([^\]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', text)


def html_prices(cards: Sequence[DeviceSpec]) -> str:
    """The rows of the table of cards."""
    rows = ([text.strip() for text in price_line(card).strip("| ").split("|")] for card in cards)
    return "".join(
        f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>\n" for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        help="these models instead of all with a formula or stored counts",
        metavar="NAME",
    )
    parser.add_argument("--cards", nargs="+", default=CARDS, metavar="GPU")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    models = list(map(resolve_model, args.models)) if args.models else models_of_pages()
    models.sort(key=lambda model: (model.params or 0, model.name))
    cards = list(map(resolve_device, args.cards))
    entries = make_atlas(
        [model.name for model in models], [card.name for card in cards], args.processes
    )
    write_atomic(args.out / "atlas.md", markdown(entries, models, cards))
    write_atomic(args.out / "atlas.html", html_page(entries, models, cards))
    if unknown := sorted(
        {model.name for model in models} - {entry.model for entry in entries if entry.need_gib}
    ):
        raise SystemExit("no peak is known of " + ", ".join(unknown))


if __name__ == "__main__":
    main()

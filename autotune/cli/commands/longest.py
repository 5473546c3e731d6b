"""`autotune longest`: find the longest training sequence (row) that fits a GPU, for each method."""

from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Details, Gpu, Json
from autotune.cli.stop import stop_on_signals
from autotune.cli.terminal import (
    notes_last,
    print_answer_json,
    print_lines,
    print_table,
    print_text,
)
from autotune.core.errors import Cancelled, Interrupted, NothingFits, UsageError
from autotune.core.memory_budget import HEADROOM
from autotune.core.units import DASH, fmt_gib, fmt_seconds

if TYPE_CHECKING:
    from autotune.planning.longest import Longest
    from autotune.report.values.longest import LongestRow

COLUMNS = {"method": "left", "longest sequence": "right", "known": "left", "step": "right"} | {
    "tokens/s": "right",
    "GPU": "right",
    "host": "right",
    "limited by": "left",
}
FEW_COLUMNS = ("method", "longest sequence", "known", "tokens/s", "limited by")


def longest(
    model: Annotated[
        str, typer.Option(help="Model: a name in the catalogue, a Hub name or a directory.")
    ],
    gpu: Gpu = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="full, lora or qlora, with commas or repeated. [all three]"),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="Pin a setting; repeatable."),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="GiB of the GPU that may be used.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the GPU's memory that must stay free.")
    ] = HEADROOM,
    host_memory_gib: Annotated[
        float | None,
        typer.Option(
            "--host-memory-gib", help="GiB of host memory. [this host's, if the GPU is here]"
        ),
    ] = None,
    most_tokens: Annotated[
        int | None, typer.Option(min=1024, help="Consider no sequences longer than this.")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Only predict, even if the GPU is here.")
    ] = False,
    json_: Json = False,
    details: Details = False,
) -> None:
    """Print the longest sequence, in tokens, that fits a card, for each method.

    The length is predicted without a GPU. If the GPU is in this machine, real training steps verify
    the length.

    Raises:
        UsageError: the model, the card, a method or a knob is unknown, a knob's value is invalid,
            or no dry probe (a run on the meta device) can compute the model's memory.
        EnvironmentProblem: the card cannot be probed.
        NothingFits: no row fits with any of the methods.
        Interrupted: stopped by a signal.
    """
    from autotune.api import longest as find
    from autotune.cli.study_options import pins_of
    from autotune.planning.longest import STEP, longest_answer
    from autotune.report.answers import row_answer

    with stop_on_signals() as stop, notes_last() as say:
        try:
            query, rows = find(
                model,
                gpu or "auto",
                methods=method or (),
                rank=rank,
                knobs=pins_of(set_ or []),
                memory_gib=memory_gib,
                headroom=headroom,
                host_memory_gib=host_memory_gib,
                most_tokens=most_tokens,
                probe=not predict,
                progress=say,
                should_stop=stop,
            )
        except Cancelled:
            raise Interrupted("stopped", exit_code=128 + (stop.signal or 2)) from None

    answer = longest_answer(query, rows)
    if json_:
        print_answer_json(answer)
    else:
        first = row_answer(answer)
        print_text(first.answer)
        print_lines(first.lines())
        _print_rows(query, rows, details=details)

    if not any(row.tokens or row.limited_by for row in rows):
        raise UsageError(
            f"no sequence of {query.model.short} can be predicted: {rows[0].problem}",
            remedy="try another model",
        )
    if not any(row.tokens for row in rows):
        leaner = "" if any(row.method == "qlora" for row in rows) else "--method qlora, "
        raise NothingFits(
            f"{query.model.short} does not fit {query.device.name}, not even with {STEP:,} tokens",
            remedy=f"try {leaner}a smaller model, or a larger GPU (`autotune compare`)",
        )


def _print_rows(query: "Longest", rows: list["LongestRow"], *, details: bool) -> None:
    """Print a row for each method; with `details`, every column and the basis of the numbers."""
    if not details:
        columns = {name: COLUMNS[name] for name in FEW_COLUMNS}
        if len(rows) > 1:
            print()
            print_table(
                None, columns, [tuple(_cells(row)[name] for name in columns) for row in rows]
            )
        print_text("--details shows times, memory, and the basis of the numbers.")
        return

    limits = f"{fmt_gib(query.limit_gib)} for tensors"
    if query.host_limit_gib is not None:
        limits += f", {fmt_gib(query.host_limit_gib)} of the host for the layers' inputs"
    print()
    print_table(
        f"{query.model.short} on {query.device.name}: {limits}",
        COLUMNS,
        [tuple(_cells(row).values()) for row in rows],
    )
    for row in rows:
        if row.problem:
            print_text(f"{row.method}: {row.problem}.")

    positions = query.model.max_seq_len
    max_tokens = max((row.tokens or 0 for row in rows), default=0)
    if positions and max_tokens > positions:
        print_text(
            f"The model was trained for {positions:,} positions. How well it learns from longer "
            "sequences is unknown."
        )

    estimated_rows = [
        row for row in rows if row.evidence == "estimated" and row.tokens and not row.problem
    ]
    if estimated_rows:
        print_text(
            "For estimated sequences, memory was computed without a GPU. In tiles of tokens, it "
            "includes 3 % for the allocator, and the length leaves room for 3 % more. The times of "
            "these sequences are also estimates."
        )
        if any(
            row.config.get("attention") == "sdpa_cudnn" and row.limited_by == "gpu memory"
            for row in estimated_rows
        ):
            print_text(
                "cuDNN's attention needs more memory than computed: on an H100 capped at 24 GB, a "
                "sequence 9 % shorter than predicted did not fit."
            )

    other_cards = {
        row.timed_on for row in rows if row.timed_on and row.timed_on != query.device.name
    }
    for card in sorted(other_cards):
        print_text(f"Times were measured on {card}, whose memory was capped to this GPU's memory.")


def _cells(row: "LongestRow") -> dict[str, str]:
    """Return the cells of a row of the table, by column."""
    if row.tokens is None:
        cells = dict.fromkeys(COLUMNS, DASH) | {"method": row.method}
        if row.limited_by:
            cells |= {"longest sequence": "none fits", "limited by": row.limited_by}
        return cells
    is_range = row.step_s_low != row.step_s_high

    step = (
        f"{fmt_seconds(row.step_s_low)} to {fmt_seconds(row.step_s_high)}"
        if is_range
        else fmt_seconds(row.step_s)
    )
    about = "about " if is_range else ""
    return {
        "method": row.method,
        "longest sequence": f"{row.tokens:,}",
        "known": row.evidence,
        "step": step,
        "tokens/s": DASH if row.tokens_per_s is None else f"{about}{row.tokens_per_s:,.0f}",
        "GPU": fmt_gib(row.gpu_gib),
        "host": fmt_gib(row.host_gib),
        "limited by": row.limited_by or DASH,
    }

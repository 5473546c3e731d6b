"""Measure levers with and without them, side by side, and check what they must leave as it is.

At two ranks and two lengths of rows; selective recomputation also on long rows and under a cap, CUDA graphs on a small
micro batch, where the host sets the pace, and packed rows beside full ones (`packed_attention`). Gradients and the loss
of 50 steps are those of `lever_checks`. With `--first` it is a short test of selective recomputation and CUDA graphs.
Speeds are those of whole models. A row names its card, so that rows of several are one result (`--rows`).
"""

import argparse
import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lever_checks
import packed_attention
import torch
from common import Rows, save, speed, table
from lever_checks import CONFIG, arriving, gradient_difference, levers_of, loss_differences
from reference_levers import COLUMNS, TOGETHER

from autotune.catalog import resolve_device, resolve_model
from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber

# A lever, and what is the same without it.
COMPILED = {"checkpointing": "none", "compile": "per_layer", "loss": "chunked", "padding": "max_length"}
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together": ({}, TOGETHER),
    "joined adapters": (COMPILED, COMPILED | {"lora_kernels": "joined"}),
    "fp8 base": (COMPILED, COMPILED | {"quantization": "fp8"}),
    "selective_50": (COMPILED | {"checkpointing": "every_2"}, COMPILED | {"checkpointing": "selective_50"}),
}
RANKS, LENGTHS = (16, 64), (1024, 4096)
CAP_GIB, LONG_ROW = 22.0, 16384
RECOMPUTED = ("none", "selective_80", "every_4", "selective_50", "every_2", "selective_30", "full")
GRAPHS: dict[str, dict[str, Any]] = {
    "1 x 512": {},
    "1 x 512, CUDA graphs": {"cuda_graphs": "micro_batch"},
    "1 x 512, compiled": {"compile": "per_layer"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--memory-gib", type=float, default=75.0)
    parser.add_argument("--seconds", type=float, default=540.0, help="start no measurement after this time")
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call to continue, or of other cards")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(12)), help="of the losses")
    parser.add_argument("--first", action="store_true", help="selective recomputation and CUDA graphs alone, as a test")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("levers", args.out, args.rows)
    measure(rows, args, time.monotonic() + args.seconds)
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows.all]
    save("levers", from_data(Fingerprint, rows.all[0]["fingerprint"]), summarize(shown), shown, args.out)
    print(summarize(shown))


def measure(rows: Rows, args: argparse.Namespace, until: float) -> None:
    """Measure levers with and without them, and check what they must not change. Nothing begins after `until`."""
    if time.monotonic() > until:
        return
    device, folder = resolve_device(args.gpu), Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    here = torch.device("cpu" if device.kind == "cpu" else "cuda")
    with WorkerProber(here.type, folder) as prober:
        fingerprint = to_data(prober.fingerprint)
        card = {"card": prober.fingerprint.device}
        for part, lever, model, config, memory_gib in cases(args):
            short = resolve_model(model).short
            if time.monotonic() < until and not rows.has(**card, part=part, model=short, config=config.label()):
                found = speed(prober, resolve_model(model), device, config, memory_gib)
                rows.add({"part": part, "lever": lever, **found, **card, "fingerprint": fingerprint})
                table(rows.all[-1:], ["part", *COLUMNS])
        for case in [] if args.first else packed_attention.cases(packed_attention.CONFIG.seq_len):
            if time.monotonic() < until and not rows.has(**card, part="packed", case=case):
                found = packed_attention.speed_of(case, prober, resolve_model(args.model), device, args.memory_gib)
                rows.add({"part": "packed", **found, **card, "fingerprint": fingerprint})
                table(rows.all[-1:], ["part", *packed_attention.COLUMNS])
    if time.monotonic() < until and here.type == "cuda" and not rows.has(**card, part="gradients"):
        found = gradient_difference(CONFIG, here)
        rows.add({"part": "gradients", "lever": "CUDA graphs", **found, **card, "fingerprint": fingerprint})
        print(found, flush=True)
    check(rows, args, until, here, card | {"fingerprint": fingerprint})


def check(rows: Rows, args: argparse.Namespace, until: float, here: torch.device, card: dict[str, Any]) -> None:
    """Compare losses, and what arrives of small updates."""
    of_card = {"card": card["card"]}
    levers = ["selective_50"] if args.first else levers_of(here)
    missing = [lever for lever in levers if not rows.has(**of_card, part="losses", check=lever)]
    if time.monotonic() < until and missing:
        for row in loss_differences(here, levers=missing, seeds=args.seeds):
            if not rows.has(**of_card, part="losses", check=row["check"]):
                rows.add({"part": "losses", **row, **card})
                print(row, flush=True)
            if time.monotonic() > until:
                break
    if time.monotonic() < until and not rows.has(**of_card, part="updates"):
        for row in arriving(here):
            rows.add({"part": "updates", **row, **card})
        table([row for row in rows.all if row["part"] == "updates"], ["check", "update", "share"])


def cases(args: argparse.Namespace) -> list[tuple[str, str, str, TrainConfig, float]]:
    """The part, the lever, the model, the configuration and the memory limit of each measurement."""
    model, recomputed = args.model, ("every_2", "selective_30") if args.first else RECOMPUTED
    sizes = (2,) if args.first else (1, 2, 4)
    one = TrainConfig(micro_batch_size=1, seq_len=512, checkpointing="none", loss="chunked", padding="max_length")
    graphs = [("graphs", lever, "llama-3.2-1b", replace(one, **changes), 70.0) for lever, changes in GRAPHS.items()]
    capped = []
    for value in recomputed:
        short = TrainConfig(**COMPILED | {"checkpointing": value, "seq_len": 1024})
        capped += [("cap", value, model, replace(short, micro_batch_size=size), CAP_GIB) for size in sizes]
    if args.first:
        return graphs + capped
    found = []
    for rank, length in itertools.product(RANKS, LENGTHS):
        for lever in SIDES:
            for side, config in zip(("without", "with"), sides_of(lever, rank, length), strict=True):
                found.append(("sides", f"{lever}, {side}", model, config, args.memory_gib))
    for value in recomputed:
        long = TrainConfig(**COMPILED | {"checkpointing": value, "seq_len": LONG_ROW, "micro_batch_size": 1})
        found.append(("long rows", value, model, long, args.memory_gib))
    return found + graphs + capped


def sides_of(lever: str, rank: int, length: int) -> list[TrainConfig]:
    """The configurations without and with a lever, for 8,192 tokens in a micro batch."""
    size = {"lora_rank": rank, "seq_len": length, "micro_batch_size": 8192 // length}
    return [TrainConfig(**size | changes) for changes in SIDES[lever]]


def worth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The speed with each lever over that without it, by lever, rank and length."""
    speeds = {row["config"]: row["tokens_per_s"] for row in rows if row["part"] == "sides" and row.get("tokens_per_s")}
    found = {}
    for lever, rank, length in itertools.product(SIDES, RANKS, LENGTHS):
        without, with_it = (speeds.get(config.label()) for config in sides_of(lever, rank, length))
        if without and with_it:
            found[f"{lever}, r{rank}, {length}"] = with_it / without
    return found


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found on each card, and of all the first that is known."""
    names = dict.fromkeys(row["card"] for row in rows)
    cards = {name: summarize_card([row for row in rows if row["card"] == name]) for name in names}
    first = {
        key: next((one[key] for one in cards.values() if one[key] is not None), None) for key in summarize_card([])
    }
    return first | {"cards": cards}


def summarize_card(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of speeds, None where one of the two was not measured or did not fit, and the largest differences."""

    def best(part: str, *levers: str) -> float | None:
        speeds = [row.get("tokens_per_s") for row in rows if row["part"] == part and row["lever"] in levers]
        return max((value for value in speeds if value), default=None)

    def ratio(part: str, levers: tuple[str, ...], other: str) -> float | None:
        with_it, without = best(part, *levers), best(part, other)
        return with_it / without if with_it and without else None

    def winner(*, in_fp8: bool) -> float | None:
        found = [row for row in rows if row["part"] == "sides" and row.get("tokens_per_s")]
        found = [row for row in found if "lora r16 " in row["config"] and (" fp8 " in row["config"]) == in_fp8]
        return max((row["tokens_per_s"] for row in found), default=None)

    selective = ("selective_80", "selective_50", "selective_30")
    gradients = next((row for row in rows if row["part"] == "gradients"), {})
    packed = packed_attention.summarize([row for row in rows if row["part"] == "packed"])
    return {
        "winner_tokens_per_s": winner(in_fp8=False),
        "fp8_winner_tokens_per_s": winner(in_fp8=True),
        "packed_over_full": packed.get("packed_over_full"),
        "packed_over_full_short": packed.get("packed_over_full_short"),
        "worth": worth(rows) or None,
        "selective_over_every_2_cap": ratio("cap", selective, "every_2"),
        "selective_over_every_2_long": ratio("long rows", selective, "every_2"),
        "graphs_over_none": ratio("graphs", ("1 x 512, CUDA graphs",), "1 x 512"),
        "graphs_over_compiled": ratio("graphs", ("1 x 512, CUDA graphs",), "1 x 512, compiled"),
        "graph_gradient_difference": gradients.get("gradient_difference"),
        "graph_loss_difference": gradients.get("loss_difference"),
        **lever_checks.summarize([row for row in rows if row["part"] in ("losses", "updates")]),
    }


if __name__ == "__main__":
    main()

"""Compare what knobs that change learning do to the held-out loss: rank 16 and 64, nf4 and 16-bit bases, packed rows.

A small model is trained on the source of Python's standard library, then fine-tuned with LoRA on the texts of `learn`,
in full runs of two epochs at a few rates from several seeds. A knob is judged at its best rate. `over_reference` is
its mean loss over that of rank 16 on an unquantised base without packing, minus 1; `spread` the standard deviation of
the same over seeds. All run on a CPU, in fp32.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Rows, save, table
from learn import HELD_OUT, ROW, TEXTS, loss_of, pretrain, sweep, tuned

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data, to_data

KNOBS: dict[str, dict[str, Any]] = {
    "reference": {},
    "rank 64": {"lora_rank": 64},
    "nf4": {"quantization": "nf4", "double_quant": True},
    "packed": {"packing": True},
}
RATES = (3.2e-3, 1.28e-2, 5.12e-2)
SEEDS = (0, 1, 2)
COLUMNS = ["data", "knob", "steps", "rate", "loss", "over_reference", "spread"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrain-s", type=float, default=240.0)
    parser.add_argument("--budget", default="30s", help="of each study")
    parser.add_argument("--data", nargs="*", default=["headers", "docstrings"], choices=list(TEXTS))
    parser.add_argument("--rows", type=Path, help="learning_knobs.jsonl of an earlier call")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.gpu = "cpu"
    rows, folder = Rows("learning_knobs", args.out, args.rows), Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    pretrained_loss = pretrain(folder / "model", args)
    print(f"pretrained to a loss of {pretrained_loss:.3f}", flush=True)
    for data in args.data:
        for knob, pins in KNOBS.items():
            if not rows.has(data=data, knob=knob):
                rows.add({"data": data, "knob": knob, **measured(data, knob, pins, folder, args)})
                table(rows.all[-1:], COLUMNS[:5])
    shown = with_reference(rows.all)
    save("learning_knobs", from_data(Fingerprint, shown[0]["fingerprint"]), summarize(shown), shown, args.out)
    table(shown, COLUMNS)
    print(summarize(shown))


def measured(data: str, knob: str, pins: dict[str, Any], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The losses of full runs at each rate, by seed, and the best rate."""
    began = time.monotonic()
    one = tuned(data, folder, args, study=f"{data}-{knob.replace(' ', '-')}", **pins)
    steps = one.recipe.winner.cost.num_steps
    runs = sweep(one.recipe, one, [(rate, steps, seed) for rate in RATES for seed in SEEDS])
    losses = {rate: [loss_of(run) for run in runs if run.learning_rate == rate] for rate in RATES}
    best = min(RATES, key=lambda rate: statistics.fmean(losses[rate]))
    return {
        "config": one.recipe.config.label(),
        "steps": steps,
        "rate": best,
        "loss": statistics.fmean(losses[best]),
        "losses": {f"{rate:.3g}": by_seed for rate, by_seed in losses.items()},
        "held_out": HELD_OUT,
        "row": ROW,
        "seconds": time.monotonic() - began,
        "fingerprint": to_data(one.recipe.fingerprint),
    }


def with_reference(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its losses over those of the reference from the same seeds, minus 1: the mean and its deviation."""
    found = []
    for row in rows:
        reference = next(one for one in rows if one["data"] == row["data"] and one["knob"] == "reference")
        own, others = (one["losses"][f"{one['rate']:.3g}"] for one in (row, reference))
        over = [a / b - 1 for a, b in zip(own, others, strict=True)]
        found.append(row | {"over_reference": statistics.fmean(over), "spread": statistics.stdev(over)})
    return found


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over the data sets, and the largest spread, for each knob."""
    found: dict[str, Any] = {"data_sets": len({row["data"] for row in rows})}
    for knob in KNOBS:
        some = [row for row in rows if row["knob"] == knob]
        if some and knob != "reference":
            name = knob.replace(" ", "_")
            found[f"{name}_over_reference"] = statistics.fmean(row["over_reference"] for row in some)
            found[f"{name}_spread_max"] = max(row["spread"] for row in some)
    return found


if __name__ == "__main__":
    main()

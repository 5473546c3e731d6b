"""Compare paddings on a long-tailed set: what a person would run, and the best padded, bucketed and packed run.

Each study pins one way to make rows, on the 3,000 examples of `long_tails.py`. Its exported script then trains on the
whole set, with random weights and tokens of those lengths, and the time is compared with the projection. Which examples
share a micro batch is chance, which more passes even out: `tokens_off` is how many more tokens, padding included, the
passes had than is expected. A study by TRL's trainer (`trl`) has the same baseline, which `trl sft` then runs: with it
`trl_error` compares that study, and `trl_slower` the baseline of train.py. An error is the prediction divided by the
measurement, minus 1. The scripts save no checkpoint, whose time is taken off the projection.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Rows, run_python, run_study, save, table
from long_tails import NUM_EXAMPLES, long_tailed_lengths

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload

UNPACKED = {"packing": "false"}
BASELINE = UNPACKED | {"padding": "masked", "compile": "none", "checkpointing": "full", "loss": "full"}
BASELINE |= {"micro_batch_size": "8", "lora_rank": "16", "seq_len": "4096", "optimizer": "adamw_torch_fused"}
WAYS: dict[str, dict[str, str]] = {
    "baseline": BASELINE,
    "trl": BASELINE | {"padding": "longest", "loss": "chunked"},  # with TRL's mask, and its loss
    "padded": UNPACKED | {"padding": "longest"},
    "bucketed": UNPACKED | {"padding": "bucket"},
    "packed": {"packing": "true"},
}
COLUMNS = [
    "way",
    "config",
    "tokens_per_s",
    "projected_s",
    "took_s",
    "error",
    "tokens_off",
    "error_with_start",
    "reason",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--space", default="lora")
    parser.add_argument("--budget", default="90s", help="of each study")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--micro-steps", type=int, default=96, help="of the run of trl sft")
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call on the same machine to continue")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = Rows("real_data", args.out, args.rows)
    for way in args.ways:
        if not rows.has(way=way):
            rows.add(run_way(way, args))
            table(rows.all[-1:], COLUMNS)
    first = next((row["fingerprint"] for row in rows.all if row.get("fingerprint")), None)
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows.all]
    save("real_data", first and from_data(Fingerprint, first), summarize(shown), shown, args.out)
    print(json.dumps(summarize(shown), indent=1))


def run_way(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Study one way to make rows, then pass once over all examples by the exported script."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    lengths = folder / "lengths.txt"
    lengths.write_text("".join(f"{length}\n" for length in long_tailed_lengths()))
    options = ["--gpu", args.gpu, "--model", args.model, "--space", args.space, "--lengths", str(lengths)]
    options += ["--epochs", str(args.epochs), "--out", "out", "--budget", args.budget]
    options += ["--trials", "1"] if way in ("baseline", "trl") else []
    options += ["--trainer", "trl"] if way == "trl" else []
    options += [word for name, value in WAYS[way].items() for word in ("--set", f"{name}={value}")]
    row: dict[str, Any] = {"way": way, "model": args.model, "error": None}
    try:
        study = run_study(folder, *options)
        return row | (by_trl(folder, study, args.micro_steps) if way == "trl" else pass_over(folder, lengths, study))
    except SystemExit as error:
        return row | {"reason": str(error)}


def pass_over(folder: Path, lengths: Path, study: dict[str, Any]) -> dict[str, Any]:
    """Run the exported script over all examples and compare its time with the projection."""
    winner, progress = study["winner"], folder / "progress.jsonl"
    cost = winner["cost"]
    projected, startup = cost["full_run_hours"] * 3600, cost["startup_s"]
    projected -= (cost["pauses"] or {}).get("checkpoint_s") or 0.0
    script = ["out/export/train.py", "--random-weights", "--output-dir", "", "--progress", str(progress)]
    begin = time.monotonic()
    done = json.loads(run_python([*script, "--lengths", str(lengths)], folder).splitlines()[-1])
    wall = time.monotonic() - begin
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    # The projected time covers training only. Steps that compile count as start-up, and are as long as others besides.
    took = done["seconds_per_step"] * done["steps"]
    config = TrainConfig(**winner["config"])
    counted = Lengths.of(long_tailed_lengths(), "counted")
    workload = Workload(examples=NUM_EXAMPLES, lengths=counted, dealt=True)
    shape = workload.run_shape(config)
    return {
        "config": config.label(),
        "judged": study["trials"]["judged"],
        "evidence": winner["evidence"],
        "tokens_per_s": winner["performance"]["tokens_per_second"],
        "measured_tokens_per_s": done["tokens_per_second"],
        "baseline_tokens_per_s": study["baseline"] and study["baseline"]["performance"]["tokens_per_second"],
        "steps": done["steps"],
        "projected_s": projected,
        "startup_s": startup,
        "took_s": took,
        "with_first_step_s": lines[-1]["seconds"],
        "with_start_s": wall,
        "error": projected / took - 1,
        "tokens_off": done["padded_tokens_per_step"] / shape.tokens_per_step - 1,
        "error_with_start": None if startup is None else (projected + startup) / wall - 1,
        "step_seconds": [round(after["seconds"] - before["seconds"], 3) for before, after in pairwise(lines)],
        "fingerprint": {key: value for key, value in study["fingerprint"].items() if key != "digest"},
    }


def by_trl(folder: Path, study: dict[str, Any], micro_steps: int) -> dict[str, Any]:
    """The winner of a study by TRL's trainer through `trl sft`, as `autotune verify` runs it for so many micro batches.

    What is measured is converted to the tokens, and to the share of new lengths, of the whole run.
    """
    line = [sys.executable, "-m", "autotune", "verify", "--json", "--micro-steps", str(micro_steps)]
    output = subprocess.run(line, cwd=folder, check=False, stdout=subprocess.PIPE, text=True).stdout
    done = json.loads(output) if output else {"reason": "autotune verify printed no result"}
    predicted, measured = study["winner"]["performance"]["tokens_per_second"], done.get("tokens_per_s")
    return {
        "config": study["winner"]["config"],
        "evidence": study["winner"]["evidence"],
        "tokens_per_s": predicted,
        "measured_tokens_per_s": measured,
        "error": measured and measured / predicted - 1,
        "reason": done.get("reason") or done.get("error"),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The speed-ups are of measured full passes, in useful tokens."""
    by_way = {row["way"]: row for row in rows if row["error"] is not None}
    base = by_way.get("baseline", {})
    measured, trl = base.get("measured_tokens_per_s"), by_way.get("trl", {})
    # An earlier form of the rows has the baseline by both trainers, on one host.
    by_sft = base.get("trl_tokens_per_s") or trl.get("measured_tokens_per_s")

    def speedup(way: str) -> float | None:
        own = by_way.get(way, {}).get("measured_tokens_per_s")
        return own / measured if own and measured else None

    return {
        "error_max": max((abs(row["error"]) for row in by_way.values() if row["way"] != "trl"), default=None),
        "trl_error": trl.get("error"),
        "trl_slower": base["tokens_per_s"] / by_sft - 1 if base and by_sft else None,
        "speedup_padded": speedup("padded"),
        "speedup_bucketed": speedup("bucketed"),
        "speedup_packed": speedup("packed"),
    }


if __name__ == "__main__":
    main()

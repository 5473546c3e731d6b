"""Compare packed rows whose attention has a mask, or computes each example by itself, with full rows of one example.

The whole model is probed, compiled, with examples of usual lengths (`benchmarks/data/skewed_lengths.txt`) and with
short ones. Then it trains twice on the same packed rows of random tokens, with the mask and without it, and the losses
of the steps are compared. What was measured is written at once.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Rows, save, speed, table

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device, resolve_model
from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import packed_rows
from autotune.problem.workload import Workload

USUAL = Path(__file__).parent / "data" / "skewed_lengths.txt"
SHORT = [64 + 37 * number % 129 for number in range(1000)]  # 64 to 192 tokens, 128 on average
CONFIG = TrainConfig(micro_batch_size=2, seq_len=2048, lora_rank=16, checkpointing="none", compile="per_layer")
WAYS = ("mask", "varlen")
STEPS, DIFFERENT_ROWS, RATE = 50, 5, 1e-3  # rows come again, so that there is something to learn in random tokens
COLUMNS = ["case", "tokens_per_s", "peak_reserved_gib", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--seq-len", type=int, default=CONFIG.seq_len)
    parser.add_argument("--memory-gib", type=float, default=75.0)
    parser.add_argument("--compile", default=CONFIG.compile, choices=["none", "per_layer"])
    parser.add_argument("--seconds", type=float, default=150.0, help="start no measurement after this time")
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call on the same machine to continue")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    rows, model = Rows("packed_attention", args.out, args.rows), resolve_model(args.model)
    config = replace(CONFIG, seq_len=args.seq_len, compile=args.compile)
    device = resolve_device(args.gpu)
    with WorkerProber("cpu" if device.kind == "cpu" else "cuda", Path(tempfile.mkdtemp())) as prober:
        fingerprint = to_data(prober.fingerprint)
        for case in cases(args.seq_len):
            if time.monotonic() < until and not rows.has(case=case):
                found = speed_of(case, prober, model, device, args.memory_gib, config)
                rows.add(found | {"fingerprint": fingerprint})
                table(rows.all[-1:], COLUMNS)
    for way in WAYS:
        if time.monotonic() < until and not rows.has(losses_of=way):
            began = time.monotonic()
            losses = train(model, replace(config, packing=True, packed_attention=way), device.kind)
            rows.add({"losses_of": way, "losses": losses, "seconds": time.monotonic() - began})
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows.all]
    summary = summarize(shown)
    save("packed_attention", from_data(Fingerprint, rows.all[0]["fingerprint"]), summary, shown, args.out)
    print(summary)


def speed_of(
    case: str,
    prober: WorkerProber,
    model: ModelSpec,
    device: DeviceSpec,
    memory_gib: float,
    config: TrainConfig = CONFIG,
) -> dict[str, Any]:
    """The row of a case: its useful tokens/s, and how long the measurement took."""
    began, (knobs, lengths) = time.monotonic(), cases(config.seq_len)[case]
    workload = Workload(examples=10_000, lengths=lengths, global_batch=round(32 * config.seq_len / lengths.mean))
    found = speed(prober, model, device, replace(config, **knobs), memory_gib, workload)
    return {"case": case, **found, "seconds": time.monotonic() - began}


def cases(seq_len: int) -> dict[str, tuple[dict[str, Any], Lengths]]:
    """What differs from CONFIG, and the lengths of the examples. Full rows are measured before the others and after."""
    usual = Lengths.of([int(line) for line in USUAL.read_text().split()], "counted")
    short = Lengths.of(SHORT, "counted")
    full: dict[str, Any] = {"padding": "max_length"}
    packed = {
        f"{name}, {way}": ({"packing": True, "packed_attention": way}, lengths)
        for name, lengths in (("usual", usual), ("short", short))
        for way in WAYS
    }
    whole = Lengths.constant(seq_len)
    return {"full": (full, whole), **packed, "full again": (full, whole)}


def train(model: ModelSpec, config: TrainConfig, kind: str) -> list[float]:
    """The losses of STEPS steps of the whole model, not compiled, with one packed row of short examples in each."""
    import torch

    from autotune.core.probe_types import MicroBatch
    from autotune.probe.harness import random_rows
    from autotune.probe.model_settings import model_settings
    from autotune.trainer.model_builder import build, config_of, to_train
    from autotune.trainer.varlen import join_rows

    device = torch.device("cpu" if kind == "cpu" else "cuda:0")
    torch.manual_seed(0)
    settings = model_settings(config, model.config["model_type"])
    base = build(config_of(model.config), settings, device)
    trained = to_train(base, settings, device).train()
    optimizer = torch.optim.AdamW([one for one in trained.parameters() if one.requires_grad], lr=RATE)
    packed = packed_rows(Lengths.of(SHORT, "counted"), config.seq_len)
    examples = [rows.examples for rows in packed for _ in range(rows.number)][:DIFFERENT_ROWS]
    kinds = [MicroBatch(rows=(row,), length=config.seq_len, share=1.0) for row in examples]
    generator = torch.Generator().manual_seed(0)
    batches = [join_rows(random_rows(kind, base.config.vocab_size, generator, packing=True)) for kind in kinds]
    losses = []
    for step in range(STEPS):
        batch = {name: value.to(device) for name, value in batches[step % len(batches)].items()}
        if config.packed_attention == "mask":
            del batch["segments"]
        with torch.autocast(device.type, torch.bfloat16):
            loss = trained(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Useful tokens/s of packed rows over those of full ones; the largest relative difference of two losses."""
    speeds = {row["case"]: row["tokens_per_s"] for row in rows if row.get("outcome") == "ok"}
    losses = {row["losses_of"]: row["losses"] for row in rows if "losses_of" in row}
    summary: dict[str, Any] = {"cases": len(rows)}
    full = [speeds[case] for case in ("full", "full again") if case in speeds]
    if full:
        over = {case: value * len(full) / sum(full) for case, value in speeds.items()}
        summary["full_differs"] = max(full) / min(full) - 1
        names = {"usual, varlen": "packed_over_full", "usual, mask": "masked_over_full"}
        names |= {"short, varlen": "packed_over_full_short", "short, mask": "masked_over_full_short"}
        summary |= {name: over[case] for case, name in names.items() if case in over}
    if len(losses) == len(WAYS):
        pairs = list(zip(*losses.values(), strict=True))
        summary["loss_first"], summary["loss_last"] = pairs[0][0], pairs[-1][0]
        summary["loss_difference_max"] = max(abs(one / other - 1) for one, other in pairs)
    return summary


if __name__ == "__main__":
    main()

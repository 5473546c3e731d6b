"""Compare the winner of a study with the advice published for an A10, in the memory of a 24 GB card.

Both run with a cap of 21.5 GiB on any card and are measured at full depth in one session: rows of 512 tokens, rank 16
and an unquantised base model. The advice is to recompute every layer, with micro batches of 8, paged 8-bit AdamW and
autocast. The advice also says that checkpointing cannot be switched off, which is true only of such micro batches.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import run_study, save, speed, table

from autotune.catalog import resolve_device, resolve_model
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber

ADVICE = TrainConfig(micro_batch_size=8, seq_len=512, optimizer="paged_adamw_8bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--memory-gib", type=float, default=21.5)
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    task = ["--gpu", args.gpu, "--model", args.model, "--memory-gib", str(args.memory_gib), "--budget", args.budget]
    task += ["--space", "lora", "--tokens-per-example", "512", "--set", "seq_len=512", "--set", "lora_rank=16"]
    study = run_study(folder, *task, "--out", "study")
    winner = TrainConfig(**study["winner"]["config"])
    configs = {
        "the advice": ADVICE,
        "the advice without checkpointing": replace(ADVICE, checkpointing="none"),
        "the study's winner": winner,
    }
    model, device = resolve_model(args.model), resolve_device(args.gpu)
    with WorkerProber("cpu" if device.kind == "cpu" else "cuda", folder) as prober:
        fingerprint = prober.fingerprint
        rows = [
            {"who": name, **speed(prober, model, device, config, args.memory_gib)} for name, config in configs.items()
        ]
    table(rows, ["who", "config", "outcome", "tokens_per_s", "peak_reserved_gib"])
    study_tokens_per_s = study["winner"]["performance"]["tokens_per_second"]
    summary = summarize(rows) | {"study_tokens_per_s": study_tokens_per_s}
    save("cap22", fingerprint, summary, rows, args.out)
    print(summary)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    advice, best = rows[0].get("tokens_per_s"), rows[-1].get("tokens_per_s")
    return {
        "winner_tokens_per_s": best,
        "advice_tokens_per_s": advice,
        "ratio": best / advice if best and advice else None,
        "winner": rows[-1]["config"],
    }


if __name__ == "__main__":
    main()

"""What each lever is worth: the reference configuration of the guides, each lever alone, all together, and the study.

The study is `autotune run` as a person would call it, for LoRA of rank 16 on rows of 2,048 tokens. Everything is
measured in one run, at full depth.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import save, speed, studied, table

from autotune.catalog import resolve_device, resolve_model
from autotune.config import TrainConfig
from autotune.probe.launcher import WorkerProber

MODELS = ("mistral-7b", "llama-3.1-8b")
# Every layer recomputed, autocast over a bf16 base, rank 16 on all linear layers.
LORA = TrainConfig(micro_batch_size=4, seq_len=2048)
FULL = TrainConfig(method="full", micro_batch_size=4, seq_len=2048, precision="bf16_pure")
TOGETHER = {"checkpointing": "none", "precision": "bf16_pure", "compile": "per_layer", "loss": "chunked"}
LEVERS: dict[str, dict[str, Any]] = {
    "reference": {},
    "no checkpointing": {"checkpointing": "none"},
    "every second layer checkpointed": {"checkpointing": "every_2"},
    "offloaded checkpoints": {"checkpointing": "offload"},
    "bf16 adapters": {"precision": "bf16_pure"},
    "layers compiled": {"compile": "per_layer"},
    "loss in chunks": {"loss": "chunked"},
    "cuDNN's attention": {"attention": "sdpa_cudnn"},
    "Liger's kernels": {"kernels": "liger"},
    "fp8 base": {"quantization": "fp8"},
    "8-bit AdamW": {"optimizer": "adamw_8bit"},
    "micro batch of 1": {"micro_batch_size": 1},
    "micro batch of 8": {"micro_batch_size": 8},
    "together": TOGETHER,
    "together, cuDNN's attention": TOGETHER | {"attention": "sdpa_cudnn"},
    "together, fp8 base": TOGETHER | {"quantization": "fp8"},
    "together, micro batch of 1": TOGETHER | {"micro_batch_size": 1},
    "together, micro batch of 8": TOGETHER | {"micro_batch_size": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, folder = resolve_device(args.gpu), Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    rows: list[dict[str, Any]] = []
    with WorkerProber("cpu" if device.kind == "cpu" else "cuda", folder) as prober:
        fingerprint = prober.fingerprint
        for name in args.models:
            model = resolve_model(name)
            for reference in (LORA, FULL):
                configs = {lever: replace(reference, **changes) for lever, changes in LEVERS.items()}
                seen = set[TrainConfig]()
                for lever, config in configs.items():
                    if config in seen:  # full fine-tuning has bf16 alone already, and no base
                        continue
                    seen.add(config)
                    rows.append({"lever": lever, **speed(prober, model, device, config, args.memory_gib)})
                    table(rows[-1:], ["lever", "config", "tokens_per_s", "mfu", "peak_reserved_gib"])
    task = ["--gpu", args.gpu, "--model", args.models[0], "--tokens-per-example", "2048", "--budget", args.budget]
    said = studied(folder, *task, "--set", "seq_len=2048", "--set", "lora_rank=16", "--out", "study")
    winner, reference_speed = said["winner"]["performance"], rows[0].get("tokens_per_s")
    rows.append({"lever": "the study's winner", "config": TrainConfig(**said["winner"]["config"]).label(), **winner})
    summary = {
        "winner_tokens_per_s": winner["tokens_per_second"],
        "reference_tokens_per_s": reference_speed,
        "ratio": winner["tokens_per_second"] / reference_speed if reference_speed else None,
        "mfu": winner["mfu"],
        "winner": TrainConfig(**said["winner"]["config"]).label(),
    }
    save("levers", fingerprint, summary, rows, args.out)
    print(summary)


if __name__ == "__main__":
    main()

"""Compare dry probes with real probes of many families, at two depths.

A dry probe counts a training step on the meta device, without a GPU (`autotune/dry/counting.py`). Each family is a
small model of its kind, made from a config in this file, so that nothing is downloaded. It is probed by the product's
own worker with two and with four layers, in three ways: LoRA, LoRA on an nf4 base with every layer recomputed, and
full fine-tuning. Some families are probed with compiled layers, and some on an int8 base too. What PEFT or
transformers refuses is left out and counted.

The counts were developed with the families in `DEVELOPED`. All others are held out: nothing was fitted on them.

`plan_seconds_unknown` is the time of `autotune plan` for what was never counted, `plan_seconds` that of the second
call.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Rows, run_python, save, table

from autotune.core.probe_types import DryCount, Fingerprint, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryProber
from autotune.probe.supervisor import WorkerProber

DEVELOPED = ("mistral", "llama", "gemma2", "phi3", "mixtral", "nemotron")
DEPTHS = (2, 4)
SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 64}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
LATENT = {
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": HEADS,
    "llama": {},
    "gemma2": HEADS | ALTERNATING,
    "phi3": {},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": HEADS,
    "qwen3_moe": HEADS | EXPERTS,
    "gemma": HEADS,
    "gemma3_text": HEADS | ALTERNATING,
    "gpt2": {"n_embd": 1024, "n_head": 16, "n_layer": 4, "n_positions": 4096},
    "gpt_neox": {},
    "gpt_oss": HEADS | EXPERTS | ALTERNATING,
    "smollm3": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": EXPERTS,
    "granite": {},
    "granitemoe": EXPERTS,
    "glm4": HEADS,
    "cohere": {},
    "cohere2": HEADS | ALTERNATING,
    "deepseek_v3": LATENT,
    "phi": {},
    "opt": {"ffn_dim": 4096, "word_embed_proj_dim": 1024},
    "bloom": {"n_head": 16, "n_layer": 4},
    "stablelm": {},
    "starcoder2": {},
    "nemotron": {},
    "exaone4": ALTERNATING,
    "ernie4_5": HEADS,
    "arcee": HEADS,
    "helium": HEADS,
    "seed_oss": HEADS,
    "apertus": {},
    "mamba2": {"num_heads": 32, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "falcon_h1": MAMBA | HEADS | {"mamba_d_ssm": 2048},
}
COMMON = {"micro_batch_size": 2, "seq_len": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "lora": COMMON | {"checkpointing": "none"},
    "qlora": COMMON | {"quantization": "nf4", "checkpointing": "full"},
    "full": COMMON | {"method": "full", "precision": "bf16_pure", "checkpointing": "none"},
}
COMPILED = COMMON | {"checkpointing": "none", "precision": "bf16_pure", "compile": "per_layer"}
COMPILED_FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_neox", "olmo2", "granite")
INT8 = {
    name: COMMON | {"quantization": "int8", "checkpointing": checkpointing}
    for name, checkpointing in {"int8": "none", "int8 recomputed": "full"}.items()
}
INT8_FAMILIES = ("llama", "qwen3", "phi3")
UNKNOWN = ("--model", "qwen3-30b-a3b", "--seq-len", "1000")  # without a formula, and no shipped count has the length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=70.0)
    parser.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call to continue")
    parser.add_argument("--seconds", type=float, default=330.0, help="start no probe after this; 0 measures nothing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    stored = Rows("dry_probe", args.out, args.rows)
    measure(args, stored)
    with tempfile.TemporaryDirectory() as folder, DryProber(Path(folder), shipped=False) as prober:
        rows = [compared(row, prober) for row in stored.all]
    shown = [row for row in rows if "error" in row]
    table(sorted(shown, key=lambda row: -abs(row["error"]))[:15], ["family", "way", "depth", "peak_gib", "error"])
    table([row for row in rows if "error" not in row], ["family", "way", "depth", "outcome", "reason"])
    summary = summarize(rows) | plan_seconds()
    fingerprint = from_data(Fingerprint, stored.all[0]["fingerprint"])
    save("dry_probe", fingerprint, summary, rows, args.out)
    print(summary)


def wanted(families: list[str]) -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """Family, way, knobs and depth of each probe: first what has to be there, then what is compiled."""
    for name in families:
        for way, knobs in WAYS.items():
            for depth in DEPTHS:
                yield name, way, knobs, depth
    further = [(name, way, knobs) for name in INT8_FAMILIES for way, knobs in INT8.items()]
    further += [(name, "compiled", COMPILED) for name in COMPILED_FAMILIES]
    for name, way, knobs in further:
        for depth in DEPTHS:
            if name in families:
                yield name, way, knobs, depth


def measure(args: argparse.Namespace, stored: Rows) -> None:
    """Probe what no stored row has, on the local GPU."""
    missing = [one for one in wanted(args.families) if not stored.has(family=one[0], way=one[1], depth=one[3])]
    if not missing or not args.seconds:
        return
    until, logs = time.monotonic() + args.seconds, Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    with WorkerProber(args.device, logs) as prober:
        for name, way, knobs, depth in missing:
            if time.monotonic() < until:
                stored.add(probed(prober, args, name, way, knobs, depth))
                print(name, way, depth, stored.all[-1]["outcome"], stored.all[-1].get("peak_gib"), flush=True)


def probed(
    prober: WorkerProber, args: argparse.Namespace, name: str, way: str, knobs: dict[str, Any], depth: int
) -> dict[str, Any]:
    """Probe a family for as short as possible and return its peaks as a row."""
    model = SMALL | FAMILIES[name] | {"model_type": name}
    row: dict[str, Any] = {"family": name, "way": way, "depth": depth, "fingerprint": to_data(prober.fingerprint)}
    try:
        shape = prober.describe(model)
    except Exception as error:  # this family cannot be built: the others can
        return row | {"outcome": "refused", "reason": str(error)}
    if shape is None or (shape.no_adapters and knobs.get("method") != "full"):
        return row | {"outcome": "refused", "reason": shape.no_adapters if shape else "the worker ended"}
    config = TrainConfig(**knobs, attention="sdpa" if shape.sdpa else "eager")
    request = ProbeRequest(
        config=config,
        model=model,
        device=args.device,
        memory_gib=args.memory_gib,
        depth=depth,
        min_timed_s=0.0,
        max_timed_steps=1,
    )
    result = prober.probe(request, prober.logs / "probe.log")
    row |= {"config": to_data(config), "outcome": result.outcome.value, "reason": result.reason}
    if result.outcome is Outcome.OK and result.measurement is not None:
        measured = result.measurement
        row |= {"peak_gib": measured.peak_allocated_gib, "segments_gib": measured.segment_peak_gib}
        row |= {"optimizer_gib": measured.optimizer_gib, "model_gib": measured.model_gib}
    return row


def compared(row: dict[str, Any], prober: DryProber) -> dict[str, Any]:
    """The row with the dry probe's peak and its error, or with the reason why there is none."""
    about = {key: value for key, value in row.items() if key != "fingerprint"}
    if "peak_gib" not in row:
        return about
    config = from_data(TrainConfig, row["config"])
    model = SMALL | FAMILIES[row["family"]] | {"model_type": row["family"]}
    answer = prober.count(ProbeRequest(config=config, model=model, memory_gib=70.0, depth=row["depth"]))
    if answer.count is None:
        return about | {"reason": f"not counted: {answer.refused}"}
    return about | errors(row, answer.count)


def errors(row: dict[str, Any], count: DryCount) -> dict[str, Any]:
    """Relative errors of the peak and of each segment."""
    segments = dict(count.segment_peak_gib)
    if "forward_head" not in row["segments_gib"]:  # measured while the forward pass was one segment
        segments["forward"] = max(segments["forward"], segments.pop("forward_head"))
    return {
        "held_out": row["family"] not in DEVELOPED,
        "counted_gib": count.peak_allocated_gib,
        "error": count.peak_allocated_gib / row["peak_gib"] - 1,
        "segment_errors": {
            name: segments[name] / peak - 1 for name, peak in row["segments_gib"].items() if name in segments
        },
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the errors of the peaks. Without `compiled` in their name they are those of eager layers.

    `left_out` counts what could not be probed or counted.
    """
    known = [row for row in rows if "error" in row]
    eager, compiled = ([row for row in known if (row["way"] == "compiled") is side] for side in (False, True))
    held_out = [row for row in eager if row["held_out"]]

    def largest(group: list[dict[str, Any]]) -> float | None:
        return max((abs(row["error"]) for row in group), default=None)

    return {
        "families": len({row["family"] for row in known}),
        "configs": len(known),
        "error_median": statistics.median(abs(row["error"]) for row in eager),
        "error_max": largest(eager),
        "error_max_compiled": largest(compiled),
        "heldout_families": len({row["family"] for row in held_out}),
        "heldout_error_max": largest(held_out),
        "left_out": len(rows) - len(known),
    }


def plan_seconds() -> dict[str, float]:
    """Seconds of `autotune plan` for what was never counted, and of the same command again."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for _ in range(2):
            began = time.monotonic()
            run_python(["-m", "autotune", "plan", *UNKNOWN, "--gpu", "h200", "--json"], Path.cwd())
            seconds.append(time.monotonic() - began)
    return {"plan_seconds_unknown": seconds[0], "plan_seconds": seconds[1]}


if __name__ == "__main__":
    main()

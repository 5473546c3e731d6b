"""Compare the claims of guides with stored measurements: pairs of configurations that differ in one
knob.

The pairs are of the 240 whole models of the search table (Mistral-7B, LoRA of rank 16, rows of 512
tokens), of `reference_levers` (Mistral-7B and Llama 3.1 8B, rows of 2,048) and of `warm_vs_cold`
for the rank. Those of packing are winners of studies (`packing`, `real_data`), which differ in
more. Micro batches with few tokens are CPU-bound, and their speed varies: `large` pairs of the
search table have at least 4,096 tokens in the smaller micro batch. `speed` and `memory` are ratios:
the configuration of the claim divided by the other one. No GPU is needed. `docs/claims.md` has the
conclusions.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench import Mode, finish, result_rows, run_program
from search import TABLE, Table

from autotune.core.train_config import TrainConfig

# The knobs of each claim: in its configuration, and in the other one.
OF_TABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nf4": ({"quantization": "nf4"}, {"quantization": "none"}),
    "checkpointing": ({"checkpointing": "full"}, {"checkpointing": "none"}),
    "compile": ({"compile": "per_layer"}, {"compile": "none"}),
    "adamw_8bit": ({"optimizer": "adamw_8bit"}, {"optimizer": "adamw_torch_fused"}),
    **{
        f"micro_batch_{size}": ({"micro_batch_size": size}, {"micro_batch_size": size // 2})
        for size in (2, 4, 8, 16)
    },
}
# The same of the levers. The lever of the claim's configuration, and of the other one.
OF_LEVERS = {
    "checkpointing": ("reference", "no checkpointing"),
    "compile": ("layers compiled", "reference"),
    "adamw_8bit": ("8-bit AdamW", "reference"),
    "liger": ("Liger's kernels", "reference"),
    "cudnn": ("cuDNN's attention", "reference"),
    "together": ("together", "reference"),
    "micro_batch_1_to_4": ("reference", "micro batch of 1"),
    "micro_batch_4_to_8": ("together, micro batch of 8", "together"),
}
LARGE = 4096
COLUMNS = ["claim", "data", "model", "config", "speed", "memory"]


def of_table() -> Iterator[dict[str, Any]]:
    """Yield every pair of the search table that differs in the knob of a claim."""
    measured = Table(TABLE)
    for claim, (about, other) in OF_TABLE.items():
        for config in measured.configs:
            changed = replace(config, **about)
            if replace(config, **other) != config or (changed, None) not in measured.results:
                continue
            speed, before = measured.value(changed), measured.value(config)
            held, held_before = _reserved_gib(measured, changed), _reserved_gib(measured, config)
            if speed and before and held and held_before:
                row = {
                    "claim": claim,
                    "data": "search_table",
                    "model": "mistral-7b",
                    "config": changed.label(),
                }
                row |= {"large": min(config.tokens, changed.tokens) >= LARGE}
                yield row | {"speed": speed / before, "memory": held / held_before}


def _reserved_gib(measured: Table, config: TrainConfig) -> float | None:
    found = measured.results[(config, None)].measurement
    return None if found is None else found.peak_reserved_gib


def of_levers() -> Iterator[dict[str, Any]]:
    """Every pair of the levers."""
    rows = [row for row in result_rows("reference_levers") if row.get("outcome") == "ok"]
    by_lever = {(row["model"], row["config"].split()[0], row["lever"]): row for row in rows}
    for claim, levers in OF_LEVERS.items():
        for model, method, lever in by_lever:
            other = by_lever.get((model, method, levers[1]))
            if lever == levers[0] and other is not None:
                row = by_lever[model, method, lever]
                ratios = {
                    "speed": row["tokens_per_s"] / other["tokens_per_s"],
                    "memory": row["peak_reserved_gib"] / other["peak_reserved_gib"],
                }
                yield {
                    "claim": claim,
                    "data": "reference_levers",
                    "model": model,
                    "config": row["config"],
                } | ratios


def of_rank() -> Iterator[dict[str, Any]]:
    """Rank 64 against rank 16: the steps of two probes that followed each other in one process."""
    ranks = {
        row["config"].split()[1]: row
        for row in result_rows("warm_vs_cold")
        if row["after"] == "another rank"
    }
    speed = ranks["r16"]["warm_step_s"] / ranks["r64"]["warm_step_s"]
    memory = ranks["r64"]["warm_peak_gib"] / ranks["r16"]["warm_peak_gib"]
    config = ranks["r64"]["config"]
    yield {"claim": "rank_64", "data": "warm_vs_cold", "model": "mistral-7b", "config": config} | {
        "speed": speed,
        "memory": memory,
    }


def of_packing() -> Iterator[dict[str, Any]]:
    """Useful tokens/s of exported runs: packed rows against others, padded in three ways."""
    runs = {row["case"]: row["tokens_per_s"] for row in result_rows("packing")}
    passes = {row["way"]: row["measured_tokens_per_s"] for row in result_rows("real_data")}
    padded_to = {
        "seq_len": ("packing", "mistral-7b", runs["packed"] / runs["padded"]),
        "lengths": ("real_data", "llama-3.2-3b", passes["packed"] / passes["bucketed"]),
        "longest": ("real_data", "llama-3.2-3b", passes["packed"] / passes["padded"]),
    }
    for to, (data, model, speed) in padded_to.items():
        row = {"claim": f"packing_against_{to}", "data": data, "model": model, "config": "packed"}
        yield row | {"speed": speed, "memory": None}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each claim and its data: how many pairs, and the least, median and largest ratio of speed
    and memory.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_method = row["config"].split()[0]
        names = [
            row["data"],
            *["large"] * bool(row.get("large")),
            *[of_method] * (row["data"] == "reference_levers"),
        ]
        for name in names:
            groups.setdefault(f"{row['claim']}_{name}", []).append(row)
    return {
        name: {"pairs": len(group)} | _spread(group, "speed") | _spread(group, "memory")
        for name, group in groups.items()
    }


def _spread(group: list[dict[str, Any]], key: str) -> dict[str, float]:
    values = [row[key] for row in group if row[key] is not None]
    if not values:
        return {}
    return {
        f"{key}_min": min(values),
        f"{key}_median": statistics.median(values),
        f"{key}_max": max(values),
    }


def run(args: argparse.Namespace) -> None:
    """Compare all pairs."""
    finish(args, None, [*of_table(), *of_levers(), *of_rank(), *of_packing()], COLUMNS)


MODES = {"": Mode(run=run, result="claims", summarize=summarize)}


if __name__ == "__main__":
    run_program(MODES, __doc__)

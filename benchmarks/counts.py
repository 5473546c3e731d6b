"""Compare dry probes, which count a training step without a GPU, with measured peaks and times."""

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from bench import DATA, Mode, Rows, finish, largest, load, run_program, run_python, table, worker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import _fully_shard as fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.catalog import ModelSpec, resolve_device, resolve_model
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import DryCount, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import EIGHTY_PERCENT, gib
from autotune.dry.counting import META, WORKSPACE, CountedStep, cuda_workspace
from autotune.dry.meta_device import simulate_cuda
from autotune.dry.prober import DryProber
from autotune.dry.storage_counter import StorageCounter, blocks
from autotune.planning.counted_memory import count as count_of
from autotune.prediction.estimate import memory_of
from autotune.prediction.step_time import counted_step_time, estimate_step_time
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.probe.accounting import trained_parameters
from autotune.probe.supervisor import WorkerProber
from autotune.trainer.model_builder import decoder_layers

# --- probes

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
EXPERTS = {
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}
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
# without a formula, and no shipped count has the length
UNKNOWN = ("--model", "qwen3-30b-a3b", "--seq-len", "1000")


def run_probes(args: argparse.Namespace) -> None:
    """Compare dry probes with real probes of many families, at two depths.

    A dry probe counts a training step on the meta device, without a GPU
    (`autotune/dry/counting.py`). Each family is a small model of its kind, made from a config in
    this file, so nothing is downloaded. The product's own worker probes it with two and with four
    layers, in three ways: LoRA, LoRA on an nf4 base with every layer recomputed, and full
    fine-tuning. Some families are probed with compiled layers, and some on an int8 base too. A
    probe that PEFT or transformers refuses is left out and counted.

    The counts were developed with the families in `DEVELOPED`. No constant was fitted on the others
    (`heldout_`).

    `plan_seconds_unknown` is the time of `autotune plan` for a model without stored counts, and
    `plan_seconds` the time of the second call.
    """
    stored = Rows.of(args)
    measure_probes(args, stored)
    with tempfile.TemporaryDirectory() as folder, DryProber(Path(folder), shipped=False) as prober:
        rows = [compared(row, prober) for row in stored.all]
    known = [row for row in rows if "error" in row]
    table(
        sorted(known, key=lambda row: -abs(row["error"]))[:15],
        ["family", "way", "depth", "peak_gib", "error"],
    )
    table(
        [row for row in rows if "error" not in row], ["family", "way", "depth", "outcome", "reason"]
    )
    finish(args, stored.fingerprint, rows, **plan_seconds())


def wanted(families: list[str]) -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """Yield family, way, knobs and depth of each probe: first
    the usual ways, then the extra ones.
    """
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


def measure_probes(args: argparse.Namespace, stored: Rows) -> None:
    """Probe the missing rows on the local GPU."""
    missing = [
        one
        for one in wanted(args.families)
        if not stored.has(family=one[0], way=one[1], depth=one[3])
    ]
    if not missing or not args.seconds:
        return
    until = time.monotonic() + args.seconds
    with worker(args.device) as prober:
        for name, way, knobs, depth in missing:
            if time.monotonic() < until:
                stored.add(probed(prober, args, name, way, knobs, depth))


def probed(
    prober: WorkerProber,
    args: argparse.Namespace,
    name: str,
    way: str,
    knobs: dict[str, Any],
    depth: int,
) -> dict[str, Any]:
    """Probe a family for as short as possible and return its peaks as a row."""
    model = SMALL | FAMILIES[name] | {"model_type": name}
    row: dict[str, Any] = {
        "family": name,
        "way": way,
        "depth": depth,
        "fingerprint": to_data(prober.fingerprint),
    }
    try:
        shape = prober.describe(model)
    except Exception as error:  # this family cannot be built: the others can
        return row | {"outcome": "refused", "reason": str(error)}
    if shape is None or (shape.no_adapters and knobs.get("method") != "full"):
        return row | {
            "outcome": "refused",
            "reason": shape.no_adapters if shape else "the worker ended",
        }
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
    """Return the row with the dry probe's peak and its error,
    or with the reason why it has none.
    """
    about = {key: value for key, value in row.items() if key != "fingerprint"}
    if "peak_gib" not in row:
        return about
    config = from_data(TrainConfig, row["config"])
    model = SMALL | FAMILIES[row["family"]] | {"model_type": row["family"]}
    answer = prober.count(
        ProbeRequest(config=config, model=model, memory_gib=70.0, depth=row["depth"])
    )
    if answer.count is None:
        return about | {"reason": f"not counted: {answer.refused}"}
    return about | probe_errors(row, answer.count)


def probe_errors(row: dict[str, Any], count: DryCount) -> dict[str, Any]:
    """Relative errors of the peak and of each segment."""
    segments = dict(count.segment_peak_gib)
    if "forward_head" not in row["segments_gib"]:  # measured while the forward pass was one segment
        segments["forward"] = max(segments["forward"], segments.pop("forward_head"))
    return {
        "held_out": row["family"] not in DEVELOPED,
        "counted_gib": count.peak_allocated_gib,
        "error": count.peak_allocated_gib / row["peak_gib"] - 1,
        "segment_errors": {
            name: segments[name] / peak - 1
            for name, peak in row["segments_gib"].items()
            if name in segments
        },
    }


def summarize_probes(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the errors of the peaks. Keys without `compiled` count eager layers.

    `left_out` is the number of rows that could not be probed or counted.
    """
    known = [row for row in rows if "error" in row]
    eager, compiled = (
        [row for row in known if (row["way"] == "compiled") is side] for side in (False, True)
    )
    held_out = [row for row in eager if row["held_out"]]
    return {
        "families": len({row["family"] for row in known}),
        "configs": len(known),
        "error_median": statistics.median(abs(row["error"]) for row in eager),
        "error_max": largest(eager, "error"),
        "error_max_compiled": largest(compiled, "error"),
        "heldout_families": len({row["family"] for row in held_out}),
        "heldout_error_max": largest(held_out, "error"),
        "left_out": len(rows) - len(known),
    }


def plan_seconds() -> dict[str, float]:
    """Return the seconds of `autotune plan` for a model without stored counts, and of the same
    command again.
    """
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for _ in range(2):
            began = time.monotonic()
            run_python(["-m", "autotune", "plan", *UNKNOWN, "--gpu", "h200", "--json"], Path.cwd())
            seconds.append(time.monotonic() - began)
    return {"plan_seconds_unknown": seconds[0], "plan_seconds": seconds[1]}


# --- speed

WHOLE, TRUNCATED = DATA / "heldout_h200.jsonl", DATA / "truncated_h100.jsonl"
DEVICE_BOUND = 0.3  # below this share of the host in the predicted time
SPEED_COLUMNS = ["model", "config", "micro_s", "counted_error", "formula_error", "host_share"]
UNKNOWN_COLUMNS = [
    "model",
    "config",
    "depth",
    "micro_s",
    "first_error",
    "counted_error",
    "device_error",
    "peak_error",
]


def run_speed(args: argparse.Namespace) -> None:
    """Compare step times from counted work with measured micro batches, and with the formula on an
    H200.

    The rows of `data/heldout_h200.jsonl` are whole models that no constant was fitted on. The
    constants of counted times rest on the profiled kernels of three other models, in
    `data/transfer_h200.jsonl`. A dry probe counts each configuration here, without a GPU. These
    rows were seen once before thin products got their own time. The speed of a CPU-bound
    configuration is the uncertain part, because each host launches operations at its own pace. An
    error is the predicted time divided by the measured time, minus 1.

    `data/truncated_h100.jsonl` has models without a formula, with 2 and 6 layers each, profiled on
    an H100. Each of its rows keeps the prediction before any constant or count was changed for it
    (`first_counted_s`).

    A count is of the code of the installed transformers. Versions differ in the bytes that they
    move: in 5.23, mixtures of experts no longer mask the rows of other GPUs' experts. So count with
    the version that the rows were measured with (`measured_with`), or some errors are those of the
    version.
    """
    whole = [row for row in load(WHOLE) if row.get("micro_s")]
    with DryProber(shipped=False) as prober:
        known = [found for row in whole if (found := judged(prober, row)) is not None]
        table(known, SPEED_COLUMNS)
        unknown = [
            found for row in load(TRUNCATED) if (found := judged_unknown(prober, row)) is not None
        ]
    table(unknown, UNKNOWN_COLUMNS)
    if others := {row["measured_with"] for row in unknown} - {version("transformers")}:
        print(f"counted with another transformers than measured with: {', '.join(others)}")
    finish(args, whole[0]["fingerprint"], known + unknown)


def judged(prober: DryProber, row: dict[str, Any]) -> dict[str, Any] | None:
    """Compare both predictions with a measured micro batch.

    Return None if a dry probe cannot count it.
    """
    # At that time all rows had the length of the longest, and cuDNN's attention was allowed.
    config, model = (
        TrainConfig(**{"padding": "max_length"} | row["config"]),
        resolve_model(row["model"]),
    )
    request = ProbeRequest(
        config=config, model=model.config, memory_gib=1.0, micro_steps=row["micro_steps"]
    )
    count = prober.count(request).count
    counted = None if count is None else counted_step_time(config, count)
    by_formula = estimate_step_time(model, config)
    if counted is None or by_formula is None:
        return None
    return {
        "model": row["model"],
        "config": config.label(),
        "micro_s": row["micro_s"],
        "counted_s": counted.micro_s,
        "counted_error": counted.micro_s / row["micro_s"] - 1,
        "formula_error": by_formula.micro_s / row["micro_s"] - 1,
        "host_share": counted.host_share,
    }


def judged_unknown(prober: DryProber, row: dict[str, Any]) -> dict[str, Any] | None:
    """Compare a truncated model with its counted time and peak on its GPU.

    Return None if it has a formula.
    """
    config, model = TrainConfig(**row["config"]), resolve_model(row["model"])
    if estimate_step_time(model, config) is not None:
        return None
    request = ProbeRequest(
        config=config, model=model.config, memory_gib=1.0, micro_steps=2, depth=row["depth"]
    )
    count = prober.count(request).count
    transfer = speed_transfer(resolve_device(REFERENCE), resolve_device("h100-sxm"))
    counted = None if count is None else counted_step_time(config, count)
    if count is None or counted is None or transfer is None:
        raise SystemExit(f"{row['model']} cannot be counted")
    there = counted.convert(transfer)
    return {
        "model": row["model"],
        "config": config.label(),
        "depth": row["depth"],
        "micro_s": row["micro_s"],
        "counted_s": there.micro_s,
        "counted_error": there.micro_s / row["micro_s"] - 1,
        "first_error": row["first_counted_s"] / row["micro_s"] - 1,
        "device_error": there.device_s / row["kernels"]["busy_s"] - 1,
        "peak_error": count.peak_allocated_gib / row["peak_allocated_gib"] - 1,
        "host_share": there.host_share,
        "deviation": there.error,
        "measured_with": row["fingerprint"]["packages"]["transformers"],
        "counted_with": version("transformers"),
    }


def summarize_speed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize models with a formula, GPU-bound or CPU-bound,
    and models without one (`unknown_`).
    """
    known = [row for row in rows if "formula_error" in row]
    found: dict[str, Any] = {"configs": len(known), "models": len({row["model"] for row in known})}
    for name, bound in (("device_bound", True), ("host_bound", False)):
        chosen = [row for row in known if (row["host_share"] < DEVICE_BOUND) is bound]
        found |= {f"{name}_configs": len(chosen)} | error_sizes(
            chosen, f"{name}_", ("counted", "formula")
        )
    unknown = [row for row in rows if "first_error" in row]
    found |= {
        "unknown_configs": len(unknown),
        "unknown_models": len({row["model"] for row in unknown}),
    }
    found["unknown_counted_as_measured"] = sum(
        row["counted_with"] == row["measured_with"] for row in unknown
    )
    found["unknown_device_bound_configs"] = sum(row["host_share"] < DEVICE_BOUND for row in unknown)
    found |= error_sizes(unknown, "unknown_", ("counted", "first", "device", "peak"))
    found["unknown_first_inside_80"] = sum(
        abs(math.log(1 + row["first_error"])) <= EIGHTY_PERCENT * row["deviation"]
        for row in unknown
    ) / len(unknown)
    return found


def error_sizes(
    rows: list[dict[str, Any]], prefix: str, kinds: tuple[str, ...]
) -> dict[str, float]:
    """The median and the largest error of each kind."""
    found: dict[str, float] = {}
    for kind in kinds:
        sizes = [abs(row[f"{kind}_error"]) for row in rows]
        found |= {
            f"{prefix}{kind}_error_median": statistics.median(sizes),
            f"{prefix}{kind}_error_max": max(sizes),
        }
    return found


# --- ranks

MODELS = {
    "mistral-7b": (4, 16),
    "llama-3.1-8b": (8,),
    "gemma-2b": (6,),
    "qwen2.5-7b": (8,),
    "tinyllama": (22,),
}
MIXTURES = {"qwen3-30b-a3b": (4, 8), "olmoe-1b-7b": (4,), "mixtral-8x7b": (4,)}
# under HSDP: numbers of GPUs, and of copies
COPIED, COPIES = ("mistral-7b", "gemma-2b"), ((4, 2), (16, 2))
METHODS, CHECKPOINTING = ("full", "lora"), ("none", "full")
WORLDS = [(2, "fsdp2", 1), (2, "fsdp2", 2), (2, "fsdp2_keep", 1), (8, "fsdp2", 1), (8, "fsdp2", 2)]
OTHERS: list[dict[str, Any]] = [
    {"loss": "chunked"},
    {"loss": "chunked", "checkpointing": "full"},
    {"compile": "per_layer"},
    {"seq_len": 4096, "micro_batch_size": 1},
    {"seq_len": 512, "micro_batch_size": 1},
]
RANKS_COLUMNS = [
    "model",
    "layers",
    "config",
    "parallelism",
    "accumulation",
    "counted_gib",
    "predicted_gib",
    "error",
]


def run_ranks(args: argparse.Namespace) -> None:
    """Compare the formula of `autotune plan --gpus` for FSDP2 with ranks that are counted on the
    meta device.

    Torch's own `fully_shard` divides a model in a simulated world of several ranks, as accelerate
    does: a unit for each layer, one for the embedding, and one of final norm and head that stays
    gathered. Every operation of a training step runs without values, and the storages that are
    alive are counted. The memory of CUDA's kernels is added as in a dry probe. A simulated world
    takes the memory of a real one. Counting cannot see the memory that a trainer holds beside the
    model. No GPU is needed; without `--counted` it takes 7 minutes.
    """
    counted = {
        rank_key(row): row["counted_gib"] for row in (load(args.counted) if args.counted else [])
    }
    rows = []
    for case in itertools.chain(rank_cases(MODELS), other_rank_cases()):
        rows.append(compare_rank(*case, counted))
        print(rows[-1], flush=True)
    finish(args, None, rows, RANKS_COLUMNS)


def run_mixture_ranks(args: argparse.Namespace) -> None:
    """Compare the estimate of `autotune plan --gpus` for mixtures of experts, which have no
    formula, with ranks that are counted on the meta device.

    The estimate takes the activations from a dry probe of one GPU. For the ranks, see `ranks`. No
    GPU is needed; it takes 6 minutes.
    """
    rows = []
    for case in rank_cases(MIXTURES):
        rows.append(compare_rank(*case, {}))
        print(rows[-1], flush=True)
    finish(args, None, rows, RANKS_COLUMNS)


def rank_cases(
    models: dict[str, tuple[int, ...]],
) -> Iterator[tuple[str, int, TrainConfig, Parallelism, int]]:
    """Yield model, layers, configuration, parallelism and micro batches of a step."""
    for (model, depths), method, checkpointing in itertools.product(
        models.items(), METHODS, CHECKPOINTING
    ):
        config = TrainConfig(
            method=method, micro_batch_size=4, checkpointing=checkpointing, loss="full"
        )
        for layers, (num_gpus, strategy, accumulation) in itertools.product(depths, WORLDS):
            yield (
                model,
                layers,
                config,
                Parallelism(num_gpus=num_gpus, strategy=strategy),
                accumulation,
            )
        divided = Parallelism(num_gpus=8, strategy="fsdp2", sync_each_batch=True)
        yield model, min(depths), config, divided, 2
        if model in COPIED:
            for (num_gpus, copies), accumulation in itertools.product(COPIES, (1, 2)):
                hsdp = Parallelism(num_gpus=num_gpus, strategy="fsdp2", copies=copies)
                yield model, min(depths), config, hsdp, accumulation


def other_rank_cases() -> Iterator[tuple[str, int, TrainConfig, Parallelism, int]]:
    """Yield cases of other losses, compiled layers and lengths."""
    for model, method, knobs in itertools.product(("mistral-7b", "llama-3.1-8b"), METHODS, OTHERS):
        plain = {"method": method, "micro_batch_size": 4, "checkpointing": "none", "loss": "full"}
        yield model, 8, TrainConfig(**plain | knobs), Parallelism(num_gpus=2, strategy="fsdp2"), 1


def rank_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the columns that identify a rank."""
    return tuple(row[name] for name in RANKS_COLUMNS[:5])


def compare_rank(
    name: str,
    layers: int,
    config: TrainConfig,
    parallelism: Parallelism,
    accumulation: int,
    known: dict[tuple[Any, ...], float],
) -> dict[str, Any]:
    """A rank's peak, counted unless it is known, and as a plan estimates it."""
    model = resolve_model(name)
    model = replace(model, params=None, config=model.config | {"num_hidden_layers": layers})
    predicted = memory_of(model, config, accumulation, parallelism=parallelism, count=count_of)
    assert predicted is not None
    row: dict[str, Any] = {
        "model": name,
        "layers": layers,
        "config": config.label(),
        "accumulation": accumulation,
    }
    row["parallelism"] = (
        f"{parallelism.num_gpus} {parallelism.strategy}" + " sync" * parallelism.sync_each_batch
    )
    row["parallelism"] += f" {parallelism.copies} copies" * (parallelism.copies > 1)
    counted = known.get(rank_key(row)) or count_rank(model, config, parallelism, accumulation)
    return row | {
        "counted_gib": counted,
        "predicted_gib": predicted.peak_gib,
        "error": predicted.peak_gib / counted - 1,
    }


def count_rank(
    model: ModelSpec, config: TrainConfig, parallelism: Parallelism, accumulation: int
) -> float:
    """GiB that rank 0 has allocated at the peak of its second step."""
    pure = replace(config, precision="bf16_pure")  # what is computed in
    request = ProbeRequest(
        config=pure, model=model.config, memory_gib=1.0, micro_steps=accumulation
    )
    with simulate_cuda(packed=False, padded=False), fsdp2_on_meta(parallelism.num_gpus) as counter:
        step = CountedStep(request, META, cuda_workspace)
        trained = trained_parameters(step._model)
        for parameter in trained:
            parameter.data = parameter.data.to(torch.float32)
        shard_model(step, parallelism)
        step._counter = counter
        counter.hold(map(local_shard, step._model.parameters()))
        counter.hold(step._model.buffers())
        with counter:
            state = [
                torch.zeros_like(local_shard(one))
                for one in trained_parameters(step._model)
                for _ in range(2)
            ]
            for _ in range(2):
                counter.begin()
                train_step(step, accumulation, parallelism.sync_each_batch)
                peak = counter.take_peak()
            del state
    return gib(peak + WORKSPACE)


def shard_model(step: CountedStep, parallelism: Parallelism) -> None:
    """Make the units that accelerate makes."""
    model, base = step._model, step._base
    sizes = {"copies": parallelism.copies, "shards": parallelism.num_shards}
    names = ("copies", "shards")[parallelism.copies == 1 :]
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    }
    reshard = {"reshard_after_forward": parallelism.strategy != "fsdp2_keep"}
    for layer in decoder_layers(model):
        fully_shard(layer, **options | reshard)
    embedding, head, norm = (
        base.get_input_embeddings(),
        base.get_output_embeddings(),
        base.model.norm,
    )
    tied = embedding.weight is head.weight
    if not tied:
        fully_shard(embedding, **options | reshard)
    fully_shard(
        [norm, embedding, head] if tied else [norm, head], **options, reshard_after_forward=False
    )
    fully_shard(model, **options)


def train_step(step: CountedStep, accumulation: int, each: bool) -> None:
    """One optimizer step.

    Gradients are scattered in each micro batch, or in the last, as under `no_sync`.
    """
    batches = [step._batch() for _ in range(accumulation)]
    for number, batch in enumerate(batches, 1):
        step._model.set_requires_gradient_sync(each or number == accumulation)
        step._forward(batch).backward()
    step._forget_gradients()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a parameter."""
    return getattr(tensor, "_local_tensor", tensor)


@contextmanager
def fsdp2_on_meta(num_gpus: int) -> Iterator[StorageCounter]:
    """Let `fully_shard` work on the meta device in a simulated world, and count the storages that
    it resizes.
    """
    counter = StorageCounter(META, cuda_workspace)
    param, handle = fsdp._fsdp_param, fsdp._fsdp_param_group._get_device_handle

    def counted(resize: Any) -> Any:
        def resize_and_count(tensor: torch.Tensor) -> None:
            resize(tensor)
            storage = tensor.untyped_storage()
            size = counter._sizes.get(storage._cdata)
            if size is not None:
                counter._sizes[storage._cdata] = blocks(storage.nbytes())
                counter.live += counter._sizes[storage._cdata] - size
                counter._peak = max(counter._peak, counter.live)

        return resize_and_count

    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_gpus)}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, world))
        for module in vars(fsdp).values():
            if hasattr(module, "_get_device_handle"):
                cpu = patch.object(
                    module,
                    "_get_device_handle",
                    lambda kind: handle("cpu" if kind == "meta" else kind),
                )
                stack.enter_context(cpu)
            if hasattr(module, "_get_device_from_mesh"):
                stack.enter_context(
                    patch.object(module, "_get_device_from_mesh", lambda mesh: META)
                )
        for name in ("alloc_storage", "free_storage"):
            stack.enter_context(patch.object(param, name, counted(getattr(param, name))))
        single = ("all_gather_single", "reduce_scatter_single")  # the later names
        for name in (*single, "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            stack.enter_context(patch.object(dist, name, lambda *args, **named: None, create=True))
        # A stream of the CPU records nothing, which HSDP does not expect of another device.
        stack.enter_context(patch.object(torch.cpu.Stream, "record_event", Mock()))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", Mock()))
        group = fsdp._fsdp_param_group.FSDPParamGroup
        stack.enter_context(patch.object(group, "_validate_no_meta_params", lambda group: None))
        dist.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        yield counter


def summarize_ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize all ranks, and the ranks of models that the formula was not written with
    (`other_models_`).
    """
    errors = [abs(row["error"]) for row in rows]
    others = [row for row in rows if row["model"] not in ("mistral-7b", "llama-3.1-8b")]
    return {
        "ranks": len(rows),
        "models": len({row["model"] for row in rows}),
        "error_median": statistics.median(errors),
        "error_max": max(errors),
        "other_models_error_max": largest(others, "error"),
    }


def summarize_mixture_ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the ranks of mixtures; `too_low` is the largest error of a too low estimate."""
    errors = [row["error"] for row in rows]
    return {
        "ranks": len(rows),
        "models": len({row["model"] for row in rows}),
        "error_median": statistics.median(map(abs, errors)),
        "error_max": max(map(abs, errors)),
        "too_low": max(-error for error in errors),
    }


MODES = {
    "probes": Mode(
        run=run_probes,
        result="dry_probe",
        summarize=summarize_probes,
        options={
            "--families": {"nargs": "*", "default": list(FAMILIES)},
            "--device": "cuda",
            "--memory-gib": 70.0,
            "--rows": None,
            "--seconds": 330.0,
        },
    ),
    "speed": Mode(run=run_speed, result="counted_speed", summarize=summarize_speed),
    "ranks": Mode(
        run=run_ranks,
        result="counted_ranks",
        summarize=summarize_ranks,
        options={"--counted": None},
    ),
    "mixture_ranks": Mode(
        run=run_mixture_ranks, result="mixture_ranks", summarize=summarize_mixture_ranks
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

"""Measure 4-bit bases that FSDP2 shards, and models in the host's memory, on two GPUs.

On a CPU, `learning` makes a trial run; the other modes offload, which needs a GPU.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import (
    RANK_OPTIONS,
    Mode,
    collect,
    finish,
    largest,
    measured,
    predicted,
    rank_model,
    run_program,
)
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from world import open_pool, request, sharded

from autotune.catalog import resolve_device, resolve_model
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Measurement, World
from autotune.core.train_config import TrainConfig
from autotune.prediction.collectives import rank_step_time, slowest_of_catalogue, traffic
from autotune.prediction.host_exchange import host_exchange
from autotune.prediction.sharded_memory import EXPORTED, rank_breakdown
from autotune.prediction.step_time import UNKNOWN_HOST, estimate_step_time
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.probe.meters import open_meter
from autotune.probe.model_settings import model_settings
from autotune.probe.rank_pool import RankPool
from autotune.problem.performance import step_time_s
from autotune.trainer.lean_trainer import LeanTrainer, sharing_arguments, training_arguments
from autotune.trainer.model_builder import decoder_layers, load, trainable_model
from autotune.trainer.ranks import loopback_variables
from autotune.trainer.sharded_nf4 import shard_4_bit_layers

STEPS = 10
CARD_GIB = 24.0  # the cap of each GPU
QLORA: dict[str, Any] = {
    "quantization": "nf4",
    "double_quant": True,
    "checkpointing": "full",
    "loss": "chunked",
    "micro_batch_size": 1,
}
LENGTHS = (512, 2048)
OFFLOADED: dict[str, Any] = {"offload": True, "checkpointing": "full", "micro_batch_size": 8}
OFFLOAD_CASES: list[tuple[str, dict[str, Any]]] = [
    ("fsdp2", {}),
    ("fsdp2_keep", {}),
    ("fsdp2", {"method": "full"}),
    ("fsdp2", {"quantization": "nf4", "double_quant": True}),
]

# --- qlora70: a 70B on two GPUs of 24 GB


def run_qlora70(args: argparse.Namespace) -> None:
    """Predict QLoRA of a 70B in the host's memory from one GPU, and train it on two capped GPUs.

    One GPU simulates a rank of two at two truncated depths, which predict the rank of the whole
    model. Then both GPUs build the whole model as shards with random weights, and train it for ten
    steps. `formula_error` is the error of the formula that plans use. `gpus_without_offload` is the
    smallest number of such GPUs that surely holds the model without offload, by formula.
    """
    with open_pool(args) as pool:
        collect(args, pool, list(LENGTHS), lambda length: compare_qlora(pool, args, length))


def compare_qlora(pool: RankPool, args: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return a row with the predictions and the measurement for sequences of this length."""
    config = replace(sharded(args, "fsdp2", QLORA | {"offload": True}), seq_len=length)
    model = resolve_model(args.model)
    probe = {"micro_steps": 1, "min_timed_micros": STEPS}
    whole = request(args, rank_model(args.device, args.model), config, World.REAL, **probe)
    by_formula = rank_breakdown(model, config, Parallelism.of(config), 1)
    assert by_formula is not None
    from_one, found_at = predicted(pool, replace(whole, world=World.FAKE))
    found = measured(pool, whole)
    return {
        "config": str(length),
        "label": config.label(),
        "depths": found_at,
        "limit_gib": found.limit_gib,
        "predicted_gib": from_one.peak_allocated_gib,
        "formula_gib": by_formula.peak_gib,
        "peak_gib": found.peak_allocated_gib,
        "reserved_gib": found.peak_reserved_gib,
        "memory_error": from_one.peak_allocated_gib / found.peak_allocated_gib - 1,
        "formula_error": by_formula.peak_gib / found.peak_allocated_gib - 1,
        "formula_host_gib": by_formula.host,
        "steps": len(found.step_s),
        "step_s": step_time_s(found, 1),
        "gpus_without_offload": fewest_gpus(args, length),
    }


def fewest_gpus(args: argparse.Namespace, length: int) -> int | None:
    """Return the smallest number of capped GPUs that holds the model without offload."""
    for number in range(2, 9):
        config = replace(sharded(args, "fsdp2", QLORA, number), seq_len=length)
        found = rank_breakdown(resolve_model(args.model), config, Parallelism.of(config), 1)
        if found is not None and found.peak_reserved_gib * (1 + found.error) < 0.92 * CARD_GIB:
            return number
    return None


def summarize_qlora(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "configs": sum("peak_gib" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "qlora70_gib": largest(rows, "reserved_gib"),
        "qlora70_error": largest(rows, "memory_error"),
        "formula_error_max": largest(rows, "formula_error"),
        "steps_min": min((row["steps"] for row in rows if "steps" in row), default=None),
        "gpus_without_offload": largest(rows, "gpus_without_offload"),
    }


# --- offload: four configurations in the host's memory


def run_offload(args: argparse.Namespace) -> None:
    """Compare four configurations in the host's memory with their predictions.

    A simulated rank (`memory_error`) and the formula (`formula_error`) predict the memory. The
    interval of the step time is a plan's, with unknown PCIe and an unknown host.
    """
    with open_pool(args) as pool:
        collect(args, pool, OFFLOAD_CASES, lambda case: compare_offload(pool, args, *case))


def compare_offload(
    pool: RankPool, args: argparse.Namespace, strategy: str, knobs: dict[str, Any]
) -> dict[str, Any]:
    """Return a row with the predictions and the measurement of two real ranks."""
    config = sharded(args, strategy, OFFLOADED | knobs)
    shape = rank_model(args.device, args.model, args.layers)
    asked = request(args, shape, config, World.REAL, micro_steps=2, min_timed_micros=STEPS)
    fake = measured(pool, replace(asked, world=World.FAKE))
    real = measured(pool, asked)
    model = replace(resolve_model(args.model), params=None, config=shape)
    by_formula = rank_breakdown(model, config, Parallelism.of(config), 2)
    assert by_formula is not None
    row = {
        "config": config.label(),
        "peak_gib": real.peak_allocated_gib,
        "memory_error": fake.peak_allocated_gib / real.peak_allocated_gib - 1,
        "formula_error": by_formula.peak_gib / real.peak_allocated_gib - 1,
        "formula_host_gib": by_formula.host,
        "step_s": step_time_s(real, 2),
        "host_share": host_share(real),
    }
    low, high = offloaded_interval(pool, config, model)
    return row | {"interval_s": [low, high], "inside": low <= row["step_s"] <= high}


def host_share(found: Measurement) -> float | None:
    """Return the host's time to issue a micro batch, as a share of the micro batch's time."""
    if found.host_micro_s is None:
        return None
    return found.host_micro_s / statistics.fmean(found.micro_step_s)


def offloaded_interval(pool: RankPool, config: TrainConfig, model: Any) -> tuple[float, float]:
    """Return the interval of the time of a step of two micro batches, as a plan computes it."""
    parallelism = Parallelism.of(config)
    device = resolve_device(pool.fingerprint.device)
    alone = estimate_step_time(model, config, UNKNOWN_HOST)
    exchange = host_exchange(model, config, parallelism, EXPORTED)
    sent = traffic(model, config, replace(parallelism, offload=False))
    transfer = speed_transfer(resolve_device(REFERENCE), device)
    link_gb_s = device.link_between(parallelism.num_gpus)
    assert alone and exchange and sent and transfer and link_gb_s
    step = rank_step_time(
        alone.convert(transfer),
        config,
        parallelism,
        sent,
        accumulation=2,
        link_gb_s=link_gb_s,
        slowest_link=slowest_of_catalogue(device),
    )
    whole = exchange.add_to(step, device, 2)
    assert whole is not None
    return whole.interval_s


def summarize_offload(rows: list[dict[str, Any]]) -> dict[str, Any]:
    timed = [row for row in rows if (row.get("host_share") or 1.0) < 0.5]
    return {
        "configs": sum("memory_error" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "memory_error_max": largest(rows, "memory_error"),
        "formula_error_max": largest(rows, "formula_error"),
        "gpu_bound": len(timed),
        "inside": sum(row["inside"] for row in timed),
    }


# --- learning: losses and adapters of sharded and of whole 4-bit bases


VOCABULARY, LENGTH, ROWS, TUNED = 256, 64, 8, 50
FEW = 8  # the number of tokens that may follow a token in a chain


def run_learning(args: argparse.Namespace) -> None:
    """Train adapters on a 4-bit base in one process and in two, which shard it.

    A small model first learns one Markov chain of tokens. Then adapters learn another chain for 50
    steps, once in one process and once in two. `difference` is the largest difference of the losses
    of a step, and `adapter_difference` is the norm of the difference between the changes of the
    adapters, divided by the norm of the change.
    """
    with tempfile.TemporaryDirectory() as folder:
        pretrain(args.device, Path(folder))
        runs = {}
        for ranks in (1, 2):
            given = (ranks, args.device, args.precision, folder)
            multiprocessing.spawn(learn, args=given, nprocs=ranks)
            runs[ranks] = torch.load(Path(folder, f"{ranks}.pt"))
    losses = {ranks: run["losses"] for ranks, run in runs.items()}
    changes = {ranks: run["change"] for ranks, run in runs.items()}
    row = {
        "precision": args.precision,
        "steps": len(losses[1]),
        "fell": losses[1][0] - losses[1][-1],
        "difference": max(abs(a - b) for a, b in zip(losses[1], losses[2], strict=True)),
        "adapter_difference": float((changes[2] - changes[1]).norm() / changes[1].norm()),
        "packed_share": runs[2]["packed_bytes"] / runs[1]["packed_bytes"],
        "losses": losses,
    }
    fingerprint = open_meter(args.device).fingerprint()
    finish(args, fingerprint, [row], ["precision", "fell", "difference", "adapter_difference"])


def chain_rows(number: int, *, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of a Markov chain in which a few tokens may follow each token."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randint(VOCABULARY, (VOCABULARY, FEW), generator=generator)
    tokens = [torch.randint(VOCABULARY, (number,), generator=generator)]
    for _ in range(LENGTH - 1):
        choice = torch.randint(FEW, (number,), generator=generator)
        tokens.append(following[tokens[-1], choice])
    rows = torch.stack(tokens, dim=1)
    return [{"input_ids": row, "labels": row} for row in rows]


def pretrain(device: str, folder: Path) -> None:
    """Train a small model on a chain, and save it."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = chain_rows(16 * 150, seed=1)
    for begin in range(0, len(rows), 16):
        ids = torch.stack([row["input_ids"] for row in rows[begin : begin + 16]]).to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


class InOrder(LeanTrainer):
    """A Trainer that takes the rows in order, so that each number of ranks has the same steps."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def learn(rank: int, ranks: int, device: str, precision: str, folder: str) -> None:
    """Train adapters as one of `ranks` processes, and save the losses and their change."""
    place = torch.device(device, rank if device == "cuda" else None)
    if device == "cuda":
        torch.cuda.set_device(rank)
    config = TrainConfig(
        quantization="nf4",
        double_quant=True,
        precision=precision,
        checkpointing="none",
        loss="full",
        micro_batch_size=ROWS // ranks,
        num_gpus=ranks,
        sharding="fsdp2" if ranks > 1 else "none",
    )
    if ranks > 1:
        join(rank, ranks, device, folder)
    settings = model_settings(config, "llama")
    base = load(folder, settings, place)
    torch.manual_seed(2)
    model = trainable_model(base, settings, place)
    packed_bytes = 0
    if ranks > 1:
        shard_4_bit_layers(model, place)
    before = adapters(model)
    given = training_arguments(config, accumulation=1, on_cpu=device == "cpu")
    given |= sharing_arguments(config, decoder_layers(model))
    given |= {"optim": "adamw_torch", "learning_rate": 2e-3, "logging_steps": 1}
    arguments = TrainingArguments(
        output_dir=folder, max_steps=TUNED, save_strategy="no", disable_tqdm=True, **given
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process would use all visible GPUs
    trainer = InOrder(
        model,
        arguments,
        train_dataset=chain_rows(ROWS * TUNED, seed=3),
    )
    trainer.train()
    packed_bytes = sum(
        local(layer.base_layer.weight).untyped_storage().nbytes()
        for layer in model.modules()
        if hasattr(layer, "lora_A")
    )
    change = adapters(model) - before
    if rank == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"losses": losses, "change": change, "packed_bytes": packed_bytes}
        torch.save(found, Path(folder, f"{ranks}.pt"))
    if ranks > 1:
        dist.destroy_process_group()


def join(rank: int, ranks: int, device: str, folder: str) -> None:
    """Join the other process. accelerate shards on a CPU only if it takes it for a GPU."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (rank, rank, ranks, ranks)), strict=True))
    os.environ |= loopback_variables()
    store = dist.FileStore(str(Path(folder, "meeting")), ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    if device == "cpu":
        from accelerate.state import DistributedType, PartialState

        os.environ["ACCELERATE_TORCH_DEVICE"] = device
        PartialState._prepare_backend = lambda *_, **__: (backend, DistributedType.MULTI_GPU)


def adapters(model: nn.Module) -> torch.Tensor:
    """Return copies of all adapters as one vector. All ranks must call this function together."""
    return torch.cat(
        [
            (one.full_tensor() if isinstance(one, DTensor) else one).detach().float().cpu().view(-1)
            for one in model.parameters()
            if one.requires_grad
        ]
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def summarize_learning(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("steps", "fell", "difference", "adapter_difference", "packed_share")
    return {name: rows[0][name] for name in names}


CAPPED = RANK_OPTIONS | {"--memory-gib": CARD_GIB}
MODES = {
    "qlora70": Mode(
        run=run_qlora70,
        result="sharded_nf4_70b",
        summarize=summarize_qlora,
        options=CAPPED | {"--model": "llama-3.1-70b"},
    ),
    "offload": Mode(
        run=run_offload,
        result="offload",
        summarize=summarize_offload,
        options=RANK_OPTIONS | {"--model": "mistral-7b", "--layers": 8},
    ),
    "learning": Mode(
        run=run_learning,
        result="sharded_nf4_learning",
        summarize=summarize_learning,
        options={"--device": "cuda", "--precision": "fp32"},
    ),
}

if __name__ == "__main__":
    run_program(MODES, __doc__)

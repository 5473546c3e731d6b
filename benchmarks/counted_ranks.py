"""Compare the formula of `autotune plan --gpus` for FSDP2 with ranks that are counted on the meta device.

Torch's own `fully_shard` divides a model in a fake world of several ranks, as accelerate has it: a unit for each layer,
one for the embedding, and one of final norm and head that stays gathered. Every operation of a training step runs,
without values, and the storages that are alive are counted. What CUDA's kernels take besides is added as in a dry
probe. A fake world takes the memory of a real one. What no counting sees is what a trainer holds beside the model. No
GPU is needed.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from common import save, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import _fully_shard as fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.catalog import ModelSpec, resolve_model
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.dry.counting import META, WORKSPACE, CountedStep, cuda_workspace
from autotune.dry.meta_device import cuda_on_meta
from autotune.dry.storage_counter import StorageCounter, blocks
from autotune.prediction.sharded_memory import rank_breakdown
from autotune.probe.accounting import trained_parameters
from autotune.trainer.model_builder import decoder_layers

MODELS = {"mistral-7b": (4, 16), "llama-3.1-8b": (8,), "gemma-2b": (6,), "qwen2.5-7b": (8,), "tinyllama": (22,)}
COPIED, COPIES = ("mistral-7b", "gemma-2b"), ((4, 2), (16, 2))  # under HSDP: numbers of GPUs, and of copies
METHODS, CHECKPOINTING = ("full", "lora"), ("none", "full")
WORLDS = [(2, "fsdp2", 1), (2, "fsdp2", 2), (2, "fsdp2_keep", 1), (8, "fsdp2", 1), (8, "fsdp2", 2)]
OTHERS: list[dict[str, Any]] = [
    {"loss": "chunked"},
    {"loss": "chunked", "checkpointing": "full"},
    {"compile": "per_layer"},
    {"seq_len": 4096, "micro_batch_size": 1},
    {"seq_len": 512, "micro_batch_size": 1},
]
COLUMNS = ["model", "layers", "config", "parallelism", "accumulation", "counted_gib", "predicted_gib", "error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--counted", type=Path, help="an earlier result: count only what it lacks (all takes 7 minutes)"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    earlier = json.loads(args.counted.read_text())["rows"] if args.counted else []
    counted = {key(row): row["counted_gib"] for row in earlier}
    rows = []
    for model, layers, config, parallelism, accumulation in cases():
        rows.append(compare(model, layers, config, parallelism, accumulation, counted))
        print(rows[-1], flush=True)
    table(rows, COLUMNS)
    save("counted_ranks", None, summarize(rows), rows, args.out)
    print(summarize(rows))


def cases() -> Iterator[tuple[str, int, TrainConfig, Parallelism, int]]:
    """Model, layers, configuration, world and micro batches of a step."""
    for (model, depths), method, checkpointing in itertools.product(MODELS.items(), METHODS, CHECKPOINTING):
        config = TrainConfig(method=method, micro_batch_size=4, checkpointing=checkpointing, loss="full")
        for layers, (num_gpus, strategy, accumulation) in itertools.product(depths, WORLDS):
            yield model, layers, config, Parallelism(num_gpus=num_gpus, strategy=strategy), accumulation
        divided = Parallelism(num_gpus=8, strategy="fsdp2", sync_each_batch=True)
        yield model, min(depths), config, divided, 2
        if model in COPIED:
            for (num_gpus, copies), accumulation in itertools.product(COPIES, (1, 2)):
                hsdp = Parallelism(num_gpus=num_gpus, strategy="fsdp2", copies=copies)
                yield model, min(depths), config, hsdp, accumulation
    for model, method, knobs in itertools.product(("mistral-7b", "llama-3.1-8b"), METHODS, OTHERS):
        plain = {"method": method, "micro_batch_size": 4, "checkpointing": "none", "loss": "full"}
        yield model, 8, TrainConfig(**plain | knobs), Parallelism(num_gpus=2, strategy="fsdp2"), 1


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a rank from others."""
    return tuple(row[name] for name in COLUMNS[:5])


def compare(
    name: str,
    layers: int,
    config: TrainConfig,
    parallelism: Parallelism,
    accumulation: int,
    known: dict[tuple[Any, ...], float],
) -> dict[str, Any]:
    """A rank's peak, counted unless it is known, and by formula."""
    model = resolve_model(name)
    model = replace(model, params=None, config=model.config | {"num_hidden_layers": layers})
    predicted = rank_breakdown(model, config, parallelism, accumulation)
    assert predicted is not None
    row: dict[str, Any] = {"model": name, "layers": layers, "config": config.label(), "accumulation": accumulation}
    row["parallelism"] = f"{parallelism.num_gpus} {parallelism.strategy}" + " sync" * parallelism.sync_each_batch
    row["parallelism"] += f" {parallelism.copies} copies" * (parallelism.copies > 1)
    counted = known.get(key(row)) or count_rank(model, config, parallelism, accumulation)
    return row | {
        "counted_gib": counted,
        "predicted_gib": predicted.peak_gib,
        "error": predicted.peak_gib / counted - 1,
    }


def count_rank(model: ModelSpec, config: TrainConfig, parallelism: Parallelism, accumulation: int) -> float:
    """GiB that rank 0 has allocated at the peak of its second step."""
    pure = replace(config, precision="bf16_pure")  # what is computed in
    request = ProbeRequest(config=pure, model=model.config, memory_gib=1.0, micro_steps=accumulation)
    with cuda_on_meta(packed=False, padded=False), fsdp2_on_meta(parallelism.num_gpus) as counter:
        step = CountedStep(request, META, cuda_workspace)
        trained = trained_parameters(step._model)
        for parameter in trained:
            parameter.data = parameter.data.to(torch.float32)
        shard(step, parallelism)
        step._counter = counter
        counter.hold(map(local, step._model.parameters()))
        counter.hold(step._model.buffers())
        with counter:
            state = [torch.zeros_like(local(one)) for one in trained_parameters(step._model) for _ in range(2)]
            for _ in range(2):
                counter.begin()
                train(step, accumulation, parallelism.sync_each_batch)
                peak = counter.take_peak()
            del state
    return gib(peak + WORKSPACE)


def shard(step: CountedStep, parallelism: Parallelism) -> None:
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
    embedding, head, norm = base.get_input_embeddings(), base.get_output_embeddings(), base.model.norm
    tied = embedding.weight is head.weight
    if not tied:
        fully_shard(embedding, **options | reshard)
    fully_shard([norm, embedding, head] if tied else [norm, head], **options, reshard_after_forward=False)
    fully_shard(model, **options)


def train(step: CountedStep, accumulation: int, each: bool) -> None:
    """One optimizer step. Gradients are scattered in each micro batch, or in the last, as under `no_sync`."""
    batches = [step._batch() for _ in range(accumulation)]
    for number, batch in enumerate(batches, 1):
        step._model.set_requires_gradient_sync(each or number == accumulation)
        step._forward(batch).backward()
    step._forget_gradients()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a parameter."""
    return getattr(tensor, "_local_tensor", tensor)


@contextmanager
def fsdp2_on_meta(num_gpus: int) -> Iterator[StorageCounter]:
    """Let `fully_shard` work on the meta device in a fake world, and count what it frees by resizing storages."""
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
                cpu = patch.object(module, "_get_device_handle", lambda kind: handle("cpu" if kind == "meta" else kind))
                stack.enter_context(cpu)
            if hasattr(module, "_get_device_from_mesh"):
                stack.enter_context(patch.object(module, "_get_device_from_mesh", lambda mesh: META))
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


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the formula is off, of the ranks that its moments were written with and of those that they were not."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "ranks": len(rows),
        "models": len({row["model"] for row in rows}),
        "error_median": statistics.median(errors),
        "error_max": max(errors),
        "other_models_error_max": max(
            abs(row["error"]) for row in rows if row["model"] not in ("mistral-7b", "llama-3.1-8b")
        ),
    }


if __name__ == "__main__":
    main()

"""A program for one of two ranks: it takes the gradients of tiny models with adapters.

Arguments: the folder in which the ranks meet, and this rank. The first rank writes the gradients of
the whole batch to found.pt, by the key (strategy, way to compute adapters, whether it is a
mixture). The strategy `none` is one process with all rows.
"""

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autotune.core.train_config import TrainConfig
from autotune.trainer.grouped_lora import group_experts
from autotune.trainer.joined_lora import JoinedLayers
from autotune.trainer.model_builder import decoder_layers

ROWS, LENGTH = 4, 13
CASES = [
    *(("none", "peft", experts) for experts in (False, True)),
    *(("ddp", "peft", experts) for experts in (False, True)),
    ("ddp", "joined", False),
    ("ddp", "grouped", True),
    ("fsdp2", "peft", False),
    ("fsdp2", "grouped", True),
    *((strategy, "rowwise", False) for strategy in ("none", "fsdp2")),
]


def gradients(rank: int, strategy: str, kernels: str, *, experts: bool) -> dict[str, torch.Tensor]:
    """The gradients of the second of two steps, averaged over all rows of both ranks."""
    from tests.probe import test_grouped_lora, test_joined_lora

    if kernels == "rowwise":
        base = model = trained_in_fp8(kernels)
    elif experts:
        base, model = test_grouped_lora.built("qwen3_moe", test_grouped_lora.EXPERTS)
    else:
        config = TrainConfig(precision="fp32", lora_rank=4, checkpointing="none")
        base, model, _ = test_joined_lora.built("llama", config, joined=False)
    joined = JoinedLayers(base, decoder_layers(base)) if kernels == "joined" else None
    if kernels == "grouped":
        group_experts(base)

    wrapped: nn.Module = model
    if strategy == "ddp":
        wrapped = DistributedDataParallel(model)
    elif strategy == "fsdp2":
        for layer in decoder_layers(model):
            fully_shard(layer)
        fully_shard(model)

    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    if joined is not None:
        joined.watch(optimizer)
    for number in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(3, 128, (ROWS, LENGTH), generator=generator)
        own = tokens if strategy == "none" else tokens.chunk(2)[rank]
        wrapped(input_ids=own, labels=own).loss.backward()
        if number == 0:
            optimizer.step()
    return {name: whole(weight.grad) for name, weight in trained.items() if weight.grad is not None}


def trained_in_fp8(scales: str) -> nn.Module:
    """A model for full fine-tuning whose compiled layers multiply 8-bit floats."""
    from tests.unit.trainer.test_float8_training import built

    model: nn.Module = built(fp8_products=scales)
    for layer in decoder_layers(model):
        layer.compile(backend="aot_eager", dynamic=False)
    return model.train()


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    found = {case: gradients(rank, *case[:2], experts=case[2]) for case in CASES}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

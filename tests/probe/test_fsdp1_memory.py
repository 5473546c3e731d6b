"""The memory of FSDP 1 by formula, held against torch's own in a fake world, counted on the CPU."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _flat_param
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from autotune.catalog.model_sizes import Sizes
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.dry.storage_counter import StorageCounter, blocks
from autotune.prediction.sharded_memory import Stack, _sharded

CPU = torch.device("cpu")
LAYERS, HIDDEN, INNER, HEADS, TOKENS = 6, 256, 704, 4, 8


# GPUs, strategy, precision, values of the vocabulary, tied, micro batches of a step
@pytest.mark.parametrize(
    ("num_gpus", "strategy", "precision", "vocab", "tied", "micro_steps"),
    [
        (2, "fsdp2", "bf16_pure", 2048, False, 1),
        (8, "fsdp2", "bf16_mixed", 2048, False, 1),
        (8, "fsdp2_keep", "bf16_pure", 2048, False, 2),
        (2, "fsdp2", "bf16_mixed", 16384, False, 1),
        (8, "fsdp2", "bf16_mixed", 16384, True, 1),
        (2, "fsdp2", "bf16_pure", 2048, True, 2),
    ],
)
def test_the_formula_counts_what_fsdp_1_holds(
    num_gpus: int, strategy: str, precision: str, vocab: int, tied: bool, micro_steps: int
) -> None:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16 if precision == "bf16_pure" else torch.float32)
    params = sum(one.numel() for one in model.parameters())
    with fake_world(num_gpus) as counter:
        counted = peak_of(wrapped(model, strategy, precision), vocab, micro_steps, counter)
    sizes = Sizes(
        family="llama",
        layers=LAYERS,
        hidden=HIDDEN,
        intermediate=INNER,
        heads=HEADS,
        key_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        vocab=vocab,
        tied=tied,
        capped=False,
        params=params,
    )
    knobs = {"method": "full", "lora_rank": None, "micro_batch_size": 1, "seq_len": TOKENS, "loss": "full"}
    parallelism = Parallelism(num_gpus=num_gpus, strategy=strategy)
    found = _sharded(sizes, TrainConfig(**knobs, precision=precision), parallelism, micro_steps > 1, Stack(fsdp1=True))
    assert (found.peak_gib - found.workspace) * GIB == pytest.approx(counted, rel=0.002)


def wrapped(model: LlamaForCausalLM, strategy: str, precision: str) -> FullyShardedDataParallel:
    """The model in units of a layer, every layer recomputed."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    in_bf16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16) if precision == "bf16_mixed" else None
    return FullyShardedDataParallel(
        model.train(),
        sharding_strategy=ShardingStrategy.FULL_SHARD if strategy == "fsdp2" else ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        mixed_precision=in_bf16,
        device_id=CPU,
    )


def peak_of(model: FullyShardedDataParallel, vocab: int, micro_steps: int, counter: StorageCounter) -> int:
    """Bytes at the peak of the second step, with AdamW's state."""
    counter.hold(one.data for one in model.parameters())
    ids, peak = torch.randint(vocab, (1, TOKENS)), 0
    with counter:
        state = [torch.zeros_like(one) for one in model.parameters() for _ in range(2)]
        for _ in range(2):
            counter.begin()
            for number in range(micro_steps):
                with nullcontext() if number == micro_steps - 1 else model.no_sync():
                    model(ids, labels=ids).loss.backward()
            peak = counter.take_peak()
            model.zero_grad()
        del state
    return peak


@contextmanager
def fake_world(num_gpus: int) -> Iterator[StorageCounter]:
    """A fake process group, and a counter that sees what FSDP frees by resizing storages."""
    counter = StorageCounter(CPU)

    def counted(resize: Any) -> Any:
        def resize_and_count(tensor: torch.Tensor, *size: Any) -> None:
            resize(tensor, *size)
            storage = tensor.untyped_storage()
            before = counter._sizes.get(storage._cdata)
            if before is not None:
                counter._sizes[storage._cdata] = blocks(storage.nbytes())
                counter.live += counter._sizes[storage._cdata] - before
                counter._peak = max(counter._peak, counter.live)

        return resize_and_count

    with ExitStack() as stack:
        for name in ("_alloc_storage", "_free_storage"):
            stack.enter_context(patch.object(_flat_param, name, counted(getattr(_flat_param, name))))
        dist.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        yield counter

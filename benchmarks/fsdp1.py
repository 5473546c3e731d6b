"""Repeat PEFT's example of a 70B in 4 bits under FSDP 1 on two GPUs, with a few of its layers, beside the formula.

Each matrix is quantised on the GPU and its bytes wait in the host's memory, as transformers loads for FSDP; then
accelerate wraps it with PEFT's own policy, with and without shards in the host's memory. Weights are random. Peaks are
lines in depth: `whole` has what all layers would take by them, what plans say of that, and what PEFT's page prints.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import Mode, finish, run_program

from autotune.catalog import resolve_model
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.prediction.memory_formula import CONTEXT_GIB
from autotune.prediction.sharded_memory import Stack, rank_breakdown
from autotune.probe.meters import open_meter

MODEL, LAYERS = "llama-2-70b", (4, 10)
PUBLISHED_GIB = {False: 35.6, True: 19.6}  # of one GPU, by whether shards wait in the host's memory
SEQ_LEN, ROWS, MICROS, STEPS = 2048, 2, 2, 3
CONFIG = TrainConfig(
    micro_batch_size=ROWS,
    seq_len=SEQ_LEN,
    lora_rank=8,
    lora_dropout=0.1,
    precision="bf16_pure",
    quantization="nf4",
    double_quant=True,
    optimizer="adamw_torch",
    allocator="fixed",
)
COLUMNS = ["layers", "offload", "peak_gib", "predicted_gib", "memory_error", "reserved_gib", "device_gib"]


def measured(layers: int, offload: bool) -> dict[str, Any]:
    """A row about so many layers on two ranks, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        command += ["--rank-of", str(layers), str(int(offload)), "--out", folder]
        subprocess.run(command, check=True)
        peaks = json.loads((Path(folder) / "peaks.json").read_text())
    predicted = planned(layers, offload)
    row = {"layers": layers, "offload": offload, **peaks, "predicted_gib": predicted[0]}
    return row | {"memory_error": predicted[0] / peaks["peak_gib"] - 1, "predicted_device_gib": predicted[1]}


def planned(layers: int | None, offload: bool) -> tuple[float, float]:
    """What plans say that torch allocates on a GPU, and that a device shows whose allocator has room, in GiB."""
    model = resolve_model(MODEL)
    if layers is not None:
        model = replace(model, params=None, config=model.config | {"num_hidden_layers": layers})
    found = rank_breakdown(
        model, CONFIG, Parallelism(num_gpus=2, strategy="fsdp2"), MICROS, Stack(fsdp1=True, offload=offload)
    )
    assert found is not None
    return found.peak_gib, found.roomy_gib + CONTEXT_GIB


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    whole = []
    for offload in (False, True):
        few, more = sorted((row for row in rows if row["offload"] is offload), key=lambda row: row["layers"])
        depth = resolve_model(MODEL).num_layers
        each = {key: (more[key] - few[key]) / (more["layers"] - few["layers"]) for key in ("peak_gib", "device_gib")}
        extended = {key: few[key] + (depth - few["layers"]) * step for key, step in each.items()}
        predicted_gib, predicted_device_gib = planned(None, offload)
        whole.append(
            {
                "offload": offload,
                **extended,
                "predicted_gib": predicted_gib,
                "predicted_device_gib": predicted_device_gib,
                "published_device_gib": PUBLISHED_GIB[offload],
            }
        )
    return {
        "configs": len(rows),
        "memory_error_max": max((row["memory_error"] for row in rows), key=abs),
        "whole": whole,
    }


def train(layers: int, offload: bool, out: Path) -> None:
    """Three steps on this rank; the first writes its peaks to peaks.json."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = resolve_model(MODEL).config | {"num_hidden_layers": layers, "use_cache": False}
    model = loaded(config)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    rank, dropout = CONFIG.lora_rank, CONFIG.lora_dropout
    adapters = LoraConfig(
        r=rank, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "LlamaDecoderLayer"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD",
        cpu_offload=offload,
        backward_prefetch="BACKWARD_PRE",
        use_orig_params=False,
        sync_module_states=True,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy=fsdp_auto_wrap_policy(model),
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, gradient_accumulation_steps=MICROS)
    model = accelerator.prepare(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = accelerator.prepare(torch.optim.AdamW(trained, lr=1e-4))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS * MICROS):
        tokens = torch.randint(0, config["vocab_size"], (ROWS, SEQ_LEN), device="cuda")
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
    free, total = torch.cuda.mem_get_info()
    peaks = {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "device_gib": (total - free) / GIB,
    }
    if accelerator.is_main_process:
        (out / "peaks.json").write_text(json.dumps(peaks))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def loaded(config: dict[str, Any]) -> Any:
    """A model with random weights: matrices in 4 bits, their statistics on the GPU, all else in the host's memory."""
    import bitsandbytes as bnb
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, quantised(module, bnb.nn))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                filled = torch.full(parameter.shape, 0.02, dtype=torch.bfloat16)
                setattr(module, name, torch.nn.Parameter(filled, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.full(buffer.shape, 0.02, dtype=buffer.dtype), persistent=False)
    return model


def quantised(linear: torch.nn.Linear, layers: Any) -> torch.nn.Module:
    """A layer of the same shape in 4 bits, with double quantisation, as transformers loads it for FSDP."""
    types = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.bfloat16}
    made = layers.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, device="meta", **types
    )
    weight = torch.randn(linear.weight.shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)
    on_gpu = layers.Params4bit(weight, requires_grad=False, module=made, **types).to("cuda")
    made.weight = layers.Params4bit(on_gpu.data.to("cpu"), **on_gpu.__dict__)
    made.quant_state = made.weight.quant_state
    return made


def run(args: argparse.Namespace) -> None:
    """Train each number of layers, with and without offload."""
    if args.rank_of:
        train(args.rank_of[0], bool(args.rank_of[1]), args.out)
        return
    rows = [measured(layers, offload) for offload in (False, True) for layers in LAYERS]
    finish(args, open_meter("cuda").fingerprint(), rows, COLUMNS)


MODES = {
    "": Mode(
        run=run,
        result="fsdp1",
        summarize=summarize,
        options={"--rank-of": {"nargs": 2, "type": int, "metavar": ("LAYERS", "OFFLOAD"), "help": argparse.SUPPRESS}},
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)

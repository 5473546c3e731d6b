"""llamafactory.yaml: what `llamafactory-cli train` takes (keys of LLaMA-Factory 0.9.5), and what that cannot say."""

import json
from typing import Any

from autotune.core.train_config import TrainConfig
from autotune.export.header import (
    ENVIRONMENT,
    LIGER,
    base_dtype,
    facts,
    has_published_weights,
    learning_rate,
    model_source,
    save_steps,
    sectioned,
    warmup_steps,
)
from autotune.study.summary import Recipe

VERSION, TRANSFORMERS = "0.9.5", "5.6"  # whose keys these are, and the last transformers that it takes
ATTENTIONS = {"eager": "disabled", "flash_attention_2": "fa2"}  # by its names; it knows sdpa besides
DATASETS = {
    "your_dataset": {
        "file_name": "data.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    }
}


def export(recipe: Recipe) -> dict[str, str]:
    """`llamafactory.yaml`, with the command to run it in its head, and `dataset_info.json`, which it reads."""
    head = [
        *facts(recipe),
        "",
        "Run it in this directory, on one GPU, with the allocator as it was measured:",
        f"  {command(recipe)}",
        "",
        "What is measured holds for the trainer that was probed. Known to differ here:",
        *(f"- {item}" for item in _differences(recipe)),
        *(f"not expressed: {item}" for item in inexpressible(recipe)),
    ]
    data = "your data: its file, format and columns are in dataset_info.json; the template is the tokenizer's own"
    sections: list[tuple[str, dict[str, Any]]] = [
        ("" if has_published_weights(recipe) else "no published weights: name your model here", _model(recipe)),
        (data, {"dataset_dir": ".", "dataset": "your_dataset"}),
        ("", _method(recipe.winner.config)),
        ("", _batch(recipe)),
        ("", _memory(recipe.winner.config)),
        ("the learning rate is a common default and was not tuned", _schedule(recipe)),
    ]
    return {"llamafactory.yaml": sectioned(head, sections), "dataset_info.json": json.dumps(DATASETS, indent=2) + "\n"}


def command(recipe: Recipe) -> str:
    """The command line. With one GPU there is no launcher, and accelerate reads its own variable."""
    regional = " ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true" if recipe.winner.config.compile == "per_layer" else ""
    return f"{ENVIRONMENT}{regional} llamafactory-cli train llamafactory.yaml"


def _differences(recipe: Recipe) -> list[str]:
    """What another program does another way, though the file says all it can."""
    config = recipe.winner.config
    probed = recipe.fingerprint.packages.get("transformers", "another version")
    found = [f"LLaMA-Factory {VERSION} has transformers {TRANSFORMERS} or older; measured was {probed}."]
    if recipe.trainer == "trl":
        found.append("The speed is that of TRL's SFTTrainer, with its own loss, rows and dtypes of adapters.")
    else:
        found.append("The speed is that of train.py, whose loop (lean.py) leaves out milliseconds a micro batch.")
    if config.packing:
        found.append("It packs 1,000 examples at a time by a rule of its own, and makes their mask itself.")
    else:
        found.append("It pads to the longest row of a batch, with a mask; the probe had rows of cutoff_len, and none.")
    if config.method == "lora" or config.precision == "bf16_pure":
        found.append(f"The base has the dtype of its checkpoint; what was measured has {base_dtype(config)}.")
    if config.kernels == "liger" or config.loss == "chunked":
        found.append("Liger's code (pip install liger-kernel) does nothing for a model that it does not know.")
    if config.loss == "chunked":
        found.append("loss chunked: by Liger's fused head and loss; its peak is another.")
    if config.offloads:
        found.append("checkpointing offload: by use_unsloth_gc, which needs no Unsloth; its speed is another.")
    return found


def inexpressible(recipe: Recipe) -> list[str]:
    """Knobs of the winner that LLaMA-Factory cannot be told, each with what happens instead."""
    config = recipe.winner.config
    found = []
    if config.method == "lora" and config.precision == "bf16_pure":
        found.append("precision bf16_pure: PEFT makes the adapters fp32 there, they were measured in bf16")
    if config.method == "lora" and config.precision in ("fp16_mixed", "fp32"):
        found.append(
            f"precision {config.precision}: the base has the dtype of its checkpoint there, mostly bfloat16, and"
            f" not {base_dtype(config)}"
        )
    if (config.checkpoint_every or 1) > 1:
        found.append(
            f"checkpointing {config.checkpointing}: it is every layer or none; written as every layer, which is slower"
            " and takes less memory"
        )
    if config.compile == "per_layer":
        rows = (
            "" if config.packing else "; rows of another length are compiled anew, or for any length, which is slower"
        )
        found.append(
            "compile per_layer: torch_compile with ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION compiles the layers,"
            f" and the embedding, norm and LM head besides{rows}"
        )
    if config.quantization == "fp8":
        found.append(
            "quantization fp8: LLaMA-Factory's fp8 converts the adapters too and was not probed; written unquantised,"
            " which is slower"
        )
    if config.attention not in ("sdpa", "eager") and _attention(config) == "sdpa":
        found.append(f"attention {config.attention}: written as sdpa, of which torch chooses the kernel")
    return found


def _attention(config: TrainConfig) -> str:
    if config.packing and config.micro_batch_size > 1 and config.attention == "flash_attention_2":
        return "sdpa"  # it refuses fa2 with more than one packed row
    return ATTENTIONS.get(config.attention, "sdpa")


def _model(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    values: dict[str, Any] = {"model_name_or_path": model_source(recipe), "flash_attn": _attention(config)}
    if config.quantization in ("nf4", "int8"):
        values |= {"quantization_method": "bnb", "quantization_bit": 4 if config.quantization == "nf4" else 8}
    if config.quantization == "nf4":
        values |= {"quantization_type": "nf4", "double_quantization": config.double_quant}
    return values


def _method(config: TrainConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"stage": "sft", "do_train": True, "finetuning_type": config.method}
    if config.method == "full":
        return values
    return values | {
        "lora_rank": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "use_dora": config.dora,
        "use_rslora": config.rslora,
    }


def _batch(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    return {
        "cutoff_len": config.seq_len,
        "packing": config.packing,
        "neat_packing": config.packing,  # without it, examples that share a row see each other
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation,
        "dataloader_drop_last": True,
        "dataloader_num_workers": config.loader_workers,
    }


def _memory(config: TrainConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "bf16": config.precision == "bf16_mixed",
        "fp16": config.precision == "fp16_mixed",
        "pure_bf16": config.precision == "bf16_pure",
        "upcast_layernorm": False,
        "upcast_lmhead_output": False,
        # It checkpoints unless it is told not to; what transformers calls gradient_checkpointing says nothing there.
        "disable_gradient_checkpointing": config.checkpointing == "none",
        "use_reentrant_gc": False,
        "use_unsloth_gc": config.offloads,
    }
    if config.kernels == "liger" or config.loss == "chunked":
        # Not by its own enable_liger_kernel, which takes kernels and loss together.
        layers = dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), config.kernels == "liger")
        loss = {"fused_linear_cross_entropy": config.loss == "chunked"}
        values |= {"use_liger_kernel": True, "liger_kernel_config": layers | LIGER | loss}
    return values | {"optim": config.optimizer, "torch_compile": config.compile == "per_layer", "tf32": False}


def _schedule(recipe: Recipe) -> dict[str, Any]:
    return {
        "learning_rate": learning_rate(recipe.winner.config),
        "lr_scheduler_type": "cosine",
        "warmup_steps": warmup_steps(recipe),
        "num_train_epochs": recipe.workload.epochs,
        "max_grad_norm": 1.0,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": save_steps(recipe),
        "output_dir": "out",
    }

"""trl_sft.yaml: what `trl sft --config` takes (keys of TRL 1.16), and what that format cannot say."""

from typing import Any

from autotune.core.train_config import checkpoints_some
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


def export(recipe: Recipe) -> dict[str, str]:
    """`trl_sft.yaml`, with the command to run it in its head."""
    head = [
        *facts(recipe),
        "",
        "Run it, on one GPU, as it was measured:",
        f"  {command(recipe)}",
        "",
        "Known to differ from what was measured:",
        *(f"- {item}" for item in _differences(recipe)),
        *(f"not expressed: {item}" for item in inexpressible(recipe)),
    ]
    config = recipe.winner.config
    sections: list[tuple[str, dict[str, Any]]] = [
        ("" if has_published_weights(recipe) else "no published weights: name your model here", _model(recipe)),
        ("your data, by Hub name or local directory", {"dataset_name": "your/dataset"}),
        ("" if config.method == "full" else "adapters on every linear layer but the LM head", _adapters(recipe)),
        ("", _batch(recipe)),
        ("every_n_layers needs transformers 5.23" if _every_n_layers(recipe) else "", _memory(recipe)),
        ("the learning rate is a common default and was not tuned", _schedule(recipe)),
    ]
    return {"trl_sft.yaml": sectioned(head, sections)}


def _differences(recipe: Recipe) -> list[str]:
    """Whatever the configuration."""
    rows = "TRL pads to the longest row of a batch (to max_length where pad_to_multiple_of says so); the probe had"
    if recipe.trainer == "trl":
        return [f"{rows} rows of max_length."]
    return [
        "The speed is that of train.py, whose loop (lean.py) leaves out milliseconds of the host's a micro batch.",
        f"{rows} every row padded to max_length, and no mask.",
    ]


def command(recipe: Recipe) -> str:
    """The command line. `trl sft` hands arguments that it does not know to `accelerate launch`."""
    return f"{ENVIRONMENT} trl sft --config trl_sft.yaml {' '.join(launch(recipe))}"


def launch(recipe: Recipe) -> list[str]:
    """What of the command is for `accelerate launch`."""
    # It overwrites ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION, so that only its own flag has an effect.
    regional = ["--dynamo_use_regional_compilation"] if recipe.winner.config.compile == "per_layer" else []
    return ["--num_processes", "1", *regional]


def inexpressible(recipe: Recipe) -> list[str]:
    """Knobs of the winner that `trl sft` cannot be told, each with what happens instead."""
    config = recipe.winner.config
    stored = config.quantization in ("int8", "nf4")  # in fewer bits
    found = []
    if (config.checkpoint_every or 1) > 1 and not _every_n_layers(recipe):
        found.append(
            f"checkpointing {config.checkpointing}: before transformers 5.23 it is every layer or none;"
            " written as every layer, which is slower and takes less memory"
        )
    if config.compile == "per_layer":
        found.append(
            "compile per_layer: torch_compile with --dynamo_use_regional_compilation compiles the layers, and the"
            " embedding, norm and LM head besides"
        )
    if recipe.trainer == "trl":  # all else was probed as TRL does it
        return found
    if config.method == "lora" and not stored and config.precision == "bf16_pure":
        found.append("precision bf16_pure: TRL keeps the adapters in fp32, they were measured in bf16")
    if stored and config.precision != "bf16_pure":
        found.append(
            f"precision {config.precision}: TRL casts the adapters of a quantized base to bf16,"
            " they were measured in fp32"
        )
    if config.quantization == "fp8":
        found.append("quantization fp8: TRL has no fp8 base; written unquantised, which is slower")
    if config.attention == "sdpa_cudnn":
        found.append("attention sdpa_cudnn: written as sdpa, of which torch chooses the kernel")
    if config.offloads and not _checkpoints_some(recipe):
        found.append(
            "checkpointing offload: before transformers 5.23 nothing is offloaded; written as full, which needs more"
            " of the GPU's memory"
        )
    if config.loss == "full":
        found.append("loss full: TRL has its own chunked LM head, with a lower peak and another speed")
    if config.packing:
        found.append(
            "packing: TRL fills rows in the same way, but lays a micro batch out as one without padding; without a"
            " flash attention kernel its mask is larger than the one that was measured"
        )
    return found


def _checkpoints_some(recipe: Recipe) -> bool:
    return checkpoints_some(recipe.fingerprint.packages.get("transformers", ""))


def _every_n_layers(recipe: Recipe) -> bool:
    """Whether only some layers are checkpointed and the versions probed with can say so."""
    return (recipe.winner.config.checkpoint_every or 1) > 1 and _checkpoints_some(recipe)


def _model(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    values: dict[str, Any] = {
        "model_name_or_path": model_source(recipe),
        "dtype": base_dtype(config),
        "attn_implementation": "sdpa" if config.attention == "sdpa_cudnn" else config.attention,
    }
    if config.quantization == "nf4":
        values |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": config.double_quant,
        }
    elif config.quantization == "int8":
        values["load_in_8bit"] = True
    return values


def _adapters(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    if config.method == "full":
        return {"use_peft": False}
    return {
        "use_peft": True,
        "lora_r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "lora_target_modules": ["all-linear"],
        "use_dora": config.dora,
        "use_rslora": config.rslora,
    }


def _batch(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    values: dict[str, Any] = {
        "max_length": config.seq_len,
        "packing": config.packing,
        **({"packing_strategy": "bfd"} if config.packing else {}),
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation,
        "dataloader_drop_last": True,
        "dataloader_num_workers": config.loader_workers,
    }
    if config.compile == "per_layer":
        # Rows of one length, or each length would be compiled anew; packed ones become a single row.
        values["pad_to_multiple_of"] = config.tokens if config.packing else config.seq_len
    return values


def _memory(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    every = config.checkpoint_every
    values: dict[str, Any] = {
        "bf16": config.precision == "bf16_mixed",
        "fp16": config.precision == "fp16_mixed",
        # TRL checkpoints unless it is told not to. The name before 5.23, which later versions take until v6.
        "gradient_checkpointing": every is not None,
    }
    if every is not None:
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        if _every_n_layers(recipe):
            values["gradient_checkpointing_kwargs"]["every_n_layers"] = every
        if config.offloads and _checkpoints_some(recipe):
            values["gradient_checkpointing_kwargs"]["offload"] = True
    if config.kernels == "liger":
        values |= {"use_liger_kernel": True, "liger_kernel_config": LIGER}
    values |= {"optim": config.optimizer, "torch_compile": config.compile == "per_layer"}
    if config.compile == "per_layer":
        values["tf32"] = False  # torch_compile would switch it on
    return values


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

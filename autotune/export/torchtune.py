"""torchtune.yaml: what `tune run` takes (recipes of torchtune 0.6.1 for one GPU), and what that cannot say."""

import shlex
from typing import Any

from autotune.core.train_config import TrainConfig
from autotune.export import torchtune_models
from autotune.export.header import ENVIRONMENT, facts, has_published_weights, learning_rate, sectioned, warmup_steps
from autotune.study.summary import Recipe

VERSION = "0.6.1"  # whose components and recipes these are; its development has ended
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_torch_fused": {"_component_": "torch.optim.AdamW", "fused": True},
    "adamw_torch": {"_component_": "torch.optim.AdamW", "fused": False},
    "adamw_8bit": {"_component_": "bitsandbytes.optim.AdamW8bit"},
    "paged_adamw_8bit": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"},
    "lion_8bit": {"_component_": "bitsandbytes.optim.Lion8bit", "betas": [0.9, 0.999]},
    "adafactor": {
        "_component_": "transformers.optimization.Adafactor",
        "scale_parameter": False,
        "relative_step": False,
    },
}


def export(recipe: Recipe) -> dict[str, str]:
    """`torchtune.yaml`, with the commands to run it in its head."""
    head = [
        *facts(recipe),
        "",
        *_warning(recipe),
        "Run it in this directory, on one GPU, with the allocator as it was measured:",
        *(f"  {line}" for line in commands(recipe)),
        "",
        "The speed of torchtune was not measured: it has its own loop and its own code of the models. Known to differ:",
        *(f"- {item}" for item in _differences(recipe)),
        *(f"not expressed: {item}" for item in inexpressible(recipe)),
    ]
    data = "your data, by Hub name, in the messages of its column; of a file, source: json and data_files: data.jsonl"
    weights = "every file of weights in that directory, by name"
    if not has_published_weights(recipe):
        weights = f"no published weights: put a model of yours there; {weights}"
    tokenizer = torchtune_models.tokenizer(recipe, _directory(recipe))
    sections: list[tuple[str, dict[str, Any]]] = [
        ("", {"model": torchtune_models.builder(recipe) | _adapters(recipe.winner.config)}),
        ("", {"tokenizer": tokenizer | {"max_seq_len": recipe.winner.config.seq_len}}),
        (weights, {"checkpointer": _checkpointer(recipe)}),
        (data, {"dataset": _dataset(recipe), "shuffle": True, "seed": 42}),
        ("", _batch(recipe)),
        ("", _memory(recipe.winner.config)),
        ("the learning rate is a common default and was not tuned", _schedule(recipe)),
    ]
    return {"torchtune.yaml": sectioned(head, sections)}


def commands(recipe: Recipe) -> list[str]:
    """What fetches the weights, where there are any to fetch, and what trains."""
    found = []
    if has_published_weights(recipe) and recipe.model.weights is None:
        found.append(f"tune download {shlex.quote(recipe.model.name)} --output-dir model")
    method = recipe.winner.config.method
    return [*found, f"{ENVIRONMENT} tune run {method}_finetune_single_device --config torchtune.yaml"]


def inexpressible(recipe: Recipe) -> list[str]:
    """Knobs of the winner that torchtune cannot be told, each with what happens instead."""
    config = recipe.winner.config
    found = []
    if config.precision == "bf16_mixed":
        trained = "adapters and their state" if config.method == "lora" else "weights, gradients and state"
        found.append(
            f"precision bf16_mixed: torchtune has no autocast; written as bf16 throughout, {trained} too, which takes"
            " less memory and learns otherwise"
        )
    if config.precision == "fp16_mixed":
        found.append(
            "precision fp16_mixed: torchtune refuses fp16; written as fp32, which is slower and takes more memory"
        )
    if config.quantization in ("fp8", "int8"):
        more = "takes more memory" if config.quantization == "int8" else "is slower"
        found.append(
            f"quantization {config.quantization}: torchtune knows nf4 alone; written unquantised, which {more}"
        )
    if config.quantization == "nf4" and not config.double_quant:
        found.append("double_quant false: torchtune always quantises the scales too, which takes less memory")
    if (config.checkpoint_every or 1) > 1:
        found.append(
            f"checkpointing {config.checkpointing}: it is every layer or none; written as every layer, which is slower"
            " and takes less memory"
        )
    if config.attention != _attention(config):
        found.append(f"attention {config.attention}: torchtune chooses it by itself, here {_attention(config)}")
    if config.compile == "per_layer" and not config.packing:
        found.append(
            "compile per_layer: the layers are compiled, and the loss; rows of another length are compiled anew, or for"
            " any length, which is slower"
        )
    if config.loss == "chunked":
        found.append(
            "loss chunked: CEWithChunkedOutputLoss makes fp32 logits chunk by chunk, and holds all those of the"
            " model's dtype, which takes more memory"
        )
    if config.kernels == "liger":
        found.append("kernels liger: torchtune has its own modules and no others")
    if config.loader_workers:
        found.append(f"loader_workers {config.loader_workers}: the process that trains makes batches by itself")
    return found


def _warning(recipe: Recipe) -> list[str]:
    told = torchtune_models.obstacle(recipe)
    if not told:
        return []
    return [
        f"INCOMPLETE: torchtune {VERSION} cannot make this model: {told}.",
        "Write the _component_ of one of yours, with its sizes, under model, and a tokenizer and model_type below.",
        "",
    ]


def _differences(recipe: Recipe) -> list[str]:
    """What another program does another way, though the file says all it can."""
    config = recipe.winner.config
    probed = "TRL's SFTTrainer" if recipe.trainer == "trl" else "train.py, whose loop (lean.py) is quick"
    found = [
        f"The speed above is that of {probed}.",
        f"torchtune {VERSION} is the last, and needs an older torchao: 0.9 has what it imports, 0.18 has not.",
    ]
    if config.packing:
        found.append("It packs the examples in their order, before it begins: rows may be less full.")
    else:
        found.append("It pads to the longest row of a micro batch; the probe had rows of max_seq_len.")
    if config.compile == "per_layer" and config.packing:
        found.append("compile compiles the loss besides the layers.")
    if config.quantization == "nf4":
        found.append("The nf4 of the base is torchao's and not that of bitsandbytes; its speed is another.")
    if config.rslora:
        found.append("rslora: it divides by the rank, so that lora_alpha is written for the same scale.")
    if config.method == "full" and config.optimizer in ("adamw_8bit", "paged_adamw_8bit", "lion_8bit"):
        found.append("The optimizer has the embedding's state in 8 bits too; it was measured in 32.")
    if config.optimizer == "adafactor":
        found.append("optimizer: that of transformers, which torchtune does not bring along.")
    elif OPTIMIZERS[config.optimizer]["_component_"].startswith("bitsandbytes"):
        found.append("optimizer: that of bitsandbytes, which torchtune does not bring along.")
    if config.offloads:
        found.append("checkpointing offload: by torchtune's own hooks; its speed is another.")
    if torchtune_models.leaves_out_window(recipe):
        found.append("The model's sliding window is left out: a token looks back over its whole row.")
    if recipe.model.config["model_type"] == "phi3" and config.method == "lora":
        found.append("Adapters are on query, key, value, gate and up apart; they were measured on the fused layers.")
    return [
        *found,
        "It saves at the end of an epoch alone, merged weights too: a run that is stopped begins its epoch anew.",
    ]


def _attention(config: TrainConfig) -> str:
    """What torchtune takes: flex_attention for the mask of packed rows."""
    return "flex_attention" if config.packing else "sdpa"


def _directory(recipe: Recipe) -> str:
    """Where the weights are to be. OmegaConf would fill in what stands in ${...}: such a path is not written."""
    weights = recipe.model.weights
    return weights if weights and "${" not in weights else "model"


def _adapters(config: TrainConfig) -> dict[str, Any]:
    """On every linear layer but the LM head."""
    if config.method == "full" or config.lora_rank is None or config.lora_alpha is None:
        return {}
    scale = config.lora_alpha / (config.lora_rank**0.5 if config.rslora else config.lora_rank)
    return {
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": config.lora_rank,
        "lora_alpha": scale * config.lora_rank,  # it divides by the rank
        "lora_dropout": 0.0,
        "use_dora": config.dora,
        "quantize_base": config.quantization == "nf4",
    }


def _checkpointer(recipe: Recipe) -> dict[str, Any]:
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": _directory(recipe),
        "checkpoint_files": ["model.safetensors"],
        "output_dir": "out",
        **torchtune_models.checkpoint(recipe),
    }


def _dataset(recipe: Recipe) -> dict[str, Any]:
    return {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "your/dataset",
        "conversation_column": "messages",
        "conversation_style": "openai",
        "packed": recipe.winner.config.packing,
    }


def _batch(recipe: Recipe) -> dict[str, Any]:
    return {
        "batch_size": recipe.winner.config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation,
        "epochs": recipe.workload.epochs,
        "max_steps_per_epoch": None,
    }


def _memory(config: TrainConfig) -> dict[str, Any]:
    chunked = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bf16" if config.precision.startswith("bf16") else "fp32",
        "enable_activation_checkpointing": config.checkpointing != "none",
        "enable_activation_offloading": config.offloads,
        "compile": config.compile == "per_layer",
        "loss": chunked if config.loss == "chunked" else {"_component_": "torch.nn.CrossEntropyLoss"},
    }
    return values | ({"optimizer_in_bwd": False} if config.method == "full" else {})


def _schedule(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    values: dict[str, Any] = {
        "optimizer": OPTIMIZERS[config.optimizer] | {"lr": learning_rate(config), "weight_decay": 0.0},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": warmup_steps(recipe),
        },
        "clip_grad_norm": 1.0,
        "output_dir": "out",
        "resume_from_checkpoint": False,
    }
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "out/logs"}
    return values | {"metric_logger": logger, "log_every_n_steps": 10, "log_peak_memory_stats": True}

"""axolotl.yaml: what `axolotl train` takes (keys of Axolotl 0.19), and what that format cannot say."""

from typing import Any

from autotune.core.train_config import TrainConfig
from autotune.export.header import (
    ENVIRONMENT,
    facts,
    has_published_weights,
    learning_rate,
    model_source,
    save_steps,
    sectioned,
    warmup_steps,
)
from autotune.study.summary import Recipe

VERSION, TRANSFORMERS = "0.19", "5.16.1"  # whose keys these are, and which transformers it pins
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def export(recipe: Recipe) -> dict[str, str]:
    """`axolotl.yaml`, with the command to run it in its head."""
    head = [
        *facts(recipe),
        "",
        "Run it, on one GPU, with the allocator as it was measured:",
        f"  {command(recipe)}",
        "",
        "What is measured holds for the trainer that was probed. Known to differ here:",
        *(f"- {item}" for item in _differences(recipe)),
        *(f"not expressed: {item}" for item in inexpressible(recipe)),
    ]
    data = "your data, by Hub name or local path; a tokenizer without a padding token needs special_tokens: pad_token"
    sections: list[tuple[str, dict[str, Any]]] = [
        ("" if has_published_weights(recipe) else "no published weights: name your model here", _model(recipe)),
        (data, {"datasets": [{"path": "your/dataset", "type": "chat_template"}]}),
        ("adapters on every linear layer but the LM head", _adapters(recipe.winner.config)),
        ("", _batch(recipe)),
        ("", _memory(recipe.winner.config)),
        ("the learning rate is a common default and was not tuned", _schedule(recipe)),
    ]
    return {"axolotl.yaml": sectioned(head, sections)}


def command(recipe: Recipe) -> str:
    """The command line. What follows `--` goes to `accelerate launch`."""
    regional = " --dynamo_use_regional_compilation" if recipe.winner.config.compile == "per_layer" else ""
    return f"{ENVIRONMENT} axolotl train axolotl.yaml -- --num_processes 1{regional}"


def _differences(recipe: Recipe) -> list[str]:
    """What another program does another way, though the file says all it can."""
    config = recipe.winner.config
    probed = recipe.fingerprint.packages.get("transformers", "another version")
    found = [f"Axolotl {VERSION} has transformers {TRANSFORMERS}; measured was {probed}."]
    if recipe.trainer == "trl":
        found.append("The speed is that of TRL's SFTTrainer, with its own loss, rows and dtypes of adapters.")
    else:
        found.append("The speed is that of train.py, whose loop (lean.py) leaves out milliseconds a micro batch.")
    if config.packing:
        found.append("Axolotl packs a random order of the examples by a rule of its own: rows are about as full.")
        if _attention(config) == "sdpa":
            found.append("sdpa_varlen, which it chooses by itself, is off as in the probe; on, it may be faster.")
    else:
        found.append("A row with padding brings a mask along; the probe had rows padded in the same way, and no mask.")
    if config.method == "lora":
        found.append("Its LoRA kernels, which it switches on by itself, are off as in the probe; they may be faster.")
    if config.kernels == "liger":
        found.append("kernels liger: by Axolotl's plugin, where that knows the model.")
    if config.loss == "chunked":
        found.append("loss chunked: by Liger's fused head and loss, where that knows the model; its peak is another.")
    if config.offloads:
        found.append("checkpointing offload: by Axolotl's own hooks; its speed is another.")
    return found


def inexpressible(recipe: Recipe) -> list[str]:
    """Knobs of the winner that Axolotl cannot be told, each with what happens instead."""
    config = recipe.winner.config
    found = [*_precision(config)]
    if (config.checkpoint_every or 1) > 1:
        found.append(
            f"checkpointing {config.checkpointing}: it is every layer or none; written as every layer, which is slower"
            " and takes less memory"
        )
    if config.compile == "per_layer":
        found.append(
            "compile per_layer: torch_compile with --dynamo_use_regional_compilation compiles the layers, and the"
            " embedding, norm and LM head besides; what cannot be compiled runs as it is, without an error"
        )
    if config.quantization == "fp8":
        found.append(
            "quantization fp8: Axolotl's fp8 converts the adapters too and was not probed; written unquantised,"
            " which is slower"
        )
    if config.attention == "sdpa_cudnn":
        found.append("attention sdpa_cudnn: written as sdpa, of which torch chooses the kernel")
    if config.packing and _attention(config) not in ("sdpa", "eager"):
        found.append(f"packing: with {config.attention} Axolotl lays a micro batch out as one row, which is filled")
    return found


def _precision(config: TrainConfig) -> list[str]:
    """Axolotl loads the weights in the dtype that it computes in, and has autocast with every one but fp32."""
    if config.method == "full" and config.precision == "bf16_mixed":
        return [
            "precision bf16_mixed: Axolotl trains the weights themselves in bf16, they were measured in fp32; written"
            " so, which takes less memory and learns otherwise"
        ]
    if config.method == "full" and config.precision == "fp16_mixed":
        return [
            "precision fp16_mixed: Axolotl loads the weights themselves in fp16, which no gradient scaler takes;"
            " written as fp32, which is slower and takes more memory"
        ]
    if config.precision == "bf16_pure":
        told = "precision bf16_pure: Axolotl computes under autocast where weights are in bf16"
        if config.method == "full" and _attention(config) in ("sdpa", "eager"):
            told += ", and keeps norms, embedding and LM head in fp32, which takes more memory"
        if config.quantization == "int8":
            told += ", and adapters on an int8 base stay in fp32"
        return [told]
    if config.precision == "fp32" and config.quantization == "int8":
        return ["precision fp32: Axolotl has what is not quantised of an int8 base in fp16"]
    return []


def _attention(config: TrainConfig) -> str:
    return "sdpa" if config.attention == "sdpa_cudnn" else config.attention


def _model(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    values: dict[str, Any] = {"base_model": model_source(recipe), "attn_implementation": _attention(config)}
    if config.quantization == "nf4":
        kwargs = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": config.double_quant}
        values |= {"load_in_4bit": True, "bnb_config_kwargs": kwargs}
    elif config.quantization == "int8":
        values["load_in_8bit"] = True
    return values


def _adapters(config: TrainConfig) -> dict[str, Any]:
    if config.method == "full":
        return {}
    return {
        "adapter": "qlora" if config.quantization == "nf4" else "lora",  # with lora, load_in_4bit does nothing
        "lora_r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "lora_target_linear": True,
        "peft_use_dora": config.dora,
        "peft_use_rslora": config.rslora,
        "peft_autocast_adapter_dtype": config.precision != "bf16_pure",  # whether adapters are made fp32
        **dict.fromkeys(LORA_KERNELS, False),
    }


def _batch(recipe: Recipe) -> dict[str, Any]:
    config = recipe.winner.config
    values: dict[str, Any] = {
        "sequence_len": config.seq_len,
        "excess_length_strategy": "truncate",  # it would drop what is longer
        "sample_packing": config.packing,
        "pad_to_sequence_len": True,
    }
    if config.seq_len % 64:  # to whose multiples it pads
        values["pad_to_multiple_of"] = config.seq_len
    if config.packing and _attention(config) == "sdpa":
        values["sdpa_varlen"] = False
    return values | {
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation,
        "dataloader_drop_last": True,
        "dataloader_num_workers": config.loader_workers,  # left out, it is one for each GPU
        "dataloader_pin_memory": True,
    }


def _memory(config: TrainConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "bf16": config.precision in ("bf16_mixed", "bf16_pure"),
        "fp16": config.precision == "fp16_mixed" and config.method == "lora",
        "tf32": False,  # auto, its default, is true
        "gradient_checkpointing": config.checkpointing != "none",
    }
    if config.checkpointing != "none":
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if config.offloads:  # true would offload everything and recompute nothing
        values["activation_offloading"] = "hidden_states"
    if config.kernels == "liger" or config.loss == "chunked":
        values["plugins"] = ["axolotl.integrations.liger.LigerPlugin"]
        layers = ("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation")
        values |= dict.fromkeys(layers, config.kernels == "liger")
        values |= {"liger_cross_entropy": False, "liger_fused_linear_cross_entropy": config.loss == "chunked"}
    return values | {"optimizer": config.optimizer, "torch_compile": config.compile == "per_layer"}


def _schedule(recipe: Recipe) -> dict[str, Any]:
    return {
        "learning_rate": learning_rate(recipe.winner.config),
        "lr_scheduler": "cosine",
        "warmup_steps": warmup_steps(recipe),
        "num_epochs": recipe.workload.epochs,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "logging_steps": 10,
        "include_tkps": False,  # it would wait for the device in every micro batch
        "save_steps": save_steps(recipe),
        "output_dir": "out",
    }

"""The key table: how TRL, Axolotl, LLaMA-Factory and torchtune write each knob and each setting of a run.

The exporters write their files from it, and `planning.foreign_config` reads other people's files by it. A new knob
needs a row in TABLE for the tools that can express it. Where a tool cannot, its file says so, with the reason from GAPS
or ABSENT; a knob that is in none of them is named as one that the tool has no key for.

Keys are those of TRL 1.16 (which takes transformers' TrainingArguments), Axolotl 0.19, LLaMA-Factory 0.9.5 and
torchtune 0.6.1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.train_config import TrainConfig, checkpoints_some
from autotune.export.header import model_source, save_steps, warmup_steps
from autotune.probe.runtime.settings import LIGER_KERNELS
from autotune.study.summary import Recipe

TOOLS = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory", "torchtune": "torchtune"}
SAME = "(same)"  # as a cell: the cell of TRL; as a value of a Key: our own value

Entries = dict[str, Any]  # a tool's keys with their values; a dot in a key stands for a mapping inside a mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a tool, and its value for each of ours; `other` is the value for all that `values` leaves out.

    A value of None leaves the key out of the file.
    """

    name: str
    values: Mapping[Any, Any]
    other: Any = SAME

    def entries(self, value: Any) -> Entries:
        """The key with the tool's value for our `value`."""
        theirs = self.values.get(value, self.other)
        if theirs is None:
            return {}
        return {self.name: value if theirs is SAME else theirs}


Cell = Key | Entries | Callable[[Recipe], Entries]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How each tool writes one knob, or one of SETTINGS; `what` is "" for keys whose value is always the same.

    A tool's cell is a Key, fixed entries, or a function for what depends on more than one knob. `defaults` are the
    values that a tool assumes when a file leaves the key out.
    """

    what: str
    cells: dict[str, Cell]
    defaults: dict[str, Any]

    def entries(self, tool: str, values: Mapping[str, Any], recipe: Recipe) -> Entries:
        """What the tool writes; nothing for a knob that has no effect in this configuration."""
        cell = self.cells.get(tool)
        if cell is None or (self.what and values.get(self.what) is None):
            return {}
        if isinstance(cell, Key):
            return cell.entries(values[self.what])
        return cell if isinstance(cell, dict) else cell(recipe)


# What the tools are given besides the knobs; None where it has no effect.
SETTINGS: dict[str, Callable[[Recipe], Any]] = {
    "model": model_source,
    "base_dtype": lambda recipe: recipe.winner.config.base_dtype,
    "lora_alpha": lambda recipe: recipe.winner.config.lora_alpha,
    "accumulation": lambda recipe: recipe.accumulation,
    "learning_rate": lambda recipe: recipe.winner.config.learning_rate,
    "warmup_steps": warmup_steps,
    "epochs": lambda recipe: recipe.workload.epochs,
    "save_steps": save_steps,
}


# --- cells that depend on more than one knob


def attention_of(tool: str, config: TrainConfig) -> str:
    """The attention that the tool uses for this configuration, by the tool's own name."""
    if tool == "torchtune":
        return "flex_attention" if config.packing else "sdpa"  # flex_attention for the mask of packed rows
    if tool != "llamafactory":
        return "sdpa" if config.attention == "sdpa_cudnn" else config.attention
    if config.attention == "eager":
        return "disabled"
    # It refuses flash attention with more than one packed row.
    can_flash = config.attention == "flash_attention_2" and not (config.packing and config.micro_batch_size > 1)
    return "fa2" if can_flash else "sdpa"


def _llamafactory_attention(recipe: Recipe) -> Entries:
    return {"flash_attn": attention_of("llamafactory", recipe.winner.config)}


def checkpoints_by_layer(recipe: Recipe) -> bool:
    """Whether the probed transformers can recompute only some layers, and offload what it recomputes from."""
    return checkpoints_some(recipe.fingerprint.packages.get("transformers", ""))


def _skips_layers(recipe: Recipe) -> bool:
    return (recipe.winner.config.checkpoint_every or 1) > 1


def _uses_liger(config: TrainConfig) -> bool:
    """Whether Axolotl and LLaMA-Factory need Liger, which brings them both the kernels and the fused loss."""
    return config.kernels == "liger" or config.loss == "chunked"


def _trl_checkpointing(recipe: Recipe) -> Entries:
    config = recipe.winner.config
    entries: Entries = {}
    if _skips_layers(recipe) and checkpoints_by_layer(recipe):
        entries["gradient_checkpointing_kwargs.every_n_layers"] = config.checkpoint_every
    if config.offloads and checkpoints_by_layer(recipe):
        entries["gradient_checkpointing_kwargs.offload"] = True
    return entries


def _trl_row_length(recipe: Recipe) -> Entries:
    config = recipe.winner.config
    if config.compile == "none":
        return {}
    # All rows need one length, since each length is compiled anew. Packed rows become a single row.
    return {"pad_to_multiple_of": config.tokens if config.packing else config.seq_len}


def _trl_packing(recipe: Recipe) -> Entries:
    return {"packing_strategy": "bfd"} if recipe.winner.config.packing else {}


def _axolotl_rows(recipe: Recipe) -> Entries:
    config = recipe.winner.config
    entries: Entries = {"pad_to_sequence_len": True}
    if config.seq_len % 64:  # it pads to multiples of 64
        entries["pad_to_multiple_of"] = config.seq_len
    if config.packing and attention_of("axolotl", config) == "sdpa":
        entries["sdpa_varlen"] = False
    return entries


def _axolotl_adapter(recipe: Recipe) -> Entries:
    config = recipe.winner.config
    if config.method == "full":
        return {}
    return {"adapter": "qlora" if config.quantization == "nf4" else "lora"}  # with lora, load_in_4bit does nothing


def _axolotl_lora_defaults(recipe: Recipe) -> Entries:
    kernels = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")  # on by default
    makes_fp32 = recipe.winner.config.precision != "bf16_pure"
    return {"peft_autocast_adapter_dtype": makes_fp32, **dict.fromkeys(kernels, False)}


def _axolotl_fp16(recipe: Recipe) -> Entries:
    return {"fp16": recipe.winner.config.precision == "fp16_mixed" and recipe.winner.config.method == "lora"}


def _axolotl_liger(recipe: Recipe) -> Entries:
    config = recipe.winner.config
    if not _uses_liger(config):
        return {}
    layers = ("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation")
    return {
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        **dict.fromkeys(layers, config.kernels == "liger"),
        "liger_cross_entropy": False,
        "liger_fused_linear_cross_entropy": config.loss == "chunked",
    }


def _llamafactory_liger(recipe: Recipe) -> Entries:
    config = recipe.winner.config
    if not _uses_liger(config):
        return {}
    # Not by its own enable_liger_kernel, which switches kernels and loss together.
    layers = dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), config.kernels == "liger")
    loss = {"fused_linear_cross_entropy": config.loss == "chunked"}
    return {"use_liger_kernel": True, "liger_kernel_config": layers | LIGER_KERNELS | loss}


def _torchtune_alpha(recipe: Recipe) -> Entries:
    config = recipe.winner.config
    if config.lora_rank is None or config.lora_alpha is None:
        return {}
    scale = config.lora_alpha / (config.lora_rank**0.5 if config.rslora else config.lora_rank)
    return {"lora_alpha": scale * config.lora_rank}  # torchtune divides by the rank


# --- the table


def _key(name: str, other: Any = None, /, **values: Any) -> Key:
    """A key with the tool's value for each of ours, and for all others `other`: by default it is left out then."""
    return Key(name=name, values=values, other=other)


def _row(
    what: str,
    trl: Cell | str | None,
    axolotl: Cell | str | None = None,
    llamafactory: Cell | str | None = None,
    torchtune: Cell | str | None = None,
    *,
    defaults: tuple[Any, ...] = (),
) -> Row:
    """A row whose cells may also be the name of a key that takes our own value, or SAME.

    `defaults` has one value for each of TRL, Axolotl and LLaMA-Factory.
    """
    cells: dict[str, Cell] = {}
    for tool, written in zip(TOOLS, (trl, axolotl, llamafactory, torchtune), strict=True):
        cell = trl if written == SAME else written
        if cell is not None:
            cells[tool] = _key(cell, SAME) if isinstance(cell, str) else cell
    return Row(what=what, cells=cells, defaults=dict(zip(TOOLS, defaults, strict=False)))


_HF_BATCH = "per_device_train_batch_size"
_AXOLOTL_DATA = {"datasets": [{"path": "your/dataset", "type": "chat_template"}]}
_AXOLOTL_NF4 = "bnb_config_kwargs.bnb_4bit_quant_type"
_AXOLOTL_NESTED = "bnb_config_kwargs.bnb_4bit_use_double_quant"
_HF_LOGS = {"logging_nan_inf_filter": False, "report_to": "none", "save_strategy": "steps"}
_HF_REENTRANT = _key("gradient_checkpointing_kwargs.use_reentrant", False, none=None)
_HF_RECOMPUTES = _key("gradient_checkpointing", True, none=False)
_TUNE_RECOMPUTES = _key("enable_activation_checkpointing", True, none=False)
_LLAMAFACTORY_TARGET = {"lora_target": "all"}
_TUNE_LORA = {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}
_TUNE_LOSS = _key(
    "loss",
    {"_component_": "torch.nn.CrossEntropyLoss"},
    chunked={"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
)
_TUNE_DATA = {
    "dataset._component_": "torchtune.datasets.chat_dataset",
    "dataset.source": "your/dataset",
    "dataset.conversation_column": "messages",
    "dataset.conversation_style": "openai",
}
_TUNE_SCHEDULER = {
    "optimizer.weight_decay": 0.0,
    "lr_scheduler._component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
}
_TUNE_LOGS = {
    "resume_from_checkpoint": False,
    "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
    "metric_logger.log_dir": "out/logs",
    "log_every_n_steps": 10,
    "log_peak_memory_stats": True,
}
_ADAFACTOR = {"_component_": "transformers.optimization.Adafactor", "scale_parameter": False, "relative_step": False}
TORCHTUNE_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_torch_fused": {"_component_": "torch.optim.AdamW", "fused": True},
    "adamw_torch": {"_component_": "torch.optim.AdamW", "fused": False},
    "adamw_8bit": {"_component_": "bitsandbytes.optim.AdamW8bit"},
    "paged_adamw_8bit": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"},
    "lion_8bit": {"_component_": "bitsandbytes.optim.Lion8bit", "betas": [0.9, 0.999]},
    "adafactor": _ADAFACTOR,
}

# By section of a file, in the order in which the keys are written. Columns: TRL, Axolotl, LLaMA-Factory, torchtune.
TABLE: dict[str, tuple[Row, ...]] = {
    "model": (
        _row("model", "model_name_or_path", "base_model", SAME),
        _row("base_dtype", "dtype"),
        _row("attention", _key("attn_implementation", SAME, sdpa_cudnn="sdpa"), SAME, _llamafactory_attention),
        _row("quantization", _key("load_in_4bit", nf4=True), SAME, _key("quantization_method", nf4="bnb", int8="bnb")),
        _row("quantization", None, None, _key("quantization_bit", nf4=4, int8=8)),
        _row("quantization", _key("bnb_4bit_quant_type", nf4="nf4"), _key(_AXOLOTL_NF4, nf4="nf4")),
        _row("quantization", None, None, _key("quantization_type", nf4="nf4")),
        _row(
            *("double_quant", "use_bnb_nested_quant", _AXOLOTL_NESTED, "double_quantization"),
            defaults=(False, True, True),
        ),
        _row("quantization", _key("load_in_8bit", int8=True), SAME),
    ),
    "tokenizer": (_row("seq_len", None, None, None, "max_seq_len"),),
    "data": (
        _row("", {"dataset_name": "your/dataset"}, _AXOLOTL_DATA, {"dataset_dir": ".", "dataset": "your_dataset"}),
        _row("", None, None, None, _TUNE_DATA),
        _row("packing", None, None, None, "dataset.packed"),
        _row("", None, None, None, {"shuffle": True, "seed": 42}),
    ),
    "adapters": (
        _row("", None, None, {"stage": "sft", "do_train": True}),
        # torchtune has a recipe for each method, which its command names.
        _row("method", _key("use_peft", False, lora=True), _axolotl_adapter, "finetuning_type", {}),
        _row("lora_rank", None, None, None, _TUNE_LORA),
        _row("lora_rank", "lora_r", SAME, "lora_rank", "lora_rank", defaults=(16, 0, 8)),
        _row("lora_alpha", "lora_alpha", SAME, SAME, _torchtune_alpha),
        _row("lora_rank", {"lora_dropout": 0.0}, SAME, SAME, SAME),
        _row(
            "lora_rank", {"lora_target_modules": ["all-linear"]}, {"lora_target_linear": True}, {"lora_target": "all"}
        ),
        _row("dora", "use_dora", "peft_use_dora", SAME, SAME),
        _row("rslora", "use_rslora", "peft_use_rslora", SAME, {}),  # torchtune: by lora_alpha
        _row("lora_rank", None, _axolotl_lora_defaults),
        _row("quantization", None, None, None, _key("quantize_base", False, nf4=True)),
    ),
    "batch": (
        _row("seq_len", "max_length", "sequence_len", "cutoff_len", defaults=(1024, 512, 2048)),
        _row("", None, {"excess_length_strategy": "truncate"}),  # by default it drops longer examples
        _row("packing", "packing", "sample_packing", SAME),
        # Without neat_packing, examples that share a row see each other.
        _row("packing", _trl_packing, _axolotl_rows, "neat_packing"),
        _row("micro_batch_size", _HF_BATCH, "micro_batch_size", SAME, "batch_size", defaults=(8, 1, 8)),
        _row("accumulation", "gradient_accumulation_steps", SAME, SAME, SAME),
        _row("epochs", None, None, None, "epochs"),
        _row("", {"dataloader_drop_last": True}, SAME, SAME, {"max_steps_per_epoch": None}),
        _row("loader_workers", "dataloader_num_workers", SAME, SAME),
        _row("", None, {"dataloader_pin_memory": True}),
        _row("compile", _trl_row_length),
    ),
    "memory": (
        _row("", None, None, None, {"device": "cuda"}),
        _row("precision", _key("bf16", False, bf16_mixed=True), None, SAME),
        _row("precision", None, _key("bf16", False, bf16_mixed=True, bf16_pure=True)),
        _row("precision", _key("fp16", False, fp16_mixed=True), _axolotl_fp16, SAME),
        _row("precision", None, None, _key("pure_bf16", False, bf16_pure=True)),
        _row("precision", None, None, None, _key("dtype", "fp32", bf16_mixed="bf16", bf16_pure="bf16")),
        # Axolotl's default for tf32, auto, is true.
        _row("", None, {"tf32": False}, {"upcast_layernorm": False, "upcast_lmhead_output": False}),
        # TRL and LLaMA-Factory recompute by default. Transformers calls it activation_checkpointing since 5.23, and
        # takes this name until version 6; LLaMA-Factory ignores it.
        _row("checkpointing", _HF_RECOMPUTES, SAME, _key("disable_gradient_checkpointing", False, none=True)),
        _row("checkpointing", _HF_REENTRANT, SAME, {"use_reentrant_gc": False}, _TUNE_RECOMPUTES),
        # With true, Axolotl would offload everything and recompute nothing.
        _row("checkpointing", _trl_checkpointing, _key("activation_offloading", offload="hidden_states")),
        _row("checkpointing", None, None, _key("use_unsloth_gc", False, offload=True)),
        _row("checkpointing", None, None, None, _key("enable_activation_offloading", False, offload=True)),
        _row("kernels", _key("use_liger_kernel", liger=True), _axolotl_liger, _llamafactory_liger),
        _row("kernels", _key("liger_kernel_config", liger=LIGER_KERNELS)),
        _row("optimizer", "optim", "optimizer", SAME),
        _row("compile", _key("torch_compile", False, per_layer=True), SAME, SAME),
        _row("compile", _key("tf32", per_layer=False), None, {"tf32": False}),  # torch_compile switches it on
        _row("compile", None, None, None, _key("compile", False, per_layer=True)),
        _row("loss", None, {}, {}, _TUNE_LOSS),  # Axolotl and LLaMA-Factory: with the kernels
        _row("method", None, None, None, _key("optimizer_in_bwd", full=False)),
    ),
    "schedule": (
        _row("optimizer", None, None, None, Key(name="optimizer", values=TORCHTUNE_OPTIMIZERS)),
        _row("learning_rate", "learning_rate", SAME, SAME, "optimizer.lr"),
        _row("", {"lr_scheduler_type": "cosine"}, {"lr_scheduler": "cosine"}, SAME, _TUNE_SCHEDULER),
        _row("warmup_steps", "warmup_steps", SAME, SAME, "lr_scheduler.num_warmup_steps"),
        _row("epochs", "num_train_epochs", "num_epochs", SAME, defaults=(3, 1, 3)),
        _row("", {"max_grad_norm": 1.0}, SAME, SAME, {"clip_grad_norm": 1.0}),
        _row("", None, {"weight_decay": 0.0}),
        _row("", {"logging_steps": 10}, SAME, SAME),
        _row("", None, {"include_tkps": False}),  # it would wait for the device in every micro batch
        _row("", _HF_LOGS, None, SAME),
        _row("save_steps", "save_steps", SAME, SAME),
        _row("", {"output_dir": "out"}, SAME, SAME, SAME),
        _row("", None, None, None, _TUNE_LOGS),
    ),
}

# --- what cannot be expressed: a function for each such knob, which says why and what is written instead


def _gap_in_precision(tool: str, recipe: Recipe) -> str:
    config = recipe.winner.config
    match tool, config.precision:
        case "trl", "bf16_pure" if config.method == "lora" and config.quantization not in ("int8", "nf4"):
            return "TRL keeps the adapters in fp32; they were measured in bf16"
        case "trl", "bf16_mixed" | "fp16_mixed" | "fp32" if config.quantization in ("int8", "nf4"):
            return "TRL casts the adapters of a quantized base to bf16; they were measured in fp32"
        case "axolotl", "bf16_mixed" if config.method == "full":
            trained = "Axolotl trains the weights themselves in bf16; they were measured in fp32"
            return f"{trained}; written as bf16, which takes less memory and learns differently"
        case "axolotl", "fp16_mixed" if config.method == "full":
            loaded = "Axolotl loads the weights themselves in fp16, which no gradient scaler takes"
            return f"{loaded}; written as fp32, which is slower and takes more memory"
        case "axolotl", "bf16_pure":
            return _axolotl_bf16_pure(config)
        case "axolotl", "fp32" if config.quantization == "int8":
            return "Axolotl keeps the part of an int8 base that is not quantised in fp16"
        case "llamafactory", "bf16_pure" if config.method == "lora":
            return "PEFT makes the adapters fp32; they were measured in bf16"
        case "llamafactory", "fp16_mixed" | "fp32" if config.method == "lora":
            return f"the base has the dtype of its checkpoint, mostly bfloat16, instead of {config.base_dtype}"
        case "torchtune", "bf16_mixed":
            trained = "adapters and their state" if config.method == "lora" else "weights, gradients and state"
            written = f"torchtune has no autocast; written as bf16 throughout, {trained} too"
            return f"{written}, which takes less memory and learns differently"
        case "torchtune", "fp16_mixed":
            return "torchtune refuses fp16; written as fp32, which is slower and takes more memory"
    return ""


def _axolotl_bf16_pure(config: TrainConfig) -> str:
    reason = "Axolotl computes under autocast where weights are in bf16"
    if config.method == "full" and attention_of("axolotl", config) in ("sdpa", "eager"):
        reason += ", and keeps norms, embedding and LM head in fp32, which takes more memory"
    if config.quantization == "int8":
        reason += ", and adapters on an int8 base stay in fp32"
    return reason


def _gap_in_checkpointing(tool: str, recipe: Recipe) -> str:
    newer = tool == "trl" and checkpoints_by_layer(recipe)
    if _skips_layers(recipe) and not newer:
        since = "before transformers 5.23 " if tool == "trl" else ""
        return f"{since}it is every layer or none; written as every layer, which is slower and takes less memory"
    if recipe.winner.config.offloads and tool == "trl" and recipe.trainer != "trl" and not newer:
        nothing = "before transformers 5.23 nothing is offloaded"
        return f"{nothing}; written as full, which needs more of the GPU's memory"
    return ""


def _gap_in_compile(tool: str, recipe: Recipe) -> str:
    config = recipe.winner.config
    lengths = "a new row length is compiled anew, or the layers for any length, which is slower"
    if config.compile == "none":
        return ""
    if tool == "torchtune":
        return "" if config.packing else f"the layers are compiled, and the loss; {lengths}"
    flag = (
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION" if tool == "llamafactory" else "--dynamo_use_regional_compilation"
    )
    reason = f"torch_compile with {flag} compiles the layers, and the embedding, norm and LM head besides"
    if tool == "axolotl":
        reason += "; what cannot be compiled runs as it is, without an error"
    if tool == "llamafactory" and not config.packing:
        reason += f"; {lengths}"
    return reason


def _gap_in_quantization(tool: str, recipe: Recipe) -> str:
    match tool, recipe.winner.config.quantization:
        case "trl", "fp8":
            return "TRL has no fp8 base; written unquantised, which is slower"
        case "axolotl" | "llamafactory", "fp8":
            converts = f"{TOOLS[tool]}'s fp8 converts the adapters too and was not probed"
            return f"{converts}; written unquantised, which is slower"
        case "torchtune", "fp8":
            return "torchtune has nf4 only; written unquantised, which is slower"
        case "torchtune", "int8":
            return "torchtune has nf4 only; written unquantised, which takes more memory"
    return ""


def _gap_in_attention(tool: str, recipe: Recipe) -> str:
    config = recipe.winner.config
    used = attention_of(tool, config)
    if used == config.attention:
        return ""
    if tool == "torchtune":
        return f"torchtune chooses the attention itself, here {used}"
    return "written as sdpa, for which torch chooses the kernel" if used == "sdpa" else ""


def _gap_in_loss(tool: str, recipe: Recipe) -> str:
    if tool == "trl" and recipe.winner.config.loss == "full":
        return "TRL has its own chunked LM head, with a lower peak and a different speed"
    if tool == "torchtune" and recipe.winner.config.loss == "chunked":
        holds = "CEWithChunkedOutputLoss makes fp32 logits in chunks, but holds all logits in the model's dtype"
        return f"{holds}, which takes more memory"
    return ""


def _gap_in_packing(tool: str, recipe: Recipe) -> str:
    config = recipe.winner.config
    if tool == "trl" and config.packing:
        fills = "TRL fills rows in the same way, but lays a micro batch out as one without padding"
        return f"{fills}; without a flash attention kernel its mask is larger than the one that was measured"
    if tool == "axolotl" and config.packing and attention_of(tool, config) not in ("sdpa", "eager"):
        return f"with {config.attention} Axolotl makes one full row of a micro batch"
    return ""


GAPS: dict[str, Callable[[str, Recipe], str]] = {
    "precision": _gap_in_precision,
    "checkpointing": _gap_in_checkpointing,
    "compile": _gap_in_compile,
    "quantization": _gap_in_quantization,
    "attention": _gap_in_attention,
    "loss": _gap_in_loss,
    "packing": _gap_in_packing,
}
# For knobs that a tool has no key for: the value that it always has, and why it has no other.
ABSENT: dict[tuple[str, str], tuple[Any, str]] = {
    ("torchtune", "double_quant"): (True, "torchtune always quantises the scales too, which takes less memory"),
    ("torchtune", "kernels"): ("torch", "torchtune has its own modules and no others"),
    ("torchtune", "loader_workers"): (0, "the training process makes the batches itself"),
}


# --- writing and reading


def write(tool: str, section: str, recipe: Recipe) -> dict[str, Any]:
    """The keys of one section of a tool's file with their values, in the order of the table."""
    config = recipe.winner.config
    values = config.as_dict() | {name: value(recipe) for name, value in SETTINGS.items()}
    written: dict[str, Any] = {}
    for row in TABLE[section]:
        for path, value in row.entries(tool, values, recipe).items():
            *outer, key = path.split(".")
            inside = written
            for name in outer:
                inside = inside.setdefault(name, {})
            inside[key] = dict(value) if isinstance(value, dict) else value
    return written


def inexpressible(tool: str, recipe: Recipe) -> list[str]:
    """Each knob that the tool's file cannot express, with the reason and what is written instead."""
    found = []
    for knob, value in recipe.winner.config.as_dict().items():
        if reason := _gap(tool, knob, value, recipe):
            shown = "" if value is True else f" {str(value).lower() if value is False else value}"
            found.append(f"{knob}{shown}: {reason}")
    return found


def _gap(tool: str, knob: str, value: Any, recipe: Recipe) -> str:
    if tool == recipe.trainer == "trl" and knob not in ("checkpointing", "compile"):
        return ""  # it was probed as TRL does it
    if knob in GAPS:
        return GAPS[knob](tool, recipe)
    if any(tool in row.cells for row in _rows(knob)):
        return ""
    same, reason = ABSENT.get((tool, knob), (getattr(TrainConfig(), knob), f"{TOOLS[tool]} has no key for it"))
    return "" if value == same else reason


def key_of(tool: str, what: str) -> str:
    """The key by which a tool knows a knob or a setting.

    Raises:
        KeyError: the tool has no single key for it.
    """
    for row in _rows(what):
        cell = row.cells.get(tool)
        if isinstance(cell, Key):
            return cell.name.rpartition(".")[2]
    raise KeyError(what)


def default_of(tool: str, what: str) -> Any:
    """The value, in our terms, that a tool assumes where its file leaves the key out; None where none is known."""
    return next((row.defaults[tool] for row in _rows(what) if tool in row.defaults), None)


def _rows(what: str) -> list[Row]:
    return [row for rows in TABLE.values() for row in rows if row.what == what]

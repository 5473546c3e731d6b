"""Read a fine-tuning run from the YAML file of TRL, Axolotl or LLaMA-Factory, as a TrainConfig.

Nothing of the file is run or looked up. What the file leaves out is the tool's own default, from the sources of TRL
1.16, Axolotl 0.18 and LLaMA-Factory 0.9.5. Where memory or speed depend on something that no knob expresses, the result
has a note. A run of another kind, such as preference tuning, is refused.
"""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.errors import UsageError
from autotune.core.files import read_user_yaml
from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.export.keys import default_of, key_of
from autotune.problem.constraints import NO_SDPA

MAX_BYTES = 2**20
MAX_KNOB = 2**24  # the most that TrainConfig takes
MAX_COUNT = 10**15  # some write "all examples" as a large number

TOOLS = ("trl", "axolotl", "llamafactory")
_MARKS = {  # keys that no other tool has
    "trl": ("dataset_name", "use_peft", "max_length", "max_seq_length", "packing_strategy", "padding_free", "dtype"),
    "axolotl": ("base_model", "micro_batch_size", "sequence_len", "adapter", "sample_packing", "num_epochs"),
    "llamafactory": ("stage", "finetuning_type", "cutoff_len", "template", "lora_rank", "lora_target"),
}
_ALL_LINEAR = [{"all"}, {"all-linear"}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}]
_ALL_LINEAR += [{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}]
_ATTENTION_FLAGS = (
    "xformers",
    "sage",
    "flex",
    "flash",
    "sdp",
    "eager",
)  # older keys of Axolotl, in the order of its preference
_ATTENTIONS = {name: name for name in KNOBS["attention"].choices} | dict.fromkeys(("", "auto", "sdp"), "sdpa")
_ATTENTIONS |= {"disabled": "eager", "flex": "flex_attention", "kernels-community/flash-attn2": "flash_attention_2"}
_ATTENTIONS |= dict.fromkeys(("flash", "fa2", "kernels-community/flash-attn"), "flash_attention_2")
_OPTIMIZERS = {name: name for name in KNOBS["optimizer"].choices}
_OPTIMIZERS |= {"": KNOBS["optimizer"].default, "paged_lion_8bit": "lion_8bit"}
_OPTIMIZERS |= dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), "adamw_8bit")
# By a part of the name: the known optimizer with as much state a trained parameter (1, 2 or 2 bytes, or almost none).
# AdamW's 8 bytes are assumed for all others.
_NEAR_OPTIMIZERS = {"4bit": "lion_8bit", "8bit": "adamw_8bit", "fp8": "adamw_8bit", "sgd": "adafactor"}
_LOADER_WORKERS = KNOBS["loader_workers"].choices
_WORDS = {
    True: True,
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "auto": True,
}  # auto: what a recent GPU supports
_WORDS |= {False: False, "false": False, "no": False, "off": False, "0": False}

_PREFERENCES = "only supervised fine-tuning is supported; pairs, rewards or reference models would not be counted"
_REMEDY = "pass the file of a supported run: supervised, LoRA or full, of a checkpoint that is not quantised"
_REFUSED = {
    **dict.fromkeys(("rl", "reward_model", "process_reward_model", "reward_funcs", "num_generations"), _PREFERENCES),
    **dict.fromkeys(("beta", "max_prompt_length", "max_completion_length", "use_asft_loss"), _PREFERENCES),
    **dict.fromkeys(("gptq", "model_quantization_config", "use_kt", "use_megatron_bridge"), "it is not supported"),
}
_SHARDED = "Sharding and offloading of the model are not counted: each GPU is taken to hold all of it."
_LESS = "{key} is not counted: the run needs less memory than estimated."
_MORE = "{key} trains whole modules besides adapters, which are not counted: the run needs more memory than estimated."
_NOTED = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), _SHARDED),
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_muon", "use_adam_mini", "use_unsloth"), _LESS),
    **dict.fromkeys(("layer_offloading", "tiled_mlp", "quantize_moe_experts", "unfrozen_parameters"), _LESS),
    **dict.fromkeys(("lora_modules_to_save", "additional_target"), _MORE),
    "selective_checkpointing": "{key} is not counted: the run needs more memory than estimated, and less time.",
    "fp8": "{key} is not counted: the run takes less time than estimated, on a GPU that has it.",
    "auto_find_batch_size": "{key} lowers a micro batch that does not fit; the one that is written is counted.",
}
_PARALLEL = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "dp_shard_size")
_GPUS = ("num_processes", "ray_num_workers", "dp_replicate_size", *_PARALLEL)
FP32_BASE = (
    "What is frozen and not quantised stays in float32, TRL's default for dtype: 2 bytes a parameter more than in"
    " bfloat16, and slower; `dtype: bfloat16` avoids that."
)
_CROSSED = "Examples that share a row attend to one another; they are counted as kept apart, which may be slower."
_FUSED = "A cross-entropy that is fused with the head is counted as autotune's loss in chunks."
_ONE_ROW = "TRL packs a micro batch into one row, whose mask needs more memory than estimated without flash attention."


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    """A fine-tuning run as another tool's YAML describes it.

    `format` is one of TOOLS. `model` and `dataset` are names or paths as written, several datasets with commas between.
    `num_gpus` is None where the file does not say, `epochs` where `max_steps` decides. `max_examples` are those of all
    datasets together. `notes`, a sentence each: what memory or speed depend on and `config` lacks, or what was assumed.
    """

    format: str
    model: str
    config: TrainConfig
    accumulation: int
    num_gpus: int | None
    epochs: float | None
    max_steps: int | None
    max_examples: int | None
    dataset: str | None
    notes: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def with_supported_attention(run: ForeignConfig, model: ModelSpec) -> ForeignConfig:
    """The run with eager attention where transformers refuses SDPA for the model, as it then chooses by itself."""
    eager = model.config["model_type"] in NO_SDPA and run.config.attention == "sdpa"
    return replace(run, config=replace(run.config, attention="eager")) if eager else run


def parse(values: dict[str, Any], tool: str) -> ForeignConfig:
    """The run that the values of a file describe to `tool`, one of TOOLS.

    Raises:
        UsageError: an impossible value, or a kind of run that is not supported.
    """
    try:
        return _parse(values, tool)
    except _Refused as refusal:
        raise UsageError(f"{refusal.key}: {refusal}", remedy=refusal.remedy) from None


def _parse(values: dict[str, Any], tool: str) -> ForeignConfig:
    """Like `parse`, but raises _Refused."""
    return replace(_read(_File(values=values, notes=[]), tool), values=values)


def read_file(path: Path) -> ForeignConfig:
    """The run that a file of TRL, Axolotl or LLaMA-Factory describes.

    Raises:
        UsageError: no such file or of no such tool, an impossible value, or a kind of run that is not supported.
    """
    values = _load(path)
    tool = _tool_of(path, values)
    try:
        return _parse(values, tool)
    except _Refused as refusal:
        lines = path.read_text(encoding="utf-8").splitlines()
        of_key = re.compile(rf"\s*['\"]?{re.escape(refusal.key)}['\"]?\s*:")
        line = next((f":{number}" for number, text in enumerate(lines, 1) if of_key.match(text)), "")
        raise UsageError(f"{path}{line}: {refusal.key}: {refusal}", remedy=refusal.remedy) from None


def _load(path: Path) -> dict[str, Any]:
    from pydantic import RootModel

    try:
        size = path.stat().st_size if path.is_file() else -1
    except (OSError, ValueError):  # a directory that may not be entered, or no path at all
        size = -1
    if not 0 <= size <= MAX_BYTES:
        problem = "is not a file that can be read" if size < 0 else f"has {size:,} bytes, which no configuration has"
        raise UsageError(f"{str(path)!r} {problem}", remedy="check the path: it is the YAML that you train with")
    values = read_user_yaml(path, RootModel[Any]).root
    if not isinstance(values, dict) or not values:
        raise UsageError(f"{path} holds no keys with values", remedy="pass the YAML that you train with")
    return {key: value for key, value in values.items() if isinstance(key, str)}


def _tool_of(path: Path, values: dict[str, Any]) -> str:
    had = {tool: tuple(key for key in marks if key in values) for tool, marks in _MARKS.items()}
    first, second, _ = sorted(TOOLS, key=lambda tool: len(had[tool]), reverse=True)
    if len(had[first]) > len(had[second]):
        return first
    marks = had if had[first] else _MARKS
    keys = "; ".join(f"{', '.join(names)} of {tool}" for tool, names in marks.items() if names)
    raise UsageError(
        f"{path}: cannot tell which tool it is for: it has {'both' if had[first] else 'none of'} {keys}",
        remedy="pass the YAML that you train with, of TRL, Axolotl or LLaMA-Factory",
    )


class _Refused(Exception):
    """The value of a key is impossible, or not supported."""

    def __init__(self, key: str, message: str, remedy: str = "correct it in the file") -> None:
        super().__init__(message)
        self.key, self.remedy = key, remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The values of a file by key, each read as the type that it must have; of several keys the first that is set.

    `notes` collects sentences about the run. All methods raise _Refused for a value of the wrong type.
    """

    values: dict[str, Any]
    notes: list[str]

    def get(self, *keys: str) -> tuple[str, Any]:
        """The first key that is set, with its value; the first key and None where none is set."""
        return next(((key, self.values[key]) for key in keys if self.values.get(key) is not None), (keys[0], None))

    def has(self, *keys: str) -> bool:
        """Whether one of the keys is set and not switched off."""
        return any(self.values.get(key) not in (None, False, "", "false", [], {}) for key in keys)

    def number(self, *keys: str, default: float, least: float = 1, most: float = MAX_KNOB) -> float:
        """A number from `least` to `most`; "auto" means the default."""
        key, value = self.get(*keys)
        if value is None or value == "auto":
            self.note(value is not None, f"{key} is auto: {default:g} is assumed.")
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(value)  # "2e-4" is a number to the tools, too
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not least <= number <= most:
            raise _Refused(key, f"a number from {least:g} to {most:,.0f} is needed, not {_shown(value)}")
        return number

    def note(self, applies: bool, sentence: str) -> None:
        """Add a note if it applies."""
        if applies:
            self.notes.append(sentence)

    def whole(self, *keys: str, default: int, least: int = 1, most: int = MAX_KNOB) -> int:
        """A whole number from `least` to `most`."""
        number = float(self.number(*keys, default=default, least=least, most=most))
        if not number.is_integer():
            raise _Refused(self.get(*keys)[0], f"a whole number is needed, not {number:g}")
        return int(number)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false, in any form that YAML or the tools accept."""
        value = self.values.get(key)
        try:
            return default if value is None else _WORDS[value.lower() if isinstance(value, str) else value]
        except (KeyError, TypeError):
            raise _Refused(key, f"true or false is needed, not {_shown(value)}") from None

    def text(self, *keys: str, default: str = "") -> str:
        """A printable text without spaces around it."""
        key, value = self.get(*keys)
        if value is not None and not (isinstance(value, str) and value.isprintable()):
            raise _Refused(key, f"a name is needed, not {_shown(value)}")
        return (value or "").strip() or default

    def names(self, *keys: str) -> tuple[str, ...]:
        """The names in a list of names or of mappings with a path, or in a text with commas between them."""
        key, value = self.get(*keys)
        parts = value.split(",") if isinstance(value, str) else [] if value is None else value
        if isinstance(parts, list):
            parts = [part.get("path", "") if isinstance(part, dict) else part for part in parts]
        if not isinstance(parts, list) or not all(isinstance(part, str) and part.isprintable() for part in parts):
            raise _Refused(key, f"names are needed, not {_shown(value)}")
        return tuple(part.strip() for part in parts if part.strip())

    def inside(self, *keys: str) -> "_File":
        """The mapping that a key holds, as a file of its own with the same notes."""
        key, value = self.get(*keys)
        if value is not None and not isinstance(value, dict):
            raise _Refused(key, f"keys with values are needed, not {_shown(value)}")
        return replace(self, values={name: item for name, item in (value or {}).items() if isinstance(name, str)})


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number as large as that"
    return text if len(text) <= 60 else text[:57] + "..."


def _read(file: _File, tool: str) -> ForeignConfig:
    for nested in ("model_init_kwargs", "bnb_config_kwargs"):  # tools prefer their values to those of the top level
        file = replace(file, values=file.values | file.inside(nested).values)
    if refused := next((key for key in _REFUSED if file.has(key)), None):
        raise _Refused(refused, _REFUSED[refused], _REMEDY)
    model_key = key_of(tool, "model")
    if not (model := file.text(model_key)):
        raise _Refused(model_key, "is missing", "say which model is trained")
    knobs = {"trl": _trl, "axolotl": _axolotl, "llamafactory": _llamafactory}[tool](file)
    file.note(knobs["loss"] == "chunked" and tool != "trl", _FUSED)
    if knobs["method"] == "lora":
        knobs |= _adapters(file, tool)
    elif knobs["quantization"] != "none":
        quantized = next(key for key in ("load_in_4bit", "load_in_8bit", "quantization_bit") if file.has(key))
        raise _Refused(quantized, "a quantised base is trained by adapters alone", "ask for LoRA, or do not quantise")
    knobs |= _compute(file, tool)
    micro_batch = _whole(file, tool, "micro_batch_size")
    accumulation = max(1, file.whole("batch_size", default=micro_batch) // micro_batch)  # an older key of Axolotl
    max_steps = file.whole("max_steps", default=-1, least=-MAX_COUNT, most=MAX_COUNT)
    epochs = file.number(key_of(tool, "epochs"), default=default_of(tool, "epochs"), least=0.001, most=MAX_COUNT)
    datasets = file.names("datasets", "pretraining_dataset", "dataset_name", "dataset")
    samples = file.whole("max_samples", default=0, most=MAX_COUNT)  # of each dataset
    double_quant = file.flag(key_of(tool, "double_quant"), default=bool(default_of(tool, "double_quant")))
    seq_len = file.whole(key_of(tool, "seq_len"), "max_seq_length", default=default_of(tool, "seq_len"))
    return ForeignConfig(
        format=tool,
        model=model,
        config=TrainConfig(micro_batch_size=micro_batch, seq_len=seq_len, double_quant=double_quant, **knobs),
        accumulation=file.whole(key_of(tool, "accumulation"), default=accumulation),
        num_gpus=math.prod(file.whole(key, default=1) for key in _GPUS) if file.has(*_GPUS) else None,
        epochs=None if max_steps > 0 else float(epochs),
        max_steps=max_steps if max_steps > 0 else None,
        max_examples=samples * max(1, len(datasets)) or None,
        dataset=",".join(datasets) or None,
        notes=tuple(dict.fromkeys(file.notes)),
    )


def _whole(file: _File, tool: str, what: str) -> int:
    """The whole number that the tool's key for a knob holds, else the tool's default."""
    return file.whole(key_of(tool, what), default=default_of(tool, what))


def _compute(file: _File, tool: str) -> dict[str, Any]:
    """Optimizer, attention, compilation and loading of data, which are the same in all tools but for the keys."""
    compile_keys = ("torch_compile_backend", "torch_compile_mode") if tool != "axolotl" else ()
    compiled = file.flag("torch_compile") or file.has(*compile_keys)
    file.note(compiled, "torch_compile takes the whole model; its layers are counted, compiled one by one.")
    for key, note in _NOTED.items():
        file.note(file.has(key), note.format(key=key))
    for key in _PARALLEL:
        file.note(file.whole(key, default=1) > 1, _SHARDED)
    older = next((name for name in _ATTENTION_FLAGS if file.flag(f"{name}_attention")), "")
    attention_key = "flash_attn" if tool == "llamafactory" else key_of(tool, "attention")
    attention, optimizer = file.text(attention_key, default=older), file.text(key_of(tool, "optimizer"))
    file.note(attention not in _ATTENTIONS, f"Attention by {_shown(attention)} is counted as sdpa.")
    state = next((known for part, known in _NEAR_OPTIMIZERS.items() if part in optimizer), "adamw_torch")
    file.note(optimizer not in _OPTIMIZERS, f"The optimizer {_shown(optimizer)} is counted as {state}.")
    workers = file.whole("dataloader_num_workers", default=0, least=0)
    return {
        "optimizer": _OPTIMIZERS.get(optimizer, state),
        "attention": _ATTENTIONS.get(attention, "sdpa"),
        "loader_workers": next((known for known in _LOADER_WORKERS if known >= workers), _LOADER_WORKERS[-1]),
        "compile": "per_layer" if compiled else "none",
    }


def _adapters(file: _File, tool: str) -> dict[str, Any]:
    rank = _whole(file, tool, "lora_rank")
    if not rank:
        raise _Refused(key_of(tool, "lora_rank"), "is missing, and has no default", "say the rank of the adapters")
    rslora, alpha = file.flag(key_of(tool, "rslora")), file.number("lora_alpha", default=2 * rank, least=0)
    file.note(not (rslora or rank / 4 <= alpha <= 4 * rank), f"lora_alpha {alpha:g} is far from twice the rank.")
    if tool == "llamafactory":
        targets = set(file.names("lora_target")) or {"all"}
    else:
        targets = set(file.names("lora_target_modules"))
    if not (file.flag("lora_target_linear") or any(names <= targets for names in _ALL_LINEAR)):
        where = _shown(", ".join(sorted(targets))) if targets else "what PEFT chooses, mostly q_proj and v_proj"
        file.note(True, f"Adapters are counted on every linear layer; the file has them on {where}.")
    return {"lora_rank": rank, "dora": file.flag(key_of(tool, "dora")), "rslora": rslora}


def _trl(file: _File) -> dict[str, Any]:
    lora, fp16, packing = file.flag("use_peft"), file.flag("fp16"), file.flag("packing")
    dtype = file.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise _Refused("dtype", f"auto, bfloat16, float16 or float32 is needed, not {_shown(dtype)}")
    if file.text("loss_type", default="nll") not in ("nll", "chunked_nll", "dft"):
        raise _Refused("loss_type", _PREFERENCES, _REMEDY)
    if "max_length" in file.values and file.get("max_length", "max_seq_length")[1] is None:
        raise _Refused("max_length", "nothing is cut off then", "write how many tokens the longest example has")
    precision = "bf16_mixed" if file.flag("bf16", default=not fp16) else "fp16_mixed" if fp16 else "fp32"
    file.note(dtype == "float32" and lora and precision != "fp32", FP32_BASE)
    if dtype == "float16":
        precision = "fp16_mixed"
    elif dtype != "float32" and not (lora and precision != "fp32"):
        precision = "bf16_pure"  # what is trained is itself in bf16, whether under autocast or not
    more = file.inside("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    every, offload = more.whole("every_n_layers", default=1, most=9999), file.flag("activation_offloading")
    checkpointing = "offload" if offload or more.flag("offload") else "full" if every == 1 else f"every_{every}"
    if not file.flag("activation_checkpointing", default=file.flag("gradient_checkpointing", default=True)):
        checkpointing = "none"
    file.note(
        not lora and file.has("lora_r"), "Without use_peft: true, TRL trains all parameters; lora_* says nothing."
    )
    file.note(dtype == "auto", "dtype is auto: that of most checkpoints, bfloat16, is assumed.")
    wrapped = file.text("packing_strategy") == "wrapped"
    file.note(packing and wrapped, _CROSSED)
    file.note(packing and not wrapped and "flash" not in file.text("attn_implementation"), _ONE_ROW)
    file.note(offload and checkpointing == "none", _LESS.format(key="activation_offloading"))
    file.note(more.flag("selective"), _NOTED["selective_checkpointing"].format(key="selective"))
    file.note(file.text("accelerate_config").startswith(("fsdp", "zero")), _SHARDED)
    file.note(True, "The loss is counted in chunks, as TRL computes it since 1.7; older ones hold all logits.")
    quantization = "nf4" if file.flag("load_in_4bit") else "int8" if file.flag("load_in_8bit") else "none"
    knobs = {"method": "lora" if lora else "full", "precision": precision, "quantization": quantization}
    kernels = "liger" if file.flag("use_liger_kernel") else "torch"
    return knobs | {"checkpointing": checkpointing, "loss": "chunked", "kernels": kernels, "packing": packing}


def _axolotl(file: _File) -> dict[str, Any]:
    adapter, four, eight = file.text("adapter"), file.flag("load_in_4bit"), file.flag("load_in_8bit")
    if adapter not in ("", "lora", "qlora"):
        raise _Refused("adapter", f"lora, qlora or none is supported, not {_shown(adapter)}", _REMEDY)
    if adapter == "qlora" and not four:
        raise _Refused("adapter", "Axolotl refuses qlora without load_in_4bit: true", "add that line")
    file.note(adapter == "lora" and four, "With adapter: lora Axolotl does not quantise to 4 bits, with qlora alone.")
    quantization = "nf4" if four and adapter != "lora" else "int8" if eight else "none"
    fp16, how = file.flag("fp16") or file.flag("float16"), file.values.get("bf16", "auto")  # empty, it is off
    bf16 = file.flag("bfloat16") or how == "full" or (not fp16 if how == "auto" else file.flag("bf16"))
    pure = bf16 and (how == "full" or not adapter)
    precision = "bf16_pure" if pure else "bf16_mixed" if bf16 else "fp16_mixed" if fp16 else "fp32"
    file.note(bf16 and not adapter, "With bf16 Axolotl loads the weights themselves in bf16: counted as bf16_pure.")
    words = [file.values.get(key) for key in ("gradient_checkpointing", "activation_offloading")]
    offload = any(word in ("offload", "offload_disk", "unsloth", "legacy", "disk", "hidden_states") for word in words)
    checkpointing = "offload" if offload or file.flag("activation_offloading") else ""
    file.note(bool(checkpointing), "What is offloaded is counted as checkpoints that wait in the host's memory.")
    checkpointing = checkpointing or ("full" if file.flag("gradient_checkpointing") else "none")
    plugins, linear = " ".join(file.names("plugins")).lower(), file.flag("liger_fused_linear_cross_entropy")
    layers = [file.flag(f"liger_{layer}") for layer in ("rope", "rms_norm", "layer_norm", "glu_activation", "swiglu")]
    liger = "liger" in plugins
    file.note((linear or any(layers)) and not liger, "liger_* does nothing without Liger's plugin under plugins.")
    fused = (liger and linear) or ("cut_cross_entropy" in plugins and file.flag("cut_cross_entropy", default=True))
    own = [f"lora_{part}_kernel" for part in ("mlp", "qkv", "o", "embedding")]
    automatic = not (eight or file.has("trust_remote_code") or any(file.values.get(key) is not None for key in own))
    if adapter and (automatic or file.has(*own)):
        file.note(True, "Axolotl's fused LoRA kernels, its default, are not counted: they take less time and memory.")
    knobs = {"method": "lora" if adapter else "full", "precision": precision, "quantization": quantization}
    knobs |= {"checkpointing": checkpointing, "loss": "chunked" if fused else "full"}
    return knobs | {"kernels": "liger" if liger and any(layers) else "torch", "packing": file.flag("sample_packing")}


def _llamafactory(file: _File) -> dict[str, Any]:
    if not file.flag("do_train"):
        raise _Refused("do_train", "is not true, so that LLaMA-Factory trains nothing", "add `do_train: true`")
    if (stage := file.text("stage", default="sft")) not in ("sft", "pt"):
        raise _Refused("stage", f"{_shown(stage)}: {_PREFERENCES}", _REMEDY)
    if (method := file.text("finetuning_type", default="lora")) not in ("lora", "full"):
        raise _Refused("finetuning_type", f"lora or full is supported, not {_shown(method)}", _REMEDY)
    if (bits := file.whole("quantization_bit", default=16)) not in (4, 8, 16):
        raise _Refused("quantization_bit", f"4 or 8 is supported, not {bits}", _REMEDY)
    by = file.text("quantization_method", default="bnb")
    file.note(bits < 16 and by != "bnb", f"The base, quantised by {_shown(by)}, is counted as by bitsandbytes.")
    pure, bf16, fp16 = file.flag("pure_bf16"), file.flag("bf16"), file.flag("fp16")
    file.note(not (pure or bf16 or fp16), "Without bf16, fp16 or pure_bf16 there is no autocast: it may be slower.")
    plain = "bf16_mixed" if method == "lora" else "fp32"  # the base as published, what is trained in fp32
    precision = "bf16_pure" if pure else "bf16_mixed" if bf16 else "fp16_mixed" if fp16 else plain
    recomputed = "offload" if file.flag("use_unsloth_gc") else "full"
    checkpointing = "none" if file.flag("disable_gradient_checkpointing") else recomputed
    liger, neat = file.flag("enable_liger_kernel") or file.flag("use_liger_kernel"), file.flag("neat_packing")
    packing = neat or file.flag("packing", default=stage == "pt")
    file.note(packing and not neat, _CROSSED)
    knobs = {"method": method, "precision": precision, "quantization": {4: "nf4", 8: "int8", 16: "none"}[bits]}
    knobs |= {"checkpointing": checkpointing, "loss": "chunked" if liger else "full"}
    return knobs | {"kernels": "liger" if liger else "torch", "packing": packing}

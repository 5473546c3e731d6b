"""Reads a file of LLaMA-Factory's v1, which has other keys than the older format.

`with_older_keys` adds the older format's keys with the same meaning, from the sources of
LLaMA-Factory's v1 of August 2026. `planning.foreign_config` then reads the file as one of the older
format.
"""

from typing import Any

from autotune.export.keys import key_of
from autotune.planning.foreign_file import File, Refused, quote, table

V1 = "llamafactory_v1"
# v1's names of attention kernels, and the older format's
_ATTENTIONS = {"eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2"}
_ADAPTERS = {  # v1's keys inside `peft_config`, the older format's keys, and v1's defaults
    "r": ("lora_rank", 8),
    "lora_alpha": ("lora_alpha", 16),
    "lora_dropout": ("lora_dropout", 0.05),
    "target_modules": ("lora_target", "all"),
    "use_rslora": ("use_rslora", None),
    "use_dora": ("use_dora", None),
    "modules_to_save": ("additional_target", None),
    "adapter_name_or_path": ("adapter_name_or_path", None),
}
MAX_LAYERS = 10_000
_PACKED = ("dynamic_batching", "dynamic_padding_free")


def file_key(tool: str, what: str) -> str:
    """Return the key for a knob or a setting in the files of a tool or of LLaMA-Factory's v1."""
    return str(table("v1_keys")[what]) if tool == V1 else key_of(tool, what)


def deepspeed_file(values: dict[str, Any]) -> Any:
    """Return the name of DeepSpeed's file in the file of any tool."""
    sharding = values.get("dist_config")
    inner = sharding.get("config_file") if isinstance(sharding, dict) else None
    return values.get("deepspeed") or inner


def with_older_keys(file: File) -> File:
    """Return the file with the older format's keys beside v1's keys.

    Raises Refused for a run that the older format cannot express.
    """
    _refuse_other_objectives(file)
    file.note("objective" not in file.values, "v1_objective")
    micro_batch = file.whole("micro_batch_size", default=1)
    rows = file.whole("global_batch_size", default=micro_batch, least=micro_batch)
    file.note(file.has("global_batch_size"), "v1_global_batch")
    strategy = file.text("batching_strategy", default="normal")
    file.note(strategy in _PACKED, "v1_packed", name=quote(strategy))
    attention = file.text("flash_attn", default="sdpa")
    if attention not in _ATTENTIONS:
        raise Refused("flash_attn", f"one of {', '.join(_ATTENTIONS)} is needed")

    older = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": file.values.get("model"),
        "dataset": file.values.get("train_dataset"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "flash_attn": _ATTENTIONS[attention],
        "optim": "adamw_torch",
        "disable_gradient_checkpointing": not file.flag(
            "enable_activation_checkpointing", default=True
        ),
        "neat_packing": strategy in _PACKED,
        "padding_free": strategy == "padding_free",
        "dataloader_num_workers": file.whole("batching_workers", default=16, least=0),
    }
    older |= _sharding(file) | _adapters(file) | _quantization(file) | _kernels(file)
    return File(values=file.values | older, notes=file.notes)


def _refuse_other_objectives(file: File) -> None:
    """Raise Refused for a run with another objective than SFT.

    v1's trainers for preferences join both answers in one row, which no probe does.
    """
    wanted = file.text("objective", default="sft")
    preferences = next((key for key in table("v1_preferences") if key in file.values), None)
    key = preferences or ("objective" if wanted != "sft" else None)
    if file.text("model_class", default="llm") != "llm":
        key = "model_class"
    if key:
        raise Refused(
            key,
            "the trainers of LLaMA-Factory's v1 for another objective than sft are not supported",
            "write the file in LLaMA-Factory's older format",
        )


def _plugin(file: File, key: str, known: tuple[str, ...]) -> tuple[str, File]:
    """Return the name of a plugin, or "", and its settings. Raises Refused for another name."""
    settings = file.mapping(key)
    name = settings.text("name")
    if settings.values and name not in known:
        raise Refused(key, f"{' or '.join(known)} is supported, not {quote(name)}")
    return name, settings


def _sharding(file: File) -> dict[str, Any]:
    """Return the keys of sharding and precision.

    v1 loads the base in its published dtype, and converts it to fp32 without `peft_config`. Only
    sharded training then computes in bf16.
    """
    name, settings = _plugin(file, "dist_config", ("fsdp2", "deepspeed", "fsdpturbo"))
    older: dict[str, Any] = {"bf16": bool(name) and file.flag("bf16", default=True)}
    if settings.has("ep_size"):
        older["ep_size"] = settings.values["ep_size"]
    if name == "deepspeed" and "deepspeed" not in file.values:
        older["deepspeed"] = settings.values.get("config_file")
    if name in ("fsdp2", "fsdpturbo"):
        kept = ("reshard_after_forward", "offload_params")
        older["fsdp"] = "full_shard"
        older["fsdp_config"] = {"fsdp_version": 2} | {
            key: settings.values[key] for key in kept if key in settings.values
        }
    return older


def _adapters(file: File) -> dict[str, Any]:
    """Return the keys of the adapters."""
    name, settings = _plugin(file, "peft_config", ("lora", "freeze"))
    if name == "freeze":
        layers = settings.whole("freeze_trainable_layers", default=2, least=-MAX_LAYERS)
        return {"finetuning_type": "freeze", "freeze_trainable_layers": layers}
    if not name:
        return {"finetuning_type": "full"}
    return {"finetuning_type": "lora"} | {
        older: value
        for key, (older, default) in _ADAPTERS.items()
        if (value := settings.values.get(key, default)) is not None
    }


def _quantization(file: File) -> dict[str, Any]:
    """Return the keys of a quantised base. Without bits, the plugin `auto` quantises nothing."""
    name, settings = _plugin(file, "quant_config", ("bnb", "auto"))
    bits = settings.values.get("quantization_bit") or (4 if name == "bnb" else None)
    double = settings.flag("double_quantization", default=True)
    return {"quantization_bit": bits, "double_quantization": double} if bits else {}


def _kernels(file: File) -> dict[str, Any]:
    """Return the keys of kernels. The plugin `auto` changes nothing on NVIDIA's GPUs."""
    names = set(file.mapping("kernel_config").names("name")) - {"auto"}
    others = ", ".join(sorted(names - {"liger_kernel"}))
    file.note(bool(others), "kernels", key=f"kernel_config: {others}")
    return {"enable_liger_kernel": "liger_kernel" in names}

"""Reads the knobs that a file of TRL, Axolotl or LLaMA-Factory sets."""

import re
from typing import Any

from autotune.catalog.model_names import quantised_copy
from autotune.core.knobs import KNOBS, check_value
from autotune.core.lora_targets import ALL_LINEAR
from autotune.core.objective import Objective
from autotune.export.keys import default_of, key_of
from autotune.planning.foreign_file import File, Refused, quote, table
from autotune.planning.foreign_objective import REMEDY, objective_knobs, objective_of, whole_number
from autotune.planning.foreign_rollouts import older_key
from autotune.planning.foreign_swift import OWN_LOSS
from autotune.report.values.check import FP32_BASE, SWIFT, TRANSFORMERS
from autotune.trainer.settings import is_expert_parameter

# A key that no file has. `run_check` adds this key to the values of a run if a dry probe cannot
# compute the run's loss in chunks. The memory then includes the logits of all tokens, and the table
# `lessens` in foreign_keys.yaml says that the run may need less.
FUSED_LOSS = "the fused loss"
# The notes about Axolotl's experts in 4 bits, and about Liger's kernels beside them
PACKED_EXPERTS, WITHOUT_LIGER = "packed_experts", "without_liger"
EXPERT_KEY = "lora_target_parameters"  # TRL's and Axolotl's key for parameters with adapters
USUAL_ALPHAS = (16, 32)  # values of lora_alpha that are common at any rank, so they get no note


def knobs_of(file: File, tool: str, objective: Objective) -> dict[str, Any]:
    """Return the knobs that a file sets, except the micro batch size and the row length."""
    read_knobs = {"trl": _trl_knobs, "axolotl": _axolotl_knobs, "llamafactory": _llamafactory_knobs}
    knobs = read_knobs[tool](file) | _stored_quantization(file, tool)
    if tool != "trl" and file.has(*table("noted")["own_loss"]):
        knobs["loss"] = "full"  # a custom loss replaces the fused loss
    if file.has(FUSED_LOSS):
        knobs["loss"] = "full"
    if objective is not Objective.SFT:
        knobs |= objective_knobs(file, tool, objective, packing=knobs["packing"])
    file.note(
        knobs["loss"] == "chunked" and tool != "trl" and objective is Objective.SFT, "fused_loss"
    )

    if knobs["method"] == "lora":
        knobs |= _adapter_knobs(file, tool)
    elif knobs["quantization"] != "none":
        quantization_key = next(
            (key for key in ("load_in_4bit", "load_in_8bit", "quantization_bit") if file.has(key)),
            key_of(tool, "model"),
        )
        raise Refused(
            quantization_key,
            "a quantised base can only be trained with adapters",
            "use LoRA, or do not quantise",
        )

    return knobs | _compute_knobs(file, tool)


def _stored_quantization(file: File, tool: str) -> dict[str, Any]:
    """Return the knobs for a checkpoint that GPTQ or AWQ quantised to 8 or 4 bits.

    The result is bitsandbytes' quantisation with the same number of bits, which needs about the
    same memory.
    """
    _, storage = quantised_copy(file.text(key_of(tool, "model")))
    if not storage and file.flag("gptq"):
        storage = "GPTQ"
    method, _, eight_bit = storage.partition("-")
    if method not in ("GPTQ", "AWQ"):
        return {}
    file.note(True, "quantised_by", name=method)
    return {"quantization": "int8" if eight_bit else "nf4"}


def _compute_knobs(file: File, tool: str) -> dict[str, Any]:
    """Return the knobs for the optimizer, attention, compilation and data loading.

    The tools have different keys for these knobs, with the same meaning.
    """
    compile_keys = ("torch_compile_backend", "torch_compile_mode") if tool != "axolotl" else ()
    compiled = file.flag("torch_compile") or file.has(*compile_keys)
    file.note(compiled, "compiled")

    for name, keys in table("noted").items():
        for key in keys:
            file.note(file.has(key), name, key=key)
    noted_apart = {"activation_offloading", "liger_cross_entropy", "quantize_moe_experts"}
    for key in table("lessens").keys() - noted_apart:
        file.note(file.has(key), "less_memory", key=key)
    split = table("parallel") + table("split")
    file.note(any(file.whole(key, default=1) > 1 for key in split), "sharded")

    # Axolotl's older keys contain the name of the attention, as in `flash_attention: true`.
    older = next((name for name in table("attention_flags") if file.flag(f"{name}_attention")), "")
    attention = file.text(key_of(tool, "attention"), default=older)
    attentions = {name: name for name in KNOBS["attention"].choices} | table("attentions")
    file.note(attention not in attentions, "attention", name=quote(attention))

    optimizer = file.text(key_of(tool, "optimizer"), default=str(KNOBS["optimizer"].default))
    optimizers = {name: name for name in KNOBS["optimizer"].choices} | table("optimizers")
    similar = (known for part, known in table("similar_optimizers").items() if part in optimizer)
    state = next(similar, "adamw_torch")
    is_other = optimizer not in optimizers
    file.note(is_other, "optimizer", name=quote(optimizer), state=state)
    larger = any(part in optimizer for part in table("larger_optimizers"))
    file.note(larger, "larger_optimizer", name=quote(optimizer), state=state)
    for part in table("smaller_optimizers"):
        file.note(is_other and part in optimizer, "less_memory", key=f"optimizer {part}")

    # Axolotl starts a process for each GPU if the file sets none of these keys (its schema's
    # default_dataloader_opts), so at least one.
    has_default = tool == "axolotl" and all(
        file.values.get(f"dataloader_{key}") is None
        for key in ("num_workers", "pin_memory", "prefetch_factor")
    )
    workers = file.whole(key_of(tool, "loader_workers"), default=int(has_default), least=0)
    choices = KNOBS["loader_workers"].choices
    strategy = file.text("train_sampling_strategy")

    return {
        # Older versions of transformers, and Axolotl, have the key `group_by_length`.
        "group_by_length": strategy == "group_by_length" or file.flag("group_by_length"),
        "optimizer": optimizers.get(optimizer, state),
        "attention": attentions.get(attention, "sdpa"),
        "loader_workers": next((known for known in choices if known >= workers), choices[-1]),
        "compile": "per_layer" if compiled else "none",
    }


def _adapter_knobs(file: File, tool: str) -> dict[str, Any]:
    """Return the knobs of the adapters."""
    rank = whole_number(file, tool, "lora_rank")
    if not rank:
        raise Refused(
            key_of(tool, "lora_rank"),
            "is missing, and has no default",
            "say the rank of the adapters",
        )

    rslora = file.flag(key_of(tool, "rslora"))
    alpha = file.number("lora_alpha", default=2 * rank, least=0)
    usual = rank / 4 <= alpha <= 4 * rank or alpha in USUAL_ALPHAS
    file.note(not (rslora or usual), "alpha", alpha=alpha)

    if tool == "llamafactory":
        targets = set(file.names("lora_target") or ("all",))
    else:
        targets = set(file.names("lora_target_modules") or ())
    all_linear = file.flag("lora_target_linear") or targets & {"all", ALL_LINEAR}
    on_experts = set() if all_linear else _expert_parameters(file)
    file.note(file.has(EXPERT_KEY) and not on_experts, "more", key=EXPERT_KEY)
    if tool == "trl":
        _refuse_single_target(file)

    return {
        "lora_rank": rank,
        "lora_targets": ALL_LINEAR if all_linear else _targets(file, targets | on_experts),
        "modules_to_save": _modules_to_save(file),
        "dora": file.flag(key_of(tool, "dora")),
        "rslora": rslora,
        "lora_dropout": _dropout(file, tool),
    }


def _expert_parameters(file: File) -> set[str]:
    """Return the experts' parameters that have adapters in all layers.

    The result is empty if the file also names a parameter outside the experts, or a parameter of
    only one layer.
    """
    names = file.names(EXPERT_KEY)
    if not all(is_expert_parameter(name) and not re.search(r"\d", name) for name in names):
        return set()
    return {f"experts.{name.rpartition('.')[2]}" for name in names}


def _refuse_single_target(file: File) -> None:
    """Raise Refused for a single name in TRL's `lora_target_modules`.

    TRL takes a single name as a pattern for the whole path of a module, so it would match no layer.
    """
    value = file.values.get("lora_target_modules")
    pattern = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(pattern, str) and re.fullmatch(r"[\w, ]+", pattern):
        raise Refused(
            "lora_target_modules",
            f"the run is refused at its start: TRL takes {quote(pattern)} as a pattern for a "
            "layer's whole path, so it matches no layer",
            "write a list of two names or more, or the name twice",
        )


def _dropout(file: File, tool: str) -> float:
    """Return the choice of `lora_dropout` nearest to the file's value.

    A dropout above zero never becomes zero, because dropout takes memory.
    """
    share = file.number(
        key_of(tool, "lora_dropout"), default=default_of(tool, "lora_dropout"), least=0, most=1
    )
    choices = [choice for choice in KNOBS["lora_dropout"].choices if choice or not share]
    return float(min(choices, key=lambda choice: abs(choice - share)))


def _targets(file: File, names: set[str]) -> str:
    """Return the targets of the adapters as a value of the knob `lora_targets`."""
    if not names:
        file.note(True, "default_targets")
        return "q_v"
    names_text = ",".join(sorted(names))
    try:
        check_value("lora_targets", names_text)
    except ValueError:
        file.note(True, "targets", targets=quote(names_text))
        return ALL_LINEAR
    return names_text


def _modules_to_save(file: File) -> str:
    """Return the modules trained besides the adapters, as a value of the knob `modules_to_save`.

    A note names the modules that the knob cannot express.
    """
    known = table("ends")
    keys = ("lora_modules_to_save", "additional_target")
    key, value = file.get(*keys)
    if value is None and file.has(*table("resized")):
        return "embedding_and_head"

    names = {name: name.rpartition(".")[2] for name in file.names(*keys)}
    ends = [end for end, end_names in known.items() if set(names.values()) & set(end_names)]
    other_names = sorted(
        name
        for name, last in names.items()
        if not any(last in end_names for end_names in known.values())
    )

    file.note(bool(other_names), "whole_modules", key=key, names=quote(", ".join(other_names)))
    return "_and_".join(ends) or "none"


def _precision(pure: bool, bf16: bool, fp16: bool, otherwise: str = "fp32") -> str:
    """Return the precision that the first true flag selects, or `otherwise` if all are false."""
    if pure:
        return "bf16_pure"
    if bf16:
        return "bf16_mixed"
    return "fp16_mixed" if fp16 else otherwise


def _quantization(four_bit: bool, eight_bit: bool) -> str:
    if four_bit:
        return "nf4"
    return "int8" if eight_bit else "none"


def _trl_knobs(file: File) -> dict[str, Any]:
    """Return the knobs whose keys only TRL has."""
    lora = file.flag("use_peft")
    fp16 = file.flag("fp16")
    packing = file.flag("packing")
    dtype = file.text("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise Refused("dtype", f"auto, bfloat16, float16 or float32 is needed, not {quote(dtype)}")

    if "max_length" in file.values and file.get("max_length", "max_seq_length")[1] is None:
        raise Refused(
            "max_length",
            "without a value, no sequence is truncated, so the longest sequence is unknown",
            "write how many tokens the longest example has",
        )

    precision = _precision(False, file.flag("bf16", default=not fp16), fp16)
    if dtype == "float32" and lora and precision != "fp32":
        file.notes.append(FP32_BASE)
    if dtype == "float16":
        precision = "fp16_mixed"
    elif dtype != "float32" and not (lora and precision != "fp32"):
        # The trained parameters themselves are in bf16, whether autocast is on or off.
        precision = "bf16_pure"

    recompute_options = file.mapping(
        "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"
    )
    every = recompute_options.whole("every_n_layers", default=1, most=9999)
    offload = file.flag("activation_offloading")
    checkpointing = "full" if every == 1 else f"every_{every}"
    if offload or recompute_options.flag("offload"):
        checkpointing = "offload"
    older_sft = _is_older_sft(file)
    older = older_sft or _is_older_grpo(file)
    recomputes = file.flag("gradient_checkpointing", default=not older)
    if not file.flag("activation_checkpointing", default=recomputes):
        checkpointing = "none"

    file.note(not lora and file.has("lora_r"), "no_adapters")
    file.note(dtype == "auto", "dtype_auto")
    is_wrapped = file.text("packing_strategy") == "wrapped"
    file.note(packing and is_wrapped, "crossed")
    file.note(
        packing and not is_wrapped and "flash" not in file.text("attn_implementation"),
        "packed_mask",
    )
    file.note(offload and checkpointing == "none", "less_memory", key="activation_offloading")
    file.note(recompute_options.flag("selective"), "more_memory", key="selective")
    file.note(file.text("accelerate_config").startswith(("fsdp", "zero")), "sharded")
    file.note(older_sft, "older_sft")
    plain, liger = file.has(TRANSFORMERS, SWIFT) or older_sft, file.flag("use_liger_kernel")
    is_sft = objective_of(file, "trl") is Objective.SFT
    file.note(is_sft and not plain, "chunked_loss")
    fused = not plain or (liger and not file.has(OWN_LOSS))
    file.note(is_sft and plain and fused, "fused_loss")
    file.note(is_sft and file.has(SWIFT) and not fused, "swift")

    return {
        "method": "lora" if lora else "full",
        "precision": precision,
        "quantization": _quantization(file.flag("load_in_4bit"), file.flag("load_in_8bit")),
        "checkpointing": checkpointing,
        # transformers' own Trainer, from which ms-swift's derives, computes the logits of all
        # tokens in float32.
        "loss": "chunked" if fused else "full",
        "kernels": "liger" if liger else "torch",
        "packing": packing,
    }


def _is_older_sft(file: File) -> bool:
    """Whether an SFT run is for TRL before 0.20, by its key `max_seq_length`.

    Unsloth, ms-swift and programs with transformers' Trainer have a key of the same name.
    """
    others = ("max_length", "Unsloth", SWIFT, TRANSFORMERS)
    is_sft = objective_of(file, "trl") is Objective.SFT
    return is_sft and file.has("max_seq_length") and not file.has(*others)


def _is_older_grpo(file: File) -> bool:
    """Whether a GRPO run may be for TRL before 0.22, which does not recompute by default.

    Its older keys ended later. The sleep mode came with 0.23.
    """
    is_grpo = objective_of(file, "trl") is Objective.GRPO
    return is_grpo and bool(older_key(file)) and not file.has("vllm_enable_sleep_mode")


def _axolotl_knobs(file: File) -> dict[str, Any]:
    """Return the knobs whose keys only Axolotl has."""
    if file.has("model_quantization_config"):
        options = file.mapping("model_quantization_config_kwargs")
        if not options.flag("dequantize"):
            why = "a base that stays in this format is not supported"
            raise Refused("model_quantization_config", why, "let Axolotl dequantise it")
    adapter = file.text("adapter")
    four_bit = file.flag("load_in_4bit")
    eight_bit = file.flag("load_in_8bit")
    if adapter not in ("", "lora", "qlora"):
        raise Refused("adapter", f"lora, qlora or none is supported, not {quote(adapter)}", REMEDY)
    if adapter == "qlora" and not four_bit:
        raise Refused(
            "adapter", "Axolotl refuses qlora without load_in_4bit: true", "set load_in_4bit: true"
        )
    file.note(adapter == "lora" and four_bit, "not_quantised")

    words = {"offload", "offload_disk", "unsloth", "legacy", "disk", "hidden_states"}
    values = [file.values.get(key) for key in ("gradient_checkpointing", "activation_offloading")]
    offload = any(value in words for value in values if isinstance(value, str)) or file.flag(
        "activation_offloading"
    )
    file.note(offload, "offloaded")
    plugins = " ".join(file.names("plugins")).lower()
    linear = file.flag("liger_fused_linear_cross_entropy")

    layers = [
        file.flag(f"liger_{layer}")
        for layer in ("rope", "rms_norm", "layer_norm", "glu_activation", "swiglu")
    ]

    liger = "liger" in plugins
    file.note((linear or any(layers)) and not liger, "no_liger")
    file.note(liger and file.flag("liger_cross_entropy"), "less_memory", key="liger_cross_entropy")
    fused = (liger and linear) or (
        "cut_cross_entropy" in plugins and file.flag("cut_cross_entropy", default=True)
    )

    asked = file.flag("quantize_moe_experts")
    packs = asked and four_bit and adapter == "qlora"
    file.note(packs, PACKED_EXPERTS)
    file.note(packs and liger and any(layers), WITHOUT_LIGER)
    file.note(asked and not packs, "less_memory", key="quantize_moe_experts")

    kernel_keys = [f"lora_{part}_kernel" for part in ("mlp", "qkv", "o", "embedding")]
    automatic = not (
        eight_bit
        or file.has("trust_remote_code")
        or any(file.values.get(key) is not None for key in kernel_keys)
    )
    file.note(adapter != "" and (automatic or file.has(*kernel_keys)), "lora_kernels")

    checkpointing = "offload"
    if not offload:
        sharding = file.mapping("fsdp_config")  # may turn on activation checkpointing
        fsdp_recomputes = any(
            sharding.flag(f"{prefix}activation_checkpointing") for prefix in ("", "fsdp_")
        )
        checkpointing = "full" if file.flag("gradient_checkpointing") or fsdp_recomputes else "none"

    return {
        "method": "lora" if adapter else "full",
        "precision": _axolotl_precision(file, adapter),
        "quantization": _quantization(four_bit and adapter != "lora", eight_bit),
        "quantize_experts": packs,
        "checkpointing": checkpointing,
        "loss": "chunked" if fused else "full",
        "kernels": "liger" if liger and any(layers) and not packs else "torch",
        "packing": file.flag("sample_packing"),
    }


def _axolotl_precision(file: File, adapter: str) -> str:
    """Return the precision. Without an adapter, Axolotl's bf16 also stores the weights in bf16."""
    fp16 = file.flag("fp16") or file.flag("float16")
    bf16_mode = file.values.get("bf16", "auto")  # a key without a value switches bf16 off
    bf16 = file.flag("bfloat16") or bf16_mode == "full"
    if not bf16:
        bf16 = not fp16 if bf16_mode == "auto" else file.flag("bf16")

    file.note(bf16 and not adapter, "bf16_weights")
    file.note(file.flag("float16") and not bf16, "fp16_weights")
    return _precision(bf16 and (bf16_mode == "full" or not adapter), bf16, fp16)


def _llamafactory_knobs(file: File) -> dict[str, Any]:
    """Return the knobs whose keys only LLaMA-Factory has."""
    if not file.flag("do_train"):
        raise Refused(
            "do_train", "is not true, so LLaMA-Factory trains nothing", "add `do_train: true`"
        )
    stage = file.text("stage", default="sft")
    method = file.text("finetuning_type", default="lora")
    if method not in ("lora", "full", "freeze", "oft"):
        why = f"lora, full, freeze or oft is supported, not {quote(method)}"
        raise Refused("finetuning_type", why, REMEDY)
    has_adapters = method in ("lora", "oft")
    file.note(method == "freeze", "frozen")
    file.note(method == "oft", "oft")
    bits = file.whole("quantization_bit", default=16)
    if bits not in (4, 8, 16):
        raise Refused("quantization_bit", f"4 or 8 is supported, not {bits}", REMEDY)
    quantizer = file.text("quantization_method", default="bnb")
    file.note(bits < 16 and quantizer != "bnb", "quantised_by", name=quote(quantizer))

    # With BAdam, LLaMA-Factory keeps the checkpoint's dtype: bf16 for most models.
    pure = file.flag("pure_bf16") or file.flag("use_badam")
    bf16 = file.flag("bf16")
    fp16 = file.flag("fp16")
    file.note(not (pure or bf16 or fp16), "no_autocast")
    usual_mode = "offload" if file.flag("use_unsloth_gc") else "full"

    liger = file.flag("enable_liger_kernel") or file.flag("use_liger_kernel")
    neat = file.flag("neat_packing")
    packing = neat or file.flag("packing", default=stage == "pt")
    file.note(packing and not neat, "crossed")

    return {
        "method": "lora" if has_adapters else "full",
        # Without autocast, the base has its published dtype, and trained parameters are in fp32. If
        # adapters are trained, the knob's value bf16_mixed comes closest to these dtypes.
        "precision": _precision(pure, bf16, fp16, "bf16_mixed" if has_adapters else "fp32"),
        "quantization": _quantization(bits == 4, bits == 8),
        "checkpointing": "none" if file.flag("disable_gradient_checkpointing") else usual_mode,
        "loss": "chunked" if liger else "full",
        "kernels": "liger" if liger else "torch",
        "packing": packing,
    }

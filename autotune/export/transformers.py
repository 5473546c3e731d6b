"""training_args.json, adapter_config.json and quantization_config.json, for the user's own Trainer script.

JSON has no comments, so `transformers_notes.md` says how to load the files, and what none of them can express.
"""

import json
from typing import Any

from autotune.export import keys, script
from autotune.export.accelerate import command
from autotune.export.header import has_published_weights, model_source, on_cpu, one_line, summary_lines
from autotune.probe.model_settings import model_settings
from autotune.study.summary import Recipe

# Keys of trl_sft.yaml that TrainingArguments does not take.
_TRL_ONLY = ("max_length", "packing", "packing_strategy", "pad_to_multiple_of")
_OWN_WORDS = ("checkpointing", "compile")  # knobs that TRL passes to TrainingArguments unchanged


def export(recipe: Recipe) -> dict[str, str]:
    """The arguments, the notes and train_config.json; with LoRA the adapter's file, of a quantized base its file."""
    config = recipe.config
    values: dict[str, Any] = {"training_args.json": _arguments(recipe)}
    built = model_settings(config)
    if lora := built.lora_arguments():
        base = {"peft_type": "LORA", "base_model_name_or_path": model_source(recipe), "inference_mode": False}
        values["adapter_config.json"] = base | lora
    if bitsandbytes := built.bitsandbytes_arguments():
        compute = {"bnb_4bit_compute_dtype": config.base_dtype}
        values["quantization_config.json"] = {"quant_method": "bitsandbytes", **bitsandbytes, **compute}
    files = {name: json.dumps(value, indent=2) + "\n" for name, value in values.items()}
    files["train_config.json"] = script.settings(recipe).to_json()
    return files | {"transformers_notes.md": _notes(recipe, files)}


def _arguments(recipe: Recipe) -> dict[str, Any]:
    """Names that transformers 5.3 to 5.23 know: whole warm-up steps, and gradient_checkpointing."""
    sections = ("batch", "memory", "schedule")
    values = {key: value for section in sections for key, value in keys.write("trl", section, recipe).items()}
    return {name: value for name, value in values.items() if name not in _TRL_ONLY}


def inexpressible(recipe: Recipe) -> list[str]:
    """Knobs of the winner that none of the files can hold, each with what to do about it."""
    config = recipe.config
    pads = "fill rows to" if config.packing else "cut examples at, and pad them to,"
    gaps = [
        f"seq_len: {pads} {config.seq_len:,} tokens, as runtime/rows.py beside train.py does",
        f"attention {config.attention}: it goes to from_pretrained"
        + (", once runtime.patches.register_cudnn_attention() has run" if config.attention == "sdpa_cudnn" else ""),
    ]
    gaps += [item for item in keys.inexpressible("trl", recipe) if item.startswith(_OWN_WORDS)]
    if config.precision == "bf16_pure":
        gaps.append("precision bf16_pure: without autocast_adapter_dtype=False peft would keep adapters in fp32")
    if config.quantization == "fp8":
        gaps.append("quantization fp8: runtime.patches.multiply_in_fp8(model), before the adapters are added")
    if config.offloads and not any(item.startswith("checkpointing") for item in gaps):
        gaps.append(
            "checkpointing offload: train.py offloads what it checkpoints by runtime/patches.py, this by transformers"
        )
    if config.loss == "chunked":
        gaps.append("loss chunked: Trainer(compute_loss_func=chunked_loss(model)), made before adapters are added")
    if config.packing:
        gaps.append("packing: runtime.rows.pack and collate, so that each example attends to itself alone")
    return gaps


def _notes(recipe: Recipe, files: dict[str, str]) -> str:
    """Markdown. What others named stands in blocks of code alone, where nothing is markup."""
    speed = (
        "The speed is that of train.py, whose loop (runtime/lean_trainer.py) saves milliseconds in each micro batch."
    )
    if recipe.trainer != "transformers":
        speed = "The speed is that of another trainer, which was probed, and not of these files."
    lines = [
        "# A Trainer script with these files",
        "",
        *(f"    {one_line(line)}" for line in summary_lines(recipe)),
        "",
        f"{speed} The learning rate is a common default and was not tuned.",
        "",
        "```python",
        _snippet(recipe, files),
        "```",
        "",
        "Start it, with accelerate.yaml beside it:",
        "",
        f"    {command(recipe)}",
        "",
    ]
    if not has_published_weights(recipe):
        lines += ["There are no published weights of this shape: name your model.", ""]
    lines += ["What the files cannot hold:", "", *(f"- {item}" for item in inexpressible(recipe))]
    return "\n".join(lines) + "\n"


def _snippet(recipe: Recipe, files: dict[str, str]) -> str:
    """Python that loads model and arguments. The name of the model is in train_config.json: it is never in code."""
    config = recipe.config
    adapters, quantized = "adapter_config.json" in files, "quantization_config.json" in files
    names = ["AutoModelForCausalLM", "HfArgumentParser", "TrainingArguments"]
    names += ["BitsAndBytesConfig"] if quantized else []
    kwargs = [f'dtype="{config.base_dtype}"', f'attn_implementation="{config.attention}"', "use_safetensors=True"]
    if quantized:
        kwargs += [
            "quantization_config=BitsAndBytesConfig.from_dict(quantization)",
            'device_map={"": "cpu"}' if on_cpu(recipe) else 'device_map={"": 0}',
        ]
    lines = ["import json"]
    lines += ["from peft import LoraConfig, get_peft_model"] if adapters else []
    lines += [
        f"from transformers import {', '.join(sorted(names))}",
        "",
        '(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file("training_args.json")',
    ]
    lines += ['quantization = json.load(open("quantization_config.json"))'] if quantized else []
    lines += [
        'name = json.load(open("train_config.json"))["model"]',
        f"model = AutoModelForCausalLM.from_pretrained(name, {', '.join(kwargs)})",
        "model.config.use_cache = False",
    ]
    if adapters:
        autocast = config.precision != "bf16_pure"
        lines.append(
            f'model = get_peft_model(model, LoraConfig.from_pretrained("."), autocast_adapter_dtype={autocast})'
        )
    return "\n".join(lines)

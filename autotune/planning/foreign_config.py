"""Reads a fine-tuning run from a YAML file of TRL, Axolotl or LLaMA-Factory, as a TrainConfig.

The reader executes no part of the file, and does not look up the model or the dataset. A missing
key takes the tool's own default, from the sources of TRL 1.16, Axolotl 0.19 and LLaMA-Factory
0.9.5. If memory or speed depends on a setting that no knob expresses, the result has a note about
the setting. A run is refused if probes do not support its objective.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from autotune.catalog import ModelSpec
from autotune.catalog.model_names import quantised_copy
from autotune.catalog.model_sizes import Sizes
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import is_file, load_data, read_user_text, read_user_yaml
from autotune.core.knobs import KNOBS, check_value
from autotune.core.lora_targets import ALL_LINEAR, target_modules
from autotune.core.objective import NOT_OFFERED, Objective
from autotune.core.rollout_types import COLOCATED
from autotune.core.train_config import TrainConfig
from autotune.export.keys import default_of, key_of
from autotune.planning.counted_memory import shape_of
from autotune.planning.foreign_arguments import (
    SCRIPTS,
    is_swift,
    read_script,
    refuse_variables,
    swift_as_trl,
)
from autotune.planning.foreign_evaluation import evaluation_of
from autotune.planning.foreign_file import MAX_COUNT, File, Refused, quote, table
from autotune.planning.foreign_python import PROGRAMS, read_program
from autotune.planning.foreign_refusals import (
    refuse_at_start,
    refuse_other_deepspeed_values,
    refuse_targets,
    without_dropout,
)
from autotune.planning.foreign_rollouts import older_key, rollouts_of, with_rollout_keys
from autotune.planning.program_values import NOTEBOOK
from autotune.report.values.check import FP32_BASE, SWIFT, ForeignConfig
from autotune.trainer.settings import is_expert_parameter

# Modules outside the decoder layers. The estimate leaves out adapters on these modules.
OUTSIDE_LAYERS = {"lm_head", "embed_tokens", "wte"}
# A key that no file has. `run_check` adds this key to the values of a run if a dry probe cannot
# compute the run's loss in chunks. The memory then includes the logits of all tokens, and the table
# `lessens` in foreign_keys.yaml says that the run may need less.
FUSED_LOSS = "the fused loss"
# The notes about Axolotl's experts in 4 bits, and about Liger's kernels beside them
PACKED_EXPERTS, WITHOUT_LIGER = "packed_experts", "without_liger"
EXPERTS_BY_VERSION = "experts_by_version"  # the note about adapters on LLaMA-Factory's experts
EXPERT_KEY = "lora_target_parameters"  # TRL's and Axolotl's key for parameters with adapters
USUAL_ALPHAS = (16, 32)  # values of lora_alpha that are common at any rank, so they get no note

TOOLS = ("trl", "axolotl", "llamafactory")
_TRAINING = "pass the YAML file of a training by TRL, Axolotl or LLaMA-Factory"
_REMEDY = (
    "pass the file of a supported run: for sft, dpo, kto, grpo or reward, with LoRA or full "
    "fine-tuning, of a checkpoint that is not quantised"
)


def adapt_to_model(run: ForeignConfig, model: ModelSpec) -> ForeignConfig:
    """Adapt the run's attention, and the layers that get adapters, to the model.

    Raises UsageError if the model has none of the layers that the file names for adapters.
    """
    config = run.config
    kind = model.text_type
    refuse_targets(run.format, config, kind)
    if config.attention == "sdpa" and model.lacks("sdpa"):
        config = replace(config, attention="eager")

    targets, note = _known_targets(config, model)
    notes = (*run.notes, note) if note and note not in run.notes else run.notes
    if config.quantize_experts and not model.has_experts:
        of_experts = [table("notes")[name] for name in (PACKED_EXPERTS, WITHOUT_LIGER)]
        kernels = "liger" if of_experts[1] in notes else config.kernels
        config = replace(config, quantize_experts=False, kernels=kernels)
        notes = tuple(one for one in notes if one not in of_experts)
    if (
        run.format == "llamafactory"
        and model.has_experts
        and config.method == "lora"
        and targets == ALL_LINEAR
    ):
        notes = tuple(dict.fromkeys((*notes, table("notes")[EXPERTS_BY_VERSION])))
    rollouts = run.rollouts
    if rollouts and rollouts.engine.kind == COLOCATED and not rollouts.engine.max_tokens:
        context = model.max_seq_len or rollouts.longest
        rollouts = replace(rollouts, engine=replace(rollouts.engine, max_tokens=context))
    undropped = without_dropout(config, kind)
    if undropped != config:
        config = undropped
        notes = (*notes, table("notes")["joined_experts"])
    config = replace(config, lora_targets=targets)
    return replace(run, config=config, notes=notes, rollouts=rollouts)


def _known_targets(config: TrainConfig, model: ModelSpec) -> tuple[str, str]:
    """Return the equivalent value of the knob `lora_targets` for this model, and a note or "".

    The note says which names the model does not have, or which layers PEFT refuses to adapt. Raises
    UsageError if no name matches a linear layer.
    """
    targets = config.lora_targets
    sizes = Sizes.of(model)
    if targets in KNOBS["lora_targets"].choices:
        layer_names = target_modules(model.text_type, targets)
        if layer_names and targets == ALL_LINEAR and config.method == "lora":
            return targets, table("notes")["refused"].format(names=", ".join(layer_names))
        return targets, ""

    # If the file lists the same names as one of the knob's choices, return this choice.
    names = {name.rpartition(".")[2]: name for name in targets.split(",")}
    layers = set(sizes.matrices) if sizes else _linear_names(model)
    for choice in KNOBS["lora_targets"].choices:
        if set(targets.split(",")) == set(target_modules(model.text_type, choice) or ()):
            return str(choice), ""
    if sizes is None and any(map(is_expert_parameter, targets.split(","))):
        return targets, ""
    if layers <= names.keys() if layers else any(map(set(names).issuperset, table("all_linear"))):
        return ALL_LINEAR, ""

    layers = layers or set(names)
    absent = sorted(names.keys() - layers - OUTSIDE_LAYERS)
    if not names.keys() & layers:
        known = ", ".join(sizes.matrices if sizes else sorted(layers))
        wrong = f"no linear layer of this model is named {quote(', '.join(absent))}"
        raise UsageError(wrong, remedy=f"name some of the model's linear layers: {known}")
    note = table("notes")["absent"].format(targets=quote(", ".join(absent))) if absent else ""
    return ",".join(sorted(names[name] for name in names.keys() & layers)), note


def _linear_names(model: ModelSpec) -> set[str]:
    """Return the names of a model's linear layers, or nothing if they are unknown.

    They count as unknown for a mixture of experts, because PEFT also finds fused experts by the
    names of their projections.
    """
    shape = None if model.has_experts else shape_of(model)
    return {path.rpartition(".")[2] for path in shape.linear_layers} if shape else set()


def parse(values: dict[str, Any], tool: str) -> ForeignConfig:
    """Return the run that the values of a file describe for `tool`, one of TOOLS.

    Raises UsageError for an impossible value, and for an unsupported kind of run.
    """
    file = _completed(File(values=values, notes=[]), tool)
    return replace(_read(file, tool), values=file.values)


def _completed(file: File, tool: str) -> File:
    """Return the file with added keys, which its own keys imply."""
    implied: dict[str, Any] = {}
    method = file.text("finetuning_type") if tool == "llamafactory" else ""
    if method == "freeze":
        implied["freeze_trainable_layers"] = 2
    if method == "oft":
        file = _oft_as_lora(file)
    # No formula covers checkpoints in the formats NVFP4 and AQLM. The table `lessens` in
    # foreign_keys.yaml has a row for each format.
    _, storage = quantised_copy(file.text(key_of(tool, "model")))
    if storage in ("NVFP4", "AQLM"):
        implied[f"{storage} storage"] = True
    return replace(file, values=implied | file.values)


def _oft_as_lora(file: File) -> File:
    """Return the file with LoRA in place of OFT, at a rank that needs less memory than OFT.

    Orthogonal fine-tuning (OFT) with blocks of n inputs has (n - 1) / 2 parameters for each input
    of a layer. LoRA of rank n / 8 has n / 8 parameters for each input and for each output. OFT also
    stores a float32 copy of each layer's input.
    """
    block = file.whole("oft_block_size", default=32, least=0)  # 0 if the file sets oft_rank
    adapters = {"lora_rank": max(1, block // 8), "lora_target": file.values.get("oft_target")}
    unused = dict.fromkeys(("lora_alpha", "lora_dropout"))
    return replace(file, values=file.values | unused | adapters)


def read_file(path: Path, objective: str | None = None) -> ForeignConfig:
    """Return the run that a file of TRL, Axolotl, LLaMA-Factory or ms-swift describes.

    The file is YAML, a Python program or a notebook with a trainer of TRL, or a shell script that
    starts a program or has the training command of TRL or ms-swift. `objective` names the objective
    of TRL's command, which the file does not contain. Raises UsageError if the file describes no
    run, and in the cases of `parse`.
    """
    is_command, ignored = path.suffix in (*SCRIPTS, *PROGRAMS), ""
    if path.suffix in PROGRAMS:
        values, ignored = read_program(path)
    elif path.suffix in SCRIPTS:
        values, ignored = read_script(path)
    else:
        values = _load(path)
    if is_swift(values):
        tool = "trl"
        values, ignored = swift_as_trl(values)
    elif is_command:
        tool = "trl"
        refuse_variables(values)
        values = _with_config_file(path, values)
    else:
        tool = _tool_of(path, values)
        values.pop("objective", None)  # no tool has this key; only a command says it
    if objective is not None and tool == "trl":
        values["objective"] = _command_objective(objective)

    try:
        unknown = "" if SWIFT in values else _unknown_keys(values, tool)
        values |= _accelerate_settings(path, values)
        values |= _deepspeed_settings(path, values.get("deepspeed"))
        ignored = "; ".join(filter(None, (ignored, unknown, _unknown_fsdp_keys(values))))
        return replace(parse(values, tool), ignored=ignored)
    except Refused as refusal:
        raise locate_refusal(path, refusal, ignored) from None


def locate_refusal(path: Path, refusal: Refused, ignored: str = "") -> UsageError:
    """Return the refusal of a key as an error with the file's name and the key's line.

    The error also has the sentence about ignored keys, because an ignored key can be the reason for
    the refusal.
    """
    lines = [] if path.suffix == NOTEBOOK else read_user_text(path).splitlines()
    of_key = re.compile(rf"\s*['\"]?{re.escape(refusal.key)}['\"]?\s*[:=]")
    line = next((f":{number}" for number, text in enumerate(lines, 1) if of_key.match(text)), "")
    also = f" ({ignored})" if ignored else ""
    return UsageError(f"{path}{line}: {refusal}{also}", remedy=refusal.remedy)


def _command_objective(objective: str) -> str:
    """Return `objective`. Raises UsageError if no command of TRL trains for this objective."""
    objectives = [str(one) for one in Objective if "trl" in one.trainers]
    if objective not in objectives:
        raise UsageError(
            f"no command of TRL trains for {quote(objective)}",
            remedy=f"give {', '.join(objectives)}",
        )
    return objective


def _unknown_keys(values: dict[str, Any], tool: str) -> str:
    """Return a sentence about the keys that Axolotl ignores, or "".

    Raises Refused for an unknown key in a file of TRL or LLaMA-Factory, because these tools refuse
    such a file.
    """
    tool_keys = load_data("autotune.planning", "known_keys")[tool]
    unsupported = set(chain.from_iterable(run["keys"] for run in table("refused")))
    known = {*tool_keys["keys"], *unsupported, *_keys_of_tables()}
    # A key without a value has no effect. An unsupported run is refused later, with its own reason.
    unknown = [key for key, value in values.items() if key not in known and value is not None]
    if not unknown or any(map(values.get, unsupported)):
        return ""

    title = tool_keys["title"]
    named = ", ".join(f"{quote(key)}{did_you_mean(key, tool_keys['keys'])}" for key in unknown)
    if tool == "axolotl":
        return f"ignored by {title}: {named}"
    near = did_you_mean(unknown[0], tool_keys["keys"])
    others = f" (also {named.partition(', ')[2]})" if len(unknown) > 1 else ""
    raise Refused(
        unknown[0],
        f"{title} has no such key, and refuses the file{near}{others}",
        "correct the key, or remove it for this check if only a newer version has it",
    )


def _unknown_fsdp_keys(values: dict[str, Any]) -> str:
    """Return a sentence about the keys of fsdp_config that FSDP ignores, or ""."""
    settings = values.get("fsdp_config")
    known = table("fsdp_keys")
    unknown = [
        f"{quote(key)}{did_you_mean(str(key).removeprefix('fsdp_'), known)}"
        for key in (settings if isinstance(settings, dict) else ())
        if str(key).removeprefix("fsdp_") not in known
    ]
    return f"ignored in fsdp_config: {', '.join(unknown)}" if unknown else ""


def _keys_of_tables() -> Iterator[str]:
    """Yield the keys in planning/foreign_keys.yaml that a supported run of any tool may have."""
    for name in ("noted", "objective_keys"):
        yield from chain.from_iterable(table(name).values())
    yield from table("program")["implied"]
    for name in (
        *("parallel", "split", "data_parallel", "resized", "other_references"),
        "older_rollouts",
    ):
        yield from table(name)


def _accelerate_settings(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for several GPUs from the accelerate file that a run names.

    A setting that the run's own `values` have is left out, because the tools prefer it to the
    file's. If the run names not a file but a preset of TRL, such as fsdp2, the result is empty.
    """
    name = values.get("accelerate_config")
    if not isinstance(name, str) or Path(name).suffix not in (".yaml", ".yml", ".json"):
        return {}
    settings = _read_named_file(path, name)
    if settings is None:
        return {"absent_accelerate_config": name}

    kind = str(settings.get("distributed_type", "")).upper()
    found: dict[str, Any] = {}
    processes = settings.get("num_processes")
    if isinstance(processes, int) and processes > 1:
        found["num_processes"] = processes
    if kind == "FSDP":
        found["fsdp"] = "full_shard"
        found["fsdp_config"] = settings.get("fsdp_config") or {}
    if kind == "DEEPSPEED":
        inside = settings.get("deepspeed_config")
        inside = inside if isinstance(inside, dict) else {}
        stage = inside.get("zero_stage")
        offloads = ("param", "optimizer")
        zero = {"stage": stage} | {
            f"offload_{part}": {"device": inside.get(f"offload_{part}_device", "none")}
            for part in offloads
        }
        found["deepspeed"] = inside.get("deepspeed_config_file") or {"zero_optimization": zero}
    own = {key for key, value in values.items() if value}
    return {key: value for key, value in found.items() if key not in own} | {
        "accelerate_config": None
    }


def _with_config_file(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of TRL's command with those of the file that its --config names.

    An argument of the command replaces the file's value. Raises UsageError if the file is absent.
    """
    if "objective" not in values or "config" not in values:
        return values
    name = str(values["config"])
    settings = _read_named_file(path, name)
    if settings is None:
        raise UsageError(
            f"{path}: there is no file {quote(name)} (--config)",
            remedy="check the path, which starts at the script or at the current directory",
        )
    return settings | {key: value for key, value in values.items() if key != "config"}


def _deepspeed_settings(path: Path, file_name: Any) -> dict[str, Any]:
    """Return the settings in the DeepSpeed file that a run names.

    If the file is absent, the result contains only the file's name.
    """
    if not isinstance(file_name, str) or not file_name.strip():
        return {}
    settings = _read_named_file(path, file_name)
    if settings is not None:
        return {"deepspeed": settings, "deepspeed_file": file_name}
    return {"absent_deepspeed": file_name} if Path(file_name).suffix else {}


def _read_named_file(path: Path, name: str) -> dict[str, Any] | None:
    """Return the content of a YAML or JSON file that a run names, or None if it is absent.

    The file is looked up beside the run's file, then in the current directory. Raises UsageError
    for a damaged file.
    """
    file = next((one for one in (path.parent / name, Path(name)) if is_file(one)), None)
    if file is None:
        return None
    text = read_user_text(file)
    if not text.lstrip().startswith("{"):
        return _load(file)
    try:
        settings: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{file}: not valid JSON: {reason}", remedy="correct it") from None
    return settings


def _load(path: Path) -> dict[str, Any]:
    from pydantic import RootModel

    values = read_user_yaml(path, RootModel[Any]).root
    if not isinstance(values, dict) or not values:
        raise UsageError(
            f"{path} has no keys with values", remedy="pass the YAML that you train with"
        )
    return {key: value for key, value in values.items() if isinstance(key, str)}


def _tool_of(path: Path, values: dict[str, Any]) -> str:
    """Return the tool that the file is for. Raises UsageError if the tool is unclear."""
    if other := _other_tool(values):
        raise UsageError(f"{path} is a file of {other}, which is not supported", remedy=_TRAINING)

    # Some YAML files belong to the supported tools but describe no training.
    for other in table("other_files"):
        if not values.get("do_train") and any(map(values.get, other["keys"])):
            raise UsageError(
                f"{path} is {other['what']}: it describes no training", remedy=_TRAINING
            )
    if any(key in values for key in table("marks_of_v1")):
        raise UsageError(
            f"{path}: the format of LLaMA-Factory v1 is not supported", remedy=_TRAINING
        )

    # Some keys identify a tool. The file belongs to the tool with the most such keys in the file.
    all_marks = table("marks")
    present = {tool: [key for key in marks if key in values] for tool, marks in all_marks.items()}
    first, second, *_ = sorted(TOOLS, key=lambda tool: len(present[tool]), reverse=True)
    if len(present[first]) > len(present[second]):
        return first
    marks = present if present[first] else all_marks
    keys = "; ".join(f"{', '.join(names)} of {tool}" for tool, names in marks.items() if names)
    raise UsageError(
        f"{path}: cannot tell which tool it is for: it has "
        f"{'both' if present[first] else 'none of'} {keys}",
        remedy=_TRAINING,
    )


def _other_tool(values: dict[str, Any]) -> str:
    """Return the name of an unsupported tool whose run a file describes, or ""."""
    if any(isinstance(value, dict) and "_component_" in value for value in values.values()):
        return "torchtune"
    for tool in table("other_tools"):
        if any(all(map(values.get, keys)) for keys in tool["keys"]):
            return str(tool["name"])
    return ""


def _read(file: File, tool: str) -> ForeignConfig:
    """Read a tool's file as a training run. The field `values` of the run stays empty."""
    for named in ("absent_accelerate_config", "absent_deepspeed"):
        file.note(named in file.values, "absent_file", name=quote(file.values.get(named)))

    # If a key is both in one of these mappings and at the top level, the tools use the mapping's
    # value.
    for nested in ("model_init_kwargs", "bnb_config_kwargs"):
        file = replace(file, values=file.values | file.mapping(nested).values)

    for unsupported_run in table("refused"):
        if key := next(filter(file.has, unsupported_run["keys"]), None):
            raise Refused(key, unsupported_run["reason"], _REMEDY)

    model_key = key_of(tool, "model")
    model = file.text(model_key)
    if not model:
        raise Refused(model_key, "is missing", "say which model is trained")
    read_objective = {
        "trl": _trl_objective,
        "axolotl": _axolotl_objective,
        "llamafactory": _llamafactory_objective,
    }
    objective = read_objective[tool](file)
    if tool == "axolotl" and objective is Objective.GRPO:
        file = with_rollout_keys(file)
    knobs = _knobs(file, tool, objective)

    micro_batch = _whole_number(file, tool, "micro_batch_size")
    max_steps = file.whole("max_steps", default=-1, least=-MAX_COUNT, most=MAX_COUNT)
    epochs = file.number(
        key_of(tool, "epochs"), default=default_of(tool, "epochs"), least=0.001, most=MAX_COUNT
    )

    datasets = file.names("datasets", "pretraining_dataset", "dataset_name", "dataset")
    samples = file.whole("max_samples", default=0, most=MAX_COUNT)  # limit for each dataset
    double_quant = file.flag(
        key_of(tool, "double_quant"), default=bool(default_of(tool, "double_quant"))
    )
    accumulation = _accumulation(file, tool, micro_batch)
    gpus = table("data_parallel") + table("parallel")
    num_gpus = math.prod(file.whole(key, default=1) for key in gpus) if file.has(*gpus) else None
    rollouts = None
    if objective is Objective.GRPO:
        rollouts = rollouts_of(file, tool, micro_batch, accumulation, num_gpus)
        seq_len = rollouts.longest
    else:
        seq_len = file.whole(
            key_of(tool, "seq_len"), "max_seq_length", default=default_of(tool, "seq_len")
        )

    # The trainers for objectives other than SFT pass an attention mask for every row.
    padding = "longest" if objective is Objective.SFT else "masked"
    knobs["padding"] = "max_length" if _fills_rows(file, tool, seq_len) else padding
    config = TrainConfig(
        micro_batch_size=micro_batch, seq_len=seq_len, double_quant=double_quant, **knobs
    )
    evaluation = evaluation_of(file, tool, config, objective)
    refuse_at_start(file, tool, config)
    refuse_other_deepspeed_values(file, tool, config, accumulation)
    return ForeignConfig(
        format=tool,
        model=model,
        config=config,
        accumulation=accumulation,
        num_gpus=num_gpus,
        epochs=None if max_steps > 0 else float(epochs),
        max_steps=max_steps if max_steps > 0 else None,
        max_examples=samples * max(1, len(datasets)) or None,
        dataset=",".join(datasets) or None,
        objective=objective,
        evaluation=evaluation,
        rollouts=rollouts,
        notes=tuple(dict.fromkeys(file.notes)),
        minor=frozenset(file.minor),
        needs_more=not file.noted.isdisjoint(table("needs_more")),
    )


def _knobs(file: File, tool: str, objective: Objective) -> dict[str, Any]:
    """Return the knobs that a file sets, except the micro batch size and the row length."""
    read_knobs = {"trl": _trl_knobs, "axolotl": _axolotl_knobs, "llamafactory": _llamafactory_knobs}
    knobs = read_knobs[tool](file) | _stored_quantization(file, tool)
    if tool != "trl" and file.has(*table("noted")["own_loss"]):
        knobs["loss"] = "full"  # a custom loss replaces the fused loss
    if file.has(FUSED_LOSS):
        knobs["loss"] = "full"
    if objective is not Objective.SFT:
        knobs |= _objective_knobs(file, tool, objective, packing=knobs["packing"])
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


def _trl_objective(file: File) -> Objective:
    """Return the objective that the user gave, or else the objective that the file's keys imply.

    Some keys belong to only one of TRL's trainers, and each trainer has one objective.
    """
    losses = file.names("loss_type")
    known_losses = table("objective_losses")
    if file.has("objective"):
        objective = Objective(file.text("objective"))
        known = known_losses.get(objective, [])
        if not set(losses) <= set(known):
            raise _unknown_loss(objective, losses, known)
        return objective

    # The key `loss_type`, if set, determines TRL's trainer.
    for name, known in known_losses.items():
        if losses and set(losses) <= set(known):
            return Objective(name)
    if losses and file.has(*table("objective_keys")["grpo"]):
        raise _unknown_loss(Objective.GRPO, losses, known_losses["grpo"])
    if losses:
        raise Refused(
            "loss_type",
            f"no supported trainer of TRL has the loss {quote(', '.join(losses))}",
            _REMEDY,
        )

    # Without `loss_type`, a key that belongs to only one trainer determines it.
    for name, keys in table("objective_keys").items():
        if file.has(*keys):
            return Objective(name)
    for key in ("beta", "max_prompt_length"):
        if file.has(key):
            reason = (
                "the file does not say if the objective is dpo, kto or another; only TRL's command "
                "says it"
            )
            raise Refused(key, reason, "give --objective dpo, kto or reward")
    return Objective.SFT


def _unknown_loss(objective: Objective, losses: tuple[str, ...], known: list[str]) -> Refused:
    unknown = ", ".join(loss for loss in losses if loss not in known)
    return Refused(
        "loss_type",
        f"TRL's trainer for {objective.upper()} has no loss {quote(unknown)}",
        f"write one of {', '.join(known)}; or remove the key for this check if only a newer "
        "version has the loss"
        if known
        else "remove the key",
    )


def _axolotl_objective(file: File) -> Objective:
    name = file.text("rl") if file.has("rl") else ""
    if file.flag("reward_model"):
        return Objective.REWARD
    return _known_objective("rl", name, table("rl")) if name else Objective.SFT


def _llamafactory_objective(file: File) -> Objective:
    objective = _known_objective("stage", file.text("stage", default="sft"), table("stages"))
    loss = file.text("pref_loss", default="sigmoid")
    if objective is Objective.DPO and loss in ("orpo", "simpo"):
        raise Refused("pref_loss", f"no probe trains for {loss}", _REMEDY)
    return objective


def _known_objective(key: str, name: str, known: dict[str, str]) -> Objective:
    if name not in known:
        why = NOT_OFFERED.get(name, "no probe trains for it")
        raise Refused(
            key,
            f"{quote(name)} is none of the objectives {', '.join(sorted(known))}: {why}",
            _REMEDY,
        )
    return Objective(known[name])


def _objective_knobs(
    file: File, tool: str, objective: Objective, *, packing: bool
) -> dict[str, Any]:
    """Return the knobs that an objective other than SFT sets.

    Adds notes on differences between the tool's trainer and the estimate.
    """
    if packing:
        key = key_of(tool, "packing")
        raise Refused(key, f"sequences of {objective} are not packed", "switch it off")

    # KTO compares the answers of a micro batch, except with the loss apo_zero_unpaired.
    compares = tool != "llamafactory" and file.names("loss_type") != ("apo_zero_unpaired",)
    if (
        objective is Objective.KTO
        and compares
        and _whole_number(file, tool, "micro_batch_size") < 2
    ):
        key = key_of(tool, "micro_batch_size")
        raise Refused(
            key,
            "for KTO, TRL compares the answers within a micro batch, so it needs at least two",
            "write 2 or more",
        )

    full_logits = tool == "llamafactory" or (
        tool == "axolotl" and objective is not Objective.REWARD
    )
    if objective is Objective.GRPO:
        return {"loss": "chunked", "packing": False}
    if full_logits and objective is Objective.REWARD:
        file.note(True, "value_head")
    elif full_logits:
        file.note(
            True,
            "whole_logits",
            tool="LLaMA-Factory" if tool == "llamafactory" else "Axolotl's TRL 1.8",
        )

    for key in table("other_references"):
        file.note(file.has(key), "other_reference", key=key)
    file.note(file.flag("precompute_ref_log_probs"), "precomputed")
    return {"loss": "chunked", "packing": False}


def _accumulation(file: File, tool: str, micro_batch: int) -> int:
    """Return the number of micro batches per step.

    If the tool's key for this number is missing, Axolotl's older key `batch_size` may give the rows
    per step instead.
    """
    default = max(1, file.whole("batch_size", default=micro_batch) // micro_batch)
    return file.whole(key_of(tool, "accumulation"), default=default)


def _fills_rows(file: File, tool: str, seq_len: int) -> bool:
    """Return whether rows are padded to seq_len, not to the longest row of a micro batch."""
    if tool == "llamafactory":
        return False
    if tool == "axolotl":
        if file.values.get("pad_to_sequence_len") is not None:
            return file.flag("pad_to_sequence_len")
        if file.flag("reward_model"):  # Axolotl then sets the key itself
            return True
    return file.whole("pad_to_multiple_of", default=1) >= seq_len


def _whole_number(file: File, tool: str, knob: str) -> int:
    """Return the integer that the file has for a knob under the tool's key, or the default."""
    return file.whole(key_of(tool, knob), default=default_of(tool, knob))


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
    file.note(optimizer not in optimizers, "optimizer", name=quote(optimizer), state=state)

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
    rank = _whole_number(file, tool, "lora_rank")
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
    older = _trl_objective(file) is Objective.GRPO and bool(older_key(file))
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
    file.note(_trl_objective(file) is Objective.SFT, "chunked_loss")

    return {
        "method": "lora" if lora else "full",
        "precision": precision,
        "quantization": _quantization(file.flag("load_in_4bit"), file.flag("load_in_8bit")),
        "checkpointing": checkpointing,
        "loss": "chunked",
        "kernels": "liger" if file.flag("use_liger_kernel") else "torch",
        "packing": packing,
    }


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
        raise Refused("adapter", f"lora, qlora or none is supported, not {quote(adapter)}", _REMEDY)
    if adapter == "qlora" and not four_bit:
        raise Refused(
            "adapter", "Axolotl refuses qlora without load_in_4bit: true", "add that line"
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
        raise Refused("finetuning_type", why, _REMEDY)
    has_adapters = method in ("lora", "oft")
    file.note(method == "freeze", "frozen")
    file.note(method == "oft", "oft")
    bits = file.whole("quantization_bit", default=16)
    if bits not in (4, 8, 16):
        raise Refused("quantization_bit", f"4 or 8 is supported, not {bits}", _REMEDY)
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

"""Reads a fine-tuning run from a YAML file of TRL, Axolotl or LLaMA-Factory, as a TrainConfig.

The reader executes no part of the file, and does not look up the model or the dataset. A missing
key takes the tool's own default, from the sources of TRL 1.16, Axolotl 0.19 and LLaMA-Factory
0.9.5. If memory or speed depends on a setting that no knob expresses, the result has a note about
the setting. A run is refused if probes do not support its objective.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from autotune.catalog import ModelSpec
from autotune.catalog.model_names import quantised_copy
from autotune.catalog.model_sizes import Sizes
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import is_file, load_data, read_user_text, read_user_yaml
from autotune.core.knobs import KNOBS
from autotune.core.lora_targets import ALL_LINEAR, target_modules
from autotune.core.objective import Objective
from autotune.core.rollout_types import COLOCATED
from autotune.core.train_config import TrainConfig
from autotune.export.keys import default_of, key_of
from autotune.planning.counted_memory import shape_of
from autotune.planning.foreign_arguments import SCRIPTS, read_script, refuse_variables
from autotune.planning.foreign_dataset import LIMITED
from autotune.planning.foreign_evaluation import evaluation_of, held_out
from autotune.planning.foreign_file import ASSUMED, MAX_COUNT, SHELL, File, Refused, quote, table
from autotune.planning.foreign_knobs import PACKED_EXPERTS, WITHOUT_LIGER, knobs_of
from autotune.planning.foreign_objective import REMEDY, WHOLE_LOGITS, objective_of, whole_number
from autotune.planning.foreign_python import PROGRAMS, read_program
from autotune.planning.foreign_refusals import (
    refuse_at_start,
    refuse_other_deepspeed_values,
    refuse_targets,
    without_dropout,
)
from autotune.planning.foreign_rollouts import rollouts_of, with_rollout_keys
from autotune.planning.foreign_swift import is_swift, swift_as_trl
from autotune.planning.program_values import NOTEBOOK
from autotune.report.values.check import SWIFT, TRANSFORMERS, ForeignConfig
from autotune.trainer.settings import is_expert_parameter

# Modules outside the decoder layers. The estimate leaves out adapters on these modules.
OUTSIDE_LAYERS = {"lm_head", "embed_tokens", "wte"}
EXPERTS_BY_VERSION = "experts_by_version"  # the note about adapters on LLaMA-Factory's experts

# The values of accelerate's distributed_type that are read. MULTI_GPU is DDP.
_ACCELERATE_KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
TOOLS = ("trl", "axolotl", "llamafactory")
_WITHOUT_VALUE: tuple[Any, ...] = (None, False, "", [], {})
_TRAINING = "pass the YAML file of a training by TRL, Axolotl or LLaMA-Factory"


def adapt_to_model(run: ForeignConfig, model: ModelSpec) -> ForeignConfig:
    """Adapt the run's attention, and the layers that get adapters, to the model.

    Raises UsageError if the model has none of the layers that the file names for adapters.
    """
    config = run.config
    kind = model.text_type
    refuse_targets(SWIFT if run.tool == SWIFT else run.format, config, kind)
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

    The file is YAML, a Python program or a notebook with a trainer of TRL or transformers, or a
    shell script that starts a program or has the training command of TRL or ms-swift. `objective`
    names the objective of TRL's command, which the file does not contain. Raises UsageError if the
    file describes no run, and in the cases of `parse`.
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
        run = parse(values, tool)
        return replace(run, ignored="; ".join(filter(None, (ignored, *_unread_keys(run)))))
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

    title = TRANSFORMERS if values.get(TRANSFORMERS) else tool_keys["title"]
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


def _unread_keys(run: ForeignConfig) -> Iterator[str]:
    """Yield sentences about keys that the tool knows, but that the estimate does not read."""
    if run.tool == SWIFT:  # `swift_as_trl` names them
        return
    tables = load_data("autotune.planning", "unread_keys")
    given = [key for key, value in run.values.items() if value not in _WITHOUT_VALUE]
    owners = tables["of_objective"] if run.tool == "trl" else {}
    others = set(chain.from_iterable(owners.values())) - set(owners.get(run.objective, ()))
    if run.values.get("Unsloth"):  # its own key, which loads the model
        others.discard("max_seq_length")
    if misplaced := [key for key in given if key in others]:
        yield f"not read, because TRL's trainer for {run.objective} has no such key: " + ", ".join(
            misplaced
        )
    uncounted = [key for key in given if key in tables["not_counted"] and key not in others]
    settings = run.values.get("accelerator_config")
    if isinstance(settings, dict) and settings.get("split_batches"):
        uncounted.append("accelerator_config.split_batches")
    if uncounted:
        yield f"not counted: {', '.join(sorted(uncounted))}"


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

    kind = str(settings.get("distributed_type") or "NO").upper()
    if kind not in _ACCELERATE_KINDS:
        raise UsageError(
            f"{name}: distributed_type: {quote(kind)} is not supported",
            remedy=f"use one of {', '.join(_ACCELERATE_KINDS)}",
        )
    _refuse_split(name, settings.get("parallelism_config"))
    found: dict[str, Any] = {}
    for key in ("num_processes", "num_machines"):
        number = settings.get(key)
        if isinstance(number, int) and number > 1:
            found[key] = number
    dynamo = settings.get("dynamo_config")
    backend = dynamo.get("dynamo_backend") if isinstance(dynamo, dict) else None
    if str(backend or "NO").upper() != "NO":
        found["torch_compile"] = True
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


def _refuse_split(name: str, parallelism: Any) -> None:
    """Raise UsageError if accelerate's file splits layers or sequences over GPUs."""
    sizes = parallelism if isinstance(parallelism, dict) else {}
    for key, size in sizes.items():
        kind = str(key).removeprefix("parallelism_config_")
        if kind in ("tp_size", "cp_size", "sp_size") and size not in (None, 1):
            raise UsageError(
                f"{name}: {kind}: {quote(size)} is not supported",
                remedy="set it to 1",
            )


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

    The file is looked up beside the run's file, then in the current directory. A name with a folder
    may also start at a folder above the run's file, because scripts usually start at the top of
    their project. Raises UsageError for a damaged file.
    """
    above = path.absolute().parents if Path(name).parent != Path() else ()
    folders = (path.parent, Path(), *above)
    file = next((folder / name for folder in folders if is_file(folder / name)), None)
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
    # Three keys of each tool suffice to show what is missing.
    marks = present if present[first] else {tool: keys[:3] for tool, keys in all_marks.items()}
    keys = "; ".join(f"{', '.join(names)} of {tool}" for tool, names in marks.items() if names)
    has = "it has both" if present[first] else "it has no key of a training, such as"
    raise UsageError(f"{path}: cannot tell which tool it is for: {has} {keys}", remedy=_TRAINING)


def _other_tool(values: dict[str, Any]) -> str:
    """Return the name of an unsupported tool whose run a file describes, or ""."""
    if any(isinstance(value, dict) and "_component_" in value for value in values.values()):
        return "torchtune"
    for tool in table("other_tools"):
        if any(all(map(values.get, keys)) for keys in tool["keys"]):
            return str(tool["name"])
    return ""


def _note_sources(file: File) -> None:
    """Note the named files that are absent, and the values that come from elsewhere."""
    for named in ("absent_accelerate_config", "absent_deepspeed"):
        file.note(named in file.values, "absent_file", name=quote(file.values.get(named)))
    file.note(file.has(ASSUMED), "assumed_arguments", names=file.values.get(ASSUMED))
    file.note(file.has(SHELL), "shell_variables", values=file.values.get(SHELL))


def _read(file: File, tool: str) -> ForeignConfig:
    """Read a tool's file as a training run. The field `values` of the run stays empty."""
    _note_sources(file)

    # If a key is both in one of these mappings and at the top level, the tools use the mapping's
    # value.
    for nested in ("model_init_kwargs", "bnb_config_kwargs"):
        file = replace(file, values=file.values | file.mapping(nested).values)

    for unsupported_run in table("refused"):
        if key := next(filter(file.has, unsupported_run["keys"]), None):
            raise Refused(key, unsupported_run["reason"], REMEDY)

    model_key = key_of(tool, "model")
    model = file.text(model_key)
    if not model:
        raise Refused(model_key, "is missing", "say which model is trained")
    objective = objective_of(file, tool)
    if tool == "axolotl" and objective is Objective.GRPO:
        file = with_rollout_keys(file)
    knobs = knobs_of(file, tool, objective)
    _note_state_in_32_bits(file, tool, knobs)

    micro_batch = whole_number(file, tool, "micro_batch_size")
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
    generates = objective is Objective.GRPO
    rollouts = rollouts_of(file, tool, micro_batch, accumulation, num_gpus) if generates else None
    seq_len = rollouts.longest if rollouts else _seq_len(file, tool)

    # The trainers for objectives other than SFT pass an attention mask for every row, and so do
    # transformers' own and ms-swift's.
    masks = objective is not Objective.SFT or file.has(TRANSFORMERS, SWIFT)
    padding = "masked" if masks else "longest"
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
        max_examples=_most_examples(file, datasets, samples),
        dataset=",".join(datasets) or None,
        objective=objective,
        evaluation=evaluation,
        held_out=held_out(file, tool),
        rollouts=rollouts,
        notes=tuple(dict.fromkeys(file.notes)),
        minor=frozenset(file.minor),
        needs_more=not file.noted.isdisjoint(table("needs_more")),
        whole_logits=WHOLE_LOGITS in file.noted,
    )


def _note_state_in_32_bits(file: File, tool: str, knobs: Mapping[str, Any]) -> None:
    """Note an optimizer of bitsandbytes that keeps a state in 32 bits for weights in 16.

    Torch keeps the state in the dtype of the weights. Lion in 32 bits takes as much as AdamW in 16.
    """
    name = file.text(key_of(tool, "optimizer"), default="")
    in_32_bits = "32bit" in name and "lion" not in name
    state = f"{knobs['optimizer']} for weights in 16 bits"
    is_larger = in_32_bits and knobs["precision"] == "bf16_pure"
    file.note(is_larger, "larger_optimizer", name=quote(name), state=state)


def _most_examples(file: File, datasets: Sequence[str], samples: int) -> int | None:
    """Return the limit over all datasets, or None. `samples` limits each dataset unless it is 0.

    ms-swift takes N examples of a dataset that is written as name#N.
    """
    counts = [LIMITED.search(name) for name in datasets] if file.has(SWIFT) else []
    if counts and None not in counts:
        return sum(int(count[1]) for count in counts if count)
    return samples * max(1, len(datasets)) or None


def _seq_len(file: File, tool: str) -> int:
    """Return the largest number of tokens in a row."""
    keys = (key_of(tool, "seq_len"), "max_seq_length")
    return file.whole(*keys, default=default_of(tool, "seq_len"))


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

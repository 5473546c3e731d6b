"""Maps each knob and run setting to the keys of TRL, Axolotl and LLaMA-Factory.

The table is `keys.yaml`. The exporters write their files from this table, and
`planning.foreign_knobs` reads other people's files with it. A new knob needs a row with the keys
of the tools that can express it. The comment at the top of a tool's file lists the knobs that the
tool cannot express. For each of these knobs, the comment repeats the reason from the table, or says
that the tool has no key for it.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.core.files import load_data
from autotune.core.lora_targets import ALL_LINEAR, saved_modules, target_modules
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.train_config import TrainConfig, checkpoints_some
from autotune.export.header import eval_steps, model_source, on_cpu, save_steps, warmup_steps
from autotune.prediction.estimate import Evaluation, memory_of
from autotune.prediction.memory_formula import EVALUATES
from autotune.problem.run_options import KEPT_CHECKPOINTS
from autotune.study.summary import Recipe, TrainingData
from autotune.trainer.examples import MARKED
from autotune.trainer.reading import is_on_hub
from autotune.trainer.settings import BLIND_TO_POSITIONS, is_expert_parameter

# The names in `keys.yaml` and `tools.yaml` that stand for the study's dataset
PLACEHOLDER = "your/dataset"
PLACEHOLDER_FILE = "data.jsonl"
# The builder in the library `datasets` that reads each type of file
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
BUILDERS |= {".arrow": "arrow"}

TOOLS = {"trl": "TRL", "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory"}

# A tool's keys with their values. The name a.b stands for the key b in the mapping a.
Entries = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: the keys and values of each tool for the knob or setting `of`.

    If `of` is None, each tool's field is a mapping with constant keys and values. Otherwise, the
    field is a string or a mapping. A string is a key that takes autotune's value unchanged. A
    mapping has the tool's keys; under each key, it maps autotune's values to the tool's values.
    `defaults` has the value that each tool assumes if its file omits the key.
    """

    of: str | None = None
    when: Entries = field(default_factory=dict)
    trl: str | Entries | None = None
    axolotl: str | Entries | None = None
    llamafactory: str | Entries | None = None
    defaults: Entries = field(default_factory=dict)

    def entries(self, tool: str, values: Mapping[str, Any]) -> Entries:
        """Return the tool's keys and values for autotune's values; {} if the row does not apply."""
        cell = getattr(self, tool)
        if cell is None or not meets(values, self.when):
            return {}

        if self.of is None:
            return dict(cell)
        value = values.get(self.of)
        if value is None:
            return {}

        if isinstance(cell, str):
            return {cell: value}
        written = {key: theirs.get(value, theirs.get("other")) for key, theirs in cell.items()}
        return {key: theirs for key, theirs in written.items() if theirs is not None}


@functools.cache
def sections() -> dict[str, tuple[Row, ...]]:
    """Return the rows for each section of a tool's file, in the order of the file."""
    data = load_data("autotune.export", "keys")["sections"]
    return {section: tuple(Row(**row) for row in rows) for section, rows in data.items()}


def gaps() -> dict[str, list[Entries]]:
    """Return, for each knob, which tools cannot express it, under which condition, and why."""
    return dict(load_data("autotune.export", "keys")["gaps"])


def settings(tool: str, recipe: Recipe) -> dict[str, Any]:
    """Return the values that rows and gaps use: the knobs that have an effect, and run settings."""
    config = recipe.config
    report_to = recipe.run_options.report_to
    evaluates = recipe.workload.held_out() > 0
    attention = attention_of(tool, config)

    modules = target_modules(recipe.model.text_type, config.lora_targets)
    parameters = list(filter(is_expert_parameter, modules or []))
    if modules:
        modules = [name for name in modules if name not in parameters]
    # With their own value for all linear layers, the tools would adapt layers that PEFT refuses.
    if modules and config.lora_targets == ALL_LINEAR:
        config = replace(config, lora_targets=",".join(modules))
    # TRL would take a single name as a pattern for the whole path of a module. No module matches
    # this pattern, so a single name is written twice.
    if modules and tool == "trl" and len(modules) == 1:
        modules *= 2
    saved = saved_modules(recipe.model.text_type, config.modules_to_save)

    return config.as_dict() | {
        "model": model_source(recipe),
        "on_cpu": on_cpu(recipe),
        "base_dtype": config.base_dtype,
        "target_modules": ", ".join(modules) if modules and tool == "llamafactory" else modules,
        "target_parameters": parameters or None,
        "on_experts": bool(parameters),
        "saved_modules": ", ".join(saved) if saved and tool == "llamafactory" else saved,
        "lora_alpha": config.lora_alpha,
        "accumulation": recipe.accumulation,
        "dealt": recipe.workload.deals(config),
        "shares_out": config.num_gpus > 1,
        "num_shards": Parallelism.of(config).num_shards if config.copies > 1 else None,
        "learning_rate": recipe.learning_rate,
        "is_learned": recipe.is_rate_learned,
        "warmup_steps": warmup_steps(recipe),
        "epochs": recipe.workload.epochs,
        "form": recipe.workload.form,
        "objective": str(recipe.workload.objective),
        "has_dataset": recipe.data is not None,
        "lists_datasets": evaluates or recipe.data is not None,
        "finds_answers": finds_answers(recipe.data),
        "lora_task_type": "SEQ_CLS" if recipe.workload.objective is Objective.REWARD else None,
        "trains_on": recipe.workload.trains_on,
        "save_steps": save_steps(recipe),
        "save_total_limit": KEPT_CHECKPOINTS,
        "evaluates": evaluates,
        "eval_batch": eval_batch(tool, recipe) if evaluates else None,
        "eval_share": recipe.workload.eval_share if evaluates else None,
        "eval_steps": eval_steps(recipe) if evaluates else None,
        "report_to": report_to,
        # LLaMA-Factory reads its file with OmegaConf, which would replace ${...}.
        "run_name": recipe.study.replace("${", "{") if report_to != "none" else None,
        # By default, Axolotl pads rows to a multiple of 64 tokens. Any other seq_len needs the key
        # pad_to_multiple_of.
        "unusual_seq_len": config.seq_len
        if config.padding == "max_length" and config.seq_len % 64
        else None,
        "padded_multiple": _padded_multiple(recipe),
        "attention": attention,
        "other_attention": attention != config.attention,
        "blind_to_positions": recipe.model.text_type in BLIND_TO_POSITIONS,
        "checkpoint_every": config.checkpoint_every,
        "skips_layers": (config.checkpoint_every or 1) > 1,
        "selects": config.activation_budget < 1,
        # True if the probed version of transformers can recompute only every k-th layer, and can
        # offload checkpoints.
        "by_layer": checkpoints_some(recipe.fingerprint.packages.get("transformers", "")),
        "needs_liger": config.kernels == "liger" or config.loss == "chunked",
        "probed_with_trl": recipe.trainer == "trl",
    }


def eval_batch(tool: str, recipe: Recipe) -> int:
    """Return the batch size of evaluations: the training's micro batch size, if it fits in memory.

    For a chunked loss, Axolotl and LLaMA-Factory use Liger's head. In an evaluation, this head
    computes the logits of all tokens at once. If these logits do not fit, the batch is smaller, but
    has at least one example.
    """
    config = recipe.config
    size = config.micro_batch_size
    if tool == "trl" or config.loss != "chunked":
        return size

    longest = recipe.workload.longest_row_config(config)
    limit_gib = recipe.winner.measurement.limit_gib
    for rows in range(size, 1, -1):
        batch = Evaluation(rows=rows, loss="full").batch_of(longest)
        need = memory_of(recipe.model, batch, EVALUATES, objective=recipe.workload.objective)
        if need is not None and need.peak_reserved_gib * (1 + need.error) <= limit_gib:
            return rows
    return 1


def _padded_multiple(recipe: Recipe) -> int | None:
    """Return the value of `pad_to_multiple_of` in TRL and Axolotl, or None to leave out the key.

    With this value, the rows of the full run have at most as many different lengths as the rows
    that were measured.
    """
    config = recipe.config
    if config.packing:  # TRL joins the packed rows of a micro batch into one long row
        return config.tokens if config.compile == "per_layer" else None

    lengths = recipe.workload.padded_lengths(config)
    multiples = [(number, math.ceil(lengths[-1] / number)) for number in range(len(lengths), 0, -1)]
    # The longest padded row must not be longer than seq_len, because the model may have no
    # positions beyond seq_len.
    return next(
        (multiple for number, multiple in multiples if number * multiple <= config.seq_len), None
    )


def attention_of(tool: str, config: TrainConfig) -> str:
    """Return the attention that the tool uses for this configuration, as the tool names it."""
    if tool != "llamafactory":
        return "sdpa" if config.attention == "sdpa_cudnn" else config.attention
    if config.attention == "eager":
        return "disabled"
    if config.attention == "flex_attention":
        return "auto"
    # LLaMA-Factory refuses flash attention with more than one packed row.
    can_flash = config.attention == "flash_attention_2" and not (
        config.packing and config.micro_batch_size > 1
    )
    return "fa2" if can_flash else "sdpa"


def finds_answers(data: TrainingData | None) -> bool | None:
    """Return whether TRL can find the assistant's answers in `data`, or None if that is unknown.

    TRL finds answers if the chat template marks them. TRL knows some templates that do not mark
    answers, and replaces them by copies that mark answers.
    """
    if data is None or data.chat_template is None:
        return None
    digest = hashlib.sha256(data.chat_template.encode()).hexdigest()
    known = load_data("autotune.export", "tools")["trl"]["templates"]
    return bool(MARKED.search(data.chat_template)) or digest[:8] in known


def dataset_source(tool: str, data: TrainingData) -> dict[str, Any]:
    """Return the keys that tell a tool its dataset, in its YAML file or in dataset_info.json."""
    path = Path(data.path)
    if is_on_hub(path):
        name, _, config = data.path.partition(":")
        names = ("hf_hub_url", "subset") if tool == "llamafactory" else ("path", "name")
        entries = {names[0]: name, names[1]: config or None, "split": data.split or "train"}
        return {key: value for key, value in entries.items() if value is not None}

    if tool == "llamafactory":
        return {"file_name": data.path}
    builder = next((BUILDERS.get(Path(file).suffix.lower()) for file in data.files), None)
    if builder is None:  # the dataset is not on this machine
        return {"path": data.path}
    # These tools read files with the library `datasets`, which calls the only split of a single
    # file "train". In a folder, the files' names may contain the names of splits. TRL gets a list
    # of the files of the study's split.
    if tool == "trl":
        files = data.files[0] if len(data.files) == 1 else list(data.files)
        return {"path": builder, "data_files": files}
    if path.is_dir():
        return {"path": data.path, "split": data.split or "train"}
    return {"path": data.path, "ds_type": builder, "split": "train"}


def with_dataset(value: Any, tool: str, data: TrainingData | None) -> Any:
    """Return `value` with the study's dataset in place of the placeholders, also nested ones."""
    if data is None:
        return value
    if isinstance(value, list):
        return [with_dataset(item, tool, data) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("path") == PLACEHOLDER or value.get("file_name") == PLACEHOLDER_FILE:
        others = {key: item for key, item in value.items() if key not in ("path", "file_name")}
        return dataset_source(tool, data) | others
    return {key: with_dataset(item, tool, data) for key, item in value.items()}


def write(tool: str, section: str, recipe: Recipe) -> dict[str, Any]:
    """Return the keys of one section of a tool's file with their values, in the table's order."""
    values = settings(tool, recipe)
    written: dict[str, Any] = {}
    for row in sections()[section]:
        for path, value in row.entries(tool, values).items():
            *outer, key = path.split(".")
            inside = written
            for name in outer:
                inside = inside.setdefault(name, {})
            inside[key] = dict(value) if isinstance(value, dict) else value
    named: dict[str, Any] = with_dataset(written, tool, recipe.data)
    return named


def inexpressible_knobs(tool: str, recipe: Recipe) -> list[str]:
    """Return the reason and the substitute for each knob that the tool's file cannot express."""
    values = settings(tool, recipe)
    gaps_of_tool = []
    for knob, value in recipe.config.as_dict().items():
        # A probe with TRL's trainer treats these knobs as TRL does, so its measurements are valid
        # for TRL's file.
        if tool == recipe.trainer == "trl" and knob not in ("checkpointing", "compile"):
            continue
        if reason := gap(tool, knob, value, values):
            gaps_of_tool.append(f"{knob}{_shown_value(value)}: {reason.format_map(values)}")
    return gaps_of_tool


def _shown_value(value: Any) -> str:
    if value is True:
        return ""
    return " false" if value is False else f" {value}"


def gap(tool: str, knob: str, value: Any, values: Mapping[str, Any]) -> str:
    """Return the reason why a tool cannot express the value of a knob, or "" if it can.

    `values` are the values that the conditions of the table use, as `settings` returns them.
    """
    if knob in gaps():
        entries = (
            entry
            for entry in gaps()[knob]
            if tool in entry["tools"] and meets(values, entry["when"])
        )
        return next((str(entry["reason"]) for entry in entries), "")

    if value == getattr(TrainConfig(), knob) or any(
        getattr(row, tool) is not None for row in _rows(knob)
    ):
        return ""
    return f"{TOOLS[tool]} has no key for it"


def meets(values: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Return whether `values` meets all conditions: a condition is a value, or a list of values."""
    return all(
        values.get(name) in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in conditions.items()
    )


def key_of(tool: str, what: str) -> str:
    """Return a tool's key for a knob or a setting; the first key if the tool uses several.

    Raises KeyError if the tool has no key for the knob or setting.
    """
    for row in _rows(what):
        if cell := getattr(row, tool):
            key = cell if isinstance(cell, str) else next(iter(cell))
            return str(key).rpartition(".")[2]
    raise KeyError(what)


def default_of(tool: str, what: str) -> Any:
    """Return autotune's value for the default of a tool's key, or None if the table has none."""
    return next((row.defaults[tool] for row in _rows(what) if tool in row.defaults), None)


def _rows(what: str) -> list[Row]:
    return [row for rows in sections().values() for row in rows if row.of == what]

"""Translates ms-swift's arguments to TRL's keys, and changes of these keys back.

ms-swift's trainers derive from those of transformers and TRL. This module follows the source of
ms-swift 4 (August 2026).
"""

from collections.abc import Mapping
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import load_data
from autotune.planning.foreign_arguments import refuse_variables
from autotune.planning.foreign_file import SHELL, quote
from autotune.report.values.check import SWIFT

OWN_LOSS = "a loss of ms-swift"  # a key that no file has
SWIFT_ROWS = 16  # the sequences of a step, if ms-swift's file does not set the accumulation


def is_swift(values: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of ms-swift."""
    return any(all(map(values.get, keys)) for keys in _table()["marks"])


def swift_as_trl(values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return ms-swift's arguments as TRL's keys, and a sentence about arguments that are not read.

    Raises UsageError for a value that no key of TRL has.
    """
    table = _table()
    objective = _objective(values, table)
    of_objective = table["of_grpo" if objective == "grpo" else "of_others"]
    keys = table["keys"] | of_objective["keys"]
    given = {
        key: value
        for key, value in values.items()
        if value is not None and (key in keys or key not in table["without_effect"])
    }
    given.pop(SWIFT, None)
    shell = {SHELL: given.pop(SHELL)} if SHELL in given else {}
    refuse_variables(given)
    if "tuner_type" in given:
        given["train_type"] = given.pop("tuner_type")
    complete = table["defaults"] | of_objective["defaults"] | given
    complete.setdefault("gradient_accumulation_steps", _accumulation(complete))
    translated: dict[str, Any] = {"objective": objective, SWIFT: True} | shell
    unread = []
    for key, value in complete.items():
        if key in table["values"]:
            translated |= _meaning(key, value, table["values"][key])
        elif key in table["presets"]:
            preset = table["presets"][key].get(value) if isinstance(value, str) else None
            translated |= preset or {key: value}
        elif key in keys:
            translated[keys[key]] = value
        else:
            unread.append(key)
    attention = translated.get("attn_implementation")
    if isinstance(attention, str):
        translated["attn_implementation"] = table["attentions"].get(attention, attention)
    if translated["dtype"] in ("float16", "float32"):
        translated = {"fp16": True, "bf16": False} | translated
    if objective != "grpo":
        translated |= _rows_of_swift(values)
    if objective == "sft" and _weighs_tokens(values, table):
        translated[OWN_LOSS] = True
    if not translated["use_peft"]:
        for key in ("lora_r", "lora_target_modules", "lora_dropout", "lora_alpha"):
            translated.pop(key, None)
    return translated, f"not counted: {', '.join(sorted(unread))}" if unread else ""


def _meaning(key: str, value: Any, known: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return TRL's keys for a value of ms-swift's key. Raises UsageError for an unknown value."""
    for choice, meaning in known.items():
        if choice == value:
            return meaning
    raise UsageError(
        f"{key}: {quote(value)} is not supported",
        remedy=f"write one of {', '.join(map(str, known))}",
    )


def _objective(values: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    """Return the objective of ms-swift's arguments. Raises UsageError if it is not supported."""
    if values.get(SWIFT) != "rlhf" and "rlhf_type" not in values:
        return "sft"
    kind, known = values.get("rlhf_type", "dpo"), table["objectives"]
    if kind not in known:
        raise UsageError(
            f"rlhf_type: of ms-swift, {', '.join(known)} are supported, not {quote(kind)}",
            remedy="pass the file of a run with one of them",
        )
    return str(known[kind])


def _rows_of_swift(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's keys for the length of packed rows, and for whether the run evaluates.

    ms-swift evaluates as often as it saves, if there is a dataset for it.
    """
    found: dict[str, Any] = {"eval_strategy": "no"}
    of_validation = ("split_dataset_ratio", "val_dataset", "eval_dataset", "cached_val_dataset")
    if any(map(values.get, of_validation)):
        saves = values.get("save_strategy", "steps")
        found["eval_strategy"] = values.get("eval_strategy", saves)
    if values.get("packing") and values.get("packing_length"):
        found["max_length"] = values["packing_length"]
    return found


def _weighs_tokens(values: Mapping[str, Any], table: Mapping[str, Any]) -> bool:
    """Return whether ms-swift computes the loss of each token itself, instead of Liger."""
    weights = str(values.get("loss_scale", "")).split("+")
    return any(map(values.get, table["own_loss"])) or not set(weights).isdisjoint(table["weights"])


def _accumulation(values: Mapping[str, Any]) -> int:
    """Return the micro batches of a step, if ms-swift's file does not give their number."""
    rows, processes = values["per_device_train_batch_size"], values.get("num_processes", 1)
    if not isinstance(rows, int) or not isinstance(processes, int) or rows < 1 or processes < 1:
        return 1
    return -(-SWIFT_ROWS // (rows * processes))  # rounded up


def trl_as_swift(edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return edits of TRL's keys as edits of ms-swift's arguments."""
    table = _table()
    keys = table["keys"] | table["of_grpo"]["keys"]
    names = {theirs: ours for ours, theirs in keys.items()}
    written: dict[str, Any] = {}
    for key, value in edits.items():
        found = next(
            (
                (ours, choice)
                for ours, choices in table["values"].items()
                for choice, trl in choices.items()
                if trl == {key: value}
            ),
            (names.get(key, key), value),
        )
        written[found[0]] = found[1]
    return written


def _table() -> dict[str, Any]:
    return dict(load_data("autotune.planning", "swift_keys"))

"""Refuses a run that its tool, or a library of the tool, would refuse to start.

The conditions are in foreign_refusals.yaml. Each condition depends only on the file and on the
model's type. Conditions that depend on the dataset are left out, because the dataset is not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.core.errors import did_you_mean
from autotune.core.files import load_data
from autotune.core.lora_targets import ALL_LINEAR
from autotune.core.train_config import TrainConfig
from autotune.export.keys import key_of
from autotune.planning.foreign_file import File, Refused, quote
from autotune.planning.foreign_sharding import strategy_of
from autotune.trainer.settings import is_expert_parameter

_OFF: tuple[Any, ...] = (None, False, 0, "", "0", "no", "none", "false", "No", "NO", [], {})


def refuse_at_start(file: File, tool: str, config: TrainConfig) -> None:
    """Raise Refused if the tool would refuse to start the run."""
    for key, (least, most) in _table("ranges").items():
        file.number(key, default=least, least=least, most=most)
    for group in _table("values"):
        for key, names in group["keys"].items() if tool in group["tools"] else ():
            _refuse_unknown_value(file, key, names)

    facts = file.values | {
        "FULL": config.method == "full",
        "LORA": config.method == "lora",
        "DROPOUT": config.lora_dropout > 0,
        "DORA": config.dora,
        "ZERO_3": strategy_of(file.values) == "zero3",
        "SAME_STRATEGY": _strategy(file, "eval", "no") == _strategy(file, "save", "steps"),
        "BEST": _strategy(file, "save", "steps") == "best",
    }
    for group in _table("refusals"):
        for row in group["rows"] if tool in group["tools"] else ():
            wanted, absent = row["set"], row.get("unset", ())
            if all(_is_on(facts, key) for key in wanted) and not any(
                _is_on(facts, key) for key in absent
            ):
                key = next(key for key in wanted if not key.isupper())
                raise Refused(key.rpartition(".")[2], _refusal(row["why"]), row["remedy"])


def refuse_other_deepspeed_values(
    file: File, tool: str, config: TrainConfig, accumulation: int
) -> None:
    """Raise Refused if the run and its DeepSpeed file give different values for a setting.

    transformers compares both before it trains. The value "auto" stands for the run's value.
    `accumulation` is the number of micro batches in a step.
    """
    settings = file.values.get("deepspeed")
    if not isinstance(settings, dict):
        return
    remedy = 'write "auto" in the DeepSpeed file'
    numbers = {
        "train_micro_batch_size_per_gpu": ("micro_batch_size", config.micro_batch_size),
        "gradient_accumulation_steps": ("accumulation", accumulation),
    }
    for name, (knob, value) in numbers.items():
        other = settings.get(name)
        if isinstance(other, int) and other != value:
            why = f"the DeepSpeed file says {name}: {other}, but the run says {value}"
            raise Refused(key_of(tool, knob), _refusal(why), remedy)

    for name in ("bf16", "fp16"):
        other = settings.get(name)
        is_on = isinstance(other, dict) and other.get("enabled") is True
        # A run whose weights are stored in the other 16-bit format has another precision than its
        # key says. TRL switches bf16 on by default.
        by_default = tool == "trl" and name == "bf16" and not file.flag("fp16")
        of_key = file.values.get(name, by_default) in (True, "true", "True")
        if is_on and not of_key and not config.precision.startswith(name):
            why = f"the DeepSpeed file enables {name}, but the run trains in {config.precision}"
            raise Refused("deepspeed", _refusal(why), remedy)


def _refuse_unknown_value(file: File, key: str, names: list[Any]) -> None:
    """Raise Refused if the value of a key is a text that is not in `names`.

    An item of `names` is a name or a list of names. A text with a slash is never refused, because
    it may name a kernel on the Hugging Face Hub.
    """
    known = [name for part in names for name in (part if isinstance(part, list) else [part])]
    value = file.text(key) if isinstance(file.values.get(key), str) else ""
    if value and value not in known and "/" not in value:
        why = f"{quote(value)} is not a known value{did_you_mean(value, known)}"
        raise Refused(key, _refusal(why), f"write one of {', '.join(known[:4])} ...")


def _strategy(file: File, moment: str, default: str) -> str:
    """Return the value of `eval_strategy` or `save_strategy`, such as "steps".

    `moment` is "eval" or "save". The value false becomes "no", because YAML reads an unquoted `no`
    as false.
    """
    value = file.values.get(f"{moment}_strategy")
    return "no" if value is False else str(value or default)


def refuse_targets(tool: str, config: TrainConfig, model_type: str) -> None:
    """Raise Refused if PEFT or TRL refuses to put the configuration's adapters on this model."""
    if config.method != "lora":
        return
    modules = (one for one in config.lora_targets.split(",") if not is_expert_parameter(one))
    names = {name.rpartition(".")[2] for name in modules}
    if tool == "trl" and "lm_head" in names:
        why = "TRL trains no adapter on the head, because its loss reads the head's weights"
        raise Refused("lora_target_modules", _refusal(why), "remove lm_head")

    experts = _joined_experts(model_type)
    if experts is None:
        return
    # With all-linear, Axolotl, LLaMA-Factory and ms-swift adapt only linear layers. Fused experts
    # are a parameter, not a linear layer, so these tools do not adapt them.
    if config.lora_targets == ALL_LINEAR and tool == "trl":
        names |= set(experts["names"])
    targeted = names & set(experts["names"])
    if targeted and config.lora_dropout:
        why = (
            f"{config.lora_dropout:g}, but transformers 5 fuses the experts of {model_type} into "
            "one parameter, and PEFT has no dropout for adapters on a parameter"
        )
        raise Refused("lora_dropout", _refusal(why), "set lora_dropout: 0")

    joined = set(experts["joined"])
    if targeted & joined and not joined <= targeted:
        why = f"PEFT adapts both {' and '.join(experts['joined'])}, or neither"
        raise Refused("lora_target_modules", _refusal(why), "name both")


def without_dropout(config: TrainConfig, model_type: str) -> TrainConfig:
    """Return the configuration without dropout if it adapts all layers of a mixture of experts.

    transformers fuses the experts of such a model. PEFT has no dropout for fused experts. A dry
    probe builds the model with PEFT, so it cannot compute the memory of a run with dropout.
    """
    on_all = config.method == "lora" and config.lora_targets == ALL_LINEAR
    if not on_all or _joined_experts(model_type) is None:
        return config
    return replace(config, lora_dropout=0.0)


def _joined_experts(model_type: str) -> Any:
    return next((row for row in _table("fused") if model_type in row["models"]), None)


def _table(name: str) -> Any:
    return load_data("autotune.planning", "foreign_refusals")[name]


def _refusal(why: str) -> str:
    return f"the run is refused at its start: {why}"


def _is_on(values: Mapping[str, Any], key: str) -> bool:
    """Return whether a key is set and not switched off.

    A dot in the key separates the name of a mapping from a key inside this mapping.
    """
    first, _, inner = key.partition(".")
    value = values.get(first)
    if inner:
        return isinstance(value, dict) and _is_on(value, inner)
    return not any(value is off or value == off for off in _OFF)

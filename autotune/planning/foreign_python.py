"""Reads a training from a Python program or a notebook, as keys of TRL.

The program calls a trainer of TRL, or transformers' Trainer, on which they are built.

The program is not executed: `program_values` finds the values of the arguments.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import load_data
from autotune.planning.foreign_file import ASSUMED, SHELL, table
from autotune.planning.foreign_rollouts import GENERATIONS
from autotune.planning.program_arguments import Command, default_of_field
from autotune.planning.program_rows import CALLBACK, rows_of
from autotune.planning.program_syntax import name_of
from autotune.planning.program_values import NOTEBOOK, UNKNOWN, Program
from autotune.report.values.check import TRANSFORMERS

PROGRAMS = (".py", NOTEBOOK)
OBJECTIVES = {  # the objective of each trainer
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward",
    "GRPOTrainer": "grpo",
    "UnslothTrainer": "sft",  # TRL's SFTTrainer with another learning rate for embeddings
    "Trainer": "sft",
    "Seq2SeqTrainer": "sft",
}
PLAIN = ("Trainer", "Seq2SeqTrainer")  # the trainers of transformers
PLAIN_CONFIGS = ("TrainingArguments", "Seq2SeqTrainingArguments")
CONFIGS = (
    *("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig"),
    *("UnslothTrainingArguments", *PLAIN_CONFIGS),
)
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # how the names of their classes end
# Methods of a trainer that decide the memory or the time of a step
_DECISIVE = ("compute_loss", "training_step", "create_optimizer", "get_train_dataloader")
_OF_IMAGES = "FastVisionModel"
UNSLOTH = ("FastLanguageModel", "FastModel", _OF_IMAGES)
# Unsloth's defaults
_UNSLOTH_LENGTH = 2048
_UNSLOTH_BASE = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True,
}
_UNSLOTH_LORA = {
    "lora_r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ],
}
_PREPARES = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
_KEEPS = ("prepare_model", "prepare", "setup_chat_format")  # calls that return the same model
_MOVES = ("to", "cuda", "train")  # methods that return the model itself
_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
SPLITS = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps over several GPUs
PARTS = ("shuffle", "select", "take", "shard", "train_test_split")  # methods of a dataset
_QUANTIZATION = "BitsAndBytesConfig"


def read_program(path: Path, command: Command | None = None) -> tuple[dict[str, Any], str]:
    """Return the training of a program as TRL's keys, and a sentence about arguments not counted.

    `command` says how a script starts the program. Without a script, the program's own defaults of
    its command line are assumed.

    Raises UsageError if the program does not call exactly one trainer, or if it computes a
    value that memory or speed depends on.
    """
    program = Program(path, command)
    training = _Training(program)
    training.read_trainer(*_trainer(program))
    unread = sorted({*training.unread, *program.arguments.unused()})
    here = {name for name in program.assumed if "=" in name}  # variables of this environment
    if here:
        training.values[SHELL] = ", ".join(sorted(here))
    assumed = program.assumed - here
    if named := sorted(name for name in assumed if command is None or name[0] != "-"):
        training.values[ASSUMED] = ", ".join(named)
    return training.values, f"not counted: {', '.join(unread)}" if unread else ""


def _trainer(program: Program) -> tuple[ast.Call, str]:
    """Return the program's call of a trainer, and the name of the trainer."""
    calls = [(call, kind) for call in program.calls if (kind := _kind(program, call))]
    if len(calls) == 1:
        return calls[0]
    if calls:
        raise program.error(
            calls[1][0], "another trainer is called", "pass a program with a single trainer"
        )
    raise UsageError(
        f"{program.path} calls no trainer that is read ({', '.join(OBJECTIVES)})",
        remedy="pass the program, the script or the YAML file that starts the training",
    )


def _kind(program: Program, call: ast.Call) -> str:
    """Return the name of the trainer that a call makes, or "" for another call.

    A class of the program counts as the trainer that it extends. Raises UsageError if it changes
    how the trainer computes a step.
    """
    name = name_of(call.func)
    own = program.classes.get(name)
    if own is None:
        return name if name in OBJECTIVES else ""
    kind = next((base for base in map(name_of, own[0].bases) if base in OBJECTIVES), "")
    for node in own[0].body if kind else ():
        if isinstance(node, ast.FunctionDef) and node.name in _DECISIVE:
            raise program.error(
                node,
                f"{name} has its own {node.name}, so its memory and time are unknown",
                f"add {CALLBACK}, which measures the run",
            )
    return kind


def _whole(node: ast.expr | None) -> ast.expr | None:
    """Return the dataset of which an expression is a part or another order, or None."""
    match node:
        case ast.Subscript(value=whole):
            return whole
        case ast.Call(func=ast.Attribute(value=whole, attr=method)) if method in PARTS:
            return whole
    return None


@dataclass(slots=True)
class _Training:
    """The keys of TRL that a program's calls describe."""

    program: Program
    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    # The arguments that the program assigns after each call
    changes: dict[ast.Call, dict[str, ast.expr]] = field(default_factory=dict)

    def read_trainer(self, trainer: ast.Call, kind: str) -> None:
        """Read the call of a trainer of this kind, a key of OBJECTIVES."""
        objective, plain = OBJECTIVES[kind], kind in PLAIN
        self.values["objective"] = objective
        given = self._keywords(trainer)
        if trainer.args:
            given.setdefault("model", trainer.args[0])
        if "args" not in given:
            place = 1 if objective in ("sft", "reward") else 2
            given |= {"args": trainer.args[place]} if len(trainer.args) > place else {}
        if "model" not in given:
            raise self.program.error(trainer, "the trainer gets no model", "name the model")
        self._read_later_changes()
        if plain:
            # Unlike TRL's trainers, it neither recomputes layers nor trains in bf16 by default.
            self.values |= {TRANSFORMERS: True, "gradient_checkpointing": False, "bf16": False}
        self._read_arguments(given.pop("args", None))
        self._read_model(given.pop("model"))
        self._read_changes_of_model()
        self._read_adapters(given.pop("peft_config", None))
        self._read_quantization(given.pop("quantization_config", None))
        if plain:
            self._read_rows(trainer, given)
        elif "formatting_func" not in given:
            self._read_dataset(given.get("train_dataset"))
        self._read_evaluation(given)
        if self._is_model(given.get("reward_funcs")):
            self.values["a reward model"] = True
        if "use_peft" not in self.values:
            given.pop("ref_model", None)  # TRL makes the same copy without it
        self._read_keys(given, self._keys("trainer"))
        if any(
            name_of(call.func) == "gradient_checkpointing_enable" for call in self.program.calls
        ):
            self.values["gradient_checkpointing"] = True
        if objective == "grpo" and "Unsloth" in self.values:
            self._read_unsloths_batch()
        freezes = any(
            node.attr == "requires_grad" and self._is_false(value)
            for node, value in self.program.attributes
        ) or any(
            name_of(call.func) == "requires_grad_" and any(map(self._is_false, call.args))
            for call in self.program.calls
        )
        if freezes and "use_peft" not in self.values:
            self.values["requires_grad"] = True

    def _read_rows(self, trainer: ast.Call, given: dict[str, ast.expr]) -> None:
        """Read the rows that the program makes for transformers' Trainer."""
        places = {"data_collator": 2, "train_dataset": 3}
        for name, place in places.items():
            if name not in given and len(trainer.args) > place:
                given[name] = trainer.args[place]
        roots = [given[name] for name in places if name in given]
        rows = rows_of(self.program, trainer, roots)
        self.values["max_length"] = rows.longest
        if rows.joined:
            self.values |= {"packing": True, "packing_strategy": "wrapped"}
        elif rows.filled:
            self.values["pad_to_multiple_of"] = rows.longest
        elif rows.padded_together:
            self.values["padded together"] = True
        self.unread += rows.unread

        collator = given.pop("data_collator", None)
        if collator is None or self.program.is_none(collator):
            return
        made = self.program.resolve(collator)
        name = name_of(made.func if isinstance(made, ast.Call) else collator)
        if name not in table("program")["collators"]:
            self.unread.append("data_collator")
        elif isinstance(made, ast.Call) and not rows.filled:
            multiple = {"pad_to_multiple_of": "pad_to_multiple_of"}
            padded = {key: node for key, node in self._keywords(made).items() if key in multiple}
            self._read_keys(padded, multiple)

    def _read_evaluation(self, given: dict[str, ast.expr]) -> None:
        """Read whether an evaluation keeps the logits of all its examples."""
        metrics = given.pop("compute_metrics", None)
        reduces = given.pop("preprocess_logits_for_metrics", None)
        if metrics is not None and not self.program.is_none(metrics) and reduces is None:
            self.values["compute_metrics"] = True
        calls = (call.func for call in self.program.calls)
        evaluates = any(
            isinstance(called, ast.Attribute)
            and called.attr == "evaluate"
            and "trainer" in name_of(called.value).lower()
            for called in calls
        )
        keys = ("eval_strategy", "evaluation_strategy")
        if evaluates and all(self.values.get(key, "no") == "no" for key in keys):
            self.values["eval_strategy"] = "epoch"

    def _is_false(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and node.value is False

    def _read_later_changes(self) -> None:
        """Read the arguments that the program changes after the call that has them.

        Raises UsageError if such a change is only sometimes made, or is no assignment.
        """
        kinds = (*CONFIGS, "LoraConfig", _QUANTIZATION)
        for node, value in self.program.stores().items():
            made = self.program.resolve(node.value)
            if (
                self._is_harmless(node.attr)
                or not isinstance(made, ast.Call)
                or name_of(made.func) not in kinds
            ):
                continue
            if value is None:
                raise self.program.error(
                    node,
                    f"{node.attr} is changed after the call of {name_of(made.func)}",
                    "give the value in the call",
                )
            self.changes.setdefault(made, {})[node.attr] = value

    def _read_arguments(self, node: ast.expr | None) -> None:
        """Read the trainer's `args`."""
        if node is None or self.program.is_none(node):
            return
        call = self.program.resolve(node)
        kind, own = self._config_of(call)
        if not isinstance(call, ast.Call) or not kind:
            raise self.program.error(
                node,
                "the arguments are made when the program runs, so they are unknown",
                "pass the script or the YAML file that has them",
            )
        given = own | self._keywords(call)
        if name_of(call.func) in self.program.classes:
            # The other fields are the program's own, and do not reach the trainer.
            keys = load_data("autotune.planning", "known_keys")["trl"]["keys"]
            given = {key: value for key, value in given.items() if key in keys or key not in own}
        given = {key: value for key, value in given.items() if not self._is_harmless(key)}
        if "evaluation_strategy" in given:  # the name in older versions of transformers
            given["eval_strategy"] = given.pop("evaluation_strategy")
        if kind in PLAIN_CONFIGS:  # TRL keeps the defaults of transformers
            self.values |= {"gradient_checkpointing": False, "bf16": False}
        self._read_model_arguments(given)
        self._read_keys(given, {name: name for name in given})

    def _read_model_arguments(self, given: dict[str, ast.expr]) -> None:
        """Move the arguments with which the trainer loads the model out of `given`."""
        name = "model_init_kwargs"
        try:
            loading = dict(self.program.items(given[name])) if name in given else {}
        except UNKNOWN:
            return  # `_read_keys` names the argument
        if "quantization_config" not in loading:
            return
        self._read_quantization(loading.pop("quantization_config"))
        del given[name]
        values: dict[str, Any] = {}
        for key, node in loading.items():
            try:
                values[key] = self.program.value(node)
            except UNKNOWN:
                raise self.program.unknown(f"{name}[{key!r}]", node) from None
        self.values[name] = values

    def _config_of(self, call: ast.expr | None) -> tuple[str, dict[str, ast.expr]]:
        """Return the library's class that a call makes, and the defaults of the program's own.

        The name is "" if the call makes no arguments of a trainer.
        """
        name = name_of(call.func) if isinstance(call, ast.Call) else ""
        own = self.program.classes.get(name)
        if own is None:
            return name if name in CONFIGS else "", {}
        fields = self.program.arguments.fields_of(name)
        defaults = {key: default_of_field(one.value) for key, one in fields.items()}
        bases = map(name_of, own[0].bases)
        return next((base for base in bases if base in CONFIGS), ""), {
            key: value for key, value in defaults.items() if value is not None
        }

    def _read_model(self, node: ast.expr) -> None:
        """Read the trainer's `model`: a name, or the call that loads or changes the model."""
        model = self.program.resolve(node)
        if isinstance(model, ast.Subscript):  # a model that was loaded together with its tokenizer
            model = self.program.resolve(model.value)
        if not isinstance(model, ast.Call):
            self._read_name(node, node)
            return
        owner = model.func.value if isinstance(model.func, ast.Attribute) else None
        if owner is not None and name_of(owner) in UNSLOTH:
            self._read_unsloth(model)
            return
        given, first = self._keywords(model), next(iter(model.args), None)
        match name_of(model.func), first:
            case "from_pretrained", _:
                self._read_loading(model, given)
            case "get_peft_model", ast.expr():
                self._read_model(first)
                self._read_adapters(given.get("peft_config", next(iter(model.args[1:]), None)))
            case name, ast.expr() if name in _PREPARES:
                self._read_model(first)
                # The call copies what is not quantised to float32, and recomputes layers.
                self.values["dtype"] = "float32"
                if self._flag(given, "use_gradient_checkpointing", default=True):
                    self.values["gradient_checkpointing"] = True
            case name, _ if name in (*_MOVES, *_CASTS) and isinstance(model.func, ast.Attribute):
                self._read_model(model.func.value)
                self._read_cast(model)
            case name, ast.expr() if name in _KEEPS:
                self._read_model(first)
            case _:
                self._read_name(None, model)

    def _read_changes_of_model(self) -> None:
        """Read the calls that change the loaded model itself: adapters, and another dtype."""
        for call in self.program.calls:
            called = call.func
            if (
                not isinstance(called, ast.Attribute)
                or "model" not in name_of(called.value).lower()
            ):
                continue
            first = next(iter(call.args), None)
            if called.attr == "add_adapter" and isinstance(first, ast.expr):
                self._read_adapters(first)
            self._read_cast(call)

    def _read_cast(self, call: ast.Call) -> None:
        """Read the dtype to which a method of the model converts it, if it does."""
        first, name = next(iter(call.args), None), name_of(call.func)
        dtype = self._text(first) if name == "to" else _CASTS.get(name, "")
        if dtype in _CASTS.values():
            self.values["dtype"] = dtype
            self.values.pop("no dtype", None)

    def _read_loading(self, call: ast.Call, given: dict[str, ast.expr]) -> None:
        """Read the call of `from_pretrained` that loads the model."""
        if TRANSFORMERS in self.values and isinstance(call.func, ast.Attribute):
            self._refuse_other_models(call.func.value)
        # transformers itself takes the checkpoint's dtype, and TRL takes float32.
        self.values |= {"dtype": "auto"}
        if not {"dtype", "torch_dtype"} & given.keys():
            self.values["no dtype"] = True
        first = next(iter(call.args), None)
        self._read_name(given.pop("pretrained_model_name_or_path", first), call)
        self._read_quantization(given.pop("quantization_config", None))
        if (split := self._text(given.pop("device_map", None))) in SPLITS:
            self.values["device_map"] = split
        self._read_keys(given, self._keys("model"))

    def _refuse_other_models(self, owner: ast.expr) -> None:
        """Raise UsageError unless a class loads causal language models."""
        if not name_of(owner).endswith(LANGUAGE_MODELS):
            raise self.program.error(
                owner,
                f"{name_of(owner)} loads no causal language model; with transformers' Trainer, "
                "check reads only these",
                f"add {CALLBACK}, which measures the run",
            )

    def _read_unsloth(self, call: ast.Call) -> None:
        """Read a call of Unsloth that loads a model, or that adds adapters."""
        given, first = self._keywords(call), next(iter(call.args), None)
        if isinstance(call.func, ast.Attribute) and name_of(call.func.value) == _OF_IMAGES:
            self.values[_OF_IMAGES] = True
        if name_of(call.func) == "from_pretrained":
            self._read_name(given.pop("model_name", first), call)
            whole = self._flag(given, "full_finetuning", default=False)
            share = given.pop("gpu_memory_utilization", None)
            if self._flag(given, "fast_inference", default=False):  # vLLM in the same process
                self.unread += ["fast_inference", *(["gpu_memory_utilization"] if share else [])]
            self.values |= {"Unsloth": True, "dtype": "auto"} | ({} if whole else _UNSLOTH_BASE)
            self.values["max_seq_length"] = _UNSLOTH_LENGTH
            self._read_keys(given, self._keys("model") | {"max_seq_length": "max_seq_length"})
        elif name_of(call.func) == "get_peft_model" and first is not None:
            self._read_model(first)
            recomputes = self._flag(given, "use_gradient_checkpointing", default=True)
            adapters = {"use_peft": True, "gradient_checkpointing": recomputes}
            self.values |= _UNSLOTH_LORA | adapters
            self._read_keys(given, self._keys("adapters"))
        else:
            self._read_name(None, call)

    def _read_unsloths_batch(self) -> None:
        """Change the micro batch as Unsloth does, if a step has no multiple of the generations."""
        rows, steps, generations = (
            self.values.get(key, default)
            for key, default in (
                ("per_device_train_batch_size", 8),
                ("gradient_accumulation_steps", 1),
                ("num_generations", GENERATIONS),
            )
        )
        world = self.program.arguments.command.environment.get("WORLD_SIZE", "1")
        numbers = (rows, steps, generations)
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            return
        is_given = self.values.keys() & {"steps_per_generation", "generation_batch_size"}
        if not is_given and rows * steps * int(world) % generations:
            self.values |= {"per_device_train_batch_size": generations, "Unsloth's batch": True}

    def _read_name(self, node: ast.expr | None, place: ast.expr) -> None:
        """Read the name of a model. `place` is where an error points to."""
        name = self._text(node)
        if not name:
            raise self.program.error(
                place,
                "the model is chosen when the program runs, so it is unknown",
                "load it with from_pretrained and its name, or give the name to the trainer",
            )
        self.values["model_name_or_path"] = name

    def _read_dataset(self, node: ast.expr | None) -> None:
        """Read the dataset that the program loads, unless it changes the examples afterwards."""
        loaded = self.program.resolve(node)
        parts: list[str] = []
        while (whole := _whole(loaded)) is not None:
            match loaded:
                case ast.Call(func=ast.Attribute(attr=method)) if method != "shuffle":
                    parts.append(method)
            loaded = self.program.resolve(whole)
        if isinstance(loaded, ast.Call) and name_of(loaded.func) == "load_dataset" and loaded.args:
            try:
                dataset = {"path": self.program.value(loaded.args[0])}
                files = self._keywords(loaded).get("data_files")
                dataset |= {"data_files": self.program.value(files)} if files else {}
            except (*UNKNOWN, UsageError):
                return
            self.values["datasets"] = [dataset]
            if "[" in self._text(self._keywords(loaded).get("split")):
                parts.append("split")
            self.unread += (f"{name} (all examples are counted; --examples N)" for name in parts)

    def _is_model(self, reward: ast.expr | None) -> bool:
        """Return whether one of GRPO's rewards is a model, or the name of one."""
        match self.program.resolve(reward):
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return any(map(self._is_model, items))
            case ast.Call(func=made):
                return name_of(made) == "from_pretrained"
            case ast.Constant(value=str()):
                return True
        return False

    def _read_adapters(self, node: ast.expr | None) -> None:
        """Read PEFT's configuration."""
        if node is None or self.program.is_none(node):
            return
        call = self.program.resolve(node)
        if isinstance(call, ast.Call) and name_of(call.func) == "get_peft_config":
            self._read_model_config(call, ("use_peft", "use_rslora", "use_dora", "lora_"))
            return
        if not isinstance(call, ast.Call) or name_of(call.func) != "LoraConfig":
            raise self.program.error(
                node,
                "the adapters are not a LoraConfig that the program always makes",
                "make one LoraConfig, without a condition",
            )
        # PEFT's defaults, which are not TRL's
        self.values |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        self._read_keys(self._keywords(call), self._keys("adapters"))
        targets = self.values.get("lora_target_modules")
        if isinstance(targets, list) and len(targets) == 1:  # only TRL's command refuses it
            self.values["lora_target_modules"] = targets * 2

    def _read_quantization(self, node: ast.expr | None) -> None:
        """Read transformers' `quantization_config`."""
        if node is None or self.program.is_none(node):
            return
        call = self.program.resolve(node)
        if isinstance(call, ast.Call) and name_of(call.func) == "get_quantization_config":
            self._read_model_config(call, ("load_in_", "bnb_4bit_", "use_bnb_"))
            return
        if not isinstance(call, ast.Call) or name_of(call.func) != _QUANTIZATION:
            raise self.program.error(
                node,
                f"the quantization is not a {_QUANTIZATION} that the program always makes",
                f"make one {_QUANTIZATION}, without a condition",
            )
        given = self._keywords(call)
        compute = given.pop("bnb_4bit_compute_dtype", None)
        self._read_keys(given, self._keys("quantization"))
        if self.values.get("load_in_4bit") and self._text(compute) not in ("bfloat16", "float16"):
            self.unread.append("bnb_4bit_compute_dtype (by default float32, which is slower)")

    def _read_model_config(self, call: ast.Call, prefixes: tuple[str, ...]) -> None:
        """Read the arguments of TRL's ModelConfig whose names begin with one of `prefixes`."""
        made = self.program.resolve(call.args[0]) if len(call.args) == 1 else None
        if not isinstance(made, ast.Call) or name_of(made.func) != "ModelConfig":
            raise self.program.error(
                call,
                f"{name_of(call.func)} gets arguments that are made when the program runs",
                "pass the script that starts the program",
            )
        given = self._keywords(made)
        keys = {name: name for name in given if name.startswith(prefixes)}
        self._read_keys({name: given[name] for name in keys}, keys)

    def _read_keys(self, given: dict[str, ast.expr], keys: dict[str, str]) -> None:
        """Read arguments. `keys` has TRL's key of each argument; the others are not counted."""
        for name, node in given.items():
            if name in table("program")["without_effect"] or self.program.is_none(node):
                continue
            if name not in keys:
                self.unread.append(name)
                continue
            try:
                self.values[keys[name]] = self.program.value(node)
            except UNKNOWN:
                raise self.program.unknown(name, node) from None

    def _flag(self, given: dict[str, ast.expr], name: str, *, default: bool) -> bool:
        """Remove an argument, and return its truth value; a text such as "unsloth" is true."""
        node = given.pop(name, None)
        if node is None or self.program.is_none(node):
            return default
        try:
            return bool(self.program.value(node))
        except UNKNOWN:
            raise self.program.unknown(name, node) from None

    def _keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return the keyword arguments of a call, also those that a known dictionary gives."""
        given: dict[str, ast.expr] = {}
        changed = self.changes.get(call, {})
        for keyword in call.keywords:
            if keyword.arg:
                given[keyword.arg] = keyword.value
                continue
            try:
                given |= self.program.items(keyword.value)
            except UNKNOWN:
                raise self.program.error(
                    call,
                    f"{name_of(call.func)} gets arguments by **, which are unknown",
                    "write the arguments themselves",
                ) from None
        return given | changed

    def _text(self, node: ast.expr | None) -> str:
        """Return a value as text, or "" if there is none or if it is unknown."""
        try:
            found = None if node is None else self.program.value(node)
        except UNKNOWN:
            return ""
        return "" if found is None else str(found)

    @staticmethod
    def _is_harmless(name: str) -> bool:
        """Return whether an argument of a trainer's configuration changes nothing that is read."""
        of_arguments = load_data("autotune.planning", "unread_keys")["without_influence"]["trl"]
        return name in of_arguments or name in table("program")["without_effect"]

    @staticmethod
    def _keys(part: str) -> dict[str, str]:
        keys: dict[str, str] = table("program")[part]
        return keys

"""Reads a training with a trainer of TRL from a Python program or a notebook, as keys of TRL.

The program is not executed. A name has the value of its last assignment before its use. If an
assignment may be skipped, such as one in an `if`, the value is unknown.
"""

import ast
import json
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import read_user_text
from autotune.planning.foreign_file import table

PROGRAMS = (".py", ".ipynb")
OBJECTIVES = {  # the objective of each trainer
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward",
    "GRPOTrainer": "grpo",
}
CONFIGS = (
    *("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig"),
    "TrainingArguments",
)
UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
SPLITS = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps over several GPUs
# Functions that ask whether the GPU has bf16, which all GPUs since 2020 have
_HAS_BF16 = ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available")
_QUANTIZATION = "BitsAndBytesConfig"
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def read_program(path: Path) -> tuple[dict[str, Any], str]:
    """Return the training of a program as TRL's keys, and a sentence about arguments not counted.

    Raises UsageError if the program does not call exactly one trainer of TRL, or if it computes a
    value that memory or speed depends on.
    """
    text = _code(path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"{path}{line}: not valid Python: {error}", remedy="correct it") from None
    program = _Program(path, tree)
    training = _Training(program)
    trainer = _trainer(program)
    training.read_trainer(trainer)
    unread = sorted(set(training.unread))
    return training.values, f"not counted: {', '.join(unread)}" if unread else ""


def _code(path: Path) -> str:
    """Return the Python code of a program, or of the cells of a notebook."""
    text = read_user_text(path)
    if path.suffix != ".ipynb":
        return text
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path} is not a notebook", remedy="pass a valid file") from None
    # IPython's own commands are not Python.
    return "\n".join(
        "pass" if line.startswith(("%", "!")) else line
        for source in sources
        for line in source.splitlines()
    )


def _trainer(program: "_Program") -> ast.Call:
    """Return the program's call of a trainer."""
    path = program.path
    owners = (call.func.value for call in program.calls if isinstance(call.func, ast.Attribute))
    if any(_name(owner) in UNSLOTH for owner in owners):
        raise UsageError(
            f"{path} loads the model with Unsloth, which is not supported",
            remedy="describe the training to `autotune plan`, for example with --space qlora",
        )
    calls = [call for call in program.calls if _name(call.func) in OBJECTIVES]
    if len(calls) == 1:
        return calls[0]
    if calls:
        lines = ", ".join(str(call.lineno) for call in calls)
        raise UsageError(
            f"{path} calls several trainers, in lines {lines}", remedy="pass a program with one"
        )
    raise UsageError(
        f"{path} calls no trainer of TRL ({', '.join(OBJECTIVES)})",
        remedy="pass the program, the script or the YAML file that starts the training",
    )


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name, or "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@dataclass(frozen=True, slots=True)
class _Assignment:
    """An assignment to a name in the lines `scope`. The value is None if it is unknown."""

    name: str
    value: ast.expr | None
    line: int  # the last line of the statement
    scope: tuple[int, float]


class _Program:
    """The calls and the assignments of a program."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        # The attributes that the program assigns
        self.changed = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ]
        self._assignments = list(_assignments(tree.body, (0, math.inf), certain=True))

    def resolve(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression behind a name, or None if it is unknown."""
        while isinstance(node, ast.Name):
            node = self._assigned(node)
        return node

    def _assigned(self, name: ast.Name) -> ast.expr | None:
        line = name.lineno
        found = [
            one
            for one in self._assignments
            if one.name == name.id and one.scope[0] <= line <= one.scope[1] and one.line < line
        ]
        last = max(found, key=lambda one: (one.scope[0], one.line), default=None)
        return None if last is None else last.value

    def error(
        self, node: ast.expr, what: str, remedy: str = "write the value itself"
    ) -> UsageError:
        """Return an error about an expression, with its line."""
        return UsageError(f"{self.path}:{node.lineno}: {what}", remedy=remedy)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression. Raises LookupError if it is unknown."""
        found = self.resolve(node)
        match found:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self.value(_known(key)): self.value(value) for key, value in pairs}
            case ast.Attribute(value=ast.Name(id="torch"), attr=dtype):
                return dtype
            case ast.Call(func=asked) if _name(asked) in _HAS_BF16:
                return True
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
                parts = self._number(left), self._number(right)
                return _OPERATORS[type(operation)](*parts)
        raise LookupError

    def _number(self, node: ast.expr) -> int | float:
        value = self.value(node)
        if not isinstance(value, int | float):
            raise LookupError
        return value


def _known(node: ast.expr | None) -> ast.expr:
    if node is None:  # the key of `**others` in a dictionary
        raise LookupError
    return node


def _assignments(
    body: list[ast.stmt], scope: tuple[int, float], *, certain: bool
) -> Iterator[_Assignment]:
    """Yield the assignments of statements. Those that may be skipped have no known value."""
    for statement in body:
        line = statement.end_lineno or statement.lineno
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inside = (statement.lineno, line)
                for argument in ast.walk(statement.args):
                    if isinstance(argument, ast.arg):
                        yield _Assignment(argument.arg, None, statement.lineno - 1, inside)
                yield from _assignments(statement.body, inside, certain=True)
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield _Assignment(name, value if certain else None, line, scope)
                continue
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield _Assignment(name, value if certain else None, line, scope)
                continue
            case ast.If() | ast.For() | ast.While() | ast.Try() | ast.With() | ast.ClassDef():
                always = isinstance(statement, ast.With) or _is_main(statement)
                for name_of_body in ("body", "orelse", "handlers", "finalbody"):
                    inner = getattr(statement, name_of_body, [])
                    parts = [
                        part
                        for one in inner
                        for part in (one.body if isinstance(one, ast.ExceptHandler) else [one])
                    ]
                    yield from _assignments(parts, scope, certain=certain and always)
        # What else the statement itself assigns, such as the names of a tuple
        for node in _own_nodes(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield _Assignment(node.id, None, line, scope)


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement without those of the statements in it."""
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from ast.walk(node)


def _is_main(statement: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`."""
    return isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)


@dataclass(slots=True)
class _Training:
    """The keys of TRL that a program's calls describe."""

    program: _Program
    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def read_trainer(self, trainer: ast.Call) -> None:
        """Read the call of a trainer."""
        objective = OBJECTIVES[_name(trainer.func)]
        self.values["objective"] = objective
        given = self._keywords(trainer)
        if trainer.args:
            given.setdefault("model", trainer.args[0])
        if "args" not in given:
            place = 1 if objective in ("sft", "reward") else 2
            given |= {"args": trainer.args[place]} if len(trainer.args) > place else {}
        if "model" not in given:
            raise self.program.error(trainer, "the trainer gets no model", "name the model")
        self._refuse_later_changes()
        self._read_arguments(given.pop("args", None))
        self._read_model(given.pop("model"))
        self._read_adapters(given.pop("peft_config", None))
        if "use_peft" not in self.values:
            given.pop("ref_model", None)  # TRL makes the same copy without it
        self._read_keys(given, self._keys("trainer"))
        if any(_name(call.func) == "gradient_checkpointing_enable" for call in self.program.calls):
            self.values["gradient_checkpointing"] = True

    def _refuse_later_changes(self) -> None:
        """Raise UsageError if the program changes an argument after the call that has it."""
        for node in self.program.changed:
            made = self.program.resolve(node.value)
            kinds = (*CONFIGS, "LoraConfig", _QUANTIZATION)
            if isinstance(made, ast.Call) and _name(made.func) in kinds:
                raise self.program.error(
                    node,
                    f"{node.attr} is changed after the call of {_name(made.func)}",
                    "give the value in the call",
                )

    def _read_arguments(self, node: ast.expr | None) -> None:
        """Read the trainer's `args`."""
        if node is None or self._is_none(node):
            return
        call = self.program.resolve(node)
        if not isinstance(call, ast.Call) or _name(call.func) not in CONFIGS:
            raise self.program.error(
                node,
                "the arguments are made when the program runs, so they are unknown",
                "pass the script or the YAML file that has them",
            )
        given = self._keywords(call)
        self._read_keys(given, {name: name for name in given})

    def _read_model(self, node: ast.expr) -> None:
        """Read the trainer's `model`: a name, or the call that loads or changes the model."""
        model = self.program.resolve(node)
        if not isinstance(model, ast.Call):
            self._read_name(node, node)
            return
        given, first = self._keywords(model), next(iter(model.args), None)
        match _name(model.func), first:
            case "from_pretrained", _:
                # transformers itself takes the checkpoint's dtype, and TRL takes float32.
                self.values["dtype"] = "auto"
                self._read_name(given.pop("pretrained_model_name_or_path", first), model)
                self._read_quantization(given.pop("quantization_config", None))
                if (split := self._text(given.pop("device_map", None))) in SPLITS:
                    self.values["device_map"] = split
                self._read_keys(given, self._keys("model"))
            case "get_peft_model", ast.expr():
                self._read_model(first)
                self._read_adapters(given.get("peft_config", next(iter(model.args[1:]), None)))
            case "prepare_model_for_kbit_training", ast.expr():
                self._read_model(first)
                # The call copies what is not quantised to float32, and recomputes layers.
                self.values["dtype"] = "float32"
                if self._text(given.get("use_gradient_checkpointing")) != "False":
                    self.values["gradient_checkpointing"] = True
            case (("to" | "cuda"), _) if isinstance(model.func, ast.Attribute):
                self._read_model(model.func.value)
            case _:
                self._read_name(None, model)

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

    def _read_adapters(self, node: ast.expr | None) -> None:
        """Read PEFT's configuration."""
        if node is None or self._is_none(node):
            return
        call = self.program.resolve(node)
        if not isinstance(call, ast.Call) or _name(call.func) != "LoraConfig":
            raise self.program.error(
                node,
                "the adapters are not a LoraConfig that the program always makes",
                "make one LoraConfig, without a condition",
            )
        # PEFT's defaults, which are not TRL's
        self.values |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        self._read_keys(self._keywords(call), self._keys("adapters"))

    def _read_quantization(self, node: ast.expr | None) -> None:
        """Read transformers' `quantization_config`."""
        if node is None or self._is_none(node):
            return
        call = self.program.resolve(node)
        if not isinstance(call, ast.Call) or _name(call.func) != _QUANTIZATION:
            raise self.program.error(
                node,
                f"the quantization is not a {_QUANTIZATION} that the program always makes",
                f"make one {_QUANTIZATION}, without a condition",
            )
        self._read_keys(self._keywords(call), self._keys("quantization"))

    def _read_keys(self, given: dict[str, ast.expr], keys: dict[str, str]) -> None:
        """Read arguments. `keys` has TRL's key of each argument; the others are not counted."""
        for name, node in given.items():
            if name in table("program")["without_effect"] or self._is_none(node):
                continue
            if name not in keys:
                self.unread.append(name)
                continue
            try:
                self.values[keys[name]] = self.program.value(node)
            except (LookupError, TypeError, ArithmeticError, RecursionError):
                raise self.program.error(
                    node, f"{name} is computed when the program runs, so its value is unknown"
                ) from None

    def _keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return the keyword arguments of a call."""
        if any(keyword.arg is None for keyword in call.keywords):
            raise self.program.error(
                call,
                f"{_name(call.func)} gets arguments by **, which are unknown",
                "write the arguments themselves",
            )
        return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}

    def _text(self, node: ast.expr | None) -> str:
        """Return a value as text, or "" if there is none or if it is unknown."""
        try:
            found = None if node is None else self.program.value(node)
        except LookupError:
            return ""
        return "" if found is None else str(found)

    def _is_none(self, node: ast.expr) -> bool:
        found = self.program.resolve(node)
        return isinstance(found, ast.Constant) and found.value is None

    @staticmethod
    def _keys(part: str) -> dict[str, str]:
        keys: dict[str, str] = table("program")[part]
        return keys

"""Reads a training with a trainer of TRL from a Python program or a notebook, as keys of TRL.

The program is not executed. A name has the value of its last assignment before its use. If an
assignment may be skipped, such as one in an `if`, the value is unknown. A call of a function of the
program has the value that its only `return` gives, at the end of the function.
"""

import ast
import bisect
import itertools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import read_user_text
from autotune.planning.foreign_file import table

NOTEBOOK = ".ipynb"
PROGRAMS = (".py", NOTEBOOK)
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
UNSLOTH = ("FastLanguageModel", "FastModel")
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
SPLITS = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps over several GPUs
# Functions that ask whether the GPU has bf16, which all GPUs since 2020 have
_HAS_BF16 = ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available")
_UNKNOWN = (LookupError, TypeError, ArithmeticError, RecursionError)  # why a value is unknown
_CHANGES = ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert")
_MODULE = (0, math.inf)  # the lines of the module itself
_STEPS = 100  # the most names and calls between an expression and its value
MAX_NOTEBOOK = 2**26  # bytes; a notebook also holds its pictures
_COMMAND = re.compile(
    r"(?m)^([ \t]*)[%!].*(?:\\\n.*)*"
)  # a command of IPython, with its next lines
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
    program = _Program(path, _cells(path) if path.suffix == NOTEBOOK else [read_user_text(path)])
    training = _Training(program)
    training.read_trainer(_trainer(program))
    unread = sorted(set(training.unread))
    return training.values, f"not counted: {', '.join(unread)}" if unread else ""


def _cells(path: Path) -> list[str]:
    """Return the Python code of each cell of a notebook; "" for a cell with other text."""
    text = read_user_text(path, MAX_NOTEBOOK)
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path} is not a notebook", remedy="pass a valid file") from None
    return list(map(_code, sources))


def _code(source: str) -> str:
    """Return a cell without IPython's own commands, or "" if it then is not Python."""
    if source.startswith("%%") and not source.startswith(("%%capture", "%%time")):
        return ""
    code = _COMMAND.sub(r"\1pass", source)
    return code if _parsed(code) else ""


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _trainer(program: "_Program") -> ast.Call:
    """Return the program's call of a trainer."""
    calls = [call for call in program.calls if _name(call.func) in OBJECTIVES]
    if len(calls) == 1:
        return calls[0]
    if calls:
        raise program.error(
            calls[1], "another trainer is called", "pass a program with a single trainer"
        )
    plain = any(_name(call.func) in ("Trainer", "Seq2SeqTrainer") for call in program.calls)
    raise UsageError(
        f"{program.path} calls no trainer of TRL ({', '.join(OBJECTIVES)})",
        remedy="add callbacks=[PreflightCallback()] from autotune to the Trainer, which checks the "
        "run before its first step"
        if plain
        else "pass the program, the script or the YAML file that starts the training",
    )


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name, or "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Conditions = tuple[tuple[ast.expr, bool], ...]


@dataclass(frozen=True, slots=True)
class _Assignment:
    """An assignment to a name in the lines `scope`. The value is None if it is unknown."""

    name: str
    value: ast.expr | None
    line: int  # the last line of the statement
    scope: tuple[int, float]
    conditions: _Conditions = ()  # the tests around it, each with the result that leads to it


class _Program:
    """The calls and the assignments of a program, or of the cells of a notebook."""

    def __init__(self, path: Path, cells: list[str]) -> None:
        self.path = path
        lengths = (cell.count("\n") + 1 for cell in cells)
        self._begins = list(itertools.accumulate(lengths, initial=1))
        self._is_notebook = path.suffix == NOTEBOOK
        tree = _parsed("\n".join(cells))
        if tree is None:
            raise UsageError(f"{path} is not valid Python", remedy="correct the program")
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        # The attributes that the program assigns
        self.changed = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ]
        # Dictionaries and lists that the program changes
        self._altered = {name for node in ast.walk(tree) if (name := _altered(node))}
        self._functions: dict[str, list[_Function]] = {}
        for node in ast.walk(tree):
            if isinstance(node, _Function):
                self._functions.setdefault(node.name, []).append(node)
        self._uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        self._assignments: list[_Assignment] = []
        self._found: dict[ast.expr, ast.expr | None] = {}
        self._collect(tree.body, _MODULE, certain=True)

    def place(self, line: int) -> str:
        """Return where a line is: in a file, or in a cell of a notebook."""
        if not self._is_notebook:
            return f"{self.path}:{line}"
        cell = bisect.bisect(self._begins, line)
        return f"{self.path}, code cell {cell}, line {line - self._begins[cell - 1] + 1}"

    def error(
        self, node: ast.expr, what: str, remedy: str = "write the value itself"
    ) -> UsageError:
        """Return an error about an expression, with its line."""
        return UsageError(f"{self.place(node.lineno)}: {what}", remedy=remedy)

    def _collect(
        self,
        body: list[ast.stmt],
        scope: tuple[int, float],
        conditions: _Conditions = (),
        *,
        certain: bool,
    ) -> None:
        """Collect the assignments of statements. Those that may be skipped have no known value."""
        for statement in body:
            line = statement.end_lineno or statement.lineno
            if isinstance(statement, _Function):
                inside = (statement.lineno, line)
                given = self._given(statement)
                for argument in ast.walk(statement.args):
                    if isinstance(argument, ast.arg):
                        value = given.get(argument.arg)
                        first = _Assignment(argument.arg, value, statement.lineno - 1, inside)
                        self._assignments.append(first)
                self._collect(statement.body, inside, certain=True)
                continue
            if isinstance(statement, ast.If):
                test = statement.test
                for block, result in ((statement.body, True), (statement.orelse, False)):
                    self._collect(block, scope, (*conditions, (test, result)), certain=certain)
            elif isinstance(statement, ast.With):
                self._collect(statement.body, scope, conditions, certain=certain)
            elif isinstance(statement, ast.Global):
                for name in statement.names:
                    self._assignments.append(_Assignment(name, None, line, _MODULE))
            else:
                self._collect(_inner(statement), scope, conditions, certain=False)
            for name, assigned in _assigned(statement):
                known = assigned if certain else None
                self._assignments.append(_Assignment(name, known, line, scope, conditions))

    def _given(self, function: _Function) -> dict[str, ast.expr]:
        """Return the known arguments of a function, if the program calls it once and only there."""
        calls = [call for call in self.calls if _is(call.func, function.name)]
        if len(calls) != 1 or not self._is_only(function) or self._uses[function.name] != 1:
            return {}
        call = calls[0]
        inside = function.lineno <= call.lineno <= (function.end_lineno or 0)
        starred = any(isinstance(one, ast.Starred) for one in call.args)
        starred |= any(keyword.arg is None for keyword in call.keywords)
        if inside or starred or function.decorator_list:
            return {}

        arguments = function.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            defaults |= {} if default is None else {one.arg: default}
        given: dict[str, ast.expr] = {
            name: value for name, value in defaults.items() if isinstance(value, ast.Constant)
        }
        given |= dict(zip(names, call.args, strict=False))
        return given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}

    def _is_only(self, function: _Function) -> bool:
        """Return whether a function's name has no other value."""
        others = any(one.name == function.name for one in self._assignments)
        return len(self._functions[function.name]) == 1 and not others

    def _truth(self, test: ast.expr) -> bool | None:
        """Return whether a condition holds, or None if that is unknown."""
        if "__name__" in ast.dump(test):  # the usual condition of a program's main part
            return True
        try:
            return bool(self.value(test))
        except _UNKNOWN:
            return None

    def resolve(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression behind a name or a call, or None if it is unknown."""
        for _ in range(_STEPS):
            if not isinstance(node, ast.Name | ast.Call | ast.Subscript):
                return node
            if node not in self._found:
                self._found[node] = None  # a value that depends on itself is unknown
                self._found[node] = self._behind(node)
            before, node = node, self._found[node]
            if before is node:
                return node
        return None

    def _behind(self, node: ast.Name | ast.Call | ast.Subscript) -> ast.expr | None:
        match node:
            case ast.Name():
                return self._assigned(node)
            case ast.Call(func=ast.Name(id=name)) if name in self._functions:
                return self._returned(self._functions[name][0])
            case ast.Subscript(value=of, slice=key):
                whole = self.resolve(of)
                literal = isinstance(whole, ast.Tuple | ast.List | ast.Dict)
                return self._part(whole, key) if literal else node
        return node

    def _returned(self, function: _Function) -> ast.expr | None:
        """Return the expression that a function returns at its end, or None if it is unknown."""
        inside = [node for statement in function.body for node in ast.walk(statement)]
        ends = (ast.Return, ast.Yield, ast.YieldFrom, _Function, ast.Lambda)
        found = [node for node in inside if isinstance(node, ends)]
        last = function.body[-1]
        plain = isinstance(function, ast.FunctionDef) and not function.decorator_list
        if not plain or found != [last] or not self._is_only(function):
            return None
        return last.value if isinstance(last, ast.Return) else None

    def _part(self, whole: ast.expr | None, key: ast.expr) -> ast.expr | None:
        """Return an element of a tuple, a list or a dictionary, or None if it is unknown."""
        try:
            wanted = self.value(key)
            match whole:
                case ast.Tuple(elts=items) | ast.List(elts=items) if isinstance(wanted, int):
                    starred = any(isinstance(item, ast.Starred) for item in items)
                    return None if starred else items[wanted]
                case ast.Dict(keys=keys, values=values):
                    names = [self.value(_known(one)) for one in keys]
                    part: ast.expr = dict(zip(names, values, strict=True))[wanted]
                    return part
        except _UNKNOWN:
            pass
        return None

    def _assigned(self, name: ast.Name) -> ast.expr | None:
        """Return the value of a name where it is used, or None if it is unknown."""
        if name.id in self._altered:
            return None
        line = name.lineno
        visible = [
            one
            for one in self._assignments
            if one.name == name.id and one.scope[0] <= line <= one.scope[1]
        ]
        begin = max((one.scope[0] for one in visible), default=0)
        visible = [one for one in visible if one.scope[0] == begin]
        before = [one for one in visible if one.line < line]
        functions = itertools.chain.from_iterable(self._functions.values())
        if any(begin < one.lineno <= line <= (one.end_lineno or 0) for one in functions):
            # A function may run after later lines of the module, so it may see their values.
            before = visible if len(visible) == 1 or len(before) == len(visible) else []

        for one in sorted(before, key=lambda one: one.line, reverse=True):
            truths = [(self._truth(test), result) for test, result in one.conditions]
            if any(truth is not None and truth != result for truth, result in truths):
                continue  # this line is skipped
            return one.value if all(truth == result for truth, result in truths) else None
        return None

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


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _altered(node: ast.AST) -> str:
    """Return the name of the dictionary or list that an expression changes, or ""."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=change)):
            return name if change in _CHANGES else ""
    return ""


def _known(node: ast.expr | None) -> ast.expr:
    if node is None:  # the key of `**others` in a dictionary
        raise LookupError
    return node


def _inner(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements in a statement, such as a loop."""
    return [
        node
        for part in ("body", "orelse", "finalbody", "handlers", "cases")
        for block in getattr(statement, part, [])
        for node in (
            block.body if isinstance(block, ast.ExceptHandler | ast.match_case) else [block]
        )
    ]


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a statement itself assigns, with their values if they are known."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
            return
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
            return
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            if len(names) == len(values) and all(isinstance(one, ast.Name) for one in names):
                yield from zip(map(_name, names), values, strict=True)
                return
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call() as value):
            if all(isinstance(one, ast.Name) for one in names):
                for index, one in enumerate(names):
                    key = ast.Constant(index)
                    yield _name(one), ast.Subscript(value, key, ast.Load(), lineno=value.lineno)
                return
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, None


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
        self._read_quantization(given.pop("quantization_config", None))
        if "formatting_func" not in given:
            self._read_dataset(given.get("train_dataset"))
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
            matters = node.attr not in table("program")["without_effect"]
            if matters and isinstance(made, ast.Call) and _name(made.func) in kinds:
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
        if _name(call.func) == "TrainingArguments":  # TRL keeps the defaults of transformers
            self.values |= {"gradient_checkpointing": False, "bf16": False}
        self._read_keys(given, {name: name for name in given})

    def _read_model(self, node: ast.expr) -> None:
        """Read the trainer's `model`: a name, or the call that loads or changes the model."""
        model = self.program.resolve(node)
        if isinstance(model, ast.Subscript):  # a model that was loaded together with its tokenizer
            model = self.program.resolve(model.value)
        if not isinstance(model, ast.Call):
            self._read_name(node, node)
            return
        owner = model.func.value if isinstance(model.func, ast.Attribute) else None
        if owner is not None and _name(owner) in UNSLOTH:
            self._read_unsloth(model)
            return
        given, first = self._keywords(model), next(iter(model.args), None)
        match _name(model.func), first:
            case "from_pretrained", _:
                # transformers itself takes the checkpoint's dtype, and TRL takes float32.
                self.values |= {"dtype": "auto"}
                if not {"dtype", "torch_dtype"} & given.keys():
                    self.values["no dtype"] = True
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

    def _read_unsloth(self, call: ast.Call) -> None:
        """Read a call of Unsloth that loads a model, or that adds adapters."""
        given, first = self._keywords(call), next(iter(call.args), None)
        if _name(call.func) == "from_pretrained":
            self._read_name(given.pop("model_name", first), call)
            whole = self._text(given.pop("full_finetuning", None)) == "True"
            self.values |= {"Unsloth": True, "dtype": "auto"} | ({} if whole else _UNSLOTH_BASE)
            self.values["max_seq_length"] = _UNSLOTH_LENGTH
            self._read_keys(given, self._keys("model") | {"max_seq_length": "max_seq_length"})
        elif _name(call.func) == "get_peft_model" and first is not None:
            self._read_model(first)
            recomputes = self._text(given.pop("use_gradient_checkpointing", None)) != "False"
            self.values |= _UNSLOTH_LORA | {
                "use_peft": True,
                "gradient_checkpointing": recomputes,
            }
            self._read_keys(given, self._keys("adapters"))
        else:
            self._read_name(None, call)

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
        if isinstance(loaded, ast.Subscript):  # the choice of a split
            loaded = self.program.resolve(loaded.value)
        if isinstance(loaded, ast.Call) and _name(loaded.func) == "load_dataset" and loaded.args:
            try:
                dataset = {"path": self.program.value(loaded.args[0])}
                files = self._keywords(loaded).get("data_files")
                dataset |= {"data_files": self.program.value(files)} if files else {}
            except (*_UNKNOWN, UsageError):
                return
            self.values["datasets"] = [dataset]

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
            except _UNKNOWN:
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
        except _UNKNOWN:
            return ""
        return "" if found is None else str(found)

    def _is_none(self, node: ast.expr) -> bool:
        found = self.program.resolve(node)
        return isinstance(found, ast.Constant) and found.value is None

    @staticmethod
    def _keys(part: str) -> dict[str, str]:
        keys: dict[str, str] = table("program")[part]
        return keys

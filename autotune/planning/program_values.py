"""Finds the values in a Python program or a notebook, without running it.

A name has the value of its last assignment before its use. If an assignment may be skipped, such as
one in an `if` with an unknown condition, the value is unknown. A call of a function of the program
has the value that its only `return` gives, at the end of the function.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import read_user_text
from autotune.planning.program_arguments import Arguments, Command, default_of_field
from autotune.planning.program_syntax import (
    assignments_of,
    is_literal,
    is_named,
    keywords_of,
    name_of,
)

NOTEBOOK = ".ipynb"
# Functions that ask whether the GPU has bf16, which all GPUs since 2020 have
_HAS_BF16 = ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available")
UNKNOWN = (
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    RecursionError,
)  # why a value is unknown
_CHANGES = ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert")
_MODULE = (0, math.inf)  # the lines of the module itself
_STEPS = 100  # the most names and calls between an expression and its value
MAX_NOTEBOOK = 2**26  # bytes; a notebook also holds its pictures
# A command of IPython, with the lines that continue it
_COMMAND = re.compile(r"(?m)^([ \t]*)[%!].*(?:\\\n.*)*")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}
_BUILT_IN: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "min": min,
    "max": max,
    "round": round,
    "len": len,
}
_RUNS = ("Fire", "run")  # functions of Fire and Typer that call a function as the command says
_NAMESPACES = ("Namespace", "SimpleNamespace")
_FRAMEWORK = ("Arguments", "Config", "object", "ABC")  # how the names of usual base classes end


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Indirect = ast.Name | ast.Call | ast.Subscript | ast.Attribute | ast.IfExp
_Conditions = tuple[tuple[ast.expr, bool], ...]


@dataclass(frozen=True, slots=True)
class _Assignment:
    """An assignment to a name in the lines `scope`. The value is None if it is unknown."""

    name: str
    value: ast.expr | None
    line: int  # the last line of the statement
    scope: tuple[int, float]
    conditions: _Conditions = ()  # the tests around it, each with the result that leads to it


class Program:
    """The calls and the assignments of a program, or of the cells of a notebook."""

    def __init__(self, path: Path, command: Command | None = None) -> None:
        """Read the file, which `command` starts.

        Raises UsageError unless it is a Python program or a notebook.
        """
        self.path = path
        cells = _cells(path) if path.suffix == NOTEBOOK else [read_user_text(path)]
        lengths = (cell.count("\n") + 1 for cell in cells)
        self._begins = list(itertools.accumulate(lengths, initial=1))
        self._is_notebook = path.suffix == NOTEBOOK
        tree = _parsed("\n".join(cells))
        if tree is None:
            raise UsageError(f"{path} is not valid Python", remedy="correct the program")
        tree.body = _without_cells(tree.body)
        self.tree = tree
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        # The attributes that the program assigns
        self.changed = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ]
        # The same with their values, if a statement assigns only one
        self.attributes = [
            (node.targets[0], node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
        ]
        # Dictionaries and lists that the program changes in a way that is not followed
        followed = {
            getattr(node, "targets", [getattr(node, "value", None)])[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and any(_changed(node))
        }
        nodes = (node for node in ast.walk(tree) if node not in followed)
        self._altered = {name for node in nodes if (name := _altered(node))}
        self.functions: dict[str, list[_Function]] = {}
        self.classes: dict[str, list[ast.ClassDef]] = {}
        self._made_by: dict[ast.stmt, str] = {}  # the class of each `__init__`
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, []).append(node)
                makers = (one for one in node.body if getattr(one, "name", "") == "__init__")
                self._made_by |= dict.fromkeys(makers, node.name)
            if isinstance(node, _Function):
                self.functions.setdefault(node.name, []).append(node)
        self._uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        self._assignments: list[_Assignment] = []
        self._stores: list[tuple[ast.Attribute, ast.expr | None, _Conditions]] = []
        self._found: dict[ast.expr, ast.expr | None] = {}
        self.arguments = Arguments(
            command=command or Command(),
            calls=self.calls,
            classes=self.classes,
            resolve=self.resolve,
        )
        self.assumed: set[str] = set()  # the arguments whose defaults a value rests on
        self._collect(tree.body, _MODULE, certain=True)

    def stores(self) -> dict[ast.Attribute, ast.expr | None]:
        """Return the attributes that the program assigns, with their values.

        The value is None if the assignment may be skipped. One that is surely skipped is left out.
        """
        found = dict.fromkeys(self.changed)
        for node, value, conditions in self._stores:
            is_made = self._holds(conditions)
            if is_made is False:
                del found[node]
            elif is_made:
                found[node] = value
        return found

    def place(self, line: int) -> str:
        """Return where a line is: in a file, or in a cell of a notebook."""
        if not self._is_notebook:
            return f"{self.path}:{line}"
        cell = bisect.bisect(self._begins, line)
        return f"{self.path}, code cell {cell}, line {line - self._begins[cell - 1] + 1}"

    def error(
        self, node: ast.expr | ast.stmt, what: str, remedy: str = "write the value itself"
    ) -> UsageError:
        """Return an error about a part of the program, with its line."""
        return UsageError(f"{self.place(node.lineno)}: {what}", remedy=remedy)

    def unknown(self, name: str, node: ast.expr) -> UsageError:
        """Return an error about a value that is not in the program."""
        for part in ast.walk(node):
            if (flag := self.arguments.missing.get(name_of(part))) is not None:
                return self.error(
                    node,
                    f"{name} is the argument {flag} of the command line, which has no default",
                    f"pass the shell script that starts the program with {flag}",
                )
        return self.error(
            node, f"{name} is computed when the program runs, so its value is unknown"
        )

    def is_none(self, node: ast.expr) -> bool:
        """Return whether an expression is surely None."""
        found = self.resolve(node)
        return isinstance(found, ast.Constant) and found.value is None

    def is_known(self, node: ast.expr) -> bool:
        """Return whether the value of an expression is known."""
        try:
            self.value(node)
        except UNKNOWN:
            return False
        return True

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
            match statement:
                case ast.Assign(targets=[ast.Attribute() as target], value=value):
                    self._stores.append((target, value if certain else None, conditions))
            changed = self._follow(statement, scope)
            for name, assigned in changed or assignments_of(statement):
                known = assigned if certain else None
                self._assignments.append(_Assignment(name, known, line, scope, conditions))

    def _follow(self, statement: ast.stmt, scope: tuple[int, float]) -> list[tuple[str, ast.expr]]:
        """Return the dictionary that a statement changes, and its value after the change.

        If other lines make the dictionary, such as those that call a function, its value is unknown
        everywhere.
        """
        changed = list(_changed(statement))
        for name, _ in changed:
            if not any(
                one.name == name and one.scope == scope and one.line >= scope[0]
                for one in self._assignments
            ):
                self._altered.add(name)
        return changed

    def _given(self, function: _Function) -> dict[str, ast.expr]:
        """Return the arguments of a function that have the same known value in all calls."""
        name = self._made_by.get(function, function.name)
        calls = [call for call in self.calls if is_named(call.func, name)]
        runs = [
            call
            for call in self.calls
            if name_of(call.func) in _RUNS and any(is_named(one, name) for one in call.args)
        ]
        if not self._is_only(name) or self._uses[name] != len(calls) + len(runs):
            return {}
        if runs and not calls and not function.decorator_list:
            return self._run(function, runs[0])
        if not calls or runs:
            return {}
        inside = any(function.lineno <= call.lineno <= (function.end_lineno or 0) for call in calls)
        starred = any(isinstance(one, ast.Starred) for call in calls for one in call.args)
        starred |= any(keyword.arg is None for call in calls for keyword in call.keywords)
        if inside or starred or function.decorator_list:
            return {}

        arguments = function.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        known = _defaults(function)
        places = names[function in self._made_by :]  # without `self`
        first, *others = (
            known | dict(zip(places, call.args, strict=False)) | keywords_of(call) for call in calls
        )
        return {name: value for name, value in first.items() if _is_alike(name, value, others)}

    def _run(self, function: _Function, call: ast.Call) -> dict[str, ast.expr]:
        """Return the arguments that the command line gives a function."""
        names = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)]
        defaults = _defaults(function)
        given = self.arguments.of_function(call, names)
        for name in names:
            if name not in given and name in defaults:
                self.arguments.defaults[defaults[name]] = f"--{name}"
            elif name not in given:
                self.arguments.missing[name] = f"--{name}"
        return defaults | given

    def _is_only(self, name: str) -> bool:
        """Return whether the name of a function or a class has no other value."""
        others = any(one.name == name for one in self._assignments)
        return len([*self.functions.get(name, ()), *self.classes.get(name, ())]) == 1 and not others

    def _truth(self, test: ast.expr) -> bool | None:
        """Return whether a condition holds, or None if that is unknown."""
        if isinstance(test, ast.Compare) and is_named(test.left, "__name__"):
            return True  # the usual condition of a program's main part
        try:
            return bool(self.value(test))
        except UNKNOWN:
            return None

    def resolve(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression behind a name or a call, or None if it is unknown."""
        for _ in range(_STEPS):
            if node is not None and (name := self.arguments.defaults.get(node)) is not None:
                self.assumed.add(name)
            if not isinstance(node, _Indirect):
                return node
            if node not in self._found:
                self._found[node] = None  # a value that depends on itself is unknown
                self._found[node] = self._behind(node)
            before, node = node, self._found[node]
            if before is node:
                return node
        return None

    def _behind(self, node: _Indirect) -> ast.expr | None:
        if (variable := self.arguments.variable(node)) is not None:
            return variable
        match node:
            case ast.Name():
                return self._assigned(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                truth = self._truth(test)
                return None if truth is None else (body if truth else orelse)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                return self._returned(self.functions[name][0])
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[key, *others]):
                whole = self.resolve(owner)
                found = self._part(whole, key) if isinstance(whole, ast.Dict) else node
                return found or next(iter(others), None)
            case ast.Subscript(value=of, slice=key):
                if (made := self.arguments.made(node)) is not None:
                    return made
                whole = self.resolve(of)
                literal = isinstance(whole, ast.Tuple | ast.List | ast.Dict)
                return self._part(whole, key) if literal else node
            case ast.Attribute(value=owner, attr=name):
                return self._field(owner, name) or node
        return node

    def _returned(self, function: _Function) -> ast.expr | None:
        """Return the expression that a function returns at its end, or None if it is unknown."""
        inside = [node for statement in function.body for node in ast.walk(statement)]
        ends = (ast.Return, ast.Yield, ast.YieldFrom, _Function, ast.Lambda)
        found = [node for node in inside if isinstance(node, ends)]
        last = function.body[-1]
        plain = isinstance(function, ast.FunctionDef) and not function.decorator_list
        if not plain or found != [last] or not self._is_only(function.name):
            return None
        return last.value if isinstance(last, ast.Return) else None

    def _field(self, owner: ast.expr, name: str) -> ast.expr | None:
        """Return an attribute that a class of the program, or the call that makes it, sets once."""
        stored = [(node, value) for node, value in self.attributes if node.attr == name]
        if is_named(owner, "self") and len(stored) == 1 and self._is_stored_once(name):
            node, value = stored[0]
            same = self._class_at(node.lineno) is self._class_at(owner.lineno)
            return value if is_named(node.value, "self") and same else None
        if any(one.attr == name for one in self.changed):
            return None
        is_class = isinstance(owner, ast.Name) and owner.id in self.classes
        made = owner if is_class else self.resolve(owner)
        if (found := self.arguments.parsed(made, name)) is not None:
            return found
        given: dict[str, ast.expr] = {}
        if isinstance(made, ast.Call):
            given = keywords_of(made)
            if made.args or len(given) < len(made.keywords):
                return None
            made = made.func
            if name in given and (name_of(made) in _NAMESPACES or self.is_config(made)):
                return given[name]
        return self._class_field(made, name, given)

    def _class_field(
        self, kind: ast.expr | None, name: str, given: dict[str, ast.expr]
    ) -> ast.expr | None:
        """Return a field of a class of the program, which a call makes with the arguments given."""
        found = self.classes.get(kind.id, []) if isinstance(kind, ast.Name) else []
        if len(found) != 1:
            return None
        decorators = map(ast.unparse, found[0].decorator_list)
        usual = all("dataclass" in decorator for decorator in decorators)
        is_assigned = any(one.name == found[0].name for one in self._assignments)
        if found[0].keywords or not usual or is_assigned:
            return None
        values = [
            value
            for statement in found[0].body
            for field, value in assignments_of(statement)
            if field == name
        ]
        if len(values) == 1:
            return given.get(name, default_of_field(values[0]))
        bases = [base for base in found[0].bases if name_of(base) != found[0].name]
        if values or not all(name_of(base).endswith(_FRAMEWORK) for base in found[0].bases):
            return None
        inherited = (self._class_field(base, name, given) for base in bases)
        return next((value for value in inherited if value is not None), None)

    def is_config(self, kind: ast.expr) -> bool:
        """Return whether a class is of a library, or extends one, that holds arguments."""
        own = self.classes.get(name_of(kind))
        bases = map(name_of, own[0].bases) if own else [name_of(kind)]
        return any(base.endswith(_FRAMEWORK[:2]) for base in bases)

    def _is_stored_once(self, attribute: str) -> bool:
        return len([one for one in self.changed if one.attr == attribute]) == 1

    def _class_at(self, line: int) -> ast.ClassDef | None:
        """Return the class that has a line, or None."""
        classes = itertools.chain.from_iterable(self.classes.values())
        return next((one for one in classes if one.lineno <= line <= (one.end_lineno or 0)), None)

    def _part(self, whole: ast.expr | None, key: ast.expr) -> ast.expr | None:
        """Return an element of a tuple, a list or a dictionary, or None if it is unknown."""
        try:
            wanted = self.value(key)
            match whole:
                case ast.Tuple(elts=items) | ast.List(elts=items) if isinstance(wanted, int):
                    starred = any(isinstance(item, ast.Starred) for item in items)
                    return None if starred else items[wanted]
                case ast.Dict():
                    return self.items(whole)[wanted]
        except UNKNOWN:
            pass
        return None

    def items(self, node: ast.expr) -> dict[Any, ast.expr]:
        """Return a dictionary's values by key. Raises one of UNKNOWN if they are unknown."""
        found: dict[Any, ast.expr] = {}
        match self.resolve(node):
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    found |= self.items(value) if key is None else {self.value(key): value}
            case ast.Call(func=ast.Name(id="dict"), args=args, keywords=keywords):
                for one in args:
                    found |= self.items(one)
                for keyword in keywords:
                    value = keyword.value
                    found |= {keyword.arg: value} if keyword.arg else self.items(value)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                found = self.items(left) | self.items(right)
            case _:
                raise LookupError
        return found

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
        functions = itertools.chain.from_iterable(self.functions.values())
        if any(begin < one.lineno <= line <= (one.end_lineno or 0) for one in functions):
            # A function may run after later lines of the module, so it may see their values.
            before = visible if len(visible) == 1 or len(before) == len(visible) else []

        for one in sorted(before, key=lambda one: one.line, reverse=True):
            holds = self._holds(one.conditions)
            if holds is not False:
                return one.value if holds else None
        return None

    def _holds(self, conditions: _Conditions) -> bool | None:
        """Return whether all conditions lead to a statement, or None if that is unknown."""
        truths = [(self._truth(test), result) for test, result in conditions]
        if any(truth is not None and truth != result for truth, result in truths):
            return False
        return True if all(truth == result for truth, result in truths) else None

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression. Raises one of UNKNOWN if it is unknown."""
        found = self.resolve(node)
        match found:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict() | ast.Call(func=ast.Name(id="dict")):
                return {key: self.value(one) for key, one in self.items(found).items()}
            case ast.Attribute(value=ast.Name(id="torch"), attr=dtype):
                return dtype
            case ast.Attribute(value=ast.Name(id="sys"), attr="argv") if not self._is_notebook:
                return [self.path.name, *(self.arguments.command.words or ())]
            case ast.Call(func=asked) if name_of(asked) in _HAS_BF16:
                return True
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _BUILT_IN:
                return _BUILT_IN[name](*map(self.value, args))
        return self._computed(found)

    def _computed(self, node: ast.expr | None) -> Any:
        """Return the value of an expression with an operator."""
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=ast.Add(), right=right) if self._is_text(left):
                return self.value(left) + self.value(right)
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
                parts = self._number(left), self._number(right)
                return _OPERATORS[type(operation)](*parts)
            case ast.Compare(left=left, ops=[comparison], comparators=[right]):
                return _COMPARISONS[type(comparison)](self.value(left), self.value(right))
            case ast.BoolOp(op=joined, values=values):
                for part in values[:-1]:
                    if bool(value := self.value(part)) is isinstance(joined, ast.Or):
                        return value
                return self.value(values[-1])
            case ast.JoinedStr(values=values):
                return "".join(str(self.value(_formatted(value))) for value in values)
        raise LookupError

    def _is_text(self, node: ast.expr) -> bool:
        return isinstance(self.value(node), str)

    def _number(self, node: ast.expr) -> int | float:
        value = self.value(node)
        if not isinstance(value, int | float):
            raise LookupError
        return value


def _defaults(function: _Function) -> dict[str, ast.expr]:
    """Return the default values of a function's arguments that are literals."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    defaults = dict(zip(reversed(names), reversed(given.defaults), strict=False))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        defaults |= {} if default is None else {one.arg: default}
    return {name: value for name, value in defaults.items() if is_literal(value)}


def _formatted(part: ast.expr) -> ast.expr:
    """Return the expression in a part of a formatted text."""
    if isinstance(part, ast.FormattedValue):
        if part.format_spec is not None or part.conversion != -1:
            raise LookupError
        return part.value
    return part


def _is_alike(name: str, value: ast.expr, others: list[dict[str, ast.expr]]) -> bool:
    """Return whether all other calls give an argument the same constant."""
    if not others:
        return True
    same = {ast.dump(other[name]) if name in other else "" for other in others}
    return isinstance(value, ast.Constant) and same == {ast.dump(value)}


def _changed(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name of a dictionary that a statement changes, with its value after the change."""
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=key)], value=value):
            after: ast.expr = ast.Dict([None, key], [ast.Name(name, ast.Load()), value])
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update")) as call
        ):
            before = ast.Name(name, ast.Load())
            made = ast.Name("dict", ast.Load())
            after = ast.Call(made, [before, *call.args], call.keywords)
        case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=value):
            after = ast.BinOp(ast.Name(name, ast.Load()), ast.BitOr(), value)
        case _:
            return
    yield name, ast.fix_missing_locations(ast.copy_location(after, statement))


def _altered(node: ast.AST) -> str:
    """Return the name of the dictionary or list that an expression changes, or ""."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=change)):
            return name if change in _CHANGES else ""
    return ""


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


def _without_cells(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a program, with those of marimo's cells at the top level.

    A cell is a function whose arguments and results are names that all cells share.
    """
    found: list[ast.stmt] = []
    for statement in body:
        makers = statement.decorator_list if isinstance(statement, _Function) else []
        names = {ast.unparse(one).partition("(")[0] for one in makers}
        if isinstance(statement, _Function) and "app.cell" in names:
            found += [one for one in statement.body if not isinstance(one, ast.Return)]
        else:
            found.append(statement)
    return found


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

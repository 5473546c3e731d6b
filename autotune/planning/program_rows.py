"""Finds how long the rows are that a program makes for transformers' Trainer.

Unlike TRL's trainers, the Trainer gets tokenized examples, so the calls of the tokenizer decide how
long they are. Only the code that the training examples go through counts. The module takes too many
calls rather than too few: calls that disagree are an error.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.planning.program_syntax import name_of
from autotune.planning.program_values import UNKNOWN, Program

CALLBACK = "callbacks=[PreflightCallback()] from autotune, which sees the examples themselves"
_METHODS = ("encode", "encode_plus", "batch_encode_plus", "apply_chat_template")
_CONCATENATES = ("sum", "chain", "from_iterable", "concatenate")
_LIMIT = "model_max_length"  # a tokenizer's own limit
_OFF = (None, False, "do_not_truncate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a training: the longest one in tokens, and how they are made from examples.

    If `joined` is true, all examples are joined, and cut into rows of this length. If `filled` is
    true, every row is padded to it. If `padded_together` is true, the examples of many micro
    batches are padded to the longest one. `unread` are arguments that are not counted.
    """

    longest: int
    joined: bool = False
    filled: bool = False
    padded_together: bool = False
    unread: tuple[str, ...] = ()


def rows_of(program: Program, trainer: ast.Call, roots: list[ast.expr]) -> Rows:
    """Return the rows that a program makes from `roots`: the dataset and the collator.

    Raises UsageError at a line of the program if their length is unknown.
    """
    reached = list(_reached(program, roots))
    counted = set(_counted(program.tree))
    calls = [call for call in _calls(reached) if _tokenizes(program, call)]
    calls = calls or [call for call in program.calls if _tokenizes(program, call)]
    calls = [call for call in calls if call not in counted]
    reached = reached if len(reached) > len(roots) else [program.tree]

    if blocks := {_number(program, node): node for node in _blocks(reached)}:
        return Rows(longest=_only(program, blocks), joined=True)

    given = [_Given.of(program, call) for call in calls]
    limits = {one.limit: one.call for one in given}
    cuts = {_number(program, node): node for node in _cuts(reached)}
    if limits.keys() <= {None} and cuts:
        return Rows(longest=_only(program, cuts))
    if not limits or None in limits:
        raise program.error(
            limits.get(None, trainer),
            "this call does not cut long examples, so the longest row is unknown"
            if limits
            else "the program does not tokenize the examples, so the longest row is unknown",
            f"give the tokenizer truncation=True and max_length; or add {CALLBACK}",
        )
    collators = [call for call in _calls(reached) if name_of(call.func).startswith("DataCollator")]
    paddings = [_text(program, call, "padding") for call in collators]
    batched = any(_text(program, call, "batched") == "True" for call in _calls(reached))
    return Rows(
        longest=_only(program, limits),
        filled=all(one.padding == "max_length" for one in given) or "max_length" in paddings,
        padded_together=batched and any(one.padding in (True, "longest") for one in given),
        unread=("return_overflowing_tokens",) if any(one.splits for one in given) else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The arguments of a call of the tokenizer. The limit is None if the call cuts nothing."""

    call: ast.Call
    limit: int | None
    padding: Any
    splits: bool

    @classmethod
    def of(cls, program: Program, call: ast.Call) -> "_Given":
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if None in given:
            raise program.error(
                call, "the tokenizer gets arguments by **", "write the arguments themselves"
            )

        def value(name: str) -> Any:
            try:
                return program.value(given[name]) if name in given else None
            except UNKNOWN:
                raise program.unknown(name, given[name]) from None

        cutting, padding = value("truncation"), value("padding")
        length = given.get("max_length")
        is_given = length is not None and not program.is_none(length)
        # A length alone cuts too, unless the call also pads.
        cuts = cutting not in _OFF or (is_given and cutting is None and not padding)
        limit = None
        if cuts and is_given and length is not None:
            limit = _number(program, length)
        elif cuts:
            limit = _own_limit(program, call)
        splits = bool(value("return_overflowing_tokens"))
        return cls(call=call, limit=limit, padding=padding, splits=splits)


def _reached(program: Program, roots: list[ast.expr]) -> Iterator[ast.AST]:
    """Yield the expressions, the functions and the classes that `roots` may use."""
    values: dict[str, list[ast.AST]] = {}
    for node in ast.walk(program.tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    for part in ast.walk(target):
                        values.setdefault(name_of(part), []).append(value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                values.setdefault(name_of(target), []).append(value)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                values.setdefault(node.name, []).append(node)
    values.pop("", None)  # of targets without a name
    seen: set[ast.AST] = set()
    waiting: list[ast.AST] = list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        for part in ast.walk(node):
            behind = program.resolve(part) if isinstance(part, ast.Name) else None
            if behind is not None and behind is not part:
                waiting.append(behind)
            elif isinstance(part, ast.expr):
                waiting += values.get(name_of(part), [])


def _calls(nodes: list[ast.AST]) -> list[ast.Call]:
    parts = (part for node in nodes for part in ast.walk(node))
    return list({part: None for part in parts if isinstance(part, ast.Call)})


def _counted(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of calls of `len`, whose tokens are counted and not trained on."""
    for call in _calls([tree]):
        if name_of(call.func) == "len":
            yield from ast.walk(call)


def _tokenizes(program: Program, call: ast.Call) -> bool:
    """Return whether a call turns text into tokens."""
    used = call.func
    if isinstance(used, ast.Attribute) and used.attr in _METHODS:
        used = used.value
    name = name_of(used)
    is_own = name in program.functions or name in program.classes
    is_class = re.search(r"[a-z]Tokenizer", name) is not None
    named = "tokeniz" in name.lower() and not is_own and not is_class
    if not named and _loader(program.resolve(used)) is None:
        return False
    return _text(program, call, "tokenize") != "False"


def _loader(node: ast.AST | None) -> ast.Call | None:
    """Return the call that loads a tokenizer, or None if an expression is no such call."""
    match node:
        case ast.Call(func=ast.Attribute(value=kind, attr="from_pretrained")):
            return node if "Tokenizer" in name_of(kind) else None
    return None


def _own_limit(program: Program, place: ast.expr) -> int:
    """Return the tokenizer's own limit, if the program sets it once."""
    loaders = filter(None, map(_loader, program.calls))
    given = [one.value for call in loaders for one in call.keywords if one.arg == _LIMIT]
    given += [value for node, value in program.attributes if node.attr == _LIMIT]
    if len(given) != 1:
        raise program.error(
            place,
            "long examples are cut at the tokenizer's own limit, which is unknown",
            "give max_length",
        )
    return _number(program, given[0])


def _number(program: Program, node: ast.expr) -> int:
    """Return a length in tokens."""
    if isinstance(node, ast.Attribute) and node.attr == _LIMIT and not program.is_known(node):
        return _own_limit(program, node)
    try:
        found = program.value(node)
    except UNKNOWN:
        found = None
    if not isinstance(found, int) or found < 1:
        raise program.unknown("the length of the examples", node)
    return found


def _blocks(reached: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield the lengths of the rows into which functions cut joined examples."""
    for function in reached:
        calls = _calls([function]) if isinstance(function, ast.FunctionDef) else []
        if any(name_of(call.func) in _CONCATENATES for call in calls):
            for call in calls:
                if name_of(call.func) == "range" and len(call.args) == 3:
                    yield call.args[2]


def _cuts(reached: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield the lengths at which slices cut tokens, as in `input_ids[:512]`."""
    for part in (part for node in reached for part in ast.walk(node)):
        match part:
            case ast.Subscript(value=tokens, slice=ast.Slice(lower=None, upper=ast.expr() as end)):
                if "input_ids" in ast.unparse(tokens) and not isinstance(end, ast.UnaryOp):
                    yield end


def _only(program: Program, lengths: dict[Any, Any]) -> int:
    """Return the only length. Raises UsageError if there are several."""
    if len(lengths) > 1:
        first, second, *_ = lengths
        raise program.error(
            lengths[second],
            f"examples are cut at {second} tokens here, and at {first} in line "
            f"{lengths[first].lineno}, so the longest row is unknown",
            f"give both the same length; or add {CALLBACK}",
        )
    return int(next(iter(lengths)))


def _text(program: Program, call: ast.Call, name: str) -> str:
    """Return an argument of a call as text, or "" if it is missing or unknown."""
    given = next((one.value for one in call.keywords if one.arg == name), None)
    try:
        return "" if given is None else str(program.value(given))
    except UNKNOWN:
        return ""

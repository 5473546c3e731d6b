"""Parts of Python's syntax that the readers of programs share."""

import ast
from collections.abc import Iterator


def name_of(node: ast.AST | None) -> str:
    """Return the last part of a dotted name, or "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_named(node: ast.expr, name: str) -> bool:
    """Return whether an expression is this name alone."""
    return isinstance(node, ast.Name) and node.id == name


def is_literal(node: ast.expr) -> bool:
    """Return whether an expression consists of constants, lists, tuples and dictionaries."""
    kinds = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.unaryop, ast.Load)
    return all(isinstance(part, kinds) for part in ast.walk(node))


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the keyword arguments of a call, except those that a dictionary gives by **."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def assignments_of(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
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
                yield from zip(map(name_of, names), values, strict=True)
                return
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call() as value):
            if all(isinstance(one, ast.Name) for one in names):
                for index, one in enumerate(names):
                    key = ast.Constant(index)
                    yield name_of(one), ast.Subscript(value, key, ast.Load(), lineno=value.lineno)
                return
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, None

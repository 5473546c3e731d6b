"""Converts a dataclass to JSON data, and derives a pydantic type that describes the data.

The data and its type have a common source, so each JSON key is defined only once. A dataclass
becomes an object with all of its fields, or with the keys in its `JSON` attribute. Each key in
`JSON` has a path from the dataclass to a field, a property or a method without arguments
("task.model.name", "config.label()"). If a part of the path is None, the key's value is None. If
`JSON` is a single path, the data at the end of the path replaces the whole object.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from autotune.core.serialization import to_data


@dataclass(frozen=True, slots=True)
class Native:
    """A path to a value that becomes JSON as it is stored: with all fields, by `to_data`."""

    path: str


@dataclass(frozen=True, slots=True)
class View:
    """A path to a value, or to a sequence of values, that becomes JSON with `keys` only."""

    path: str
    keys: dict[str, Any]


ALL = "*"
# Maps each JSON key to the path of its attribute, to a Native, View or Keys, or to None if the key
# equals the path.
Keys = dict[str, Any]


def keys(*names: str, **renamed: Any) -> Keys:
    """Return Keys: each of `names` is both a key and its path; `renamed` maps keys to paths."""
    return dict.fromkeys(names, None) | renamed


def fields_plus(*names: str, **renamed: Any) -> Keys:
    """Return Keys with all fields of the dataclass, and with the keys of these arguments."""
    return {ALL: None} | keys(*names, **renamed)


def native_fields_plus(*names: str, **renamed: Any) -> Keys:
    """Return Keys like `fields_plus`, but with the stored form of the fields (Native)."""
    return {ALL: Native(ALL)} | keys(*names, **renamed)


def add_prefix(prefix: str, shown: Keys) -> Keys:
    """Return the same keys with `prefix` and a dot before each path."""
    return {key: _prefix_path(prefix, path or key) for key, path in shown.items()}


def _prefix_path(prefix: str, path: Any) -> Any:
    if isinstance(path, dict):
        return add_prefix(prefix, path)
    if isinstance(path, str):
        return f"{prefix}.{path}"
    return replace(path, path=f"{prefix}.{path.path}")


def json_data(value: Any) -> Any:
    """Return the value as data for `json.dumps`."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, date | PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_data(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [json_data(one) for one in value]
    if not is_dataclass(value):
        return value

    shown = _json_keys(type(value))
    return json_data(_follow(value, shown)) if isinstance(shown, str) else _object(value, shown)


def json_form(kind: Any) -> Any:
    """Return a pydantic type for the data that `json_data` makes from a value of type `kind`."""
    origin = get_origin(kind)
    arguments = get_args(kind)

    if origin in (Union, types.UnionType):
        return Union[tuple(map(json_form, arguments))]  # noqa: UP007 (made from a tuple)
    if origin is ClassVar:
        return json_form(arguments[0])
    if origin is Literal:
        return kind

    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple[tuple(map(json_form, arguments))]  # type: ignore[misc]
    if origin is not None and issubclass(origin, Mapping):
        return dict[str, json_form(arguments[1])]  # type: ignore[misc]
    if origin is not None and arguments:
        return list[json_form(arguments[0])]  # type: ignore[misc]

    if isinstance(kind, type) and issubclass(kind, Enum):
        return Literal[tuple(member.value for member in kind)]
    if isinstance(kind, type) and issubclass(kind, date | PurePath):
        return str
    return _model(kind) if is_dataclass(kind) and isinstance(kind, type) else kind


def _json_keys(kind: type) -> Keys | str:
    """Return the JSON keys of a dataclass, or the path to the value that replaces the object."""
    shown: Keys | str | None = getattr(kind, "JSON", None)
    if isinstance(shown, str):
        return shown
    return _expand_fields(kind, fields_plus() if shown is None else shown)


def _expand_fields(kind: type, shown: Keys) -> Keys:
    """Return the keys `shown`, with all fields of the dataclass in place of the key `ALL`."""
    if ALL not in shown:
        return shown
    names = [field.name for field in fields(kind)]
    own = {name: Native(name) if shown[ALL] else None for name in names}
    return own | {key: path for key, path in shown.items() if key != ALL}


def _object(value: Any, shown: Keys) -> dict[str, Any]:
    return {
        key: _entry(value, key, path) for key, path in _expand_fields(type(value), shown).items()
    }


def _entry(value: Any, key: str, path: Any) -> Any:
    if isinstance(path, dict):
        return _object(value, path)
    if isinstance(path, Native):
        found = _follow(value, path.path)
        return None if found is None else to_data(found)
    if isinstance(path, View):
        return _view_data(_follow(value, path.path), path.keys)
    return json_data(_follow(value, path or key))


def _view_data(value: Any, shown: Keys) -> Any:
    if isinstance(value, tuple | list):
        return [_object(one, shown) for one in value]
    return None if value is None else _object(value, shown)


def _follow(value: Any, path: str) -> Any:
    """Follow a path and return its value, or None as soon as a part of the path is None."""
    for step in path.split("."):
        if value is None:
            return None
        found = getattr(value, step.removesuffix("()"))
        value = found() if step.endswith("()") else found
    return value


@cache
def _model(kind: type) -> Any:
    """Return a pydantic type for the JSON data of a dataclass."""
    shown = _json_keys(kind)
    if isinstance(shown, str):
        return json_form(_type_at(kind, shown))
    return _object_form(kind.__name__, kind, shown)


def _object_form(name: str, kind: type, shown: Keys) -> Any:
    from pydantic import ConfigDict, create_model

    only_these = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    forms: dict[str, Any] = {
        key: (_entry_form(name, kind, key, path), ...)
        for key, path in _expand_fields(kind, shown).items()
    }
    return create_model(name, __config__=only_these, **forms)


def _entry_form(name: str, kind: type, key: str, path: Any) -> Any:
    if isinstance(path, dict):
        return _object_form(name + key.title(), kind, path)
    if isinstance(path, Native):
        return _type_at(kind, path.path)
    if isinstance(path, View):
        return _viewed_form(key.title(), _type_at(kind, path.path), path.keys)
    return json_form(_type_at(kind, path or key))


def _viewed_form(name: str, kind: Any, shown: Keys) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return Union[  # noqa: UP007 (made from a tuple)
            tuple(_viewed_form(name, part, shown) for part in get_args(kind))
        ]
    if get_origin(kind) in (tuple, list):
        return list[_viewed_form(name, get_args(kind)[0], shown)]  # type: ignore[misc]
    return kind if kind is type(None) else _object_form(name, kind, shown)


def _type_at(kind: Any, path: str) -> Any:
    """Return the type at the end of a path; it includes None if a part of the path may be None."""
    may_be_none = False
    for step in path.split("."):
        parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        may_be_none |= type(None) in parts
        (owner,) = (part for part in parts if part is not type(None))
        kind = _type_of(owner, step)
    return kind | None if may_be_none else kind


def _type_of(owner: type, step: str) -> Any:
    """Return the type of a field or property, or of a method's result, by its name `step`."""
    found = getattr(owner, name := step.removesuffix("()"), None)
    if isinstance(found, property):
        return get_type_hints(found.fget)["return"]
    return get_type_hints(found)["return"] if step.endswith("()") else get_type_hints(owner)[name]

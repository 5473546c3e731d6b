"""Dataclasses to plain JSON-able data and back, checked by pydantic, which is imported on first use."""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from autotune.core.errors import StorageError

T = TypeVar("T")
_adapters: dict[Any, Any] = {}  # one takes milliseconds to make


def to_data(value: Any) -> Any:
    """A dataclass as plain JSON-able data."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_data(kind: type[T], data: Any) -> T:
    """The inverse of `to_data`.

    Raises:
        StorageError: a newer version of autotune wrote the data (its `schema_version` is above that of `kind`).
        pydantic.ValidationError: the data has another form.
    """
    known = _schema_version(kind)
    written = data.get("schema_version") if isinstance(data, dict) else None
    if known is not None and isinstance(written, int) and written > known:
        raise StorageError(
            f"a stored {kind.__name__} has version {written}, and this autotune reads versions up to {known}",
            remedy="update autotune to the version that wrote it",
        )
    value: T = _adapter(kind).validate_python(data)
    return value


def _schema_version(kind: Any) -> int | None:
    for field in fields(kind) if is_dataclass(kind) else ():
        if field.name == "schema_version" and isinstance(field.default, int):
            return field.default
    return None


def _adapter(kind: Any) -> Any:
    if kind not in _adapters:
        from pydantic import TypeAdapter

        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]

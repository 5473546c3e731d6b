"""Converts dataclasses to plain JSON data and back. Pydantic, imported on use, checks the data."""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from autotune.core.errors import StorageError

T = TypeVar("T")
_adapters: dict[Any, Any] = {}  # pydantic's adapters by type; to make one takes milliseconds


def to_data(value: Any) -> Any:
    """Convert a dataclass to plain JSON data."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_data(kind: type[T], data: Any) -> T:
    """Convert plain JSON data to a value of `kind`, the inverse of `to_data`.

    Raises:
        StorageError: The `schema_version` of the data is above the version of `kind`, so a newer
            version of autotune wrote the data.
        pydantic.ValidationError: The data does not have the form of `kind`.
    """
    known = _schema_version(kind)
    written = data.get("schema_version") if isinstance(data, dict) else None
    if known is not None and isinstance(written, int) and written > known:
        raise StorageError(
            f"a stored {kind.__name__} has version {written},"
            f" and this autotune reads versions up to {known}",
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

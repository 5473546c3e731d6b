"""The promises of `--json` to programs: the stored schemas, and the keys of stored outputs.

`json_schemas.json` has the schema of each command without titles, `json_keys.json` the keys of
whole outputs. A change that adds a key on purpose adds it to these files; a key is never removed or
renamed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS: dict[str, Any] = json.loads(
    Path(__file__).with_name("json_schemas.json").read_text(encoding="utf-8")
)
KEYS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("json_keys.json").read_text(encoding="utf-8")
)

# objects by names of knobs, packages and methods
BY_NAME = ("config", "edits", "packages", "what_fits")
# keywords that promise no program anything
WORDS = ("title", "description", "default", "$schema", "$defs")


def keys(data: Any, path: str = "") -> Iterator[str]:
    """The path of each key, such as 'rows[].step.step_s', once for each place.

    Objects BY_NAME are left out.
    """
    if isinstance(data, dict):
        for name, value in data.items():
            yield (key := f"{path}.{name}".removeprefix("."))
            yield from () if name in BY_NAME else keys(value, key)
    elif isinstance(data, list):
        for value in data:
            yield from keys(value, f"{path}[]")


def differences(stored: Any, today: Any) -> list[str]:
    """How a schema of today breaks a stored one. It may say more: the keys of an object, or that
    null does not occur.

    Both are whole schemas with their definitions.
    """
    return list(_broken(_plain(stored, stored), _plain(today, today), "$"))


def _plain(node: Any, whole: Any) -> Any:
    """The schema without WORDS, and with each reference replaced by its definition."""
    if isinstance(node, list):
        return [_plain(value, whole) for value in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain(whole["$defs"][node["$ref"].rpartition("/")[2]], whole)
    properties = {name: _plain(value, whole) for name, value in node.get("properties", {}).items()}
    rest = {
        name: _plain(value, whole)
        for name, value in node.items()
        if name not in (*WORDS, "properties")
    }
    return rest | ({"properties": properties} if properties else {})


def _broken(stored: Any, today: Any, path: str) -> Iterator[str]:
    if "anyOf" in stored:
        yield from _broken_choice(stored["anyOf"], today.get("anyOf", [today]), path)
    elif "properties" in stored:
        yield from _broken_object(stored, today, path)
    elif stored.get("type") == "array" and today.get("type") == "array":
        pairs = zip(stored.get("prefixItems", []), today.get("prefixItems", []), strict=False)
        for old, new in [*pairs, (stored.get("items", {}), today.get("items", {}))]:
            yield from _broken(old, new, f"{path}[]")
        sizes = [(schema.get("minItems"), schema.get("maxItems")) for schema in (stored, today)]
        yield from () if sizes[0] == sizes[1] else [f"{path}: {sizes}"]
    elif (
        isinstance(values := stored.get("additionalProperties"), dict) and "properties" not in today
    ):
        yield from _broken(values, today.get("additionalProperties", {}), f"{path}{{}}")
    elif not _says_more(stored, today):
        yield f"{path}: {stored} became {today}"


def _broken_choice(stored: list[Any], today: list[Any], path: str) -> Iterator[str]:
    """Each choice of today is one of the stored ones."""
    for new in today:
        if all(any(True for _ in _broken(old, new, path)) for old in stored):
            yield f"{path}: not so before: {new}"


def _broken_object(stored: Any, today: Any, path: str) -> Iterator[str]:
    old, new = stored["properties"], today.get("properties", {})
    yield from (
        f"{path}: {name} is {'new' if name in new else 'gone'}" for name in old.keys() ^ new.keys()
    )
    needed = [sorted(schema.get("required", [])) for schema in (stored, today)]
    yield from (
        [] if needed[0] == needed[1] else [f"{path}: required were {needed[0]} and are {needed[1]}"]
    )
    if (
        stored.get("additionalProperties") is False
        and today.get("additionalProperties") is not False
    ):
        yield f"{path}: other keys are allowed"
    for name in old.keys() & new.keys():
        yield from _broken(old[name], new[name], f"{path}.{name}")


def _says_more(stored: Any, today: Any) -> bool:
    """Whether today's form of a value is the stored one or a special case of it."""
    is_open = stored == {} or stored == {"type": "object", "additionalProperties": True}
    if stored == {"type": "string"} or (is_open and stored):
        return stored["type"] == today.get("type")
    return is_open or stored == today

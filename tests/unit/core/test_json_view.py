"""A value as JSON data and the form of that data: keys by path, None, and values that stand for
others.
"""

import json
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from autotune.core.json_view import (
    Native,
    View,
    add_prefix,
    fields_plus,
    json_data,
    json_form,
    keys,
    native_fields_plus,
)


class Kind(StrEnum):
    BIG = "big"
    SMALL = "small"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    JSON: ClassVar = "text()"

    word: str

    def text(self) -> str:
        return self.word.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: Label
    sizes: tuple[int, ...]
    pair: tuple[float, float] | None = None

    @property
    def total(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    JSON: ClassVar = keys(
        *("kind", "parts", "by_name", "unit"),
        day="made",
        first_total="first.total",
        first=View("first", fields_plus("total")),
        all=View("parts", keys("total")),
        stored=Native("first"),
        inner=keys(place="file"),
    )
    unit: ClassVar[Literal["GiB"]] = "GiB"

    kind: Kind
    parts: tuple[Part, ...]
    by_name: dict[str, Part]
    made: date
    file: Path
    first: Part | None


PART = Part(name=Label(word="a"), sizes=(1, 2), pair=(0.5, 1.5))
WHOLE = Whole(
    kind=Kind.BIG,
    parts=(PART,),
    by_name={"x": PART},
    made=date(2026, 11, 27),
    file=Path("a/b"),
    first=PART,
)


def form(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(json_form(kind))


def test_data_follows_the_paths() -> None:
    part = {"name": "A", "sizes": [1, 2], "pair": [0.5, 1.5]}
    assert json_data(WHOLE) == {
        "kind": "big",
        "parts": [part],
        "by_name": {"x": part},
        "unit": "GiB",
        "day": "2026-11-27",
        "first_total": 3,
        "first": part | {"total": 3},
        "all": [{"total": 3}],
        "stored": {"name": {"word": "a"}, "sizes": [1, 2], "pair": [0.5, 1.5]},
        "inner": {"place": "a/b"},
    }


def test_a_part_of_a_path_that_is_none_makes_it_none() -> None:
    data = json_data(
        Whole(kind=Kind.SMALL, parts=(), by_name={}, made=date.min, file=Path("."), first=None)
    )
    assert data["first"] is data["first_total"] is data["stored"] is None and data["all"] == []
    form(Whole).validate_json(json.dumps(data))


def test_the_form_is_that_of_the_data() -> None:
    data = json_data(WHOLE)
    form(Whole).validate_json(json.dumps(data))
    schema = form(Whole).json_schema(mode="serialization")
    assert sorted(schema["required"]) == sorted(data) and schema["additionalProperties"] is False
    assert schema["properties"]["kind"]["enum"] == ["big", "small"]
    assert {"type": "null"} in schema["properties"]["first_total"]["anyOf"]
    changes: list[dict[str, Any]] = [
        {"kind": "huge"},
        {"first_total": "3"},
        {"unit": "MiB"},
        {"more": 1},
    ]
    for change in changes:
        with pytest.raises(ValidationError):
            form(Whole).validate_json(json.dumps(data | change))
    del data["day"]
    with pytest.raises(ValidationError):
        form(Whole).validate_json(json.dumps(data))


def test_keys_of_an_inner_value_can_be_those_of_the_outer_one() -> None:
    assert add_prefix("a", keys("b", c="d.e()", f=keys("g"), h=Native("i"))) == {
        "b": "a.b",
        "c": "a.d.e()",
        "f": {"g": "a.g"},
        "h": Native("a.i"),
    }


def test_stored_fields_keep_their_own_form() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Stored:
        JSON: ClassVar = native_fields_plus("length")

        name: Label

        @property
        def length(self) -> int:
            return len(self.name.word)

    assert json_data(Stored(name=Label(word="ab"))) == {"name": {"word": "ab"}, "length": 2}
    form(Stored).validate_json('{"name": {"word": "ab"}, "length": 2}')


def test_a_wrong_path_is_noticed_when_the_form_is_made() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Wrong:
        JSON: ClassVar = keys(a="b.c")

        b: Part

    with pytest.raises(KeyError, match="c"):
        json_form(Wrong)

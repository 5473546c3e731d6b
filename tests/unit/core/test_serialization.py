"""Data of a newer version is refused with one clear sentence."""

import json
from dataclasses import dataclass
from datetime import date

import pytest
from pydantic import ValidationError

from autotune.core.errors import StorageError
from autotune.core.probe_types import SCHEMA_VERSION, ProbeResult
from autotune.core.serialization import from_data, to_data
from tests.helpers.factories import result


@dataclass(frozen=True)
class Plain:
    schema: int = 1


@dataclass(frozen=True)
class Dated:
    day: date


def test_a_result_of_a_newer_version_is_refused() -> None:
    data = to_data(result()) | {"schema_version": SCHEMA_VERSION + 1, "config": "in another form"}
    with pytest.raises(
        StorageError, match="ProbeResult has version 2, and this autotune reads versions up to 1"
    ) as error:
        from_data(ProbeResult, data)
    assert error.value.remedy == "update autotune to the version that wrote it"


def test_a_result_of_this_version_is_read() -> None:
    stored = result()
    assert to_data(stored)["schema_version"] == SCHEMA_VERSION
    assert from_data(ProbeResult, to_data(stored)) == stored


def test_values_without_version_are_read() -> None:
    assert from_data(Plain, {"schema": 3}) == Plain(schema=3)
    with pytest.raises(ValidationError):
        from_data(Plain, [1])


def test_data_is_of_the_kinds_that_json_has_alone() -> None:
    data = to_data(result())
    assert json.loads(json.dumps(data)) == data
    assert type(data["outcome"]) is str and type(data["measurement"]["step_s"]) is list
    assert to_data(Dated(day=date(2026, 11, 24))) == {"day": "2026-11-24"}

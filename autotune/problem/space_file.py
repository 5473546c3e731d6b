"""The format of a search space file, which pydantic checks.

Only `SearchSpace.load` imports this module, and only when it reads a file, because the import of
pydantic is slow.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from autotune.core.errors import did_you_mean
from autotune.core.knobs import KNOBS, Kind, check_value

# The largest number of integers in a range from min to max. The search enumerates the integers, and
# a study could not try more than this number.
MAX_RANGE = 1024
Place = tuple[int | str, ...]


class KnobEntry(BaseModel):
    """One knob of the file: a list of values, or a range of integers.

    `kind` is optional. If the file has it, it must be the same as in the registry of knobs.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    values: list[Any] = Field(default_factory=list)
    min: int | None = None
    max: int | None = None
    log: bool = False
    kind: Kind | None = None
    when: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "KnobEntry":
        is_range = self.min is not None and self.max is not None
        if is_range == bool(self.values) or (self.min is None) != (self.max is None):
            raise ValueError("give either values: [..] or min: and max:")
        if is_range and not 1 <= self.min <= self.max:  # type: ignore[operator]
            raise ValueError("min must be at least 1 and at most max")
        if len(set(map(repr, self.values))) != len(self.values):
            raise ValueError("a value occurs twice")
        if self.log and not is_range:
            raise ValueError("log: true needs min: and max:")
        return self

    def problems(self, name: str) -> Iterator[tuple[Place, str]]:
        """Yield each problem in the entry of the knob `name`, as (place in the entry, reason)."""
        if name not in KNOBS:
            yield (), f"there is no setting {name!r}{did_you_mean(name, KNOBS)}"
            return
        if self.min is not None and self.max is not None and self.max - self.min >= MAX_RANGE:
            yield (
                ("max",),
                f"at most {MAX_RANGE:,} values are searched from min to max:"
                " list some of them, as in values: [1, 4, 16]",
            )
            return

        if self.kind not in (None, KNOBS[name].kind):
            yield ("kind",), f"{name} is a {KNOBS[name].kind} setting; leave out the key kind"

        for place, knob, value in self._values(name):
            try:
                check_value(knob, value)
            except ValueError as error:
                yield place, str(error)

        for other in self.when or {}:
            if not _is_other_knob(other, name):
                yield (
                    ("when", other),
                    f"{other!r} is not another setting{did_you_mean(other, set(KNOBS) - {name})}",
                )

    def _values(self, name: str) -> Iterator[tuple[Place, str, Any]]:
        """Yield every value in the entry, as (place in the entry, knob, value)."""
        for index, value in enumerate(self.values):
            yield ("values", index), name, value

        for end, value in (("min", self.min), ("max", self.max)):
            if value is not None:
                yield (end,), name, value

        for other, wanted in (self.when or {}).items():
            if _is_other_knob(other, name):
                for value in wanted if isinstance(wanted, list) else [wanted]:
                    yield ("when", other), other, value


class SpaceFile(BaseModel):
    """A search space file. If a knob has a single value instead of an entry, the knob is fixed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    description: str = ""
    knobs: dict[str, KnobEntry] = Field(min_length=1)

    @field_validator("knobs", mode="before")
    @classmethod
    def _bare_values(cls, knobs: Any) -> Any:
        if not isinstance(knobs, dict):
            return knobs
        return {
            name: entry if isinstance(entry, dict | KnobEntry) else {"values": [entry]}
            for name, entry in knobs.items()
        }

    @model_validator(mode="after")
    def _check_possible(self) -> "SpaceFile":
        problems = []
        for name, entry in self.knobs.items():
            for place, reason in entry.problems(name):
                error = PydanticCustomError("knob", "{reason}", {"reason": reason})
                problems.append(
                    InitErrorDetails(type=error, loc=("knobs", name, *place), input=None)
                )
        if problems:
            raise ValidationError.from_exception_data("space", problems)
        return self


def _is_other_knob(other: str, name: str) -> bool:
    return other in KNOBS and other != name

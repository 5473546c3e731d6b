"""Reads single values of another tool's file, checks their types, and collects notes on the run."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import load_data

MAX_KNOB = 2**24  # the largest value of a knob that TrainConfig accepts
# The largest number of examples, epochs or steps; some files write "all examples" as a large number
MAX_COUNT = 10**15
# A key that no file has: the arguments of a program whose defaults are assumed
ASSUMED = "assumed arguments"
# A key that no file has: the variables of the shell that a script does not set itself
SHELL = "shell variables"
# "auto" counts as true: the tool switches the feature on if the GPU supports it, as recent GPUs do.
_FLAGS = dict.fromkeys((True, "true", "yes", "on", "1", "auto"), True)
_FLAGS |= dict.fromkeys((False, "false", "no", "off", "0"), False)


class Refused(UsageError):
    """The error for a key whose value is impossible or unsupported."""

    def __init__(self, key: str, message: str, remedy: str = "correct it in the file") -> None:
        super().__init__(f"{key}: {message}", remedy=remedy)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """The values of a file by key, with methods to read a value as a certain type.

    A method that takes several keys reads the first key that is set. `notes` collects sentences
    about the run, `noted` collects the names of these notes, and `minor` the sentences that only
    say how the run is counted. A method that reads a certain
    type, such as `whole` or `flag`, raises Refused if the value has another type.
    """

    values: dict[str, Any]
    notes: list[str]
    noted: set[str] = field(default_factory=set)
    minor: set[str] = field(default_factory=set)

    def get(self, *keys: str) -> tuple[str, Any]:
        """Return the first key that is set and its value.

        If all keys are unset, return the first of `keys` with the value None.
        """
        return next(
            ((key, self.values[key]) for key in keys if self.values.get(key) is not None),
            (keys[0], None),
        )

    def has(self, *keys: str) -> bool:
        """Return whether one of the keys is set and not switched off."""
        return any(self.values.get(key) not in (None, False, "", "false", [], {}) for key in keys)

    def number(self, *keys: str, default: float, least: float = 1, most: float = MAX_KNOB) -> float:
        """Return a number from `least` to `most`; "auto" means the default."""
        key, value = self.get(*keys)
        if value is None or value == "auto":
            self.note(value is not None, "auto", key=key, default=default)
            return default

        try:
            # The tools also accept "2e-4" as a number.
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan

        if not least <= number <= most:
            raise Refused(
                key, f"a number from {least:g} to {most:,.0f} is needed, not {quote(value)}"
            )
        return number

    def note(self, applies: bool, note: str, /, **values: Any) -> None:
        """Add the note with the name `note` to the notes, if `applies` is true."""
        if applies:
            sentence = table("notes")[note].format(**values)
            self.noted.add(note)
            self.notes.append(sentence)
            if note in table("minor"):
                self.minor.add(sentence)

    def whole(self, *keys: str, default: int, least: int = 1, most: int = MAX_KNOB) -> int:
        """Return a whole number from `least` to `most`."""
        number = float(self.number(*keys, default=default, least=least, most=most))
        if not number.is_integer():
            raise Refused(self.get(*keys)[0], f"a whole number is needed, not {number:g}")
        return int(number)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the truth value of a key, written in any form that YAML or the tools accept."""
        value = self.values.get(key)
        if value is None:
            return default
        try:
            return _FLAGS[value.lower() if isinstance(value, str) else value]
        except (KeyError, TypeError):
            raise Refused(key, f"true or false is needed, not {quote(value)}") from None

    def text(self, *keys: str, default: str = "") -> str:
        """Return a text, which must be printable, without the spaces at its ends."""
        key, value = self.get(*keys)
        if value is not None and not (isinstance(value, str) and value.isprintable()):
            raise Refused(key, f"a name is needed, not {quote(value)}")
        return (value or "").strip() or default

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the names that a key holds.

        The key's value is a text with commas between the names, or a list. An item of the list is a
        name, or a mapping whose key `path` holds the name.
        """
        key, value = self.get(*keys)

        parts: Any = value
        if isinstance(value, str):
            parts = value.split(",")
        elif value is None:
            parts = []

        if isinstance(parts, list):
            parts = [part.get("path", "") if isinstance(part, dict) else part for part in parts]
        if not isinstance(parts, list) or not all(
            isinstance(part, str) and part.isprintable() for part in parts
        ):
            raise Refused(key, f"names are needed, not {quote(value)}")
        return tuple(part.strip() for part in parts if part.strip())

    def mapping(self, *keys: str) -> "File":
        """Return the mapping that a key holds, as a File that shares this file's notes."""
        key, value = self.get(*keys)
        if value is not None and not isinstance(value, dict):
            raise Refused(key, f"keys with values are needed, not {quote(value)}")
        return replace(
            self,
            values={name: item for name, item in (value or {}).items() if isinstance(name, str)},
        )


def table(name: str) -> Any:
    """Return the value of a top-level key of planning/foreign_keys.yaml."""
    return load_data("autotune.planning", "foreign_keys")[name]


def quote(value: Any) -> str:
    """Return the value as a text of at most 60 characters for messages."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number with thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."

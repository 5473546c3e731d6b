"""SearchSpace: the knobs to search, read from search_spaces/*.yaml, narrowed to what can be, enumerated.

Narrowing happens before the study, so that nothing impossible is ever proposed; every value taken out is told with its
reason. Which candidate is tried next is the sampler's business (`search`).
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import read_user_yaml
from autotune.core.knobs import KNOBS, Kind, check_value
from autotune.core.train_config import TrainConfig, digest_of

if TYPE_CHECKING:
    from pydantic import BaseModel

_DEFAULTS = TrainConfig()
MAX_RANGE = 1024  # integers between min and max: nobody can try more, and all of them are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """The values one knob may take: a list, or the integers from `low` to `high` (on a log scale if `log`)."""

    name: str
    values: tuple[Any, ...] = ()
    low: int | None = None
    high: int | None = None
    log: bool = False
    when: dict[str, Any] | None = None

    @property
    def kind(self) -> Kind:
        """Whether the knob changes what the model learns: a property of the knob, whatever the file says."""
        return KNOBS[self.name].kind

    @property
    def is_range(self) -> bool:
        return self.low is not None

    def choices(self) -> tuple[Any, ...]:
        """Every value, in order."""
        if self.low is not None and self.high is not None:
            return tuple(range(self.low, self.high + 1))
        return self.values

    def nearest(self, wanted: Any) -> Any:
        """The value `wanted` if the knob has it, else the nearest number, else the first value."""
        values = self.choices()
        if wanted in values:
            return wanted
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            return min((abs(value - wanted), value) for value in values)[1]
        return values[0]

    def keep(self, allowed: Callable[[Any], bool]) -> "Knob":
        """This knob with only the allowed values. A range stays a range if what is left of it is whole."""
        kept = tuple(value for value in self.choices() if allowed(value))
        if self.is_range and kept and len(kept) == kept[-1] - kept[0] + 1:
            return replace(self, low=kept[0], high=kept[-1])
        return replace(self, values=kept, low=None, high=None, log=False)

    def is_active(self, chosen: dict[str, Any]) -> bool:
        """Whether this knob has an effect beside the values chosen so far."""
        conditions = _conditions(self)
        return all(chosen.get(name, getattr(_DEFAULTS, name)) in _as_list(want) for name, want in conditions.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A value that was taken out of the space, and why."""

    knob: str
    values: tuple[Any, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.knob} {_listed(self.values)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Knobs in order: one that a `when` names comes before the knob that has it."""

    name: str
    knobs: tuple[Knob, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.describe())

    def describe(self) -> dict[str, Any]:
        """Plain data: what is compared when a study is continued."""
        return {
            knob.name: {"values": list(knob.values), "range": [knob.low, knob.high, knob.log], "when": knob.when}
            for knob in self.knobs
        }

    @classmethod
    def load(cls, name_or_path: str) -> "SearchSpace":
        """A shipped space by name, or a file. Raises UsageError."""
        return load_space(name_or_path)

    @classmethod
    def of(cls, name: str = "own", **knobs: Any) -> "SearchSpace":
        """A space of these knobs: a list or range is searched, anything else fixed. Raises UsageError.

        `SearchSpace.of(micro_batch_size=[1, 2, 4], lora_rank=16, checkpointing=["none", "full"])`
        """
        space = cls(name=name, knobs=())
        for knob, given in knobs.items():
            values = tuple(given) if isinstance(given, list | tuple | range) else (given,)
            if not values or len(set(map(repr, values))) != len(values):
                raise UsageError(f"{knob}: a list has values, each once, not {given!r}", remedy="give some to search")
            for value in values:
                space = space.pin(knob, value)  # which says what cannot be
            space = space._with(Knob(name=knob, values=values))
        return space

    def as_yaml(self) -> str:
        """What `load` reads."""
        import yaml

        def entry(knob: Knob) -> dict[str, Any]:
            values = (
                {"min": knob.low, "max": knob.high, "log": knob.log} if knob.is_range else {"values": [*knob.values]}
            )
            return values | {"kind": knob.kind} | ({"when": knob.when} if knob.when else {})

        return yaml.safe_dump({"version": 1, "knobs": {knob.name: entry(knob) for knob in self.knobs}}, sort_keys=False)

    def knob(self, name: str) -> Knob | None:
        return next((knob for knob in self.knobs if knob.name == name), None)

    def narrow(self, name: str, allowed: Callable[[Any], bool], reason: str) -> tuple["SearchSpace", list[Removal]]:
        """The space without the values of knob `name` that are not allowed. Raises UsageError if none is left."""
        knob = self.knob(name)
        if knob is None:
            return self, []
        kept = knob.keep(allowed)
        left = set(kept.choices())
        removed = tuple(value for value in knob.choices() if value not in left)
        if not removed:
            return self, []
        if not left:
            raise UsageError(
                f"no value of {name} is left in the space {self.name!r}: {_listed(removed)}: {reason}",
                remedy=f"add values of {name} to the space, or pin one with --set {name}=VALUE",
            )
        return self._with(kept), [Removal(knob=name, values=removed, reason=reason)]

    def pin(self, name: str, value: Any) -> "SearchSpace":
        """The space with one knob fixed, be it in the space or not."""
        if name not in KNOBS:
            raise UsageError(f"there is no knob {name!r}{did_you_mean(name, KNOBS)}", remedy=_knob_remedy())
        try:
            check_value(name, value)
        except ValueError as error:
            raise UsageError(f"--set {name}: {error}", remedy="give one of the values named") from None
        return self._with(Knob(name=name, values=(value,)))

    def idle(self, name: str) -> str | None:
        """What knob `name` needs of another and no choice of the space gives it; None where it can have an effect."""
        knob = self.knob(name)
        for other, want in ({**KNOBS[name].active_when, **((knob.when or {}) if knob else {})}).items():
            deciding = self.knob(other)
            values = deciding.choices() if deciding else (getattr(_DEFAULTS, other),)
            if not any(value in _as_list(want) for value in values):
                return f"{other} {_listed(tuple(_as_list(want)))}"
        return None

    def condition(self, name: str, other: str, allowed: tuple[Any, ...]) -> "SearchSpace":
        """The space where knob `name` exists only beside these values of another."""
        knob = self.knob(name)
        if knob is None:
            return self
        before = _as_list((knob.when or {}).get(other, list(allowed)))
        when = (knob.when or {}) | {other: [value for value in allowed if value in before]}
        return replace(self, knobs=tuple(_in_order(list(self._with(replace(knob, when=when)).knobs))))

    def _with(self, knob: Knob) -> "SearchSpace":
        if self.knob(knob.name) is None:
            return replace(self, knobs=tuple(_in_order([knob, *self.knobs])))
        return replace(self, knobs=tuple(knob if old.name == knob.name else old for old in self.knobs))

    def enumerate(self) -> Iterator[dict[str, Any]]:
        """Every distinct choice of active knobs, as {knob: value}; made one by one, since ranges multiply."""

        def extend(chosen: dict[str, Any], knobs: tuple[Knob, ...]) -> Iterator[dict[str, Any]]:
            if not knobs:
                yield chosen
            elif not knobs[0].is_active(chosen):
                yield from extend(chosen, knobs[1:])
            else:
                for value in knobs[0].choices():
                    yield from extend(chosen | {knobs[0].name: value}, knobs[1:])

        return extend({}, self.knobs)

    def size(self) -> int:
        """How many distinct configurations there are."""
        asked: dict[str, list[Any]] = {}  # values that conditions tell from others
        for knob in self.knobs:
            for name, want in _conditions(knob).items():
                asked.setdefault(name, []).extend(_as_list(want))
        ways: Counter[tuple[tuple[str, Any], ...]] = Counter([()])  # by what conditions can tell of a choice
        for knob in self.knobs:
            further = type(ways)()
            for known, number in ways.items():
                active = knob.is_active(dict(known))
                if not active or knob.name not in asked:
                    further[known] += number * (len(knob.choices()) if active else 1)
                else:
                    for value in knob.choices():
                        further[(*known, (knob.name, value if value in asked[knob.name] else None))] += number
            ways = further
        return ways.total()

    def sample(self, number: int) -> Iterator[dict[str, Any]]:
        """So many choices of active knobs at random, always the same ones: of a space too large to enumerate."""
        drawn = random.Random(0)  # noqa: S311 (no secret hangs on it)
        for _ in range(number):
            chosen: dict[str, Any] = {}
            for knob in self.knobs:
                if knob.is_active(chosen):
                    chosen[knob.name] = drawn.choice(knob.choices())
            yield chosen

    def config(self, chosen: dict[str, Any]) -> TrainConfig:
        """The configuration for {knob: value}; knobs that the space does not name keep their defaults."""
        return TrainConfig(**{name: value for name, value in chosen.items() if name in KNOBS})

    def leanest(self) -> dict[str, Any]:
        """The choice that needs the least memory, decided knob by knob."""
        chosen: dict[str, Any] = {}
        for knob in self.knobs:
            if knob.is_active(chosen):
                chosen[knob.name] = min(knob.choices(), key=KNOBS[knob.name].memory_rank)
        return chosen

    def clip(self, config: TrainConfig) -> dict[str, Any]:
        """The choice nearest to `config`: its own value where the space has it, else the nearest in number or order."""
        chosen: dict[str, Any] = {}
        for knob in self.knobs:
            if knob.is_active(chosen):
                chosen[knob.name] = knob.nearest(getattr(config, knob.name))
        return chosen


def shipped_spaces() -> dict[str, Path]:
    """Name -> file of the spaces that come with the package (beside it in a checkout, inside it in a wheel)."""
    inside = Path(str(resources.files("autotune"))) / "search_spaces"
    folder = inside if inside.is_dir() else inside.parent.parent / "search_spaces"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_space(name_or_path: str) -> SearchSpace:
    """A shipped space by name, or a file.

    Raises:
        UsageError: no such space, or a file that is not one; its line is named.
    """
    shipped = shipped_spaces()
    path = shipped.get(name_or_path) or Path(name_or_path)
    if name_or_path not in shipped and not os.path.isfile(path):  # unlike Path.is_file, False for what cannot be a path
        raise UsageError(
            f"unknown search space {name_or_path!r}{did_you_mean(name_or_path, tuple(shipped))}",
            remedy=f"use one of {', '.join(shipped)}, or the path of a YAML file",
        )
    parsed: Any = read_user_yaml(path, _file_model())
    knobs = [Knob(name=name, **entry.as_knob()) for name, entry in parsed.knobs.items()]
    return SearchSpace(name=path.stem, knobs=tuple(_in_order(knobs)))


def _conditions(knob: Knob) -> dict[str, Any]:
    """What the knob needs of others to have an effect: by its meaning, and by the space."""
    return {**KNOBS[knob.name].active_when, **(knob.when or {})}


def _in_order(knobs: list[Knob]) -> Iterator[Knob]:
    """Each knob after those its condition names; the order of the file otherwise. Cycles keep the file's order."""
    done: set[str] = set()
    waiting = list(knobs)
    while waiting:
        names = {knob.name for knob in waiting}
        for knob in waiting:
            needs = set(_conditions(knob))
            if not needs & (names - done):
                break
        else:
            knob = waiting[0]
        waiting.remove(knob)
        done.add(knob.name)
        yield knob


@cache
def _file_model() -> "type[BaseModel]":
    """The pydantic model of a space file, made on first use so that listing commands do not pay for pydantic."""
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
    from pydantic_core import InitErrorDetails, PydanticCustomError

    class Entry(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        values: list[Any] = Field(default_factory=list)
        min: int | None = None
        max: int | None = None
        log: bool = False
        kind: Kind | None = None
        when: dict[str, Any] | None = None

        @model_validator(mode="after")
        def _one_form(self) -> "Entry":
            is_range = self.min is not None and self.max is not None
            if is_range == bool(self.values) or (self.min is None) != (self.max is None):
                raise ValueError("give either values: [..] or min: and max:")
            if is_range and not 1 <= self.min <= self.max:  # type: ignore[operator]
                raise ValueError("min must be at least 1 and at most max")
            if len(set(map(repr, self.values))) != len(self.values):
                raise ValueError("a value stands twice")
            if self.log and not is_range:
                raise ValueError("log: true goes with min: and max:")
            return self

        def as_knob(self) -> dict[str, Any]:
            return {
                "values": tuple(self.values),
                "low": self.min,
                "high": self.max,
                "log": self.log,
                "when": self.when,
            }

    class SpaceFile(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        version: Literal[1]
        description: str = ""
        knobs: dict[str, Entry] = Field(min_length=1)

        @field_validator("knobs", mode="before")
        @classmethod
        def _scalars(cls, knobs: Any) -> Any:
            if not isinstance(knobs, dict):
                return knobs
            return {
                name: entry if isinstance(entry, dict | Entry) else {"values": [entry]} for name, entry in knobs.items()
            }

        @model_validator(mode="after")
        def _known(self) -> "SpaceFile":
            problems = [
                InitErrorDetails(
                    type=PydanticCustomError("knob", "{why}", {"why": why}), loc=("knobs", *place), input=None
                )
                for name, entry in self.knobs.items()
                for place, why in _problems(name, entry)
            ]
            if problems:
                raise ValidationError.from_exception_data("space", problems)
            return self

    return SpaceFile


def _problems(name: str, entry: Any) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """What cannot be in the entry of one knob: where under `knobs` it stands, and why not."""
    if name not in KNOBS:
        yield (name,), f"there is no knob {name!r}{did_you_mean(name, KNOBS)}"
        return
    if entry.max and entry.max - entry.min >= MAX_RANGE:
        yield (name, "max"), f"at most {MAX_RANGE:,} values are searched from min to max: list some as values: [..]"
        return
    found: list[tuple[tuple[int | str, ...], str, Any]] = [
        *(((name, "values", place), name, value) for place, value in enumerate(entry.values)),
        *(((name, end), name, value) for end, value in (("min", entry.min), ("max", entry.max)) if value is not None),
    ]
    if entry.kind not in (None, KNOBS[name].kind):
        yield (name, "kind"), f"{name} is a {KNOBS[name].kind} knob: leave kind: out"
    for other, want in (entry.when or {}).items():
        if other in KNOBS and other != name:
            found += [((name, "when", other), other, value) for value in _as_list(want)]
        else:
            yield (name, "when", other), f"{other!r} is no other knob{did_you_mean(other, set(KNOBS) - {name})}"
    for place, knob, value in found:
        try:
            check_value(knob, value)
        except ValueError as error:
            yield place, str(error)


def _listed(values: tuple[Any, ...]) -> str:
    if len(values) > 10:
        return f"{values[0]} to {values[-1]} ({len(values):,} values)"
    return ", ".join(map(str, values))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _knob_remedy() -> str:
    return f"the knobs are {', '.join(KNOBS)}"

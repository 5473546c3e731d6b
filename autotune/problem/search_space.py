"""SearchSpace: the knobs and their values to search, from a file in search_spaces/ or from Python.

Before a study begins, `constraints` removes values from the space. The search then enumerates or
samples the space.
"""

import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import read_user_yaml, shipped_files
from autotune.core.knobs import KNOBS, Kind, check_value
from autotune.core.train_config import TrainConfig

_DEFAULTS = TrainConfig()
_DEFAULT_VALUES = {name: getattr(_DEFAULTS, name) for name in KNOBS}
SHORT = 256  # with rows of at most this number of tokens, shorter rows would save little memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """The values of one knob: a list, or the integers from `low` to `high`.

    If `log` is true, the range is sampled on a log scale. `when` says which values other knobs must
    have so that this knob has an effect. `divides` is set only for the micro batch size: `divides`
    is the global batch, and the micro batch size times the GPU count must divide the global batch.
    """

    name: str
    values: tuple[Any, ...] = ()
    low: int | None = None
    high: int | None = None
    log: bool = False
    when: dict[str, Any] | None = None
    divides: int | None = None

    @property
    def kind(self) -> Kind:
        """`learning` or `system`, as in the registry of knobs; a space file cannot change it."""
        return KNOBS[self.name].kind

    def choices(self) -> tuple[Any, ...]:
        """Return every value, in the order of the space."""
        if self.low is not None and self.high is not None:
            return tuple(range(self.low, self.high + 1))
        return self.values

    def possible(self, chosen: dict[str, Any]) -> tuple[Any, ...]:
        """Return the values that are possible with the chosen values of other knobs.

        If no value is possible, return all values.
        """
        knob = KNOBS[self.name]
        if self.divides is not None:
            number = chosen.get("num_gpus", _DEFAULTS.num_gpus)
            sizes = tuple(size for size in self.choices() if self.divides % (number * size) == 0)
            return sizes or self.choices()

        if not knob.impossible_with:
            return self.choices()
        values = tuple(
            value
            for value in self.choices()
            if knob.possible(value, _DEFAULT_VALUES | chosen) == value
        )
        return values or self.choices()

    def nearest(self, wanted: Any, values: tuple[Any, ...]) -> Any:
        """Return `wanted` if it is one of `values`, otherwise the nearest of `values`.

        If `wanted` is not an integer, the result is the first of `values`.
        """
        if wanted not in values and isinstance(wanted, int) and not isinstance(wanted, bool):
            return min((abs(value - wanted), value) for value in values)[1]
        return wanted if wanted in values else values[0]

    def keep(self, allowed: Callable[[Any], bool]) -> "Knob":
        """Return this knob with only the allowed values. A range without gaps stays a range."""
        values = tuple(value for value in self.choices() if allowed(value))
        if self.low is not None and values and len(values) == values[-1] - values[0] + 1:
            return replace(self, low=values[0], high=values[-1])
        return replace(self, values=values, low=None, high=None, log=False)

    def is_active(self, chosen: dict[str, Any]) -> bool:
        """Return whether this knob has an effect with the values chosen so far.

        A knob whose value is not chosen yet is assumed to have its default.
        """
        return all(
            chosen.get(name, getattr(_DEFAULTS, name)) in _as_list(wanted)
            for name, wanted in self.conditions().items()
        )

    def conditions(self) -> dict[str, Any]:
        """Return {other knob: its value, or list of values, that lets this knob have an effect}.

        If one of the other knobs has a different value, this knob has no effect. Conditions come
        from the registry of knobs and from the space (`when`).
        """
        return {**KNOBS[self.name].active_when, **(self.when or {})}

    def depends_on(self) -> dict[str, list[Any]]:
        """Return the values of other knobs that decide whether this knob has an effect.

        The result also has the values of other knobs that decide which values of this knob are
        possible.
        """
        deciding = {name: list(_as_list(wanted)) for name, wanted in self.conditions().items()}
        for choice in self.choices():
            for name, value in KNOBS[self.name].impossible_with.get(choice, {}).items():
                deciding.setdefault(name, []).extend(_as_list(value))
        if self.divides is not None:
            deciding["num_gpus"] = list(KNOBS["num_gpus"].choices)
        return deciding


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Values of a knob that were removed from a space, and the reason."""

    knob: str
    values: tuple[Any, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.knob} {_listed(self.values)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The knobs of a space; each knob comes after the knobs in its conditions."""

    name: str
    knobs: tuple[Knob, ...]

    def __hash__(self) -> int:  # knobs cannot be hashed, because their conditions are dicts
        return hash((self.name, *((knob.name, knob.values) for knob in self.knobs)))

    def describe(self) -> dict[str, Any]:
        """Return plain data, which a continued study compares with the data of its old space."""
        return {
            knob.name: {
                "values": list(knob.values),
                "range": [knob.low, knob.high, knob.log],
                "when": knob.when,
            }
            for knob in self.knobs
        }

    @classmethod
    def load(cls, name_or_path: str) -> "SearchSpace":
        """Load a shipped space by name, or a file.

        Raises UsageError, which names the invalid line of a file.
        """
        shipped = shipped_spaces()
        path = shipped.get(name_or_path) or Path(name_or_path)
        # Path.is_file raises for strings that cannot be a path.
        if name_or_path not in shipped and not os.path.isfile(path):
            raise UsageError(
                f"unknown search space {name_or_path!r}"
                f"{did_you_mean(name_or_path, tuple(shipped))}",
                remedy=f"use one of {', '.join(shipped)}, or the path of a YAML file",
            )
        return _shipped(path) if name_or_path in shipped else _read(path)

    @classmethod
    def of(cls, name: str = "own", **knobs: Any) -> "SearchSpace":
        """Create a space of these knobs. A list or range is searched; any other value is fixed.

        Raises UsageError for impossible values.

        Example: `SearchSpace.of(micro_batch_size=[1, 2, 4], lora_rank=16)`.
        """
        space = cls(name=name, knobs=())

        for knob, given in knobs.items():
            values = tuple(given) if isinstance(given, list | tuple | range) else (given,)
            if not values or len(set(map(repr, values))) != len(values):
                raise UsageError(
                    f"{knob}: a list needs values, each only once, not {given!r}",
                    remedy="list each value once",
                )
            for value in values:
                space = space.pin(knob, value)  # `pin` raises UsageError for an impossible value
            space = space.offer(knob, values)
        return space

    def knob(self, name: str) -> Knob | None:
        """Return the knob of this name, or None if the space lacks it."""
        return next((knob for knob in self.knobs if knob.name == name), None)

    def choices(self, name: str) -> tuple[Any, ...]:
        """Return the values of a knob, or only its default if the space lacks the knob."""
        knob = self.knob(name)
        return knob.choices() if knob else (getattr(_DEFAULTS, name),)

    def narrow(
        self, name: str, allowed: Callable[[Any], bool], reason: str
    ) -> tuple["SearchSpace", list[Removal]]:
        """Return the space with only the allowed values of a knob, and the removals.

        Raises UsageError if no value is left.
        """
        knob = self.knob(name)
        removed = tuple(value for value in knob.choices() if not allowed(value)) if knob else ()
        if knob is None or not removed:
            return self, []

        if len(removed) == len(knob.choices()):
            remedy = f"add values of {name} to the space, or pin one with --set {name}=VALUE"
            # If the knob has a single value, the user has probably fixed it.
            if len(removed) == 1:
                remedy = (
                    f"give another value (--set {name}=VALUE), or change the setting that excludes"
                    " this one"
                )
            raise UsageError(
                f"no value of {name} is left in the space {self.name!r}:"
                f" {_listed(removed)}: {reason}",
                remedy=remedy,
            )
        return self._with(knob.keep(allowed)), [Removal(knob=name, values=removed, reason=reason)]

    def pin(self, name: str, value: Any) -> "SearchSpace":
        """Return the space with one knob fixed, even if the space does not have the knob.

        Raises UsageError for an impossible value.
        """
        if name not in KNOBS:
            raise UsageError(
                f"there is no setting {name!r}{did_you_mean(name, KNOBS)}",
                remedy=f"the settings are {', '.join(KNOBS)}",
            )

        try:
            check_value(name, value)
        except ValueError as error:
            raise UsageError(
                f"--set {name}: {error}", remedy="give a value that this error names"
            ) from None
        return self._with(Knob(name=name, values=(value,)))

    def without(self, name: str) -> "SearchSpace":
        """Return the space without a knob, which then has its default."""
        return replace(self, knobs=tuple(knob for knob in self.knobs if knob.name != name))

    def offer(self, name: str, values: tuple[Any, ...]) -> "SearchSpace":
        """Return the space with `values` as the values of a knob."""
        return self._with(Knob(name=name, values=values))

    def idle(self, name: str) -> str | None:
        """Return a condition of a knob that the space cannot meet, or None if all can be met."""
        knob = self.knob(name) or Knob(name=name)
        for other, wanted in knob.conditions().items():
            if not set(self.choices(other)) & set(_as_list(wanted)):
                return f"{other} {_listed(tuple(_as_list(wanted)))}"
        return None

    def condition(self, name: str, other: str, allowed: tuple[Any, ...]) -> "SearchSpace":
        """Return a space where the knob `name` has an effect only with these values of `other`."""
        knob = self.knob(name)
        if knob is None:
            return self
        allowed_before = _as_list((knob.when or {}).get(other, list(allowed)))
        when = (knob.when or {}) | {other: [value for value in allowed if value in allowed_before]}
        new_space = self._with(replace(knob, when=when))
        return replace(new_space, knobs=tuple(_sort_by_conditions(list(new_space.knobs))))

    def divide(self, batch: int) -> "SearchSpace":
        """Return a space whose micro batch sizes, times the GPU count, divide `batch`."""
        knob = self.knob("micro_batch_size")
        assert knob is not None  # the space of a study always has this knob
        new_space = self._with(replace(knob, divides=batch))
        return replace(new_space, knobs=tuple(_sort_by_conditions(list(new_space.knobs))))

    def _with(self, knob: Knob) -> "SearchSpace":
        if self.knob(knob.name) is None:
            return replace(self, knobs=tuple(_sort_by_conditions([knob, *self.knobs])))
        return replace(
            self, knobs=tuple(knob if old.name == knob.name else old for old in self.knobs)
        )

    def enumerate(self) -> Iterator[dict[str, Any]]:
        """Yield every distinct configuration as {knob: value}.

        Knobs that have no effect in a configuration are left out.
        """

        def extend(chosen: dict[str, Any], knobs: tuple[Knob, ...]) -> Iterator[dict[str, Any]]:
            if not knobs:
                yield chosen
            elif not knobs[0].is_active(chosen):
                yield from extend(chosen, knobs[1:])
            else:
                for value in knobs[0].possible(chosen):
                    yield from extend(chosen | {knobs[0].name: value}, knobs[1:])

        return extend({}, self.knobs)

    def size(self) -> int:
        """Return the number of distinct configurations."""
        # For each knob, the values that occur in the conditions of other knobs
        deciding_values: dict[str, list[Any]] = {}
        for knob in self.knobs:
            for name, values in knob.depends_on().items():
                deciding_values.setdefault(name, []).extend(values)

        # Configurations are counted in groups. In all configurations of a group, each knob on which
        # another knob depends has the same value; values that no condition names count as the same
        # value.
        groups: Counter[tuple[tuple[str, Any], ...]] = Counter([()])
        for knob in self.knobs:
            next_groups = type(groups)()
            for group, number in groups.items():
                possible = knob.possible(dict(group)) if knob.is_active(dict(group)) else ()
                if not possible or knob.name not in deciding_values:
                    next_groups[group] += number * max(len(possible), 1)
                else:
                    for value in possible:
                        key = value if value in deciding_values[knob.name] else None
                        next_groups[(*group, (knob.name, key))] += number
            groups = next_groups
        return groups.total()

    def sample(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield `number` random configurations, for a space that is too large to enumerate.

        The configurations have the same form as in `enumerate`. Every call yields the same
        configurations.
        """
        generator = random.Random(0)  # noqa: S311 (no secret depends on it)
        for _ in range(number):
            yield self._choose(lambda _, values: generator.choice(values))

    def config(self, chosen: dict[str, Any]) -> TrainConfig:
        """Return the configuration for {knob: value}; other knobs keep their defaults."""
        known = {name: value for name, value in chosen.items() if name in KNOBS}
        size = self.knob("micro_batch_size")
        if size is not None and size.divides is not None and "micro_batch_size" in known:
            # A sampler chooses each knob independently, so the micro batch size may not divide the
            # global batch.
            known["micro_batch_size"] = size.nearest(
                known["micro_batch_size"], size.possible(known)
            )
        return TrainConfig(**known)

    def leanest(self) -> dict[str, Any]:
        """Return {knob: value}, with the value of each knob that needs the least memory."""
        return self._choose(lambda knob, values: min(values, key=KNOBS[knob.name].memory_rank))

    def clip(self, config: TrainConfig) -> dict[str, Any]:
        """Return {knob: value}, with the values that are nearest to the values in `config`."""
        return self._choose(lambda knob, values: knob.nearest(getattr(config, knob.name), values))

    def _choose(self, value_of: Callable[[Knob, tuple[Any, ...]], Any]) -> dict[str, Any]:
        """Return {knob: value} for the knobs with an effect; `value_of` chooses the values."""
        chosen: dict[str, Any] = {}
        for knob in self.knobs:
            if knob.is_active(chosen):
                chosen[knob.name] = value_of(knob, knob.possible(chosen))
        return chosen


def ways_to_fit(leanest: TrainConfig) -> str:
    """Suggest remedies if not even the configuration with the least memory (`leanest`) fits."""
    ways = ["take a larger GPU", "a smaller model"]
    if leanest.quantization != "nf4":
        ways.append("--space qlora")
    if leanest.seq_len > SHORT:
        ways.append("a shorter --seq-len")
    return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def shipped_spaces() -> dict[str, Path]:
    """Return {name: file} of the spaces that come with the package."""
    return shipped_files("search_spaces", "search_spaces")


def _read(path: Path) -> SearchSpace:
    from autotune.problem.space_file import SpaceFile

    knobs = [
        Knob(
            name=name,
            values=tuple(entry.values),
            low=entry.min,
            high=entry.max,
            log=entry.log,
            when=entry.when,
        )
        for name, entry in read_user_yaml(path, SpaceFile).knobs.items()
    ]
    return SearchSpace(name=path.stem, knobs=tuple(_sort_by_conditions(knobs)))


# The spaces are cached, because the package's files do not change, and a plan of many models needs
# the same spaces repeatedly.
_shipped = functools.cache(_read)


def _sort_by_conditions(knobs: list[Knob]) -> Iterator[Knob]:
    """Yield each knob after the knobs in its conditions, otherwise in the given order.

    Knobs whose conditions form a cycle also stay in the given order.
    """
    remaining = list(knobs)
    while remaining:
        names = {knob.name for knob in remaining}
        ready = (knob for knob in remaining if not set(knob.depends_on()) & (names - {knob.name}))
        knob = next(ready, remaining[0])
        remaining.remove(knob)
        yield knob


def _listed(values: tuple[Any, ...]) -> str:
    if len(values) > 10:
        return f"{values[0]} to {values[-1]} ({len(values):,} values)"
    return ", ".join(map(str, values))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

"""The knob registry: a row of `knobs.yaml` for each knob, with everything that the program knows about it as a knob.

Checks, canonical form, search moves, preferences, memory comparison, labels and reports are derived from these rows.
What a knob does to a training run is in `probe`, how another tool spells it in `export`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.core.files import load_data

Kind = Literal["system", "learning"]
Form = Literal["choice", "boolean", "integer", "checkpointing", "modules"]
Effect = Literal["memory", "weights", "micro_time", "rest_of_step", "depth_error", "learning"]

MAX_INTEGER = 2**24
# The end of a module's path. A single one has a "_" or a ".", or an error in a choice would be one.
_MODULE, _SINGLE = re.compile(r"\w{1,80}(?:\.\w{1,80}){0,8}"), re.compile(r".*[_.].*")
# The share of what a compiled layer keeps that it may keep, by the value of checkpointing.
SELECTIVE = {"selective_80": 0.8, "selective_50": 0.5, "selective_30": 0.3}
ADAMW = ("adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobSpec:
    """What is known about one knob.

    Attributes:
        name: The field of `TrainConfig`.
        label: A few plain words for tables and headings; those of the name if left out.
        description: One sentence on what the knob does.
        form: How values are checked. A choice has `choices`, an integer is 1 to `MAX_INTEGER`; modules have `choices`,
            or names of modules with commas between them.
        default: The value of a configuration that does not name the knob; the first choice, or false, if left out.
            Where it is no choice, the knob has the first one as soon as it has an effect.
        affects: What the knob changes. `weights` are the bytes of the base model or its adapters beyond their rank,
            `micro_time` the seconds of a micro batch, `rest_of_step` those of the optimizer step after them,
            `depth_error` the error of a time extrapolated from few layers, `learning` what the model learns.
        active_when: The value that each of these other knobs must have for this one to have an effect, or a list.
        never_with: The values of other knobs with which this one has no effect.
        inactive: The value of the knob where it has no effect; the default if left out.
        impossible_with: For a value those of other knobs with which it is impossible: the next choice takes its place.
        listed_at_default: Whether the data form of a configuration has the knob at its default. One that came later
            has not, so that digests stay as they were.
        listed_when_inactive: Whether the data form of a configuration has the knob although it has no effect. A change
            would change digests, and stored probes would not be found again.
        required: The message where the knob is active and its value is None.
        choices: The possible values of a choice; a boolean has true and false.
        fastest_first: Values by speed, where they differ in it.
        leanest_first: Values by need of memory; numbers and booleans are in their own order without it.
        capability_priority: The rank of the knob in comparing what two configurations can learn: 1 is compared first.
        least_capable_first: Groups of equally capable values; numbers and booleans are in their own order without it.
        surely_leanest_first: Groups of values. A value surely needs at least the memory of all in its own group and the
            groups before. Values that are not listed are comparable only with themselves.
        separates_results: Whether reports keep the best configuration of each value apart.
        distance_weight: What a change of the knob counts in the distance of two configurations; an integer's counts
            for each doubling. Changes of learning knobs cost the user more.
        tag: Format of a value that is not the default in a configuration's label; None leaves the knob out.
        tag_order: Place among the tags of a label, the lowest first.
        phrases: For each value the words in which a report describes it; a missing value needs none.
    """

    name: str
    description: str
    affects: frozenset[Effect]
    label: str = ""
    form: Form = "choice"
    default: Any = None
    distance_weight: float = 0.5
    active_when: Mapping[str, Any] = field(default_factory=dict)
    never_with: Mapping[str, Any] = field(default_factory=dict)
    inactive: Any = None
    impossible_with: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    listed_at_default: bool = True
    listed_when_inactive: bool = False
    required: str | None = None
    choices: tuple[Any, ...] = ()
    fastest_first: tuple[Any, ...] = ()
    leanest_first: tuple[Any, ...] = ()
    capability_priority: int | None = None
    least_capable_first: tuple[tuple[Any, ...], ...] = ()
    surely_leanest_first: tuple[tuple[Any, ...], ...] = ()
    separates_results: bool = False
    tag: str | None = None
    tag_order: int = 100
    phrases: Mapping[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))
        if self.form == "boolean":
            object.__setattr__(self, "choices", (False, True))
        if self.default is None:
            object.__setattr__(self, "default", self.choices[0])

    @property
    def default_stays(self) -> bool:
        """Whether no value of another knob changes this one from its default."""
        always_possible = self.default not in (None, *self.impossible_with)
        return always_possible and self.inactive is None and not self.required

    @property
    def inactive_value(self) -> Any:
        """What the knob is set to when it has no effect."""
        return None if self.required else self.default if self.inactive is None else self.inactive

    @property
    def kind(self) -> Kind:
        """`learning` for a knob that changes what the model learns, `system` for one that changes speed and memory."""
        return "learning" if "learning" in self.affects else "system"

    def check(self, value: Any) -> None:
        """Raise ValueError for what cannot be a value of this knob."""
        if self.form == "checkpointing":
            checkpoint_every(value)
        elif self.form == "integer":
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not 1 <= value <= MAX_INTEGER
            ):
                raise ValueError(f"{self.name} is a positive integer, not {value!r}")
        elif self.form == "boolean":
            if not isinstance(value, bool):
                raise ValueError(f"{self.name} is true or false, not {value!r}")
        elif isinstance(value, bool) or not (value in self.choices or self._names_modules(value)):
            or_names = " or names of modules as in q_proj,up_proj" if self.form == "modules" else ""
            raise ValueError(
                f"{self.name} is one of {', '.join(map(str, self.choices))}{or_names}, not {value!r}"
            )

    def _names_modules(self, value: Any) -> bool:
        names = _names_in(value) if self.form == "modules" and isinstance(value, str) else []
        if (
            not names
            or not all(map(_MODULE.fullmatch, names))
            or {*self.choices, "all_linear"} & set(names)
        ):
            return False
        return len(names) > 1 or bool(_SINGLE.fullmatch(names[0]))

    def is_active(self, values: Mapping[str, Any]) -> bool:
        """Whether the knob has an effect with these values of all knobs."""
        if (
            not self.never_with and not self.active_when
        ):  # most knobs, asked for each of thousands of configurations
            return True
        if any(values[name] == excluded for name, excluded in self.never_with.items()):
            return False
        return all(_is_among(values[name], wanted) for name, wanted in self.active_when.items())

    def possible(self, value: Any, values: Mapping[str, Any]) -> Any:
        """The value itself, or the next choice that is possible with these values of all knobs; names are sorted."""
        if self.form == "modules":
            return ",".join(sorted(set(_names_in(value))))
        # Most knobs have none, asked for each of thousands of configurations.
        while self.impossible_with and any(
            _is_among(values[name], excluded)
            for name, excluded in self.impossible_with.get(value, {}).items()
        ):
            value = self.choices[self.choices.index(value) + 1]
        return value

    def is_listed(self, values: Mapping[str, Any]) -> bool:
        """Whether the data form of a configuration with these values of all knobs has this one."""
        if not (self.listed_at_default or values[self.name] != self.default):
            return False
        return self.listed_when_inactive or self.is_active(values)

    def speed_rank(self, value: Any) -> Any:
        """A key by which the fastest value sorts first. Equal for all values where no order is known."""
        if self.form == "checkpointing":
            return (
                -(checkpoint_every(value) or math.inf),
                -SELECTIVE.get(value, 1.0),
                value == "offload",
            )
        return self.fastest_first.index(value) if value in self.fastest_first else 0

    def memory_rank(self, value: Any) -> Any:
        """A key by which the value that needs the least memory sorts first."""
        if self.form == "checkpointing":
            # A budget is what a layer may keep at most: one of a half stands beside every second layer.
            share = 1 / (1 - SELECTIVE[value]) if value in SELECTIVE else checkpoint_every(value)
            return share or math.inf, value != "offload"
        if self.form == "modules":  # of names nothing is known
            return self.leanest_first.index(value) if value in self.leanest_first else 0
        return self.leanest_first.index(value) if self.leanest_first else value

    def capability_rank(self, value: Any) -> float:
        """Larger for a value with which a model can learn more; None, an inactive number, is 0."""
        if self.least_capable_first:
            return _group_of(value, self.least_capable_first) or 0
        return float(value or 0)

    def surely_needs_at_least(self, value: Any, other: Any) -> bool:
        """Whether `value` surely needs at least the memory of `other`. False where they cannot be compared."""
        if value == other or "memory" not in self.affects:
            return True
        if self.form == "integer":
            return bool((value or 0) >= (other or 0))
        if self.form == "checkpointing":
            if SELECTIVE.keys() & {value, other}:
                shares = {"none": 1.0, "full": 0.0} | SELECTIVE
                return value in shares and other in shares and shares[value] >= shares[other]
            every, other_every = (checkpoint_every(each) or math.inf for each in (value, other))
            return every >= other_every and value != "offload"
        group, other_group = (_group_of(each, self.surely_leanest_first) for each in (value, other))
        return group is not None and other_group is not None and group >= other_group


def _is_among(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def checkpoint_every(checkpointing: str) -> int | None:
    """'none' and 'selective_50' -> None, 'full' and 'offload' -> 1, 'every_3' -> 3. Raises ValueError on others."""
    if checkpointing in ("none", *SELECTIVE):
        return None
    if checkpointing in ("full", "offload"):
        return 1
    match = (
        re.fullmatch(r"every_([2-9]|[1-9][0-9]{1,3})", checkpointing)
        if isinstance(checkpointing, str)
        else None
    )
    if match is None:
        names = ", ".join(("none", "full", "offload", *SELECTIVE))
        raise ValueError(
            f"checkpointing is {names} or every_K with K of 2 or more, not {checkpointing!r}"
        )
    return int(match.group(1))


def _names_in(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def check_value(knob: str, value: Any) -> None:
    """Raise ValueError when there is no such knob, or `value` cannot be a value of it."""
    if knob not in KNOBS:
        raise ValueError(f"there is no knob {knob!r}")
    KNOBS[knob].check(value)


def affecting(*effects: Effect) -> tuple[str, ...]:
    """The names of the knobs that change any of these."""
    return tuple(name for name, knob in KNOBS.items() if knob.affects & set(effects))


def _group_of(value: Any, groups: tuple[tuple[Any, ...], ...]) -> int | None:
    return next((place for place, group in enumerate(groups) if value in group), None)


def _tuples(value: Any) -> Any:
    """YAML's lists as tuples, at every depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


KNOBS = {
    row["name"]: KnobSpec(
        **{key: _tuples(value) for key, value in row.items()}
        | {"affects": frozenset(row["affects"])}
    )
    for row in load_data("autotune.core", "knobs")
}

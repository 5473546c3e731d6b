"""The registry of knobs, the settings of a configuration; `knobs.yaml` has a row for each knob.

Checks, canonical form, search moves, preferences, memory comparison, labels and reports are derived
from these rows. `probe` implements the effect of a knob on a training run, and `export` knows the
knob's name in other tools.
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
# Matches the end of a module's path. If a knob's value is a single module name, the name must
# contain "_" or ".", so that a mistyped choice is not taken for a module.
_MODULE = re.compile(r"\w{1,80}(?:\.\w{1,80}){0,8}")
_SINGLE = re.compile(r".*[_.].*")
# For each selective value of `checkpointing`, the share of its activations that a compiled layer
# may keep.
SELECTIVE = {"selective_80": 0.8, "selective_50": 0.5, "selective_30": 0.3}
FP32_ADAMW = ("adamw_torch_fused", "adamw_torch")
ADAMW = (*FP32_ADAMW, "adamw_8bit", "paged_adamw_8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobSpec:
    """The properties of one knob.

    Attributes:
        name: The field of `TrainConfig`.
        label: A few plain words for tables and headings; by default, the words of the name.
        description: One sentence on the knob's effect.
        form: The kind of values. The value of a choice is one of `choices`. An integer is from 1 to
            `MAX_INTEGER`. The value of `modules` is one of `choices`, or module names separated by
            commas.
        default: The value if a configuration does not set the knob. If omitted, the default is the
            first choice, or false for a boolean. If the default is not among the choices, a knob
            that has an effect takes the first choice instead.
        affects: The quantities that the knob changes. `weights` is the size of the base model, or
            of the adapters at a fixed LoRA rank. `micro_time` is the time of a micro batch, and
            `rest_of_step` is the time of the optimizer step after the micro batches. `depth_error`
            is the error of a time that is extrapolated from a few layers. `learning` is the
            training result.
        active_when: Other knobs, each with the value, or list of values, that it must have for this
            knob to have an effect.
        never_with: Values of other knobs that make this knob ineffective.
        inactive: The value of the knob while it has no effect; if omitted, `default`.
        impossible_with: For each value, the values of other knobs that exclude it. An excluded
            value is replaced by the next choice.
        listed_at_default: Whether a configuration's data (`as_dict`) includes the knob at its
            default. False for knobs added later, so that older configurations keep their digests.
        listed_when_inactive: Whether a configuration's data includes the knob while it has no
            effect. A change of this flag changes digests, so the results of stored probes are no
            longer found.
        required: The error message if the knob has an effect but its value is None.
        choices: The possible values of a choice; a boolean has true and false.
        fastest_first: The values from fastest to slowest, if they differ in speed.
        leanest_first: The values from least to most memory. If omitted, larger numbers need more
            memory, and true needs more than false.
        capability_priority: The position of the knob when two configurations are compared by how
            much they can learn; 1 is compared first.
        least_capable_first: Groups of values that let a model learn equally well, the worst group
            first. If omitted, a model can learn more with larger numbers, and with true than with
            false.
        surely_leanest_first: Groups of values, least memory first. A value surely needs at least
            the memory of all values in its own group and in earlier groups. Values outside the
            groups are comparable only with themselves.
        separates_results: Whether reports list the best configuration for each value of the knob.
        distance_weight: The weight of the knob in the distance between two configurations; for an
            integer, the weight of each doubling. Knobs that change the training result have larger
            weights, because users dislike their changes more.
        tag: The format of a non-default value in a configuration's label, or None to omit the knob.
        tag_order: The position among the tags of a label, lowest first.
        phrases: The words that describe each value in a report. A value without words is not
            described.
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
        """Whether the knob keeps its default value, whatever values the other knobs have."""
        always_possible = self.default not in (None, *self.impossible_with)
        return always_possible and self.inactive is None and not self.required

    @property
    def inactive_value(self) -> Any:
        """The value that the knob has while it has no effect."""
        if self.required:
            return None
        return self.default if self.inactive is None else self.inactive

    @property
    def kind(self) -> Kind:
        """`learning` if the knob changes the training result, otherwise `system`."""
        return "learning" if "learning" in self.affects else "system"

    def check(self, value: Any) -> None:
        """Raise ValueError if this knob cannot have the value."""
        if self.form == "checkpointing":
            checkpoint_every(value)

        elif self.form == "integer":
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or not 1 <= value <= MAX_INTEGER:
                raise ValueError(f"{self.name} is a positive integer, not {value!r}")

        elif self.form == "boolean":
            if not isinstance(value, bool):
                raise ValueError(f"{self.name} is true or false, not {value!r}")

        elif isinstance(value, bool) or not (value in self.choices or self._names_modules(value)):
            choices = ", ".join(map(str, self.choices))
            or_names = " or names of modules as in q_proj,up_proj" if self.form == "modules" else ""
            raise ValueError(f"{self.name} is one of {choices}{or_names}, not {value!r}")

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
        """Return whether the knob has an effect, given the values of all knobs."""
        # Most knobs have no conditions. The shortcut matters, because this method runs for
        # thousands of configurations.
        if not self.never_with and not self.active_when:
            return True
        if any(values[name] == excluded for name, excluded in self.never_with.items()):
            return False
        return all(_is_among(values[name], wanted) for name, wanted in self.active_when.items())

    def possible(self, value: Any, values: Mapping[str, Any]) -> Any:
        """Return `value`, or the next choice after it that the other knobs' values allow.

        A list of module names is returned in sorted order.
        """
        if self.form == "modules":
            return ",".join(sorted(set(_names_in(value))))
        # Most knobs have no impossible values, so the first test is cheap. This method runs for
        # thousands of configurations.
        while self.impossible_with and any(
            _is_among(values[name], excluded)
            for name, excluded in self.impossible_with.get(value, {}).items()
        ):
            value = self.choices[self.choices.index(value) + 1]
        return value

    def is_listed(self, values: Mapping[str, Any]) -> bool:
        """Return whether the data of a configuration with these values includes this knob."""
        if not (self.listed_at_default or values[self.name] != self.default):
            return False
        return self.listed_when_inactive or self.is_active(values)

    def speed_rank(self, value: Any) -> Any:
        """Return a sort key, smallest for the fastest value; equal keys if no order is known."""
        if self.form == "checkpointing":
            return (
                -(checkpoint_every(value) or math.inf),
                -SELECTIVE.get(value, 1.0),
                value == "offload",
            )
        return self.fastest_first.index(value) if value in self.fastest_first else 0

    def memory_rank(self, value: Any) -> Any:
        """Return a sort key, smallest for the value that needs the least memory."""
        if self.form == "checkpointing":
            # Selective recomputation that keeps half of the activations ranks like checkpointing of
            # every second layer.
            share = 1 / (1 - SELECTIVE[value]) if value in SELECTIVE else checkpoint_every(value)
            return share or math.inf, value != "offload"
        if self.form == "modules":  # with custom module names, the memory is unknown
            return self.leanest_first.index(value) if value in self.leanest_first else 0
        return self.leanest_first.index(value) if self.leanest_first else value

    def capability_rank(self, value: Any) -> float:
        """Return a number that is larger if the model can learn more; 0 if the value is None."""
        if self.least_capable_first:
            return _group_of(value, self.least_capable_first) or 0
        return float(value or 0)

    def surely_needs_at_least(self, value: Any, other: Any) -> bool:
        """Return whether `value` surely needs at least as much memory as `other`.

        The result is False if the two values cannot be compared.
        """
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
    """Return K if every K-th layer is checkpointed, or None without whole-layer checkpointing.

    'none' and 'selective_50' -> None, 'full' and 'offload' -> 1, 'every_3' -> 3. Raises ValueError
    for other values.
    """
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
    """Raise ValueError if the knob does not exist or cannot have this value."""
    if knob not in KNOBS:
        raise ValueError(f"there is no setting {knob!r}")
    KNOBS[knob].check(value)


def knobs_affecting(*effects: Effect) -> tuple[str, ...]:
    """Return the names of the knobs that change any of these quantities."""
    return tuple(name for name, knob in KNOBS.items() if knob.affects & set(effects))


def _group_of(value: Any, groups: tuple[tuple[Any, ...], ...]) -> int | None:
    return next((place for place, group in enumerate(groups) if value in group), None)


def _tuples(value: Any) -> Any:
    """Convert YAML's lists to tuples at every depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


KNOBS = {
    row["name"]: KnobSpec(
        **{key: _tuples(value) for key, value in row.items()}
        | {"affects": frozenset(row["affects"])}
    )
    for row in load_data("autotune.core", "knobs")
}

"""Pairs of features that were never tested together; each pair has a row in `untested.yaml`.

Constraints, error messages and docs/knobs.md are made from these rows. A pair that is known to fail
has no row: the code that refuses the pair states the reason.
"""

import functools
from dataclasses import dataclass
from typing import Any

from autotune.core.files import load_data

# For each context, the words that end the message 'X is untested ...'. {} is replaced by the member
# of the context, such as `dpo`.
CONTEXTS = {
    "attention": "with {}",
    "format": "in {} files",
    "images": "with images",
    "model_type": "on {}",
    "objective": "with {}",
    "several_gpus": "on several GPUs",
    "sharding": "under {}",
    "trainer": "with {}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UntestedPair:
    """A setting that was never tested in a context, such as with an objective or a trainer.

    Attributes:
        setting: A knob, or an option of `autotune run`.
        values: The untested values; `true` stands for any use of an option such as `--quality`.
        feature: The setting in words, with a verb, such as 'CUDA graphs are'. `{value}` is replaced
            by the value.
        context: A key of `CONTEXTS`.
        among: The members of the context that the setting is untested with, such as `dpo`.
        tested: Used if `among` is empty: the only members that the setting was tested with.
        reason: The reason why the pair might fail, or empty.
    """

    setting: str
    values: tuple[Any, ...]
    feature: str
    context: str
    among: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    reason: str = ""

    def applies(self, member: str) -> bool:
        """Return whether the setting is untested with this member of the context."""
        return member in self.among if self.among else member not in self.tested

    def sentence(self, member: str = "", value: Any = "") -> str:
        """Return the message that refuses the setting: 'CUDA graphs are untested with dpo'."""
        context = CONTEXTS[self.context].format(member)
        untested = f"{self.feature.format(value=value)} untested {context}"

        return f"{untested}: {self.reason}" if self.reason else untested


@functools.cache
def untested_pairs() -> tuple[UntestedPair, ...]:
    """Return all rows of the table."""
    return tuple(map(_pair, load_data("autotune.core", "untested")))


def _pair(row: dict[str, Any]) -> UntestedPair:
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return UntestedPair(**row | lists)


@functools.cache
def untested_in(context: str, member: str = "") -> tuple[UntestedPair, ...]:
    """Return the untested pairs of a context that apply to one of its members.

    For example, the context is `objective` and the member is `dpo`.

    The contexts `images` and `several_gpus` have no members.
    """
    pairs = (pair for pair in untested_pairs() if pair.context == context)
    return tuple(pair for pair in pairs if pair.applies(member))


def untested(setting: str, value: Any, context: str, member: str = "") -> str | None:
    """Return the message that refuses a setting in a context, or None if no row refuses it."""
    pairs = (pair for pair in untested_in(context, member) if pair.setting == setting)
    return next((pair.sentence(member, value) for pair in pairs if value in pair.values), None)

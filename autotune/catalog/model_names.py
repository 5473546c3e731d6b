"""Which row of the catalogue a published name shares its shape with, by the name alone.

Models tuned for chats, dated versions and mirrors have the shape of the model that they were made of, and say so in
their names. What else a name says (Vision, Guard, Reward, GGUF, AWQ, a length of context) is never left out: such a
model may have another shape, and is none of ours.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Organisations that publish copies of others' models under their names.
MIRRORS = frozenset(
    {"ai-modelscope", "llm-research", "mistral-community", "nousresearch", "unsloth"}
)
# Organisations that have changed their names, and those whose models lie with two.
_SAME = ({"cohereforai", "coherelabs"}, {"thudm", "zai-org"}, {"codellama", "meta-llama"})

# A copy in nf4: the knob `quantization` makes it of the model that the rest names.
_QUANTISED = re.compile(r"-(?:unsloth-)?bnb-4bit$", re.IGNORECASE)
_WORDS = r"-(?:instruct|chat|base|it|pt|hf|bf16|\d{4})"
_TUNED, _LAST_TUNED = re.compile(_WORDS + "(?=-|$)"), re.compile(_WORDS + "$")


@dataclass(frozen=True, slots=True)
class Match:
    """`row` is the position in the catalogue. `published` is the Hub name to train from, None if none was given."""

    row: int
    published: str | None


class ModelNames:
    """The names of the catalogue's rows, and the rule that reads others."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.exact: dict[str, int] = {}
        self._organisations: list[set[str]] = []
        self._last: dict[str, set[int]] = {}  # by the part behind the slash
        self._plain: dict[
            str, set[int]
        ] = {}  # by that part without what says how a model was tuned
        for number, row in enumerate(rows):
            organisations: set[str] = set()
            for name in (row["name"].lower(), *map(str.lower, row["aliases"])):
                self.exact[name] = number
                organisation, _, last = name.rpartition("/")
                organisations |= {organisation}.union(
                    *(same for same in _SAME if organisation in same)
                )
                self._last.setdefault(_without_maker(last), set()).add(number)
                self._plain.setdefault(_plain(last), set()).add(number)
            self._organisations.append(organisations)

    def find(self, name: str, *, any_organisation: bool = False) -> Match | None:
        """The one row that shares its shape with the model of this name; None if there is none, or several.

        The organisation has to be that of the row or a mirror, or not to be named.
        """
        if name.lower() in self.exact:
            return Match(self.exact[name.lower()], name if "/" in name else None)
        plainer = _QUANTISED.sub("", name)
        organisation, _, last = plainer.lower().rpartition("/")
        stages = [
            *((part, self._last) for part in _shortened(_without_maker(last))),
            (_plain(last), self._plain),
        ]
        for part, index in stages:
            rows = index.get(part, set())
            if len(rows) == 1:
                (row,) = rows
                if any_organisation or organisation in self._organisations[row] | MIRRORS | {""}:
                    return Match(row, plainer if organisation else None)
            if rows:
                return None
        return None


def _without_maker(last: str) -> str:
    return last.removeprefix("meta-")


def _shortened(last: str) -> Iterator[str]:
    """The name, then without one word at its end after another that says how it was tuned, then without all of them.

    A row of a tuned version comes before that of its base: Qwen3-4B-Instruct-2507 has another context than Qwen3-4B.
    """
    yield last
    while (found := _LAST_TUNED.search(last)) is not None:
        last = last[: found.start()]
        yield last
    yield _plain(last)


def _plain(last: str) -> str:
    """'meta-llama-3.1-8b-instruct' -> 'llama-3.1-8b'."""
    return _TUNED.sub("", _without_maker(last))

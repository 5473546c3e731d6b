"""Finds the catalogue row that has the shape of a published model, by the model's name alone.

Models tuned for chat, dated versions and mirrors have the shape of their base model. Words that
only mark such a model, like Instruct or 2507, are ignored. All other words of a name (Vision,
Guard, Reward, GGUF, AWQ, a context length) must match, because a model with such a word may have
another shape.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Organisations that publish copies of other organisations' models under the original model names.
MIRRORS = frozenset(
    {"ai-modelscope", "llm-research", "mistral-community", "nousresearch", "unsloth"}
)
# Organisations that publish only quantised copies. A run loads the original model instead of the
# copy.
QUANTISERS = frozenset({"axolotl-quants", "hugging-quants", "mlx-community"})
# Each set holds the old and the new name of one organisation, or the names of two organisations
# that publish the same models.
_SYNONYMS = ({"cohereforai", "coherelabs"}, {"thudm", "zai-org"}, {"codellama", "meta-llama"})

# The ending of the name of a copy in nf4. A run loads the original model instead, because the knob
# `quantization` quantises it in the same way.
_QUANTISED = re.compile(r"-(?:unsloth-)?bnb-(?:4bit|nf4(?:-bf16)?)$", re.IGNORECASE)
_QUANTISED_FOR_MLX = re.compile(r"-[2-8]bit$", re.IGNORECASE)
# The ending of the name of a copy in another format, which no value of `quantization` reproduces
_STORED = re.compile(
    r"-(?P<format>gptq|awq|nvfp4|aqlm)(?:-(?P<int8>int8|8bit)|-[\w.]+)*$", re.IGNORECASE
)
_WORDS = r"-(?:instruct|chat|base|it|pt|sft|dpo|hf|bf16|\d{4})"
_TUNED = re.compile(_WORDS + "(?=-|$)")
_LAST_TUNED = re.compile(_WORDS + "$")


@dataclass(frozen=True, slots=True)
class Match:
    """A catalogue row that matches a name: `row` is its position.

    `published` is the Hub name to load the weights from. If `published` is None, the weights are
    loaded under the row's own name.
    """

    row: int
    published: str | None


def quantised_copy(name: str) -> tuple[str, str]:
    """Return the name of the model that a quantised checkpoint was made from, and its format.

    The format is GPTQ, AWQ, NVFP4 or AQLM, followed by "-8bit" if the weights have 8 bits. The
    format is "" for any other name.
    """
    ending = _STORED.search(name)
    if ending is None:
        return name, ""
    return name[: ending.start()], ending["format"].upper() + ("-8bit" if ending["int8"] else "")


class ModelNames:
    """The names of the catalogue's rows, with the rule that matches other names to them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.exact: dict[str, int] = {}
        self._organisations: list[set[str]] = []
        self._by_last_part: dict[str, set[int]] = {}  # key: the part of a name after the slash
        # Key: the same part without words such as "instruct".
        self._by_plain_name: dict[str, set[int]] = {}
        self._by_spelling: dict[str, set[int]] = {}  # key: `_spelling` of either part

        for number, row in enumerate(rows):
            organisations: set[str] = set()
            for name in (row["name"].lower(), *map(str.lower, row["aliases"])):
                self.exact[name] = number
                organisation, _, last = name.rpartition("/")
                synonyms = (same for same in _SYNONYMS if organisation in same)
                organisations |= {organisation}.union(*synonyms)
                self._by_last_part.setdefault(_without_maker(last), set()).add(number)
                self._by_plain_name.setdefault(_plain_name(last), set()).add(number)
                for part in (_without_maker(last), _plain_name(last)):
                    self._by_spelling.setdefault(_spelling(part), set()).add(number)
            self._organisations.append(organisations)

    def find(self, name: str, *, any_organisation: bool = False) -> Match | None:
        """Return the row that has the shape of the model with this name.

        Returns None if no row or several rows match. If `name` contains an organisation, the
        organisation must be a publisher of the row's model or a mirror. `any_organisation` accepts
        every organisation.
        """
        if name.lower() in self.exact:
            return Match(self.exact[name.lower()], name if "/" in name else None)

        unquantised = _QUANTISED.sub("", name)
        if unquantised.lower().startswith("mlx-community/"):
            unquantised = _QUANTISED_FOR_MLX.sub("", unquantised)
        organisation, _, last = unquantised.lower().rpartition("/")
        stages = [
            *((part, self._by_last_part) for part in _name_variants(_without_maker(last))),
            (_plain_name(last), self._by_plain_name),
        ]

        for part, index in stages:
            rows = index.get(part, set())
            if len(rows) == 1:
                (row,) = rows
                if organisation in QUANTISERS:
                    return Match(row, None)
                if any_organisation or organisation in self._organisations[row] | MIRRORS | {""}:
                    return Match(row, unquantised if organisation else None)
            if rows:
                return None
        return None

    def find_respelled(self, name: str) -> int | None:
        """Return the row whose name is `name`, spelled differently; `name` has no organisation.

        For example, gemma3-27b-it, Llama 3.1 8B and qwen3:8b are found. The result is None if no
        row or several rows match.
        """
        for part in _name_variants(_without_maker(re.sub(r"[\s_:]+", "-", name.strip().lower()))):
            if rows := self._by_spelling.get(_spelling(part)):
                return min(rows) if len(rows) == 1 else None
        return None


def _spelling(part: str) -> str:
    """Return a lower-case name without dashes between a letter and a digit.

    'gemma-3-27b' -> 'gemma3-27b', which differs from a gemma-327b.
    """
    dashed = re.sub(r"[\s_:]+", "-", part)
    return re.sub(r"(?<=[a-z])-(?=[0-9])|(?<=[0-9])-(?=[a-z])", "", dashed)


def _without_maker(last: str) -> str:
    return last.removeprefix("meta-")


def _name_variants(last: str) -> Iterator[str]:
    """Yield the name, then remove words such as "instruct" from its end, one at a time.

    The caller takes the first name that matches a row. So a tuned version with its own row gets
    this row, not the row of its base model: Qwen3-4B-Instruct-2507 has another context length than
    Qwen3-4B.
    """
    yield last
    while (word := _LAST_TUNED.search(last)) is not None:
        last = last[: word.start()]
        yield last
    yield _plain_name(last)


def _plain_name(last: str) -> str:
    """Return the name without maker and tuning: 'meta-llama-3.1-8b-instruct' -> 'llama-3.1-8b'."""
    return _TUNED.sub("", _without_maker(last))

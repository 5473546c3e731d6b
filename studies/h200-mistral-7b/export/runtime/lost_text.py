# -*- coding: utf-8 -*-
"""Finds the texts of a conversation that a chat template leaves out.

A template that does not know a role, a tool call or a thought renders nothing for it, and raises no
error. The model would then train on answers without their questions.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .forms import MESSAGE_KEYS, Chat, Message, Plain, map_texts, texts_of

# Matches several words, or a character outside ASCII, because some scripts have no spaces. A name
# or an identifier in ASCII does not match.
WORDS = re.compile(r"\S\s+\S|[^\x00-\x7f]")
# Matches names of columns and keys whose value counts as text even if it is a single word
TEXT_NAME = re.compile(
    "(system|prompt|context|question|instruct|thought|think|reason|tool|function)"
)
# Columns that hold files, not text.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Some templates use these tags to separate a thought from the rest of the content.
TAGS = re.compile(r"</?think(?:ing)?>|<\|channel>|<channel\|>")
END_TAG = re.compile(r"</think|<channel\|>")
Render = Callable[[Chat], str]
# For each lost text, the index of its message, and its kind: `tools`, or a kind from `map_texts`
Lost = list[tuple[int, str]]


class LostText:
    """Finds the texts of conversations that are missing in the rendered text.

    Conversations of the same structure (roles, and kinds of texts) are rendered once with a unique
    mark in place of each text. If a mark is missing, the template leaves out any text in this
    place, even a short one. The real texts of each conversation are searched for too, because a
    template may treat some texts differently.
    """

    def __init__(self) -> None:
        self._of_structure: dict[Any, Lost] = {}

    def find(self, form: Chat, text: str, render: Render) -> Lost:
        """Return the messages with a text that is not in the rendered `text`.

        For each such text, the result has the message's index and the kind of the text.
        """
        texts = [texts_of(message) for message in form.messages]
        structure = (
            tuple(
                (message["role"], tuple(kind for kind, _ in found))
                for message, found in zip(form.messages, texts, strict=True)
            ),
            bool(form.tools),
            repr(form.options),
        )
        if structure not in self._of_structure:
            self._of_structure[structure] = _find_by_marks(form, render)

        lost = dict.fromkeys(self._of_structure[structure])
        flat = ""
        for index, found in enumerate(texts):
            for kind, whole in found:
                tags = TAGS.findall(whole)
                for place, part in enumerate(TAGS.split(whole)):
                    if _appears(part.strip(), text):
                        continue
                    flat = flat or _without_spaces(text)
                    if _without_spaces(part) in flat:
                        continue
                    is_thought = place < len(tags) and END_TAG.match(tags[place])
                    lost[index, "thought" if is_thought else kind] = None
        return list(lost)


def _find_by_marks(form: Chat, render: Render) -> Lost:
    """Return the texts that the template leaves out when a unique mark replaces each text."""
    marks: dict[str, tuple[int, str]] = {}

    def mark_message(index: int, message: Message) -> Message:
        def mark(kind: str, text: str) -> str:
            if not text.strip():
                return text
            name = f"[[text {len(marks)} stands here]]"
            marks[name] = (index, kind)
            return name

        return map_texts(message, mark)

    messages = [mark_message(index, message) for index, message in enumerate(form.messages)]
    marked = replace(form, messages=messages)
    try:
        rendered = render(marked)
        shows_tools = not form.tools or render(replace(marked, tools=None)) != rendered
    # A template may raise an error for the marks. Then only the real texts are searched for.
    except Exception:
        return []
    lost = [where for mark, where in marks.items() if mark not in rendered]
    return lost if shows_tools else [*lost, (0, "tools")]


def find_unread(form: Plain | Chat, text: str) -> list[str]:
    """Name the unknown columns, and the unknown keys of messages, whose text the template left out.

    `text` is the rendered example.
    """
    found = []
    for name, value in form.unread.items():
        if (name in MEDIA and value) or _is_lost(name, value, text):
            found.append(f"the column {name}")
    for message in form.messages if isinstance(form, Chat) else ():
        for key, value in message.items():
            if key not in MESSAGE_KEYS and _is_lost(key, value, text):
                found.append(f"the key {key} of messages")
    return list(dict.fromkeys(found))


def _is_lost(name: str, value: Any, text: str) -> bool:
    """Return whether the value of a column or key has text that is not in the rendered `text`.

    A single word in a column such as `source` counts as a name, not as text.
    """
    if isinstance(value, str) and not WORDS.search(value):
        is_named = TEXT_NAME.search(name) and not name.endswith("id")
        value = value if is_named else ""
    return any(not _appears(one.strip(), text) for one in _strings(value))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def _appears(part: str, text: str) -> bool:
    """Return whether the rendered text contains `part`, unchanged or with JSON's escapes."""
    return (
        part in text
        or json.dumps(part, ensure_ascii=False)[1:-1] in text
        or json.dumps(part)[1:-1] in text
    )


def _without_spaces(text: str) -> str:
    return "".join(text.split())

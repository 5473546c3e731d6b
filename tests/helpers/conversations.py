"""Random conversations for the chat templates that TRL ships, and the text that is trained on.

`judged` compares the encoded example of a conversation with its texts.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.trainer.examples import LOST_THOUGHTS, Encoder
from autotune.trainer.reading import BadDataset
from tests.helpers.tokenizers import byte_level, template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "w",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "c"}},
            },
        },
    }
]
REFUSED = re.compile(
    r"rows\.jsonl:7: .*(leaves out the t|refuses the example: |cannot be located|expects an object)"
)


def templates() -> list[str]:
    import trl

    return sorted(
        file.stem for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    )


def encoded(
    tokenizer: Any, chat_template: str | None, row: dict[str, Any]
) -> tuple[str, str, dict[str, int]]:
    """Return the text that is trained on, the text that is only read, and the notes."""
    tokenizer.chat_template = chat_template
    encoder = Encoder(tokenizer, None)
    (example,) = encoder.encode([("rows.jsonl:7", row)])
    runs: list[tuple[bool, list[int]]] = []
    for token in example:
        if not runs or runs[-1][0] is not (token >= 0):
            runs.append((token >= 0, []))
        runs[-1][1].append(token if token >= 0 else -1 - token)
    trained = "|".join(tokenizer.decode(tokens) for is_trained, tokens in runs if is_trained)
    read = "|".join(tokenizer.decode(tokens) for is_trained, tokens in runs if not is_trained)
    return trained, read, dict(encoder.notes)


def user(text: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


class Conversation:
    """A random conversation, with the texts to train on, to read, and of thoughts."""

    def __init__(self, chosen: random.Random) -> None:
        self.trained: list[str] = []
        self.read: list[str] = []
        self.thoughts: list[str] = []
        self.has_tools = chosen.random() < 0.3
        self._chosen, self._number = chosen, 0
        self.messages: list[dict[str, Any]] = []
        if chosen.random() < 0.3:
            self._add(chosen.choice(["system", "developer"]), self.read)
        for _ in range(chosen.randint(1, 3)):
            self._add(chosen.choice(["user", "user", "human", "User"]), self.read)
            if self.has_tools and chosen.random() < 0.5:
                calls = [call(self._text(self.trained)) for _ in range(chosen.randint(1, 2))]
                self.messages.append(assistant("", tool_calls=calls))
                for _ in calls:
                    self._add("tool", self.read)
            self._answer()

    def _text(self, where: list[str]) -> str:
        self._number += 1
        name = f"w{self._number:03}"
        text = name + self._chosen.choice(["", " <tag>", ' "said"', "\nline", " é日", "."])
        where.append(name)
        return text

    def _add(self, role: str, where: list[str]) -> None:
        text = self._text(where)
        parts = [{"type": "text", "text": text}]
        self.messages.append(
            user(parts if self._chosen.random() < 0.2 and role != "tool" else text, role)
        )

    def _answer(self) -> None:
        excluded = self._chosen.random() < 0.15
        message = assistant(self._text(self.read if excluded else self.trained))
        if excluded:
            message |= self._chosen.choice([{"train": False}, {"loss": False}, {"weight": 0}])
        elif self._chosen.random() < 0.3:
            message[self._chosen.choice(["reasoning_content", "thinking"])] = self._text(
                self.thoughts
            )
        self.messages.append(message)

    @property
    def row(self) -> dict[str, Any]:
        return {"messages": self.messages} | ({"tools": TOOLS} if self.has_tools else {})


def judged(number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Encode random conversations with one template after another, and yield each outcome.

    The outcome is `encoded`, `refused` or `fault`. A fault has its row and its reason.
    """
    chosen = random.Random(seed)
    tokenizer = byte_level()
    names = templates()
    for index in range(number):
        name = names[index % len(names)]
        made = Conversation(chosen)
        row: dict[str, Any] = {"template": name, "outcome": "encoded"}
        try:
            reason = fault_of(made, *encoded(tokenizer, template(name), made.row))
        except BadDataset as error:
            row["outcome"] = "refused"
            reason = "" if REFUSED.match(str(error)) else str(error)
        if reason:
            row |= {"outcome": "fault", "reason": reason, "row": made.row}
        yield row


def fault_of(made: Conversation, trained: str, read: str, notes: dict[str, int]) -> str:
    """Return the difference between a conversation and its encoded example, or no text."""
    if missing := [text for text in made.trained if text not in trained]:
        return f"not trained on: {missing}"
    if missing := [text for text in made.read if text not in read]:
        return f"lost: {missing}"
    if added := [text for text in made.read if text in trained]:
        return f"trained on: {added}"
    if LOST_THOUGHTS not in notes and (
        missing := [one for one in made.thoughts if one not in trained]
    ):
        return f"thoughts lost without a note: {missing}"
    return ""

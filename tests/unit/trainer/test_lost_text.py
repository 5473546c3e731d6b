"""No text of a conversation disappears silently, with any chat template that TRL ships."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from autotune.trainer.examples import LOST_THOUGHTS, LOST_TOOLS, NO_STOP, Encoder
from autotune.trainer.reading import BadDataset
from tests.helpers.tokenizers import CHATML, byte_level, template

pytest.importorskip("trl")
CONVERSATIONS = 200 * int(os.environ.get("AUTOTUNE_FUZZ", "1"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "w",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}},
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level()


def templates() -> list[str]:
    import trl

    return sorted(file.stem for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


def encoded(tokenizer: Any, chat_template: str, row: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
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


@pytest.mark.parametrize(
    ("messages", "trained", "read"),
    [
        ([user("q1", "human"), assistant("a1")], "a1", "q1"),
        ([user("q1", "User"), user("a1", "Assistant")], "a1", "q1"),
        ([user("q1"), user("a1", "model")], "a1", "q1"),
        ([user("q1"), user("a1", "chatgpt")], "a1", "q1"),
        ([user("s1", "developer"), user("q1"), assistant("a1")], "a1", "s1"),
        ([user([{"type": "text", "text": "q1"}]), assistant([{"type": "text", "text": "a1"}])], "a1", "q1"),
        ([user([{"type": "text", "text": "q"}, {"type": "text", "text": "1"}]), assistant("a1")], "a1", "q1"),
        ([user("q1"), assistant("a2", train=False), user("q2"), assistant("a1")], "a1", "a2"),
        ([user("q1"), assistant("a2", weight=0), user("q2"), assistant("a1", weight=1)], "a1", "a2"),
        ([user("q1"), assistant("a2", loss=False), user("q2"), assistant("a1", loss=True)], "a1", "a2"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "llama3", "phi3", "qwen3_training"])
def test_names_parts_and_flags_of_other_tools(
    tokenizer: Any, name: str, messages: list[dict[str, Any]], trained: str, read: str
) -> None:
    found, context, _ = encoded(tokenizer, template(name), {"messages": messages})
    assert trained in found and read in context and read not in found


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [user("q", "hummany"), assistant("a")]},
            "message 1 has the unknown role 'hummany', did you mean h",
        ),
        ({"messages": [user("q"), assistant("a", train=1.5)]}, "train of message 2 is 1.5: only true, false, 1 and 0"),
        ({"messages": [user("q", "user") | {"train": True}]}, "message 1 has train: true, and only the assistant's"),
        ({"messages": [user("q", "user") | {"loss": True}]}, "message 1 has loss: true, and only the assistant's"),
        (
            {"messages": [user("q"), assistant("a", thinking=["t"])]},
            "thinking of message 2 is ['t'], which is not text",
        ),
        ({"messages": [user("q"), assistant("a", train_detail=[])]}, "message 2 has train_detail"),
        (
            {"messages": [user([{"type": "video", "video": "v.mp4"}]), assistant("a")]},
            "message 1 has a part of type video",
        ),
        ({"messages": [user("q"), assistant("", tool_calls=[call("Paris")])]}, "leaves out the tool call in message 2"),
        (
            {"messages": [user("s", "system"), user("q"), assistant("a")], "system": "t"},
            "a system message and another text",
        ),
        ({"messages": [user("q"), assistant("a", tool_calls=[{}])]}, "a tool call of message 2 has no name"),
        ({"prompt": [user("q")], "completion": "a"}, "one of prompt and completion is text, and the other is messages"),
    ],
)
def test_text_that_would_be_lost_is_refused_by_line(tokenizer: Any, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadDataset, match=r"rows\.jsonl:7: .*") as refused:
        encoded(tokenizer, template("llama3"), row)
    assert reason in str(refused.value)


def test_a_system_column_goes_with_messages(tokenizer: Any) -> None:
    row = {"system": "s1", "messages": [user("q1"), assistant("a1")]}
    assert "s1" in encoded(tokenizer, CHATML, row)[1]
    same = {"system": "s1", "messages": [user("s1", "system"), user("q1"), assistant("a1")]}
    assert encoded(tokenizer, CHATML, same)[1].count("s1") == 1


def test_a_text_that_was_rendered_before_has_one_beginning() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level()
    start = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    rows = [{"text": "<s>one"}, {"text": "one"}, {"prompt": "<s>one", "completion": " two"}]
    for example in Encoder(tokenizer, None).encode([("rows.jsonl:1", row) for row in rows]):
        assert [token if token >= 0 else -1 - token for token in example].count(start) == 1


def test_an_answer_without_an_end_of_turn_is_noted(tokenizer: Any) -> None:
    row = {"messages": [user("q1"), assistant("a1")]}
    assert encoded(tokenizer, template("glm4moe"), row)[2] == {NO_STOP: 1}
    assert encoded(tokenizer, template("llama3"), row)[2] == {}


def test_thoughts_in_the_tags_of_a_template_are_noted(tokenizer: Any) -> None:
    """Qwen3 and Gemma 4 take the thoughts of earlier turns out of the content, by tags of their own."""
    later = [user("q2"), assistant("a2")]
    for name, thought in (("qwen3", "<think>t1</think>a1"), ("gemma4", "<|channel>thought\nt1<channel|>a1")):
        row = {"messages": [user("q1"), assistant(thought), *later]}
        trained, _, notes = encoded(tokenizer, template(name), row)
        assert "a1" in trained and "t1" not in trained and notes == {LOST_THOUGHTS: 1}


def test_tools_that_a_template_leaves_out_are_noted(tokenizer: Any) -> None:
    row = {"messages": [user("q1"), assistant("a1")], "tools": TOOLS}
    assert encoded(tokenizer, template("llama3"), row)[2] == {LOST_TOOLS: 1}
    assert encoded(tokenizer, template("qwen3"), row)[2] == {}


def test_thoughts_calls_and_results_of_gpt_oss_are_read(tokenizer: Any) -> None:
    messages = [
        user("q1"),
        assistant("", tool_calls=[call("Paris")], thinking="t1"),
        user("r1", "tool"),
        assistant("", tool_calls=[call("Rome")], reasoning_content="t2"),
        user("r2", "tool"),
        assistant("a1", thinking="t3"),
    ]
    trained, read, notes = encoded(tokenizer, template("gptoss"), {"messages": messages, "tools": TOOLS})
    assert all(text in trained for text in ("Paris", "Rome", "t3", "a1"))
    assert all(text in read for text in ("q1", "r1", "r2")) and "r1" not in trained
    assert all(text in trained + read for text in ("t1", "t2")) or LOST_THOUGHTS in notes


# --- any conversation, with any template


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
                city = self._text(self.trained)
                self.messages.append(assistant("", tool_calls=[call(city)]))
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
        self.messages.append(user(parts if self._chosen.random() < 0.2 and role != "tool" else text, role))

    def _answer(self) -> None:
        excluded = self._chosen.random() < 0.15
        message = assistant(self._text(self.read if excluded else self.trained))
        if excluded:
            message |= self._chosen.choice([{"train": False}, {"loss": False}, {"weight": 0}])
        elif self._chosen.random() < 0.3:
            message[self._chosen.choice(["reasoning_content", "thinking"])] = self._text(self.thoughts)
        self.messages.append(message)

    @property
    def row(self) -> dict[str, Any]:
        return {"messages": self.messages} | ({"tools": TOOLS} if self.has_tools else {})


REFUSED = r"^rows\.jsonl:7: .*(leaves out the t|refuses it: |cannot be located)"


def test_each_text_is_trained_on_read_or_reported(tokenizer: Any) -> None:
    chosen, names = random.Random(0), templates()
    num_encoded = 0
    for number in range(CONVERSATIONS):
        name = names[number % len(names)]
        made = Conversation(chosen)
        try:
            trained, read, notes = encoded(tokenizer, template(name), made.row)
        except BadDataset as error:
            refusal = str(error)
        else:
            refusal = ""
            num_encoded += 1
            case = (name, made.row, trained)
            assert all(text in trained for text in made.trained), case
            assert all(text in read and text not in trained for text in made.read), case
            assert all(text in trained or LOST_THOUGHTS in notes for text in made.thoughts), case
        assert not refusal or re.search(REFUSED, refusal), refusal
    assert num_encoded > CONVERSATIONS / 3

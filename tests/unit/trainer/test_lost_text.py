"""No text of a conversation disappears silently, with any chat template that TRL ships."""

import os
import random
from typing import Any

import pytest

from autotune.trainer.examples import (
    EMPTY,
    LOST_THOUGHTS,
    LOST_TOOLS,
    NO_STOP,
    UNREAD,
    Encoder,
)
from autotune.trainer.reading import BadDataset
from tests.helpers.conversations import (
    TOOLS,
    Conversation,
    assistant,
    call,
    encoded,
    fault_of,
    judged,
    user,
)
from tests.helpers.tokenizers import CHATML, byte_level, template

pytest.importorskip("trl")
CONVERSATIONS = 200 * int(os.environ.get("AUTOTUNE_FUZZ", "1"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level()


@pytest.mark.parametrize(
    ("messages", "trained", "read"),
    [
        ([user("q1", "human"), assistant("a1")], "a1", "q1"),
        ([user("q1", "User"), user("a1", "Assistant")], "a1", "q1"),
        ([user("q1"), user("a1", "model")], "a1", "q1"),
        ([user("q1"), user("a1", "chatgpt")], "a1", "q1"),
        ([user("s1", "developer"), user("q1"), assistant("a1")], "a1", "s1"),
        (
            [user([{"type": "text", "text": "q1"}]), assistant([{"type": "text", "text": "a1"}])],
            "a1",
            "q1",
        ),
        (
            [user([{"type": "text", "text": "q"}, {"type": "text", "text": "1"}]), assistant("a1")],
            "a1",
            "q1",
        ),
        ([user("q1"), assistant("a2", train=False), user("q2"), assistant("a1")], "a1", "a2"),
        (
            [user("q1"), assistant("a2", weight=0), user("q2"), assistant("a1", weight=1)],
            "a1",
            "a2",
        ),
        (
            [user("q1"), assistant("a2", loss=False), user("q2"), assistant("a1", loss=True)],
            "a1",
            "a2",
        ),
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
        (
            {"messages": [user("q"), assistant("a", train=1.5)]},
            "train of message 2 is 1.5: only true, false, 1 and 0",
        ),
        (
            {"messages": [user("q", "user") | {"train": True}]},
            "message 1 has train: true, but only the assistant's",
        ),
        (
            {"messages": [user("q", "user") | {"loss": True}]},
            "message 1 has loss: true, but only the assistant's",
        ),
        (
            {"messages": [user("q"), assistant("a", thinking=["t"])]},
            "thinking of message 2 is ['t'], which is not text",
        ),
        ({"messages": [user("q"), assistant("a", train_detail=[])]}, "message 2 has train_detail"),
        (
            {"messages": [user([{"type": "video", "video": "v.mp4"}]), assistant("a")]},
            "message 1 has a part of type video",
        ),
        (
            {"messages": [user("q"), assistant("", tool_calls=[call("Paris")])]},
            "leaves out the tool call in message 2",
        ),
        (
            {"messages": [user("s", "system"), user("q"), assistant("a")], "system": "t"},
            "a system message, and a different text",
        ),
        (
            {"messages": [user("q"), assistant("a", masked=True)]},
            "message 2 has the unknown flag masked: loss, train, training and weight are known",
        ),
        ({"messages": [user("q"), assistant("a", loss_mask=0)]}, "the unknown flag loss_mask"),
        (
            {"messages": [user("q") | {"value": "r"}, assistant("a")]},
            "message 1 has different texts in content and value: keep one",
        ),
        (
            {
                "messages": [
                    user("q"),
                    assistant("a", tool_calls=[{"name": "f", "input": {"a": 1}}]),
                ]
            },
            "a tool call of message 2 has input and no arguments: rename input to arguments",
        ),
        (
            {"messages": [user("q"), assistant("", function_call={"name": "f", "args": "{}"})]},
            "a tool call of message 2 has args and no arguments",
        ),
        (
            {"messages": [user("q"), assistant([{"type": "thinking", "thinking": "t"}])]},
            'a part of type thinking: only parts with the key "text" are read here',
        ),
        (
            {"messages": [user("q"), assistant("a", tool_calls=[{}])]},
            "a tool call of message 2 has no name",
        ),
        (
            {"prompt": [user("q")], "completion": "a"},
            "one of prompt and completion is text, and the other is messages",
        ),
    ],
)
def test_text_that_would_be_lost_is_refused_by_line(
    tokenizer: Any, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadDataset, match=r"rows\.jsonl:7: .*") as refused:
        encoded(tokenizer, template("llama3"), row)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("chat_template", "row", "reason"),
    [
        (
            None,
            {"messages": [user("q"), assistant("a")]},
            "the tokenizer has no chat template, which messages need: use",
        ),
        (
            template("gptoss"),
            {"messages": [user("q"), assistant("a")], "tools": [{"function": {"name": "f"}}]},
            "a message or a tool lacks 'description', which the tokenizer's chat template needs",
        ),
        (
            template("llava_next_training"),
            {"messages": [user("q"), assistant("a")]},
            "expects an object with 'text' and finds",
        ),
        (
            "{{ raise_exception('no') }}",
            {"messages": [user("q"), assistant("a")]},
            "chat template refuses the example: no",
        ),
        (
            "{{ 'a' + 1 }}",
            {"messages": [user("q"), assistant("a")]},
            "a call or a tool has another type than the templ",
        ),
    ],
)
def test_errors_of_templates_are_said_in_words(
    tokenizer: Any, chat_template: str | None, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadDataset, match=r"rows\.jsonl:7: ") as refused:
        encoded(tokenizer, chat_template, row)
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
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    rows = [{"text": "<s>one"}, {"text": "one"}, {"prompt": "<s>one", "completion": " two"}]
    for example in Encoder(tokenizer, None).encode([("rows.jsonl:1", row) for row in rows]):
        assert [token if token >= 0 else -1 - token for token in example].count(start) == 1


def test_an_answer_without_an_end_of_turn_is_noted(tokenizer: Any) -> None:
    row = {"messages": [user("q1"), assistant("a1")]}
    assert encoded(tokenizer, template("glm4moe"), row)[2] == {NO_STOP: 1}
    assert encoded(tokenizer, template("llama3"), row)[2] == {}


def test_thoughts_in_the_tags_of_a_template_are_noted(tokenizer: Any) -> None:
    """Qwen3 and Gemma 4 take the thoughts of earlier turns out of the content, by tags of their
    own.
    """
    later = [user("q2"), assistant("a2")]
    for name, thought in (
        ("qwen3", "<think>t1</think>a1"),
        ("gemma4", "<|channel>thought\nt1<channel|>a1"),
    ):
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
    trained, read, notes = encoded(
        tokenizer, template("gptoss"), {"messages": messages, "tools": TOOLS}
    )
    assert all(text in trained for text in ("Paris", "Rome", "t3", "a1"))
    assert all(text in read for text in ("q1", "r1", "r2")) and "r1" not in trained
    assert all(text in trained + read for text in ("t1", "t2")) or LOST_THOUGHTS in notes


def test_each_text_is_trained_on_read_or_reported() -> None:
    """Any conversation, with any template. `benchmarks/robustness.py lost` tries 5,000."""
    rows = list(judged(CONVERSATIONS, seed=0))
    assert [row for row in rows if row["outcome"] == "fault"] == []
    assert sum(row["outcome"] == "encoded" for row in rows) > CONVERSATIONS / 3


def test_a_lost_text_is_a_fault() -> None:
    made = Conversation(random.Random(0))
    text = " ".join(made.trained)
    assert fault_of(made, text, " ".join(made.read), {LOST_THOUGHTS: 1}) == ""
    assert fault_of(made, "", " ".join(made.read), {LOST_THOUGHTS: 1}).startswith(
        "not trained on: "
    )
    assert fault_of(made, text, "", {LOST_THOUGHTS: 1}).startswith("lost: ")
    assert fault_of(made, text + made.read[0], " ".join(made.read), {LOST_THOUGHTS: 1}).startswith(
        "trained on: "
    )


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        (
            {"messages": [user("q"), assistant("a")], "system_prompt": "brief"},
            "the column system_prompt",
        ),
        ({"messages": [user("q"), assistant("a")], "functions": TOOLS}, "the column functions"),
        ({"messages": [user("q"), assistant("a")], "videos": ["v.mp4"]}, "the column videos"),
        ({"messages": [user("q"), assistant("a")], "prompt": "another one"}, "the column prompt"),
        ({"instruction": "q", "output": "a", "context": "some text"}, "the column context"),
        ({"prompt": "q", "completion": "a", "passage": "some text"}, "the column passage"),
        ({"text": "a b", "title": "\u65e5\u672c"}, "the column title"),
        ({"messages": [user("q"), assistant("a", thought="hm")]}, "the key thought of messages"),
        ({"messages": [user("q"), assistant("a", notes="t u")]}, "the key notes of messages"),
    ],
)
def test_a_text_that_nothing_reads_is_noted(
    tokenizer: Any, row: dict[str, Any], unread: str
) -> None:
    assert encoded(tokenizer, template("llama3"), row)[2] == {UNREAD.format(unread): 1}


@pytest.mark.parametrize(
    "beside",
    [
        {"id": "7f3a", "source": "orca", "score": 0.5, "prompt_id": "x", "embedding": [0.1]},
        {"prompt": "a long question"},  # as UltraChat repeats the first message
        {"system": None, "videos": []},
    ],
)
def test_names_and_repeated_texts_are_not_noted(tokenizer: Any, beside: dict[str, Any]) -> None:
    row = {"messages": [user("a long question"), assistant("a", id="3")], **beside}
    assert encoded(tokenizer, template("llama3"), row)[2] == {}


def test_random_names_of_columns_make_few_notes(tokenizer: Any) -> None:
    tokenizer.chat_template = template("llama3")
    encoder = Encoder(tokenizer, None)
    row = {"text": "a", **{f"column {number}": "b c" for number in range(100)}}
    list(encoder.encode([("rows.jsonl:1", row)]))
    assert len(encoder.describe_notes(1)) == 20


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("q"), assistant(" ")]},
        {"messages": [user("q"), assistant(""), user("q"), assistant("a")]},
        {"prompt": "q", "completion": "\n"},
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_training"])
def test_an_empty_answer_is_noted(tokenizer: Any, name: str, row: dict[str, Any]) -> None:
    assert encoded(tokenizer, template(name), row)[2] == {EMPTY: 1}


def test_strings_are_parts_of_text(tokenizer: Any) -> None:
    row = {"messages": [user(["q", "1"]), assistant("a1")]}
    assert "q1" in encoded(tokenizer, template("qwen3"), row)[1]

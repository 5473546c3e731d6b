"""What is trained on, token by token, in each form of row and with real chat templates."""

from collections.abc import Iterator
from typing import Any

import pytest

from autotune.trainer import examples
from autotune.trainer.examples import Encoder, _common_length
from autotune.trainer.forms import ALPACA, Chat, Plain, parse, parse_row, serialize_arguments
from autotune.trainer.reading import BadDataset, Located
from tests.helpers.tokenizers import CHATML, byte_level, template

TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "w", "parameters": {}}}
]
WITH_TOOLS = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "12"},
    TURNS[1],
]
TWO_TURNS = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[two<|im_end|>\n]"
TWO_TURNS += "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>\n]"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level()


def shown(
    tokenizer: Any,
    row: dict[str, Any],
    loss_on: str | None = None,
    chat_template: str | None = CHATML,
) -> str:
    """The text of a row, with brackets around what is trained on."""
    tokenizer.chat_template = chat_template
    (example,) = Encoder(tokenizer, loss_on).encode([("rows.jsonl:7", row)])
    text, runs = "", []
    for token in example:
        if not runs or runs[-1][0] is not (token >= 0):
            runs.append((token >= 0, []))
        runs[-1][1].append(token if token >= 0 else -1 - token)
    for is_trained, tokens in runs:
        part = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        text += f"[{part}]" if is_trained else part
    return text


PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_text_is_given_in_parts_to_a_template_that_reads_only_parts(tokenizer: Any) -> None:
    """As the templates of SmolVLM and Idefics 3, which leave out messages that are strings."""
    row = {"messages": TURNS}
    assert shown(tokenizer, row, "assistant", PARTS_ONLY) == shown(
        tokenizer, row, "assistant", CHATML
    )


def test_a_row_cannot_replace_the_chat_template(tokenizer: Any) -> None:
    """Variables of the template stay. TRL passes on the tokenizer's arguments too."""
    tokenizer.chat_template = CHATML + "{{ tail }}"
    options = {
        "chat_template": "{% for i in range(10**5) %}{% endfor %}",
        "tokenize": True,
        "tail": "END",
    }
    encoder = Encoder(tokenizer, "all")
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS[:2], "chat_template_kwargs": options}]
    plain, changed = encoder.encode([(f"a:{number}", row) for number, row in enumerate(rows)])
    assert tokenizer.decode(changed) == tokenizer.decode(plain) + "END"
    assert encoder.describe_notes(2) == [f"{examples.DROPPED} (1 of 2 examples)"]


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_a_template_without_an_end_is_stopped(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, loss_on: str
) -> None:
    monkeypatch.setattr(examples, "RENDER_S", 0.1)
    loop = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    tokenizer.chat_template = CHATML + loop
    row = ("a:1", {"messages": TURNS})
    with pytest.raises(
        BadDataset,
        match=r"^a:1: the tokenizer's chat template refuses the example: it takes .* 0\.1 s$",
    ):
        list(Encoder(tokenizer, loss_on).encode([row]))
    tokenizer.chat_template = CHATML
    assert list(Encoder(tokenizer, loss_on).encode([row]))


def test_long_rows_are_tokenised_a_few_at_a_time(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "BATCH_BYTES", 1000)
    read: list[int] = []

    def rows() -> Iterator[Located]:
        for number in range(6):
            read.append(number)
            yield f"a:{number}", {"text": "x" * 300}

    encoded = Encoder(tokenizer, None).encode(rows())
    assert next(encoded) and read == [0, 1, 2]
    assert len(list(encoded)) == 5


ONE_TURN = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[two<|im_end|>\n]"
FORMS = [
    ({"text": "one two"}, "[one two</s>]"),
    ({"text": "one two</s>"}, "[one two</s>]"),
    ({"prompt": "one", "completion": " two"}, "one[ two</s>]"),
    ({"prompt": "one", "completion": " two", "text": "other", "messages": None}, "one[ two</s>]"),
    ({"prompt": TURNS[:1], "completion": TURNS[1:2]}, ONE_TURN),
    ({"messages": TURNS}, TWO_TURNS),
    (
        {
            "messages": '[{"role": "user", "content": "one"}, {"role": "assistant", "content":'
            ' "two"}]'
        },
        ONE_TURN,
    ),
    (
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        ONE_TURN,
    ),
    (
        {
            "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}],
            "system": "s",
        },
        "<|im_start|>system\ns<|im_end|>\n" + ONE_TURN,
    ),
    ({"instruction": "one", "output": "two", "text": "other"}, ONE_TURN),
    ({"instruction": "one", "input": "", "output": "two"}, ONE_TURN),
    (
        {"instruction": "one", "input": "more", "output": "two"},
        ONE_TURN.replace("one", "one\nmore"),
    ),
    (
        {"instruction": "three", "output": "four", "history": [["one", "two"]]},
        TWO_TURNS.replace("[two<|im_end|>\n]", "two<|im_end|>\n"),
    ),
]


@pytest.mark.parametrize(("row", "expected"), FORMS)
def test_what_is_trained_on_in_each_form(
    tokenizer: Any, row: dict[str, Any], expected: str
) -> None:
    assert shown(tokenizer, row) == expected
    everything = expected.replace("[", "").replace("]", "")
    assert shown(tokenizer, row, "all") == f"[{everything}]"


def test_alpaca_has_its_own_prompt_without_a_chat_template(tokenizer: Any) -> None:
    row = {"instruction": "one", "input": "three", "output": "two"}
    start = ALPACA.format(given=", paired with an input that provides further context")
    expected = f"{start}\n\n### Instruction:\none\n\n### Input:\nthree\n\n### Response:\n[two</s>]"
    for none in (None, ""):
        assert shown(tokenizer, row, chat_template=none) == expected


def test_the_loss_is_where_the_user_wants_it(tokenizer: Any) -> None:
    masked_first = TWO_TURNS.replace("[two<|im_end|>\n]", "two<|im_end|>\n")
    assert shown(tokenizer, {"messages": TURNS}, "assistant") == TWO_TURNS
    assert shown(tokenizer, {"messages": TURNS}, "completion") == masked_first
    both = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert shown(tokenizer, both) == shown(tokenizer, both, "completion") == masked_first
    assert shown(tokenizer, both, "assistant") == TWO_TURNS
    assert shown(tokenizer, {"prompt": "one", "completion": " two"}, "assistant") == "one[ two</s>]"


def test_a_token_that_reaches_into_the_answer_is_trained_on(tokenizer: Any) -> None:
    """As in TRL, where the completion begins at the first token that differs from the prompt's."""
    assert "[ the" in shown(tokenizer, {"prompt": "one ", "completion": "the"})


LLAMA = (
    "<s><|start_header_id|>user<|end_header_id|>\n\n"
    "one<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
LLAMA += "[two<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\nthree<|eot_id|>"
LLAMA += "<|start_header_id|>assistant<|end_header_id|>\n\n[four<|eot_id|>]"
GEMMA = "<s><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\n[two<end_of_turn>\n]"
GEMMA += "<start_of_turn>user\nthree<end_of_turn>\n<start_of_turn>model\n[four<end_of_turn>\n]"
# Its rendering ends with the end of the text, which no turn before the last has.
PHI = (
    "<|user|>\none<|end|>\n<|assistant|>\n[two<|end|>\n]<|user|>\nthree<|end|>\n<|assistant|>\n"
    "[four<|end|>\n</s>]"
)
# An empty thought stands before the last answer only; the prompt does not have it.
QWEN3 = TWO_TURNS.replace("[four", "[<think>\n\n</think>\n\nfour")
# Mistral's first template: no generation prompt.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '"
    " [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# As Mistral's later ones: tools, or here a note, stand before the last question only, wherever that
# is.
LAST_QUESTION = MISTRAL.replace(
    "{{ '[INST] '",
    "{% if m == (messages|selectattr('role', 'equalto', 'user')|list)[-1] %}note {% endif %}{{"
    " '[INST] '",
)


@pytest.mark.parametrize(
    ("chat_template", "expected"),
    [
        ("llama3", LLAMA),
        ("gemma", GEMMA),
        ("phi3", PHI),
        ("qwen3", QWEN3),
        (MISTRAL, "<s>[INST] one [/INST][ two</s>][INST] three [/INST][ four</s>]"),
        (LAST_QUESTION, "<s>[INST] one [/INST][ two</s>]note [INST] three [/INST][ four</s>]"),
    ],
    ids=["llama3", "gemma", "phi3", "qwen3", "mistral", "last question"],
)
def test_answers_are_found_in_real_templates(
    tokenizer: Any, chat_template: str, expected: str
) -> None:
    if "{" not in chat_template:
        pytest.importorskip("trl")
        chat_template = template(chat_template)
    assert shown(tokenizer, {"messages": TURNS}, chat_template=chat_template) == expected


def test_a_template_that_marks_answers_is_believed(tokenizer: Any) -> None:
    marked = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content"
        " }}{% endgeneration %}"
    )
    marked += "{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    assert (
        shown(tokenizer, {"messages": TURNS}, chat_template=marked) == "one[two]</s>three[four]</s>"
    )


@pytest.mark.parametrize(
    "rows",
    [
        {"messages": WITH_TOOLS, "tools": TOOLS},
        {
            "messages": [
                TURNS[0],
                WITH_TOOLS[1] | {"tool_calls": [CALL["function"]]},
                *WITH_TOOLS[2:],
            ],
            "tools": TOOLS,
        },
        {
            "messages": [
                TURNS[0],
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
                    ],
                },
                *WITH_TOOLS[2:],
            ],
            "tools": '[{"type": "function", "function": {"name": "weather", "description": "w",'
            ' "parameters": {}}}]',
        },
        {
            "conversations": [
                {"from": "human", "value": "one"},
                {
                    "from": "function_call",
                    "value": '{"name": "weather", "arguments": {"city": "Paris"}}',
                },
                {"from": "observation", "value": "12"},
                {"from": "gpt", "value": "two"},
            ],
            "tools": TOOLS,
        },
    ],
)
def test_tool_calls_are_answers_and_what_tools_say_is_not(
    tokenizer: Any, rows: dict[str, Any]
) -> None:
    pytest.importorskip("trl")
    found = shown(tokenizer, rows, chat_template=template("qwen2_5"))
    call = (
        '[<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call><|im_end|>\n]"
    )
    said = (
        "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[two<|im_end|>\n]"
    )
    assert '"name": "weather", "description": "w"' in found.partition("[")[0]
    assert found.endswith(f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{call}{said}")


def test_arguments_are_text_where_a_template_needs_that(tokenizer: Any) -> None:
    adds = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}"
    adds += "{{ 'call ' + c.function.arguments + c.function.name }}"
    adds += "{% endfor %}{{ m.content }}{% endfor %}"
    assert 'call {"city": "Paris"}' in shown(tokenizer, {"messages": WITH_TOOLS}, "all", adds)


@pytest.mark.parametrize(
    ("row", "loss_on", "message"),
    [
        ({"words": "a"}, None, "rows.jsonl:7: an example needs messages, .*its columns: words"),
        ({"text": None}, None, "its columns: text"),
        ({"prompt": "a"}, None, "its columns: prompt"),
        ({"text": 3}, None, "text is 3, which is not text"),
        ({"messages": "a"}, None, "rows.jsonl:7: messages is 'a', which is not JSON"),
        ({"messages": []}, None, "there are no messages in messages"),
        ({"messages": {}}, None, "messages is {}, which is not a list"),
        ({"messages": "[" * 100_000}, None, "rows.jsonl:7: its values are nested too deeply"),
        ({"messages": [{"role": "user"}]}, None, "message 1 has no content; its keys: role"),
        ({"messages": [{"content": "a"}]}, None, "message 1 has no role; its keys: content"),
        ({"messages": ["a"]}, None, "message 1 is 'a', which is not an object"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            None,
            "the content of message 1 is 3, which is not text",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "a"}]},
            None,
            "the call in message 1 is 'a', .*not JSON",
        ),
        ({"messages": TURNS[:1], "tools": "a"}, None, "tools is 'a', which is not JSON"),
        (
            {"messages": TURNS[:1], "chat_template_kwargs": []},
            None,
            r"chat_template_kwargs is \[\], .*not an object",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["c"]]},
            None,
            "history has .* not a question and its answer",
        ),
        (
            {"prompt": "a", "completion": "b", "system": "c"},
            None,
            "its column system needs messages",
        ),
        ({"text": "\ud83d"}, None, "half of a surrogate pair"),
        ({"text": "a"}, "completion", "plain text has no completion"),
        ({"messages": TURNS[:3]}, "completion", "last message is not the assistant's"),
    ],
)
def test_a_bad_row_is_named(
    tokenizer: Any, row: dict[str, Any], loss_on: str | None, message: str
) -> None:
    with pytest.raises(BadDataset, match=message):
        shown(tokenizer, row, loss_on)


def test_a_template_that_refuses_names_the_row(tokenizer: Any) -> None:
    with pytest.raises(BadDataset, match=r"rows\.jsonl:7: .*roles must alternate"):
        shown(
            tokenizer,
            {"messages": TURNS},
            chat_template="{{ raise_exception('roles must alternate') }}",
        )
    with pytest.raises(BadDataset, match=r"rows\.jsonl:7: "):
        shown(tokenizer, {"messages": TURNS}, chat_template=None)


def test_a_tokenizer_that_cannot_place_its_tokens_learns_everything_or_nothing(
    tokenizer: Any,
) -> None:
    class Slow:
        """What the encoder asks a tokenizer, without the places of the tokens in the text."""

        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer(*args, **kwargs)

    row = {"prompt": "one", "completion": " two"}
    with pytest.raises(BadDataset, match="only loss_on all is possible"):
        shown(Slow(), row)
    assert shown(Slow(), row, "all") == "[one two</s>]"


class Asked:
    """A tokenizer that notes how it is asked."""

    is_fast = True
    chat_template = "{% generation %}"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, texts: list[str], **how: Any) -> dict[str, Any]:
        self.asked.append(how)
        return {"input_ids": [[1]] * len(texts), "offset_mapping": [[(0, 9)]] * len(texts)}

    def apply_chat_template(self, messages: list[dict[str, Any]], **how: Any) -> Any:
        if how.get("tokenize") is False:
            return str(messages)
        self.asked.append(how)
        return {"input_ids": [4, 5], "assistant_masks": [0, 1]}


def test_a_chat_template_writes_its_own_special_tokens() -> None:
    made = Asked()
    encoder = Encoder(made, None)
    assert list(encoder._tokenise([(7, "text", None)], is_chat=True)) == [(7, [1])]
    assert list(encoder._tokenise([(8, "text", [(0, 9)])], is_chat=False)) == [(8, [1])]
    assert made.asked == [
        {"add_special_tokens": False, "return_offsets_mapping": False},
        {"add_special_tokens": True, "return_offsets_mapping": True},
    ]


def test_a_template_that_marks_answers_gets_the_tools_too() -> None:
    made = Asked()
    row = {"messages": TURNS, "tools": TOOLS, "chat_template_kwargs": {"thinking": False}}
    assert list(Encoder(made, None).encode([("rows.jsonl:1", row)])) == [[-5, 5]]
    marks = {"return_dict": True, "return_assistant_tokens_mask": True}
    assert made.asked == [{"tools": TOOLS, "thinking": False} | marks]


def test_a_conversation_is_what_a_row_is_taken_for() -> None:
    row = {"instruction": "one", "output": "two"}
    chat = Chat(messages=TURNS[:2], completion=1)
    assert parse(row) == parse_row("rows.jsonl:1", row) == chat
    assert isinstance(parse(row, has_template=False), Plain)
    for alone in ({"instruction": "one", "text": "three"}, {"output": "two", "text": "three"}):
        assert parse(alone) == Plain(completion="three")


def test_a_message_without_calls_says_nothing_of_them() -> None:
    found = parse({"messages": [{"role": "gpt", "content": "one", "tool_calls": []}]})
    assert found == Chat(messages=[{"role": "assistant", "content": "one"}])


def test_arguments_of_a_call_are_text_that_a_person_reads() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
    made = serialize_arguments({"role": "assistant", "tool_calls": [call, {"name": "plain"}]})
    assert made["tool_calls"] == [
        {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
        {"name": "plain", "arguments": "{}"},
    ]
    assert serialize_arguments({"role": "user", "content": "one"}) == {
        "role": "user",
        "content": "one",
    }


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [("", "", 0), ("ab", "abc", 2), ("abc", "ab", 2), ("abx", "aby", 2), ("x", "y", 0)],
)
def test_how_far_two_texts_are_alike(left: str, right: str, alike: int) -> None:
    assert _common_length(left, right) == alike


def test_a_conversation_may_begin_with_an_answer(tokenizer: Any) -> None:
    expected = "<|im_start|>assistant\n[two<|im_end|>\n]" + ONE_TURN.replace(
        "one", "three"
    ).replace("two", "four")
    assert shown(tokenizer, {"messages": TURNS[1:]}, "assistant") == expected


@pytest.mark.parametrize("content", ["", "{{ loop.length }}"])
def test_a_template_that_shows_no_text_is_refused(tokenizer: Any, content: str) -> None:
    silent = "{% for m in messages %}{{ m.role }}" + content + "{% endfor %}"
    with pytest.raises(BadDataset, match="leaves out the text of message 1 of role user"):
        shown(tokenizer, {"messages": TURNS}, "assistant", silent)

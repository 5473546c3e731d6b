# -*- coding: utf-8 -*-
"""Parses the rows of a dataset into plain texts and conversations.

A row has messages, a prompt and its completion, an instruction and its output (Alpaca), a
conversation (ShareGPT), or text. Any error in a row raises ValueError, with a message that names
the wrong value and the expected form.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .reading import BadDataset

COLUMNS = (
    "messages",
    "conversations",
    "system",
    "tools",
    "chat_template_kwargs",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "text",
)
CHATS = ("messages", "conversations")  # columns that hold a conversation
# Columns that a row with messages may have besides its messages
SIDE_COLUMNS = ("system", "tools", "chat_template_kwargs")
PROMPT_COLUMNS = ("instruction", "input", "history")  # the columns of Alpaca's prompt
FORMS = "messages, conversations, prompt and completion, instruction and output, or text"
PLACEHOLDER = "<image>"  # LLaMA-Factory's marker for an image in a text

# Each role in a dataset, and its name in chat templates ("" if the name is the same).
ROLES = {
    **dict.fromkeys(("system", "user", "assistant", "tool", "developer"), ""),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", "bing", "bard"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function", "ipython"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")  # roles of messages whose content is a tool call
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of a message that hold a thought
# A message with one of these keys and the value false or 0 is excluded from the training.
FLAGS = ("loss", "train", "training", "weight")
# Matches the names of such flags in other tools
FLAG_NAME = re.compile("mask|train|loss|weight|learn")
# Keys that a tool call without arguments may have.
CALL_KEYS = ("name", "id", "type", "index", "description")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *THOUGHTS, *FLAGS)

# Stanford Alpaca's own prompts, for tokenizers without a chat template
ALPACA = (
    "Below is an instruction that describes a task{given}."
    " Write a response that appropriately completes the request."
)
ALPACA_GIVEN = ", paired with an input that provides further context"

Message = dict[str, Any]
# A function that gets a text's kind and the text, and returns the new text.
Change = Callable[[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Text to train on, after an optional prompt. `unread` has the row's unused columns."""

    prompt: str | None = None
    completion: str
    unread: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages for the tokenizer's chat template.

    `completion` is the index of the first message of the answer; earlier messages are the prompt.
    `unread` has the row's columns that are not used.
    """

    messages: list[Message]
    completion: int | None = None
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, Any] = field(default_factory=dict, compare=False)


def parse_row(where: str, row: dict[str, Any], *, has_template: bool = True) -> Plain | Chat:
    """Parse a row. Raises BadDataset with the row's location if the row is not an example."""
    try:
        return parse(row, has_template=has_template)
    except ValueError as error:
        raise BadDataset(f"{where}: {error}") from None
    except RecursionError:
        raise BadDataset(f"{where}: its values are nested too deeply") from None


def parse(row: dict[str, Any], *, has_template: bool = True) -> Plain | Chat:
    """Parse a row. Columns that are null count as missing.

    Raises ValueError for a row of unknown form, and RecursionError for values that are nested too
    deeply.
    """
    columns: dict[str, Any] = _drop_nulls(row)
    parsed = _parse_columns(columns, has_template=has_template)
    if parsed is None:
        raise ValueError(
            f"an example needs {FORMS}; its columns: {', '.join(map(str, row)) or 'none'}"
        )
    form, read = parsed
    unread = {name: value for name, value in columns.items() if name not in read}
    return replace(form, unread=unread)


def _parse_columns(
    columns: dict[str, Any], *, has_template: bool
) -> tuple[Plain | Chat, tuple[str, ...]] | None:
    """Return the form of a row and the columns of this form, or None if the form is unknown."""
    beside = {
        "tools": _parse_tools(columns.get("tools")),
        "options": _check(dict, columns.get("chat_template_kwargs", {}), "chat_template_kwargs"),
    }

    for name in CHATS:
        if name in columns:
            messages = _with_system(columns, _parse_messages(columns[name], name))
            return Chat(messages=messages, **beside), (name, *SIDE_COLUMNS)
    if "prompt" in columns and "completion" in columns:
        return _parse_prompt(columns, beside), ("prompt", "completion", *SIDE_COLUMNS)
    if "instruction" in columns and "output" in columns:
        return _parse_alpaca(columns, has_template=has_template), (
            *PROMPT_COLUMNS,
            "output",
            "system",
        )
    if "text" in columns:
        return Plain(completion=_check(str, columns["text"], "text")), ("text",)
    return None


def _drop_nulls(value: Any) -> Any:
    """Return `value` without the keys whose value is null.

    Columnar formats such as Parquet give every row all keys, with null for missing values.
    """
    if isinstance(value, dict):
        return {key: _drop_nulls(one) for key, one in value.items() if one is not None}
    return [_drop_nulls(one) for one in value] if isinstance(value, list) else value


NAMES: dict[type, str] = {str: "text", list: "a list", dict: "an object"}


def _check(kind: type, value: Any, name: str) -> Any:
    """Return the value if its type is `kind`.

    Otherwise raise ValueError with a message that begins with `name`.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.40}, which is not {NAMES[kind]}")
    return value


def _parse_json(value: Any, name: str) -> Any:
    """Parse JSON text. A value that is not text is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r:.40}, which is not JSON ({error})") from None


def _parse_tools(given: Any) -> list[Any] | None:
    tools = _check(list, _parse_json(given or [], "tools"), "tools")
    return [_check(dict, _parse_json(one, "a tool"), "a tool") for one in tools] or None


def _parse_messages(given: Any, name: str) -> list[Message]:
    messages = _check(list, _parse_json(given, name), name)
    if not messages:
        raise ValueError(f"there are no messages in {name}")
    return [_parse_message(one, number) for number, one in enumerate(messages, 1)]


def _parse_message(given: Any, number: int) -> Message:
    """Return a message with the role names and keys that chat templates use."""
    name = f"message {number}"
    message = dict(_check(dict, given, name))
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message:
            if theirs == "value" and message.get(ours, message[theirs]) != message[theirs]:
                raise ValueError(f"{name} has different texts in content and value: keep one")
            message[ours] = message.pop(theirs)
    if "role" not in message:
        raise ValueError(f"{name} has no role; its keys: {', '.join(map(str, given)) or 'none'}")

    role = _check(str, message["role"], f"the role of {name}").strip()
    known = role.lower()
    if known in CALL_ROLES:
        calls = _parse_json(message.pop("content", None), f"the call in {name}")
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    message["role"] = ROLES[known] or known if known in ROLES else role
    if "function_call" in message:  # an older form of `tool_calls`, with a single call
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    _check_flags(message, name)

    if calls := message.pop("tool_calls", None):
        calls = _check(list, _parse_json(calls, f"tool_calls of {name}"), f"tool_calls of {name}")
        message["tool_calls"] = [_parse_call(call, name) for call in calls]
    elif "content" not in message and not any(message.get(key) for key in THOUGHTS):
        raise ValueError(f"{name} has no content; its keys: {', '.join(map(str, given))}")
    for key in THOUGHTS:
        _check(str, message.get(key, ""), f"{key} of {name}")
    # Some templates do not render a message without the key `content`.
    content = message.setdefault("content", "")
    if not isinstance(content, str | list):
        raise ValueError(f"the content of {name} is {content!r:.40}, which is not text")
    if isinstance(content, list):
        message["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in content
        ]
    return message


def _parse_call(call: Any, name: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as chat templates expect."""
    call = _check(dict, call, f"a tool call of {name}")
    inside: dict[str, Any] = _check(dict, call.get("function", call), f"a tool call of {name}")
    if "name" not in inside:
        raise ValueError(f"a tool call of {name} has no name")
    _check(str, inside["name"], f"the name of a tool call of {name}")
    if "arguments" not in inside:
        for key, value in inside.items():
            if key not in CALL_KEYS and value and isinstance(value, str | list | dict):
                raise ValueError(
                    f"a tool call of {name} has {key} and no arguments: rename {key} to arguments"
                )
    if isinstance(inside.get("arguments"), str):
        arguments = inside["arguments"] or "{}"
        inside = inside | {"arguments": _parse_json(arguments, f"arguments in {name}")}
    called: dict[str, Any] = call | {"function": inside} if "function" in call else inside
    return called


def serialize_arguments(message: Message) -> Message:
    """Return a message whose tool calls have their arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls", []):
        inside = call.get("function", call)
        arguments = json.dumps(inside.get("arguments", {}), ensure_ascii=False)
        written = inside | {"arguments": arguments}
        calls.append(call | {"function": written} if "function" in call else written)
    return message | {"tool_calls": calls} if calls else message


def _check_flags(message: Message, name: str) -> None:
    """Raise ValueError if a message has a flag that the training cannot follow."""
    for key in FLAGS:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):  # True equals 1, and False equals 0
            raise ValueError(
                f"{key} of {name} is {value!r:.40}: only true, false, 1 and 0 are allowed"
            )
        # Some files give every message a weight of 1, so this weight is accepted for all roles.
        if value and message["role"] != "assistant" and key != "weight":
            raise ValueError(f"{name} has {key}: true, but only the assistant's text is trained on")
    if "train_detail" in message:
        raise ValueError(
            f"{name} has train_detail, but parts of a message cannot be excluded from the training"
        )
    for key, value in message.items():
        if key not in FLAGS and isinstance(value, int | float) and FLAG_NAME.search(key):
            raise ValueError(
                f"{name} has the unknown flag {key}: {', '.join(FLAGS[:-1])} and {FLAGS[-1]}"
                " are known"
            )


def is_untrained(message: Message) -> bool:
    """Return whether a flag excludes this message from the training."""
    return any(key in message and not message[key] for key in FLAGS)


def _with_system(columns: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Return the messages, preceded by the text of the column `system` if there is any."""
    system = columns.get("system")
    if not system:
        return messages
    first = {"role": "system", "content": _check(str, system, "system")}
    if messages[0]["role"] != "system":
        return [first, *messages]
    if messages[0].get("content") != system:
        raise ValueError(
            "it has a system message, and a different text in its column system: keep one of them"
        )
    return messages


def _parse_prompt(columns: dict[str, Any], beside: dict[str, Any]) -> Plain | Chat:
    """Parse a prompt and its completion: two texts, or two lists of messages."""
    prompt = columns["prompt"]
    completion = columns["completion"]
    if isinstance(completion, str) is not isinstance(prompt, str):
        raise ValueError("one of prompt and completion is text, and the other is messages")
    if not isinstance(prompt, str):
        before = _with_system(columns, _parse_messages(prompt, "prompt"))
        after = _parse_messages(completion, "completion")
        return Chat(messages=before + after, completion=len(before), **beside)

    for name in ("system", "tools"):
        if columns.get(name):
            raise ValueError(
                f"its column {name} needs messages, but its prompt is text:"
                " write the column into the prompt, or give the prompt as messages"
            )
    return Plain(prompt=prompt, completion=_check(str, completion, "completion"))


def _parse_alpaca(columns: dict[str, Any], *, has_template: bool) -> Plain | Chat:
    """Parse an instruction and its output. Without a template, use Alpaca's own prompt."""
    instruction = _check(str, columns["instruction"], "instruction")
    given = _check(str, columns.get("input", ""), "input")
    output = _check(str, columns["output"], "output")
    system = _check(str, columns.get("system", ""), "system")
    history = [_check_turn(turn) for turn in _check(list, columns.get("history", []), "history")]
    if not has_template:
        if history:
            raise ValueError("its history needs a tokenizer with a chat template")
        prompt = system or ALPACA.format(given=ALPACA_GIVEN if given else "")
        prompt += f"\n\n### Instruction:\n{instruction}\n\n"
        prompt += f"### Input:\n{given}\n\n" if given else ""
        return Plain(prompt=prompt + "### Response:\n", completion=output)

    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in history:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": "\n".join(filter(None, (instruction, given)))})
    reply = {"role": "assistant", "content": output}
    return Chat(messages=[*messages, reply], completion=len(messages))


def _check_turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, list | tuple) or len(turn) != 2:
        raise ValueError(f"history has {turn!r:.40}, which is not a question and its answer")
    question, answer = turn
    return _check(str, question, "a question in history"), _check(
        str, answer, "an answer in history"
    )


# --- the texts of messages


def map_texts(message: Message, change: Change) -> Message:
    """Return the message with each of its texts replaced by `change(kind, text)`.

    The kinds are `text`, `thought`, `name` (of a called function) and `argument`.
    """
    made = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        made["content"] = change("text", content)
    elif isinstance(content, list):
        made["content"] = [_map_part(part, change) for part in content]
    for key in THOUGHTS:
        if isinstance(message.get(key), str):
            made[key] = change("thought", message[key])
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_map_call(call, change) for call in calls]
    return made


def _map_part(part: Any, change: Change) -> Any:
    return part | {"text": change("text", part["text"])} if is_text(part) else part


def _map_call(call: dict[str, Any], change: Change) -> dict[str, Any]:
    inside = call.get("function", call)
    changed = inside | {"name": change("name", str(inside["name"]))}
    if "arguments" in inside:
        changed["arguments"] = _map_strings(inside["arguments"], change)
    return call | {"function": changed} if "function" in call else changed


def _map_strings(value: Any, change: Change) -> Any:
    if isinstance(value, dict):
        return {key: _map_strings(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [_map_strings(one, change) for one in value]
    return change("argument", value) if isinstance(value, str) else value


def texts_of(message: Message) -> list[tuple[str, str]]:
    """Return each text of a message with its kind. Blank texts are left out."""
    found: list[tuple[str, str]] = []

    def keep(kind: str, text: str) -> str:
        if text.strip():
            found.append((kind, text))
        return text

    map_texts(message, keep)
    return found


def has_empty_answer(form: Plain | Chat) -> bool:
    """Return whether any answer to train on is empty: without text, thought or tool call."""
    if isinstance(form, Plain):
        return not form.completion.strip()
    answers = (one for one in form.messages if one["role"] == "assistant")
    return any(not is_untrained(one) and not texts_of(one) for one in answers)


def is_text(part: Any) -> bool:
    """Return whether this part of a message is text."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def is_image(part: Any) -> bool:
    """Return whether this part of a message stands for an image."""
    return isinstance(part, dict) and part.get("type") == "image"


def join_parts(message: Message, number: int) -> Message:
    """Return a message whose content is one string, as chat templates of text models need it.

    Raises ValueError for a part that is not text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if not is_text(part):
            kind = part.get("type") if isinstance(part, dict) else None
            has = f"type {kind}" if kind else f"{part!r:.40}"
            raise ValueError(
                f"message {number} has a part of {has}:"
                ' only parts with the key "text" are read here'
            )
    return message | {"content": "".join(part["text"] for part in content)}


# --- names that a chat template knows


def adapt(messages: Iterable[Message], template: str) -> list[Message]:
    """Return messages with the roles and keys that a chat template reads.

    Without a template (""), roles and keys stay as they are. Raises ValueError for an unknown role.
    """
    return [_adapt(message, number, template) for number, message in enumerate(messages, 1)]


def _adapt(message: Message, number: int, template: str) -> Message:
    role = message["role"]
    if role not in ROLES and not _names(template, role):
        near = difflib.get_close_matches(role.lower(), ROLES, 1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"message {number} has the unknown role {role!r:.40}{hint}"
            f" (known: {', '.join(sorted(ROLES))})"
        )
    if not template:
        return message
    if role == "developer" and not _names(template, role):
        message = message | {"role": "system"}

    # A thought may have one of several keys, and a template may read only one of these keys. So
    # store the thought under the key that the template reads.
    if not any(key in template for key in THOUGHTS):
        return message
    wanted = next(key for key in THOUGHTS if key in template)
    for key in THOUGHTS:
        if key in message and key not in template and wanted not in message:
            message = {name: value for name, value in message.items() if name != key} | {
                wanted: message[key]
            }
    return message


def _names(template: str, role: str) -> bool:
    """Return whether a chat template knows this role: it contains the role as a quoted string."""
    return f"'{role}'" in template or f'"{role}"' in template


# --- messages with images


def split_parts(messages: list[Message], number: int) -> list[Message]:
    """Return messages whose content is a list of parts, for the chat templates of image models.

    If the messages have no image part, `number` image parts are added at the beginning of the first
    user message. Raises ValueError for a part that is neither text nor an image.
    """
    made = [
        message | {"content": _parse_parts(message.get("content") or "")} for message in messages
    ]
    if number and not any(is_image(part) for message in made for part in message["content"]):
        first = next((message for message in made if message["role"] == "user"), made[0])
        first["content"][:0] = [{"type": "image"}] * number
    return made


def _parse_parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [{"type": "image"} if is_image(part) else _check_part(part) for part in content]
    parts: list[dict[str, Any]] = []
    for place, text in enumerate(content.split(PLACEHOLDER)):
        parts += [{"type": "image"}] * (place > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts


def _check_part(part: Any) -> Any:
    if not is_text(part) or part.get("type") != "text":
        raise ValueError(f"the part {part!r:.60} of a message is neither text nor of type image")
    return part


def parse_image_row(where: str, row: dict[str, Any]) -> tuple[Plain | Chat, list[Any]]:
    """Parse a row, and return it with its images in the order of the image parts.

    The columns `images` and `image` name the images; without these columns, the parts of messages
    name the images. Raises BadDataset with the row's location if the numbers of images and image
    parts differ.
    """
    listed = row.get("images") or row.get("image") or []
    named = list(listed) if isinstance(listed, list | tuple) else [listed]
    others = {name: value for name, value in row.items() if name not in ("image", "images")}
    form = parse_row(where, others)
    if isinstance(form, Plain):
        if named or PLACEHOLDER in (form.prompt or "") + form.completion:
            raise BadDataset(
                f"{where}: an example with images needs messages, or columns that become messages,"
                " such as instruction and output"
            )
        return form, []

    if not named:
        named = _named_images(form)
    try:
        form.messages[:] = split_parts(form.messages, len(named))
    except ValueError as error:
        raise BadDataset(f"{where}: {error}") from None

    places = sum(is_image(part) for message in form.messages for part in message["content"])
    if places != len(named):
        raise BadDataset(
            f"{where}: its messages have places for {places} images, but the example names "
            f"{len(named)}"
        )
    return form, named


def _named_images(form: Chat) -> list[Any]:
    """Return the images that the parts of messages name."""
    contents = [message.get("content") for message in form.messages]
    lists = [content for content in contents if isinstance(content, list)]
    images = [part for content in lists for part in content if is_image(part)]
    return [name for part in images if (name := part.get("image") or part.get("path"))]

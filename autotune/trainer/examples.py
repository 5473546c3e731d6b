"""Turns the rows of a dataset into tokens, and marks the tokens to train on.

A row has messages, a prompt and its completion, an instruction and its output (Alpaca), a
conversation (ShareGPT), or text. A token that the model only reads is stored as its complement,
-1 - token.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard

from .reading import BadDataset, Located

BATCH = 1000  # rows to tokenise at once, because a tokenizer works on several in parallel
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
FORMS = "messages, conversations, prompt and completion, instruction and output, or text"
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
PLACEHOLDER = "<image>"  # LLaMA-Factory's marker for an image in a text
MARK = "[[the answer stands here]]"  # replaces an answer, to find it in a rendered conversation

# Stanford Alpaca's own prompts, for tokenizers without a chat template
ALPACA = (
    "Below is an instruction that describes a task{given}."
    " Write a response that appropriately completes the request."
)
ALPACA_GIVEN = ", paired with an input that provides further context"

Ranges = list[tuple[int, int]]  # the start and end of the characters to train on


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Text to train on, after an optional prompt."""

    prompt: str | None = None
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages for the tokenizer's chat template.

    The messages from the index `completion` on answer the messages before it.
    """

    messages: list[dict[str, Any]]
    completion: int | None = None
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def parse(row: dict[str, Any], *, has_template: bool = True) -> Plain | Chat:
    """Parse a row. Columns that are null count as missing.

    Raises KeyError, TypeError, AttributeError, ValueError and RecursionError for a row of unknown
    form.
    """
    columns = _drop_nulls(row)
    tools = columns.get("tools") or None
    beside = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        "options": columns.get("chat_template_kwargs", {}),
    }

    if "messages" in columns:
        return Chat(messages=_parse_messages(columns["messages"]), **beside)
    if "conversations" in columns:
        return Chat(
            messages=_system_messages(columns) + _parse_messages(columns["conversations"]), **beside
        )
    if "prompt" in columns and "completion" in columns:
        prompt = columns["prompt"]
        completion = columns["completion"]
        if isinstance(prompt, str):
            return Plain(prompt=prompt, completion=_check_text(completion))
        before = _parse_messages(prompt)
        return Chat(messages=before + _parse_messages(completion), completion=len(before), **beside)
    if "instruction" in columns and "output" in columns:
        return _parse_alpaca(columns, has_template=has_template)
    if "text" in columns:
        return Plain(completion=_check_text(columns["text"]))
    raise KeyError(f"its columns: {', '.join(map(str, row)) or 'none'}")


def _drop_nulls(value: Any) -> Any:
    """Return `value` without keys of null values. A table adds them to rows without these keys."""
    if isinstance(value, dict):
        return {key: _drop_nulls(one) for key, one in value.items() if one is not None}
    return [_drop_nulls(one) for one in value] if isinstance(value, list) else value


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _parse_messages(given: Any) -> list[dict[str, Any]]:
    messages = [
        _parse_message(one) for one in (json.loads(given) if isinstance(given, str) else given)
    ]
    if not messages:
        raise ValueError("there are no messages")
    return messages


def _parse_message(given: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the names of chat templates. They take tool arguments as a mapping."""
    message = dict(given)
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message:
            message[ours] = message.pop(theirs)
    if message["role"] == "function_call":
        calls = json.loads(message.pop("content"))
        message["tool_calls"] = [{"type": "function", "function": call} for call in _to_list(calls)]
    message["role"] = ROLES.get(message["role"], message["role"])

    if message.get("tool_calls"):
        message["tool_calls"] = [_parse_call(call) for call in message["tool_calls"]]
        return message
    message.pop("tool_calls", None)
    if "content" not in message:
        raise KeyError("content")
    return message


def _to_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    inside = call.get("function", call)
    if isinstance(inside.get("arguments"), str):
        inside = inside | {"arguments": json.loads(inside["arguments"] or "{}")}
    return call | {"function": inside} if "function" in call else inside


def _serialize_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as JSON."""
    calls = []
    for call in message.get("tool_calls", []):
        inside = call.get("function", call)
        arguments = json.dumps(inside.get("arguments", {}), ensure_ascii=False)
        written = inside | {"arguments": arguments}
        calls.append(call | {"function": written} if "function" in call else written)
    return message | {"tool_calls": calls} if calls else message


def _system_messages(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": columns["system"]}] if columns.get("system") else []


def _parse_alpaca(columns: dict[str, Any], *, has_template: bool) -> Plain | Chat:
    """Parse an instruction and its output. Without a template, use Alpaca's own prompt."""
    instruction = columns["instruction"]
    given = columns.get("input")
    output = _check_text(columns["output"])
    if not has_template:
        prompt = columns.get("system") or ALPACA.format(given=ALPACA_GIVEN if given else "")
        prompt += f"\n\n### Instruction:\n{instruction}\n\n"
        prompt += f"### Input:\n{given}\n\n" if given else ""
        return Plain(prompt=prompt + "### Response:\n", completion=output)

    messages = _system_messages(columns)
    for question, answer in columns.get("history", []):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": "\n".join(filter(None, (instruction, given)))})
    reply = {"role": "assistant", "content": output}
    return Chat(messages=[*messages, reply], completion=len(messages))


def split_parts(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return messages whose content is a list of parts, for the chat templates of image models.

    If the messages have no place for an image, the first user message begins with `number` images.
    Raises ValueError for a part that is neither text nor an image.
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
    is_text = isinstance(part, dict) and part.get("type") == "text"
    if not is_text or not isinstance(part.get("text"), str):
        raise ValueError(f"the part {part!r:.60} of a message is neither text nor of type image")
    return part


def parse_image_row(where: str, row: dict[str, Any]) -> tuple[Plain | Chat, list[Any]]:
    """Parse a row with messages in parts, and return its images in the order of their places.

    The columns `images` and `image` name the images; without these columns, the parts of messages
    do. Raises BadDataset with the location if the images and the places do not match.
    """
    listed = row.get("images") or row.get("image") or []
    named = list(listed) if isinstance(listed, list | tuple) else [listed]
    others = {name: value for name, value in row.items() if name not in ("image", "images")}
    form = parse_row(where, others)
    if isinstance(form, Plain):
        if named or PLACEHOLDER in (form.prompt or "") + form.completion:
            raise BadDataset(
                f"{where}: a row with images needs messages, or columns that become messages"
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
            f"{where}: its messages have places for {places} images, and it names {len(named)}"
        )
    return form, named


def _named_images(form: Chat) -> list[Any]:
    """Return the images that the parts of messages name."""
    contents = [message.get("content") for message in form.messages]
    lists = [content for content in contents if isinstance(content, list)]
    images = [part for content in lists for part in content if is_image(part)]
    return [name for part in images if (name := part.get("image") or part.get("path"))]


def is_image(part: Any) -> bool:
    """Return whether this part of a message is the place of an image."""
    return isinstance(part, dict) and part.get("type") == "image"


class Encoder:
    """Makes examples of rows with a tokenizer of transformers.

    `loss_on` selects the tokens to train on: `completion`, `assistant` (all text of the assistant)
    or `all`. The completion of a row of messages is its last answer. None selects completions, or
    the assistant's text in rows without one. With `parts`, the chat template gets messages in
    parts, as models with images need them.
    """

    def __init__(self, tokenizer: Any, loss_on: str | None, *, parts: bool = False) -> None:
        self.tokenizer = tokenizer
        self.parts = parts
        self.loss_on = loss_on
        self.key = loss_on
        template = tokenizer.chat_template
        self._template = (template.get("default") if isinstance(template, dict) else template) or ""
        # Such a template marks the assistant's text itself.
        self._is_marked = bool(re.search(r"\{%-?\s*generation\s*-?%\}", self._template))

    def encode(self, rows: Iterable[Located]) -> Iterator[list[int]]:
        """Yield the tokens of each row. Raises BadDataset with the row's location."""
        remaining = iter(rows)
        while batch := list(islice(remaining, BATCH)):
            yield from self._encode_batch(batch)

    def _encode_batch(self, batch: list[Located]) -> list[list[int]]:
        examples: list[list[int]] = [[] for _ in batch]
        texts: dict[bool, list[tuple[int, str, Ranges | None]]] = {False: [], True: []}

        # Rows without marks are rendered one by one, and tokenised together.
        for index, (where, row) in enumerate(batch):
            form = parse_row(where, row, has_template=bool(self._template))
            try:
                if self.parts and isinstance(form, Chat):
                    form.messages[:] = split_parts(form.messages, 0)
                if self._uses_marks(form):
                    examples[index] = self._encode_marked(form)
                else:
                    text, ranges = self.render(form)
                    text.encode()
                    texts[isinstance(form, Chat)].append((index, text, ranges))
            except UnicodeEncodeError:
                raise BadDataset(f"{where}: half of a surrogate pair is not a character") from None
            except Exception as error:  # chat templates raise many kinds of errors
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise BadDataset(
                    f"{where}: the tokenizer's chat template refuses it: {reason}"
                ) from None

        for is_chat, found in texts.items():
            for index, tokens in self._tokenise(found, is_chat=is_chat):
                examples[index] = tokens
        return examples

    def _uses_marks(self, form: Plain | Chat) -> TypeGuard[Chat]:
        """Return whether the template itself marks the tokens to train on."""
        return isinstance(form, Chat) and self._is_marked and self._target(form) == "assistant"

    def _tokenise(
        self, found: list[tuple[int, str, Ranges | None]], *, is_chat: bool
    ) -> Iterator[tuple[int, list[int]]]:
        if not found:
            return
        needs_offsets = any(ranges is not None for _, _, ranges in found)
        if needs_offsets and not self.tokenizer.is_fast:
            raise BadDataset(
                "this tokenizer does not return the text of a token: only loss_on all is possible"
            )

        # A chat template writes special tokens itself.
        encoded = self.tokenizer(
            [text for _, text, _ in found],
            add_special_tokens=not is_chat,
            return_offsets_mapping=needs_offsets,
        )
        for place, (index, _, ranges) in enumerate(found):
            tokens = encoded["input_ids"][place]
            if ranges is None:
                yield index, tokens
                continue
            # Only the ends count: a token that reaches into an answer belongs to it, as in TRL. The
            # start may leave out a space.
            ends = [end for _, end in encoded["offset_mapping"][place]]
            is_trained = [any(start < end <= stop for start, stop in ranges) for end in ends]
            yield index, _mask(tokens, is_trained)

    def _target(self, form: Plain | Chat) -> str:
        """Return the part of this example to train on: completion, assistant or all."""
        if isinstance(form, Plain):
            if self.loss_on in ("completion", "assistant") and form.prompt is None:
                raise ValueError(
                    f"plain text has no {self.loss_on} to train on: loss_on is {self.loss_on}"
                )
            return "all" if self.loss_on == "all" or form.prompt is None else "completion"
        return self.loss_on or ("assistant" if form.completion is None else "completion")

    def render(self, form: Plain | Chat) -> tuple[str, Ranges | None]:
        """Return the text of an example, and the characters to train on, or None for all."""
        target = self._target(form)
        if isinstance(form, Plain):
            text = (form.prompt or "") + form.completion
            end = self.tokenizer.eos_token or ""
            text += "" if text.endswith(end) else end
            return text, None if target == "all" else [(len(form.prompt or ""), len(text))]

        text = self._render(form, form.messages)
        if target == "all":
            return text, None
        messages = form.messages
        if target == "completion":
            first = len(messages) - 1 if form.completion is None else form.completion
            if messages[first]["role"] != "assistant" and form.completion is None:
                raise ValueError("its last message is not the assistant's")
            prompt = self._render(form, messages[:first], add_generation_prompt=True)
            # Some templates end a prompt with text that a whole conversation does not have.
            return text, [(_common_length(prompt, text), len(text))]

        roles = [message["role"] for message in messages]
        answers = [index for index, role in enumerate(roles) if role == "assistant"]
        return text, [self._find_answer(form, text, index) for index in answers]

    def _render(self, form: Chat, messages: list[dict[str, Any]], **options: Any) -> str:
        settings = {"tools": form.tools, "tokenize": False, **form.options, **options}
        try:
            text: str = self.tokenizer.apply_chat_template(messages, **settings)
        except TypeError:
            # A few templates, for example DeepSeek's, add the arguments of a tool call to text.
            messages = [_serialize_arguments(one) for one in messages]
            text = self.tokenizer.apply_chat_template(messages, **settings)
        return text

    def _find_answer(self, form: Chat, text: str, index: int) -> tuple[int, int]:
        """Return the start and the end of the answer `index`.

        The start is after the prompt, and the end is after the end of turn.
        """
        messages = form.messages
        prompt = self._render(form, messages[:index], add_generation_prompt=True) if index else None
        through = self._render(form, messages[: index + 1])
        if prompt is not None and text.startswith(prompt) and text.startswith(through):
            return len(prompt), len(through)

        # This template renders messages differently if more messages follow. The text around the
        # answer locates it.
        mark_message = {"role": "assistant", "content": MARK}
        marked = [*messages[:index], mark_message]
        whole = self._render(form, [*marked, *messages[index + 1 :]])
        head, mark, tail = whole.partition(MARK)
        head_alone, _, tail_alone = self._render(form, marked).partition(MARK)

        # Text between the prompt and an answer, for example an empty thought, belongs to the model.
        preamble = ""
        if prompt is not None:
            preamble = head_alone[_common_length(prompt, head_alone) :]
        start = len(head) - (len(preamble) if head.endswith(preamble) else 0)
        if not mark or not text.endswith(tail):
            raise ValueError(f"message {index + 1} cannot be located in the rendered text")
        end = len(text) - len(tail) + _common_length(tail, tail_alone)
        return min(start, _common_length(head, text)), end

    def _encode_marked(self, form: Chat) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            form.messages,
            tools=form.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **form.options,
        )
        return _mask(encoded["input_ids"], encoded["assistant_masks"])


def _common_length(left: str, right: str) -> int:
    """Return the length of the longest common prefix."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(right))


def parse_row(where: str, row: dict[str, Any], *, has_template: bool = True) -> Plain | Chat:
    """Parse a row. Raises BadDataset with the location of a row of unknown form."""
    try:
        return parse(row, has_template=has_template)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise BadDataset(f"{where}: needs {FORMS}: {error!r}") from None


def label_of(row: dict[str, Any]) -> int | str:
    """Return the label of a row, a number or text.

    Raises KeyError and TypeError for a row without one.
    """
    label = row["label"]
    # A table with gaps stores whole numbers as floats.
    if isinstance(label, float) and label.is_integer():
        return int(label)
    if not isinstance(label, int | str):
        raise TypeError(f"the label {label!r:.40} is neither a whole number nor text")
    return label


def label_names(rows: Iterable[Located]) -> list[Any]:
    """Return the sorted labels of a dataset.

    Raises BadDataset if there are fewer than two, or if a row has none.
    """
    found: set[int | str] = set()
    for where, row in rows:
        try:
            _check_text(row["text"])
            found.add(label_of(row))
        except (KeyError, TypeError) as error:
            raise BadDataset(f"{where}: classification needs text and label: {error!r}") from None

    if len({isinstance(label, str) for label in found}) > 1:
        raise BadDataset("some labels are numbers, and others text")
    if len(found) < 2:
        raise BadDataset(f"classification needs at least two labels, and there are {len(found)}")
    return sorted(found, key=lambda label: (isinstance(label, str), label))


def _mask(tokens: list[int], is_trained: list[Any]) -> list[int]:
    return [
        token if trained else -1 - token for token, trained in zip(tokens, is_trained, strict=True)
    ]

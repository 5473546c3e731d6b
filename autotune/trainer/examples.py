"""Examples: what the rows of a dataset say as tokens, and which of these tokens are trained on.

A row has messages, a prompt and its completion, an instruction and its output (Alpaca), a conversation (ShareGPT), or
text. A token that the model only reads is stored as its complement, -1 - token.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .reading import BadDataset, Located

BATCH = 1000  # rows that are tokenised at once, since a tokenizer takes several in parallel
COLUMNS = (  # that are read
    *("messages", "conversations", "system", "tools", "chat_template_kwargs", "prompt", "completion"),
    *("instruction", "input", "output", "history", "text"),
)
FORMS = "messages, conversations, prompt and completion, instruction and output, or text"
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
PLACEHOLDER = "<image>"  # in a text, where LLaMA-Factory puts an image
MARK = "[[the answer stands here]]"  # takes the place of an answer to find it in a rendered conversation

# Stanford Alpaca's own prompts, for tokenizers without a chat template.
ALPACA = (
    "Below is an instruction that describes a task{given}. Write a response that appropriately completes the request."
)
ALPACA_GIVEN = ", paired with an input that provides further context"

Ranges = list[tuple[int, int]]  # the characters that are trained on, from and to


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Text to train on, after a prompt where there is one."""

    prompt: str | None = None
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages for the tokenizer's chat template. Those from `completion` on answer the ones before."""

    messages: list[dict[str, Any]]
    completion: int | None = None
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def parse(row: dict[str, Any], *, has_template: bool = True) -> Plain | Chat:
    """The form of a row; columns that are null count as missing.

    Raises KeyError, TypeError, AttributeError, ValueError and RecursionError for a row of no known form.
    """
    columns = _without_nulls(row)
    tools = columns.get("tools") or None
    beside = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        "options": columns.get("chat_template_kwargs", {}),
    }
    if "messages" in columns:
        return Chat(messages=_messages(columns["messages"]), **beside)
    if "conversations" in columns:
        return Chat(messages=_system(columns) + _messages(columns["conversations"]), **beside)
    if "prompt" in columns and "completion" in columns:
        prompt, completion = columns["prompt"], columns["completion"]
        if isinstance(prompt, str):
            return Plain(prompt=prompt, completion=_text(completion))
        before = _messages(prompt)
        return Chat(messages=before + _messages(completion), completion=len(before), **beside)
    if "instruction" in columns and "output" in columns:
        return _alpaca(columns, has_template=has_template)
    if "text" in columns:
        return Plain(completion=_text(columns["text"]))
    raise KeyError(f"its columns: {', '.join(map(str, row)) or 'none'}")


def _without_nulls(value: Any) -> Any:
    """`value` without the keys whose value is null, which a table adds to rows that do not have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _messages(given: Any) -> list[dict[str, Any]]:
    messages = [_message(one) for one in (json.loads(given) if isinstance(given, str) else given)]
    if not messages:
        raise ValueError("there are no messages")
    return messages


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message by the names of chat templates. The arguments of a tool call are a mapping there."""
    message = dict(given)
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message:
            message[ours] = message.pop(theirs)
    if message["role"] == "function_call":
        calls = json.loads(message.pop("content"))
        message["tool_calls"] = [{"type": "function", "function": call} for call in _listed(calls)]
    message["role"] = ROLES.get(message["role"], message["role"])
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
        message["content"]  # a KeyError without
    else:
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return message


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    inside = call.get("function", call)
    if isinstance(inside.get("arguments"), str):
        inside = inside | {"arguments": json.loads(inside["arguments"] or "{}")}
    return call | {"function": inside} if "function" in call else inside


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as JSON."""
    calls = []
    for call in message.get("tool_calls", []):
        inside = call.get("function", call)
        written = inside | {"arguments": json.dumps(inside.get("arguments", {}), ensure_ascii=False)}
        calls.append(call | {"function": written} if "function" in call else written)
    return message | {"tool_calls": calls} if calls else message


def _system(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": columns["system"]}] if columns.get("system") else []


def _alpaca(columns: dict[str, Any], *, has_template: bool) -> Plain | Chat:
    """A question and its answer for the chat template; Alpaca's own prompt for a tokenizer that has none."""
    instruction, given, output = columns["instruction"], columns.get("input"), _text(columns["output"])
    if not has_template:
        prompt = columns.get("system") or ALPACA.format(given=ALPACA_GIVEN if given else "")
        prompt += f"\n\n### Instruction:\n{instruction}\n\n"
        prompt += f"### Input:\n{given}\n\n" if given else ""
        return Plain(prompt=prompt + "### Response:\n", completion=output)
    messages = _system(columns)
    for asked, answered in columns.get("history", []):
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages.append({"role": "user", "content": "\n".join(filter(None, (instruction, given)))})
    return Chat(messages=[*messages, {"role": "assistant", "content": output}], completion=len(messages))


def with_parts(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Messages whose content is a list of parts, as chat templates of these models take it.

    Where no image has a place in them, the `number` of images come first in the first message of the user. Raises
    ValueError for a part that is neither text nor an image.
    """
    made = [message | {"content": _parts(message.get("content") or "")} for message in messages]
    if number and not any(is_image(part) for message in made for part in message["content"]):
        first = next((message for message in made if message["role"] == "user"), made[0])
        first["content"][:0] = [{"type": "image"}] * number
    return made


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [{"type": "image"} if is_image(part) else _text_part(part) for part in content]
    parts: list[dict[str, Any]] = []
    for place, text in enumerate(content.split(PLACEHOLDER)):
        parts += [{"type": "image"}] * (place > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts


def _text_part(part: Any) -> dict[str, Any]:
    if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
        raise ValueError(f"the part {part!r:.60} of a message is neither text nor of type image")
    return part


def with_images(where: str, row: dict[str, Any]) -> tuple[Plain | Chat, list[Any]]:
    """The form of a row, its messages in parts, and what names its images, in the order of their places.

    The columns `images` and `image` name them, or without these the parts of messages do. Raises BadDataset, which
    names the row, where not every image has a place, or not every place an image.
    """
    listed = row.get("images") or row.get("image") or []
    named = list(listed) if isinstance(listed, list | tuple) else [listed]
    form = parsed(where, {name: value for name, value in row.items() if name not in ("image", "images")})
    if isinstance(form, Plain):
        if named or PLACEHOLDER in (form.prompt or "") + form.completion:
            raise BadDataset(f"{where}: a row with images needs messages, or what becomes messages")
        return form, []
    if not named:
        contents = [message.get("content") for message in form.messages]
        inside = [part for content in contents if isinstance(content, list) for part in content if is_image(part)]
        named = [one for part in inside if (one := part.get("image") or part.get("path"))]
    try:
        form.messages[:] = with_parts(form.messages, len(named))
    except ValueError as error:
        raise BadDataset(f"{where}: {error}") from None
    places = sum(is_image(part) for message in form.messages for part in message["content"])
    if places != len(named):
        raise BadDataset(f"{where}: its messages have places for {places} images, and it names {len(named)}")
    return form, named


def is_image(part: Any) -> bool:
    """Whether this part of a message is the place of an image."""
    return isinstance(part, dict) and part.get("type") == "image"


class Encoder:
    """Makes examples of rows with a tokenizer of transformers.

    `loss_on` says which tokens are trained on: `completion` (a row of messages has its last answer for one),
    `assistant` (what the assistant says), `all`; None for completions or what the assistant says where a row has them.
    With `parts` messages are given to the chat template in parts, as those of models that take images want them.
    """

    def __init__(self, tokenizer: Any, loss_on: str | None, *, parts: bool = False) -> None:
        self.tokenizer, self.parts = tokenizer, parts
        self.loss_on = self.key = loss_on
        template = tokenizer.chat_template
        self._template = (template.get("default") if isinstance(template, dict) else template) or ""
        # Such a template says itself what the assistant says.
        self._is_marked = bool(re.search(r"\{%-?\s*generation\s*-?%\}", self._template))

    def encode(self, rows: Iterable[Located]) -> Iterator[list[int]]:
        """Yield the tokens of each row. Raises BadDataset, which names the row."""
        remaining = iter(rows)
        while batch := list(islice(remaining, BATCH)):
            yield from self._encode_batch(batch)

    def _encode_batch(self, batch: list[Located]) -> list[list[int]]:
        examples: list[list[int]] = [[] for _ in batch]
        texts: dict[bool, list[tuple[int, str, Ranges | None]]] = {False: [], True: []}
        for index, (where, row) in enumerate(batch):
            form = parsed(where, row, has_template=bool(self._template))
            try:
                if self.parts and isinstance(form, Chat):
                    form.messages[:] = with_parts(form.messages, 0)
                if isinstance(form, Chat) and self._is_marked and self._range_of(form) == "assistant":
                    examples[index] = self._by_marks(form)
                else:
                    text, ranges = self._rendered(form)
                    text.encode()
                    texts[isinstance(form, Chat)].append((index, text, ranges))
            except UnicodeEncodeError:
                raise BadDataset(f"{where}: half of a surrogate pair is not a character") from None
            except Exception as error:  # chat templates raise errors of all kinds
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise BadDataset(f"{where}: the tokenizer's chat template refuses it: {reason}") from None
        for is_chat, found in texts.items():
            for index, tokens in self._tokenised(found, is_chat=is_chat):
                examples[index] = tokens
        return examples

    def _tokenised(
        self, found: list[tuple[int, str, Ranges | None]], *, is_chat: bool
    ) -> Iterator[tuple[int, list[int]]]:
        if not found:
            return
        needs_offsets = any(ranges is not None for _, _, ranges in found)
        if needs_offsets and not self.tokenizer.is_fast:
            raise BadDataset("this tokenizer cannot tell which text a token is: only loss_on all is possible with it")
        # A chat template writes its own special tokens.
        encoded = self.tokenizer(
            [text for _, text, _ in found], add_special_tokens=not is_chat, return_offsets_mapping=needs_offsets
        )
        for place, (index, _, ranges) in enumerate(found):
            tokens = encoded["input_ids"][place]
            if ranges is None:
                yield index, tokens
                continue
            # Only ends count: a token that reaches into an answer belongs to it, as in TRL. Starts may leave out space.
            ends = [end for _, end in encoded["offset_mapping"][place]]
            yield index, _masked(tokens, [any(start < end <= stop for start, stop in ranges) for end in ends])

    def _range_of(self, form: Plain | Chat) -> str:
        """What of this example is trained on: completion, assistant or all."""
        if isinstance(form, Plain):
            if self.loss_on in ("completion", "assistant") and form.prompt is None:
                raise ValueError(f"text alone has no {self.loss_on} to train on: loss_on is {self.loss_on}")
            return "all" if self.loss_on == "all" or form.prompt is None else "completion"
        return self.loss_on or ("assistant" if form.completion is None else "completion")

    def _rendered(self, form: Plain | Chat) -> tuple[str, Ranges | None]:
        """The text of an example, and the characters that are trained on; None for all of them."""
        trained = self._range_of(form)
        if isinstance(form, Plain):
            text = (form.prompt or "") + form.completion
            end = self.tokenizer.eos_token or ""
            text += "" if text.endswith(end) else end
            return text, None if trained == "all" else [(len(form.prompt or ""), len(text))]
        text = self._render(form, form.messages)
        if trained == "all":
            return text, None
        messages = form.messages
        if trained == "completion":
            first = len(messages) - 1 if form.completion is None else form.completion
            if messages[first]["role"] != "assistant" and form.completion is None:
                raise ValueError("its last message is not the assistant's")
            prompt = self._render(form, messages[:first], add_generation_prompt=True)
            # Some templates end a prompt with what a whole conversation does not have.
            return text, [(_shared(prompt, text), len(text))]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._answer(form, text, index) for index in answers]

    def _render(self, form: Chat, messages: list[dict[str, Any]], **options: Any) -> str:
        settings = {"tools": form.tools, "tokenize": False, **form.options, **options}
        try:
            text: str = self.tokenizer.apply_chat_template(messages, **settings)
        except TypeError:  # a few templates, as DeepSeek's, add the arguments of a tool call to text
            text = self.tokenizer.apply_chat_template([_with_text_arguments(one) for one in messages], **settings)
        return text

    def _answer(self, form: Chat, text: str, index: int) -> tuple[int, int]:
        """Where the answer `index` stands: from after the prompt that asks for it until after its end of turn."""
        messages = form.messages
        prompt = self._render(form, messages[:index], add_generation_prompt=True) if index else None
        through = self._render(form, messages[: index + 1])
        if prompt is not None and text.startswith(prompt) and text.startswith(through):
            return len(prompt), len(through)
        # This template renders what came before in another way when more follows: its neighbours show the answer.
        marked = {"role": "assistant", "content": MARK}
        head, mark, tail = self._render(form, [*messages[:index], marked, *messages[index + 1 :]]).partition(MARK)
        head_alone, _, tail_alone = self._render(form, [*messages[:index], marked]).partition(MARK)
        # What the template writes between the prompt and an answer, such as an empty thought, is the model's.
        preamble = head_alone[_shared(prompt, head_alone) :] if prompt is not None else ""
        start = len(head) - (len(preamble) if head.endswith(preamble) else 0)
        if not mark or not text.endswith(tail):
            raise ValueError(f"message {index + 1} cannot be told apart from its neighbours in the rendered text")
        return min(start, _shared(head, text)), len(text) - len(tail) + _shared(tail, tail_alone)

    def _by_marks(self, form: Chat) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            form.messages, tools=form.tools, return_dict=True, return_assistant_tokens_mask=True, **form.options
        )
        return _masked(encoded["input_ids"], encoded["assistant_masks"])


def _shared(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    if right.startswith(left):
        return len(left)
    return next((index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(right))


def parsed(where: str, row: dict[str, Any], *, has_template: bool = True) -> Plain | Chat:
    """The form of a row. Raises BadDataset with the place of one that has none."""
    try:
        return parse(row, has_template=has_template)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise BadDataset(f"{where}: needs {FORMS}: {error!r}") from None


def label_of(row: dict[str, Any]) -> int | str:
    """The label of a row, a number or text. Raises KeyError and TypeError for a row without one."""
    label = row["label"]
    if isinstance(label, float) and label.is_integer():  # a table with gaps has its numbers so
        return int(label)
    if not isinstance(label, int | str):
        raise TypeError(f"the label {label!r:.40} is neither a whole number nor text")
    return label


def label_names(rows: Iterable[Located]) -> list[Any]:
    """The labels of a dataset in their order. Raises BadDataset where there are no two, or some rows have none."""
    found: set[int | str] = set()
    for where, row in rows:
        try:
            _text(row["text"])
            found.add(label_of(row))
        except (KeyError, TypeError) as error:
            raise BadDataset(f"{where}: classification needs text and label: {error!r}") from None
    if len({isinstance(label, str) for label in found}) > 1:
        raise BadDataset("some labels are numbers, and others text")
    if len(found) < 2:
        raise BadDataset(f"there is nothing to tell apart: {len(found)} label(s)")
    return sorted(found, key=lambda label: (isinstance(label, str), label))


def _masked(tokens: list[int], is_trained: list[Any]) -> list[int]:
    return [token if trained else -1 - token for token, trained in zip(tokens, is_trained, strict=True)]

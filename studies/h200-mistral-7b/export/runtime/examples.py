# -*- coding: utf-8 -*-
"""Turns the rows of a dataset into tokens, and marks the tokens to train on.

A token that is not trained on is stored as -1 - token.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeGuard

from .forms import (
    Chat,
    Message,
    Plain,
    adapt,
    has_empty_answer,
    is_untrained,
    join_parts,
    map_texts,
    parse_row,
    serialize_arguments,
    split_parts,
    texts_of,
)
from .lost_text import LostText, find_unread
from .reading import BadDataset, Located
from .tables import size_of
from .time_limit import time_limit

# The most rows to tokenise in one call. A fast tokenizer tokenises the rows of a call in parallel.
BATCH = 1000
BATCH_BYTES = 2**24  # a batch ends once its rows take this number of bytes in memory
# The most seconds of CPU time for rendering a row. Rendering usually takes milliseconds.
RENDER_S = 10.0
# This mark replaces an answer's text, to find the place of the answer in the rendered conversation.
MARK = "[[the answer stands here]]"

LOST_THOUGHTS = "the chat template leaves out thoughts of the assistant"
LOST_TOOLS = "the chat template leaves out the tools that the model may call"
NO_STOP = (
    "the chat template writes no end token after an answer, so the model does not learn to stop"
)
DROPPED = "arguments of the tokenizer in chat_template_kwargs are ignored"

EMPTY = "an answer is empty, so the model learns to end its turn without an answer"
UNREAD = "{} is not read, so the model never sees it: if it should, rename it to a known name"
# The largest number of different notes for the user. Without this limit, keys with random names
# would each add a note.
MOST_NOTES = 20

# The note for each kind of text that a template leaves out.
NOTES = {"thought": LOST_THOUGHTS, "tools": LOST_TOOLS}

# Matches the beginning of the block that a chat template puts around the assistant's text.
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Ranges = list[tuple[int, int]]  # the start and end of each range of characters to train on


class BadExample(ValueError):
    """Raised for an example that cannot be trained on with the user's options."""


@contextmanager
def _row_errors(where: str) -> Iterator[None]:
    """Limit the time to render a row, and convert errors to BadDataset with the row's location."""
    try:
        with time_limit(RENDER_S):
            yield
    except UnicodeEncodeError:
        raise BadDataset(
            f"{where}: its text has half of a surrogate pair, which is not a character"
        ) from None
    except BadExample as error:
        raise BadDataset(f"{where}: {error}") from None
    except Exception as error:  # chat templates raise many kinds of errors
        raise BadDataset(f"{where}: {_refusal(error)}") from None


def _batches(rows: Iterable[Located]) -> Iterator[list[Located]]:
    batch: list[Located] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += size_of(row[1])
        if len(batch) == BATCH or num_bytes >= BATCH_BYTES:
            yield batch
            batch = []
            num_bytes = 0
    if batch:
        yield batch


class Encoder:
    """Converts rows into token examples with a tokenizer of transformers.

    `loss_on` selects the tokens to train on: `completion` (in a conversation, the last answer),
    `assistant` (all text of the assistant) or `all`. Without `loss_on`, the form of a row decides.
    A row with a separate completion is trained on the completion. Any other conversation is trained
    on the assistant's text. A plain text is trained on all tokens. With `parts`, the chat template
    gets the content of messages as lists of text and image parts.
    """

    def __init__(self, tokenizer: Any, loss_on: str | None, *, parts: bool = False) -> None:
        self.tokenizer = tokenizer
        self.parts = parts
        self.loss_on = loss_on
        self.key = loss_on
        # Notes for the user, each with the number of rows that it concerns.
        self.notes: Counter[str] = Counter()
        self._lost_text = LostText()
        self._arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        template = tokenizer.chat_template
        self._template = (template.get("default") if isinstance(template, dict) else template) or ""
        # A template with a {% generation %} block itself marks the assistant's text.
        self._is_marked = bool(MARKED.search(self._template))

    def encode(self, rows: Iterable[Located]) -> Iterator[list[int]]:
        """Yield the tokens of each row. Raises BadDataset with the row's location."""
        for batch in _batches(rows):
            yield from self._encode_batch(batch)

    def describe_notes(self, number: int) -> list[str]:
        """Return the notes for the user. Each says how many of `number` examples it concerns."""
        return describe(self.notes, number)

    def _encode_batch(self, batch: list[Located]) -> list[list[int]]:
        examples: list[list[int]] = [[] for _ in batch]
        texts: dict[bool, list[tuple[int, str, Ranges | None]]] = {False: [], True: []}

        # If the template marks the assistant's text, one call renders and tokenises a row. All
        # other rows are rendered one by one, and tokenised together.
        for index, (where, row) in enumerate(batch):
            form = self._adapt(where, parse_row(where, row, has_template=bool(self._template)))
            if self._uses_marks(form):
                with _row_errors(where):
                    text = self._render(form, form.messages)
                    self._check_text(form, text)
                    examples[index] = self._encode_marked(form)
            else:
                text, ranges = self.render(where, form)
                texts[isinstance(form, Chat)].append((index, text, ranges))
            note_unread(self.notes, form, text)

        for is_chat, found in texts.items():
            for index, tokens in self._tokenise(found, is_chat=is_chat):
                examples[index] = tokens
        return examples

    def _adapt(self, where: str, form: Plain | Chat) -> Plain | Chat:
        """Return the example with its messages in the form that the chat template reads."""
        if isinstance(form, Plain):
            return form
        if not self.tokenizer.chat_template:
            raise BadDataset(
                f"{where}: the tokenizer has no chat template, which messages need: use a"
                " tokenizer with one, or give prompt and completion as text"
            )
        if not self._arguments.keys().isdisjoint(form.options):
            self.notes[DROPPED] += 1
        with _row_errors(where):  # `_reads_parts` runs the template
            reads_parts = self._reads_parts
        try:
            messages = adapt(form.messages, self._template)
            if reads_parts:
                messages = split_parts(messages, 0)
            else:
                messages = [join_parts(one, number) for number, one in enumerate(messages, 1)]
        except ValueError as error:
            raise BadDataset(f"{where}: {error}") from None
        return replace(form, messages=messages)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template gets the content of messages as lists of parts, not as strings.

        Templates of image models often leave out or refuse content that is a plain string, even in
        rows without images. A template that marks the assistant's text always gets strings, because
        transformers loses the mark of a text that begins with a space.
        """
        if self.parts or not self._template or self._is_marked:
            return self.parts

        def keeps(content: Any) -> bool:
            messages = [{"role": "user", "content": content}]
            try:
                return MARK in self._render(Chat(messages=messages), messages)
            except Exception:  # chat templates raise many kinds of errors
                return False

        return not keeps(MARK) and keeps([{"type": "text", "text": MARK}])

    def _check_text(self, form: Chat, text: str) -> None:
        """Add notes for the user on thoughts and tools that a template leaves out.

        Raises BadExample if the template leaves out any other text.
        """
        lost = self._lost_text.find(form, text, lambda chat: self._render(chat, chat.messages))
        for index, kind in lost:
            role = form.messages[index]["role"]
            message = f"message {index + 1} of role {role}"
            if kind == "text":
                raise BadExample(f"the tokenizer's chat template leaves out the text of {message}")
            if kind in ("name", "argument"):
                raise BadExample(
                    f"the tokenizer's chat template leaves out the tool call in {message}:"
                    " use a tokenizer whose template has tool calls"
                )
        kinds = {kind for _, kind in lost}
        for note in kinds & NOTES.keys():
            self.notes[NOTES[note]] += 1

    def _uses_marks(self, form: Plain | Chat) -> TypeGuard[Chat]:
        """Return whether the template itself marks the tokens to train on.

        The template would also mark an answer that a flag (such as `train: false`) excludes from
        the training. So the template's marks are not used for rows with such a flag.
        """
        if not isinstance(form, Chat) or any(map(is_untrained, form.messages)):
            return False
        return self._is_marked and self._target(form) == "assistant"

    def _tokenise(
        self, found: list[tuple[int, str, Ranges | None]], *, is_chat: bool
    ) -> Iterator[tuple[int, list[int]]]:
        if not found:
            return
        needs_offsets = any(ranges is not None for _, _, ranges in found)
        if needs_offsets and not self.tokenizer.is_fast:
            raise BadDataset(
                "this tokenizer does not return the position of a token in the text:"
                " only loss_on all is possible"
            )

        # The tokenizer adds no special tokens to a rendered conversation, because the chat template
        # has written them.
        encoded = self.tokenizer(
            [text for _, text, _ in found],
            add_special_tokens=not is_chat,
            return_offsets_mapping=needs_offsets,
        )
        for place, (index, _, ranges) in enumerate(found):
            tokens = encoded["input_ids"][place]
            first = self._doubled_start(tokens)
            if ranges is None:
                yield index, tokens[first:]
                continue
            # A token belongs to an answer if it ends in the answer, as in TRL. Its start is not
            # reliable: some tokenizers report a start after the token's leading space.
            ends = [end for _, end in encoded["offset_mapping"][place]]
            is_trained = [any(start < end <= stop for start, stop in ranges) for end in ends]
            yield index, _mask(tokens, is_trained)[first:]

    def _doubled_start(self, tokens: list[int]) -> int:
        """Return 1 if the tokenizer added a second beginning-of-text token, else 0."""
        start = getattr(self.tokenizer, "bos_token_id", None)
        return int(start is not None and tokens[:2] == [start, start])

    def _target(self, form: Plain | Chat) -> str:
        """Return which tokens of this example to train on: `completion`, `assistant` or `all`."""
        if isinstance(form, Plain):
            if self.loss_on in ("completion", "assistant") and form.prompt is None:
                raise BadExample(
                    f"plain text has no {self.loss_on} to train on, but loss_on is {self.loss_on}"
                )
            return "all" if self.loss_on == "all" or form.prompt is None else "completion"
        return self.loss_on or ("assistant" if form.completion is None else "completion")

    def render(self, where: str, form: Plain | Chat) -> tuple[str, Ranges | None]:
        """Return an example's text, and the ranges of characters to train on (None for all).

        Raises BadDataset with the row's location.
        """
        with _row_errors(where):
            text, ranges = self._render_example(form)
            text.encode()
            return text, ranges

    def _render_example(self, form: Plain | Chat) -> tuple[str, Ranges | None]:
        target = self._target(form)
        if isinstance(form, Plain):
            text = (form.prompt or "") + form.completion
            end = self.tokenizer.eos_token or ""
            text += "" if text.endswith(end) else end
            return text, None if target == "all" else [(len(form.prompt or ""), len(text))]

        text = self._render(form, form.messages)
        self._check_text(form, text)
        messages = form.messages
        answers = self._answers(form, target)
        if target == "all":
            return text, None
        if target == "completion":
            first = answers[0]
            prompt = self._render(form, messages[:first], add_generation_prompt=True)
            # Some templates end a prompt with text that they do not write into the whole
            # conversation. The completion therefore begins where the two texts first differ.
            ranges = [(_common_length(prompt, text), len(text))]
        else:
            ranges = [self._find_answer(form, text, index) for index in answers]
        self._note_stop(messages[-1], text, ranges)
        return text, ranges

    def _answers(self, form: Chat, target: str) -> list[int]:
        """Return the indices of the messages to train on.

        Raises BadExample if flags exclude a message that the target includes.
        """
        messages = form.messages
        if target == "assistant":
            roles = [message["role"] for message in messages]
            answers = [index for index, role in enumerate(roles) if role == "assistant"]
            return [index for index in answers if not is_untrained(messages[index])]

        first = 0 if target == "all" else form.completion
        if first is None:
            first = len(messages) - 1
            if messages[first]["role"] != "assistant":
                raise BadExample("its last message is not the assistant's")
        chosen = range(first, len(messages))
        flagged = next((index for index in chosen if is_untrained(messages[index])), None)
        if flagged is not None:
            raise BadExample(
                f"a flag excludes message {flagged + 1} from the training,"
                f" and loss_on is {target}: give loss_on assistant"
            )
        return list(chosen)

    def _note_stop(self, last: Message, text: str, ranges: Ranges) -> None:
        """Add a note if the last answer has no end token: the model then does not learn to stop."""
        if last["role"] != "assistant" or not ranges or ranges[-1][1] != len(text):
            return
        contents = [content for kind, content in texts_of(last) if kind == "text"]
        if contents and text.rstrip().endswith(contents[-1].rstrip()):
            self.notes[NO_STOP] += 1

    def _render(self, form: Chat, messages: list[dict[str, Any]], **options: Any) -> str:
        settings = {"tools": form.tools, "tokenize": False, **self._variables(form), **options}
        try:
            text: str = self.tokenizer.apply_chat_template(messages, **settings)
        except TypeError:
            # A few templates, for example DeepSeek's, need the arguments of a tool call as JSON
            # text.
            messages = [serialize_arguments(one) for one in messages]
            text = self.tokenizer.apply_chat_template(messages, **settings)
        return text

    def _variables(self, form: Chat) -> dict[str, Any]:
        """Return the variables that a row gives to the chat template.

        Variables with the name of an argument of the tokenizer are left out. A row must not set
        these arguments, because one of them replaces the chat template.
        """
        return {name: form.options[name] for name in form.options if name not in self._arguments}

    def _find_answer(self, form: Chat, text: str, index: int) -> tuple[int, int]:
        """Return where an answer, the message `index`, starts and ends in the rendered `text`.

        The start is after the prompt, and the end is after the end-of-turn text.
        """
        messages = form.messages
        prompt = self._render(form, messages[:index], add_generation_prompt=True) if index else None
        through = self._render(form, messages[: index + 1])
        if prompt is not None and text.startswith(prompt) and text.startswith(through):
            # After the result of a tool, some templates end the prompt without a header for the
            # answer.
            is_open = self._opening and text.startswith(self._opening, len(prompt))
            return len(prompt) + (len(self._opening) if is_open else 0), len(through)

        # This template renders a message differently if other messages follow it. So replace each
        # text of the answer with a mark, and search the rendered text for the marks.
        marked = [*messages[:index], _with_marks(messages[index])]
        head, tail = _text_outside_marks(self._render(form, [*marked, *messages[index + 1 :]]))
        head_alone, tail_alone = _text_outside_marks(self._render(form, marked))
        if head is None or head_alone is None or not text.endswith(tail):
            raise BadExample(f"message {index + 1} cannot be located in the rendered text")

        start = len(head) - self._length_of_opening(form, index, head, head_alone, prompt)
        end = len(text) - len(tail)
        if index == len(messages) - 1:
            end = len(text)
        else:
            end += self._end_of_turn(form, marked, tail, tail_alone)
        return min(start, _common_length(head, text)), end

    def _length_of_opening(
        self, form: Chat, index: int, head: str, head_alone: str, prompt: str | None
    ) -> int:
        """Return the number of characters between an answer's header and its first text.

        The template writes these characters, for example an empty thought, and the model must learn
        them. `head` is the rendered text up to the first character of the answer's first text.
        """
        start = head.rfind(self._opening) + len(self._opening)
        before = texts_of(form.messages[index - 1]) if index else []
        # If the text of an earlier message comes after the opening, the opening belongs to an
        # earlier answer.
        is_own = not any(text.strip() in head[start:] for _, text in before)
        if self._opening and self._opening in head and is_own:
            return len(head) - start
        preamble = "" if prompt is None else head_alone[_common_length(prompt, head_alone) :]
        return len(preamble) if head.endswith(preamble) else 0

    def _end_of_turn(self, form: Chat, marked: list[Message], tail: str, tail_alone: str) -> int:
        """Return the length of the end-of-turn text at the beginning of `tail`.

        The end-of-turn text stands before the header of the next message. At the end of a
        conversation, the template may write a different text.
        """
        common = _common_length(tail, tail_alone)
        if not self._opening:
            return common
        try:
            followed = self._render(form, marked, add_generation_prompt=True)
        except Exception:  # a template may refuse a prompt after an answer
            return common
        _, tail_followed = _text_outside_marks(followed)
        ending = tail_followed.removesuffix(self._opening)
        is_known = ending and ending != tail_followed and tail.startswith(ending)
        return len(ending) if is_known else common

    @cached_property
    def _opening(self) -> str:
        """The text that opens an answer in a chat template, or "" if there is no such text."""
        question = Chat(messages=[{"role": "user", "content": MARK}])
        try:
            asked = self._render(question, question.messages)
            opened = self._render(question, question.messages, add_generation_prompt=True)
        except Exception:  # a template may refuse a conversation that has only a question
            return ""
        return opened.removeprefix(asked) if opened.startswith(asked) else ""

    def _encode_marked(self, form: Chat) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(
            form.messages,
            tools=form.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._variables(form),
        )
        return _mask(encoded["input_ids"], encoded["assistant_masks"])


def note_unread(notes: Counter[str], form: Plain | Chat, text: str) -> None:
    """Count empty answers, and columns and keys whose text is missing in the rendered text."""
    found = [UNREAD.format(name) for name in find_unread(form, text)]
    if has_empty_answer(form):
        found.append(EMPTY)
    for note in found:
        if note in notes or len(notes) < MOST_NOTES:
            notes[note] += 1


def describe(notes: Counter[str], number: int) -> list[str]:
    """Return the notes in words. Each says how many of the `number` examples it concerns."""
    return [f"{note} ({count:,} of {number:,} examples)" for note, count in notes.items()]


def _refusal(error: Exception) -> str:
    """Return why a chat template cannot render a row, as a clause for an error message.

    The original errors, of Jinja or Python, describe the template's code and not the row.
    """
    text = str(error).strip().partition("\n")[0]
    # Classes are compared by name, so that jinja2 is not imported.
    kinds = {one.__name__ for one in type(error).__mro__}
    if "UndefinedError" in kinds and (key := re.search(r"attribute '(\w+)'", text)):
        if "'str object'" in text:
            return f"the tokenizer's chat template expects an object with {key[1]!r} and finds text"
        return f"a message or a tool lacks {key[1]!r}, which the tokenizer's chat template needs"
    if kinds & {"TemplateError", "TimeoutError"}:
        return f"the tokenizer's chat template refuses the example{text and ': '}{text}"
    return (
        "the tokenizer's chat template cannot render the example: a value of a message, a call or a"
        " tool has another type than the template expects"
    )


def _with_marks(message: Message) -> Message:
    """Return a message with MARK in place of each of its texts.

    If the message has no text, MARK becomes its content.
    """
    kinds = {kind for kind, _ in texts_of(message)}
    if not kinds:
        return message | {"content": MARK}
    # The name of a function appears twice: in the call, and in the message with the result. So MARK
    # replaces the name only if the message has no other text.
    kept = "name" if kinds != {"name"} else ""

    def change(kind: str, text: str) -> str:
        return text if kind == kept or not text.strip() else MARK

    return map_texts(message, change)


def _text_outside_marks(text: str) -> tuple[str | None, str]:
    """Return the text before the first mark and the text after the last mark.

    Without marks, the first value is None.
    """
    head, mark, _ = text.partition(MARK)
    return (head, text.rpartition(MARK)[2]) if mark else (None, "")


def _common_length(left: str, right: str) -> int:
    """Return the length of the longest common prefix."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(right))


def label_of(row: dict[str, Any]) -> int | str:
    """Return the label of a row: a number or text.

    Raises ValueError for a row without a valid label.
    """
    for name in ("text", "label"):
        if row.get(name) is None:
            columns = ", ".join(map(str, row)) or "none"
            raise ValueError(
                f"an example for classification needs text and label; its columns: {columns}"
            )
    if not isinstance(row["text"], str):
        raise ValueError(f"the column text is {row['text']!r:.40}, which is not text")
    label = row["label"]
    # Tables store whole numbers as floats if some values of the column are missing.
    if isinstance(label, float) and label.is_integer():
        return int(label)
    if not isinstance(label, int | str):
        raise ValueError(f"the label {label!r:.40} is neither a whole number nor text")
    return label


def label_names(rows: Iterable[Located]) -> list[Any]:
    """Return the sorted labels of a dataset.

    Raises BadDataset if there are fewer than two labels, or if a row has no label.
    """
    found: set[int | str] = set()
    for where, row in rows:
        try:
            found.add(label_of(row))
        except ValueError as error:
            raise BadDataset(f"{where}: {error}") from None

    if len({isinstance(label, str) for label in found}) > 1:
        raise BadDataset("some labels are numbers, and other labels are text")
    if len(found) < 2:
        raise BadDataset(
            f"classification needs at least two labels, but the dataset has {len(found)}"
        )
    return sorted(found, key=lambda label: (isinstance(label, str), label))


def _mask(tokens: list[int], is_trained: list[Any]) -> list[int]:
    return [
        token if trained else -1 - token for token, trained in zip(tokens, is_trained, strict=True)
    ]

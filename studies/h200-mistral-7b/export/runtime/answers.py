# -*- coding: utf-8 -*-
"""Lets the model answer a prompt before and after its training.

The prompt has the form of the examples: if the examples are conversations, the chat template
renders the prompt; otherwise the prompt is plain text.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .forms import Chat, Plain, parse_row, texts_of
from .reading import read_rows

TOKENS = 48  # the largest number of tokens in an answer
# If an example has no prompt, its first words are the prompt: at most this number of words, and at
# most half of all words.
PLAIN_WORDS = 8


def first_example(path: Path, split: str | None, *, has_template: bool = True) -> Plain | Chat:
    """Return the first example of a dataset. Raises BadDataset if there is none."""
    return parse_row(*next(read_rows(path, split)), has_template=has_template)


def first_prompt(path: Path, split: str | None) -> str:
    """Return the first example's prompt; in a conversation, the first text of the user."""
    example = first_example(path, split)
    if isinstance(example, Plain):
        words = example.completion.split()
        return example.prompt or " ".join(words[: min(PLAIN_WORDS, (len(words) + 1) // 2)])
    texts = [
        text
        for message in example.messages
        if message["role"] == "user"
        for kind, text in texts_of(message)
        if kind == "text"
    ]
    return texts[0] if texts else ""


class Prompt:
    """A prompt and the tokenizer that reads it."""

    def __init__(self, text: str, tokenizer: Any, example: Plain | Chat) -> None:
        """Render the prompt in the form of `example`, an example from the dataset."""
        self._tokenizer = tokenizer
        if isinstance(example, Chat) and tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            self._tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            self._tokens = tokenizer(text)["input_ids"]

    def answer(self, model: Any, computing: AbstractContextManager[Any]) -> str:
        """Return the model's answer by greedy decoding, of at most TOKENS tokens.

        `computing` sets the precision.
        """
        import torch

        tokens = torch.tensor([self._tokens], device=next(model.parameters()).device)
        end = self._tokenizer.eos_token_id
        was_training = model.training
        model.eval()
        # For each new token, the whole sequence is computed again. This is slow, but needs no
        # key-value cache, which the attention implementation may not support.
        with torch.no_grad(), computing:
            for _ in range(TOKENS):
                logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
                # A model that was not trained on this form of prompt may end its answer at once. An
                # empty answer would be useless, so the end token is forbidden until there is text.
                if end is not None and not self._text(tokens):
                    logits[:, end] = -torch.inf
                following = logits.argmax(-1, keepdim=True)
                if following.item() == end:
                    break
                tokens = torch.cat([tokens, following], dim=1)
        model.train(was_training)
        return self._text(tokens)

    def _text(self, tokens: Any) -> str:
        """Return the text after the prompt."""
        answer = tokens[0, len(self._tokens) :].tolist()
        return str(self._tokenizer.decode(answer, skip_special_tokens=True)).strip()

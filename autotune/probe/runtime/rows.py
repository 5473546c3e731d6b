"""The rows to train on: one example a row, or several packed into it; padded on the right, without attention mask."""

import bisect
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

IGNORED = -100  # the label of a token that is not to be predicted

Row = list[torch.Tensor]  # the examples of a row, each a tensor of token ids


def read(path: str, tokenizer: Any, seq_len: int) -> list[torch.Tensor]:
    """The examples of a JSON Lines file, tokenised and cut at `seq_len` tokens.

    A line has text, prompt and completion, or messages. Ends the process on any other line, naming it.
    """
    examples = []
    for number, line in _lines(path):
        try:
            text, is_chat = _text(json.loads(line), tokenizer)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            sys.exit(f"{path}:{number}: needs text, prompt and completion, or messages: {error!r}")
        # A chat template writes its own special tokens.
        encoded = tokenizer(text, truncation=True, max_length=seq_len, add_special_tokens=not is_chat)
        examples.append(torch.tensor(encoded["input_ids"], dtype=torch.long))
    return examples


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _text(example: dict[str, Any], tokenizer: Any) -> tuple[str, bool]:
    """The text of an example, and whether a chat template wrote it. A column that is null counts as missing."""
    columns = {name: value for name, value in example.items() if value is not None}
    if "messages" in columns:
        return tokenizer.apply_chat_template(columns["messages"], tokenize=False), True
    text = columns["text"] if "text" in columns else columns["prompt"] + columns["completion"]
    return text + (tokenizer.eos_token or ""), False


def read_lengths(path: str, seq_len: int) -> list[int]:
    """The lengths in a file with one a line, cut at `seq_len`. Ends the process where there is none, or one below 1."""
    try:
        lengths = [min(int(line), seq_len) for line in Path(path).read_text(encoding="utf-8").split()]
    except ValueError as error:
        sys.exit(f"{path}: {error}")
    if not lengths or min(lengths) < 1:
        sys.exit(f"{path}: needs a length on each line, 1 or more")
    return lengths


def split(
    examples: list[torch.Tensor], seq_len: int, held_out: int, held_out_tokens: int
) -> tuple[list[torch.Tensor], list[Row]]:
    """The examples to train on, cut at `seq_len`; and as rows the last `held_out`, cut at `held_out_tokens`."""
    num_trained = len(examples) - held_out
    if held_out < 0 or num_trained < 1 or (held_out and held_out_tokens < 2):
        sys.exit(f"{held_out} of {len(examples)} examples, cut at {held_out_tokens} tokens, cannot be held out")
    trained = [example[:seq_len] for example in examples[:num_trained]]
    # A single token predicts nothing, and has no loss.
    evaluated = [[example[:held_out_tokens]] for example in examples[num_trained:] if len(example) > 1]
    return trained, evaluated


def hold_out(examples: list[torch.Tensor], share: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The examples to train on, and the share that is held out: drawn at random, always the same ones.

    Their number is rounded up, as `datasets` rounds it. A single token predicts nothing: such examples are left out.
    """
    number = min(math.ceil(share * len(examples)), len(examples) - 1)
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:number]
    held_out = set(drawn.tolist())
    trained = [example for index, example in enumerate(examples) if index not in held_out]
    return trained, [examples[index] for index in sorted(held_out) if len(examples[index]) > 1]


def pack(examples: list[torch.Tensor], seq_len: int) -> list[Row]:
    """Best-fit decreasing: the longest example first, each into the fullest row that has room for it."""
    rows: list[Row] = []
    rooms: list[tuple[int, float]] = []  # (-free tokens, index of the row), ascending: the emptiest row first
    for example in sorted(examples, key=len, reverse=True):
        place = bisect.bisect(rooms, (-len(example), math.inf)) - 1
        if place >= 0:
            room, index = rooms.pop(place)
        else:
            room, index = -seq_len, len(rows)
            rows.append([])
        rows[int(index)].append(example)
        bisect.insort(rooms, (room + len(example), index))
    return rows


def collate(rows: list[Row], seq_len: int, packing: bool) -> dict[str, torch.Tensor]:
    """A batch (rows x seq_len) of input_ids and labels; with `packing` also position_ids.

    Positions that restart keep packed examples apart: no example attends to another in its row. No token is predicted
    across a seam, and no padding is. Rows are longer than `seq_len` only where held-out examples are.
    """
    length = max(seq_len, *(_num_tokens(row) for row in rows))
    tokens, labels, positions = [], [], []
    for row in rows:
        padding = torch.zeros(length - _num_tokens(row), dtype=torch.long)
        parts = [*row, padding]
        places = torch.cat([torch.arange(len(part)) for part in parts])
        targets = torch.cat([*row, torch.full_like(padding, IGNORED)])
        tokens.append(torch.cat(parts))
        positions.append(places)
        labels.append(targets.masked_fill(places == 0, IGNORED))
    batch = {"input_ids": torch.stack(tokens), "labels": torch.stack(labels)}
    if packing:
        batch["position_ids"] = torch.stack(positions)
    return batch


def _num_tokens(row: Row) -> int:
    return sum(len(example) for example in row)

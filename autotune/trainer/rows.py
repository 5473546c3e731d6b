"""The rows to train on: one example a row, or several packed into it; padded on the right, mostly without a mask."""

import bisect
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import token_cache
from .varlen import with_segments

IGNORED = -100  # the label of a token that is not to be predicted

# The examples of a row. Each is a tensor of token ids; a token that is not trained on stands as -1 - token.
Row = list[torch.Tensor]


class Stored(Sequence[torch.Tensor]):
    """The examples in a folder of `token_cache`. They stay on the disk, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._ends = token_cache.read_ends(folder)
        self._tokens = torch.from_file(str(folder / "tokens"), size=self._ends[-1], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self._tokens[self._ends[index - 1] if index else 0 : self._ends[index]]


class Part(Sequence[torch.Tensor]):
    """The examples with these indices, cut at `seq_len` tokens."""

    def __init__(self, examples: Sequence[torch.Tensor], indices: Sequence[int], seq_len: int | None = None) -> None:
        self._examples, self._indices, self._seq_len = examples, indices, seq_len

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> torch.Tensor:  # type: ignore[override]
        return self._examples[self._indices[place]][: self._seq_len]


def read_lengths(path: str, seq_len: int) -> list[int]:
    """The lengths in a file with one a line, cut at `seq_len`. Ends the process where there is none, or one below 1."""
    try:
        lengths = [min(int(line), seq_len) for line in Path(path).read_text(encoding="utf-8").split()]
    except ValueError as error:
        sys.exit(f"{path}: {error}")
    if not lengths or min(lengths) < 1:
        sys.exit(f"{path}: needs a length on each line, 1 or more")
    return lengths


def num_targets(example: torch.Tensor) -> int:
    """The tokens of an example that are trained on. The first is never predicted."""
    return int((example[1:] >= 0).sum())


def with_prompt(example: torch.Tensor, trained_share: float) -> torch.Tensor:
    """An example of which only this share is trained on, at its end: one token at least, or it had no loss."""
    num_read = min(round(len(example) * (1 - trained_share)), len(example) - 1)
    return torch.cat([-1 - example[:num_read], example[num_read:]])


def split(
    examples: Sequence[torch.Tensor], seq_len: int, held_out: int, held_out_tokens: int
) -> tuple[Sequence[torch.Tensor], "Rows"]:
    """The examples to train on, cut at `seq_len`; and as rows the last `held_out`, cut at `held_out_tokens`.

    Those that have nothing to train on there are left out, since their loss is not a number.
    """
    num_trained = len(examples) - held_out
    if held_out < 0 or num_trained < 1 or (held_out and held_out_tokens < 2):
        sys.exit(f"{held_out} of {len(examples)} examples, cut at {held_out_tokens} tokens, cannot be held out")
    trained = _with_targets(examples, range(num_trained), seq_len)
    if len(trained) < num_trained:
        left_out = f"{num_trained - len(trained)} of {num_trained} examples"
        print(f"train.py: {left_out} have nothing to train on in {seq_len} tokens", file=sys.stderr)
    return trained, Rows(_with_targets(examples, range(num_trained, len(examples)), held_out_tokens))


def hold_out(
    examples: Sequence[torch.Tensor], share: float, seq_len: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The examples to train on; and the share that is held out, drawn at random and always the same, cut at `seq_len`.

    Their number is rounded up, as `datasets` rounds it. Those that have nothing to predict there are left out.
    """
    number = min(math.ceil(share * len(examples)), len(examples) - 1)
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:number]
    held_out = set(drawn.tolist())
    trained = [index for index in range(len(examples)) if index not in held_out]
    return Part(examples, trained), _with_targets(examples, sorted(held_out), seq_len)


def _with_targets(examples: Sequence[torch.Tensor], indices: Iterable[int], seq_len: int) -> Part:
    return Part(examples, [index for index in indices if num_targets(examples[index][:seq_len])], seq_len)


class Rows(Sequence[Row]):
    """Rows of these examples: those with the indices of a group in each, or one in each."""

    def __init__(self, examples: Sequence[torch.Tensor], groups: Sequence[Sequence[int]] | None = None) -> None:
        self._examples = examples
        self._groups = groups

    def __len__(self) -> int:
        return len(self._examples if self._groups is None else self._groups)

    def __getitem__(self, place: int) -> Row:  # type: ignore[override]
        return [self._examples[index] for index in ([place] if self._groups is None else self._groups[place])]


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Best-fit decreasing: the longest example first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, float]] = []  # (-free tokens, index of the row), ascending: the emptiest row first
    for example in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[example]
        place = bisect.bisect(rooms, (-length, math.inf)) - 1
        if place >= 0:
            room, index = rooms.pop(place)
        else:
            room, index = -seq_len, len(rows)
            rows.append([])
        rows[int(index)].append(example)
        bisect.insort(rooms, (room + length, index))
    return rows


def collate(
    rows: list[Row], padded_lengths: Sequence[int], packing: bool, *, masked: bool = False, varlen: bool = False
) -> dict[str, Any]:
    """A batch (rows x length) of input_ids and labels; with `packing` also position_ids, if `masked` attention_mask.

    With `varlen`, packed rows also have the segments that attention by their lengths needs.

    The length is that of the longest row, or the next of `padded_lengths`, which ascend. Positions that restart keep
    packed examples apart: no example attends to another in its row. No token is predicted across a seam, no padding is,
    and none that is not trained on. Rows are longer than the last of `padded_lengths` only where held-out examples are.
    """
    longest = max(num_tokens(row) for row in rows)
    length = next((length for length in padded_lengths if length >= longest), longest)
    tokens, labels, positions = [], [], []
    for row in rows:
        padding = torch.zeros(length - num_tokens(row), dtype=torch.long)
        parts = [*row, padding]
        places = torch.cat([torch.arange(len(part)) for part in parts])
        stored = torch.cat([*row, padding - 1]).long()
        tokens.append(torch.where(stored < 0, -1 - stored, stored))
        positions.append(places)
        labels.append(stored.masked_fill((stored < 0) | (places == 0), IGNORED))
    batch = {"input_ids": torch.stack(tokens), "labels": torch.stack(labels)}
    if packing:
        batch["position_ids"] = torch.stack(positions)
    if masked:
        num_tokens_each = torch.tensor([num_tokens(row) for row in rows])
        batch["attention_mask"] = (torch.arange(length) < num_tokens_each[:, None]).long()
    return with_segments(batch) if varlen else batch


def num_tokens(row: Row) -> int:
    """Tokens of a row, without padding."""
    return sum(len(example) for example in row)

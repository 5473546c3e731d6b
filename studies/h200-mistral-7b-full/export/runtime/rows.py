# -*- coding: utf-8 -*-
"""The rows to train on: each row has one example, or several packed examples.

Rows are padded on the right, usually without an attention mask.
"""

import bisect
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import token_cache
from .varlen import add_segments

IGNORED = -100  # the label of a token that the loss ignores
BLANK = torch.tensor([-1, -1])  # an example without a token to train on

# The examples of a row. Each example is a tensor of token ids. A token that is not trained on is
# stored as -1 - token.
Row = list[torch.Tensor]


class StoredExamples(Sequence[torch.Tensor]):
    """The examples in a folder of `token_cache`, mapped from the disk into memory."""

    def __init__(self, folder: Path) -> None:
        self._ends = token_cache.read_ends(folder)
        size = self._ends[-1]
        self._tokens = torch.from_file(str(folder / "tokens"), size=size, dtype=torch.int32)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self._tokens[self._ends[index - 1] if index else 0 : self._ends[index]]


class Selection(Sequence[torch.Tensor]):
    """The examples with the given indices, truncated to `seq_len` tokens."""

    def __init__(
        self, examples: Sequence[torch.Tensor], indices: Sequence[int], seq_len: int | None = None
    ) -> None:
        self._examples = examples
        self._indices = indices
        self._seq_len = seq_len

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> torch.Tensor:  # type: ignore[override]
        return self._examples[self._indices[place]][: self._seq_len]


def read_lengths(path: str, seq_len: int) -> list[int]:
    """Read a file with one length on each line, and truncate the lengths to `seq_len`.

    Ends the process if the file has no length, or a length below 1.
    """
    try:
        lengths = [
            min(int(line), seq_len) for line in Path(path).read_text(encoding="utf-8").split()
        ]
    except ValueError as error:
        sys.exit(f"{path}: {error}")
    if not lengths or min(lengths) < 1:
        sys.exit(f"{path}: each line needs a length of at least 1")
    return lengths


def num_targets(example: torch.Tensor) -> int:
    """Return the number of tokens to train on.

    The first token of an example does not count, because a model never predicts it.
    """
    return int((example[1:] >= 0).sum())


def mask_prompt(example: torch.Tensor, trained_share: float) -> torch.Tensor:
    """Mask an example's first tokens, so that only the other tokens are trained on.

    The fraction `trained_share` of the tokens is trained on, but at least one token, because an
    example without trained tokens has no loss.
    """
    num_masked = min(round(len(example) * (1 - trained_share)), len(example) - 1)
    return torch.cat([-1 - example[:num_masked], example[num_masked:]])


def split(
    examples: Sequence[torch.Tensor], seq_len: int, held_out: int, held_out_tokens: int
) -> tuple[Sequence[torch.Tensor], "Rows"]:
    """Return the examples to train on, and the last `held_out` examples as rows.

    Examples to train on are truncated to `seq_len` tokens, and held-out rows to `held_out_tokens`.
    Examples without a token to train on are left out, because their loss would be NaN.
    """
    num_trained = len(examples) - held_out
    if held_out < 0 or num_trained < 1 or (held_out and held_out_tokens < 2):
        sys.exit(
            f"{held_out} of {len(examples)} examples, truncated to {held_out_tokens} tokens,"
            " cannot be held out"
        )

    trained = _select_trainable(examples, range(num_trained), seq_len)
    if len(trained) < num_trained:
        left_out = f"{num_trained - len(trained)} of {num_trained} examples"
        print(
            f"train.py: {left_out} have no token to train on in their first {seq_len} tokens",
            file=sys.stderr,
        )
    evaluated = range(num_trained, len(examples))
    return trained, Rows(_select_trainable(examples, evaluated, held_out_tokens))


def hold_out(
    examples: Sequence[torch.Tensor], share: float, seq_len: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the examples to train on, and the held-out examples, truncated to `seq_len` tokens.

    The fraction `share` of the examples is held out, drawn at random with a fixed seed. The number
    of held-out examples is rounded up, as in `datasets`. Only held-out examples are truncated.
    Held-out examples without a token to predict are left out.
    """
    number = min(math.ceil(share * len(examples)), len(examples) - 1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(examples), generator=generator)[:number]
    held_out = set(drawn.tolist())
    trained = [index for index in range(len(examples)) if index not in held_out]
    return Selection(examples, trained), _select_trainable(examples, sorted(held_out), seq_len)


def _select_trainable(
    examples: Sequence[torch.Tensor], indices: Iterable[int], seq_len: int
) -> Selection:
    trainable = [index for index in indices if num_targets(examples[index][:seq_len])]
    return Selection(examples, trainable, seq_len)


class Rows(Sequence[Row]):
    """Rows of examples. Each group of indices is a row; without groups, each example is a row."""

    def __init__(
        self, examples: Sequence[torch.Tensor], groups: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._examples = examples
        self._groups = groups

    def __len__(self) -> int:
        return len(self._examples if self._groups is None else self._groups)

    def __getitem__(self, place: int) -> Row:  # type: ignore[override]
        indices = [place] if self._groups is None else self._groups[place]
        return [self._examples[index] for index in indices]


class WholeBatches(Sequence[Any]):
    """Rows, followed by as many blank rows as fill the last micro batch of all GPUs.

    An epoch thus trains on every row, and all micro batches have the same number of rows. A blank
    row has no label, so it changes neither the loss nor the gradients. An optimizer step never has
    only blank rows, because their number is below `size`, the rows of a micro batch of all GPUs.
    """

    def __init__(self, rows: Sequence[Any], size: int, blank: Any) -> None:
        self._rows = rows
        self._blank = blank
        self._number = math.ceil(len(rows) / size) * size

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, place: int) -> Any:  # type: ignore[override]
        if place >= self._number:
            raise IndexError(place)
        return self._rows[place] if place < len(self._rows) else self._blank


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Pack examples into rows by best-fit decreasing; return the examples' indices for each row.

    Examples are placed from the longest to the shortest. Each example goes into the fullest row
    that has room for it.
    """
    rows: list[list[int]] = []
    # Pairs (minus the number of free tokens, index of the row) in ascending order, so the emptiest
    # row comes first
    rooms: list[tuple[int, float]] = []

    for example in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[example]
        place = bisect.bisect(rooms, (-length, math.inf)) - 1
        if place >= 0:
            room, index = rooms.pop(place)
        else:
            room = -seq_len
            index = len(rows)
            rows.append([])
        rows[int(index)].append(example)
        bisect.insort(rooms, (room + length, index))
    return rows


def collate(
    rows: list[Row],
    padded_lengths: Sequence[int],
    packing: bool,
    *,
    masked: bool = False,
    varlen: bool = False,
) -> dict[str, Any]:
    """Return a batch (rows x length) of input_ids and labels.

    `packing` adds position_ids, `masked` adds attention_mask, and `varlen` adds the segments that
    varlen attention needs for packed rows. The batch is padded to the first of `padded_lengths`
    (ascending) that the longest row fits into. Without `padded_lengths`, the batch has the length
    of the longest row. Only held-out rows may be longer than the last of `padded_lengths`.

    Positions restart at 0 in each packed example, which tells the model not to attend to other
    examples. Three kinds of tokens get the label IGNORED: the first token of an example, padding,
    and tokens that are not trained on.
    """
    longest = max(num_tokens(row) for row in rows)
    length = next((length for length in padded_lengths if length >= longest), longest)

    tokens = []
    labels = []
    positions = []
    for row in rows:
        padding = torch.zeros(length - num_tokens(row), dtype=torch.long)
        places = torch.cat([torch.arange(len(part)) for part in (*row, padding)])
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
    return add_segments(batch) if varlen else batch


def num_tokens(row: Row) -> int:
    """Return the number of tokens in a row, without padding."""
    return sum(len(example) for example in row)

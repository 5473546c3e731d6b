# -*- coding: utf-8 -*-
# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of grouped matrix products (grouped GEMM), which can include adapters.

S rows of K values are sorted by expert. Each row is multiplied by the matrix of its expert; the E
matrices are E x K x N. A tile is a part of one expert's rows. Each Triton program computes some
columns of one tile. The program finds the tile's expert on the device, from the ends of the
experts' rows, so the host never waits. Sums are in fp32.
"""

import functools

import torch
import triton
import triton.language as tl

LONGEST_TILE = 128
WIDEST = 128  # columns of a program
# Columns of a program of `multiply` on GPUs whose shared memory holds the blocks of three steps
WIDEST_PRODUCT = 256
DEPTH = 64  # elements that a program multiplies at a time
LEAST = 16  # the fewest rows, columns or elements that a matrix unit multiplies


def multiply(
    rows: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    hidden: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows (S x K) times the matrices (E x K x N) of their experts, as S x N.

    The rows of expert e end before row `ends[e]`, and the next expert's rows begin there. If
    `hidden` (S x r) and `up` (E x r x N) are passed, hidden * up is added to the outputs in fp32.
    """
    (count, size), (experts, _, width) = rows.shape, weights.shape
    outputs = rows.new_empty(count, width)
    # Half of an expert's mean number of rows, so that few rows of its last tile are empty
    tile = _block(count // (2 * experts), LONGEST_TILE)
    widest = WIDEST_PRODUCT if _has_large_shared_memory(rows.device) else WIDEST
    columns, depth = _block(width, widest), _block(size, DEPTH)
    # An upper bound: only the last tile of each expert may be partly empty.
    tiles = count // tile + experts
    grid = (tiles * triton.cdiv(width, columns),)
    rank = 0 if hidden is None else hidden.shape[1]
    _multiply[grid](
        rows,
        weights,
        hidden,
        up,
        ends,
        outputs,
        experts,
        size,
        rank,
        width,
        *rows.stride(),
        *weights.stride(),
        *((0, 0) if hidden is None else hidden.stride()),
        *((0, 0, 0) if up is None else up.stride()),
        *outputs.stride(),
        EXPERTS=triton.next_power_of_2(experts),
        TILE=tile,
        COLUMNS=columns,
        DEPTH=depth,
        RANK=_block(rank, DEPTH),
        PRECISE=rows.dtype is torch.float32,
        num_warps=8 if tile * columns >= 128 * 128 else 4,
        num_stages=3,
    )
    return outputs


@functools.cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a multiprocessor holds three steps' blocks of the widest product."""
    blocks = 3 * 2 * DEPTH * (LONGEST_TILE + WIDEST_PRODUCT)
    available: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return available >= blocks


def weight_gradient(rows: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the gradients (E x K x N) of the experts' matrices.

    `rows` (S x K) are the inputs, and `gradient` (S x N) is the gradient of the outputs.
    """
    experts, size, width = len(ends), rows.shape[1], gradient.shape[1]
    outputs = rows.new_empty(experts, size, width)
    lines, columns = _block(size, WIDEST), _block(width, WIDEST)
    grid = (experts, triton.cdiv(size, lines) * triton.cdiv(width, columns))
    _weight_gradient[grid](
        rows,
        gradient,
        ends,
        outputs,
        size,
        width,
        *rows.stride(),
        *gradient.stride(),
        *outputs.stride(),
        LINES=lines,
        COLUMNS=columns,
        DEPTH=DEPTH,
        PRECISE=rows.dtype is torch.float32,
        num_warps=8 if lines * columns >= 128 * 128 else 4,
        num_stages=3,
    )
    return outputs


def _block(number: int, most: int) -> int:
    """Round `number` up to a power of 2, and limit the result to LEAST to `most`."""
    power: int = triton.next_power_of_2(max(number, 1))
    return min(max(power, LEAST), most)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(
    rows,
    weights,
    hidden,
    up,
    ends,
    outputs,
    experts,
    size,
    rank,
    width,
    row_step,
    row_element,
    weight_expert,
    weight_line,
    weight_column,
    hidden_step,
    hidden_element,
    up_expert,
    up_line,
    up_column,
    output_step,
    output_column,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    PRECISE: tl.constexpr,
):
    parts = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) % parts

    # The expert of this tile, and its rows
    every = tl.arange(0, EXPERTS)
    known = every < experts
    begins_at = tl.load(ends + every - 1, mask=known & (every > 0), other=0)
    ends_at = tl.load(ends + every, mask=known, other=0)
    tiles = tl.where(known, tl.cdiv(ends_at - begins_at, TILE), 0)
    tiles_until = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_until <= tile).to(tl.int32), 0)
    if tl.sum(tiles, 0) <= tile:
        return
    own = every == expert
    begin = tl.sum(tl.where(own, begins_at + (tile - tiles_until + tiles) * TILE, 0), 0)
    end = tl.sum(tl.where(own, ends_at, 0), 0)

    line = begin + tl.arange(0, TILE)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    element = tl.arange(0, DEPTH)
    is_row, is_column = (line < end)[:, None], (column < width)[None, :]
    left = rows + line.to(tl.int64)[:, None] * row_step + element[None, :] * row_element
    right = weights + expert.to(tl.int64) * weight_expert
    right += element[:, None] * weight_line + column[None, :] * weight_column

    total = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    for done in range(0, size, DEPTH):
        inside = element < size - done
        a = tl.load(left, mask=is_row & inside[None, :], other=0.0)
        b = tl.load(right, mask=is_column & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee" if PRECISE else "tf32")
        left += DEPTH * row_element
        right += DEPTH * weight_line

    if hidden is not None:
        element = tl.arange(0, RANK)
        left = hidden + line.to(tl.int64)[:, None] * hidden_step + element[None, :] * hidden_element
        right = up + expert.to(tl.int64) * up_expert
        right += element[:, None] * up_line + column[None, :] * up_column
        for done in range(0, rank, RANK):
            inside = element < rank - done
            a = tl.load(left, mask=is_row & inside[None, :], other=0.0)
            b = tl.load(right, mask=is_column & inside[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee" if PRECISE else "tf32")
            left += RANK * hidden_element
            right += RANK * up_line

    place = outputs + line.to(tl.int64)[:, None] * output_step + column[None, :] * output_column
    tl.store(place, total.to(outputs.dtype.element_ty), mask=is_row & is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _weight_gradient(
    rows,
    gradient,
    ends,
    outputs,
    size,
    width,
    row_step,
    row_element,
    gradient_step,
    gradient_column,
    output_expert,
    output_line,
    output_column,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISE: tl.constexpr,
):
    expert = tl.program_id(0)
    parts = tl.cdiv(width, COLUMNS)
    line = tl.program_id(1) // parts * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) % parts * COLUMNS + tl.arange(0, COLUMNS)
    is_line, is_column = (line < size)[:, None], (column < width)[None, :]

    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((LINES, COLUMNS), dtype=tl.float32)
    for first in range(begin, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        inside = row < end
        row = row.to(tl.int64)
        a = tl.load(
            rows + row[None, :] * row_step + line[:, None] * row_element,
            mask=is_line & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            gradient + row[:, None] * gradient_step + column[None, :] * gradient_column,
            mask=is_column & inside[:, None],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee" if PRECISE else "tf32")

    place = outputs + expert.to(tl.int64) * output_expert
    place += line[:, None] * output_line + column[None, :] * output_column
    tl.store(place, total.to(outputs.dtype.element_ty), mask=is_line & is_column)

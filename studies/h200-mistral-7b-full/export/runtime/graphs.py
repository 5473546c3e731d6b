# -*- coding: utf-8 -*-
"""Runs the forward and backward pass of a micro batch as a CUDA graph.

Each shape of micro batch has a separate graph, which is captured once and then replayed. A replay
costs the host one call instead of thousands of kernel launches. Without a graph, a step with a
small micro batch or a small model is CPU-bound.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import masking_utils

MOST_SHAPES = 4  # the most graphs; there is one graph for each length that rows are padded to
Batch = dict[str, torch.Tensor]


class MicroBatchGraphs:
    """Runs micro batches with CUDA graphs: adds up their gradients and returns their losses.

    The first micro batch of a shape runs without a graph, so that libraries load their kernels and
    layers are compiled. Then the graph of this shape is captured, and later micro batches of the
    shape replay it. A graph stores memory addresses, so gradients are added up in permanent
    buffers. Before each micro batch, each parameter without a gradient gets its buffer as the
    gradient, filled with zeros. All graphs share one memory pool.
    """

    captured = 0  # number of graphs that this process has captured

    def __init__(
        self, step: Callable[[Batch], torch.Tensor], parameters: Iterable[nn.Parameter]
    ) -> None:
        self._step = step
        self._buffers = [(parameter, torch.zeros_like(parameter)) for parameter in parameters]
        self._graphs: dict[Any, tuple[Any, Batch, torch.Tensor]] = {}
        self._pool: Any = None

    def run(self, batch: Batch) -> torch.Tensor:
        """Add a micro batch's gradients to the parameters' gradients, and return its loss.

        Raises ValueError if the micro batches have more than MOST_SHAPES shapes.
        """
        self._offer_buffers()
        shape = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.items()))

        # This is the first micro batch of its shape.
        if shape not in self._graphs:
            if len(self._graphs) == MOST_SHAPES:
                raise ValueError(
                    f"micro batches have more than {MOST_SHAPES} shapes, and each shape"
                    " needs a CUDA graph"
                )
            # The capture makes no masks. The first run must make none either: otherwise the capture
            # would compile the layers again, and fail. A compilation during the capture is an error
            # that names the cause.
            with skip_masks():
                loss = self._step(batch).clone()
                with torch.compiler.set_stance("fail_on_recompile"):
                    self._graphs[shape] = self._capture(batch)
            return loss

        graph, inputs, loss = self._graphs[shape]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor, non_blocking=True)
        graph.replay()
        return loss.clone()  # a copy, because other graphs overwrite this memory

    def _offer_buffers(self) -> None:
        absent = [
            (parameter, buffer) for parameter, buffer in self._buffers if parameter.grad is None
        ]
        if absent:
            torch._foreach_zero_([buffer for _, buffer in absent])
        for parameter, buffer in absent:
            parameter.grad = buffer

    def _capture(self, batch: Batch) -> tuple[Any, Batch, torch.Tensor]:
        """Capture a graph; return it with its input and loss tensors. A capture runs no kernel."""
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        # "thread_local" lets other threads allocate memory during the capture, for example to pin
        # batches.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._step(inputs)
        self._pool = graph.pool()
        MicroBatchGraphs.captured += 1
        return graph, inputs, loss


@contextmanager
def skip_masks() -> Iterator[None]:
    """Stop transformers from making masks for rows that are not packed and have no padding mask.

    transformers reads from the device whether positions restart. During a capture, the host cannot
    read from the device, and transformers would then make a mask without this check. Before 5.23,
    transformers made a causal mask in every capture. With a mask, attention uses a slower kernel,
    and compiled layers are compiled again.
    """
    find, is_tracing = masking_utils.find_packed_sequence_indices, masking_utils.is_tracing
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    masking_utils.is_tracing = lambda *args: False
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
        masking_utils.is_tracing = is_tracing


def is_capturing() -> bool:
    """Return whether a CUDA graph is captured now, so that launched kernels become part of it."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

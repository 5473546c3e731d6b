"""The forward and backward pass of a micro batch as a CUDA graph: captured once for each shape, then replayed.

A replay costs the host one call, where it issues thousands of kernels otherwise. With a small micro batch, or a small
model, the device waits for the host.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import masking_utils

MOST_SHAPES = 4  # as many as lengths that rows are padded to
Batch = dict[str, torch.Tensor]


class MicroBatchGraphs:
    """Runs a step by CUDA graphs. It takes the tensors of a micro batch, adds up gradients, and returns the loss.

    The first micro batch of a shape runs as usual, in which libraries load kernels and layers are compiled; then its
    graph is captured, and later ones are replayed. Gradients are added up in buffers that stay, since a graph knows
    addresses: where the optimizer has let go of them they come back as zeros. All graphs share one pool of memory.
    """

    captured = 0  # graphs of this process so far

    def __init__(self, step: Callable[[Batch], torch.Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self._step = step
        self._buffers = [(parameter, torch.zeros_like(parameter)) for parameter in parameters]
        self._graphs: dict[Any, tuple[Any, Batch, torch.Tensor]] = {}
        self._pool: Any = None

    def run(self, batch: Batch) -> torch.Tensor:
        """The loss of a micro batch, whose gradients are added up. Raises ValueError for a fifth shape."""
        self._offer_buffers()
        shape = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.items()))
        if shape not in self._graphs:
            if len(self._graphs) == MOST_SHAPES:
                raise ValueError(f"micro batches have more than {MOST_SHAPES} shapes, each of which needs a CUDA graph")
            with rows_are_whole():  # as in the capture, or layers would be compiled again there, which fails
                loss = self._step(batch).clone()
                self._graphs[shape] = self._capture(batch)
            return loss
        graph, inputs, loss = self._graphs[shape]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor, non_blocking=True)
        graph.replay()
        return loss.clone()  # its memory is another graph's too

    def _offer_buffers(self) -> None:
        absent = [(parameter, buffer) for parameter, buffer in self._buffers if parameter.grad is None]
        if absent:
            torch._foreach_zero_([buffer for _, buffer in absent])
        for parameter, buffer in absent:
            parameter.grad = buffer

    def _capture(self, batch: Batch) -> tuple[Any, Batch, torch.Tensor]:
        """A graph, the inputs that it reads and the loss that it writes. Nothing runs on the device."""
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, as those that pin the memory of batches.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._step(inputs)
        self._pool = graph.pool()
        MicroBatchGraphs.captured += 1
        return graph, inputs, loss


@contextmanager
def rows_are_whole() -> Iterator[None]:
    """Inside, transformers takes no row for a packed one.

    It reads from the device whether positions begin anew, and under capture, where it cannot, makes a mask.
    """
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def is_capturing() -> bool:
    """Whether what is issued now becomes part of a graph."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

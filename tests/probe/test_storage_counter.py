"""A StorageCounter counts what is alive, and adds gradients in place where autograd does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import profile

from autotune.probe.storage_counter import StorageCounter

pytestmark = pytest.mark.probe

META = torch.device("meta")


def test_a_storage_counts_until_nothing_refers_to_it() -> None:
    with StorageCounter(META) as counter:
        first = torch.empty(100, device=META)  # 400 bytes, a block of 512
        view = first.view(10, 10)
        assert counter.live == 512
        del first
        assert counter.live == 512
        second = view + 1
        assert counter.live == 1024
        del view
        assert counter.live == 512
        del second
        assert counter.live == 0
        assert counter.take_peak() == 1024
        assert counter.take_peak() == 0


def test_what_autograd_keeps_counts() -> None:
    weight = torch.ones(64, 64, device=META, requires_grad=True)
    with StorageCounter(META) as counter:
        inner = weight * 2
        loss = inner.sin().sum()  # the sine is freed, its argument is kept
        del inner
        assert counter.live == 64 * 64 * 4 + 512
        loss.backward()
        del loss
        assert counter.live == 64 * 64 * 4  # the gradient


def test_the_work_of_products_and_the_bytes_that_move() -> None:
    left, right = torch.ones(8, 16, device=META), torch.ones(16, 32, device=META)
    with StorageCounter(META) as counter:
        _ = left @ right + 1
    assert counter.flops == {"mm": 2 * 8 * 16 * 32}
    assert counter.moved == {"product": 4 * (8 * 16 + 16 * 32 + 8 * 32), "other": 4 * 2 * 8 * 32}


def test_a_kernels_own_memory_counts_while_it_runs() -> None:
    with StorageCounter(META, lambda func, args: 4096 if func is torch.ops.aten.mm.default else 0) as counter:
        _ = torch.ones(8, 16, device=META) @ torch.ones(16, 8, device=META)
    assert counter.take_peak() == 512 + 512 + 512 + 4096


class _SumInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        first, second = gradients[0] * 2, gradients[0] * 3
        return first + second  # Python refers to both


def branches(leaf: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    inner = leaf * 1
    outer = inner @ weight + inner + inner.sin()
    result: torch.Tensor = (outer + _SumInside.apply(outer)).sum()
    return result


def residuals(leaf: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    inner = leaf * 1
    middle = inner + inner @ weight
    return (middle + middle @ weight).sum()


def views(leaf: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    inner = leaf * 1
    view = inner.view(2, 2, -1)
    return (view * 2).sum() + (inner.t() * 3).sum() + (view * 4).sum()


@pytest.mark.filterwarnings("ignore")  # the profiler's own
@pytest.mark.parametrize("graph", [branches, residuals, views])
def test_gradients_are_added_in_place_where_autograd_does(
    graph: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    leaf, weight = torch.ones(4, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
    with profile() as recorded:
        graph(leaf, weight).backward()
    events = [event.name for event in sorted(recorded.events(), key=lambda event: event.time_range.start)]
    begin = max(index for index, name in enumerate(events) if name == "aten::ones_like")
    real = [name.removeprefix("aten::") for name in events[begin:] if name in ("aten::add", "aten::add_")]

    seen: list[str] = []

    class Watched(StorageCounter):
        def _count_work(self, func: Any, *rest: Any) -> None:
            seen.append(func.overloadpacket.__name__)

    leaf, weight = leaf.detach().requires_grad_(), weight.detach().requires_grad_()
    with Watched(torch.device("cpu")):
        graph(leaf, weight).backward()
    begin = max(index for index, name in enumerate(seen) if name == "ones_like")
    assert [name for name in seen[begin:] if name in ("add", "add_")] == real

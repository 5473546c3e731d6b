"""A StorageCounter counts what is alive, and adds gradients in place where autograd does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.profiler import profile

from autotune.dry.storage_counter import (
    GROUPED_PRODUCT,
    INDEXED,
    OTHER,
    PRODUCT,
    PRODUCT_IN_8_BITS,
    STRIDED,
    THIN,
    UNPACKED_PRODUCT,
    StorageCounter,
    _repeat_heads,
    blocks,
)

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
    assert counter.moved == {THIN: 4 * (8 * 16 + 16 * 32 + 8 * 32), OTHER: 4 * 2 * 8 * 32}
    assert counter.operations == 2


@pytest.mark.parametrize(("inner", "kind"), [(299, THIN), (300, PRODUCT)])
def test_a_product_with_little_arithmetic_for_a_byte_is_thin(inner: int, kind: str) -> None:
    """Of 300 x 300 in 16 bits there are 100 operations for each byte."""
    left, right = (
        torch.ones(*shape, device=META, dtype=torch.bfloat16)
        for shape in ((300, inner), (inner, 300))
    )
    with StorageCounter(META) as counter:
        _ = left @ right
    assert dict(counter.moved) == {kind: 2 * (2 * 300 * inner + 300 * 300)}


def test_products_that_torch_knows_no_arithmetic_of() -> None:
    """Each expert multiplies its rows, all of them once; a 4-bit weight is unpacked before it is
    multiplied.

    Inputs and a weight in 8 bits are multiplied as they are.
    """
    rows, experts = (
        torch.ones(*shape, device=META, dtype=torch.bfloat16) for shape in ((64, 32), (4, 32, 48))
    )
    counter = StorageCounter(META)

    def operation(name: str) -> Any:
        return SimpleNamespace(
            overloadpacket=type("Packet", (), {"__name__": name})(), is_view=False
        )

    out = torch.empty(64, 48, device=META, dtype=torch.bfloat16)
    counter._count_work(operation(GROUPED_PRODUCT), (rows, experts), {}, out)
    assert counter.flops == {GROUPED_PRODUCT: 2 * 64 * 32 * 48}
    assert (
        counter.moved == {THIN: 2 * (64 * 32 + 4 * 32 * 48 + 64 * 48)} and counter.operations == 1
    )
    counter.begin()
    offsets = torch.zeros(4, dtype=torch.int32, device=META)
    counter._count_work(operation("grouped_mm_fallback"), (rows, experts, offsets), {}, out)
    counter._count_work(
        operation("grouped_mm_fallback_backward"),
        (out, rows, experts, offsets),
        {},
        (rows, experts),
    )
    once = 2 * 64 * 32 * 48
    assert counter.flops == {"grouped_mm_fallback": once, "grouped_mm_fallback_backward": 2 * once}
    counter.begin()
    packed = torch.empty(48 * 32 // 2, 1, dtype=torch.uint8, device=META)
    counter._count_work(operation(UNPACKED_PRODUCT), (rows, packed, (48, 32)), {}, out)
    assert counter.flops == {UNPACKED_PRODUCT: 2 * 64 * 32 * 48} and counter.operations == 1
    assert counter.moved[OTHER] == 48 * 32 // 2 + 2 * 48 * 32
    assert counter.moved[THIN] == 2 * (64 * 32 + 48 * 32 + 64 * 48)
    counter.begin()
    left, right = (
        torch.empty(*shape, device=META, dtype=torch.int8) for shape in ((64, 32), (48, 32))
    )
    counter._count_work(operation(PRODUCT_IN_8_BITS), (left, right), {}, out)
    assert counter.flops == {PRODUCT_IN_8_BITS: 2 * 64 * 32 * 48} and counter.operations == 1
    assert counter.moved == {THIN: 64 * 32 + 48 * 32 + 2 * 64 * 48}


def test_a_product_is_unaligned_where_quick_kernels_could_not_load_its_rows() -> None:
    """Kernels load 16 bytes, which is 8 numbers in 16 bits: a vocabulary of 33 is none of these
    multiples, 40 is.
    """
    rows = torch.ones(8, 16, device=META, dtype=torch.bfloat16)
    counter = StorageCounter(META)
    with counter:
        for size, name in ((33, "mm unaligned"), (40, "mm")):
            counter.begin()
            weight = torch.empty(size, 16, device=META, dtype=torch.bfloat16)
            scores = rows @ weight.t()  # only what comes out is not aligned
            assert counter.flops == {name: 2 * 8 * 16 * size}
            _ = scores @ weight
            assert counter.flops == {name: 2 * 2 * 8 * 16 * size}
        counter.begin()
        _ = torch.bmm(
            rows[:1].expand(1, 8, 16), torch.empty(1, 16, 3, device=META, dtype=torch.bfloat16)
        )
    assert counter.flops == {"bmm unaligned": 2 * 8 * 16 * 3}


def test_an_addend_as_large_as_the_sum_is_copied_to_it() -> None:
    left, right, addend = (torch.empty(*shape, device=META) for shape in ((8, 4), (4, 16), (8, 16)))
    counter = StorageCounter(META)
    with counter:
        _ = torch.addmm(addend, left, right)
        assert counter.moved[OTHER] == 4 * 2 * 8 * 16
        _ = torch.baddbmm(addend[None], left[None], right[None])
        assert counter.moved[OTHER] == 2 * 4 * 2 * 8 * 16
        counter.begin()
        _ = torch.addmm(addend[0], left, right)  # a bias is added by the product's own kernel
    assert OTHER not in counter.moved


@pytest.mark.parametrize(("size", "wide"), [(128, ""), (136, " wide")])
@pytest.mark.parametrize("causal", [True, False])
def test_memory_efficient_attention_skips_later_positions_and_is_slow_with_wide_heads(
    size: int, wide: str, causal: bool
) -> None:
    """Forward has two products of queries and keys or of scores and values, backward five."""
    counter = StorageCounter(META)
    query, key, value = (
        torch.empty(2, 4, 16, width, device=META, dtype=torch.bfloat16, requires_grad=True)
        for width in (size, size, 64)
    )
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    with counter:
        forward(query, key, value, None, True, 0.0, causal)[0].sum().backward()
    once, name = 2 * 2 * 4 * 16 * 16, "_scaled_dot_product_efficient_attention"
    share = 2 if causal else 1
    assert counter.flops == {
        name + wide: once * (size + 64) // share,
        f"{name}_backward{wide}": once * (3 * size + 2 * 64) // share,
    }


def test_what_moves_is_what_kernels_read_and_write() -> None:
    """By hand, in 32 bits. Indices have 8 bytes."""
    table, places = torch.empty(100, 4, device=META), torch.empty(6, dtype=torch.long, device=META)
    rows, counter = torch.empty(6, 4, device=META), StorageCounter(META)

    def moved(run: Callable[[], Any]) -> dict[str, int]:
        counter.begin()
        with counter:
            run()
        return dict(counter.moved)

    looked_up = 6 * 8 + 2 * 4 * 6 * 4
    assert moved(lambda: nn.functional.embedding(places, table)) == {OTHER: looked_up}
    assert moved(lambda: table[places]) == {INDEXED: looked_up}
    assert moved(lambda: table.index_put((places,), rows, accumulate=True)) == {
        INDEXED: 6 * 8 + 3 * 4 * 6 * 4
    }
    assert moved(lambda: table[:, :2] * 2) == {STRIDED: 4 * (200 + 200)}
    assert moved(lambda: rows * torch.ops.aten._unsafe_view(rows, [6, 4])[:1].expand(6, 4)) == {
        STRIDED: 4 * (24 + 4 + 24)
    }  # the one row is read once
    assert moved(lambda: torch.ops.aten._unsafe_view(rows, [24])) == {} and counter.operations == 1
    assert moved(lambda: torch.empty_like(rows)) == {}


def test_a_kernels_own_memory_counts_while_it_runs() -> None:
    with StorageCounter(
        META, lambda func, args: 4096 if func is torch.ops.aten.mm.default else 0
    ) as counter:
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
    events = [
        event.name for event in sorted(recorded.events(), key=lambda event: event.time_range.start)
    ]
    begin = max(index for index, name in enumerate(events) if name == "aten::ones_like")
    real = [
        name.removeprefix("aten::")
        for name in events[begin:]
        if name in ("aten::add", "aten::add_")
    ]

    seen: list[str] = []

    class Watched(StorageCounter):
        def _count_work(self, func: Any, *rest: Any) -> None:
            seen.append(func.overloadpacket.__name__)

    leaf, weight = leaf.detach().requires_grad_(), weight.detach().requires_grad_()
    with Watched(torch.device("cpu")):
        graph(leaf, weight).backward()
    begin = max(index for index, name in enumerate(seen) if name == "ones_like")
    assert [name for name in seen[begin:] if name in ("add", "add_")] == real


def test_memory_is_given_in_blocks() -> None:
    assert [blocks(size) for size in (0, 1, 511, 512, 513, 1025)] == [0, 512, 512, 512, 1024, 1536]


def test_a_peak_begins_anew_and_falls_to_what_is_alive() -> None:
    """By hand: three tensors of a block each, then a fourth beside the first alone."""
    with StorageCounter(META) as counter:
        first, second = torch.empty(4, 32, device=META), torch.empty(32, 4, device=META)
        product = first @ second
        assert (counter.live, counter.take_peak(), counter.live) == (1536, 1536, 1536)
        del second, product
        assert (counter.live, counter.take_peak(), counter.take_peak()) == (512, 1536, 512)
        _ = first * 2
        assert counter.flops == {"mm": 2 * 4 * 32 * 4} and counter.moved["other"] > 0
        counter.begin()
        assert not counter.flops and not counter.moved and not counter.operations
        assert counter.take_peak() == 1024
        fleeting = torch.empty(1000, device=META)
        del fleeting
        counter.begin()
        assert counter.take_peak() == 1024


def test_what_was_made_before_is_held_once_and_on_the_device_alone() -> None:
    tensor, elsewhere = torch.empty(200, device=META), torch.empty(200)
    counter = StorageCounter(META)
    counter.hold([tensor, tensor.view(2, 100), elsewhere])
    counter.hold(iter([tensor]))
    assert counter.live == 1024
    with counter:
        _ = elsewhere + 1
        _ = torch.empty(300)
    assert (counter.live, counter.take_peak()) == (1024, 1024)
    del tensor
    assert counter.live == 0


def test_a_module_is_held_with_the_statistics_of_quantised_weights() -> None:
    """By hand, in blocks: a weight of 2, a buffer of 3, scales of 4, their code of 5, an offset of
    1, nested ones.
    """

    def of_blocks(number: int) -> torch.Tensor:
        return torch.empty(512 * number, dtype=torch.uint8, device=META)

    nested = SimpleNamespace(absmax=of_blocks(7), code=of_blocks(11), offset=None)
    state = SimpleNamespace(
        absmax=of_blocks(4), code=of_blocks(5), offset=of_blocks(1), state2=nested, other=META
    )
    module = nn.Module()
    module.weight = nn.Parameter(of_blocks(2), requires_grad=False)
    module.plain = nn.Parameter(torch.empty(13 * 128, device=META))
    module.register_buffer("table", of_blocks(3))
    counter = StorageCounter(META)
    counter.hold_module(module)
    assert counter.live == 512 * (2 + 13 + 3)
    module.weight.quant_state = state
    counter.hold_module(module)
    assert counter.live == 512 * (2 + 13 + 3 + 4 + 5 + 1 + 7 + 11)


def test_what_a_kernel_computes_inside_others_takes_no_memory() -> None:
    assert StorageCounter.fusing is False
    with StorageCounter(META) as counter:
        StorageCounter.fusing = True
        try:
            inside = torch.empty(1000, device=META)
        finally:
            StorageCounter.fusing = False
        assert counter.live == 0
        stored = inside + 1
        assert counter.live == 4096
        del inside
        assert counter.live == 4096
        del stored
        assert counter.live == 0


def test_a_view_moves_nothing_and_lists_are_read_whole() -> None:
    """By hand: two tensors of 6 and 10 numbers are read, and 16 are written; of a product all three
    are moved.
    """
    left, right = torch.ones(2, 3, device=META), torch.ones(2, 5, device=META)
    with StorageCounter(META) as counter:
        joined = torch.cat([left, right], dim=1)
        assert counter.moved == {"other": 4 * (6 + 10 + 16)}
        turned = joined.t()
        assert counter.moved == {"other": 4 * (6 + 10 + 16)} and not counter.flops
        _ = torch.mm(turned, joined)
        assert counter.moved[THIN] == 4 * (16 + 16 + 64)
        _ = torch.addmm(torch.ones(8, device=META), turned, joined, beta=2.0)
        assert counter.flops == {"mm": 2 * 8 * 2 * 8, "addmm": 2 * 8 * 2 * 8}
        halves = counter.moved["other"]
        _ = torch.ones(10, dtype=torch.bfloat16, device=META) * 2
        assert counter.moved["other"] == halves + 2 * 10 + 2 * (10 + 10)


def test_gradients_are_not_added_in_place_where_autograd_may_want_them_again() -> None:
    """Where gradients are recorded, or something else refers to
    the first, a sum is a new tensor.
    """
    with StorageCounter(META) as counter:
        first, second = torch.empty(128, device=META), torch.empty(128, device=META)
        total = first + second
        assert total is not first and counter.live == 3 * 512
        with torch.no_grad():
            again = first + second
        assert again is not first and counter.live == 4 * 512


def test_random_numbers_are_repeated_without_a_state() -> None:
    """A compiled graph saves the state of a generator and runs an operation with it again."""
    tensor = torch.ones(300, device=META)
    with StorageCounter(META) as counter:
        state, out = run_and_save_rng_state(torch.ops.aten.mul.Tensor, tensor, 2.0)
        assert state.dtype is torch.uint8 and state.numel() == 0 and state.device.type == "cpu"
        assert out.shape == (300,) and counter.live == 1536 and counter.moved == {"other": 2 * 1200}
        again = run_with_rng_state(state, torch.ops.aten.sum.dim_IntList, tensor, [0], keepdim=True)
        assert again.shape == (1,) and counter.live == 2048
        with pytest.raises(ValueError, match="cond is not counted"):
            torch.ops.higher_order.cond(True, torch.sin, torch.cos, (tensor,))
    assert StorageCounter.is_infra_mode() and StorageCounter.supports_higher_order_operators


@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "length", "size"), [(2, 8, 2, 16, 4), (3, 4, 4, 8, 16)]
)
def test_attention_with_a_bias_is_counted_for_all_heads(
    rows: int, heads: int, key_heads: int, length: int, size: int
) -> None:
    """Scores and what is made of them: two products a head, of two operations for each number
    multiplied.
    """
    query = torch.empty(rows, heads, length, size, device=META, dtype=torch.bfloat16)
    key, value = (
        torch.empty(rows, key_heads, length, size, device=META, dtype=torch.bfloat16)
        for _ in range(2)
    )
    counter = StorageCounter(META)
    with counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=0.5)
    assert sum(counter.flops.values()) == 2 * 2 * rows * heads * length * length * size
    # Queries, keys, values, the output, and the sums of rows in 32 bits; a few numbers of random
    # state beside these.
    moved = 2 * rows * length * size * (2 * heads + 2 * key_heads) + 4 * rows * heads * length
    assert moved <= counter.moved[THIN] <= moved + 64


def test_torchs_formula_gets_a_key_head_for_each_query_head() -> None:
    """What has another number of dimensions, such as the sums of rows, and what is no tensor stay
    as they are.
    """
    query, key = torch.empty(2, 8, 16, 4, device=META), torch.empty(3, 2, 6, 5, device=META)
    rows = torch.empty(2, 8, 16, device=META)
    first, second, third, fourth = _repeat_heads((query, key, rows, 0.5))
    assert (
        (first.shape, second.shape) == ((2, 8, 16, 4), (3, 8, 6, 5))
        and third is rows
        and fourth == 0.5
    )
    assert first.is_meta and second.is_meta
    assert _repeat_heads((key, torch.empty(9, 99, device=META), query))[0].shape[1] == 8


def test_a_convolution_is_counted_by_its_output() -> None:
    """By hand: 8 places of 4 channels, for each 3 numbers of 3
    channels, two operations for each.
    """
    counter = StorageCounter(META)
    assert counter.take_peak() == 0
    with counter:
        torch.conv1d(torch.empty(1, 3, 10, device=META), torch.empty(4, 3, 3, device=META))
    assert counter.flops == {"convolution": 2 * 8 * 4 * 3 * 3}

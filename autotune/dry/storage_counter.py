"""Counts the bytes of all tensors that are alive while a program runs, as CUDA's allocator would count them.

Each operation passes through a TorchDispatchMode. A storage counts from the operation that makes it until nothing
refers to it any more, rounded up to the allocator's blocks. What a CUDA kernel allocates for itself is added by
`workspace`, an argument: the meta device cannot see it. The arithmetic of products of matrices, by torch's own
formulas, the bytes that operations read and write, and the operations themselves are counted in the same pass.
"""

import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autotune.core.probe_types import UNALIGNED, WIDE

# Kinds of work. A thin product, such as that with an adapter, has so little arithmetic for a byte that bytes decide.
# Where a tensor is strided a kernel finds the place of each element; `indexed` rows are gathered or scattered.
PRODUCT, THIN, OTHER, STRIDED, INDEXED = "product", "thin product", "other", "strided", "indexed"
THIN_BELOW = 100
# What reads or writes none of its tensors' elements, though torch calls it no view.
UNMOVED = frozenset({"_unsafe_view", "set_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
LOOK_UPS, ROW_WRITES = frozenset({"embedding", "index"}), frozenset({"index_put", "index_put_"})
# cuBLAS's quick kernels load 16 bytes at a time, so each row must begin at a multiple; an odd vocabulary breaks that.
PRODUCTS, ALIGNED = frozenset({"mm", "addmm", "bmm", "baddbmm"}), 16  # bytes
WIDEST_IN_REGISTERS = 128  # values of a head: memory-efficient attention keeps the sums of wider ones in memory
# Products of which torch knows no arithmetic: bitsandbytes' of inputs and a 4-bit weight, and of both in 8 bits, and
# that of each expert.
UNPACKED_PRODUCT, PRODUCT_IN_8_BITS, GROUPED_PRODUCT = "gemm_4bit", "int8_scaled_mm", "_grouped_mm"
# The latter where experts are not in bf16, with the number of products: backward makes both gradients.
FALLBACKS = {"grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
# Of adapters that are joined with the base (`runtime.joined_lora`): the place of each argument that a narrow product of
# the operation reads beside the wide one.
NARROW = {"joined_backward": (0, 0, 1)}
BLOCK = 512  # bytes: the CUDA allocator rounds each request up to a multiple


def blocks(num_bytes: int) -> int:
    """The bytes that the CUDA allocator gives for this many."""
    return -(-num_bytes // BLOCK) * BLOCK


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of live storages, and their peak since the last `take_peak`.

    `workspace` says what a kernel allocates for itself, in bytes, from the operation and its arguments. `flops` counts
    the arithmetic of products of matrices by operation, `moved` the bytes that all operations read and write, by kind
    of work, and `operations` how many there were. While `fusing` is set, new storages take no memory. While
    a graph's work is `fused`, it adds what its other operations move itself, and those count as none.
    """

    fusing: ClassVar[bool] = False
    fused: ClassVar[bool] = False
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Torch compiles nothing where another kind of mode is on."""
        return True

    def __init__(
        self, device: torch.device, workspace: Callable[[Any, tuple[Any, ...]], int] = lambda func, args: 0
    ) -> None:
        """Count the storages on this device."""
        super().__init__()
        self._device = device.type
        self.live = 0
        self.flops = Counter[str]()
        self.moved = Counter[str]()
        self.operations = 0
        self._peak = 0
        self._workspace = workspace
        self._sizes: dict[int, int] = {}  # by storage
        self._least = _least_references()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._count(tensor)

    def hold_module(self, module: nn.Module) -> None:
        """Count the parameters and buffers of a module, with the statistics of quantised weights."""
        self.hold(module.parameters())
        self.hold(module.buffers())
        for parameter in module.parameters():
            state = getattr(parameter, "quant_state", None)
            for holder in (state, getattr(state, "state2", None)):
                named = (getattr(holder, name, None) for name in ("absmax", "code", "offset"))
                self.hold(tensor for tensor in named if isinstance(tensor, torch.Tensor))
            if (scales := getattr(parameter, "SCB", None)) is not None:
                self.hold([scales])

    def begin(self) -> None:
        """Begin a new peak and new counts of work."""
        self._peak = self.live
        self.flops.clear()
        self.moved.clear()
        self.operations = 0

    def take_peak(self) -> int:
        """The peak since the last call."""
        peak, self._peak = self._peak, self.live
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._run_inside(func, args, kwargs or {})
        # Not by a name of its own: a further reference to the arguments would hide that there is no other.
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled() and self._is_last_reference(args):
            # Autograd adds a gradient to one that nothing else refers to in place. This mode's own references hide
            # that nothing else does.
            func = torch.ops.aten.add_.Tensor
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._count(tensor)
        extra = self._workspace(func, args)
        self._peak = max(self._peak, self.live + extra)
        self._count_work(func, args, kwargs or {}, out)
        return out

    def _run_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that a compiled graph repeats with the same random numbers, of which a dry run has none."""
        with self:
            if func.name() == "run_and_save_rng_state":
                return torch.empty(0, dtype=torch.uint8), args[0](*args[1:], **kwargs)
            if func.name() == "run_with_rng_state":
                return args[1](*args[2:], **kwargs)
        raise ValueError(f"{func.name()} is not counted")

    def _is_last_reference(self, args: tuple[Any, ...]) -> bool:
        """Whether autograd holds the only reference to the first of two addends, and Python none."""
        return all(count <= least for count, least in zip(_references(args), self._least, strict=True))

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes and tensor.device.type == self._device:
            size = self._sizes[key] = 0 if StorageCounter.fusing else blocks(storage.nbytes())
            self.live += size
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _count_work(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        moved = num_bytes((args, out))
        if packet in flop_registry:
            with_all_heads = _with_all_heads(args) if "attention" in name else _without_dtypes(args)
            flops = flop_registry[packet](*with_all_heads, **kwargs, out_val=out)
            if "efficient_attention" in name:
                name, flops = _of_positions(name, flops, args)
            if name in ("addmm", "baddbmm") and args[0].dim() > 1:
                self.moved[OTHER] += num_bytes((args[0], out))  # the addend is copied to where the sum will be
            if name in PRODUCTS and not _is_aligned((args, out)):
                name += f" {UNALIGNED}"
            self._count_product(name, flops, moved)
            for place in NARROW.get(name, ()):
                self.moved[THIN] += num_bytes([args[place]])
                self.operations += 1
        elif name == UNPACKED_PRODUCT:
            # The weight is unpacked first: it is read in 4 bits, and written as the product reads it.
            inputs, packed, (fan_out, fan_in) = args[:3]
            unpacked = inputs.element_size() * fan_out * fan_in
            self._count_product(UNPACKED_PRODUCT, 2 * inputs.numel() * fan_out, num_bytes((inputs, out)) + unpacked)
            self.moved[OTHER] += num_bytes(packed) + unpacked
        elif name == PRODUCT_IN_8_BITS:
            inputs, weight = args[:2]
            self._count_product(name, 2 * inputs.numel() * weight.shape[0], moved)
        elif name == GROUPED_PRODUCT or name in FALLBACKS:
            factors = [tensor for tensor in _tensors(args) if tensor.dim() > 1][-2:]
            flops = 2 * factors[0].numel() * factors[1].shape[-1] * FALLBACKS.get(name, 1)
            self._count_product(name, flops, moved)
        elif func.is_view or StorageCounter.fused:
            return
        elif name not in UNMOVED:
            self._count_moved(name, args, out, moved)
        self.operations += 1

    def _count_product(self, name: str, flops: int, moved: int) -> None:
        self.flops[name] += flops
        self.moved[THIN if flops < THIN_BELOW * moved else PRODUCT] += moved

    def _count_moved(self, name: str, args: tuple[Any, ...], out: Any, moved: int) -> None:
        if name in LOOK_UPS:
            kind, moved = OTHER if name == "embedding" else INDEXED, num_bytes(args[1]) + 2 * num_bytes(out)
        elif name in ROW_WRITES:  # the rows are read, added to others, and written
            kind, moved = INDEXED, num_bytes(args[1]) + 3 * num_bytes(args[2])
        else:
            is_strided = any(tensor.dim() > 1 and not tensor.is_contiguous() for tensor in _tensors((args, out)))
            kind = STRIDED if is_strided else OTHER
        self.moved[kind] += moved

    def add_fused(self, moved_bytes: int, operations: int) -> None:
        """Count what a compiled graph does beside its products."""
        self.moved[OTHER] += moved_bytes
        self.operations += operations


def num_bytes(values: Any) -> int:
    """The bytes of all tensors among values. What is repeated along a dimension counts once."""
    return sum(
        tensor.element_size()
        * math.prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
        for tensor in _tensors(values)
    )


def _is_aligned(values: Any) -> bool:
    """Whether the rows or columns of all matrices among values begin at multiples of what quick kernels load."""
    return all(
        step * tensor.element_size() % ALIGNED == 0
        for tensor in _tensors(values)
        if tensor.dim() > 1 and tensor.numel()
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and step > 1
    )


def _of_positions(name: str, flops: int, args: tuple[Any, ...]) -> tuple[str, int]:
    """The name and arithmetic of memory-efficient attention: it skips later positions, and wide heads have a kernel."""
    widest = max(tensor.shape[-1] for tensor in _tensors(args[:4]) if tensor.dim() == 4)
    place = 11 if "backward" in name else 6  # of `is_causal`, which is left out where it is false
    is_causal = args[place : place + 1] == (True,)
    return name if widest <= WIDEST_IN_REGISTERS else f"{name} {WIDE}", flops // 2 if is_causal else flops


def _with_all_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of attention with a key head for each query head: torch's formula before 2.13 takes no fewer."""
    heads = max(tensor.shape[1] for tensor in _tensors(args) if tensor.dim() == 4)
    return tuple(
        torch.empty(arg.shape[0], heads, *arg.shape[2:], device="meta")
        if isinstance(arg, torch.Tensor) and arg.dim() == 4
        else arg
        for arg in args
    )


def _without_dtypes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without the dtype that a product may be asked for, of which torch's formulas know nothing."""
    return tuple(arg for arg in args if not isinstance(arg, torch.dtype))


def _references(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """The number of references to the first argument: of Python, of torch, and of torch to its storage."""
    storage_references: int = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return sys.getrefcount(args[0]), args[0]._use_count(), storage_references


@functools.cache
def _least_references() -> tuple[int, int, int]:
    """The same for a gradient that autograd alone refers to. It differs between versions of Python and torch."""
    seen: list[tuple[int, int, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                seen.append(_references(args))
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(1, device="meta", requires_grad=True)
    with torch.enable_grad(), Watch():
        inner = leaf * 1
        loss = (inner * 2).sum() + (inner * 3).sum()
        del inner
        torch.autograd.grad(loss, leaf)
    return seen[0]


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    """The tensors among values, in lists and tuples too."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)

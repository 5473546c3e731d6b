"""Counts the bytes of all live tensors while a program runs, as CUDA's allocator counts them.

Each operation passes through a TorchDispatchMode. A storage counts from the operation that makes
the storage until the last reference to the storage disappears. Its size is rounded up to the
allocator's blocks. The meta device cannot see the memory that a CUDA kernel allocates for itself,
so the function `workspace` returns its size. The same pass also counts the FLOPs of matrix
products (by torch's formulas), the bytes that operations read and write, and the number of
operations.
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
from autotune.dry.segments import Request

# Kinds of work. A THIN product, such as the product with an adapter, does so little arithmetic for
# each byte that memory traffic decides its time. STRIDED work reads or writes a tensor that is not
# contiguous, so the kernel computes the address of each element. INDEXED work gathers or scatters
# rows of a tensor.
PRODUCT = "product"
THIN = "thin product"
OTHER = "other"
STRIDED = "strided"
INDEXED = "indexed"
THIN_BELOW = 100  # a product with fewer FLOPs per byte is thin
# These operations move no elements, though torch does not call them views.
UNMOVED = frozenset(
    {
        "_unsafe_view",
        "set_",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
)
LOOK_UPS = frozenset({"embedding", "index"})
ROW_WRITES = frozenset({"index_put", "index_put_"})
# cuBLAS's fast kernels load 16 bytes at a time, so each row must begin at a multiple of 16. An odd
# vocabulary size breaks this alignment. Unaligned products are slower, so their FLOPs are counted
# under another name.
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
ALIGNMENT = 16  # bytes
# The widest heads for which memory-efficient attention accumulates its output in registers. For
# wider heads, another kernel accumulates the output in memory.
WIDEST_IN_REGISTERS = 128
# Torch has no FLOP formula for these products: bitsandbytes' products with a 4-bit weight and in 8
# bits, and the grouped matrix product of experts.
UNPACKED_PRODUCT = "gemm_4bit"
PRODUCT_IN_8_BITS = "int8_scaled_mm"
GROUPED_PRODUCT = "_grouped_mm"
# The products with experts and their adapters (`trainer.grouped_lora`, `trainer.packed_experts`),
# which have a FLOP formula
ADAPTED_PRODUCT = "adapted_product"
PACKED_PRODUCT = "packed_adapted_product"
# The number of matrix products in each of transformers' operators for experts that are not in bf16.
# The backward operator computes two gradients, so it has two products.
FALLBACKS = {"grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
# An operation of joined adapters (`trainer.joined_lora`) computes a large product, and several
# narrow products with an adapter's matrix. Each number here stands for one narrow product, and is
# the index of the operation's argument that the narrow product reads.
NARROW = {"joined_backward": (0, 0, 1)}
WORKSPACE_OF_KERNEL = -2  # the key of memory that a kernel allocates for itself
BLOCK = 512  # the CUDA allocator rounds each request up to a multiple of this number of bytes


def blocks(num_bytes: int) -> int:
    """Round a request up to the bytes that the CUDA allocator gives for it."""
    return -(-num_bytes // BLOCK) * BLOCK


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of live storages, and their peak since the last `take_peak`.

    `workspace` takes an operation and its arguments, and returns the bytes that the operation's
    kernel allocates for itself. `flops` has the FLOPs of matrix products, by name of the operation.
    `moved` has the bytes that all operations read and write, by kind of work, and `operations` is
    the number of operations. `take_requests` returns all requests for memory, in their order.

    While `fusing` is set, new storages take no memory. While `fused` is set, a compiled graph is
    running: the graph reports the bytes of its generated kernels itself, so the operations inside
    it do not count.
    """

    fusing: ClassVar[bool] = False
    fused: ClassVar[bool] = False
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because torch compiles only while all active modes are infra modes."""
        return True

    def __init__(
        self,
        device: torch.device,
        workspace: Callable[[Any, tuple[Any, ...]], int] = lambda func, args: 0,
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
        self._sizes: dict[int, int] = {}  # bytes, by the address of the storage
        self._requests: list[Request] = []
        self._least = _least_references()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the memory of tensors that exist already."""
        for tensor in tensors:
            self._count(tensor)

    def hold_module(self, module: nn.Module) -> None:
        """Count the parameters and buffers of a module, and the statistics of quantised weights."""
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
        """Reset the memory peak, the FLOPs, the moved bytes and the number of operations."""
        self._peak = self.live
        self.flops.clear()
        self.moved.clear()
        self.operations = 0

    def take_peak(self) -> int:
        """Return the peak since the last call, and reset it."""
        peak = self._peak
        self._peak = self.live
        return peak

    def take_requests(self) -> list[Request]:
        """Return the requests for memory since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._run_inside(func, args, kwargs or {})
        # The condition uses `args` directly, because a new name would add a reference.
        if (
            func is torch.ops.aten.add.Tensor
            and not torch.is_grad_enabled()
            and self._is_last_reference(args)
        ):
            # Autograd adds to a gradient in place if it holds the only reference to the gradient.
            # This mode holds further references, so autograd would not add in place here. The mode
            # therefore replaces the operation by the addition in place.
            func = torch.ops.aten.add_.Tensor

        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._count(tensor)

        extra = self._workspace(func, args)
        self._peak = max(self._peak, self.live + extra)
        if extra:
            self._requests += [(WORKSPACE_OF_KERNEL, extra), (WORKSPACE_OF_KERNEL, 0)]
        self._count_work(func, args, kwargs or {}, out)
        return out

    def _run_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that a compiled graph will repeat later with the same random numbers.

        On the meta device, no random numbers are made, so the saved state of their generator is
        empty.
        """
        with self:
            if func.name() == "run_and_save_rng_state":
                return torch.empty(0, dtype=torch.uint8), args[0](*args[1:], **kwargs)
            if func.name() == "run_with_rng_state":
                return args[1](*args[2:], **kwargs)
        raise ValueError(f"{func.name()} is not counted")

    def _is_last_reference(self, args: tuple[Any, ...]) -> bool:
        """Whether only autograd still holds a reference to the first argument."""
        return all(
            count <= least for count, least in zip(_references(args), self._least, strict=True)
        )

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes and tensor.device.type == self._device:
            size = self._sizes[key] = 0 if StorageCounter.fusing else blocks(storage.nbytes())
            self.live += size
            if size:
                self._requests.append((key, size))
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        size = self._sizes.pop(key)
        self.live -= size
        if size:
            self._requests.append((key, 0))

    def _count_work(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        moved = num_bytes((args, out))

        if packet in flop_registry:
            self._count_known_product(packet, args, kwargs, out, moved)
        elif name == UNPACKED_PRODUCT:
            # The kernel first unpacks the weight matrix: for each element, the kernel reads 4 bits
            # and writes a number in the inputs' dtype.
            inputs, packed, (fan_out, fan_in) = args[:3]
            unpacked = inputs.element_size() * fan_out * fan_in
            flops = 2 * inputs.numel() * fan_out
            self._count_product(UNPACKED_PRODUCT, flops, num_bytes((inputs, out)) + unpacked)
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

    def _count_known_product(
        self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, moved: int
    ) -> None:
        """Count a product with a FLOP formula in torch."""
        name = packet.__name__
        operands = _repeat_heads(args) if "attention" in name else _drop_dtypes(args)
        flops = flop_registry[packet](*operands, **kwargs, out_val=out)
        if "efficient_attention" in name:
            name, flops = _attention_kernel(name, flops, args)

        if name in ("addmm", "baddbmm") and args[0].dim() > 1:
            # The addend is first copied to the memory of the sum.
            self.moved[OTHER] += num_bytes((args[0], out))
        if name == PACKED_PRODUCT:
            # The kernel first unpacks the weights to the type of the rows.
            unpacked = args[0].element_size() * math.prod(args[9])
            self.moved[OTHER] += num_bytes(args[1:6]) + unpacked
            moved += unpacked - num_bytes(args[1:6])
        if name in PRODUCTS and not _is_aligned((args, out)):
            name += f" {UNALIGNED}"
        self._count_product(name, flops, moved)

        narrow = [args[place] for place in NARROW.get(name, ())]
        if name in (ADAPTED_PRODUCT, PACKED_PRODUCT) and out[1].numel():
            narrow = [args[0]]  # the adapters' first matrix multiplies the rows again
        for read in narrow:
            self.moved[THIN] += num_bytes([read])
            self.operations += 1

    def _count_product(self, name: str, flops: int, moved: int) -> None:
        self.flops[name] += flops
        self.moved[THIN if flops < THIN_BELOW * moved else PRODUCT] += moved

    def _count_moved(self, name: str, args: tuple[Any, ...], out: Any, moved: int) -> None:
        if name in LOOK_UPS:
            kind = OTHER if name == "embedding" else INDEXED
            moved = num_bytes(args[1]) + 2 * num_bytes(out)
        elif name in ROW_WRITES:  # the kernel reads new and old rows, and writes their sums
            kind = INDEXED
            moved = num_bytes(args[1]) + 3 * num_bytes(args[2])
        else:
            is_strided = any(
                tensor.dim() > 1 and not tensor.is_contiguous() for tensor in _tensors((args, out))
            )
            kind = STRIDED if is_strided else OTHER
        self.moved[kind] += moved

    def add_kernel(self, name: str, flops: int, moved_bytes: int) -> None:
        """Count the work of a kernel that torch does not know."""
        self._count_product(name, flops, moved_bytes)
        self.operations += 1

    def add_fused(self, moved_bytes: int, operations: int) -> None:
        """Count the work of a compiled graph except its matrix products."""
        self.moved[OTHER] += moved_bytes
        self.operations += operations


def num_bytes(values: Any) -> int:
    """The bytes of all tensors in `values`; a dimension with stride 0 counts only once."""
    return sum(
        tensor.element_size()
        * math.prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
        for tensor in _tensors(values)
    )


def _is_aligned(values: Any) -> bool:
    """Whether all rows or columns of the matrices begin at multiples of ALIGNMENT bytes."""
    return all(
        step * tensor.element_size() % ALIGNMENT == 0
        for tensor in _tensors(values)
        if tensor.dim() > 1 and tensor.numel()
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and step > 1
    )


def _attention_kernel(name: str, flops: int, args: tuple[Any, ...]) -> tuple[str, int]:
    """The kernel's name and the FLOPs of memory-efficient attention.

    Heads wider than WIDEST_IN_REGISTERS use another kernel, and causal attention skips the
    positions after each token.
    """
    widest = max(tensor.shape[-1] for tensor in _tensors(args[:4]) if tensor.dim() == 4)
    place = 11 if "backward" in name else 6  # the index of `is_causal`, which callers omit if false
    is_causal = args[place : place + 1] == (True,)
    kernel = name if widest <= WIDEST_IN_REGISTERS else f"{name} {WIDE}"
    return kernel, flops // 2 if is_causal else flops


def _repeat_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give each query head its own key head, as torch's formula before 2.13 requires."""
    heads = max(tensor.shape[1] for tensor in _tensors(args) if tensor.dim() == 4)
    return tuple(
        torch.empty(arg.shape[0], heads, *arg.shape[2:], device="meta")
        if isinstance(arg, torch.Tensor) and arg.dim() == 4
        else arg
        for arg in args
    )


def _drop_dtypes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove the output dtype of a product, which torch's formulas do not accept."""
    return tuple(arg for arg in args if not isinstance(arg, torch.dtype))


def _references(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Count Python's and torch's references to the first argument, and to its storage."""
    storage_references: int = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return sys.getrefcount(args[0]), args[0]._use_count(), storage_references


@functools.cache
def _least_references() -> tuple[int, int, int]:
    """The reference counts of a gradient that only autograd holds.

    These counts depend on the versions of Python and torch.
    """
    seen: list[tuple[int, int, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
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
    """The tensors in `values`, also inside nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)

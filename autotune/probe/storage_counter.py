"""Counts the bytes of all tensors that are alive while a program runs, as CUDA's allocator would count them.

Each operation passes through a TorchDispatchMode. A storage counts from the operation that makes it until nothing
refers to it any more, rounded up to the allocator's blocks. What a CUDA kernel allocates for itself is added by
`workspace`, an argument: the meta device cannot see it. The arithmetic of products of matrices, by torch's own
formulas, the bytes that operations read and write, and the operations themselves are counted in the same pass.
"""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Kinds of work. A thin product, such as that with an adapter, has so little arithmetic for a byte that bytes decide.
PRODUCT, THIN, OTHER = "product", "thin product", "other"
THIN_BELOW = 100
# Products of which torch knows no arithmetic: bitsandbytes' of inputs and a 4-bit weight, and that of each expert.
UNPACKED_PRODUCT, GROUPED_PRODUCT = "gemm_4bit", "_grouped_mm"
# The latter where experts are not in bf16, with the number of products: backward makes both gradients.
FALLBACKS = {"grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
BLOCK = 512  # bytes: the CUDA allocator rounds each request up to a multiple


def blocks(num_bytes: int) -> int:
    """The bytes that the CUDA allocator gives for this many."""
    return -(-num_bytes // BLOCK) * BLOCK


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of live storages, and their peak since the last `take_peak`.

    `workspace` says what a kernel allocates for itself, in bytes, from the operation and its arguments. `flops` counts
    the arithmetic of products of matrices by operation, `moved` the bytes that all operations read and write, by
    PRODUCT and OTHER, and `operations` how many there were. While `fusing` is set, new storages take no memory. While
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
        raise NotImplementedError(f"{func.name()} is not counted")

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
        packet = func.overloadpacket
        moved = num_bytes((args, out))
        if packet in flop_registry:
            with_all_heads = _with_all_heads(args) if "attention" in packet.__name__ else args
            flops = flop_registry[packet](*with_all_heads, **kwargs, out_val=out)
            self._count_product(packet.__name__, flops, moved)
        elif packet.__name__ == UNPACKED_PRODUCT:
            # The weight is unpacked first: it is read in 4 bits, and written as the product reads it.
            inputs, packed, (fan_out, fan_in) = args[:3]
            unpacked = inputs.element_size() * fan_out * fan_in
            self._count_product(UNPACKED_PRODUCT, 2 * inputs.numel() * fan_out, num_bytes((inputs, out)) + unpacked)
            self.moved[OTHER] += num_bytes(packed) + unpacked
        elif packet.__name__ == GROUPED_PRODUCT or packet.__name__ in FALLBACKS:
            factors = [tensor for tensor in _tensors(args) if tensor.dim() > 1][-2:]
            flops = 2 * factors[0].numel() * factors[1].shape[-1] * FALLBACKS.get(packet.__name__, 1)
            self._count_product(packet.__name__, flops, moved)
        elif func.is_view or StorageCounter.fused:
            return
        else:
            self.moved[OTHER] += moved
        self.operations += 1

    def _count_product(self, name: str, flops: int, moved: int) -> None:
        self.flops[name] += flops
        self.moved[THIN if flops < THIN_BELOW * moved else PRODUCT] += moved

    def add_fused(self, moved_bytes: int, operations: int) -> None:
        """Count what a compiled graph does beside its products."""
        self.moved[OTHER] += moved_bytes
        self.operations += operations


def num_bytes(values: Any) -> int:
    """The bytes of all tensors among values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(values))


def _with_all_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of attention with a key head for each query head: torch's formula before 2.13 takes no fewer."""
    heads = max(tensor.shape[1] for tensor in _tensors(args) if tensor.dim() == 4)
    return tuple(
        torch.empty(arg.shape[0], heads, *arg.shape[2:], device="meta")
        if isinstance(arg, torch.Tensor) and arg.dim() == 4
        else arg
        for arg in args
    )


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

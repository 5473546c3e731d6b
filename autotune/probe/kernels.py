"""Profiles one micro batch, and splits the device's time by kind of work.

A kernel's kind of work is derived from its name, because a profile has no other description. A
kernel that is neither a matrix product nor fused attention counts as `bytes`: elementwise kernels,
reductions, copies, and all kernels that Inductor fuses. All these kernels are limited by memory
traffic.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch

from autotune.core.micro_profile import KernelClass
from autotune.core.probe_types import KernelTimes

# Inductor names its fused kernels after their operators. Kernels from Inductor's templates (tem)
# are matrix products.
FUSED = re.compile(r"^triton_(?!tem)")
ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|xmma|^triton_tem|splitkreduce", re.IGNORECASE)
# cuBLAS names its newest kernels after the dtypes of their operands: q and o stand for 8-bit types.
FP8 = re.compile(r"e4m3|e5m2|float8|nvjet_(sm\d+_)?[qo]", re.IGNORECASE)
# The next patterns let `class_of` divide the kernels that count as `bytes` into collectives,
# optimizers, copies and elementwise kernels.
COLLECTIVE = re.compile(r"nccl|^c10d::|_allgather_|_reduce_scatter_|allreduce", re.IGNORECASE)
OPTIMIZER = re.compile(
    r"multi_tensor_apply|\bk(precondition)?optimizer|fused_adam|^optimizer\.", re.IGNORECASE
)
COPY = re.compile(
    r"^mem(cpy|set)|copy|catarray|^aten::(cat|clone|contiguous|to|_to_copy|zero_|fill_)$",
    re.IGNORECASE,
)
UNPACKING = re.compile(r"dequantize", re.IGNORECASE)
# A profile on a CPU has operators instead of kernels. The pattern matches operators that are matrix
# products.
OPERATOR_PRODUCT = re.compile(
    r"^(aten::(mm|addmm|bmm|baddbmm|matmul|linear|mv|addmv|_grouped_mm)|mkldnn::.*linear.*)$"
)
ELEMENTWISE = re.compile(
    r"^triton_|elementwise|reduce_kernel|norm|softmax|silu|gelu|swiglu|geglu|rope|cross_entropy"
    r"|CompiledF(unction|xGraph)"
    r"|^aten::(add|sub|mul|div|neg|pow|rsqrt|sqrt|mean|sum|exp|log|cos|sin|where|clamp|sigmoid|tanh"
    r"|native_dropout)",
    re.IGNORECASE,
)
INDUCTOR = re.compile(r"^triton_[a-z]+_fused_(?P<operators>.*?)_?\d*$")
LONGEST_NAME = 160  # the maximum length of a kernel's name in the log


class Work(StrEnum):
    """The kind of work that a kernel does."""

    PRODUCTS = "products"
    FP8 = "fp8 products"
    ATTENTION = "attention"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, copy or fill that the device ran.

    The start and end times of all kernels are seconds since a common moment.
    """

    name: str
    start_s: float
    end_s: float


def work_of(name: str) -> Work:
    """The kind of work that a kernel with this name does."""
    if FUSED.search(name):
        return Work.BYTES
    if ATTENTION.search(name):
        return Work.ATTENTION
    if PRODUCT.search(name):
        return Work.FP8 if FP8.search(name) else Work.PRODUCTS
    return Work.BYTES


def class_of(name: str) -> KernelClass:
    """The class of a kernel, or of an operator on a CPU, in a profile."""
    work = work_of(name)

    if COLLECTIVE.search(name):
        return KernelClass.COLLECTIVES
    if work is Work.ATTENTION:
        return KernelClass.ATTENTION
    if work is not Work.BYTES or OPERATOR_PRODUCT.search(name):
        return KernelClass.PRODUCTS
    if FUSED.search(name):
        return KernelClass.FUSED

    by_name = {
        KernelClass.UNPACKING: UNPACKING,
        KernelClass.OPTIMIZER: OPTIMIZER,
        KernelClass.COPIES: COPY,
        KernelClass.FUSED: ELEMENTWISE,
    }

    return next(
        (kind for kind, pattern in by_name.items() if pattern.search(name)), KernelClass.OTHER
    )


def fused_operators(name: str) -> tuple[str, ...]:
    """The operators that a kernel of Inductor computes.

    For example, 'triton_red_fused__to_copy_add_mean_2' computes three operators: _to_copy, add and
    mean.
    """
    found = INDUCTOR.match(name)
    return () if found is None else tuple(_known_operators(found["operators"]))


def run_profiled(run: Callable[[], object]) -> list[Kernel]:
    """Call `run`, and return the kernels that ran on the GPU, or [] if the driver hides them.

    Only the device is profiled, because recording the host's operators would take longer than the
    operators themselves.
    """
    with torch.autograd.profiler.profile(
        use_cpu=False, use_device="cuda", use_kineto=True
    ) as profile:
        run()

    events = profile.kineto_results.events() if profile.kineto_results is not None else []
    return [
        Kernel(
            name=event.name(),
            start_s=event.start_ns() / 1e9,
            end_s=(event.start_ns() + event.duration_ns()) / 1e9,
        )
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]


def kernel_times(kernels: Iterable[Kernel], micro_s: float) -> KernelTimes | None:
    """The time of these kernels by kind of work, or None if there are no kernels.

    `micro_s` is the time of the micro batch without a profiler.
    """
    in_order = sorted(kernels, key=lambda kernel: kernel.start_s)
    if not in_order:
        return None

    seconds = dict.fromkeys(Work, 0.0)
    busy_s = 0.0
    until = in_order[0].start_s
    for kernel in in_order:
        seconds[work_of(kernel.name)] += kernel.end_s - kernel.start_s
        # Copies to and from the host overlap other kernels. `busy_s` counts each moment once, even
        # if several kernels ran.
        busy_s += max(kernel.end_s - max(kernel.start_s, until), 0.0)
        until = max(until, kernel.end_s)

    return KernelTimes(
        products_s=seconds[Work.PRODUCTS],
        fp8_s=seconds[Work.FP8],
        attention_s=seconds[Work.ATTENTION],
        bytes_s=seconds[Work.BYTES],
        busy_s=busy_s,
        micro_s=micro_s,
        num_kernels=len(in_order),
    )


def list_kernels(kernels: Iterable[Kernel]) -> list[str]:
    """A line for each kernel name, slowest first: milliseconds, number of kernels, work, name."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.end_s - kernel.start_s)
    rows = sorted(by_name.items(), key=lambda row: -sum(row[1]))
    return [
        f"{1000 * sum(row):9.3f} ms {len(row):6} {work_of(name):12} {name[:LONGEST_NAME]}"
        for name, row in rows
    ]


@cache
def _operator_names() -> frozenset[str]:
    names = (name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names())
    return frozenset(name.partition(".")[0] for name in names)


def _known_operators(joined: str) -> Iterator[str]:
    """Yield the operators in a text that joins operator names with underscores.

    A word is yielded by itself if no known name begins with it.
    """
    words = joined.split("_")
    while words:
        ends = (
            end for end in range(len(words), 0, -1) if "_".join(words[:end]) in _operator_names()
        )
        end = next(ends, 1)
        if name := "_".join(words[:end]):
            yield name
        words = words[end:]

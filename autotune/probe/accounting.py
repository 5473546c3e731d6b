"""What memory is used for: sizes of tensors, parameters and optimizer state; and what held it when it ran out."""

import ctypes
import errno
import math
import re
import sys
from typing import Any

import torch
from torch import nn

from autotune.core.probe_types import Measurement, OomDetail, Phase
from autotune.core.units import gib

UNITS_PER_GIB = {"bytes": 2**30, "kib": 2**20, "mib": 2**10, "gib": 1}


def tensor_gib(tensor: torch.Tensor) -> float:
    """The size of a tensor's elements; of a sharded one, those that this rank has.

    DeepSpeed's third stage empties a parameter, and keeps its shard beside it.
    """
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    shard = getattr(tensor, "ds_tensor", None)
    return gib(own.numel() * own.element_size()) + (0.0 if shard is None else tensor_gib(shard))


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter before it was packed to 4 bits, two elements in a byte, or emptied by DeepSpeed."""
    quantised = getattr(parameter, "quant_state", None) or parameter
    return tuple(getattr(quantised, "ds_shape", quantised.shape))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def parameter_gib(model: nn.Module) -> float:
    """The size of weights and buffers, quantisation statistics included."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for holder in (state, getattr(state, "state2", None)):
            tensors += [getattr(holder, name, None) for name in ("absmax", "code", "offset")]
        tensors.append(getattr(parameter, "SCB", None))
    return sum(tensor_gib(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))


def optimizer_gib(trainer: Any) -> tuple[float, float]:
    """The size of a Trainer's optimizer state: (on the device, in managed memory).

    That of DeepSpeed has this rank's masters of what is trained too, which its states belong to.
    """
    optimizer = getattr(trainer, "optimizer", None)
    states = optimizer.state if optimizer is not None else {}
    tensors = [
        value
        for state in states.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    if optimizer is not None and getattr(trainer, "is_deepspeed_enabled", False):
        tensors += states
    total = sum(map(tensor_gib, tensors))
    managed = sum(tensor_gib(tensor) for tensor in tensors if getattr(tensor, "is_paged", False))
    return total - managed, managed


def paged_state_gib(model: nn.Module) -> float:
    """What a paged 8-bit optimizer will keep in managed memory: two moments of each larger parameter, a byte each.

    Trainer has bitsandbytes keep those of embeddings in 32 bits.
    """
    # bitsandbytes pages the state of parameters from 1e5 elements on (Optimizer2State.get_state_buffer).
    paged = [parameter for parameter in trained_parameters(model) if parameter.numel() >= 1e5]
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return gib(
        sum(parameter.numel() * (8 if id(parameter) in embeddings else 2) for parameter in paged)
    )


def free_paged_state() -> None:
    """Return the managed memory of paged optimizers, none of which may be in use: bitsandbytes keeps it for good."""
    if (functional := sys.modules.get("bitsandbytes.functional")) is None:
        return
    pages = functional.GlobalPageManager.get_instance().paged_tensors
    while pages:
        # bitsandbytes' library is linked with CUDA's runtime, whose functions are found through it. An error means that
        # the process cannot use the GPU any more: then it is replaced anyway.
        functional.lib.cudaFree(ctypes.c_void_p(pages.pop().data_ptr()))


def logical_params(model: nn.Module) -> int:
    """The number of parameters, each in its whole shape."""
    return sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())


# --- out of memory


def is_out_of_memory(error: Exception) -> bool:
    """Whether device or host memory ran out. An illegal memory access is not that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    messages = (
        "DefaultCPUAllocator: can't allocate memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "std::bad_alloc",
    )
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


def requested_gib(message: str) -> float | None:
    """The size of the allocation that failed, from torch's message; None where it names none."""
    match = re.search(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message, re.IGNORECASE)
    return None if match is None else float(match[1]) / UNITS_PER_GIB[match[2].lower()]


def oom_detail(
    error: Exception,
    phase: Phase,
    terms: dict[str, float],
    peak_gib: float,
    reserved_gib: float,
    limit_gib: float,
) -> OomDetail:
    """What held memory when an allocation failed.

    The failed step has begun to unwind when `terms` are read. What they lack of the peak was freed since: activations,
    or weights where nothing but weights existed.
    """
    rest = "activations" if "activations" in terms else "weights"
    terms = terms | {rest: terms[rest] + max(peak_gib - sum(terms.values()), 0.0)}
    allocated_gib = sum(terms.values())
    return OomDetail(
        phase=phase,
        requested_gib=requested_gib(str(error)),
        allocated_gib=allocated_gib,
        reserved_gib=max(reserved_gib, allocated_gib),
        limit_gib=limit_gib,
        terms_gib=terms,
    )


def too_tight(measurement: Measurement, phase: Phase) -> tuple[OomDetail, str]:
    """The detail and the reason of a probe that needed the allocator to return cached memory: it does not fit."""
    detail = OomDetail(
        phase=phase,
        requested_gib=None,
        allocated_gib=measurement.peak_allocated_gib,
        reserved_gib=measurement.peak_reserved_gib,
        limit_gib=measurement.limit_gib,
        terms_gib=measurement.terms_gib(measurement.peak_allocated_gib),
    )
    times = f"{measurement.alloc_retries} time" + ("s" if measurement.alloc_retries > 1 else "")
    return (
        detail,
        f"too tight in {phase}: the allocator ran out, returned what it cached and tried again {times}",
    )

"""Measures the memory of tensors, parameters and optimizer state, and explains an OOM."""

import ctypes
import errno
import math
import sys
from typing import Any

import torch
from torch import nn

from autotune.core.oom_text import RUNTIME_ERRORS, requested_gib
from autotune.core.probe_types import Measurement, OomDetail, Phase
from autotune.core.units import gib
from autotune.trainer.sharded_nf4 import unpacked_difference


def tensor_gib(tensor: torch.Tensor) -> float:
    """The GiB of a tensor's elements; for a sharded tensor, only this rank's elements count.

    ZeRO stage 3 of DeepSpeed leaves a parameter empty, and keeps this rank's shard in `ds_tensor`.
    """
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    shard = getattr(tensor, "ds_tensor", None)
    return gib(own.numel() * own.element_size()) + (0.0 if shard is None else tensor_gib(shard))


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter before bitsandbytes packed it to 4 bits or DeepSpeed emptied it.

    A packed parameter holds two elements in each byte, so its own shape is smaller.
    """
    quantised = getattr(parameter, "quant_state", None) or parameter
    return tuple(getattr(quantised, "ds_shape", quantised.shape))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The model's parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def parameter_gib(model: nn.Module) -> float:
    """The GiB of a model's weights and buffers, including quantisation constants."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for holder in (state, getattr(state, "state2", None)):
            tensors += [getattr(holder, name, None) for name in ("absmax", "code", "offset")]
        tensors.append(getattr(parameter, "SCB", None))
    return sum(tensor_gib(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))


def optimizer_gib(trainer: Any) -> tuple[float, float]:
    """The GiB of a Trainer's optimizer state, on the device and in CUDA's managed memory.

    With DeepSpeed, the sizes include this rank's fp32 master weights, which are the keys of
    `optimizer.state`.
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
    """The GiB of CUDA's managed memory that a paged 8-bit optimizer will use.

    Only the state of parameters with at least 100,000 elements is in managed memory. The state is
    two moments of one byte per element. For embeddings, the Trainer makes bitsandbytes keep the
    moments in 32 bits.
    """
    # bitsandbytes pages the state of parameters with at least 1e5 elements
    # (Optimizer2State.get_state_buffer).
    paged = [parameter for parameter in trained_parameters(model) if parameter.numel() >= 1e5]
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }

    bytes_each = (8 if id(parameter) in embeddings else 2 for parameter in paged)
    return gib(
        sum(parameter.numel() * width for parameter, width in zip(paged, bytes_each, strict=True))
    )


def free_paged_state() -> None:
    """Free the managed memory of paged optimizers, which bitsandbytes never frees.

    The caller must have stopped using these optimizers.
    """
    if (functional := sys.modules.get("bitsandbytes.functional")) is None:
        return
    pages = functional.GlobalPageManager.get_instance().paged_tensors
    while pages:
        # The library of bitsandbytes links CUDA's runtime, so cudaFree can be called through it.
        # The result of cudaFree is ignored: after an error the process cannot use the GPU any more,
        # and is replaced anyway.
        functional.lib.cudaFree(ctypes.c_void_p(pages.pop().data_ptr()))


def logical_params(model: nn.Module) -> int:
    """The number of elements of all parameters, before packing or sharding."""
    stored = sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())
    return stored + unpacked_difference(model)


# --- out of memory


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error says that device or host memory ran out.

    An illegal memory access does not count as running out of memory.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in RUNTIME_ERRORS)


def oom_detail(
    error: Exception,
    phase: Phase,
    terms: dict[str, float],
    peak_gib: float,
    reserved_gib: float,
    limit_gib: float,
) -> OomDetail:
    """Describes an OOM: the memory by use, such as weights, when an allocation failed.

    `terms` has the GiB of each use, read after the failed step has freed some tensors. The memory
    that the failed step freed before this reading counts as activations, or as weights if the model
    was still being loaded.
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


def tight_memory_detail(measurement: Measurement, phase: Phase) -> tuple[OomDetail, str]:
    """The OOM detail and reason for a probe that fitted only because the allocator freed its cache.

    Such a configuration counts as one that does not fit, although its probe did not fail.
    """
    detail = OomDetail(
        phase=phase,
        requested_gib=None,
        allocated_gib=measurement.peak_allocated_gib,
        reserved_gib=measurement.peak_reserved_gib,
        limit_gib=measurement.limit_gib,
        terms_gib=measurement.terms_gib(measurement.peak_allocated_gib),
    )

    times = f"{measurement.alloc_retries} time" + ("s" if measurement.alloc_retries > 1 else "")
    reason = (
        f"too tight in {phase}: the allocator ran out of memory, freed its cache and retried "
        f"{times}"
    )
    return detail, reason

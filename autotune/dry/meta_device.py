"""Makes torch's meta device act like CUDA in training: autocast, attention, dropout, mask checks.

Torch has no autocast for the meta device and disables CUDA's autocast without a GPU. But torch has
a dispatch key for the autocast of third-party devices. This module registers casts under that key,
with the operations and the rules of CUDA's autocast. Attention calls the operators of CUDA's
attention kernels, which also run on the meta device; torch itself would choose plain matrix
products there.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers.integrations.moe
import transformers.masking_utils
import transformers.utils.generic
from torch.fx.experimental import _config as data_dependence
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from autotune.dry.flex import replace_flex_attention

aten = torch.ops.aten
_torch_dropout = functional.dropout
_KEY = "AutocastPrivateUse1"
_FOREIGN = "privateuseone"
# From ATen/autocast_mode.h: the operations for which CUDA's autocast casts the arguments to 16 bits
# (LOWER), to 32 bits (FP32), or to their widest type (PROMOTE), or sets the output to 32 bits
# (FP32_OUTPUT).
LOWER = """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    convolution _convolution _convolution.deprecated prelu addmm addmv addr matmul einsum mm mv
    linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()  # noqa: SIM905 (a list would take a line for each)
FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm cosine_similarity nll_loss nll_loss2d kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
""".split()  # noqa: SIM905 (a list would take a line for each)
FP32_OUTPUT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()  # noqa: SIM905 (a list would take a line for each)
PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()  # noqa: SIM905 (a list would take a line for each)

# The key is the id of a trained parameter; the value is the parameter and its 16-bit copy. While
# the parameter is kept here, no other object can get the same id.
_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
# Keeps each Library alive, because its registrations end when it is garbage-collected.
_libraries: list[Any] = []


@contextmanager
def simulate_cuda(*, packed: bool, padded: bool) -> Iterator[None]:
    """Within this context, code on the meta device behaves as it does on CUDA.

    `packed` says that rows hold several examples; `padded` says that a mask hides the padding at
    the end of some rows.
    """
    _register()
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        _casts.clear()

    def find_packed(positions: torch.Tensor) -> torch.Tensor | None:
        return _packed_indices(positions) if packed else None

    replacements: list[tuple[Any, str, Any]] = [
        (torch, "is_autocast_enabled", _read_cuda(torch.is_autocast_enabled)),
        (torch, "get_autocast_dtype", _read_cuda(torch.get_autocast_dtype)),
        (torch, "set_autocast_enabled", _write_both(torch.set_autocast_enabled)),
        (torch, "set_autocast_dtype", _write_both(torch.set_autocast_dtype)),
        (torch, "clear_autocast_cache", clear_both),
        (torch.amp, "is_autocast_available", _is_available),
        (torch.amp.autocast_mode, "is_autocast_available", _is_available),
        (functional, "scaled_dot_product_attention", _attend),
        (functional, "dropout", _drop),
        # Models call `maybe_autocast` to switch autocast off. For the meta device, this function
        # returns a `nullcontext`, which would leave autocast on.
        (transformers.utils.generic, "nullcontext", lambda: torch.autocast("meta", enabled=False)),
        (transformers.masking_utils, "find_packed_sequence_indices", find_packed),
        (transformers.integrations.moe, "_can_use_grouped_mm", _has_grouped_product),
        # Skip this check, because it reads token values, which the meta device does not have.
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
        (data_dependence, "meta_nonzero_assume_all_nonzero", True),
    ]

    if not padded and hasattr(transformers.masking_utils, "fast_all"):
        # Some models make a mask over all tokens themselves, and check whether the mask hides a
        # token.
        replacements.append((transformers.masking_utils, "fast_all", lambda mask: True))

    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(replace_attribute(owner, name, value))
        stack.enter_context(replace_flex_attention())
        stack.enter_context(
            torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastPrivateUse1)
        )
        stack.callback(_casts.clear)
        if padded:
            stack.enter_context(_PaddingMode())
        yield


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute `name` of `owner` to `value` within this context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _is_available(device: str) -> bool:
    return device == "meta" or bool(torch._C._is_autocast_available(device))


def _read_cuda(read: Callable[..., Any]) -> Callable[..., Any]:
    """Read CUDA's autocast state instead of the meta device's."""
    return lambda *device: read(*("cuda" if name == "meta" else name for name in device))


def _write_both(write: Callable[..., None]) -> Callable[..., None]:
    """Set autocast for CUDA and for the dispatch key with the casts, not for the meta device."""

    def set_state(device: Any, *values: Any) -> None:
        for name in ("cuda", _FOREIGN) if device == "meta" else (device,):
            write(name, *values)

    return set_state


def _packed_indices(positions: torch.Tensor) -> torch.Tensor:
    """Return which example of a packed row each position belongs to, as transformers does."""
    difference = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (difference != 1).cumsum(-1)


def _has_grouped_product(inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> bool:
    """Whether torch's grouped matrix product computes the experts: its meta kernel takes only bf16.

    For other types, CUDA multiplies one expert after another, as transformers' fallback operator
    does.
    """
    return weight.dtype is torch.bfloat16


class _PaddingMode(TorchDispatchMode):
    """Answers False when a model checks whether a mask is true everywhere.

    If the answer were True, the model would drop the mask.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (
            func is aten._local_scalar_dense.default
            and args[0].is_meta
            and args[0].dtype is torch.bool
        ):
            return False
        return func(*args, **(kwargs or {}))


# --- autocast


def _register() -> None:
    """Register the casting kernels once for each process.

    The kernels run only while autocast is on within `simulate_cuda`.
    """
    if _libraries:
        return

    every = torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, _KEY)
    library = torch.library.Library("aten", "IMPL")
    _libraries.extend((every, library))

    for names, prepare in (
        (LOWER, _prepare_lower),
        (FP32, _prepare_fp32),
        (FP32_OUTPUT, _prepare_fp32_output),
        (PROMOTE, _prepare_widest),
    ):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            library.impl(op, _kernel(op, prepare), _KEY)


def _kernel(op: Any, prepare: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(without):
            args, kwargs = prepare(op, args, kwargs)
            return op(*args, **kwargs)

    return kernel


def _prepare_lower(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = torch._C.get_autocast_dtype("cuda")
    return _cast_all((args, kwargs), dtype)


def _prepare_fp32(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast_all((args, kwargs), torch.float32)


def _prepare_fp32_output(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    given = any(isinstance(value, torch.dtype) for value in (*args, kwargs.get("dtype")))
    if given or not _is_floating(args[0]) or args[0].dtype is torch.float64:
        return args, kwargs
    places = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    args = args[: places.index("dtype")] if "dtype" in places else args
    return args, kwargs | {"dtype": torch.float32}


def _prepare_widest(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    lower = torch._C.get_autocast_dtype("cuda")
    found = {value.dtype for value in tree_leaves((args, kwargs)) if _is_floating(value)}
    dtype = torch.float32 if torch.float32 in found else lower
    return _cast_all((args, kwargs), dtype)


def _cast_all(values: tuple[Any, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    cast: tuple[Any, Any] = tree_map(lambda value: _cast(value, dtype), values)
    return cast


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor.

    The 16-bit copies of trained parameters are kept until autocast ends.
    """
    if not _is_floating(value) or value.dtype in (dtype, torch.float64) or not value.is_meta:
        return value

    kept = (
        dtype is not torch.float32
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    )

    if not kept:
        return value.to(dtype)
    if id(value) not in _casts:
        _casts[id(value)] = (value, value.to(dtype))
    return _casts[id(value)][1]


# --- dropout


def _drop(
    inputs: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Drop values with CUDA's kernel, which keeps a mask of one byte for each value.

    On other devices, torch keeps a factor for each value, in the dtype of the inputs.
    """
    if inputs.is_meta and training and 0.0 < p < 1.0 and not inplace:
        dropped: torch.Tensor = torch.native_dropout(inputs, p, True)[0]
        return dropped
    return _torch_dropout(inputs, p, training, inplace)


# --- attention


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention with the kernel that torch would choose on CUDA.

    Torch uses the flash kernel for 16-bit inputs without a mask, and the memory-efficient kernel
    for all other inputs.
    """
    if torch._C.is_autocast_enabled("cuda"):
        query, key, value = (
            _cast(tensor, torch._C.get_autocast_dtype("cuda")) for tensor in (query, key, value)
        )

    size = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)

    if half and attn_mask is None and size == value.shape[-1] <= 256:
        padding = -size % 8
        if padding:
            scale = size**-0.5 if scale is None else scale
            query, key, value = (
                functional.pad(tensor, (0, padding)) for tensor in (query, key, value)
            )
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return out[..., :size] if padding else out

    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[2])

    return aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        attn_mask,
        query.requires_grad or key.requires_grad,
        dropout_p,
        is_causal,
        scale=scale,
    )[0]

"""The stand-ins for fast kernels hold the bytes of the package's tensors, by calculation."""

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from autotune.dry import fast_kernels
from autotune.dry.storage_counter import StorageCounter

pytestmark = pytest.mark.probe

MODULES = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")
TOKENS = 256
# In units of 2 KiB. A value head has twice the size of a key head, and two share a key head.
KEYS, VALUES, WIDE_KEYS, FACTORS, STATES, SCALES, GATES, BETA = 32, 128, 64, 64, 128, 1, 2, 1
KEPT = 2 * KEYS + 2 * SCALES + GATES + FACTORS
# w, u, the states and the new values are freed at the end of the forward pass
FORWARD = WIDE_KEYS + VALUES + STATES + VALUES
# The backward pass makes these again, and gradients of the states and of u. The peak is at the
# gradients of q, k and w, the rest of k's gradient before and after it is added, and those of v,
# the gates and beta.
BACKWARD = FORWARD + STATES + VALUES + 2 * KEYS + WIDE_KEYS + GATES
BACKWARD += WIDE_KEYS + KEYS + VALUES + GATES + BETA
# Kimi's delta attention, with heads of one size, whose gates are as many as the values of keys
KIMI, KIMI_WIDE, KIMI_BETA = 32, 64, 1
KIMI_KEPT = 2 * KIMI + 2 * SCALES + KIMI_WIDE + 2 * KIMI
KIMI_FORWARD = 5 * KIMI
KIMI_BACKWARD = 6 * KIMI + KIMI_WIDE + KIMI  # recomputed, scores, states
KIMI_BACKWARD += 3 * KIMI_WIDE + KIMI + KIMI_BETA + KIMI_WIDE  # q, k, gates, v, beta, factors
KIMI_BACKWARD += 3 * KIMI_WIDE + 2 * KIMI_BETA + KIMI_BETA  # their sums, beta's in two parts


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, TOKENS, *shape, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize(
    ("rule", "heads", "sizes", "gates", "kept", "out", "forward", "backward"),
    [
        (
            fast_kernels.chunk_gated_delta_rule,
            (2, 4),
            (64, 128),
            (4,),
            *(KEPT, VALUES, FORWARD, BACKWARD),
        ),
        (
            fast_kernels.chunk_kda,
            (2, 2),
            (64, 64),
            (2, 64),
            *(KIMI_KEPT, KIMI, KIMI_FORWARD, KIMI_BACKWARD),
        ),
    ],
)
def test_a_stand_in_keeps_and_frees_what_the_kernels_do(
    rule: Callable[..., Any],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    gates: tuple[int, ...],
    kept: int,
    out: int,
    forward: int,
    backward: int,
) -> None:
    inputs = [tensor(heads[0], sizes[0]) for _ in "qk"] + [tensor(heads[1], sizes[1])]
    inputs += [tensor(*gates, dtype=torch.float32), tensor(heads[1])]
    gradient = torch.empty_like(inputs[2])
    with StorageCounter(torch.device("meta")) as counter:
        counter.hold([*inputs, gradient])
        given = counter.live
        counter.begin()
        made, state = rule(*inputs, use_qk_l2norm_in_kernel=True)
        assert state is None
        assert (counter.live - given) / 2048 == kept + out
        assert (counter.take_peak() - given) / 2048 == kept + out + forward

        before = counter.live
        gradients = torch.autograd.grad(made, inputs, gradient)
        assert (counter.take_peak() - before) / 2048 == backward
        assert counter.flops["delta_rule"] > 0
    for inner, outer in zip(gradients, inputs, strict=True):
        assert (inner.shape, inner.dtype) == (outer.shape, outer.dtype)


def test_arguments_that_are_not_contiguous_are_copied_and_values_are_kept() -> None:
    inputs = [tensor(2, 64), tensor(2, 64), tensor(4, 128), tensor(4), tensor(4)]
    values = torch.empty(1, 4, 128, TOKENS, dtype=torch.bfloat16, device="meta")
    inputs[2] = values.movedim(-1, 1).requires_grad_()
    with StorageCounter(torch.device("meta")) as counter:
        counter.hold(inputs)
        given = counter.live
        made, _ = fast_kernels.chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        assert (counter.live - given) / 2048 == KEPT + 2 * VALUES
        del made
        assert counter.live == given


def test_rows_that_a_dry_probe_cannot_count_are_refused() -> None:
    inputs = [tensor(2, 64), tensor(2, 64), tensor(2, 64), tensor(2), tensor(2)]
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="packed or continued sequences"):
        fast_kernels.chunk_gated_delta_rule(*inputs, cu_seqlens=ends)


def test_transformers_finds_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    fast_kernels.install(["fla"])
    assert find_spec("fla") is not None
    assert importlib.import_module("fla.ops.kda").chunk_kda is fast_kernels.chunk_kda
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fla.modules")

    def slow(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> str:
        return "slow"

    for name, gates in (("chunk_gated_delta_rule", (2,)), ("chunk_kda", (2, 64))):
        rule = use_kernel_func_from_hub_with_fallback(name, "fla")(slow)
        inputs = [tensor(2, 64) for _ in range(3)] + [tensor(*gates), tensor(2)]
        made = rule(*inputs[:3], g=inputs[3], beta=inputs[4], position_ids=None)
        assert made[0].shape == inputs[2].shape
    other = use_kernel_func_from_hub_with_fallback("selective_scan_fn", "fla")(slow)
    assert other(*inputs) == "slow"

"""What holds memory, by the sizes of tensors, and what is said of it where it ran out."""

import errno
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.core.probe_types import Phase
from autotune.core.units import GIB
from autotune.probe.accounting import (
    free_paged_state,
    is_out_of_memory,
    logical_params,
    oom_detail,
    optimizer_gib,
    paged_state_gib,
    parameter_gib,
    tensor_gib,
    tight_memory_detail,
    trained_parameters,
)
from tests.helpers.factories import measurement


def test_the_state_of_an_optimizer_is_its_tensors() -> None:
    """bitsandbytes counts the steps with an integer, and pages the state of larger parameters."""
    paged = torch.zeros(2**10, dtype=torch.uint8)
    paged.is_paged = True  # type: ignore[attr-defined]
    state = {
        "first": {"step": 3, "exp_avg": torch.zeros(2**10)},
        "second": {"step": 3, "state1": paged},
    }
    trainer: Any = SimpleNamespace(optimizer=SimpleNamespace(state=state))
    assert optimizer_gib(trainer) == pytest.approx((4 * 2**10 / GIB, 2**10 / GIB))
    assert optimizer_gib(SimpleNamespace(optimizer=None)) == (0, 0)
    assert optimizer_gib(None) == (0, 0)  # no trainer was made yet


def test_a_tensor_is_as_large_as_its_elements() -> None:
    whole = torch.empty(3, 2**20, dtype=torch.bfloat16, device="meta")
    assert tensor_gib(whole) == 6 / 1024
    whole._local_tensor = whole[:1]  # type: ignore[attr-defined]
    assert tensor_gib(whole) == 2 / 1024


def quantized() -> nn.Module:
    """A base of 4-bit weights, whose statistics are quantised too, beside an 8-bit weight and one
    that is trained.
    """
    with torch.device("meta"):
        packed = nn.Parameter(torch.empty(2**20, 1, dtype=torch.uint8), requires_grad=False)
        packed.quant_state = SimpleNamespace(  # type: ignore[attr-defined]
            shape=(2**11, 2**10),
            absmax=torch.empty(2**15, dtype=torch.uint8),
            code=torch.empty(16),
            offset=torch.empty(1),
            state2=SimpleNamespace(absmax=torch.empty(2**7), code=torch.empty(256), offset=None),
        )
        whole = nn.Parameter(torch.empty(2**10, dtype=torch.int8), requires_grad=False)
        whole.SCB = torch.empty(2**5)  # type: ignore[attr-defined]
        model = nn.Module()
        model.packed, model.whole = packed, whole
        model.trained = nn.Parameter(torch.empty(2**8, 2**2))
        model.register_buffer("inverse_frequencies", torch.empty(2**6))
    return model


def test_a_model_is_as_large_as_weights_buffers_and_statistics() -> None:
    weights = 2**20 + 2**10 + 4 * 2**10 + 4 * 2**6
    statistics = 2**15 + 4 * 16 + 4 + 4 * 2**7 + 4 * 256 + 4 * 2**5
    assert parameter_gib(quantized()) == (weights + statistics) / GIB


def test_packed_weights_count_as_many_parameters_as_they_stand_for() -> None:
    assert logical_params(quantized()) == 2**21 + 2**10 + 2**10


def test_only_what_is_trained_has_gradients_and_state() -> None:
    model = quantized()
    assert trained_parameters(model) == [model.trained]


@pytest.mark.parametrize(("elements", "paged"), [(100_000, 200_000), (99_999, 0)])
def test_the_state_of_larger_parameters_alone_is_paged(elements: int, paged: int) -> None:
    """Two bytes each; bitsandbytes leaves what has fewer than 1e5 elements on the device."""
    model = nn.Module()
    model.large = nn.Parameter(torch.empty(elements, device="meta"))
    model.small = nn.Parameter(torch.empty(50, device="meta"))
    model.frozen = nn.Parameter(torch.empty(10**6, device="meta"), requires_grad=False)
    assert paged_state_gib(model) == paged / GIB


def test_the_paged_state_of_embeddings_is_in_32_bits() -> None:
    """By hand, two moments: a byte each for a value of the linear layer, four for one of the large
    embedding.
    """
    model = nn.Sequential(
        nn.Embedding(1000, 200), nn.Linear(200, 1000, bias=False), nn.Embedding(10, 10)
    )
    assert paged_state_gib(model) == pytest.approx((8 * 200_000 + 2 * 200_000) / GIB)
    model[1].weight = model[0].weight  # a tied head is the embedding
    assert paged_state_gib(model) == pytest.approx(8 * 200_000 / GIB)


def test_each_page_of_a_paged_optimizer_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages are those that bitsandbytes keeps; only the call into CUDA is not made here."""
    functional = pytest.importorskip("bitsandbytes.functional")
    kept, freed = [torch.ones(4), torch.ones(8)], list[int | None]()
    addresses = {tensor.data_ptr() for tensor in kept}
    pages = functional.GlobalPageManager.get_instance().paged_tensors
    monkeypatch.setattr(
        functional, "lib", SimpleNamespace(cudaFree=lambda pointer: freed.append(pointer.value))
    )
    pages += kept
    free_paged_state()
    assert set(freed) == addresses and len(freed) == 2 and not pages
    free_paged_state()
    assert len(freed) == 2
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional")
    free_paged_state()  # nothing was paged


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
                " bytes"
            ),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("std::bad_alloc"), False),  # someone else's words
    ],
    ids=repr,
)
def test_memory_that_ran_out_is_told_from_memory_that_was_misused(
    error: Exception, is_memory: bool
) -> None:
    assert is_out_of_memory(error) is is_memory


def test_what_was_freed_since_the_peak_were_activations() -> None:
    error = torch.OutOfMemoryError("Tried to allocate 3.00 GiB")
    terms = {"weights": 4.0, "gradients": 1.0, "activations": 2.0}
    found = oom_detail(
        error, Phase.BACKWARD, terms, peak_gib=10.0, reserved_gib=11.5, limit_gib=12.0
    )
    assert found.terms_gib == {"weights": 4.0, "gradients": 1.0, "activations": 5.0}
    assert (found.phase, found.requested_gib, found.limit_gib) == (Phase.BACKWARD, 3.0, 12.0)
    assert (found.allocated_gib, found.reserved_gib) == (10.0, 11.5)
    assert terms["activations"] == 2.0


def test_a_model_that_did_not_fit_was_all_weights() -> None:
    found = oom_detail(
        MemoryError(), Phase.LOAD, {"weights": 4.0}, peak_gib=6.0, reserved_gib=5.0, limit_gib=5.5
    )
    assert found.terms_gib == {"weights": 6.0} and found.requested_gib is None
    # no less is reserved than was allocated
    assert found.reserved_gib == found.allocated_gib == 6.0


def test_no_activations_are_less_than_none() -> None:
    """What is alive may be more than a peak that was read before."""
    terms = {"weights": 4.0, "activations": 2.0}
    found = oom_detail(
        MemoryError(), Phase.FORWARD, terms, peak_gib=5.0, reserved_gib=0.0, limit_gib=7.0
    )
    assert found.terms_gib == terms and found.allocated_gib == 6.0


@pytest.mark.parametrize(("retries", "times"), [(1, "1 time"), (2, "2 times")])
def test_a_probe_that_fitted_by_tidying_up_does_not_fit(retries: int, times: str) -> None:
    made = measurement(
        peak_allocated_gib=20.0, peak_reserved_gib=23.0, limit_gib=23.5, alloc_retries=retries
    )
    detail, reason = tight_memory_detail(made, Phase.BACKWARD)
    assert (
        reason
        == "too tight in backward: the allocator ran out of memory, freed its cache and retried"
        f" {times}"
    )
    assert (detail.phase, detail.requested_gib) == (Phase.BACKWARD, None)
    assert (detail.allocated_gib, detail.reserved_gib, detail.limit_gib) == (20.0, 23.0, 23.5)
    assert detail.terms_gib == made.terms_gib(20.0)

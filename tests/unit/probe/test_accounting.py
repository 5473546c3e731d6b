"""What holds memory, by the sizes of tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.core.units import GIB
from autotune.probe.accounting import optimizer_gib


def test_the_state_of_an_optimizer_is_its_tensors() -> None:
    """bitsandbytes counts the steps with an integer, and pages the state of larger parameters."""
    paged = torch.zeros(2**10, dtype=torch.uint8)
    paged.is_paged = True  # type: ignore[attr-defined]
    state = {"first": {"step": 3, "exp_avg": torch.zeros(2**10)}, "second": {"step": 3, "state1": paged}}
    trainer: Any = SimpleNamespace(optimizer=SimpleNamespace(state=state))
    assert optimizer_gib(trainer) == pytest.approx((4 * 2**10 / GIB, 2**10 / GIB))
    assert optimizer_gib(SimpleNamespace(optimizer=None)) == (0, 0)

"""Joined and grouped adapters on two real ranks have the gradients of PEFT's own modules, and
sharded weights those of one process.
"""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.probe
ROUNDING = 3e-4  # of sums in 32 bits in another order
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, bool], Gradients]:
    """The gradients of two_ranks.CASES."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.helpers.two_ranks", str(folder)]
    ranks = [subprocess.Popen([*command, rank]) for rank in "01"]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    gradients: dict[tuple[str, str, bool], Gradients] = torch.load(folder / "found.pt")
    return gradients


def difference(found: Gradients, expected: Gradients) -> float:
    """The largest difference of a gradient, relative to the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(each.norm()) for each in expected.values())
    return max(float((found[name] - each).norm()) / largest for name, each in expected.items())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("strategy", "kernels", "experts"),
    [("ddp", "joined", False), ("ddp", "grouped", True), ("fsdp2", "grouped", True)],
)
def test_two_ranks_have_the_gradients_of_peft_and_of_one_process(
    found: dict[tuple[str, str, bool], Gradients], strategy: str, kernels: str, experts: bool
) -> None:
    ours, alone = found[strategy, kernels, experts], found["none", "peft", experts]
    assert difference({name: 0 * each for name, each in alone.items()}, alone) == 1.0
    assert difference(ours, alone) < ROUNDING
    assert difference(ours, found["ddp", "peft", experts]) < ROUNDING


@pytest.mark.timeout(400)
def test_sharded_weights_are_trained_by_products_in_8_bits(
    found: dict[tuple[str, str, bool], Gradients],
) -> None:
    """In compiled layers under FSDP2. Each rank casts its own rows, with scales of its own."""
    sharded, alone = (found[strategy, "rowwise", False] for strategy in ("fsdp2", "none"))
    assert 0 < difference(sharded, alone) < 0.05

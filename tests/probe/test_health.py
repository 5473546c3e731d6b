"""A device that miscalculates is noticed before anything that it says is believed."""

from pathlib import Path

import pytest
import torch

from autotune.core.errors import TooManyFailures
from autotune.probe.health import Miscalculated, check_products
from autotune.probe.supervisor import WorkerProber

CPU = torch.device("cpu")


def test_a_sound_device_passes() -> None:
    check_products(CPU)


@pytest.mark.parametrize("bit", [0, 10, 22, 30])
def test_one_flipped_bit_is_enough(bit: int) -> None:
    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = left @ right
        product.view(torch.int32)[17, 300] ^= 1 << bit
        return product

    with pytest.raises(Miscalculated, match="1 of 512 rows"):
        check_products(CPU, multiply)


@pytest.mark.probe
@pytest.mark.real_processes  # only a new process runs sitecustomize
def test_a_worker_on_such_a_device_ends_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products are wrong by one bit in the process itself."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'autotune.probe.worker' in sys.orig_argv:\n"
        "    import torch\n"
        "    right = torch.matmul\n"
        "    torch.matmul = lambda *factors: right(*factors) + (factors[0].shape[0] == 512)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        WorkerProber("cpu", tmp_path / "logs") as prober,
        pytest.raises(TooManyFailures, match="are wrong"),
    ):
        prober.fingerprint  # noqa: B018 (it starts the worker)

"""The comparison of final losses on a small mixture: a short one, and what both sides share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.trainer.packed_experts import is_packed
from tests.probe.test_grouped_lora import CPU
from tests.probe.test_grouped_lora import pytestmark as pytestmark
from tests.unit.test_benchmarks import program


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("mixture_quality", monkeypatch)


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def test_both_sides_of_a_pair_begin_alike_and_end_close(module: Any, tmp_path: Path) -> None:
    size = module.Size(
        hidden=64, layers=1, experts=4, length=32, batch=4, base_steps=4, steps=3, held_out=4
    )
    base = module.pretrain(tmp_path / "base", size, CPU)
    assert base["loss"] < base["loss_first"] == pytest.approx(5.5, abs=0.1)
    module.dequantise(tmp_path / "base", tmp_path / "dequantised", CPU)

    one, same, other = (
        module.attach(config, tmp_path / folder, seed, CPU)
        for config, folder, seed in [
            (module.PACKED, "base", 0),
            (module.REFERENCE, "dequantised", 0),
            (module.REFERENCE, "dequantised", 1),
        ]
    )
    assert any(map(is_packed, one.modules())) and not any(map(is_packed, same.modules()))
    first, second = adapters(one), adapters(same)
    assert first.keys() == second.keys() and any(".experts." in name for name in first)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    changed = [name for name, weight in adapters(other).items() if not weight.equal(first[name])]
    assert changed and all("lora_A" in name for name in changed)

    found = {pair: module.compare(pair, 0, tmp_path, size, CPU) for pair in module.PAIRS}
    for row in found.values():
        assert row["loss"] < row["loss_first"]
        assert abs(row["difference"]) < 1e-3
        assert row["loss_first"] == pytest.approx(row["reference_loss_first"], rel=1e-3)
    # The experts are indeed in 4 bits.
    assert found["nf4"]["reference_loss_first"] != found["split"]["reference_loss_first"]

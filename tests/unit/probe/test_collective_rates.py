"""The data rates of collectives, by hand, in torch's fake process group, where nothing is sent."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.core.probe_types import RankAddress
from autotune.probe.collective_rates import BUCKET, CALLS, LAYER, ON_CPU, measure_collectives


class Clock:
    """The meter of a CPU, on which the calls of a round take 1, 5 and 2 s each."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.rounds, self.is_released = 0, False

    def mark(self) -> None: ...

    def synchronize(self) -> None: ...

    def seconds(self, begin: Any, end: Any) -> float:
        self.rounds += 1
        return CALLS * (2.0, 1.0, 5.0)[self.rounds % 3]

    def release(self) -> None:
        self.is_released = True


# torch renames them, and 2.11 has only these names
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rates_are_those_of_the_bus_in_each_group_of_this_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 2 of 6 is in the groups of 4 and 6.

    Of a buffer, each of n ranks sends and receives (n - 1) / n, and twice as much to reduce it.
    """
    begin = dist.init_process_group

    def fake(backend: str, *, store: Any, **options: Any) -> None:
        assert backend == "gloo"
        begin("fake", store=FakeStore(), **options)

    monkeypatch.setattr(dist, "init_process_group", fake)
    meter: Any = Clock()
    found = measure_collectives(meter, RankAddress(number=2, meeting=str(tmp_path / "unused")), 6)
    assert [one.num_gpus for one in found] == [4, 6]
    for one in found:
        share = (one.num_gpus - 1) / one.num_gpus
        layer, bucket = (2 * size / ON_CPU for size in (LAYER, BUCKET))  # bytes of fp16
        rates = (one.gather_gb_s, one.scatter_gb_s, one.reduce_gb_s)
        assert rates == pytest.approx(
            [share * size / 2.0 / 1e9 for size in (layer, layer, 2 * bucket)], rel=1e-4
        )
    assert meter.is_released and not dist.is_initialized()

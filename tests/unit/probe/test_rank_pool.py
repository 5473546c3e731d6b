"""What all ranks of a probe measured, as one result; and where a pool cannot be.

Real ranks are in `tests/probe`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.errors import EnvironmentProblem
from autotune.core.probe_types import Outcome, Phase
from autotune.probe import rank_pool
from autotune.probe.rank_pool import RankPool, combine_results
from tests.helpers.factories import measurement, result


def test_the_slowest_rank_sets_the_time_and_each_peak_is_the_highest() -> None:
    quick = measurement(0.4, 30.0, losses=(1.0, 2.0), context_gib=1.0, limit_gib=70.0)
    slow = measurement(0.5, 20.0, losses=(3.0, 4.0), context_gib=None, limit_gib=60.0)
    quick = replace(quick, segment_peak_gib={"forward": 29.0, "backward_layers": 30.0})
    slow = replace(slow, segment_peak_gib={"forward": 31.0, "backward_layers": 20.0})
    found = combine_results(
        [
            result(measurement=quick, notes=("a",)),
            result(measurement=slow, notes=("a", "b"), seconds={"total": 9.0}),
        ]
    )
    assert found.notes == ("a", "b") and found.seconds == {"total": 9.0}
    together = found.measurement
    assert together is not None and together.step_s == slow.step_s
    assert (together.peak_allocated_gib, together.peak_reserved_gib) == (
        30.0,
        quick.peak_reserved_gib,
    )
    assert together.phase_peak_gib[Phase.BACKWARD] == 30.0
    assert together.segment_peak_gib == {"forward": 31.0, "backward_layers": 30.0}
    assert (together.limit_gib, together.context_gib, together.losses) == (60.0, 1.0, (2.0, 3.0))
    assert together.loss_first == (quick.loss_first + slow.loss_first) / 2


def test_what_is_not_ok_on_one_rank_is_not_ok() -> None:
    found = combine_results([result(), result(outcome=Outcome.OOM), result(outcome=Outcome.CRASH)])
    assert found.outcome is Outcome.OOM


def test_fewer_gpus_than_ranks_are_a_problem_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pool, "visible", lambda: [0])
    with pytest.raises(EnvironmentProblem, match="2 ranks need 2 GPUs, but 1 are visible"):
        RankPool("cuda", 2, tmp_path)


def test_each_rank_has_a_gpu_of_its_own_or_a_share_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pool, "visible", lambda: [3, "GPU-5", 6])
    monkeypatch.setattr(rank_pool.os, "cpu_count", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpus, processors = RankPool("cuda", 2, tmp_path), RankPool("cpu", 2, tmp_path)
    assert [rank._variables for rank in gpus._ranks] == [
        {"CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1"} for card in ("3", "GPU-5")
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    asked = RankPool("cuda", 1, tmp_path)
    assert [rank._variables for rank in asked._ranks] == [{"CUDA_VISIBLE_DEVICES": "3"}]
    assert [rank._variables for rank in processors._ranks] == [{"OMP_NUM_THREADS": "3"}] * 2
    assert gpus.starts == 0

"""A probe of rows that are padded to the longest of their micro batch."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.probe_types import Measurement, ProbeRequest
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from tests.helpers.probing import LARGE, request

MOSTLY_SHORT = Workload(lengths=Lengths.of([*range(16, 144, 2)] * 20 + [240], "counted"))


@pytest.mark.probe
def test_a_probe_times_each_kind_of_micro_batch_and_weighs_the_longest(prober: WorkerProber, tmp_path: Path) -> None:
    def measured(asked: ProbeRequest) -> Measurement:
        result = prober.probe(asked, tmp_path / "probe.log")
        assert result.measurement is not None, result.reason
        return result.measurement

    asked = request(**LARGE)
    kinds = MOSTLY_SHORT.micro_batches(asked.config)
    timed = [kind for kind in kinds if kind.share]
    assert len(timed) > 1 and max(kind.length for kind in timed) < 150  # the longest is too rare to be timed
    padded = measured(replace(asked, micro_batches=kinds, micro_steps=4))
    assert [share for share, _ in padded.kind_s] == pytest.approx([kind.share for kind in timed])
    assert all(seconds > 0 for _, seconds in padded.kind_s)
    mean = sum(share * seconds for share, seconds in padded.kind_s)
    assert sum(padded.micro_step_s) / len(padded.micro_step_s) == pytest.approx(mean)
    assert padded.row_length == 240

    for length in (240, 140):
        full = measured(replace(request(**(LARGE | {"seq_len": length})), micro_steps=4))
        if length == 240:
            assert padded.peak_allocated_gib == pytest.approx(full.peak_allocated_gib, rel=0.05)
        else:
            assert padded.peak_allocated_gib > 1.3 * full.peak_allocated_gib

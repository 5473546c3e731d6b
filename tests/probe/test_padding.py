"""A probe of rows that are padded to the longest of their micro batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from autotune.core.probe_types import Measurement, ProbeRequest
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from tests.helpers.probing import LARGE, request

# 4,096 tokens, whose activations take 200 MiB: a process wanders by 2 or 3
SIZES = LARGE | {"micro_batch_size": 4, "seq_len": 1024}
Measure = Callable[[ProbeRequest], Measurement]


@pytest.fixture(scope="module")
def measured(prober: WorkerProber) -> Measure:
    """What a probe measures that leaves the worker as good as new."""

    def measure(asked: ProbeRequest) -> Measurement:
        result = prober.probe(asked, prober.logs / "padding.log")
        assert result.measurement is not None, result.reason
        assert result.notes == ()
        return result.measurement

    return measure


@pytest.fixture(scope="module")
def full_gib(measured: Measure) -> float:
    """The peak of rows that are all as long as the longest.

    It is above that of rows of 400 tokens.
    """
    full, short = (
        measured(replace(request(**SIZES | {"seq_len": length}), micro_steps=2)).peak_allocated_gib
        for length in (1024, 400)
    )
    assert full > 1.5 * short
    return full


@pytest.mark.probe
@pytest.mark.parametrize(
    ("lengths", "timed_longest"),
    [
        # the longest has a very small share
        (Lengths.of([*range(40, 400, 3)] * 200 + [5000], "counted"), 1024),
        (
            Lengths.of([60, 120, 180, 240, 360], "characters"),
            361,
        ),  # made odd; a row of 1,024 tokens may occur, and has none
    ],
    ids=["counted", "estimated"],
)
def test_a_probe_times_each_kind_of_micro_batch_and_weighs_the_longest(
    measured: Measure, full_gib: float, lengths: Lengths, timed_longest: int
) -> None:
    kinds = Workload(lengths=lengths).micro_batches(request(**SIZES).config)
    timed = [kind for kind in kinds if kind.share]
    assert len(timed) == 5 and max(kind.length for kind in timed) == timed_longest
    padded = measured(replace(request(**SIZES), micro_batches=kinds, micro_steps=4))
    assert [share for share, _ in padded.kind_s] == pytest.approx([kind.share for kind in timed])
    assert fmean(padded.micro_step_s) == pytest.approx(
        sum(share * seconds for share, seconds in padded.kind_s)
    )
    assert padded.row_length == 1024
    assert padded.peak_allocated_gib == pytest.approx(full_gib, rel=0.03)


@pytest.mark.probe
def test_a_mask_hides_padding_and_changes_nothing_else(
    prober: WorkerProber, tmp_path: Path
) -> None:
    """Padding on the right is seen by no token before it.

    What new lengths take is tried where there is a mask.
    """
    lengths = Workload(lengths=Lengths.of([20, 30, 90], "counted"))

    def measured(padding: str) -> Measurement:
        asked = request(precision="fp32", micro_batch_size=2, padding=padding, checkpointing="none")
        kinds = lengths.micro_batches(asked.config)
        assert len({kind.length for kind in kinds}) == 3
        result = prober.probe(replace(asked, micro_batches=kinds), tmp_path / "probe.log")
        assert result.measurement is not None, result.reason
        return result.measurement

    plain, masked = measured("longest"), measured("masked")
    assert masked.losses == pytest.approx(plain.losses, rel=1e-5)
    assert (
        plain.new_length_s is None and masked.new_length_s is not None and masked.new_length_s >= 0
    )
    again = measured("masked")
    assert again.losses == pytest.approx(masked.losses, rel=1e-5)

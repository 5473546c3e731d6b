"""The log of phases: seconds and memory of each, in order, also if they are nested or fail."""

import pytest

from autotune.core.probe_types import Phase
from autotune.probe.phase_log import PhaseLog


class Device:
    """A device whose memory the test sets."""

    used = reserved = peak = 1.0

    def synchronize(self) -> None:
        pass

    def used_gib(self) -> float:
        return self.used

    def reserved_gib(self) -> float:
        return self.reserved

    def peak_gib(self) -> tuple[float, float]:
        return 0.0, self.peak

    def reset_peak(self) -> None:
        self.peak = self.reserved


def log() -> tuple[PhaseLog, Device]:
    device = Device()
    return PhaseLog(device), device  # type: ignore[arg-type]


def test_a_peak_counts_memory_that_was_returned_within_the_phase() -> None:
    phases, device = log()
    phases.enter(Phase.ROLLOUT)
    device.used, device.reserved, device.peak = 3.0, 2.0, 6.0  # 4 of them were returned
    phases.enter(Phase.SLEEP)
    device.used = device.reserved = device.peak = 0.5
    phases.enter(None)
    assert phases.peaks_gib() == {Phase.ROLLOUT: 7.0, Phase.SLEEP: 3.0}
    assert phases.after_gib(Phase.SLEEP) == (0.5,)


def test_a_nested_phase_interrupts_its_outer_phase() -> None:
    phases, _ = log()
    phases.enter(Phase.ROLLOUT)
    with phases.inside(Phase.TRANSFER), phases.inside(Phase.WAKE):
        assert phases.phase is Phase.WAKE
    phases.enter(None)
    entered = [span.phase for span in phases.spans]
    assert entered == [
        Phase.ROLLOUT,
        Phase.TRANSFER,
        Phase.WAKE,
        Phase.TRANSFER,
        Phase.ROLLOUT,
    ]
    assert len(phases.seconds(Phase.TRANSFER)) == 2


def test_the_innermost_phase_that_failed_is_kept() -> None:
    phases, _ = log()
    with pytest.raises(RuntimeError), phases.inside(Phase.TRANSFER), phases.inside(Phase.WAKE):
        raise RuntimeError
    assert phases.failed_in is Phase.WAKE

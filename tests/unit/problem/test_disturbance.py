"""Whether other work disturbed a probe: by cores, by the GPU's time and by the steps themselves."""

import os
from typing import Any

import pytest

from autotune.problem.disturbance import ASSUME_QUIET, disturbance
from tests.helpers.factories import measurement

STEADY = (1.0,) * 10


def judged(*, on_cpu: bool = False, cores: int = 8, **changes: Any) -> str | None:
    values = {"step_s": STEADY} | changes
    return disturbance(measurement(**values), on_cpu=on_cpu, cores=cores, environment={})


@pytest.mark.parametrize(
    ("own", "others", "on_cpu", "disturbed"),
    [
        (1.0, 0.39, True, False),  # below a twentieth of the cores
        (1.0, 0.4, True, True),  # a CPU's probe wants every core
        (1.0, 4.0, False, False),  # the host of a GPU still has free cores
        (1.0, 6.1, False, False),
        (1.0, 6.3, False, True),
        (7.9, 0.1, False, False),  # our own work fills the cores
        (None, None, True, False),  # the system does not tell
    ],
)
def test_others_disturb_if_they_take_cores_that_the_probe_wants(
    own: float | None, others: float | None, on_cpu: bool, disturbed: bool
) -> None:
    reason = judged(on_cpu=on_cpu, own_cores=own, other_cores=others)
    assert reason == (f"other processes used {others:.1f} of 8 cores" if disturbed else None)


@pytest.mark.parametrize(("share", "disturbed"), [(None, False), (0.04, False), (0.05, True)])
def test_others_disturb_if_they_use_the_gpu(share: float | None, disturbed: bool) -> None:
    reason = judged(other_gpu=share)
    assert reason == ("other processes used 5% of the GPU's time" if disturbed else None)


@pytest.mark.parametrize(
    ("steps", "micro_batches", "reason"),
    [
        ((1.0,) * 19 + (9.0,), STEADY, None),  # one slow step of many
        ((1.0,) * 6 + (2.0,) * 4, STEADY, "the times of the timed steps differ by 100%"),
        ((2.0,), (1.0, 2.0) * 5, "the times of the timed steps differ by 67%"),  # a single step
        ((2.0,), (1.0,), None),
    ],
)
def test_steps_that_differ_much_were_disturbed(
    steps: tuple[float, ...], micro_batches: tuple[float, ...], reason: str | None
) -> None:
    assert judged(step_s=steps, micro_step_s=micro_batches) == reason


def test_tests_that_run_side_by_side_assume_a_quiet_machine() -> None:
    busy = measurement(other_gpu=1.0)
    quiet = {ASSUME_QUIET: "1"}
    assert disturbance(busy, on_cpu=False, cores=8, environment=quiet) is None
    assert os.environ.get(ASSUME_QUIET)
    assert disturbance(busy, on_cpu=False, cores=8) is None

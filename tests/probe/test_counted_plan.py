"""`autotune plan` answers for families without a formula: their memory is counted by a dry probe."""

from pathlib import Path

import pytest

from autotune.catalog import resolve_device
from autotune.cli.plan_text import print_plan
from autotune.core.errors import UsageError
from autotune.planning import counted_memory
from autotune.planning.plan import NO_SPEED, plan
from autotune.probe.dry_prober import DryProber
from autotune.problem.run_cost import FITS
from autotune.problem.study_spec import make_spec

pytestmark = pytest.mark.probe


@pytest.fixture(autouse=True)
def prober(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with DryProber(tmp_path) as one:
        monkeypatch.setattr(counted_memory, "_prober", lambda: one)
        yield one


def test_a_family_without_a_formula_has_a_counted_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec(None, {"model": "gpt2", "gpu": "a10"})
    made = plan(spec, device=resolve_device("a10"), counted=True)
    assert made.best is None and made.reason == NO_SPEED
    assert made.baseline.state == FITS and made.baseline.memory is not None
    assert sum(made.baseline.memory.terms().values()) == pytest.approx(made.baseline.need_gib)
    assert made.baseline.memory.weights == pytest.approx(124.4e6 * 2 / 2**30, rel=0.02)
    print_plan(made)
    printed = capsys.readouterr().out
    assert "memory by counting a training step without a GPU" in printed and "by a formula" not in printed
    assert f"     why  {NO_SPEED}" in printed
    with pytest.raises(UsageError, match=r"there is no formula for gpt2 models$"):
        plan(spec, device=resolve_device("a10"))

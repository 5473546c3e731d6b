"""The look of figures."""

from autotune.core.probe_types import Outcome
from autotune.report import style


def test_each_outcome_has_a_colour_and_a_symbol_of_its_own() -> None:
    assert set(style.MARKERS) == set(Outcome)
    for part in zip(*style.MARKERS.values(), strict=True):
        assert len(set(part)) == len(Outcome)

"""The look of figures and pages."""

import jinja2
import pytest

from autotune.core.probe_types import Outcome
from autotune.report import style


def test_each_outcome_has_a_colour_and_a_symbol_of_its_own() -> None:
    assert set(style.MARKERS) == set(Outcome)
    for part in zip(*style.MARKERS.values(), strict=True):
        assert len(set(part)) == len(Outcome)


def test_pages_escape_text_and_know_all_their_names() -> None:
    template = style.environment().from_string("{{ name }}")
    assert template.render(name="<b>") == "&lt;b&gt;"
    with pytest.raises(jinja2.UndefinedError):
        template.render()

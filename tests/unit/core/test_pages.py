"""Pages made from templates."""

import jinja2
import pytest

from autotune.core.pages import environment


def test_pages_escape_text_and_know_all_their_names() -> None:
    template = environment("autotune.report").from_string("{{ name }}")
    assert template.render(name="<b>") == "&lt;b&gt;"
    with pytest.raises(jinja2.UndefinedError):
        template.render()

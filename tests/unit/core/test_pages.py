"""Pages made from templates."""

import jinja2
import pytest

from autotune.core.pages import environment


def test_all_but_markdown_is_escaped() -> None:
    escapes = environment("autotune.report").autoescape
    assert callable(escapes)
    names = {"report.html.j2": True, "report.md.j2": False, "notes.txt": True, "index.html": True}
    assert {name: escapes(name) for name in names} == names


def test_pages_escape_text_and_know_all_their_names() -> None:
    template = environment("autotune.report").from_string("{{ name }}")
    assert template.render(name="<b>") == "&lt;b&gt;"
    with pytest.raises(jinja2.UndefinedError):
        template.render()


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{ 0.1234 | percent }}, {{ none | percent }}", "12.3%, –"),
        ("{{ 0.1234 | signed }}, {{ -0.5 | signed }}, {{ none | signed }}", "+12.3%, -50.0%, –"),
        ("{{ 2.5 | hours }}, {{ none | hours }}", "2 h 30 min, –"),
        # lines of statements leave nothing behind
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
    ],
)
def test_numbers_and_statements_in_a_page(text: str, rendered: str) -> None:
    assert environment("autotune.report").from_string(text).render() == rendered

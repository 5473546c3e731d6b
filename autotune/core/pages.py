"""Jinja environments for the templates of a package; jinja2 is imported only when needed."""

from typing import TYPE_CHECKING

from autotune.core.text import code_span, markdown_text
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_seconds, fmt_usd

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(package: str) -> "Environment":
    """Return the Jinja environment of a package's templates.

    The environment escapes HTML, and raises an error for an unknown name in a template.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    pages = Environment(
        loader=PackageLoader(package),
        autoescape=select_autoescape(disabled_extensions=["md.j2"], default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {
        "code_span": code_span,
        "markdown": markdown_text,
        "count": fmt_count,
        "gib": fmt_gib,
        "usd": fmt_usd,
        "seconds": fmt_seconds,
        "hours": fmt_hours,
        "percent": lambda share: DASH if share is None else f"{share:.1%}",
        "signed": lambda share: DASH if share is None else f"{share:+.1%}",
    }
    return pages

"""Gives figures a common look. Plotly is imported only when a figure needs it.

Colours that depend on the light or dark theme are set by the page, when the page draws a figure.
"""

import base64
import html
import json
from importlib.resources import files
from typing import Any

from autotune.core.probe_types import Outcome

# The part of plotly.js that draws lines, points and bars, from the npm package
# plotly.js-basic-dist-min 4.1.1 (MIT licence, in the same folder). The whole library, which comes
# with plotly for Python, is three times as large. To renew the file, unpack the newer package and
# run `gzip -9n plotly-basic.min.js`.
PLOTLY_JS = "vendored/plotly-basic.min.js.gz"

# Colours that are visible on white and on near-black, similar to the palette of Okabe and Ito.
ACCENT = "#d9541e"
BLUE = "#2a7fc4"
PALE_BLUE = "#8fc1ea"
YELLOW = "#d99a00"
GREY = "#8a8f98"
PURPLE = "#8c63c7"

# The colour and symbol of each outcome. The symbols are for readers who cannot distinguish colours.
# The names of outcomes are in `describe.LABELS`.
MARKERS = {
    Outcome.OK: (BLUE, "circle"),
    Outcome.SLOW: (GREY, "diamond-open"),
    Outcome.OOM: (ACCENT, "x"),
    Outcome.REFUSED: (YELLOW, "triangle-down-open"),
    Outcome.TIMEOUT: ("#b565a7", "square-open"),
    Outcome.NUMERICS: ("#2f9c86", "star"),
    Outcome.CRASH: (PURPLE, "cross-open"),
}


def plotly_js() -> str:
    """Return plotly.js as gzip in base64 (0.5 instead of 1.2 MB), which the page unpacks."""
    return base64.b64encode(files("autotune.report").joinpath(PLOTLY_JS).read_bytes()).decode()


def escape(text: str) -> str:
    """Escape text so that plotly shows it unchanged.

    Plotly interprets a few HTML tags and all entities.
    """
    return html.escape(text, quote=False)


def empty() -> Any:
    """Return an empty figure."""
    import plotly.graph_objects as go

    return go.Figure()


def finish(figure: Any, *, x: str, y: str | None = None, height: int) -> dict[str, Any]:
    """Give a figure axis titles, a height in pixels and the common look.

    Return the arguments of Plotly.newPlot.
    """
    for trace in figure.data:
        trace.hoverinfo = "text" if trace.hovertext else "skip"

    title = {"standoff": 12, "font": {"size": 13}}
    axis = {"zeroline": False, "automargin": True, "ticklabelstandoff": 4, "title": title}
    has_legend = any(trace.name and trace.showlegend is not False for trace in figure.data)
    figure.update_layout(
        template="none",
        height=height,
        autosize=True,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 16, "t": 44 if has_legend else 10, "b": 8},
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13},
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        hoverlabel={"align": "left", "font": {"size": 12}},
        dragmode=False,
    )

    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.update_xaxes(title_text=x)
    if y:
        figure.update_yaxes(title_text=y)

    data: dict[str, Any] = json.loads(figure.to_json())
    return {"data": data["data"], "layout": data["layout"]}

"""The look that all figures share; the only file that imports plotly, and only when a figure is drawn.

Colours that depend on light or dark are left to the page, which sets them when it draws.
"""

import html
import json
from typing import Any

from autotune.core.probe_types import Outcome

# Colour, symbol and name of each outcome: mid-tones that carry on white and on near-black, after Okabe and Ito, told
# apart by symbol as well.
OUTCOMES = {
    Outcome.OK: ("#2a7fc4", "circle", "fits"),
    Outcome.SLOW: ("#8a8f98", "diamond-open", "pruned as slow"),
    Outcome.OOM: ("#d9541e", "x", "out of memory"),
    Outcome.REFUSED: ("#d99a00", "triangle-down-open", "refused"),
    Outcome.TIMEOUT: ("#b565a7", "square-open", "timeout"),
    Outcome.NUMERICS: ("#2f9c86", "star", "loss not finite"),
    Outcome.CRASH: ("#8c63c7", "cross-open", "crash"),
}
ACCENT = "#d9541e"


def plotly_js() -> str:
    """The whole of plotly.js, to be put inline."""
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text


def escape(text: str) -> str:
    """Text that plotly shows as it is: it interprets a few HTML tags and all entities."""
    return html.escape(text, quote=False)


def empty() -> Any:
    """A figure without anything in it."""
    import plotly.graph_objects as go

    return go.Figure()


def finish(figure: Any, *, x: str, y: str | None, height: int) -> dict[str, Any]:
    """The look that all figures share, as the data that Plotly.newPlot takes."""
    axis = {
        "zeroline": False,
        "automargin": True,
        "ticklabelstandoff": 4,
        "title": {"standoff": 12, "font": {"size": 13}},
    }
    named = any(trace.name and trace.showlegend is not False for trace in figure.data)
    figure.update_layout(
        template="none",
        height=height,
        autosize=True,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 16, "t": 44 if named else 10, "b": 8},
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

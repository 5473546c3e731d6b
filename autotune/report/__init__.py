"""The report of a finished study: report.html and the OOM report, made from a StudySummary alone.

`infos` and `tradeoffs` say what figures and tables show, `figures` draws (plotly), `html` renders, `oom` explains what
did not fit.
"""

from autotune.report.html import draw, render
from autotune.report.oom import OomReport, oom_report

__all__ = ["OomReport", "draw", "oom_report", "render"]

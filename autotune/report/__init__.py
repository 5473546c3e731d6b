"""The report of a study, made from a StudySummary alone: report.html, the OOM report, and what terminals print.

`describe` has the words, `infos` and `timeline` the plain values, `figures` draws them (plotly), `html` renders them,
and `oom` explains what did not fit. `comparison` is the page of several cards, `dashboard` a study in optuna-dashboard.
"""

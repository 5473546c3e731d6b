"""Renders the report of a study from a StudySummary: report.html, the OOM report and terminal text.

`describe` has the texts, and `infos` and `timeline` have the plain values. `figures` draws the
values with plotly, and `html` renders the page. `oom` explains trials that did not fit.
`comparison` is the page of several cards, and `dashboard` shows a study in optuna-dashboard.
"""

"""Renders the results of a StudySummary: report.html, the out-of-memory report and terminal text.

`describe` makes the texts, and `infos` and `timeline` make the plain values. `figures` draws these
values with Plotly, and `html` renders the page. `oom` explains trials that did not fit.
`comparison` renders a comparison of cards, and `dashboard` shows a study in optuna-dashboard.
"""

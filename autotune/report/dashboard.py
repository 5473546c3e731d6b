"""A study in optuna-dashboard: a copy of it in memory, with what the report says, behind a gate that lets nobody write.

The dashboard asks for no password and has routes that delete, so it never gets the study's own database. Reading that,
and serving this, is left to `commands.dashboard`.
"""

import copy
import io
import ipaddress
import json
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import optuna
import optuna_dashboard
from optuna.trial import FrozenTrial

from autotune.core.units import fmt_count, fmt_gib
from autotune.report import draw, oom_report, render
from autotune.report.describe import LABELS, candidate_line
from autotune.report.oom import code
from autotune.study.optimizer import METRIC
from autotune.study.summary import StudySummary, TrialRecord

REFRESH_S = 5.0
PAGE = "/dashboard/studies/0"  # of a storage in memory, the first study
TITLES = {  # of the figures that have room in half a window
    "scatter": "Useful tokens/s against peak reserved memory",
    "history": "Useful tokens/s of each trial",
    "importances": "Importance of each knob for speed",
    "memory": "Memory of winner and baseline",
    "quality": "Held-out loss of the finalists against the hours of their full run",
}
Record = tuple[dict[str, Any], list[FrozenTrial]]


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches it: 127.0.0.1, ::1, localhost and the like."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def gate(app: WSGIApplication) -> WSGIApplication:
    """`app` for GET and HEAD (else 405) by those who call it by a name of this machine (else 403).

    A page of somebody else's whose name is made to mean 127.0.0.1 comes with that name.
    """

    def gated(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not is_loopback(urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname):
            return _refuse(start_response, "403 Forbidden", "this view answers to 127.0.0.1 and localhost only")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refuse(start_response, "405 Method Not Allowed", "this view is read-only")
        return app(environ, start_response)

    return gated


def _refuse(start_response: StartResponse, status: str, reason: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "application/json"), ("Allow", "GET, HEAD")])
    return [json.dumps({"reason": reason}).encode()]


class Following:
    """The dashboard of a study that may still run: read again when it is looked at, at most every REFRESH_S seconds."""

    def __init__(self, read: Callable[[], Record], summarize: Callable[[], StudySummary], out: str) -> None:
        self._read, self._summarize, self._documents = read, summarize, Documents(out)
        self._lock, self._looked = Lock(), time.monotonic()
        self._show(read())

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with self._lock:
            if time.monotonic() - self._looked > REFRESH_S:
                try:
                    if (now := self._read()) != self._shown:
                        self._show(now)
                except Exception as error:  # whatever it is, the last copy can still be looked at
                    print(f"not read again: {error}", file=sys.stderr)
                self._looked = time.monotonic()
            app = self._app
        return app(environ, start_response)

    def _show(self, record: Record) -> None:
        summary = self._summarize()
        storage = copied(summary, record, self._documents)
        self._app: WSGIApplication = optuna_dashboard.wsgi(storage, artifact_store=self._documents)
        self._documents.summary, self._shown = summary, record


class Documents:
    """An artifact store of the reports, each written when it is opened. Names that nobody can guess: any page may ask.

    `out` is the study's directory, as the report shows it.
    """

    def __init__(self, out: str) -> None:
        self.summary: StudySummary | None = None
        self._write: dict[str, tuple[str, str, Callable[[StudySummary], str]]] = {
            str(uuid.uuid4()): ("report.html", "text/html", lambda summary: render(summary, out)),
            str(uuid.uuid4()): ("oom_report.md", "text/markdown", lambda summary: oom_report(summary).markdown()),
        }

    def open_reader(self, artifact_id: str) -> BinaryIO:
        assert self.summary is not None
        return io.BytesIO(self._write[artifact_id][-1](self.summary).encode())

    def attributes(self) -> dict[str, str]:
        """What Optuna's upload_artifact writes into a study."""
        facts = {
            key: {"artifact_id": key, "filename": name, "mimetype": f"{kind}; charset=utf-8", "encoding": None}
            for key, (name, kind, _) in self._write.items()
        }
        return {f"artifacts:{key}": json.dumps(one) for key, one in facts.items()}


def copied(summary: StudySummary, record: Record, documents: Documents) -> optuna.storages.InMemoryStorage:
    """The study with its notes, figures and reports, in memory."""
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(
        storage=storage, study_name=summary.study, direction="maximize", sampler=optuna.samplers.RandomSampler()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([METRIC])
    attributes, trials = record
    for key, value in attributes.items():
        if not isinstance(value, dict | list):  # those are for the program, and would fill the page
            study.set_user_attr(key, value)
    for trial in trials:
        study.add_trial(_with_visible_constraints(trial))
    for key, text in documents.attributes().items():
        storage.set_study_system_attr(0, key, text)
    optuna_dashboard.save_note(study, _note(summary))
    for row in summary.trials:
        if row.number < len(trials):  # the summary was read later
            optuna_dashboard.save_note(optuna.trial.Trial(study, row.number), _trial_note(row, summary))
    _save_figures(study, summary)
    return storage


def _with_visible_constraints(trial: FrozenTrial) -> FrozenTrial:
    """A copy whose constraints stand where optuna-dashboard 0.21 reads them: all under one key, as before Optuna 5.

    They may not stand in both places, where they would count twice.
    """
    shown = copy.copy(trial)
    kept = {key: value for key, value in trial.system_attrs.items() if not key.startswith("constraints")}
    shown.system_attrs = kept | {"constraints": [value for _, value in sorted(trial.constraints.items())]}
    shown.user_attrs = {
        key: value for key, value in trial.user_attrs.items() if key != "config"
    }  # the parameters again
    return shown


def _save_figures(study: optuna.Study, summary: StudySummary) -> None:
    import plotly.graph_objects as go

    drawn = draw(summary)
    for name, title in TITLES.items():
        if drawn[name] is not None:
            figure = go.Figure(drawn[name])
            figure.update_layout(
                title={"text": title, "x": 0.02, "y": 0.98, "yanchor": "top"},
                margin={"t": 110, "r": 44},  # for the title and a legend of three lines, and for the mode bar
                height=450,
                paper_bgcolor="white",  # the window's is white or black, at its user's wish
                plot_bgcolor="white",
                modebar={"orientation": "v", "bgcolor": "white"},
            )
            optuna_dashboard.save_plotly_graph_object(study, figure, graph_object_id=name)


def _note(summary: StudySummary) -> str:
    """What the study says so far, in Markdown."""
    if (recipe := summary.recipe) is None:
        return "No configuration came through so far."
    best = recipe.winner
    number = next((f" (trial {row.number})" for row in summary.trials if row.config == best.config), "")
    return "\n\n".join(
        (
            f"**Winner**{number}: {code(best.config.label())}",
            candidate_line(best),
            code(recipe.reason),
            *(f"- {code(caveat)}" for caveat in recipe.caveats),
        )
    )


def _trial_note(row: TrialRecord, summary: StudySummary) -> str:
    """What became of a trial, in Markdown: the verdict, its reason, its log."""
    won = summary.recipe is not None and summary.recipe.winner.config == row.config
    facts = [f"{fmt_count(row.tokens_per_second)} tokens/s"] if row.tokens_per_second is not None else []
    how = "reserved" if row.tokens_per_second is not None else "needed"
    facts += [f"{fmt_gib(row.peak_reserved_gib)} {how}"] if row.peak_reserved_gib is not None else []
    facts += [f"limit {fmt_gib(row.limit_gib)}"] if row.limit_gib is not None else []
    lines = [f"**{LABELS[row.outcome]}**{', the winner' * won} [{row.evidence}]", ", ".join(facts)]
    lines += [f"Reason: {code(row.reason)}"] if row.reason else []
    lines += [f"Log: {code(row.log)}"] if row.log else []
    return "\n\n".join(filter(None, lines))

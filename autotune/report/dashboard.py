"""Shows a read-only copy of a study in optuna-dashboard, with the report's notes and figures.

The dashboard asks for no password and has routes that delete studies. The dashboard therefore never
gets the study's own database. `cli.commands.dashboard` reads that database and serves this
application.
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
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from autotune.core.text import code_span
from autotune.core.units import fmt_count, fmt_gib
from autotune.report import infos
from autotune.report.describe import LABELS, candidate_line, headline
from autotune.report.html import draw, render
from autotune.report.oom import oom_report
from autotune.study.optimizer import METRIC, METRIC_OF_SEVERAL
from autotune.study.summary import StudySummary, TrialRecord

REFRESH_S = 5.0
PAGE = "/dashboard/studies/0"  # the page of study 0, the only study in `Copy`
TITLES = {  # the figures that are readable at half the width of a window, with titles for a phone
    "scatter": "Speed against memory",
    "history": "Useful tokens/s of each trial",
    "importances": "Which settings the speed varies with",
    "memory": "Memory of winner and baseline",
    "quality": "Held-out loss of the finalists",
}
REFUSED = (  # CSS selectors of the controls that would change the study
    '[aria-label="delete artifact"]',
    '[aria-label="delete study"]',
    '[aria-label="rename study"]',
    *(f'button:has([data-testid="{icon}Icon"])' for icon in ("AddBox", "Edit", "StopCircle")),
    '.MuiCard-root:has(> button [data-testid="UploadFileIcon"])',
)
# optuna-dashboard's page, narrowed to one column on a phone. Our figures have a white background,
# so their colours are inverted in a dark window. Importances without bars are replaced by a text.
LOOK = (
    f"""
#graph-hyperparameter-importances:not(:has(.point)) {{ visibility: hidden }}
#graph-hyperparameter-importances:not(:has(.point))::before {{
  content: "Shown once {infos.MIN_MEASURED} configurations are measured with all layers.";
  visibility: visible;
}}
"""
    + """
@media (max-width: 760px) {
  main { min-width: 0 }
  main fieldset { flex-wrap: wrap }
  .modebar { display: none !important }
  main [class*="MuiGrid-grid-xs"] { flex-basis: 100%; max-width: 100%; width: 100% }
  main .MuiTable-root { min-width: 0 }
  main .MuiTableCell-root { overflow-wrap: anywhere; padding: 10px }
}
@media (prefers-color-scheme: dark) {
  .js-plotly-plot:has(.main-svg[style*="background: white"]) {
    filter: invert(0.9) hue-rotate(180deg);
  }
}
"""
)
Record = tuple[dict[str, Any], list[FrozenTrial]]  # the user attributes and the trials of a study


def is_loopback(host: str | None) -> bool:
    """Return whether only this machine can reach the host: 127.0.0.1, ::1, localhost and so on."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def gate(app: WSGIApplication) -> WSGIApplication:
    """Wrap an application so that it accepts only GET and HEAD, and only for a loopback host.

    Other methods get 405, other hosts 403, and a malformed host 400. The check of the host stops
    DNS rebinding: a foreign page whose domain resolves to 127.0.0.1 sends that domain as the host.
    """

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            host = urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname
        except ValueError:  # for example, "[" is no valid host
            return _refuse(start_response, "400 Bad Request", "the Host header names no host")

        if not is_loopback(host):
            return _refuse(
                start_response,
                "403 Forbidden",
                "this page is served to 127.0.0.1 and localhost only",
            )
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refuse(start_response, "405 Method Not Allowed", "this view is read-only")
        return app(environ, start_response)

    return application


def restyled(app: WSGIApplication) -> WSGIApplication:
    """Fit optuna-dashboard's page to phones, and hide controls whose requests `gate` refuses.

    A visible button whose requests always fail would only confuse.
    """

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not environ["PATH_INFO"].startswith("/dashboard"):
            return app(environ, start_response)

        # The page must be complete before its headers are sent, because its length changes.
        response: list[Any] = []

        def start(*answer: Any) -> Callable[[bytes], object]:
            response[:] = answer
            return response.append  # WSGI's legacy `write` function, which is unused here

        page = b"".join(app(environ, start))
        status, headers, *error = response
        hidden = f"{', '.join(REFUSED)} {{ display: none !important }}"
        style = f"<style>{hidden}{LOOK}</style></head>"
        page = page.replace(b"</head>", style.encode())
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, headers, *error)
        return [page]

    return application


def _refuse(start_response: StartResponse, status: str, reason: str) -> Iterable[bytes]:
    """Answer with an error and its reason as JSON."""
    start_response(status, [("Content-Type", "application/json"), ("Allow", "GET, HEAD")])
    return [json.dumps({"reason": reason}).encode()]


def _importances(summary: StudySummary, start_response: StartResponse) -> Iterable[bytes]:
    """Answer with the report's importances of knobs, since the dashboard would compute others."""
    kind = CategoricalDistribution.__name__
    shares = [
        {"name": knob, "importance": one.share, "distribution": kind}
        for knob, one in infos.importances(summary).items()
    ]
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"param_importances": [shares]}).encode()]


class Copy(optuna.storages.InMemoryStorage):
    """A storage that gives the winner's trial to the dashboard as the best trial.

    Optuna would take the fastest trial, but its configuration may be less capable than the
    winner's.
    """

    winner: int | None = None

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the winner's trial or, if there is no winner, the trial with the largest value."""
        if self.winner is None:
            return super().get_best_trial(study_id)
        return self.get_trial(self.winner)


class LiveDashboard:
    """The dashboard of a study that may still run.

    A request makes the dashboard read the study again if its copy is older than REFRESH_S seconds.
    """

    def __init__(
        self, read: Callable[[], Record], summarize: Callable[[], StudySummary], out: str
    ) -> None:
        self._read = read
        self._summarize = summarize
        self._reports = ReportStore(out)
        self._lock = Lock()
        self._read_at = time.monotonic()
        self._show(read())

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request from the newest copy."""
        with self._lock:
            if time.monotonic() - self._read_at > REFRESH_S:
                try:
                    record = self._read()
                    if record != self._record:
                        self._show(record)
                except Exception as error:  # the last copy can still be served
                    print(f"cannot read the study again: {error}", file=sys.stderr)
                self._read_at = time.monotonic()
            app = self._app
            summary = self._reports.summary

        if environ["PATH_INFO"].endswith("/param_importances") and summary is not None:
            return _importances(summary, start_response)
        return app(environ, start_response)

    def _show(self, record: Record) -> None:
        """Replace the copy with this state of the study."""
        summary = self._summarize()
        storage = copy_study(summary, record, self._reports)
        self._app: WSGIApplication = optuna_dashboard.wsgi(storage, artifact_store=self._reports)
        self._reports.summary = summary
        self._record = record


class ReportStore:
    """The reports as an artifact store of Optuna, under random names that other pages cannot guess.

    A report is rendered when it is opened. `out` is the path of the study's directory in the
    commands that the report shows.
    """

    def __init__(self, out: str) -> None:
        self.summary: StudySummary | None = None
        self._write: dict[str, tuple[str, str, Callable[[StudySummary], str]]] = {
            str(uuid.uuid4()): ("report.html", "text/html", lambda summary: render(summary, out)),
            str(uuid.uuid4()): (
                "oom_report.md",
                "text/markdown",
                lambda summary: oom_report(summary).markdown(),
            ),
        }

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """Return the text of one report, as optuna-dashboard's protocol demands."""
        assert self.summary is not None
        return io.BytesIO(self._write[artifact_id][-1](self.summary).encode())

    def attributes(self) -> dict[str, str]:
        """Return the study attributes that Optuna's upload_artifact would write for the reports."""
        attributes = {}
        for key, (name, kind, _) in self._write.items():
            artifact = {
                "artifact_id": key,
                "filename": name,
                "mimetype": f"{kind}; charset=utf-8",
                "encoding": None,
            }
            attributes[f"artifacts:{key}"] = json.dumps(artifact)
        return attributes


def copy_study(summary: StudySummary, record: Record, reports: ReportStore) -> Copy:
    """Copy the study into memory, with notes, figures and reports."""
    storage = Copy()
    study = optuna.create_study(
        storage=storage,
        study_name=summary.study,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        several = len({row.config.num_gpus for row in summary.trials}) > 1
        study.set_metric_names([METRIC_OF_SEVERAL if several else METRIC])

    # Leave out attributes that are dicts or lists: they are for programs, and would fill the page.
    # An attribute that is None has nothing to show.
    attributes, trials = record
    for key, value in attributes.items():
        if value is not None and not isinstance(value, dict | list):
            study.set_user_attr(key, value)
    for trial in trials:
        study.add_trial(_with_visible_constraints(trial))

    for key, text in reports.attributes().items():
        storage.set_study_system_attr(0, key, text)
    optuna_dashboard.save_note(study, _note(summary))
    for row in summary.trials:
        if row.number < len(trials):  # the summary may have newer trials than the record
            noted_trial = optuna.trial.Trial(study, row.number)
            optuna_dashboard.save_note(noted_trial, _trial_note(row, summary))

    _save_figures(study, summary)
    storage.winner = _winner(summary, len(trials))
    return storage


def _winner(summary: StudySummary, num_trials: int) -> int | None:
    """Return the number of the first trial that has the winner's configuration, or None."""
    numbers = [
        row.number
        for row in summary.trials
        if summary.recipe and row.config == summary.recipe.config
    ]
    return next((number for number in numbers if number < num_trials), None)


def _with_visible_constraints(trial: FrozenTrial) -> FrozenTrial:
    """Copy a trial, with its constraints under the key that optuna-dashboard 0.21 reads.

    optuna-dashboard reads them under the key `constraints`, as Optuna wrote them before version 5.
    The keys of Optuna 5 are removed, because otherwise the constraints would count twice. The
    attribute `config` is removed, because it repeats the trial's parameters. Values are rounded to
    five digits, because the page prints all digits, and its box for the best trial cut them off.
    """
    visible = copy.copy(trial)
    others = {
        key: value for key, value in trial.system_attrs.items() if not key.startswith("constraints")
    }
    visible.system_attrs = others | {
        "constraints": [value for _, value in sorted(trial.constraints.items())]
    }
    visible.user_attrs = {key: value for key, value in trial.user_attrs.items() if key != "config"}
    if visible.values is not None:
        visible.values = [float(f"{value:.5g}") for value in visible.values]
    return visible


def _save_figures(study: optuna.Study, summary: StudySummary) -> None:
    """Save each figure in TITLES that has data."""
    import plotly.graph_objects as go

    drawn = draw(summary)
    for name, title in TITLES.items():
        if drawn[name] is not None:
            figure = go.Figure(drawn[name])
            figure.update_layout(  # the margins hold the title and the mode bar
                title={"text": title, "x": 0.02, "y": 0.97, "yanchor": "top", "font": {"size": 15}},
                margin={"t": 48, "r": 44},
                legend={"y": -0.24, "yanchor": "top"},
                height=450,
                paper_bgcolor="white",  # LOOK finds our figures by this background
                plot_bgcolor="white",
                modebar={"orientation": "v", "bgcolor": "white"},
            )
            optuna_dashboard.save_plotly_graph_object(study, figure, graph_object_id=name)


def _note(summary: StudySummary) -> str:
    """Return the answer so far and the winner, in Markdown."""
    if (recipe := summary.recipe) is None:
        return "No configuration has succeeded so far."

    best = recipe.winner
    number = _winner(summary, len(summary.trials))
    trial = "" if number is None else f" (trial {number})"
    lines = [
        f"**{code_span(headline(summary))}**",
        f"**Winner**{trial}: {code_span(best.config.label())}",
        candidate_line(best),
        code_span(recipe.reason),
    ]
    return "\n\n".join(lines + [f"- {code_span(caveat)}" for caveat in recipe.caveats])


def _trial_note(row: TrialRecord, summary: StudySummary) -> str:
    """Describe a trial in Markdown: its outcome, numbers, reason and log."""
    is_winner = row.number == _winner(summary, len(summary.trials))
    has_speed = row.tokens_per_second is not None
    numbers = [f"{fmt_count(row.tokens_per_second)} tokens/s"] if has_speed else []
    if row.peak_reserved_gib is not None:
        verb = "reserved" if has_speed else "needed"
        numbers.append(f"{fmt_gib(row.peak_reserved_gib)} {verb}")
    if row.limit_gib is not None:
        numbers.append(f"limit {fmt_gib(row.limit_gib)}")

    lines = [
        f"**{LABELS[row.outcome]}**{', the winner' if is_winner else ''} [{row.evidence}]",
        ", ".join(numbers),
    ]
    lines += [f"Reason: {code_span(row.reason)}"] if row.reason else []
    lines += [f"Log: {code_span(row.log)}"] if row.log else []
    return "\n\n".join(filter(None, lines))

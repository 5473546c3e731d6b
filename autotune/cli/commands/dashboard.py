"""`autotune dashboard`: show a study in optuna-dashboard, read-only and on this machine only.

The command does not import torch.
"""

import errno
import importlib.util
import logging
import socket
from socketserver import ThreadingMixIn
from typing import Annotated, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import typer

from autotune.cli.options import Storage, StudyName
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.study.storage.location import existing_url


def dashboard(
    study: StudyName = None,
    host: Annotated[
        str, typer.Option(help="Address of this machine to listen at; loopback only.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port. If it is taken, any free port is used.")
    ] = 8080,
    storage: Storage = None,
) -> None:
    """Serve a study until Ctrl-C. If `port` is 0 or in use, the dashboard uses any free port.

    Raises:
        UsageError: there is no such study, or other machines could reach the address `host`.
        EnvironmentProblem: optuna-dashboard is not installed.
        StorageError: the database cannot be read.
    """
    if importlib.util.find_spec("optuna_dashboard") is None:
        raise EnvironmentProblem(
            "optuna-dashboard is not installed", remedy="pip install optuna-dashboard"
        )
    from autotune.api import load_study
    from autotune.report.dashboard import PAGE, LiveDashboard, gate, is_loopback, restyled
    from autotune.study.optimizer import Optimizer
    from autotune.study.storage.database import read_only

    if not is_loopback(host):
        raise UsageError(
            f"--host {host}: the dashboard asks for no password, so it is for this machine alone",
            remedy=f"leave --host out, and run on your computer: {_tunnel(port or 8080)}",
        )

    url = read_only(existing_url(storage))
    result = load_study(study, url)
    name = result.summary.study
    search = Optimizer.open(url, name, result.task.space)
    # optuna-dashboard would warn about too few trials each time it shows a page.
    logging.getLogger("optuna_dashboard").setLevel(logging.ERROR)
    app = LiveDashboard(search.record, lambda: load_study(name, url).summary, result.out.name)

    with _listen(host, port) as server:
        server.set_app(gate(restyled(app)))
        actual_port = server.server_port
        if port not in (actual_port, 0):
            print(f"port {port} is taken, so the dashboard uses port {actual_port}")
        print(f"http://{_in_url(host)}:{actual_port}{PAGE}")
        print(f"from another machine, first run: {_tunnel(actual_port, host)}")
        print("the page shows a copy of the study as it progresses; Ctrl-C ends it", flush=True)
        server.serve_forever()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tunnel(port: int, host: str = "127.0.0.1") -> str:
    return f"ssh -N -L {port}:{_in_url(host)}:{port} {socket.gethostname()}"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # Ctrl-C does not wait for a page that is being sent


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Print nothing for a request."""


def _listen(host: str, port: int) -> _Server:
    kind = _Server6 if ":" in host else _Server
    try:
        return kind((host, port), _Quiet)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(
                f"cannot listen at {host}, port {port}: {error.strerror}", remedy="see --help"
            ) from None
    return kind((host, 0), _Quiet)

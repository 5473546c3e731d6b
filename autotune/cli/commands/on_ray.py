"""`autotune run --ray ADDRESS`: a worker on each GPU of a Ray cluster that is like the one here.

Ray places them and no more: an actor holds a GPU and starts `autotune worker` as a process that ends with it. What a
worker that is gone had begun goes back by its leases, so that Ray repeats nothing.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec
from autotune.cli.commands.local import LEAVE_S
from autotune.cli.console import Display
from autotune.core import nvml
from autotune.core.errors import EnvironmentProblem, UsageError

RESOURCE = "autotune"  # how many workers a node takes on its processors, for a study that is probed on those
START_S = 60.0
THREADS = "OMP_NUM_THREADS"  # Ray sets it to 1 in its processes, with which a processor is another than the leader's


def check(address: str | None) -> None:
    """Raises UsageError where Ray is asked for and not installed."""
    if address is not None and find_spec("ray") is None:
        raise UsageError("--ray: Ray is not installed", remedy="pip install 'ray>=2.52'")


@contextmanager
def ray_workers(
    address: str | None,
    study: str,
    url: str,
    device: DeviceSpec,
    display: Display,
    should_stop: Callable[[], bool],
) -> Iterator[None]:
    """Workers on the cluster's GPUs but for the one that this process probes on; they end with it or before.

    Raises:
        EnvironmentProblem: there is no such cluster, or nothing in it to probe on.
        UsageError: a database that its nodes cannot share.
    """
    if address is None:
        yield
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    listening = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"there is no Ray cluster at {address}: {error}", remedy="start one with `ray start --head`"
        ) from None
    finally:
        for number, handler in listening.items():
            signal.signal(number, handler)  # Ray takes them
    try:
        home = ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        if url.startswith("sqlite") and len({node["NodeManagerAddress"] for node in nodes.values()}) > 1:
            raise UsageError(
                "the study is in an SQLite file, which the nodes of the cluster cannot share",
                remedy="give --storage postgresql+psycopg://...",
            )
        needs = {"resources": {RESOURCE: 1}} if device.kind == "cpu" else {"num_gpus": 1}
        hands = [
            ray.remote(_Hand)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **needs)
            .remote()
            for node, count in _places(nodes, home, device).items()
            for _ in range(count)
        ]
        if not hands:
            raise EnvironmentProblem(
                f"no node of the Ray cluster has {'the resource ' + RESOURCE if device.kind == 'cpu' else 'such GPUs'}",
                remedy=f"""for processors: ray start --resources '{{"{RESOURCE}": 1}}'""",
            )
        own = None if device.kind == "cpu" else (home, str(nvml.first_visible()))
        begun = [hand.begin.remote(study, url, own, os.environ.get(THREADS), os.getcwd()) for hand in hands]
        _tell(ray, begun, START_S, display, "could not begin")
        patience = 0.0
        try:
            yield
            if not should_stop():
                display.say("waiting for the other workers to end what they probe")
                patience = LEAVE_S
        finally:
            ended = [hand.end.remote(patience) for hand in hands]
            _tell(ray, ended, patience + LEAVE_S + 5, display, "did not come to its end")
    finally:
        ray.shutdown()  # and with it all actors


def _places(nodes: dict[str, dict[str, Any]], home: str, device: DeviceSpec) -> dict[str, int]:
    """How many workers each node takes: a GPU counts if Ray calls it what it calls the one here."""

    def kinds(node: str) -> set[str]:
        return {name for name in nodes[node]["Resources"] if name.startswith("accelerator_type:")}

    if device.kind == "cpu":
        return {node: int(told["Resources"].get(RESOURCE, 0)) for node, told in nodes.items()}
    return {node: int(told["Resources"].get("GPU", 0)) for node, told in nodes.items() if kinds(node) == kinds(home)}


def _tell(ray: Any, asked: list[Any], seconds: float, display: Display, what: str) -> None:
    """Wait for the actors' answers, and tell what became of those that failed."""
    done, waiting = ray.wait(asked, num_returns=len(asked), timeout=seconds)
    if waiting:
        display.note(f"{len(waiting)} of Ray's workers did not answer within {seconds:.0f} s", "yellow")
    for one in done:
        try:
            code = ray.get(one)
        except ray.exceptions.RayError as error:
            display.note(f"a worker of Ray's {what}: {str(error).strip().splitlines()[0]}", "yellow")
        else:
            if code:
                display.note(f"a worker of Ray's failed (exit code {code}): see Ray's logs of its node", "yellow")


class _Hand:
    """An actor: the worker on the GPU that Ray gave it, as a process that ends with it."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None

    def begin(self, study: str, url: str, leader: tuple[str, str] | None, threads: str | None, folder: str) -> None:
        """Start the worker. On the card of the one that leads, only hold it."""
        import ray

        if (ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")) == leader:
            return
        environment = {name: value for name, value in os.environ.items() if name != THREADS}
        environment |= {"AUTOTUNE_STORAGE": url} | ({THREADS: threads} if threads else {})
        line = [sys.executable, "-m", "autotune", "worker", f"--study={study}", "--parent", str(os.getpid())]
        here = folder if Path(folder).is_dir() else None
        self._worker = subprocess.Popen(line, env=environment, cwd=here, stdin=subprocess.DEVNULL)

    def end(self, patience: float) -> int:
        """Let the worker leave for so many seconds, stop it, and say how it had ended; 0 where it was still at work."""
        if self._worker is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            self._worker.wait(patience)
        code = self._worker.poll()
        with suppress(ProcessLookupError):
            self._worker.terminate()
        try:
            self._worker.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._worker.kill()
        return code or 0

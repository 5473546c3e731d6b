"""The additional workers of a study, on the other GPUs of this machine or of a Ray cluster.

Each of these workers is an `autotune worker` process, which ends no later than the leader. A lost
worker is not restarted: once its leases (reservations) expire, the other workers try its
configurations.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec
from autotune.core import nvml
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.process import module_command
from autotune.study.progress import Progress
from autotune.study.storage.location import VARIABLE, make_writable

LEAVE_S = 20.0  # after the search, workers have this time to finish their probes
RAY_START_S = 60.0
# In a study that probes on CPUs, each Ray node gets one worker for each unit of this resource.
RAY_RESOURCE = "autotune"
# Ray sets this variable to 1 in its processes, but a worker on a CPU must use as many threads as
# the leader.
THREADS_VARIABLE = "OMP_NUM_THREADS"
WAITING = "waiting for the other workers to finish their probes"


def further_cards(workers: int, *, cpu: bool) -> Sequence[int | str | None]:
    """Return the GPU of each worker except the leader, or None for each worker on a CPU.

    Raises EnvironmentProblem if there are too few GPUs.
    """
    if cpu:
        return [None] * (workers - 1)
    cards = nvml.visible() if workers > 1 else []
    if workers > max(len(cards), 1):
        raise EnvironmentProblem(
            f"--workers {workers} needs a GPU for each worker, but this machine has {len(cards)}",
            remedy=f"give --workers {max(len(cards), 1)}",
        )
    return cards[1:workers]


def require_ray(address: str | None) -> None:
    """Raise UsageError if a Ray cluster is asked for and Ray is not installed."""
    if address is not None and find_spec("ray") is None:
        raise UsageError("ray: Ray is not installed", remedy="pip install 'ray>=2.52'")


def _worker_command(study: str, *arguments: str) -> list[str]:
    """Return the command that starts a worker, which ends together with this process."""
    command = [*module_command("autotune"), "worker", "--study", study, *arguments]
    return [*command, "--parent", str(os.getpid())]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a worker, and kill it if it does not end within LEAVE_S."""
    process.terminate()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def local_workers(
    cards: Sequence[int | str | None],
    study: str,
    url: str,
    out: Path,
    progress: Progress,
    is_over: Callable[[], bool],
) -> Iterator[None]:
    """While the `with` block runs, run a worker for each item of `cards`; None means the CPU.

    At the end of the block, the workers have LEAVE_S seconds to finish. After an error, or once
    `is_over` returns True, the workers are ended at once. A failed worker is reported.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, card in enumerate(cards, 2):
            processes.append(_start(study, url, out / f"worker-{number}", card))
        yield

        if any(process.poll() is None for process in processes):
            progress.say(WAITING)

        until = time.monotonic() + LEAVE_S
        while (
            any(process.poll() is None for process in processes)
            and time.monotonic() < until
            and not is_over()
        ):
            time.sleep(0.1)
    finally:
        for number, process in enumerate(processes, 2):
            if process.poll():
                text = (
                    f"worker {number} failed (exit code {process.returncode}): "
                    f"{out}/worker-{number}/logs"
                )
                progress.note(text, "yellow")
            process.terminate()  # signal all workers first, then wait for each

        for process in processes:
            _end(process)


def _start(study: str, url: str, folder: Path, card: int | str | None) -> subprocess.Popen[bytes]:
    make_writable(folder)
    # The URL may hold a password, which other users could read on a command line.
    environment = os.environ | {VARIABLE: url}
    if card is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(card)
    with (folder / "logs" / "tuner.log").open("ab") as log:
        return subprocess.Popen(
            _worker_command(study, "--out", str(folder)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C reaches only the leader, which then ends the workers
        )


@contextmanager
def ray_workers(
    address: str | None,
    study: str,
    url: str,
    device: DeviceSpec,
    progress: Progress,
    is_over: Callable[[], bool],
) -> Iterator[None]:
    """While the `with` block runs, run a worker on each GPU of the leader's type in a Ray cluster.

    The GPU that the leader uses gets no worker. Ray only places the workers: an actor holds a GPU
    and starts `autotune worker` as a process that ends with the actor. Without an address, there
    are no workers. The workers end in the same way as in `local_workers`.

    Raises:
        EnvironmentProblem: there is no such cluster, or the cluster has no device to probe on.
        UsageError: the nodes of the cluster cannot share the database.
    """
    if address is None:
        yield
        return
    import ray

    _connect(address)
    try:
        home = ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        if (
            url.startswith("sqlite")
            and len({node["NodeManagerAddress"] for node in nodes.values()}) > 1
        ):
            raise UsageError(
                "the study is in an SQLite file, which the nodes of the cluster cannot share",
                remedy="give --storage postgresql+psycopg://...",
            )

        actors = _place(nodes, home, device)
        own = None if device.kind == "cpu" else (home, str(nvml.first_visible()))

        threads = os.environ.get(THREADS_VARIABLE)
        begin_calls = [
            actor.begin.remote(study, url, own, threads, os.getcwd()) for actor in actors
        ]
        _report(begin_calls, RAY_START_S, "could not begin", progress)

        patience = 0.0
        try:
            yield
            if not is_over():
                progress.say(WAITING)
                patience = LEAVE_S
        finally:
            end_calls = [actor.end.remote(patience) for actor in actors]
            _report(end_calls, patience + LEAVE_S + 5, "did not end", progress)
    finally:
        ray.shutdown()  # ends all actors


def _place(nodes: dict[str, dict[str, Any]], home: str, device: DeviceSpec) -> list[Any]:
    """Create an actor for each worker.

    Raises EnvironmentProblem if no node has a device for a worker.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_cpu = device.kind == "cpu"
    needs: dict[str, Any] = {"resources": {RAY_RESOURCE: 1}} if on_cpu else {"num_gpus": 1}
    actors = []
    for node, count in workers_by_node(nodes, home, device).items():
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(_WorkerActor).options(num_cpus=0, scheduling_strategy=strategy, **needs)
        actors += [actor.remote() for _ in range(count)]

    if not actors:
        missing = f"the resource {RAY_RESOURCE}" if on_cpu else "GPUs of this type"
        raise EnvironmentProblem(
            f"no node of the Ray cluster has {missing}",
            remedy=f"""for workers on CPUs: ray start --resources '{{"{RAY_RESOURCE}": 1}}'""",
        )
    return actors


def _report(calls: list[Any], seconds: float, failure: str, progress: Progress) -> None:
    """Wait for the actors' answers, and report failed workers."""
    import ray

    done, waiting = ray.wait(calls, num_returns=len(calls), timeout=seconds)
    if waiting:
        progress.note(
            f"{len(waiting)} of Ray's workers did not answer within {seconds:.0f} s", "yellow"
        )
    for call in done:
        try:
            code = ray.get(call)
        except ray.exceptions.RayError as error:
            progress.note(f"a Ray worker {failure}: {str(error).strip().splitlines()[0]}", "yellow")
        else:
            if code:
                progress.note(
                    f"a Ray worker failed (exit code {code}): see Ray's logs of its node",
                    "yellow",
                )


def _connect(address: str) -> None:
    """Connect to a Ray cluster. Raises EnvironmentProblem."""
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"there is no Ray cluster at {address}: {error}",
            remedy="start one with `ray start --head`",
        ) from None
    finally:
        for number, handler in handlers.items():  # Ray replaces the signal handlers
            with suppress(ValueError):  # only the main thread may set handlers
                signal.signal(number, handler)


def workers_by_node(
    nodes: dict[str, dict[str, Any]], home: str, device: DeviceSpec
) -> dict[str, int]:
    """Return the number of workers for each node of the Ray cluster.

    If Ray reports the same GPU type for a node and for the leader's node `home`, the node gets a
    worker for each of its GPUs. On CPUs, a node gets a worker for each unit of RAY_RESOURCE.
    """

    def gpu_types(node: str) -> set[str]:
        return {name for name in nodes[node]["Resources"] if name.startswith("accelerator_type:")}

    if device.kind == "cpu":
        return {node: int(facts["Resources"].get(RAY_RESOURCE, 0)) for node, facts in nodes.items()}

    return {
        node: int(facts["Resources"].get("GPU", 0))
        for node, facts in nodes.items()
        if gpu_types(node) == gpu_types(home)
    }


class _WorkerActor:
    """A Ray actor that holds a GPU and runs the worker in a process that ends with the actor."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None

    def begin(
        self, study: str, url: str, leader: tuple[str, str] | None, threads: str | None, folder: str
    ) -> None:
        """Start the worker. If this actor holds the leader's GPU, start no worker.

        `leader` identifies the leader's GPU: (node id, CUDA_VISIBLE_DEVICES).
        """
        import ray

        if (
            ray.get_runtime_context().get_node_id(),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
        ) == leader:
            return

        environment = {
            name: value for name, value in os.environ.items() if name != THREADS_VARIABLE
        }
        environment[VARIABLE] = url
        if threads:
            environment[THREADS_VARIABLE] = threads

        cwd = folder if Path(folder).is_dir() else None
        self._worker = subprocess.Popen(
            _worker_command(study), env=environment, cwd=cwd, stdin=subprocess.DEVNULL
        )

    def end(self, patience: float) -> int:
        """Wait `patience` seconds for the worker to finish, then end it.

        Returns the worker's exit code, or 0 if it was still working.
        """
        if self._worker is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            self._worker.wait(patience)
        code = self._worker.poll()
        _end(self._worker)
        return code or 0

"""Workers on a Ray cluster, with a Ray that records what it is asked: where they are placed, begun,
ended and reported.

`tests/system/test_on_ray.py` runs a real one, where it is installed.
"""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.study import worker_group
from autotune.study.progress import TextProgress
from autotune.study.worker_group import ray_workers

GPU, CPU = resolve_device("h200"), resolve_device("cpu")
H200, A100 = {"accelerator_type:H200": 1.0}, {"accelerator_type:A100": 1.0}
POSTGRES = "postgresql+psycopg://host/db"


class RayError(Exception):
    """As Ray raises where an actor dies."""


class FakeRay(types.ModuleType):
    """A cluster.

    `answers` says what begin and end of each actor return, an exception or "late" for no answer.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=RayError)
        self.found = [
            self.node("home", GPU=2.0, autotune=1.0, **H200),
            self.node("like", address="10.0.0.2", GPU=1.0, autotune=2.0, **H200),
            self.node("other", address="10.0.0.3", GPU=4.0, **A100),
            self.node("dead", alive=False, GPU=8.0, **H200),
        ]
        self.answers: dict[str, list[Any]] = {"begin": [], "end": []}
        self.asked: list[tuple[Any, ...]] = []
        self.waited: list[tuple[int, int, float]] = []
        self.refuses: Exception | None = None

    @staticmethod
    def node(
        name: str, *, address: str = "10.0.0.1", alive: bool = True, **resources: float
    ) -> dict[str, Any]:
        return {
            "NodeID": name,
            "NodeManagerAddress": address,
            "Alive": alive,
            "Resources": resources,
        }

    def init(self, **options: Any) -> None:
        self.asked.append(("init", options))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray sets handlers of its own
        if self.refuses is not None:
            raise self.refuses

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: "home")

    def nodes(self) -> list[dict[str, Any]]:
        return self.found

    def remote(self, actor: type) -> Any:
        assert actor is worker_group._WorkerActor
        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(remote=lambda: self.actor(options))
        )

    def actor(self, options: dict[str, Any]) -> Any:
        self.asked.append(("actor", options))
        return types.SimpleNamespace(begin=self.method("begin"), end=self.method("end"))

    def method(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            return self.answers[name].pop(0) if self.answers[name] else None

        return types.SimpleNamespace(remote=call)

    def wait(self, calls: list[Any], *, num_returns: int = 1, timeout: float | None = None) -> Any:
        assert timeout is not None
        self.waited.append((len(calls), num_returns, timeout))
        return [call for call in calls if call != "late"], [
            call for call in calls if call == "late"
        ]

    def get(self, call: Any) -> Any:
        if isinstance(call, Exception):
            raise call
        return call

    def shutdown(self) -> None:
        self.asked.append(("shutdown",))

    def of(self, name: str) -> list[Any]:
        return [call[1] if len(call) == 2 else call[1:] for call in self.asked if call[0] == name]


class Affinity:
    """As Ray's strategy for actors of one node."""

    def __init__(self, node: str, *, soft: bool) -> None:
        self.node, self.soft = node, soft


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made, strategies = FakeRay(), types.ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = Affinity  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv(worker_group.THREADS_VARIABLE, raising=False)
    return made


Work = Callable[..., list[str]]


@pytest.fixture
def work(cluster: FakeRay) -> Work:
    """A block of the leader with workers on the cluster; what was said."""

    def run(
        device: Any = GPU,
        url: str = POSTGRES,
        address: str | None = "auto",
        error: bool = False,
        over: bool = False,
    ) -> list[str]:
        said: list[str] = []
        with (
            suppress(ZeroDivisionError),
            ray_workers(address, "mine", url, device, TextProgress(said.append), lambda: over),
        ):
            said.append("searching")
            if error:
                raise ZeroDivisionError
        return said

    return run


def test_without_an_address_nothing_is_asked_of_ray(work: Work, cluster: FakeRay) -> None:
    assert work(address=None) == ["searching"] and cluster.asked == []


def test_a_worker_is_placed_on_each_gpu_like_the_leaders(work: Work, cluster: FakeRay) -> None:
    assert work() == ["searching", worker_group.WAITING]
    assert cluster.of("init") == [
        {"address": "auto", "log_to_driver": False, "logging_level": "ERROR"}
    ]
    placed = cluster.of("actor")
    assert [
        (one["scheduling_strategy"].node, one["scheduling_strategy"].soft) for one in placed
    ] == [
        ("home", False),
        ("home", False),
        ("like", False),
    ]
    assert [{**one, "scheduling_strategy": None} for one in placed] == [
        {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": None}
    ] * 3
    # The actor on the leader's own GPU only holds it.
    assert cluster.of("begin") == [("mine", POSTGRES, ("home", "1"), None, os.getcwd())] * 3
    assert cluster.of("end") == [20.0] * 3 and cluster.asked[-1] == ("shutdown",)
    # to begin; to leave, to be ended, and 5 s for the answer
    assert cluster.waited == [(3, 3, 60.0), (3, 3, 45.0)]


def test_on_processors_a_resource_says_how_many_workers_a_node_takes(
    work: Work, cluster: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(worker_group.THREADS_VARIABLE, "7")
    work(CPU)
    placed = cluster.of("actor")
    assert [one["scheduling_strategy"].node for one in placed] == ["home", "like", "like"]
    assert all(
        one["resources"] == {"autotune": 1} and one["num_cpus"] == 0 and "num_gpus" not in one
        for one in placed
    )
    assert cluster.of("begin") == [("mine", POSTGRES, None, "7", os.getcwd())] * 3


@pytest.mark.parametrize("ends", [{"error": True}, {"over": True}], ids=str)
def test_workers_of_a_search_that_failed_or_is_over_are_not_waited_for(
    work: Work, cluster: FakeRay, ends: dict[str, bool]
) -> None:
    assert work(**ends) == ["searching"]
    assert cluster.of("end") == [0.0] * 3 and cluster.waited[-1] == (3, 3, 25.0)
    assert cluster.asked[-1] == ("shutdown",)


def test_workers_that_fail_or_do_not_answer_are_reported(work: Work, cluster: FakeRay) -> None:
    cluster.answers = {
        "begin": [RayError("\n it died\nat line 3\n"), "late", None],
        "end": [0, 3, RayError("lost")],
    }
    assert work() == [
        "1 of Ray's workers did not answer within 60 s",
        "a Ray worker could not begin: it died",
        "searching",
        worker_group.WAITING,
        "a Ray worker failed (exit code 3): see Ray's logs of its node",
        "a Ray worker did not end: lost",
    ]


@pytest.mark.parametrize("device", [GPU, CPU], ids=["gpu", "cpu"])
def test_a_cluster_without_anything_to_probe_on_is_refused_and_left(
    work: Work, cluster: FakeRay, device: Any
) -> None:
    cluster.found = [cluster.node("home"), cluster.node("dead", alive=False, GPU=1.0, autotune=1.0)]
    what = "GPUs of this type" if device is GPU else "the resource autotune"
    with pytest.raises(
        EnvironmentProblem, match=f"no node of the Ray cluster has {what}"
    ) as caught:
        work(device)
    assert caught.value.remedy == """for workers on CPUs: ray start --resources '{"autotune": 1}'"""
    assert cluster.asked[-1] == ("shutdown",) and cluster.of("begin") == []


def test_a_file_is_shared_by_the_nodes_of_one_machine_alone(work: Work, cluster: FakeRay) -> None:
    with pytest.raises(UsageError, match="which the nodes of the cluster cannot share") as caught:
        work(url="sqlite:///a.db")
    assert caught.value.remedy == "give --storage postgresql+psycopg://..."
    assert cluster.of("actor") == [] and cluster.asked[-1] == ("shutdown",)
    cluster.found = [one for one in cluster.found if one["NodeManagerAddress"] == "10.0.0.1"]
    work(url="sqlite:///a.db")
    assert len(cluster.of("actor")) == 2


@pytest.mark.parametrize(
    "error", [ConnectionError("nobody"), ValueError("nobody"), RuntimeError("nobody")], ids=repr
)
def test_a_cluster_that_is_not_there_is_named(
    work: Work, cluster: FakeRay, error: Exception
) -> None:
    cluster.refuses = error
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(
        EnvironmentProblem, match="there is no Ray cluster at auto: nobody"
    ) as caught:
        work()
    assert caught.value.remedy == "start one with `ray start --head`"
    assert cluster.of("shutdown") == [] and signal.getsignal(signal.SIGTERM) == before


def test_the_signal_handlers_of_the_leader_stay(work: Work) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    work()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# --- the actor


@pytest.fixture
def begun(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What processes were begun with.

    Each is a shell that sleeps until it is ended, or exits at once with a code.
    """
    started: list[dict[str, Any]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append({"command": command, **options})
        code = os.environ.get("EXITS")
        return popen(["sh", "-c", f"exit {code}" if code else "exec sleep 60"])

    monkeypatch.setattr(worker_group.subprocess, "Popen", start)
    return started


def test_an_actor_runs_a_worker_with_the_url_and_threads_of_the_leader(
    begun: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(worker_group.THREADS_VARIABLE, "1")  # as Ray sets it
    for threads, folder, cwd in (
        ("7", str(tmp_path), str(tmp_path)),
        (None, str(tmp_path / "no"), None),
    ):
        actor = worker_group._WorkerActor()
        actor.begin("mine", POSTGRES, None, threads, folder)
        made = begun.pop()
        assert made["command"][-5:] == ["worker", "--study", "mine", "--parent", str(os.getpid())]
        assert (
            made["env"]["AUTOTUNE_STORAGE"] == POSTGRES
            and made["env"].get("OMP_NUM_THREADS") == threads
        )
        assert made["env"]["PATH"] == os.environ["PATH"]
        assert (made["cwd"], made["stdin"]) == (cwd, subprocess.DEVNULL)
        assert (
            actor.end(0.01) == 0 and actor._worker is not None and actor._worker.poll() is not None
        )


@pytest.mark.parametrize(
    ("leader", "runs"),
    [(("home", "1"), False), (("home", "0"), True), (("like", "1"), True), (None, True)],
)
def test_an_actor_on_the_leaders_own_gpu_only_holds_it(
    begun: list[dict[str, Any]], leader: tuple[str, str] | None, runs: bool
) -> None:
    actor = worker_group._WorkerActor()
    actor.begin("mine", POSTGRES, leader, None, os.getcwd())
    assert bool(begun) is runs and actor.end(0.01) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_an_actor_tells_how_its_worker_ended(
    begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("EXITS", str(code))
    actor = worker_group._WorkerActor()
    actor.begin("mine", POSTGRES, None, None, os.getcwd())
    assert actor.end(30.0) == code


def test_a_worker_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a message first, and has 20 s."""
    asked: list[Any] = []

    def wait(seconds: float | None = None) -> None:
        asked.append(seconds)
        if seconds is not None:
            raise subprocess.TimeoutExpired("worker", seconds)

    process: Any = types.SimpleNamespace(
        terminate=lambda: asked.append("terminate"), kill=lambda: asked.append("kill"), wait=wait
    )
    worker_group._end(process)
    assert asked == ["terminate", 20.0, "kill", None]
    asked.clear()
    process.wait = asked.append
    worker_group._end(process)
    assert asked == ["terminate", 20.0]

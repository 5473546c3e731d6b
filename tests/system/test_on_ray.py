"""`autotune run --set ray=ADDRESS`: the nodes that get a worker, and a study on two nodes of which
one is killed in a trial.

Ray needs 240 MB and the test takes 85 s on two cores, so that the `test` extra does not install it:
`test-extra` does.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.trial import FrozenTrial, TrialState

from autotune.catalog import resolve_device
from autotune.core.errors import UsageError
from autotune.study.storage.optuna_storage import read_record
from autotune.study.worker_group import RAY_RESOURCE, require_ray, workers_by_node
from tests.helpers.shared_study import ARGUMENTS, SPACE, opened

LIMITS = ("--trials", "40", "--set", "patience=999")


def node(**resources: float) -> dict[str, Any]:
    return {"Resources": {name.replace("__", ":"): count for name, count in resources.items()}}


def test_a_node_counts_if_ray_gives_its_gpu_the_name_of_the_local_gpu() -> None:
    nodes = {
        "home": node(GPU=1.0, accelerator_type__A10=1.0),
        "like it": node(GPU=4.0, accelerator_type__A10=1.0),
        "another": node(GPU=8.0, accelerator_type__H100=1.0),
        "none": node(CPU=8.0),
    }
    assert workers_by_node(nodes, "home", resolve_device("a10")) == {"home": 1, "like it": 4}


def test_a_node_without_gpu_counts_by_its_custom_resource() -> None:
    nodes = {"home": node(GPU=1.0), "there": node(**{RAY_RESOURCE: 2.0})}
    assert workers_by_node(nodes, "home", resolve_device("cpu")) == {"home": 0, "there": 2}


def test_a_missing_ray_package_raises_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.study.worker_group.find_spec", lambda name: None)
    require_ray(None)
    with pytest.raises(UsageError, match="not installed"):
        require_ray("auto")


def trials(folder: Path) -> list[FrozenTrial]:
    url = f"sqlite:///{folder / 'runs' / 'autotune.db'}"
    if not (folder / "runs" / "autotune.db").exists() or read_record(url, "one") is None:
        return []
    with opened(url) as search:
        return search.record()[1]


def at_work(folder: Path) -> dict[int, int]:
    """The number of the running trial of each worker, by pid."""
    running = [
        one
        for one in trials(folder)
        if one.state is TrialState.RUNNING and "worker" in one.user_attrs
    ]
    return {int(one.user_attrs["worker"].split(":")[1]): one.number for one in running}


@pytest.mark.extra
@pytest.mark.probe
@pytest.mark.filterwarnings("ignore")  # from Ray itself
def test_a_study_continues_after_a_node_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (test-extra)")
    from ray.cluster_utils import Cluster

    (tmp_path / "space.yaml").write_text(SPACE)
    place = {
        "num_cpus": 1,
        "num_gpus": 1,
        "resources": {RAY_RESOURCE: 1},
        "object_store_memory": 80 * 2**20,
    }
    cluster = Cluster(initialize_head=True, head_node_args=place | {"include_dashboard": False})
    try:
        lost = cluster.add_node(**place)
        line = [
            sys.executable,
            "-m",
            "autotune",
            "run",
            *ARGUMENTS,
            *LIMITS,
            "--set",
            f"ray={cluster.address}",
        ]
        environment = {
            name: value for name, value in os.environ.items() if name != "AUTOTUNE_STORAGE"
        }
        leader = subprocess.Popen(
            line, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        )
        raylet = lost.all_processes["raylet"][0].process.pid
        hit: dict[int, int] = {}
        while not hit:
            assert leader.poll() is None, leader.communicate()[1]
            time.sleep(0.2)
            on_node = {child.pid for child in psutil.Process(raylet).children(recursive=True)}
            hit = {pid: number for pid, number in at_work(tmp_path).items() if pid in on_node}
        doomed = [
            one
            for pid in hit
            for one in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        ]
        cluster.remove_node(lost, allow_graceful=False)
        _, errors = leader.communicate(timeout=400)
        assert leader.returncode == 0, errors
        assert not psutil.wait_procs(doomed, timeout=20)[1]
        finished = trials(tmp_path)
        workers = {
            one.user_attrs["worker"]
            for one in finished
            if one.state in (TrialState.COMPLETE, TrialState.PRUNED)
        }
        assert len(workers) >= 2 and not [
            one for one in finished if one.state is TrialState.RUNNING
        ]
        assert (
            "a Ray worker did not end" in errors and (tmp_path / "runs/one/summary.json").exists()
        )
    finally:
        cluster.shutdown()

"""A worker gets what it needs of its parent's environment, and no more; it ends with all that it started."""

import sys
from pathlib import Path

import psutil
import pytest

from autotune.probe import worker_process
from autotune.probe.worker_process import WorkerProcess, child_environment, passed_on

# A worker that ends when it is asked to, and whose child does not.
OUTLIVED = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_the_environment_by_device() -> None:
    kept = child_environment({"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "LD_PRELOAD": "x"}, "cuda")
    assert kept["CUDA_VISIBLE_DEVICES"] == "1" and "LD_PRELOAD" not in kept
    # Of several cards the first alone, in the order in which they are listed and watched.
    assert child_environment({}, "cuda")["CUDA_VISIBLE_DEVICES"] == "0"
    assert child_environment({"CUDA_VISIBLE_DEVICES": "GPU-1f, GPU-2e"}, "cuda")["CUDA_VISIBLE_DEVICES"] == "GPU-1f"
    assert child_environment({"CUDA_VISIBLE_DEVICES": ""}, "cuda")["CUDA_VISIBLE_DEVICES"] == ""
    assert kept["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "MALLOC_ARENA_MAX" not in kept
    assert "MALLOC_ARENA_MAX" in child_environment({}, "cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "x") for name in ("AUTOTUNE_STORAGE", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "HF_TOKEN")),
        # With names that would be passed on, but for a part of theirs or of their value.
        *(
            (f"NCCL_{part}", "x")
            for part in ("TOKEN", "API_KEY", "SECRET", "CREDENTIALS", "PASS", "PASSWD", "password")
        ),
        ("HF_HUB_MIRROR", "https://me:word@host/path"),
        ("TORCH_HOME", "postgresql+psycopg://me:wo/rd@host/db"),
        ("CUDA_CACHE_PATH", "https://token@host"),
    ],
)
def test_no_secret_is_passed_on_unless_it_is_named(name: str, value: str) -> None:
    parent = {name: value, "HF_HUB_ENABLE": "https://host/a:b", "PATH": "/bin"}
    kept = {"HF_HUB_ENABLE": "https://host/a:b", "PATH": "/bin"}
    assert passed_on(parent) == kept and name not in child_environment(parent, "cuda")
    assert passed_on(parent, [name]) == parent


def test_nothing_that_a_worker_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "module_command", lambda name: [sys.executable, "-c", OUTLIVED])
    log = tmp_path / "log"
    worker = WorkerProcess("cpu", log)
    while not log.read_text().endswith("\n"):
        assert worker.wait_for_exit(0.05) is None
    child = psutil.Process(int(log.read_text()))
    worker.close()
    child.wait(10)  # raises TimeoutExpired

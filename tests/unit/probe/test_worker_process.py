"""The environment of a worker: what it needs of its parent's, and no more."""

import pytest

from autotune.probe.worker_process import child_environment, passed_on


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

"""A process gets the variables that it needs of its parent's environment, and no more."""

from pathlib import Path

import pytest

from autotune.core.child_environment import ON_CPU, child_environment, inherited_variables
from autotune.core.errors import EnvironmentProblem


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of compiled code are made in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_worker_compiles_into_a_private_folder(tmp_path: Path) -> None:
    found = child_environment({}, "cuda")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / ".cache" / "autotune" / "inductor")
    (tmp_path / ".cache" / "autotune" / "triton").chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="triton can be written by every user"):
        child_environment({}, "cpu")


def test_the_environment_by_device() -> None:
    kept = child_environment(
        {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "LD_PRELOAD": "x"}, "cuda"
    )
    assert kept["CUDA_VISIBLE_DEVICES"] == "1" and "LD_PRELOAD" not in kept
    # Of several cards the first alone, in the order in which they are listed and watched.
    assert child_environment({}, "cuda")["CUDA_VISIBLE_DEVICES"] == "0"
    assert (
        child_environment({"CUDA_VISIBLE_DEVICES": "GPU-1f, GPU-2e"}, "cuda")[
            "CUDA_VISIBLE_DEVICES"
        ]
        == "GPU-1f"
    )
    assert child_environment({"CUDA_VISIBLE_DEVICES": ""}, "cuda")["CUDA_VISIBLE_DEVICES"] == ""
    assert kept["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "MALLOC_ARENA_MAX" not in kept
    assert "MALLOC_ARENA_MAX" in child_environment({}, "cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, "x")
            for name in ("AUTOTUNE_STORAGE", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "HF_TOKEN")
        ),
        # With names that would be passed on, but for a part of theirs or of their value.
        *(
            (f"NCCL_{part}", "x")
            for part in (
                "TOKEN",
                "API_KEY",
                "SECRET",
                "CREDS",
                "PASS",
                "PWD",
                "BASIC_AUTH",
                "password",
            )
        ),
        ("HF_HUB_MIRROR", "https://me:word@host/path"),
        ("TORCH_HOME", "postgresql+psycopg://me:wo/rd@host/db"),
        ("CUDA_CACHE_PATH", "https://token@host"),
    ],
)
def test_no_secret_is_passed_on_unless_it_is_named(name: str, value: str) -> None:
    parent = {name: value, "HF_HUB_ENABLE": "https://host/a:b", "PATH": "/bin"}
    kept = {"HF_HUB_ENABLE": "https://host/a:b", "PATH": "/bin"}
    assert inherited_variables(parent) == kept and name not in child_environment(parent, "cuda")
    assert inherited_variables(parent, [name]) == parent


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (
            "cpu",
            {
                "GOMP_SPINCOUNT": "3000",
                "MALLOC_MMAP_THRESHOLD_": "65536",
                "CUDA_VISIBLE_DEVICES": None,
            },
        ),
        (
            "cuda",
            {"GOMP_SPINCOUNT": None, "MALLOC_MMAP_THRESHOLD_": None, "CUDA_VISIBLE_DEVICES": "0"},
        ),
    ],
)
def test_what_every_worker_has_and_what_those_of_a_device_have(
    device: str, expected: dict[str, str | None]
) -> None:
    found = child_environment({"HF_HUB_OFFLINE": "0"}, device)
    assert {name: found.get(name) for name in expected} == expected
    assert found["HF_HUB_OFFLINE"] == "1" and found["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PATH",
            "HOME",
            "USER",
            "LANG",
            "TMPDIR",
            "TZ",
            "VIRTUAL_ENV",
            "PYTHONPATH",
            "LD_LIBRARY_PATH",
            "CC",
            "CXX",
        ),
        *(
            "AUTOTUNE_INJECT",
            "LC_ALL",
            "CUDA_HOME",
            "NVIDIA_TF32_OVERRIDE",
            "NCCL_DEBUG",
            "TORCHINDUCTOR_CACHE_DIR",
        ),
        *(
            "TRITON_CACHE_DIR",
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "XDG_CACHE_HOME",
            "HF_HOME",
            "HF_HUB_CACHE",
            "AUTOTUNE_GROUPED_PRODUCT",
        ),
        *("WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TENSORBOARD_LOGDIR"),
    ],
)
def test_what_a_process_that_trains_needs_is_passed_on(name: str) -> None:
    assert inherited_variables({name: "x", f"MY_{name}": "x"}) == {name: "x"}


def test_a_worker_on_a_processor_returns_large_blocks() -> None:
    assert ON_CPU == {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "GOMP_SPINCOUNT": "3000",
    }

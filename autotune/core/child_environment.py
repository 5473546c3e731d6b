"""The environment variables of a process that this one starts.

It holds only variables that are known to be needed: no database or cloud secret reaches the process.
"""

import re
from collections.abc import Iterable, Mapping

from autotune.trainer.settings import ALLOCATOR_VARIABLE, ALLOCATORS, one_gpu

# On a CPU, peaks repeat to 1 % only if large blocks come straight from the kernel and go straight back. Threads that
# spin long while they wait make a step twenty times slower as soon as another process wants a core; those that sleep at
# once make it up to a seventh slower than the full run, whose threads spin. Some 10 microseconds are enough.
ON_CPU = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "GOMP_SPINCOUNT": "3000",
}
ALWAYS_SET = {
    ALLOCATOR_VARIABLE: ALLOCATORS["expandable"],  # each probe changes it as it wants
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
PASSED_ON = (
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
    "AUTOTUNE_INJECT",
)
PASSED_ON_PREFIXES = (
    *(
        "LC_",
        "CUDA_",
        "NVIDIA_",
        "NCCL_",
        "TORCH",
        "TRITON_",
        "OMP_",
        "MKL_",
        "XDG_CACHE",
        "HF_HOME",
        "HF_HUB_",
    ),
    *("WANDB_", "MLFLOW_", "TRACKIO_", "TENSORBOARD_"),
)
SECRET_NAME = re.compile("TOKEN|KEY|SECRET|CREDENTIAL|PASS", re.IGNORECASE)
SECRET_VALUE = re.compile(r"://\S*@")  # a URL with a password


def passed_on(parent: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """The variables of its parent that a process which trains needs, without secrets, and those `named`."""
    needed = {
        name
        for name, value in parent.items()
        if (name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES))
        and not (SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }
    return {name: parent[name] for name in needed.union(named)}


def child_environment(parent: Mapping[str, str], device: str) -> dict[str, str]:
    """The environment of a worker on `device` ("cuda" or "cpu")."""
    on_device = ON_CPU if device == "cpu" else one_gpu(parent.get("CUDA_VISIBLE_DEVICES", "0"))
    return passed_on(parent) | ALWAYS_SET | on_device

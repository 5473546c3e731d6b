"""The environment variables of a child process.

Children get only the variables that they need, so they get no database or cloud secrets.
"""

import re
from collections.abc import Iterable, Mapping

from autotune.core.errors import EnvironmentProblem
from autotune.trainer.cache_folders import compile_caches
from autotune.trainer.settings import ALLOCATOR_VARIABLE, ALLOCATORS, PRODUCT_VARIABLE, one_gpu

# On a CPU, memory peaks repeat within 1 % only if malloc gets large blocks directly from the kernel
# and returns them at once. If waiting OpenMP threads spin for long, a step becomes twenty times
# slower when another process needs a core. If waiting threads sleep at once, a step takes up to a
# seventh longer than in the full run, whose threads spin. GOMP_SPINCOUNT lets threads spin for
# about 10 microseconds, which avoids both slowdowns.
ON_CPU = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "GOMP_SPINCOUNT": "3000",
}
ALWAYS_SET = {
    # The worker starts with this allocator; each probe then sets its own.
    ALLOCATOR_VARIABLE: ALLOCATORS["expandable"],
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
    PRODUCT_VARIABLE,
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
SECRET_NAME = re.compile("TOKEN|KEY|SECRET|CRED|PASS|PWD|AUTH", re.IGNORECASE)
SECRET_VALUE = re.compile(r"://\S*@")  # the start of a URL that contains a user's name or password


def inherited_variables(parent: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """Return the parent's variables that a training process needs, and the variables in `named`.

    A variable that looks like a secret is left out, unless `named` contains its name.
    """
    needed = {
        name
        for name, value in parent.items()
        if (name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)) and not is_secret(name, value)
    }
    return {name: parent[name] for name in needed.union(named)}


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret, by its name or its value."""
    return bool(SECRET_NAME.search(name) or SECRET_VALUE.search(value))


def child_environment(parent: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the environment of a worker on `device` ("cuda" or "cpu").

    Raises EnvironmentProblem if another user could write to torch's cache of compiled code.
    """
    try:
        caches = compile_caches(parent)
    except PermissionError as error:
        raise EnvironmentProblem(str(error)) from None
    on_device = ON_CPU if device == "cpu" else one_gpu(parent.get("CUDA_VISIBLE_DEVICES", "0"))
    return inherited_variables(parent) | caches | ALWAYS_SET | on_device

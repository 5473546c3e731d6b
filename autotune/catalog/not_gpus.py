"""Rejects a GPU name that stands for a cloud instance, an Apple chip or CUDA.

`data/instances.yaml` says which GPU each cloud instance has.
"""

import re
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import load_data

_APPLE = re.compile(r"mps|metal|apple\b.*|(?:apple[\s_-]*)?m[1-9](?:[\s_-]*(?:pro|max|ultra))?")
_THIS_MACHINE = re.compile(r"(?:cuda|gpu)(?::[0-9]+)?|nvidia")


def refuse_other_names(name: str) -> None:
    """Raise UsageError for a cloud instance, an Apple GPU, or a name like cuda:0 for any GPU."""
    key = name.strip().lower()
    if _APPLE.fullmatch(key):
        raise UsageError(
            f"{name!r} is an Apple GPU, and Apple GPUs are not supported",
            remedy="name the GPU to train on: `autotune plan --model qwen3-8b --gpu h100` works on"
            " a Mac; `--gpu cpu --model demo-3m` tries a search there",
        )
    if _THIS_MACHINE.fullmatch(key):
        raise UsageError(
            f"{name!r} is not the name of a GPU product",
            remedy="--gpu auto takes this machine's GPU; `autotune gpus` lists the names",
        )

    if (found := _instance(key)) is not None:
        row, count = found
        gpu = row["gpu"]
        its = f"with {count} GPUs of the type" if count > 1 else "whose GPU is the"
        raise UsageError(
            f"{name!r} is a cloud instance ({row['cloud']}) {its} {row['product']}",
            remedy=f"name its GPU: --gpu {gpu}{f' --gpus {count}' if count > 1 else ''};"
            f" `autotune compare` takes --gpus {gpu}",
        )


def _instance(key: str) -> tuple[dict[str, Any], int] | None:
    """Return the row of a cloud instance and its number of GPUs, or None for another name."""
    for row in load_data("autotune.catalog", "data/instances"):
        if (match := re.fullmatch(row["name"], key)) is not None:
            groups = match.groupdict()
            return row, int(groups.get("count") or row.get("counts", {}).get(groups.get("size"), 1))
    return None

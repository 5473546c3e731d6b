"""Asks a process of its own for dry probes, and keeps the answers for this user: the peak of any model, without a GPU.

Two truncated depths give the whole model, as they do for real probes. An answer that is kept holds for the versions of
the libraries that it was counted with. What default plans of the catalogue's models ask for is shipped with the package
(`benchmarks/shipped_counts.py`), counted with one version of each.
"""

import gzip
import json
import os
import selectors
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from autotune.core.child_environment import child_environment
from autotune.core.errors import StorageError
from autotune.core.files import cache_directory, write_atomic
from autotune.core.lora_targets import ALL_LINEAR
from autotune.core.objective import Objective
from autotune.core.probe_types import DryCount, ModelShape, ProbeRequest
from autotune.core.process import module_command
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import digest_of
from autotune.prediction.depth_extrapolation import count_at_depth, counted_depths

DRY_VERSION = 7  # raised when a dry probe counts something else than before
OFFLOAD_VERSION = 2  # the same for configurations whose checkpoints wait in the host's memory
FP8_VERSION = 2  # and for bases in fp8
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl")
SHIPPED = "shipped_counts.json.gz"
UNCOUNTED = ("loader_workers", "allocator", "num_gpus")  # knobs that leave what is counted as it is
LONGEST_S = 300.0  # for one answer, the start of the process included


@dataclass(frozen=True, slots=True, kw_only=True)
class DryAnswer:
    """The count of a whole model, or the reason in a sentence why there is none."""

    count: DryCount | None = None
    refused: str | None = None


class DryProber:
    """Dry probes in a process that starts with the first question that nothing kept answers. A context manager."""

    def __init__(self, directory: Path | None = None, *, shipped: bool = True) -> None:
        """Keep answers in `directory`, by default in this user's cache; with `shipped`, know those of the package."""
        self._directory = directory or cache_directory() / "dry"
        self._with_shipped = shipped
        self._process: subprocess.Popen[str] | None = None
        self._shapes: dict[str, ModelShape | str] = {}

    def __enter__(self) -> "DryProber":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def count(self, request: ProbeRequest) -> DryAnswer:
        """What this request holds, at its depth or, where it names none, as a whole model."""
        path = self._directory / f"{key_of(request, library_versions())}.json"
        with suppress(OSError, ValueError):  # not there, or written by something else
            return from_data(DryAnswer, json.loads(path.read_text(encoding="utf-8")))
        if self._with_shipped and (shipped := shipped_answers().get(key_of(request))) is not None:
            return from_data(DryAnswer, shipped)
        answer = self._counted(request)
        with suppress(OSError, StorageError):  # it is only counted again
            write_atomic(path, json.dumps(to_data(answer)) + "\n")
        return answer

    def _counted(self, request: ProbeRequest) -> DryAnswer:
        if request.depth is not None:
            return self._ask_for(request)
        shape = self._shape(request.model)
        if isinstance(shape, str):
            return DryAnswer(refused=shape)
        config = request.config
        if shape.no_adapters is not None and config.method == "lora" and config.lora_targets == ALL_LINEAR:
            return DryAnswer(refused=shape.no_adapters)
        pair = counted_depths(shape, request.config.checkpoint_every)
        if pair is None:
            return self._ask_for(request)
        low, high = (self._ask_for(replace(request, depth=depth)) for depth in pair)
        if low.count is None or high.count is None:
            return low if low.count is None else high
        return DryAnswer(count=count_at_depth((pair[0], low.count), (pair[1], high.count), shape.num_layers))

    def _shape(self, model: dict[str, Any]) -> ModelShape | str:
        """How the layers of a model repeat, or why it cannot be built."""
        key = digest_of(model)
        if key not in self._shapes:
            described = self._ask({"describe": model})
            refused = described.get("refused")
            self._shapes[key] = refused if refused else from_data(ModelShape, described["shape"])
        return self._shapes[key]

    def _ask_for(self, request: ProbeRequest) -> DryAnswer:
        return from_data(DryAnswer, self._ask({"count": to_data(request)}))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except OSError:
            return self._ended()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout=LONGEST_S):
                self.__exit__()
                return {"refused": f"it took longer than {LONGEST_S:.0f} s to count"}
        line = process.stdout.readline()
        return dict(json.loads(line)) if line else self._ended()

    def _ended(self) -> dict[str, Any]:
        self.__exit__()
        return {"refused": "the process that counts it ended"}


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*module_command("autotune.dry.worker"), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(os.environ, "cpu") | {"OMP_NUM_THREADS": "1"},
        text=True,
    )


@cache
def library_versions() -> tuple[str, ...]:
    """The libraries that decide what is counted, each with its version."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return tuple(found)


@cache
def shipped_answers() -> dict[str, Any]:
    """The answers in the package as data, by `key_of` without versions: none matches under another DRY_VERSION.

    There are none where an older transformers is installed than counted them: with 5.17 state-space models hold five
    times as much as with 5.23.
    """
    data = json.loads(gzip.decompress(files("autotune.dry").joinpath(SHIPPED).read_bytes()))
    counted_with = dict(map(str.split, data["versions"]))["transformers"]
    with suppress(metadata.PackageNotFoundError):
        if _release(metadata.version("transformers")) < _release(counted_with):
            return {}
    return dict(data["answers"])


def _release(version: str) -> list[int]:
    """'5.23.0' -> [5, 23]."""
    return [int(number) for number in version.split(".")[:2]]


def key_of(request: ProbeRequest, versions: Sequence[str] = ()) -> str:
    """What must be equal for an answer to hold; one that is kept holds for the `versions` of libraries alone."""
    config = {name: value for name, value in request.config.as_dict().items() if name not in UNCOUNTED}
    about = [request.model, config, request.micro_steps, request.longest.length, request.depth]
    if request.objective is not Objective.SFT:
        about.append(request.objective)
    if request.config.offloads:
        about.append(OFFLOAD_VERSION)
    if request.config.quantization == "fp8":
        about.append(["fp8", FP8_VERSION])
    return digest_of([DRY_VERSION, *versions, *about])

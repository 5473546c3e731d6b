"""Asks a separate process for dry probes, which predict any model's peak memory without a GPU.

The result of a dry probe is a count: the computed memory and work of one training step. As with
real probes, the counts of two truncated models are extrapolated to the whole model. The counts are
kept in the user's cache, and are valid only for the library versions that made them. The package
ships the counts that `autotune plan` needs for the catalogue's models with default options
(`benchmarks/shipped_counts.py`). The shipped counts were made with one version of each library.

If a dry probe fails, the reason is kept only in memory, not in the cache. The cause may be a killed
process or a busy machine, so the next command tries again.
"""

import gzip
import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from autotune.catalog.fast_kernels import counted_packages, kernel_packages
from autotune.core.child_environment import child_environment
from autotune.core.errors import Cancelled, StorageError
from autotune.core.files import write_atomic
from autotune.core.installed import INSTALL, is_installed
from autotune.core.lora_targets import ALL_LINEAR
from autotune.core.objective import Objective
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.core.probe_types import DryCount, ModelShape, ProbeRequest
from autotune.core.process import module_command
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import digest_of
from autotune.prediction.depth_extrapolation import count_at_depth, counted_depths
from autotune.trainer.cache_folders import user_cache
from autotune.trainer.settings import CHUNK_TOKENS, chunk_tokens

# Increase DRY_VERSION if a change of the code changes the results of dry probes. This makes all
# cached counts invalid. If only some configurations change, increase another version instead:
# OFFLOAD_VERSION for activations that are offloaded to the host, FP8_VERSION for base weights in
# fp8, CHUNKS_VERSION for a chunked loss of at most CHUNK_TOKENS tokens, which has two chunks,
# EXPERTS_VERSION for experts that `trainer.grouped_lora` computes, SEGMENTS_VERSION for segments
# that cannot grow.
DRY_VERSION = 7
OFFLOAD_VERSION = 2
FP8_VERSION = 2
CHUNKS_VERSION = 1
EXPERTS_VERSION = 1
SEGMENTS_VERSION = 1
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "trl")
SHIPPED = "shipped_counts.json.gz"
IGNORED_KNOBS = ("loader_workers", "allocator", "num_gpus")  # knobs that do not change the count
POLL_S = 0.1  # seconds between two checks of whether the user asked to stop
SAY_EACH_S = 2.0  # the shortest time between two messages about the progress
LONGEST_S = 300.0  # the longest wait for one answer, including the start of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class DryAnswer:
    """The result of a dry probe for a whole model, or the reason why the dry probe failed."""

    count: DryCount | None = None
    refused: str | None = None


class DryProber:
    """Runs dry probes in a process that starts at the first uncached request. A context manager."""

    def __init__(self, directory: Path | None = None, *, shipped: bool = True) -> None:
        """Keep answers in `directory`, by default in this user's cache.

        If `shipped` is True, also use the answers that the package contains.
        """
        self._directory = directory or user_cache() / "dry"
        self._with_shipped = shipped
        self._process: subprocess.Popen[str] | None = None
        self._shapes: dict[str, ModelShape] = {}
        self._refusals: dict[str, DryAnswer] = {}
        # While an answer is awaited, a result of True ends the process and raises Cancelled.
        self.should_stop: Callable[[], bool] = lambda: False
        # Gets the configuration that is counted, at most once in SAY_EACH_S seconds.
        self.say: Callable[[str], None] = lambda text: None
        self._said_at = -math.inf

    def __enter__(self) -> "DryProber":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def count(self, request: ProbeRequest, other: OtherTrainer = USUAL) -> DryAnswer:
        """Run a dry probe of `request.depth` layers, or of the whole model if the depth is None.

        The step is that of autotune's trainer, or of the trainer `other`.
        """
        key = key_of(request, library_versions(), other)
        path = self._directory / f"{key}.json"
        with suppress(OSError, ValueError):  # the file is missing or invalid
            kept = from_data(DryAnswer, json.loads(path.read_text(encoding="utf-8")))
            if kept.count is not None:  # earlier versions also cached answers without a count
                return kept

        if self._with_shipped and (shipped := _shipped_answer(request, other)) is not None:
            return from_data(DryAnswer, shipped)
        if key in self._refusals:
            return self._refusals[key]

        answer = self._count_uncached(request, other)
        if answer.count is None:
            self._refusals[key] = answer
        else:
            with suppress(StorageError):  # if the write fails, a later command counts again
                write_atomic(path, json.dumps(to_data(answer)) + "\n")
        return answer

    def _count_uncached(self, request: ProbeRequest, other: OtherTrainer) -> DryAnswer:
        if time.monotonic() - self._said_at >= SAY_EACH_S:
            self._said_at = time.monotonic()
            self.say(f"counting the memory of {request.config.label()} without a GPU")

        if request.depth is not None:
            return self._ask_for(request, other)
        shape = self.describe(request.model)
        if isinstance(shape, str):
            return DryAnswer(refused=shape)
        config = request.config
        targets_all = config.method == "lora" and config.lora_targets == ALL_LINEAR
        if shape.no_adapters is not None and targets_all:
            return DryAnswer(refused=shape.no_adapters)

        # If the layers repeat, two truncated models give the count of the whole model.
        pair = counted_depths(shape, request.config.checkpoint_every)
        if pair is None:
            return self._ask_for(request, other)
        low, high = (self._ask_for(replace(request, depth=depth), other) for depth in pair)
        if low.count is None or high.count is None:
            return low if low.count is None else high
        return DryAnswer(
            count=count_at_depth((pair[0], low.count), (pair[1], high.count), shape.num_layers)
        )

    def describe(self, model: dict[str, Any]) -> ModelShape | str:
        """The ModelShape of a model, or the reason why the model cannot be built."""
        key = digest_of(model)
        if key not in self._shapes:
            described = self._ask({"describe": model})
            if refused := described.get("refused"):
                return str(refused)
            self._shapes[key] = from_data(ModelShape, described["shape"])
        return self._shapes[key]

    def _ask_for(self, request: ProbeRequest, other: OtherTrainer) -> DryAnswer:
        message = {"count": to_data(request), "trainer": to_data(other)}
        return from_data(DryAnswer, self._ask(message))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if (reason := obstacle()) is not None:
            return {"refused": reason}

        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except OSError:
            return self._report_end()

        until = time.monotonic() + LONGEST_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not selector.select(timeout=POLL_S):
                if self.should_stop():
                    self.__exit__()
                    raise Cancelled
                if time.monotonic() >= until:
                    self.__exit__()
                    return {"refused": f"counting took longer than {LONGEST_S:.0f} s"}
        line = process.stdout.readline()
        return dict(json.loads(line)) if line else self._report_end()

    def _report_end(self) -> dict[str, Any]:
        self.__exit__()
        return {"refused": "the counting process ended"}


def obstacle() -> str | None:
    """Return why this machine cannot run dry probes, or None if it can run them."""
    if sys.platform != "linux":
        return "counting needs Linux"
    return None if is_installed("torch") else f"counting needs torch: {INSTALL}"


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*module_command("autotune.dry.worker"), str(os.getpid()), *counted_packages()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(os.environ, "cpu") | {"OMP_NUM_THREADS": "1"},
        text=True,
    )


@cache
def library_versions() -> tuple[str, ...]:
    """The libraries that affect dry probes, each with its version, and packages of fast kernels.

    The packages of fast kernels have no version here, because the code that imitates these kernels
    is the same for all versions.
    """
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return (*found, *(f"kernels of {name}" for name in counted_packages()))


def _shipped_answer(request: ProbeRequest, other: OtherTrainer) -> Any:
    """The shipped answer to this request, as parsed JSON, or None if autotune ships no answer.

    The shipped counts assume that no packages of fast kernels are installed.
    """
    if counted_packages(kernel_packages(request.model, request.text_type)):
        return None
    return shipped_answers().get(key_of(request, other=other))


@cache
def shipped_answers() -> dict[str, Any]:
    """The shipped answers as parsed JSON; their keys come from `key_of` without versions.

    Each key depends on DRY_VERSION. So once DRY_VERSION is increased, no request finds an old
    answer here. If the installed transformers is older than the version that made the shipped
    counts, the result is empty, because older versions may need more memory. For example,
    state-space models need five times as much memory with transformers 5.17 as with 5.23.
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


def key_of(request: ProbeRequest, versions: Sequence[str] = (), other: OtherTrainer = USUAL) -> str:
    """The key of a stored count: a digest of the request, of `versions` and of a trainer `other`.

    The keys of shipped counts have no versions.
    """
    config = {
        name: value for name, value in request.config.as_dict().items() if name not in IGNORED_KNOBS
    }
    about = [request.model, config, request.micro_steps, request.longest.length, request.depth]
    if request.objective is not Objective.SFT:
        about.append(request.objective)
    tokens = request.config.micro_batch_size * request.longest.length
    if request.config.loss == "chunked" and chunk_tokens(tokens) < min(tokens, CHUNK_TOKENS):
        about.append(["chunks", CHUNKS_VERSION])
    if request.config.offloads:
        about.append(OFFLOAD_VERSION)
    if request.config.quantization == "fp8":
        about.append(["fp8", FP8_VERSION])
    if request.config.lora_kernels == "grouped" or request.config.quantize_experts:
        about.append(["experts", EXPERTS_VERSION])
    if request.experts is not None:
        about.append(["expert shard", to_data(request.experts)])
    # An extrapolated count has no segments.
    if request.config.allocator == "fixed" and request.depth is not None:
        about.append(["segments", SEGMENTS_VERSION])
    if other != USUAL:
        about.append(["trainer", to_data(other)])
    return digest_of([DRY_VERSION, *versions, *about])

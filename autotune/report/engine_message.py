"""Explains the error of a vLLM engine that finds no room beside a GRPO run, from its words.

The engine takes a share of the GPU. It fails at its start if less is free, and later if its share
leaves too little for its cache.
"""

import math
import re
from dataclasses import dataclass

from autotune.core.units import fmt_gib
from autotune.report.oom_message import OomMessage

_NUMBER = r"(\d+(?:\.\d+)?)"
_START = re.compile(
    rf"\({_NUMBER}/{_NUMBER} GiB\) on startup is less than desired GPU memory utilization "
    rf"\([^,)]*, {_NUMBER} GiB\)"
)
_CACHE = re.compile(
    "No available memory for the cache blocks"
    rf"|{_NUMBER} GiB KV cache is needed, which is larger than the available KV cache memory "
    rf"\({_NUMBER} GiB\)"
    "|larger than the maximum number of tokens that can be stored in KV cache"
)
_COMMANDS = (
    "These commands compute the share of the engine, and what the training needs beside it: "
    "`autotune check FILE --gpu GPU` for a file of TRL, Axolotl or ms-swift, or "
    "`autotune plan --objective grpo --model MODEL --gpu GPU`."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart(OomMessage):
    """An engine that asks at its start for `requested_gib`, while `free_gib` is free."""

    @property
    def cause(self) -> str:
        """Return "engine start"."""
        return "engine start"

    @property
    def first_change(self) -> str:
        """The first change to make."""
        share = math.floor(100 * (self.free_gib or 0.0) / (self.capacity_gib or 1.0)) / 100
        return f"a smaller vllm_gpu_memory_utilization, at most {share:g} here"

    def answer(self) -> tuple[str, ...]:
        """Return the answer in sentences; the first one has the cause and the first change."""
        return (
            f"vLLM asks for {fmt_gib(self.requested_gib)} of the GPU of "
            f"{fmt_gib(self.capacity_gib)} when it starts, and {fmt_gib(self.free_gib)} is free. "
            f"First change: {self.first_change}.",
            _COMMANDS,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCache(OomMessage):
    """An engine whose share leaves `free_gib` for its cache, which needs `requested_gib`."""

    @property
    def cause(self) -> str:
        """Return "engine cache"."""
        return "engine cache"

    @property
    def first_change(self) -> str:
        """The first change to make."""
        return (
            "a larger vllm_gpu_memory_utilization, or a smaller vllm_max_model_length if prompts "
            "and completions are shorter"
        )

    def answer(self) -> tuple[str, ...]:
        """Return the answer in sentences; the first one has the cause and the first change."""
        left = "too little" if self.free_gib is None else f"only {fmt_gib(self.free_gib)}"
        needed = self.requested_gib
        needs = "" if needed is None else f"; the longest sequence needs {fmt_gib(needed)}"
        return (
            f"vLLM's share of the GPU leaves {left} for its cache{needs}. First change: "
            f"{self.first_change}.",
            _COMMANDS,
        )


def read_engine_message(text: str) -> OomMessage | None:
    """Return the first error of a vLLM engine without room in a text, or None if it has none."""
    words = " ".join(text.split())
    if (found := _START.search(words)) is not None:
        free, capacity, asked = map(float, found.groups())
        return _message(EngineStart, capacity, asked, free)
    if (found := _CACHE.search(words)) is not None:
        needed, available = (None if one is None else float(one) for one in found.groups())
        return _message(EngineCache, None, needed, available)
    return None


def _message(
    kind: type[OomMessage], capacity: float | None, requested: float | None, free: float | None
) -> OomMessage:
    return kind(
        on_host=False,
        capacity_gib=capacity,
        requested_gib=requested,
        allocated_gib=None,
        free_blocks_gib=None,
        free_gib=free,
        outside_gib=None,
    )

"""Explains the out-of-memory error of a training that is no study, from the words of the error.

The message of torch has sizes: the GPU's memory, the memory of the tensors, and the allocation that
failed. It does not say which setting took the memory, so the answer names commands that do.
"""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from autotune.core.json_view import fields_plus
from autotune.core.oom_text import RUNTIME_ERRORS, SIZE, requested_gib, size_gib
from autotune.core.units import fmt_gib

_WORDS = ("out of memory", "OutOfMemoryError", "can't allocate memory", *RUNTIME_ERRORS)
# What Linux, a shell, Slurm and torchrun write about a process that the system killed to free
# memory, and what torch writes if /dev/shm is full
_KILLED = (
    r"oom[-_]kill",
    r"^(?:zsh: )?killed(?:\s[^\n]{0,40})?$",
    r"exitcode\s*:\s*-9\b",
    r"\(SIGKILL\)",
    r"insufficient shared memory",
    r"out of shared memory",
)
_IS_OOM = re.compile("|".join([*map(re.escape, _WORDS), *_KILLED]), re.IGNORECASE | re.MULTILINE)
_ON_HOST = re.compile(
    "|".join(["DefaultCPUAllocator", "std::bad_alloc", "out of memory: killed process", *_KILLED]),
    re.IGNORECASE,
)
# A CUDA context and the libraries of one process take less than this outside torch's allocator.
USUAL_OUTSIDE_GIB = 1.5
# A single tensor of at least this share of the GPU's memory is seldom an activation of a layer.
LARGE_SHARE = 0.1
_LESS = "activation checkpointing, or half the micro batch size if it is on already"
_COMMANDS = (
    "`autotune check FILE --gpu GPU` for a program with TRL or a file of TRL, Axolotl or "
    "LLaMA-Factory, or "
    "`autotune plan --model MODEL --gpu GPU`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomMessage:
    """The sizes in a message, in GiB, and the cause that follows from them; None is unknown.

    `free_blocks_gib` is memory that torch's allocator holds in free blocks. `free_gib` is memory
    that no program holds, unless torch may not take it all. `outside_gib` is the memory of other
    programs. If the message does not give the memory of the process, it includes the CUDA context
    and the libraries of the process. `on_amd` says that the GPU is one of AMD.
    """

    JSON: ClassVar = fields_plus("cause", "first_change")

    on_host: bool
    on_amd: bool = False
    capacity_gib: float | None
    requested_gib: float | None
    allocated_gib: float | None
    free_blocks_gib: float | None
    free_gib: float | None
    outside_gib: float | None

    @property
    def needed_gib(self) -> float | None:
        """The least memory for tensors that the training needs: those it had, and one more."""
        if self.allocated_gib is None or self.requested_gib is None:
            return None
        return self.allocated_gib + self.requested_gib

    @property
    def cause(self) -> str:
        """Return "host", "other programs", "fragmentation" or "too large"."""
        if self.on_host:
            return "host"
        needed, outside = self.needed_gib, self.outside_gib
        if needed is None:
            return "too large"
        # Segments that can grow join free blocks with each other and with free memory.
        free_blocks = self.free_blocks_gib or 0.0
        unused = free_blocks + (self.free_gib or 0.0)
        is_fragmented = free_blocks > 0 and unused >= (self.requested_gib or 0.0)
        if (
            outside is not None
            and self.capacity_gib is not None
            and outside > USUAL_OUTSIDE_GIB
            and needed + USUAL_OUTSIDE_GIB < self.capacity_gib
            and not (is_fragmented and free_blocks > outside)
        ):
            return "other programs"
        return "fragmentation" if is_fragmented else "too large"

    @property
    def first_change(self) -> str:
        """The first change to make."""
        if self.cause == "host":
            return "offload nothing to the host, and give the data loader fewer workers"
        if self.cause == "other programs":
            return (
                f"stop the other programs on this GPU (`{'rocm' if self.on_amd else 'nvidia'}-smi` "
                "lists them), or give a vLLM of this training a smaller share"
            )
        if self.cause == "fragmentation":
            maker = "HIP" if self.on_amd else "CUDA"
            return f"set PYTORCH_{maker}_ALLOC_CONF=expandable_segments:True"
        return "half the micro batch size, or a loss in chunks" if self.is_large else _LESS

    @property
    def is_large(self) -> bool:
        """Whether the tensor that had no room takes a large share of the GPU's memory."""
        return (self.requested_gib or 0.0) >= LARGE_SHARE * (self.capacity_gib or math.inf)

    def answer(self) -> tuple[str, ...]:
        """Return the answer in sentences; the first one has the cause and the first change."""
        sentences = [f"{self._headline()}. First change: {self.first_change}."]
        if self.needed_gib is not None:
            sentences.append(
                f"The tensors took {fmt_gib(self.allocated_gib)}, and the next one needed "
                f"{fmt_gib(self.requested_gib)}. The training needs at least the sum."
            )
        if self.cause == "too large" and self.is_large:
            sentences.append(
                f"A tensor of {fmt_gib(self.requested_gib)} is often the logits of a micro batch "
                "(4 bytes for each token and word of the vocabulary), which activation "
                "checkpointing does not make smaller."
            )
        if self.cause == "too large":
            sentences.append(
                "The message does not say which setting takes the memory. These commands do, and "
                f"name the changes that suffice: {_COMMANDS}."
            )
        if self.cause == "fragmentation":
            sentences.append(f"If this is not enough: {_LESS}.")
        return tuple(sentences)

    def _headline(self) -> str:
        size = "" if self.requested_gib is None else f" for {fmt_gib(self.requested_gib)} more"
        if self.cause == "host":
            return f"The host's memory, not the GPU's, has no room{size}"
        gpu = "GPU" if self.capacity_gib is None else f"GPU of {fmt_gib(self.capacity_gib)}"
        if self.cause == "other programs":
            return (
                f"Other programs or libraries hold {fmt_gib(self.outside_gib)} of the {gpu}; "
                f"without them, there is room{size}"
            )
        if self.cause == "fragmentation":
            return (
                f"The GPU's memory is fragmented: torch holds {fmt_gib(self.free_blocks_gib)} in "
                f"free blocks{self._also_free()}, but no block has room{size}"
            )
        return f"The {gpu} has no room{size}"

    def _also_free(self) -> str:
        return f", and {fmt_gib(self.free_gib)} is free" if self.free_gib else ""


def read_message(text: str) -> OomMessage | None:
    """Return the first out-of-memory error in a text, or None if the text has none."""
    found = _IS_OOM.search(text)
    if found is None:
        return None

    # A log may have the messages of several GPUs, and a terminal may have broken their lines.
    first, *rest = re.split(r"(?i)(?=tried to allocate)", " ".join(text[found.start() :].split()))
    words = first + (rest[0] if rest else "")
    capacity = size_gib(rf"total capac?i?ty of {SIZE}", words)
    if capacity is None:
        capacity = size_gib(rf"{SIZE} total capacity", words)
    free = size_gib(rf"{SIZE} (?:is )?free", words)
    allocated = size_gib(rf"{SIZE} (?:is|already) allocated", words)
    free_blocks = size_gib(rf"{SIZE} is reserved by PyTorch but unallocated", words)
    reserved = size_gib(rf"{SIZE} reserved in total by PyTorch", words)
    if free_blocks is None and reserved is not None and allocated is not None:
        free_blocks = reserved - allocated
    own = size_gib(rf"this process has {SIZE} memory in use", words)
    if own is None and allocated is not None:
        own = allocated + (free_blocks or 0.0)
    outside = None
    if capacity is not None and free is not None and own is not None:
        outside = max(0.0, capacity - free - own)

    return OomMessage(
        on_host=_ON_HOST.match(words) is not None,
        on_amd="HIP " in words,
        capacity_gib=capacity,
        requested_gib=requested_gib(words),
        allocated_gib=allocated,
        free_blocks_gib=free_blocks,
        free_gib=None if " allowed" in words else free,  # the limit of the process
        outside_gib=outside,
    )

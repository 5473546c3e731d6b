"""The detailed profile of a micro batch: kernels by class, by part of the model, and by stage.

This module runs in the worker's process. A profiler range around each module's forward pass names
the part of the model, such as the MLPs, that is running. A backward operator has the same sequence
number as its forward operator, and so belongs to the same part of the model. On a GPU, kernels are
timed. On a CPU, operators are timed, without the operators that they call. The profiler slows the
host, so the profile contains no host times.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from autotune.core.micro_profile import (
    KernelClass,
    KernelTotal,
    MicroBatchProfile,
    Part,
    ProfiledWork,
    Stage,
)
from autotune.probe.kernels import class_of, fused_operators
from autotune.probe.meters import Meter

# A range's name is this prefix followed by a part of the model. The prefix alone means that the
# part is unknown.
PREFIX = "autotune: "
IN_BACKWARD = "autograd::engine::evaluate_function: "
ADDS_GRADIENT = "AccumulateGrad"
# Names of calls to the CUDA runtime. The profiler gives these calls numbers of their own, so a call
# and an operator may have the same number.
RUNTIME = re.compile(r"(cuda|cu|hip)[A-Z]")
NUM_LONGEST = 15
LONGEST_NAME = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event that the profiler recorded, with times in seconds.

    `ident` is an operator's own number. A kernel has `linked`, the number of the operator that
    issued the kernel. `sequence` is the number of an autograd node, or -1. A forward operator
    creates the node. The backward operator that evaluates the node has a `forward_thread`, the
    thread of the forward operator. `is_range` marks a range of the profiler, which is not an
    operator.
    """

    name: str
    start_s: float
    end_s: float
    thread: int = 0
    on_device: bool = False
    is_range: bool = False
    ident: int = 0
    linked: int = 0
    sequence: int = -1
    forward_thread: int = 0

    @property
    def seconds(self) -> float:
        """The duration of the event."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The part of the model that an operator works for, and the stage, such as BACKWARD."""

    part: Part | None
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWork:
    """A GPU's kernel, or a CPU's operator without the operators that it calls, with its Place."""

    event: Event
    place: Place
    seconds: float

    @property
    def kind(self) -> KernelClass:
        """The class of the work. In the optimizer step, all computation has the class OPTIMIZER."""
        kind = class_of(self.event.name)
        if self.place.stage is Stage.OPTIMIZER and kind not in (
            KernelClass.COPIES,
            KernelClass.COLLECTIVES,
        ):
            return KernelClass.OPTIMIZER
        return kind

    @property
    def part(self) -> Part | None:
        """The part of the model, or None if it is unknown.

        In compiled layers, only attention kernels reveal their part.
        """
        hidden = self.place.part is None and self.kind is KernelClass.ATTENTION
        return Part.ATTENTION if hidden else self.place.part


# --- the part of each module


def parts_of(
    base: nn.Module, decoder: nn.Module, layers: list[nn.Module]
) -> dict[nn.Module, Part | None]:
    """Assign modules to parts of the model; a module that is left out has its parent's part.

    Layers that are compiled as a whole have the part None (unknown), because ranges inside them
    would be compiled too.
    """
    compiled = any(layer._compiled_call_impl is not None for layer in layers)
    found: dict[nn.Module, Part | None] = {decoder: None if compiled else Part.OTHER}
    inside = {module for layer in layers for module in layer.modules()}
    for module in decoder.modules():
        if module not in inside and _is_norm(module):
            found[module] = Part.NORMS

    # If the decoder is only a part of the base model, image towers and projectors are its siblings.
    if decoder is not base.base_model:
        found |= dict.fromkeys(set(base.base_model.children()) - {decoder}, Part.OTHER)
    found[base.get_input_embeddings()] = Part.EMBEDDING

    for layer in layers if not compiled else ():
        found[layer] = Part.NORMS
        for name, child in layer.named_children():
            is_attention = "attn" in name or "attention" in name
            has_matrices = any(parameter.dim() > 1 for parameter in child.parameters())
            part = Part.NORMS
            if has_matrices:
                part = Part.ATTENTION if is_attention else Part.MLP
            _mark(child, part, found)
    return found


def _mark(module: nn.Module, part: Part, found: dict[nn.Module, Part | None]) -> None:
    found[module] = part
    if isinstance(module, LoraLayer):
        # Only the adapters get the part ADAPTERS; the matrix that they adapt keeps `part`.
        found[module] = Part.ADAPTERS
        _mark(module.base_layer, part, found)
        return

    children = list(module.children())
    has_matrix = any(weight.dim() > 1 for weight in module.parameters())
    if not children and _is_norm(module):
        found[module] = Part.NORMS
    elif not children and part is Part.ATTENTION and has_matrix:
        found[module] = Part.PROJECTIONS
    for child in children:
        _mark(child, part, found)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


@contextmanager
def ranges(parts: dict[nn.Module, Part | None]) -> Iterator[None]:
    """Put a profiler range around the forward pass of each of these modules."""
    opened: list[Any] = []

    def begin(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            opened.append(record_function(name))
            opened[-1].__enter__()

        return hook

    def end(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    handles = []
    try:
        for module, part in parts.items():
            handles.append(
                module.register_forward_pre_hook(begin(PREFIX + (part or "")), prepend=True)
            )
            # Checkpointing ends a recomputation by an exception once it has the needed tensors.
            # `always_call` makes `end` run after this exception, too.
            handles.append(module.register_forward_hook(end, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- the profile


def record_events(
    micro_batch: Callable[[], object],
    optimizer_step: Callable[[], object],
    meter: Meter,
    trace: str,
) -> tuple[list[Event], float]:
    """Profile a micro batch and an optimizer step, after a micro batch that is not recorded.

    Returns the events of the profiled micro batch and optimizer step, and the seconds of this micro
    batch. Writes a Chrome trace to `trace`.
    """
    activities = [ProfilerActivity.CPU]
    if meter.torch_device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    events: list[Event] = []

    def keep(profiled: Any) -> None:
        profiled.export_chrome_trace(trace)
        events.extend(map(_event, profiled.profiler.kineto_results.events()))

    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=keep,
    ) as profiling:
        micro_batch()
        meter.synchronize()
        profiling.step()

        begin = meter.mark()
        micro_batch()
        end = meter.mark()
        with record_function(PREFIX + Part.OPTIMIZER):
            optimizer_step()
        meter.synchronize()
        profiling.step()
    return events, meter.seconds(begin, end)


def _event(event: Any) -> Event:
    """Convert an event of torch's profiler (Kineto) to an Event."""
    return Event(
        name=event.name(),
        start_s=event.start_ns() / 1e9,
        end_s=(event.start_ns() + event.duration_ns()) / 1e9,
        thread=event.start_thread_id(),
        on_device=event.device_type() != torch.autograd.DeviceType.CPU,
        is_range=event.is_user_annotation(),
        ident=event.correlation_id(),
        linked=event.linked_correlation_id(),
        sequence=event.sequence_nr(),
        forward_thread=event.fwd_thread_id(),
    )


@dataclass(slots=True)
class _OpenEvent:
    """A running operator or range on the host, and the seconds of the operators inside it."""

    event: Event
    place: Place
    inner_s: float = 0.0


def host_places(events: Iterable[Event], unknown: Part | None, trained: Part) -> list[PlacedWork]:
    """The host's operators and ranges in order, each with its Place and its seconds.

    A backward operator whose forward operator is unknown gets `unknown` as its part of the model.
    An operator that adds up the gradients of weights gets `trained`.
    """
    found: list[_OpenEvent] = []
    node_parts: dict[tuple[int, int], Part | None] = {}  # the key is a thread and a sequence number
    stacks: dict[int, list[_OpenEvent]] = defaultdict(list)
    start = Place(part=Part.HEAD, stage=Stage.FORWARD)
    host = (one for one in events if not (one.on_device or one.linked or RUNTIME.match(one.name)))
    for event in sorted(host, key=lambda event: (event.start_s, -event.end_s)):
        # The stack of a thread holds the events that are still running when this event starts.
        stack = stacks[event.thread]
        while stack and stack[-1].event.end_s <= event.start_s:
            stack.pop()
        if stack:
            stack[-1].inner_s += event.seconds

        place = _place(event, stack[-1].place if stack else start, node_parts, unknown, trained)
        if event.sequence >= 0 and place.stage is not Stage.BACKWARD:
            # If several operators have the same sequence number, the last one creates the autograd
            # node.
            node_parts[event.thread, event.sequence] = place.part
        stack.append(_OpenEvent(event, place))
        found.append(stack[-1])

    return [
        PlacedWork(
            event=one.event, place=one.place, seconds=max(one.event.seconds - one.inner_s, 0.0)
        )
        for one in found
    ]


def _place(
    event: Event,
    around: Place,
    node_parts: dict[tuple[int, int], Part | None],
    unknown: Part | None,
    trained: Part,
) -> Place:
    if event.is_range and event.name.startswith(PREFIX):
        part = Part(name) if (name := event.name.removeprefix(PREFIX)) else None
        if part is Part.OPTIMIZER:
            return Place(part=part, stage=Stage.OPTIMIZER)
        again = around.stage in (Stage.BACKWARD, Stage.RECOMPUTED)
        return Place(part=part, stage=Stage.RECOMPUTED if again else around.stage)

    if not event.name.startswith(IN_BACKWARD):
        return around
    if event.name.endswith(ADDS_GRADIENT):
        return Place(part=trained, stage=Stage.BACKWARD)
    part = node_parts.get((event.forward_thread, event.sequence), unknown)
    return Place(part=part, stage=Stage.BACKWARD)


def placed_work(events: list[Event], unknown: Part | None, trained: Part) -> list[PlacedWork]:
    """The device's work in order: a GPU's kernels, or a CPU's operators if there are no kernels."""
    on_host = host_places(events, unknown, trained)
    # The profiler lists ranges a second time among a GPU's kernels, under the same names.
    ranges = {one.name for one in events if one.is_range}
    kernels = [
        one for one in events if one.on_device and not one.is_range and one.name not in ranges
    ]
    if not kernels:
        return [one for one in on_host if not one.event.is_range]

    by_number = {one.event.ident: one.place for one in on_host}
    placed: list[PlacedWork] = []
    stage = Stage.FORWARD
    for kernel in sorted(kernels, key=lambda one: one.start_s):
        # If the operator that issued a kernel is unknown, the kernel belongs to the stage of the
        # previous kernel.
        place = by_number.get(kernel.linked) if kernel.linked else None
        place = place or Place(part=unknown, stage=stage)
        placed.append(PlacedWork(event=kernel, place=place, seconds=kernel.seconds))
        stage = place.stage
    return placed


def sum_work(placed: Iterable[PlacedWork]) -> tuple[ProfiledWork, ...]:
    """The total time and number of kernels by part, stage and class, the longest time first."""
    groups: dict[tuple[Part | None, Stage, KernelClass], list[float]] = defaultdict(list)
    for one in placed:
        groups[one.part, one.place.stage, one.kind].append(one.seconds)
    rows = (
        ProfiledWork(part=part, stage=stage, kind=kind, seconds=sum(seconds), count=len(seconds))
        for (part, stage, kind), seconds in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def longest_kernels(placed: Iterable[PlacedWork]) -> tuple[KernelTotal, ...]:
    """The kernel names with the longest total time."""
    groups: dict[tuple[str, KernelClass], list[float]] = defaultdict(list)
    for one in placed:
        groups[one.event.name, one.kind].append(one.seconds)
    rows = sorted(groups.items(), key=lambda row: -sum(row[1]))[:NUM_LONGEST]

    return tuple(
        KernelTotal(
            name=name[:LONGEST_NAME],
            kind=kind,
            seconds=sum(each),
            count=len(each),
            fuses=fused_operators(name),
        )
        for (name, kind), each in rows
    )


def busy_s(placed: list[PlacedWork], *, on_gpu: bool) -> float:
    """The device's busy seconds.

    Time is counted once, even if several kernels run at the same time.
    """
    if not on_gpu:
        return sum(one.seconds for one in placed)
    total = 0.0
    until = 0.0
    for one in sorted((one.event for one in placed), key=lambda event: event.start_s):
        total += max(one.end_s - max(one.start_s, until), 0.0)
        until = max(until, one.end_s)
    return total


def profile_of(
    events: list[Event],
    *,
    on_gpu: bool,
    compiled: bool,
    trained: Part,
    rows: int,
    length: int,
    micro_s: float,
    profiled_s: float,
    loader_rows_per_s: float | None,
) -> MicroBatchProfile | None:
    """The profile of a micro batch from its events, or None if a GPU's driver hides its kernels."""
    placed = placed_work(events, None if compiled else Part.OTHER, trained)
    if on_gpu and not any(one.event.on_device for one in placed):
        return None
    micro = [one for one in placed if one.place.stage is not Stage.OPTIMIZER]

    return MicroBatchProfile(
        on_gpu=on_gpu,
        rows=rows,
        length=length,
        micro_s=micro_s,
        profiled_s=profiled_s,
        busy_s=busy_s(micro, on_gpu=on_gpu),
        num_kernels=len(micro),
        work=sum_work(placed),
        longest=longest_kernels(placed),
        loader_rows_per_s=loader_rows_per_s,
    )

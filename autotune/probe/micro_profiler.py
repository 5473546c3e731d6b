"""The detailed profile of a micro batch, in the worker's process: kernels by class, part of the model and stage.

Ranges around the modules say which part of the model runs, and autograd's sequence numbers which forward operator a
backward one belongs to. Times are those of the device's kernels; on a CPU, of operators without those they call.
The host is slower while it is profiled, so that nothing here says how long it takes.
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

PREFIX = "autotune: "  # of the names of ranges; without more it is a range whose part is not known
IN_BACKWARD, ADDS_GRADIENT = "autograd::engine::evaluate_function: ", "AccumulateGrad"
RUNTIME = re.compile(
    r"(cuda|cu|hip)[A-Z]"
)  # calls of the driver, whose numbers are not those of operators
NUM_LONGEST = 15
LONGEST_NAME = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of the profiler, in seconds. `ident` is that of an operator; `linked` that of a kernel's operator.

    `sequence` is the number of the autograd node that a forward operator makes, or that the backward pass, for an
    operator of `forward_thread`, evaluates; -1 for others. A range is no operator.
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
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of the model an operator works for, and in which stage."""

    part: Part | None
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A kernel, or an operator on a CPU, with its place and the seconds that are its own."""

    event: Event
    place: Place
    seconds: float

    @property
    def kind(self) -> KernelClass:
        """What it does. Whatever computes the optimizer step is the optimizer's."""
        kind = class_of(self.event.name)
        if self.place.stage is Stage.OPTIMIZER and kind not in (
            KernelClass.COPIES,
            KernelClass.COLLECTIVES,
        ):
            return KernelClass.OPTIMIZER
        return kind

    @property
    def part(self) -> Part | None:
        """The part of the model. In compiled layers only the kernels of attention have names that tell it."""
        hidden = self.place.part is None and self.kind is KernelClass.ATTENTION
        return Part.ATTENTION if hidden else self.place.part


# --- which module is which part


def parts_of(
    base: nn.Module, decoder: nn.Module, layers: list[nn.Module]
) -> dict[nn.Module, Part | None]:
    """The part that each module's forward pass is, as far as it is not that of the module around it.

    Layers that are compiled as a whole have a single unknown part: ranges inside them would be compiled too.
    """
    compiled = any(layer._compiled_call_impl is not None for layer in layers)
    found: dict[nn.Module, Part | None] = {decoder: None if compiled else Part.OTHER}
    inside = {module for layer in layers for module in layer.modules()}
    for module in decoder.modules():
        if module not in inside and _is_norm(module):
            found[module] = Part.NORMS
    if decoder is not base.base_model:  # towers and projectors of images stand beside it
        found |= dict.fromkeys(set(base.base_model.children()) - {decoder}, Part.OTHER)
    found[base.get_input_embeddings()] = Part.EMBEDDING
    for layer in layers if not compiled else ():
        found[layer] = Part.NORMS
        for name, child in layer.named_children():
            is_attention = "attn" in name or "attention" in name
            has_matrices = any(parameter.dim() > 1 for parameter in child.parameters())
            _mark(
                child,
                (Part.ATTENTION if is_attention else Part.MLP) if has_matrices else Part.NORMS,
                found,
            )
    return found


def _mark(module: nn.Module, part: Part, found: dict[nn.Module, Part | None]) -> None:
    found[module] = part
    if isinstance(module, LoraLayer):
        found[module] = Part.ADAPTERS  # but for the matrix that it is an adapter of
        _mark(module.base_layer, part, found)
        return
    children = list(module.children())
    if not children and _is_norm(module):
        found[module] = Part.NORMS
    elif (
        not children
        and part is Part.ATTENTION
        and any(weight.dim() > 1 for weight in module.parameters())
    ):
        found[module] = Part.PROJECTIONS
    for child in children:
        _mark(child, part, found)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


@contextmanager
def ranges(parts: dict[nn.Module, Part | None]) -> Iterator[None]:
    """Put a range of the profiler around the forward pass of each of these modules."""
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
            # Checkpointing ends what it computes again by an exception, once it has what it needs.
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
    """Profile a micro batch and an optimizer step, after another micro batch that is not recorded.

    Returns the events and the seconds that the micro batch took. Writes a Chrome trace to the file `trace`.
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
    """One of Kineto's."""
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
class _Opened:
    """An operator or range of the host, with the seconds of those that it called."""

    event: Event
    place: Place
    inner_s: float = 0.0


def host_places(events: Iterable[Event], unknown: Part | None, trained: Part) -> list[Placed]:
    """The operators and ranges of the host with their places, in order, without the seconds of those they called.

    `unknown` is the part of backward operators whose forward operator is not known; gradients are added to those of
    `trained`.
    """
    found: list[_Opened] = []
    of_nodes: dict[tuple[int, int], Part | None] = {}  # by thread and sequence number
    stacks: dict[int, list[_Opened]] = defaultdict(list)
    start = Place(part=Part.HEAD, stage=Stage.FORWARD)
    host = (one for one in events if not (one.on_device or one.linked or RUNTIME.match(one.name)))
    for event in sorted(host, key=lambda event: (event.start_s, -event.end_s)):
        stack = stacks[event.thread]
        while stack and stack[-1].event.end_s <= event.start_s:
            stack.pop()
        if stack:
            stack[-1].inner_s += event.seconds
        place = _place(event, stack[-1].place if stack else start, of_nodes, unknown, trained)
        if event.sequence >= 0 and place.stage is not Stage.BACKWARD:
            of_nodes[event.thread, event.sequence] = (
                place.part
            )  # the last with a number makes the node
        stack.append(_Opened(event, place))
        found.append(stack[-1])
    return [
        Placed(event=one.event, place=one.place, seconds=max(one.event.seconds - one.inner_s, 0.0))
        for one in found
    ]


def _place(
    event: Event,
    around: Place,
    of_nodes: dict[tuple[int, int], Part | None],
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
    return Place(
        part=of_nodes.get((event.forward_thread, event.sequence), unknown), stage=Stage.BACKWARD
    )


def placed_work(events: list[Event], unknown: Part | None, trained: Part) -> list[Placed]:
    """What the device did, in order: the kernels of a GPU if there are any, else the operators of a CPU."""
    on_host = host_places(events, unknown, trained)
    ranges = {one.name for one in events if one.is_range}  # which a GPU's timeline repeats
    kernels = [
        one for one in events if one.on_device and not one.is_range and one.name not in ranges
    ]
    if not kernels:
        return [one for one in on_host if not one.event.is_range]
    by_number = {one.event.ident: one.place for one in on_host}
    placed, stage = [], Stage.FORWARD
    for kernel in sorted(kernels, key=lambda one: one.start_s):
        # A kernel that no operator issued belongs to the stage of the one before it.
        place = (by_number.get(kernel.linked) if kernel.linked else None) or Place(
            part=unknown, stage=stage
        )
        placed.append(Placed(event=kernel, place=place, seconds=kernel.seconds))
        stage = place.stage
    return placed


def summed(placed: Iterable[Placed]) -> tuple[ProfiledWork, ...]:
    """The work by part, stage and class, the longest first."""
    groups: dict[tuple[Part | None, Stage, KernelClass], list[float]] = defaultdict(list)
    for one in placed:
        groups[one.part, one.place.stage, one.kind].append(one.seconds)
    rows = (
        ProfiledWork(part=part, stage=stage, kind=kind, seconds=sum(seconds), count=len(seconds))
        for (part, stage, kind), seconds in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def longest(placed: Iterable[Placed]) -> tuple[KernelTotal, ...]:
    """The names that took longest in all."""
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


def busy_s(placed: list[Placed], *, on_gpu: bool) -> float:
    """Seconds in which the device worked: a moment in which two kernels of a GPU ran counts once."""
    if not on_gpu:
        return sum(one.seconds for one in placed)
    total, until = 0.0, 0.0
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
    """The events of a micro batch in sums; None where a GPU's driver does not show its kernels."""
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
        work=summed(placed),
        longest=longest(placed),
        loader_rows_per_s=loader_rows_per_s,
    )

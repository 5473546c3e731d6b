"""A plan: what a card will hold and how fast it will train, by formula, before anything is measured.

Everything here is an estimate and says so. A speed is that of the reference card (`pace`) carried to the target
(`carry`), and tightened by whatever somebody measured there with the same method.
"""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autotune.catalog import DeviceSpec, resolve_device, resolve_model
from autotune.catalog._data import load_data
from autotune.core.errors import UsageError
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.planning.observations import Observation
from autotune.prediction.memory_formula import CONTEXT_GIB, ERROR, MemoryBreakdown, Sizes, footprint
from autotune.prediction.step_time import REFERENCE, pace
from autotune.prediction.transfer import BETWEEN, WITHIN, SpeedTransfer, carry, interval, log_ratio
from autotune.problem.performance import Performance
from autotune.problem.run_cost import CostProjection, project
from autotune.problem.search_space import SearchSpace
from autotune.problem.target import device_budget
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.ranking import Scored, choose

MOST = 10_000  # configurations that are looked at: in about two seconds
MOST_STEP = 300  # to the next of them: beyond, walking there takes longer than looking
BELIEVED = 6.0  # standard deviations between what somebody measured on a card and what is expected of it
FITS, TIGHT, OOM = "fits", "tight", "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One configuration on one card, as the formulas see it.

    `fits` is whether it does beyond the error of the formula, does not, or is too close to tell. `interval` holds 80 %
    of the cases of `tokens_per_s`, which counts useful tokens.
    """

    config: TrainConfig
    footprint: MemoryBreakdown
    limit_gib: float
    fits: str
    tokens_per_s: float | None = None
    interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    cost: CostProjection | None = None
    carried: SpeedTransfer | None = None
    evidence: Evidence = Evidence.ESTIMATED

    @property
    def margin(self) -> float:
        """Signed: need / limit - 1."""
        return self.footprint.peak_reserved_gib / self.limit_gib - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is planned for one model on one card. `best` is None where nothing fits, `baseline` what guides give."""

    task: Task
    limit_gib: float
    best: Planned | None
    baseline: Planned
    reason: str
    looked_at: int
    of: int
    seen: tuple[Observation, ...] = ()  # what was measured on this card, and tightened the speed


def limit_of(device: DeviceSpec, headroom: float, memory_gib: float | None = None) -> float:
    """GiB that tensors may take on the card: its memory less headroom and what a CUDA context takes.

    Raises UsageError for a card whose memory is not known.
    """
    budget = device_budget(device, reserve_fraction=headroom, asked_gib=memory_gib)
    return max(budget.limit_gib(taken_gib=CONTEXT_GIB), 0.01)


def fit(need_gib: float, limit_gib: float, error: float) -> str:
    """`FITS` or `OOM`; `TIGHT` where what is needed, and may be so much more, is too close to tell."""
    return OOM if need_gib > limit_gib else TIGHT if need_gib * (1 + error) > limit_gib else FITS


def planned(task: Task, config: TrainConfig, limit_gib: float, seen: Sequence[Observation] = ()) -> Planned | None:
    """One configuration; None where the formulas do not know the model or the way it computes."""
    shape = task.workload.run_shape(config)
    need = footprint(task.model, config, shape.probe_micro_steps)
    if need is None:
        return None
    told = Planned(
        config=config, footprint=need, limit_gib=limit_gib, fits=fit(need.peak_reserved_gib, limit_gib, ERROR)
    )
    took = pace(task.model, config)
    if took is None:
        return told
    precision = "fp8" if config.quantization == "fp8" else "bf16"
    known = ratios(seen, task.device, config.method, config.quantization)
    carried = carry(resolve_device(REFERENCE), task.device, known, precision=precision)
    if carried is None:
        return told
    step = shape.step_time_s(took.micro_s, took.rest_s) / carried.ratio
    error = math.hypot(took.error, carried.error)
    low, high = interval(1.0, error)
    speed = Performance.of_steps(shape, step, spread=(low - 1, high - 1))
    cost = project(task.workload, config, speed, task.price, task.device.tdp_w)
    return replace(
        told,
        tokens_per_s=speed.tokens_per_second,
        interval=interval(speed.tokens_per_second, error),
        samples_per_s=speed.samples_per_second,
        cost=replace(cost, evidence=Evidence.ESTIMATED),
        carried=carried,
    )


@functools.cache
def published() -> tuple[Observation, ...]:
    """What comes with the package: measurements that others printed."""
    rows = load_data("sightings")
    return tuple(
        Observation(
            **{"step_time_s": None, "peak_reserved_gib": None, "model_digest": None}
            | row
            | {"config": TrainConfig(**row["config"])}
        )
        for row in rows
    )


def ratios(seen: Sequence[Observation], target: DeviceSpec, method: str, quantization: str) -> list[float]:
    """Speed on `target` over the reference card's by formula, of what was measured there with this method and base."""
    found = []
    for one in seen:
        same = (one.config.method, one.config.quantization) == (method, quantization)
        whole = one.evidence is Evidence.MEASURED and one.trainer == "transformers"
        if one.device != target.name or one.model is None or not same or not whole:
            continue
        ratio, expected = _over_reference(one), log_ratio(resolve_device(REFERENCE), target)
        # What is further off than any two cards were is a mistake, or somebody's joke.
        if ratio and expected is not None and abs(math.log(ratio) - expected) <= BELIEVED * math.hypot(BETWEEN, WITHIN):
            found.append(ratio)
    return found


@functools.cache
def _over_reference(one: Observation) -> float | None:
    took = pace(resolve_model(one.model or ""), one.config)
    if took is None:
        return None
    step = one.accumulation * took.micro_s + took.rest_s
    return one.tokens_per_s * step / (one.accumulation * one.config.tokens)


def tightened(task: Task, seen: Sequence[Observation]) -> Task:
    """The subject, its projection drawn to what was measured on the device, where another card stands in for it."""
    if task.measured_on is None:
        return task
    drawn = drawn_to(task.measured_on, task.device, task.baselines()[0], seen)
    return replace(task, carried=drawn) if drawn and drawn.basis else task


def drawn_to(
    source: DeviceSpec, target: DeviceSpec, config: TrainConfig, seen: Sequence[Observation]
) -> SpeedTransfer | None:
    """From card to card, drawn to what was measured on the target with the configuration's method and base."""
    precision = "fp8" if config.quantization == "fp8" else "bf16"
    known, to_source = (
        ratios(seen, target, config.method, config.quantization),
        carry(resolve_device(REFERENCE), source),
    )
    if to_source is None:
        return None
    return carry(source, target, [ratio / to_source.ratio for ratio in known], precision=precision)


def make_plan(
    task: Task, *, headroom: float = 0.05, memory_gib: float | None = None, seen: Sequence[Observation] = ()
) -> Plan:
    """The best configuration of the subject's space by the formulas, under the rule that chooses a winner.

    Raises UsageError for a model or a card that they know nothing of.
    """
    limit = limit_of(task.device, headroom, memory_gib)
    baseline = next(
        (one for config in task.baselines() if (one := planned(task, config, limit, seen)) and one.fits == FITS),
        planned(task, task.baselines()[0], limit, seen),
    )
    if baseline is None:
        known = Sizes.of(task.model) is not None
        what = "int8 bases, DoRA and offloaded checkpoints" if known else f"{task.model.config['model_type']} models"
        raise UsageError(
            f"there is no formula for {what}",
            remedy="probe it on a GPU: `autotune run`, or with --shallow-only if the GPU is too small",
        )
    space = _told_apart(task.space, baseline.config)
    step = math.ceil(space.size() / MOST)  # equally far apart in a space that is too large to look at all of it
    chosen = islice(space.enumerate(), 0, None, step) if step <= MOST_STEP else space.sample(MOST)
    configs = dict.fromkeys(map(space.config, chosen))
    found = {config: one for config in configs if (one := planned(task, config, limit, seen)) is not None}
    fitting = [one for one in found.values() if one.fits == FITS and one.tokens_per_s]
    here = tuple(one for one in seen if one.device == task.device.name)
    plan = Plan(
        task=task,
        limit_gib=limit,
        best=None,
        baseline=baseline,
        reason="nothing fits beyond doubt",
        looked_at=len(configs),
        of=space.size(),
        seen=here,
    )
    if not fitting:
        return plan
    scored = [Scored(config=one.config, score=one.tokens_per_s or 0.0, free_fraction=-one.margin) for one in fitting]
    winner, reason = choose(scored, task.floors.slack)
    return replace(plan, best=found[winner.config], reason=reason)


def _told_apart(space: SearchSpace, like: TrainConfig) -> SearchSpace:
    """The space without what the formulas do not know, and with what makes no difference to them as in `like`."""
    for name in ("attention", "dora", "rslora", "loader_workers"):
        if (knob := space.knob(name)) and getattr(like, name) in knob.choices():
            space = space.pin(name, getattr(like, name))
    for name, value in (("quantization", "int8"), ("checkpointing", "offload")):
        if (knob := space.knob(name)) and knob.choices() != (value,):
            space, _ = space.narrow(name, functools.partial(operator.ne, value), "there is no formula for it")
    return space


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A micro batch of rows of this length: what it needs as it is, or with every layer recomputed."""

    micro_batch_size: int
    seq_len: int
    plain: Planned
    recomputed: Planned

    @property
    def shown(self) -> Planned:
        """Without recomputation where that fits."""
        return self.plain if self.plain.fits == FITS else self.recomputed


def what_fits(
    task: Task, base: TrainConfig, limit_gib: float, batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[Cell]:
    """Row by row of the table of lengths and micro batches, the rest as in `base`."""
    alone = replace(task, workload=Workload(global_batch=2 * math.lcm(*batches)))
    for length in lengths:
        for size in batches:
            config = replace(base, micro_batch_size=size, seq_len=length)
            pair = [
                planned(alone, replace(config, checkpointing=checkpointing), limit_gib)
                for checkpointing in ("none", "full")
            ]
            if pair[0] is not None and pair[1] is not None:
                yield Cell(micro_batch_size=size, seq_len=length, plain=pair[0], recomputed=pair[1])

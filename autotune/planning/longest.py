"""The longest row that fits a card, by method: predicted by counting two steps without a GPU, and tried on one.

Layers are computed in tiles of tokens, the loss in chunks, and the inputs of recomputed layers wait in the host's
memory. What a row takes is then a line in its length (docs/longest.md), of which the host holds a part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device
from autotune.core.errors import EnvironmentProblem, UsageError, did_you_mean
from autotune.core.knobs import KNOBS
from autotune.core.machine import host_memory_gib as host_memory_gib_here
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.probe_types import (
    DryCount,
    Evidence,
    MicroBatch,
    Outcome,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.planning.counted_memory import count, counted, no_count
from autotune.planning.device_estimate import device_limit_gib, planned_device
from autotune.prediction.estimate import memory_of
from autotune.prediction.memory_formula import CONTEXT_GIB, counted_breakdown
from autotune.prediction.step_time import counted_step_time
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.problem.target import Target, find_target
from autotune.report.values.longest import Attempt, LongestAnswer, LongestRow

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "optimizer": "adamw_8bit"},
    "lora": {},
    "qlora": {"quantization": "nf4", "double_quant": True},
}
LONG_ROWS: dict[str, Any] = {
    "micro_batch_size": 1,
    "checkpointing": "offload",
    "tiling": "tokens",
    "loss": "chunked",
    "padding": "longest",  # for which torch takes flash attention
}
COUNTED_AT = (
    (65_536, 131_072),
    (16_384, 32_768),
    (4_096, 8_192),
)  # tokens of two rows that tell the line
STEP = 1_024  # lengths are multiples of it
FIRST = 1_024  # tokens of the row that makes the optimizer's state
# The share of the probed steps that the long row has: so small that none is spent to warm up (`probe/schedule`).
LONG_SHARE = 0.04
LEAST_GAIN = 0.02  # a longer row is tried only if it is by so much longer
HEADROOM = 0.01  # of the card's memory
PATIENCE_S = 7200.0  # of one step
FEW_LAYERS = 2
HOST_SHARE = 0.8  # of the memory of a host that the inputs of layers may take
# The share of the peak that flash attention reaches on long rows, counting what a causal mask leaves: FlashAttention-2
# by its authors on an A100, and on Hopper, whose products it was not written for (the paper of FlashAttention-3).
ATTENTION_SHARE, ATTENTION_SHARE_HOPPER = 0.7, 0.35
# Knobs that have an option of their own here.
PINNED_APART = {
    "seq_len": "--most-tokens",
    "method": "--method",
    "quantization": "--method",
    "lora_rank": "--rank",
}
TIME_ERROR = 1.3  # a predicted time is taken to be within this factor: of the one that was measured it was 1.23
# What the allocator needs beyond a counted peak of few large tensors: on an H100 2.1 % of 39 GiB, and over 3.7 % under
# a cap of 24 GB, where nothing is left to begin a block anew (`benchmarks/longest.py`).
ALLOCATOR_SHARE = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """What is asked: a model, the card of the run, GiB that tensors may take there, and GiB of the host for inputs.

    `most_tokens` bounds the rows that are predicted and tried, `host_limit_gib` is None where the host is not known.
    """

    model: ModelSpec
    device: DeviceSpec
    limit_gib: float
    host_limit_gib: float | None = None
    most_tokens: int | None = None
    rank: int = 16
    knobs: dict[str, Any] = field(default_factory=dict)

    def config(self, method: str, tokens: int) -> TrainConfig:
        """The configuration of a method for rows of so many tokens. Raises ValueError for an impossible knob."""
        rank = {} if method == "full" else {"lora_rank": self.rank}
        return TrainConfig(
            **(LONG_ROWS | METHODS[method] | rank | self.knobs | {"seq_len": tokens})
        )

    def host_gib(self, config: TrainConfig) -> float:
        """GiB of pinned memory that the inputs of all layers take."""
        # What prepares a quantised base keeps its embedding and norms, and so what layers hand on, in 32 bits.
        element_bytes = 4 if config.base_dtype == "float32" or config.kbit_preparation else 2
        each = config.tokens * self.model.hidden_size * element_bytes
        return gib(self.model.num_layers * each) if config.offloads else 0.0

    def bounds(self, method: str) -> dict[str, int]:
        """The most tokens that the host and the user allow, by what limits."""
        found = {} if self.most_tokens is None else {"what was asked for": self.most_tokens}
        each = self.host_gib(self.config(method, STEP)) / STEP
        if self.host_limit_gib is not None and each:
            found["host memory"] = int(self.host_limit_gib / each)
        return found

    def count(self, config: TrainConfig) -> DryCount | None:
        """Count a step of one micro batch."""
        return counted(self.model, config, 1).count

    def need_gib(self, config: TrainConfig) -> float | None:
        """GiB that a step of one micro batch needs by the estimate; None if nothing covers the configuration."""
        memory = memory_of(self.model, config, 1, count=count)
        return None if memory is None else memory.peak_reserved_gib

    def predict(self, method: str) -> LongestRow:
        """The longest row by two counts, which a third one checks. Nothing is run on a GPU."""
        config = self.config(method, STEP)
        upper = min(self.bounds(method).values(), default=2**24)
        pairs = [pair for pair in COUNTED_AT if pair[0] <= upper] or COUNTED_AT[-1:]
        for pair in pairs:
            needs = [self._need(method, tokens) for tokens in pair]
            if None in needs:
                problem = no_count(self.model, self.config(method, pair[0]), 1)
                return LongestRow(method=method, config=config.as_dict(), problem=problem)
            known = dict(zip(pair, needs, strict=True))
            tokens, limited_by = self._at_limit(method, known)
            if tokens >= pair[0]:
                break
        else:
            if tokens < STEP:
                least = f"{needs[0]:.1f} GiB are needed for {pair[0]:,} tokens, and there are {self.limit_gib:.1f}"
                fewer = f"{limited_by} allows fewer than {STEP:,} tokens"
                problem = least if limited_by == "gpu memory" else fewer
                return LongestRow(
                    method=method, config=config.as_dict(), limited_by=limited_by, problem=problem
                )
        need = known[tokens] = self._need(method, tokens)
        if need > self.limit_gib:  # it is no single line
            tokens, limited_by = self._at_limit(method, known)
        return self._predicted(method, tokens, limited_by)

    def _need(self, method: str, tokens: int) -> Any:
        """GiB that a row needs at most, with what the allocator takes beyond that; None where it cannot be counted."""
        need_gib = self.need_gib(self.config(method, tokens))
        return None if need_gib is None else need_gib * (1 + ALLOCATOR_SHARE)

    def _at_limit(self, method: str, known: Mapping[int, float]) -> tuple[int, str]:
        """The tokens at which the line through the two known needs nearest to the limit meets it, and what limits."""
        low, high = sorted(
            sorted(known, key=lambda tokens: abs(known[tokens] - self.limit_gib))[:2]
        )
        slope = (known[high] - known[low]) / (high - low)
        found = {"gpu memory": int(low + (self.limit_gib - known[low]) / slope)} | self.bounds(
            method
        )
        limited_by = min(found, key=lambda name: found[name])
        return max(found[limited_by] // STEP * STEP, 0), limited_by

    def _predicted(self, method: str, tokens: int, limited_by: str) -> LongestRow:
        config = self.config(method, tokens)
        steps = self.count(config)
        assert steps is not None
        step_s = self.step_s(config, steps)
        return LongestRow(
            method=method,
            config=config.as_dict(),
            tokens=tokens,
            predicted_tokens=tokens,
            step_s=step_s,
            step_s_low=step_s and step_s / TIME_ERROR,
            step_s_high=step_s and step_s * TIME_ERROR,
            timed_on=self.device.name,
            gpu_gib=self.need_gib(config),
            host_gib=self.host_gib(config),
            limited_by=limited_by,
        )

    def step_s(self, config: TrainConfig, count: DryCount) -> float | None:
        """Seconds of a step with one long row: attention by its arithmetic below the diagonal, all else as counted.

        Copies to the host's memory run meanwhile. None where the card's rates are not known.
        """
        attention = sum(flops for name, flops in count.flops.items() if "attention" in name)
        others = {name: flops for name, flops in count.flops.items() if "attention" not in name}
        rest = counted_step_time(
            replace(config, checkpointing="full"), replace(count, flops=others)
        )
        transfer = speed_transfer(resolve_device(REFERENCE), self.device)
        if rest is None or transfer is None or self.device.bf16_tflops is None:
            return None
        is_hopper = float(self.device.compute_capability or 0) >= 9.0
        share = ATTENTION_SHARE_HOPPER if is_hopper else ATTENTION_SHARE
        on_card = rest.on(transfer)
        return (
            on_card.micro_s
            + on_card.rest_s
            + attention / 2 / (1e12 * share * self.device.bf16_tflops)
        )

    def request(
        self, config: TrainConfig, memory_gib: float, *, depth: int | None = None
    ) -> ProbeRequest:
        """A probe of one step with a short row, which makes the optimizer's state, and one with the long row."""
        shares = {FIRST: 1 - LONG_SHARE, config.seq_len: LONG_SHARE}
        return ProbeRequest(
            config=config,
            model=self.model.config,
            memory_gib=memory_gib,
            headroom=HEADROOM,
            micro_steps=1,
            depth=depth,
            micro_batches=tuple(
                MicroBatch(rows=((length,),) * config.micro_batch_size, length=length, share=share)
                for length, share in shares.items()
            ),
            min_timed_micros=1,
            max_timed_steps=1,
            min_timed_s=0.0,
            patience_s=PATIENCE_S,
        )


def tried(result: ProbeResult) -> Attempt:
    """What a probe of `Longest.request` found."""
    measured, oom = result.measurement, result.oom
    need = measured.peak_reserved_gib if measured else oom.need_gib if oom else None
    return Attempt(
        tokens=result.config.seq_len,
        depth=result.depth,
        outcome=result.outcome.value,
        need_gib=need,
        step_s=measured.kind_s[-1][1] if measured and measured.kind_s else None,
    )


def verify(
    asked: Longest,
    predicted: LongestRow,
    probe: Callable[[ProbeRequest], ProbeResult],
    memory_gib: float,
    *,
    timed_on: str,
    most: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> LongestRow:
    """The longest row that took a real step on the card, begun with the predicted one: at most `most` whole models.

    A few layers at the full length are tried first, whose need tells that of all layers (their other inputs wait in
    the host), so that the length of the first whole model is nearly right. `memory_gib` is the card's, or the cap.
    """
    method, tokens = predicted.method, predicted.tokens
    if tokens is None:
        return predicted
    attempts: list[Attempt] = []
    upper = min(asked.bounds(method).values(), default=2**24)

    def attempt(length: int, depth: int | None) -> Attempt:
        say(f"{method}: {length:,} tokens, {f'{depth} layers' if depth else 'all layers'}")
        attempts.append(
            tried(probe(asked.request(asked.config(method, length), memory_gib, depth=depth)))
        )
        return attempts[-1]

    config = asked.config(method, tokens)
    count, few = asked.count(config), counted(asked.model, config, 1, depth=FEW_LAYERS).count
    assert count is not None  # it was predicted
    held = count.model_gib + count.adapters_gib + count.gradients_gib + count.optimizer_gib
    if few is not None and (first := attempt(tokens, FEW_LAYERS)).need_gib is not None:
        # What a few layers take beyond what was counted of them, all layers take too.
        beyond = first.need_gib - counted_breakdown(asked.model, config, few).peak_reserved_gib
        tokens = _scaled(tokens, (predicted.gpu_gib or 0.0) + beyond, asked.limit_gib, held, upper)
    best: Attempt | None = None
    failed = upper + STEP
    for _ in range(most):
        one = attempt(tokens, None)
        if one.outcome == Outcome.OK.value:
            best = one
            longer = _scaled(
                tokens,
                one.need_gib or asked.limit_gib,
                asked.limit_gib,
                held,
                min(upper, failed - STEP),
            )
            if longer < tokens * (1 + LEAST_GAIN):
                break
            tokens = longer
        elif one.outcome == Outcome.OOM.value and best is None:
            failed = tokens
            tokens = int(tokens * 0.97) // STEP * STEP
        else:
            break
    return _verified(asked, replace(predicted, timed_on=timed_on), best, tuple(attempts))


def _scaled(tokens: int, need_gib: float, limit_gib: float, held_gib: float, upper: int) -> int:
    """The tokens that take the whole limit, where so many need `need_gib`, of which `held_gib` are there anyway."""
    factor = max(limit_gib - held_gib, 0.0) / max(need_gib - held_gib, 1e-3)
    return min(int(tokens * factor), upper) // STEP * STEP


def _verified(
    asked: Longest, predicted: LongestRow, best: Attempt | None, attempts: tuple[Attempt, ...]
) -> LongestRow:
    if best is None:
        last = attempts[-1]
        problem = f"no row was verified: {last.tokens:,} tokens ended with {last.outcome}"
        nothing = LongestRow(
            method=predicted.method, config=predicted.config, problem=problem, attempts=attempts
        )
        return replace(nothing, predicted_tokens=predicted.tokens)
    config = asked.config(predicted.method, best.tokens)
    bounds = asked.bounds(predicted.method)
    limited_by = next(
        (name for name, most in bounds.items() if best.tokens > most - STEP), "gpu memory"
    )
    return replace(
        predicted,
        config=config.as_dict(),
        tokens=best.tokens,
        evidence=Evidence.MEASURED,
        step_s=best.step_s,
        step_s_low=best.step_s,
        step_s_high=best.step_s,
        gpu_gib=best.need_gib,
        host_gib=asked.host_gib(config),
        limited_by=limited_by,
        attempts=attempts,
    )


def find_longest(
    model: ModelSpec,
    gpu: str,
    methods: Sequence[str],
    *,
    rank: int = 16,
    knobs: Mapping[str, Any] | None = None,
    memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    most_tokens: int | None = None,
    probe: bool = True,
    say: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Longest, list[LongestRow]]:
    """What was asked, and the longest row of each method: tried on the GPU of this machine where it can, with `probe`.

    Raises UsageError for an unknown method, knob or card, and what the prober raises.
    """
    target = _target_here(gpu) if probe else None
    device = target.device if target else planned_device(gpu)
    if host_memory_gib is None and target is not None:
        host_memory_gib = host_memory_gib_here()
    asked = Longest(
        model=model,
        device=device,
        limit_gib=device_limit_gib(device, HEADROOM, memory_gib),
        host_limit_gib=None if host_memory_gib is None else HOST_SHARE * host_memory_gib,
        most_tokens=most_tokens,
        rank=rank,
        knobs=dict(knobs or {}),
    )
    for name in PINNED_APART.keys() & asked.knobs.keys():
        raise UsageError(f"--set {name}: rows have their own", remedy=f"give {PINNED_APART[name]}")
    for method in methods:
        _require_possible(asked, method, say)
    rows = []
    for method in methods:
        say(f"{method}: counting without the GPU")
        rows.append(asked.predict(method))
    if target is None:
        return asked, rows

    # A prediction alone needs neither the prober nor its libraries.
    from autotune.core.scratch import scratch_directory
    from autotune.probe.supervisor import WorkerProber

    with (
        scratch_directory() as folder,
        WorkerProber("cuda", Path(folder), should_stop=should_stop) as prober,
    ):
        cap = target.memory_cap_gib(prober.memory_gib, asked_gib=memory_gib)
        asked = replace(
            asked,
            limit_gib=min(asked.limit_gib, memory_limit_gib(cap, HEADROOM, taken_gib=CONTEXT_GIB)),
        )
        timed_on = (target.measured_on or device).name

        def run(request: ProbeRequest) -> ProbeResult:
            return prober.probe(request, Path(folder, "longest.log"))

        return asked, [verify(asked, row, run, cap, timed_on=timed_on, say=say) for row in rows]


def _require_possible(asked: Longest, method: str, say: Callable[[str], None]) -> None:
    """Raises UsageError for an unknown method or an impossible knob, and says which knobs have no effect."""
    if method not in METHODS:
        raise UsageError(
            f"unknown method {method!r}{did_you_mean(method, METHODS)}", remedy=", ".join(METHODS)
        )
    try:
        config = asked.config(method, STEP)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"--set: {error}", remedy="docs/knobs.md lists the knobs and their values"
        ) from None
    if config.tiling != (LONG_ROWS | asked.knobs)["tiling"]:
        raise UsageError(
            f"--set: layers of {method} with these knobs are not computed in tiles of tokens",
            remedy="leave dropout, compilation and other kernels out, or give --set tiling=none",
        )
    for name, value in asked.knobs.items():
        if getattr(config, name) == KNOBS[name].default != value:
            say(f"warning: {method}: {name} has no effect with these knobs")


def _target_here(gpu: str) -> Target | None:
    """The target that the GPU of this machine can probe for; None where there is no such GPU."""
    try:
        target = find_target(gpu)
    except EnvironmentProblem:
        return None
    return target if target.card else None


def longest_answer(asked: Longest, rows: Sequence[LongestRow]) -> LongestAnswer:
    """The answer of `autotune longest`."""
    return LongestAnswer(
        model=asked.model.name,
        device=asked.device.name,
        limit_gib=asked.limit_gib,
        host_limit_gib=asked.host_limit_gib,
        positions=asked.model.max_seq_len,
        rows=tuple(rows),
    )

"""Finds the longest row (training sequence) that fits a card, for each training method.

Dry probes compute, without a GPU, the memory of training steps at two other lengths. A straight
line through these two points predicts the longest length. Real steps on a GPU then verify the
prediction. Layers are computed in tiles of tokens, the loss in chunks, and the inputs of recomputed
layers are offloaded to the host. The memory of a row is then linear in the row's length, and part
of it is on the host (docs/longest.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device
from autotune.catalog.own_devices import split_names
from autotune.core.errors import EnvironmentProblem, UsageError, did_you_mean
from autotune.core.files import document
from autotune.core.installed import is_installed
from autotune.core.knobs import KNOBS
from autotune.core.machine import host_memory_gib as host_memory_gib_here
from autotune.core.memory_budget import HEADROOM, memory_limit_gib
from autotune.core.notebook import ShownAsTable
from autotune.core.probe_types import (
    DryCount,
    Evidence,
    MicroBatch,
    ModelShape,
    Outcome,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, gib
from autotune.dry.prober import obstacle
from autotune.planning.counted_memory import dry_count, no_count, shape_of, stop_counting_if
from autotune.planning.device_estimate import device_limit_gib, planned_device
from autotune.prediction.estimate import memory_of
from autotune.prediction.long_rows import long_row_breakdown
from autotune.prediction.memory_formula import CONTEXT_GIB, MemoryBreakdown, counted_breakdown
from autotune.prediction.step_time import counted_step_time
from autotune.prediction.transfer import REFERENCE, flash_tflops, speed_transfer
from autotune.problem.constraints import attentions_without_sdpa
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
    "padding": "longest",  # this padding lets torch use flash attention
}
# Pairs of row lengths in tokens. A straight line through the memory at a pair's two lengths
# predicts the memory at other lengths.
COUNTED_AT = ((65_536, 131_072), (16_384, 32_768), (4_096, 8_192))
STEP = 1_024  # predicted lengths are multiples of this number of tokens
FIRST = 1_024  # tokens of the short first row, whose step creates the optimizer's state
# A probe's request states this share of micro batches with the long row. The share is small enough
# that the probe's warm-up contains no long row (`probe/schedule`).
LONG_SHARE = 0.04
LEAST_GAIN = 0.02  # try a longer row only if it has at least 2 % more tokens
PATIENCE_S = 7200.0  # the time limit of one step in a probe
FEW_LAYERS = 2
HOST_SHARE = 0.8  # the share of a host's memory that the inputs of layers may take
# Knobs that `--set` refuses, each with the option of `autotune longest` that sets the knob.
PINNED_APART = {
    "seq_len": "--most-tokens",
    "method": "--method",
    "quantization": "--method",
    "lora_rank": "--rank",
}
# The assumed error of a predicted time, as a factor. In the only measurement, predicted and
# measured time differed by a factor of 1.23.
TIME_ERROR = 1.3


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Longest(ShownAsTable):
    """A query for the longest row of a model on a card.

    `shape` has the properties of the model's layers, or is None if they are unknown. `limit_gib` is
    the card's memory for tensors, after the share `headroom` that stays free. `host_limit_gib` is
    the host's memory for layer inputs, or None if the host is unknown. `most_tokens` limits the
    length of predicted and tried rows.
    """

    model: ModelSpec
    device: DeviceSpec
    limit_gib: float
    headroom: float = HEADROOM
    shape: ModelShape | None = None
    host_limit_gib: float | None = None
    most_tokens: int | None = None
    rank: int = 16
    knobs: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return the model, the card and its memory."""
        limit = fmt_gib(self.limit_gib)
        return {"longest sequence": f"{self.model.name} on {self.device.label}", "memory": limit}

    def knobs_of(self, method: str) -> dict[str, Any]:
        """Return the knobs of a method's configurations that the user or this module sets."""
        knobs = LONG_ROWS | METHODS[method]
        if method != "full":
            knobs["lora_rank"] = self.rank
        if self.model.lacks("sdpa"):
            others = attentions_without_sdpa(self.model, self.device, has_flex=True)
            knobs["attention"] = others[-1]
        if self.shape is not None:
            knobs |= _knobs_of_shape(self.shape, method)
        return knobs | self.knobs

    def config(self, method: str, tokens: int) -> TrainConfig:
        """Return the configuration of a method for rows of `tokens` tokens.

        Raises ValueError for an impossible value of a knob.
        """
        return TrainConfig(**(self.knobs_of(method) | {"seq_len": tokens}))

    def host_gib(self, config: TrainConfig) -> float:
        """Return the GiB of pinned memory that the inputs of all layers take."""
        # PEFT's preparation of a quantised base casts the embedding and the norms to 32 bits, so
        # the hidden states between layers also have 32 bits.
        element_bytes = 4 if config.base_dtype == "float32" or config.kbit_preparation else 2
        layer_bytes = config.tokens * self.model.hidden_size * element_bytes
        return gib(self.model.num_layers * layer_bytes) if config.offloads else 0.0

    def bounds(self, method: str) -> dict[str, int]:
        """Return the largest row length in tokens that each limit allows, by the limit's name.

        The limits are the user's `most_tokens` and the host's memory.
        """
        limits = {} if self.most_tokens is None else {"what was asked for": self.most_tokens}
        gib_per_token = self.host_gib(self.config(method, STEP)) / STEP
        if self.host_limit_gib is not None and gib_per_token:
            limits["host memory"] = int(self.host_limit_gib / gib_per_token) // STEP * STEP
        return limits

    def count(self, config: TrainConfig) -> DryCount | None:
        """Compute the memory and the FLOPs of a step with one micro batch, by a dry probe."""
        return dry_count(self.model, config, 1).count

    def memory(self, config: TrainConfig) -> MemoryBreakdown | None:
        """Return the memory of a step with one micro batch, or None if it cannot be estimated.

        On a machine that cannot run dry probes, a formula predicts the memory.
        """
        memory = memory_of(self.model, config, 1, count=lambda *_: self.count(config))
        if memory is None and obstacle() is not None:
            memory = long_row_breakdown(self.model, config)
        if memory is None or not self.device.unified_memory:
            return memory
        # On a GPU that shares its host's memory, the offloaded inputs take the GPU's memory, too.
        return replace(memory, offloaded=self.host_gib(config))

    def predict(self, method: str, say: Callable[[str], None] = lambda text: None) -> LongestRow:
        """Predict the longest row without a GPU.

        Dry probes compute the memory at two other lengths, and a straight line through these points
        predicts the longest length. A third dry probe, at the predicted length, checks the
        prediction.
        """
        config = self.config(method, STEP)
        upper = min(self.bounds(method).values(), default=2**24)
        pairs = [pair for pair in COUNTED_AT if pair[0] <= upper] or COUNTED_AT[-1:]

        for pair in pairs:
            need_by_tokens: dict[int, float] = {}
            for tokens in pair:
                if (need := self._need(method, tokens, say)) is None:
                    return self._uncounted_row(method, tokens)
                need_by_tokens[tokens] = need

            # Pairs come in descending order. Take the first pair whose shorter row is not longer
            # than the predicted row.
            tokens, limited_by = self._longest_within_limits(method, need_by_tokens)
            if tokens >= pair[0]:
                break
        else:
            if tokens < STEP:
                if limited_by == "gpu memory":
                    problem = (
                        f"up to {need_by_tokens[pair[0]]:.1f} GiB are needed for {pair[0]:,} "
                        f"tokens, and the limit is {self.limit_gib:.1f}"
                    )
                else:
                    problem = f"{limited_by} allows fewer than {STEP:,} tokens"
                return LongestRow(
                    method=method, config=config.as_dict(), limited_by=limited_by, problem=problem
                )

        if (need := self._need(method, tokens, say)) is None:
            return self._uncounted_row(method, tokens)
        need_by_tokens[tokens] = need
        if need > self.limit_gib:  # the row needs more memory than the straight line predicted
            tokens, limited_by = self._longest_within_limits(method, need_by_tokens)

        return self._predicted(method, tokens, limited_by)

    def _uncounted_row(self, method: str, tokens: int) -> LongestRow:
        """Return a LongestRow without a length, which says why no dry probe can run a step."""
        problem = no_count(self.model, self.config(method, tokens), 1)
        config = self.config(method, STEP).as_dict()
        return LongestRow(method=method, config=config, problem=problem)

    def _need(self, method: str, tokens: int, say: Callable[[str], None]) -> float | None:
        """Return the most GiB that a row may need, or None if its memory is unknown."""
        if obstacle() is None:
            say(f"{method}: counting a sequence of {tokens:,} tokens without the GPU")
        memory = self.memory(self.config(method, tokens))
        return None if memory is None else memory.peak_reserved_gib * (1 + memory.error)

    def _longest_within_limits(
        self, method: str, need_by_tokens: Mapping[int, float]
    ) -> tuple[int, str]:
        """Return the longest row within all limits, and the limit that bounds it.

        `need_by_tokens` maps row lengths in tokens to the GiB that a row of this length needs. A
        straight line through the two points whose memory is nearest to the GPU's limit predicts the
        longest row that fits the GPU's memory.
        """
        low, high = sorted(
            sorted(need_by_tokens, key=lambda tokens: abs(need_by_tokens[tokens] - self.limit_gib))[
                :2
            ]
        )
        slope = (need_by_tokens[high] - need_by_tokens[low]) / (high - low)
        limits = {
            "gpu memory": int(low + (self.limit_gib - need_by_tokens[low]) / slope)
        } | self.bounds(method)
        limited_by = min(limits, key=lambda name: limits[name])
        if limited_by == "gpu memory":
            return max(limits[limited_by] // STEP * STEP, 0), limited_by
        return limits[limited_by], limited_by

    def _predicted(self, method: str, tokens: int, limited_by: str) -> LongestRow:
        config = self.config(method, tokens)
        count = self.count(config)
        if count is None and obstacle() is None:
            return self._uncounted_row(method, tokens)
        step_s = None if count is None else self.step_s(config, count)
        memory = self.memory(config)
        return LongestRow(
            method=method,
            config=config.as_dict(),
            tokens=tokens,
            predicted_tokens=tokens,
            step_s=step_s,
            step_s_low=step_s and step_s / TIME_ERROR,
            step_s_high=step_s and step_s * TIME_ERROR,
            timed_on=self.device.name,
            gpu_gib=None if memory is None else memory.peak_reserved_gib,
            host_gib=self.host_gib(config),
            limited_by=limited_by,
            problem=None
            if count is not None
            else f"predicted by a formula, without a time: {no_count(self.model, config, 1)}",
        )

    def step_s(self, config: TrainConfig, count: DryCount) -> float | None:
        """Return the seconds of a step with one long row, or None if the card's rates are unknown.

        The time of attention is computed from the FLOPs that the causal mask does not skip. The
        time of all other work is computed from its FLOPs and its memory traffic. Copies to the
        host's memory overlap with computation, so they add no time.
        """
        other_flops = {
            name: flops for name, flops in count.flops.items() if "attention" not in name
        }

        others_time = counted_step_time(
            replace(config, checkpointing="full"), replace(count, flops=other_flops)
        )
        transfer = speed_transfer(resolve_device(REFERENCE), self.device)
        attention_tflops = flash_tflops(self.device)
        if others_time is None or transfer is None or attention_tflops is None:
            return None

        on_card = others_time.convert(transfer)
        return on_card.micro_s + on_card.rest_s + count.attention_flops / (1e12 * attention_tflops)

    def request(
        self, config: TrainConfig, memory_gib: float, *, depth: int | None = None
    ) -> ProbeRequest:
        """Return a request to probe two steps: one with a short row and one with the long row.

        The step with the short row creates the optimizer's state.
        """
        shares = {FIRST: 1 - LONG_SHARE, config.seq_len: LONG_SHARE}
        return ProbeRequest(
            config=config,
            model=self.model.config,
            memory_gib=memory_gib,
            headroom=self.headroom,
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


def _knobs_of_shape(shape: ModelShape, method: str) -> dict[str, Any]:
    """Return the knobs for long rows that the form of a model's layers and of its head requires."""
    knobs: dict[str, Any] = {}
    if not shape.tileable:
        knobs["tiling"] = "none"
    if not shape.plain_head:
        knobs["loss"] = "full"
    if shape.experts and method != "full":
        knobs["lora_targets"] = "attention"  # adapters on experts take the memory of many tokens
    if shape.experts and method == "qlora":
        knobs["quantize_experts"] = True
    return knobs


def to_attempt(result: ProbeResult) -> Attempt:
    """Convert the result of a probe, requested by `Longest.request`, to an Attempt."""
    measurement = result.measurement
    need_gib: float | None = None
    if measurement:
        need_gib = measurement.peak_reserved_gib
    elif result.oom:
        need_gib = result.oom.need_gib

    return Attempt(
        tokens=result.config.seq_len,
        depth=result.depth,
        outcome=result.outcome.value,
        need_gib=need_gib,
        step_s=measurement.kind_s[-1][1] if measurement and measurement.kind_s else None,
    )


def verify(
    query: Longest,
    predicted: LongestRow,
    probe: Callable[[ProbeRequest], ProbeResult],
    memory_gib: float,
    *,
    timed_on: str,
    most: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> LongestRow:
    """Return the longest row whose step succeeded in a probe on the card.

    First, a probe of a few layers corrects the predicted length. A few layers suffice, because the
    inputs of all other layers are in the host's memory. Then at most `most` probes run the whole
    model, the first one at the corrected length. `memory_gib` is the card's memory, or less if the
    user limits it.
    """
    method = predicted.method
    tokens = predicted.tokens
    if tokens is None:
        return predicted

    attempts: list[Attempt] = []
    upper = min(query.bounds(method).values(), default=2**24)

    def attempt(length: int, depth: int | None) -> Attempt:
        say(f"{method}: {length:,} tokens, {f'{depth} layers' if depth else 'all layers'}")
        attempts.append(
            to_attempt(probe(query.request(query.config(method, length), memory_gib, depth=depth)))
        )
        return attempts[-1]

    config = query.config(method, tokens)
    count = query.count(config)
    few_layers = dry_count(query.model, config, 1, depth=FEW_LAYERS).count
    if count is None:  # in `predict` this dry probe succeeded, but now it failed
        return predicted
    static_gib = count.model_gib + count.adapters_gib + count.gradients_gib + count.optimizer_gib
    if few_layers is not None and (trial := attempt(tokens, FEW_LAYERS)).need_gib is not None:
        # If the few layers need more GiB than the dry probe predicted for them, assume that the
        # whole model needs the same number of additional GiB.
        extra_gib = (
            trial.need_gib - counted_breakdown(query.model, config, few_layers).peak_reserved_gib
        )
        tokens = _length_at_limit(
            tokens, (predicted.gpu_gib or 0.0) + extra_gib, query.limit_gib, static_gib, upper
        )

    best: Attempt | None = None
    failed_at = upper + STEP
    for _ in range(most):
        last = attempt(tokens, None)
        if last.outcome == Outcome.OK.value:
            best = last
            need_gib = last.need_gib or query.limit_gib
            most_tokens = min(upper, failed_at - STEP)
            longer = _length_at_limit(tokens, need_gib, query.limit_gib, static_gib, most_tokens)
            if longer < tokens * (1 + LEAST_GAIN):
                break
            tokens = longer
        elif last.outcome == Outcome.OOM.value and best is None:
            failed_at = tokens
            tokens = int(tokens * 0.97) // STEP * STEP
        else:
            break

    return _measured_row(query, replace(predicted, timed_on=timed_on), best, tuple(attempts))


def _length_at_limit(
    tokens: int, need_gib: float, limit_gib: float, static_gib: float, upper: int
) -> int:
    """Return the row length that needs `limit_gib`, if a row of `tokens` tokens needs `need_gib`.

    `static_gib` is the part of `need_gib` that does not depend on the length. The length is at most
    `upper`.
    """
    factor = max(limit_gib - static_gib, 0.0) / max(need_gib - static_gib, 1e-3)
    return min(int(tokens * factor) // STEP * STEP, upper)


def _measured_row(
    query: Longest, predicted: LongestRow, best: Attempt | None, attempts: tuple[Attempt, ...]
) -> LongestRow:
    if best is None:
        last = attempts[-1]
        problem = f"no sequence was verified: {last.tokens:,} tokens ended with {last.outcome}"
        row = LongestRow(
            method=predicted.method, config=predicted.config, problem=problem, attempts=attempts
        )
        return replace(row, predicted_tokens=predicted.tokens)

    config = query.config(predicted.method, best.tokens)
    bounds = query.bounds(predicted.method)
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
        host_gib=query.host_gib(config),
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
    headroom: float = HEADROOM,
    host_memory_gib: float | None = None,
    most_tokens: int | None = None,
    probe: bool = True,
    say: Callable[[str], None] = lambda text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Longest, list[LongestRow]]:
    """Return the query (a `Longest`), and the longest row of each method.

    An entry of `methods` may hold several names with commas between them. With `probe`, rows are
    verified on this machine's GPU if possible. Raises UsageError for an unknown method, knob or
    card, and any error that a probe raises.
    """
    target = _target_here(gpu) if probe and is_installed("torch") else None
    device = target.device if target else planned_device(gpu)
    if host_memory_gib is None and target is not None:
        host_memory_gib = host_memory_gib_here()

    query = Longest(
        model=model,
        device=device,
        limit_gib=device_limit_gib(device, headroom, memory_gib),
        headroom=headroom,
        host_limit_gib=None if host_memory_gib is None else HOST_SHARE * host_memory_gib,
        most_tokens=most_tokens,
        rank=rank,
        knobs=dict(knobs or {}),
    )

    methods = list(dict.fromkeys(name for text in methods for name in split_names(text)))
    for name in PINNED_APART.keys() & query.knobs.keys():
        raise UsageError(
            f"--set {name} is not possible", remedy=f"use {PINNED_APART[name]} instead"
        )
    for method in methods:
        _require_known_names(query, method)

    with stop_counting_if(should_stop):
        # This takes seconds, so misspelt names are refused before.
        if obstacle() is None:
            say(f"building {model.short} without the GPU")
            query = replace(query, shape=shape_of(model))
        for method in methods:
            _require_possible(query, method, say)
        rows = [query.predict(method, say) for method in methods]

    if target is None:
        return query, rows

    # These imports are here because a prediction alone does not need the prober's libraries.
    from autotune.core.scratch import scratch_directory
    from autotune.probe.supervisor import WorkerProber

    with (
        scratch_directory() as folder,
        WorkerProber("cuda", Path(folder), should_stop=should_stop) as prober,
        stop_counting_if(should_stop),
    ):
        cap = target.memory_cap_gib(prober.memory_gib, asked_gib=memory_gib)
        query = replace(
            query,
            limit_gib=min(query.limit_gib, memory_limit_gib(cap, headroom, taken_gib=CONTEXT_GIB)),
        )
        timed_on = (target.measured_on or device).name

        def run(request: ProbeRequest) -> ProbeResult:
            return prober.probe(request, Path(folder, "longest.log"))

        return query, [verify(query, row, run, cap, timed_on=timed_on, say=say) for row in rows]


def _require_known_names(query: Longest, method: str) -> None:
    """Raise UsageError for an unknown method or an unknown knob."""
    if method not in METHODS:
        raise UsageError(
            f"unknown method {method!r}{did_you_mean(method, METHODS)}", remedy=", ".join(METHODS)
        )
    for name in query.knobs:
        if name not in KNOBS:
            hint = did_you_mean(name, KNOBS)
            raise UsageError(f"--set: there is no setting {name!r}{hint}", remedy=_knob_values())


def _knob_values() -> str:
    return f"{document('knobs.md')} lists the settings and their values"


def _require_possible(query: Longest, method: str, say: Callable[[str], None]) -> None:
    """Raise UsageError for an impossible value of a knob.

    `say` gets a warning for each knob that has no effect.
    """
    try:
        config = query.config(method, STEP)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--set: {error}", remedy=_knob_values()) from None
    if config.tiling != query.knobs_of(method)["tiling"]:
        raise UsageError(
            f"--set: layers of {method} with these settings are not computed in tiles of tokens",
            remedy="leave out lora_dropout, compile and kernels, or give --set tiling=none",
        )
    for name, value in query.knobs.items():
        if getattr(config, name) == KNOBS[name].default != value:
            say(f"warning: {method}: {name} has no effect with these settings")


def _target_here(gpu: str) -> Target | None:
    """Return the target for probes on this machine's GPU, or None if the GPU cannot replace `gpu`.

    The machine's GPU must be the product `gpu` itself, or must be able to simulate it.
    """
    try:
        target = find_target(gpu)
    except EnvironmentProblem:
        return None
    return target if target.card else None


def longest_answer(query: Longest, rows: Sequence[LongestRow]) -> LongestAnswer:
    """Return the answer of the command `autotune longest`."""
    return LongestAnswer(
        model=query.model.name,
        device=query.device.name,
        limit_gib=query.limit_gib,
        host_limit_gib=query.host_limit_gib,
        positions=query.model.max_seq_len,
        rows=tuple(rows),
    )

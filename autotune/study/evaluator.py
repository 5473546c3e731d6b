"""The ladder: what a candidate is put through, cheapest rung first, and why it stopped where it did.

Gate: refuse what is known or predicted not to fit. Shallow: real steps on two truncated depths, extended to the whole
model; what will not fit or cannot win stops there. Full: real steps on the whole model, or the stored answer to the
same question. Confirm: the same again, longer, for the few that may win. Every answer is stored before anybody else
hears of it.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from autotune.core.errors import TooManyFailures
from autotune.core.knobs import KNOBS, affecting
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.probe_types import (
    Evidence,
    Fingerprint,
    Measurement,
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    Rung,
)
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib
from autotune.prediction.depth_extrapolation import Extrapolation, depths, extrapolate
from autotune.prediction.memory_predictor import Frontier, KnownOom, MemoryEstimate, MemoryPredictor
from autotune.study.storage.probe_store import ProbeStore

MAX_FAILURES_IN_A_ROW = 3
FAILED = (Outcome.CRASH, Outcome.TIMEOUT)
# Who offloads to the host and ran out with so much of the device's memory free ran out of the host's.
HOST_BAND = 0.1
# So near to the limit the gate leaves the decision to the shallow rung.
GATE_BAND = 0.03

Pruner = Callable[[TrainConfig, Extrapolation], str | None]


class Prober(Protocol):
    """Who answers requests: the warm worker, or recorded results."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult: ...

    def describe(self, model: dict[str, Any]) -> ModelShape | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result for one candidate, whether it was known already, and the seconds all its probes took."""

    result: ProbeResult
    reused: bool = False
    seconds: float = 0.0


class Evaluator:
    """One study's rungs on one device. `request` makes the full-depth request for a configuration.

    `model` is the model's digest. `shape` says how its layers repeat; None leaves the shallow rung out. With
    `shallow_only` it is the last.
    """

    def __init__(
        self,
        prober: Prober,
        store: ProbeStore,
        *,
        study: str,
        logs: Path,
        request: Callable[[TrainConfig], ProbeRequest],
        model: str = "",
        shape: ModelShape | None = None,
        shallow_only: bool = False,
    ) -> None:
        self._prober, self._store, self._study, self._logs, self._request = prober, store, study, logs, request
        self._shape, self._shallow_only = shape, shallow_only
        self._model = model
        self._frontier = Frontier()
        self._memory = MemoryPredictor()
        self._truncated: dict[tuple[TrainConfig, int], dict[int, Measurement]] = {}  # by micro steps too, then depth
        self._failed: dict[TrainConfig, str] = {}  # truncated, for reasons that the whole model may not share
        # Measured / extrapolated time, by kind of step, then configuration.
        self._ratios: dict[tuple[Any, ...], dict[TrainConfig, float]] = {}
        self._whole: dict[tuple[Any, ...], Measurement] = {}  # of whole models, by all but the optimizer
        self._failures = 0
        self._evaluated: set[TrainConfig] = set()
        self._seconds: dict[TrainConfig, float] = {}  # spent since the last verdict

    def learn_from_others(self) -> None:
        """Take over what other studies of this model measured here. Their OOMs may have been under another limit."""
        for row in self._store.of_model(self._model, self._prober.fingerprint.digest):
            if row.result.outcome is Outcome.OK:
                self.learn(None, row.result)

    def learn(self, trial: int | None, result: ProbeResult) -> None:
        """Take over what a probe found out."""
        config, measurement = result.config, result.measurement
        if result.rung is Rung.NODE:  # its node may be another
            return
        if result.outcome is Outcome.OOM and result.depth is None and _of_the_device(result):
            assert result.oom is not None
            micro_steps = self._request(config).micro_steps
            self._frontier.add(KnownOom(trial=trial, config=config, micro_steps=micro_steps, detail=result.oom))
        if measurement is None or result.outcome is not Outcome.OK:
            return
        if not self._has_asked(result, measurement):
            # Another study, of other rows: packed ones differ in memory too, padded ones in time alone.
            if not config.packing and result.depth is None and result.evidence is Evidence.MEASURED:
                self._memory.learn(config, measurement)
            return
        if result.depth is not None:
            self._truncated.setdefault((config, measurement.micro_steps), {})[result.depth] = measurement
        foretold = self._extrapolated(config, measurement.micro_steps)
        if result.depth is not None and foretold is not None:
            self._memory.learn(config, foretold.measurement)
        if result.depth is None and result.evidence is Evidence.MEASURED:
            self._memory.learn(config, measurement)
            self._whole[_but_optimizer(config, measurement.micro_steps)] = measurement
            if foretold is not None:
                # The median, which scores count: one hiccup of a whole model must not make all others look slow.
                ratio = statistics.median(measurement.micro_step_s) / foretold.measurement.micro_step_s[0]
                self._ratios.setdefault(_kind(config, foretold), {})[config] = ratio

    def evaluate(self, config: TrainConfig, trial: int | None, promise: Pruner | None = None) -> Evaluation:
        """Climb until something decides. `promise` says why an extrapolated candidate cannot win, or None.

        Without one the whole model is wanted however fast it is foretold to be: where it surely fits, at once.

        Raises:
            TooManyFailures: probes keep failing for reasons other than memory.
        """
        looked = self.evaluate_low_fidelity(config, trial, sure_is_enough=promise is None and not self._shallow_only)
        if isinstance(looked, Evaluation):
            return looked
        request = self._request(config)
        if looked is not None and promise is not None and (slow := promise(config, looked)):
            result = _decided(request, Outcome.SLOW, Rung.SHALLOW, slow, measurement=looked.measurement)
            return self._decide(trial, result)
        if self._shallow_only:
            reason = self._failed.get(config, "its layers cannot be left out (--shallow-only)")
            failed = _decided(request, Outcome.CRASH, Rung.SHALLOW, reason)
            self._count(failed)
            return self._decide(trial, failed)
        result = self._probe(request, trial, "")
        self.learn(trial, result)
        self._count(result)
        return Evaluation(result=result, seconds=self._seconds.pop(config))

    def evaluate_low_fidelity(
        self, config: TrainConfig, trial: int | None, *, sure_is_enough: bool = False
    ) -> Evaluation | Extrapolation | None:
        """Everything below the full-depth probe: the verdict where that decides, else what truncated depths foretell.

        None where they foretell nothing, or are not asked since it surely fits and `sure_is_enough`. Looking again
        costs nothing.
        """
        request = self._request(config)
        stored = self._store.find(request.digest, self._prober.fingerprint.digest, (Rung.FULL, Rung.CONFIRM))
        if stored is not None and not self._shallow_only:
            self.learn(trial, stored)
            known = replace(stored, rung=Rung.FULL, log=None)
            if trial is not None:  # this study's own row, so that it can be read without the one that measured it
                self._stored(trial, replace(known, seconds={}))
            return Evaluation(result=known, reused=True)
        offered = memory_limit_gib(request.memory_gib, request.headroom)  # before the context, which is predicted
        estimate = self._memory.predict(config, request.micro_steps, offered)
        refused = self._gate(request, estimate)
        if refused is not None:
            return Evaluation(result=self._stored(trial, refused))
        if (
            sure_is_enough
            and estimate
            and estimate.bounded
            and estimate.high_gib < estimate.limit_gib * (1 - GATE_BAND)
        ):
            return None
        found = self._shallow(request, trial)
        return self._decide(trial, found) if isinstance(found, ProbeResult) else found

    def _has_asked(self, result: ProbeResult, measurement: Measurement) -> bool:
        """Whether this study would put the same question."""
        try:
            own = self._request(result.config)
        except ValueError:  # its micro batch does not divide this study's global batch
            return False
        return replace(own, micro_steps=measurement.micro_steps, depth=result.depth).digest == result.request_digest

    def reset_failures(self) -> None:
        """What failed so far does not count towards giving up: it was one configuration, tried more than once."""
        self._failures = 0

    def _decide(self, trial: int | None, result: ProbeResult) -> Evaluation:
        self.learn(trial, result)
        if result.outcome not in FAILED:
            self._failures = 0
        spent = self._seconds.pop(result.config, 0.0)
        return Evaluation(result=self._stored(trial, result), reused=spent == 0.0, seconds=spent)

    def was_evaluated(self, config: TrainConfig) -> bool:
        """Whether this session had it do what the full run does beside training: an evaluation and a save."""
        return config in self._evaluated

    def confirm(self, config: TrainConfig, micro_steps: int, round_: int, *, whole: bool = True) -> ProbeResult:
        """Measure a finalist again, with more micro batches a step; `whole` adds, once, an evaluation and a save."""
        request = replace(self._request(config), rung=Rung.CONFIRM, micro_steps=micro_steps, min_timed_s=2.0)
        if whole and not self.was_evaluated(config):
            request = replace(request, evaluate=True)
            self._evaluated.add(config)
        log = self._logs / f"confirm-{config.digest}-{round_}.log"
        result = self._stored(None, self._prober.probe(request, log))
        self.learn(None, result)
        return result

    def reference(self, config: TrainConfig) -> Measurement | None:
        """A whole model that is no candidate, but what losses are compared with; None if it failed."""
        request = replace(self._request(config), rung=Rung.REFERENCE, min_timed_s=0.0)
        rungs = (Rung.FULL, Rung.REFERENCE)
        stored = self._store.find(request.digest, self._prober.fingerprint.digest, rungs)
        if stored is not None and stored.measurement is not None and stored.measurement.losses:
            known = replace(stored, rung=Rung.REFERENCE, log=None, seconds={})
        else:
            known = self._prober.probe(request, self._logs / f"reference-{config.digest}.log")
        return self._stored(None, known).measurement

    def reject(self, config: TrainConfig, reason: str) -> None:
        """Remember that a finalist's losses are not those of its reference."""
        self._stored(None, _decided(self._request(config), Outcome.NUMERICS, Rung.CONFIRM, reason))

    def _gate(self, request: ProbeRequest, estimate: MemoryEstimate | None) -> ProbeResult | None:
        """The refusal, if this is at least as large as what ran out, or is predicted to be too large."""
        config = request.config
        known = self._frontier.refuses(config, request.micro_steps)
        if known is not None and known.config != config:
            where = "an earlier probe" if known.trial is None else f"trial {known.trial}"
            reason = f"needs at least what {where} ran out with: {known.config.label()}"
            return _decided(request, Outcome.REFUSED, Rung.GATE, reason, oom=known.detail)
        if estimate is not None and estimate.low_gib > estimate.limit_gib * (1 + GATE_BAND):
            alike = "1 configuration" if estimate.basis == 1 else f"{estimate.basis} configurations"
            reason = (
                f"needs {fmt_gib(estimate.low_gib)} to {fmt_gib(estimate.high_gib)} of "
                f"{fmt_gib(estimate.limit_gib)}, as learned from {alike} alike"
            )
            oom = _foretold_oom(estimate.phase, estimate.gib, estimate.limit_gib, {})
            return _decided(request, Outcome.REFUSED, Rung.GATE, reason, oom=oom)
        return None

    def _shallow(self, request: ProbeRequest, trial: int | None) -> ProbeResult | Extrapolation | None:
        """What two truncated depths decide, else what they foretell; None where they tell nothing."""
        config = request.config
        pair = None if self._shape is None else depths(self._shape, config.checkpoint_every)
        if self._shape is None or pair is None or config in self._failed:
            return None
        for depth in pair:
            short = shortened(request, depth)
            stored = self._store.find(short.digest, self._prober.fingerprint.digest, (Rung.SHALLOW,))
            result = stored or self._probe(short, trial, f"-depth{depth}")
            self.learn(trial, result)
            if result.outcome is Outcome.OOM:
                reason = f"{result.reason} with {depth} of {self._shape.num_layers} layers alone"
                return _decided(request, Outcome.OOM, Rung.SHALLOW, reason, oom=result.oom, phase=result.phase)
            if result.outcome is not Outcome.OK:
                self._failed[config] = result.reason or result.outcome
                return None
        foretold = self._foretell(config, request.micro_steps)
        if foretold is None:
            return None
        measurement = foretold.measurement
        need, limit = measurement.peak_reserved_gib, measurement.limit_gib
        if need > limit:
            reason = f"needs {fmt_gib(need)} of {fmt_gib(limit)}, extrapolated from {pair[0]} and {pair[1]} layers"
            phase = max(measurement.phase_peak_gib, key=lambda one: measurement.phase_peak_gib[one])
            oom = _foretold_oom(phase, need, limit, measurement.terms_gib(need))
            return _decided(request, Outcome.OOM, Rung.SHALLOW, reason, oom=oom, phase=phase, measurement=measurement)
        if self._shallow_only:
            return _decided(request, Outcome.OK, Rung.SHALLOW, None, measurement=measurement)
        return foretold

    def _extrapolated(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """The whole model, from this configuration's truncated probes."""
        probed = sorted(self._truncated.get((config, micro_steps), {}).items())
        if self._shape is None or len(probed) != 2:
            return None
        return extrapolate(probed, self._shape.num_layers)

    def _foretell(self, config: TrainConfig, micro_steps: int) -> Extrapolation | None:
        """The same, its time corrected by what whole models took: of the same micro batches, or of what was foretold.

        Which optimizer follows does not change a micro batch, where it is timed apart from the rest of a step.
        """
        foretold = self._extrapolated(config, micro_steps)
        if foretold is None:
            return None
        ratios = self._ratios.get(_kind(config, foretold))
        whole = self._whole.get(_but_optimizer(config, micro_steps))
        foretold = foretold.corrected(list(ratios.values())) if ratios else foretold
        return foretold.beside(whole) if whole is not None and whole.rest_s else foretold

    def _probe(self, request: ProbeRequest, trial: int | None, suffix: str) -> ProbeResult:
        name = "settle" if trial is None else f"trial-{trial:04d}"
        result = self._stored(trial, self._prober.probe(request, self._logs / f"{name}{suffix}.log"))
        spent = result.seconds.get("total", 0.0)
        self._seconds[request.config] = self._seconds.get(request.config, 0.0) + spent
        return result

    def _stored(self, trial: int | None, result: ProbeResult) -> ProbeResult:
        self._store.add(self._study, trial, result, self._prober.fingerprint, model=self._model)
        return result

    def _count(self, result: ProbeResult) -> None:
        self._failures = self._failures + 1 if result.outcome in FAILED else 0
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            raise TooManyFailures(
                f"{self._failures} probes in a row failed for reasons other than memory; the last: {result.reason}",
                remedy=f"read {self._logs / (result.log or 'worker.log')}, run `autotune doctor`, go on with --study",
            )


def shortened(request: ProbeRequest, depth: int) -> ProbeRequest:
    """The same question to a truncated model. A card at its power limit swings within tenths of a second."""
    min_timed_s = min(request.min_timed_s, 0.7)
    min_timed_micros = request.min_timed_micros if request.config.packing else 3
    return replace(request, depth=depth, rung=Rung.SHALLOW, min_timed_s=min_timed_s, min_timed_micros=min_timed_micros)


def _kind(config: TrainConfig, foretold: Extrapolation) -> tuple[Any, ...]:
    """Steps whose extrapolated time is off by the same ratio."""
    values = [getattr(config, name) for name in affecting("depth_error")]
    return (*values, foretold.host_bound, foretold.shortest)


def _of_the_device(result: ProbeResult) -> bool:
    """Whether it was the device's memory that ran out, and not the host's, to which checkpoints are offloaded."""
    oom = result.oom
    if oom is None or not result.config.offloads:
        return oom is not None
    return oom.allocated_gib + (oom.requested_gib or 0.0) > oom.limit_gib * (1 - HOST_BAND)


def _but_optimizer(config: TrainConfig, micro_steps: int) -> tuple[Any, ...]:
    after_them = set(affecting("rest_of_step")) - set(affecting("micro_time"))
    return micro_steps, replace(config, **{name: KNOBS[name].default for name in after_them})


def _decided(request: ProbeRequest, outcome: Outcome, rung: Rung, reason: str | None, **fields: Any) -> ProbeResult:
    return ProbeResult(
        request_digest=request.digest,
        config=request.config,
        rung=rung,
        outcome=outcome,
        evidence=Evidence.EXTRAPOLATED,
        reason=reason,
        **fields,
    )


def _foretold_oom(phase: Phase, need_gib: float, limit_gib: float, terms: dict[str, float]) -> OomDetail:
    return OomDetail(
        phase=phase,
        requested_gib=None,
        allocated_gib=need_gib,
        reserved_gib=need_gib,
        limit_gib=limit_gib,
        terms_gib=terms,
    )

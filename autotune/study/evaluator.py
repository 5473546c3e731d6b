"""The stages of an evaluation. A candidate passes through them until one stage decides.

The cheapest stage comes first:

1. Gate: a configuration that is known or predicted not to fit in memory is refused.

2. Low fidelity: two truncated models, which have only a few layers, run real steps, and the results
are extrapolated to the whole model. A configuration that will not fit or cannot win stops here.

3. Full: the whole model runs real steps. If the same probe was stored before, its result is used.

4. Confirmation: the few possible winners are measured longer.

Every result is stored before the search uses it.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from autotune.core.core_use import num_usable_cores
from autotune.core.errors import Cancelled, EnvironmentProblem, TooManyFailures
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.parallelism import Parallelism
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
from autotune.prediction.depth_extrapolation import (
    DepthPredictor,
    Extrapolation,
    depths_of,
    least_depth,
)
from autotune.prediction.memory_formula import CONTEXT_GIB, ERROR, MemoryBreakdown
from autotune.prediction.memory_predictor import (
    KnownOom,
    MemoryEstimate,
    MemoryPredictor,
    refused_by,
)
from autotune.probe.supervisor import merge_tries
from autotune.problem.disturbance import disturbance
from autotune.study.probe_time import ProbeTimes
from autotune.study.storage.probe_store import ProbeStore

MAX_FAILURES_IN_A_ROW = 3
MAX_IN_VAIN = 2  # see `Evaluator._may_repeat`
FAILED = (Outcome.CRASH, Outcome.TIMEOUT)
# If a configuration that offloads activations runs out of memory, either the device or the host had
# too little. It was the host if at least this share of the device's memory limit was still free.
HOST_BAND = 0.1
# If the memory predicted for a configuration differs from the limit by less than this share of the
# limit, probes of truncated models decide whether the configuration fits. The formula's error is at
# most 1.3 % after the prediction was corrected with a measurement of the same configuration with
# another micro batch size (`benchmarks/plan.py memory`).
GATE_BAND = 0.03
# This share replaces GATE_BAND if no measurement corrected the formula's prediction. It is four
# standard deviations of the formula's error.
FORMULA_BAND = 2 * ERROR

# Returns the reason why an extrapolated configuration cannot win, or None if it can.
Pruner = Callable[[TrainConfig, Extrapolation], str | None]


class Prober(Protocol):
    """Answers probe requests: a worker measures now, or recorded results are replayed."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The device and the packages of the prober."""

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """Answer a request; the probe's output goes to `log`."""

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        """Return the number of layers and their repeating pattern, from the model's config.

        Returns None if no model with fewer layers can be probed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One candidate's result, whether it was stored already, and the seconds of its probes.

    `is_own` is True for a reused result that this study itself measured, for example while it
    looked for a baseline.
    """

    result: ProbeResult
    reused: bool = False
    is_own: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """The reserved memory that a configuration is predicted to need, and the limit.

    `by_formula` has the terms of the formula's prediction, and `gib` is the predicted peak. If
    `corrected` is True, a measurement has corrected `gib`.
    """

    by_formula: MemoryBreakdown
    gib: float
    limit_gib: float
    corrected: bool = False

    @property
    def ratio(self) -> float:
        return self.gib / self.limit_gib


@dataclass(slots=True)
class Evaluator:
    """Passes the candidates of one study through the stages of evaluation, on one device.

    - `request` returns the request for a probe of a configuration with all layers of the model.
    - `model` is the digest of the model.
    - `formula` predicts the memory of a configuration with a given number of micro batches per
      step, or returns None if it cannot predict the memory.
    - `shape` says how many layers the model has, and after how many layers their pattern repeats.
      If `shape` is None, every probe has all layers, so there is no low-fidelity stage.
    - If `shallow_only` is True, low fidelity is the last stage: no whole model is probed.
    - Stored results are reused only from `studies`, or from any study if `studies` is empty. If
      `reuses` is False, no stored result is reused, so that all results are equally recent.
    - In the search, a disturbed probe that took more than `repeat_s` seconds is not repeated.
    - `saved` holds the configurations whose probes in this session also evaluated and saved a
      checkpoint, as a full run does between steps.
    - `truncated_s` maps each configuration to the total seconds that its probes of truncated models
      took in this session. `whole_s` holds the same for probes of whole models. Both leave out the
      time that a new worker needs to load libraries. `compiling_s` holds the part of `truncated_s`
      that was spent on compilation.
    """

    prober: Prober
    store: ProbeStore
    _: KW_ONLY
    study: str
    logs: Path
    request: Callable[[TrainConfig], ProbeRequest]
    model: str = ""
    formula: Callable[[TrainConfig, int], MemoryBreakdown | None] = lambda config, micro_steps: None
    shape: ModelShape | None = None
    shallow_only: bool = False
    studies: tuple[str, ...] = ()
    reuses: bool = True
    repeat_s: float = math.inf
    failures_in_a_row: int = 0  # running out of memory does not count as a failure
    saved: set[TrainConfig] = field(default_factory=set)
    truncated_s: dict[TrainConfig, float] = field(default_factory=dict)
    whole_s: dict[TrainConfig, float] = field(default_factory=dict)
    compiling_s: dict[TrainConfig, float] = field(default_factory=dict)
    _known_ooms: list[KnownOom] = field(default_factory=list)
    _memory: MemoryPredictor = field(default_factory=MemoryPredictor)
    _depths: DepthPredictor = field(init=False)
    _times: ProbeTimes = field(init=False)
    # For each strategy of several GPUs, the largest share of the memory limit that tensors took in
    # a whole model that fitted, and the smallest in one that ran out of memory.
    _tensor_shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Why the truncated models of a configuration failed. The whole model may still succeed.
    _failed_truncated: dict[TrainConfig, str] = field(default_factory=dict)
    # The disturbed results of probes outside trials, by the digest of their request, and how many
    # second probes in a row were disturbed too.
    _disturbed: dict[str, ProbeResult] = field(default_factory=dict)
    _in_vain: int = 0
    # The seconds of each configuration's probes since its last evaluation ended.
    _seconds: dict[TrainConfig, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._depths = DepthPredictor(self.shape)
        self._times = ProbeTimes(self.shape)

    def _find(self, request: ProbeRequest, trial: int | None, *rungs: Rung) -> ProbeResult | None:
        """Return the newest stored answer to a request, if this study may reuse it.

        A trial also reuses a disturbed result of the probes that ran before the search.
        """
        if not self.reuses:
            return None
        fingerprint = self.prober.fingerprint.digest
        stored = self.store.find(request.digest, fingerprint, rungs, studies=self.studies)
        return stored or (None if trial is None else self._disturbed.get(request.digest))

    def learn_from_others(self) -> None:
        """Learn from other studies' measurements of this model on this device.

        Probes that ran out of memory are ignored, because they may have had another memory limit.
        """
        rows = (
            [row for study in self.studies for row in self.store.probes_of_study(study)]
            if self.studies
            else self.store.probes_of_model(self.model, self.prober.fingerprint.digest)
        )
        for row in rows:
            if row.result.outcome is Outcome.OK:
                self.learn(None, row.result)

    def learn(self, trial: int | None, result: ProbeResult) -> None:
        """Learn from a probe: from its measurement, or from the fact that it ran out of memory."""
        config = result.config
        measurement = result.measurement
        if result.rung is Rung.NODE:  # a check of a worker (`node_health`), perhaps of another one
            return

        if result.outcome is Outcome.OOM and result.depth is None and _ran_out_on_device(result):
            assert result.oom is not None
            micro_steps = self.request(config).micro_steps
            self._known_ooms.append(
                KnownOom(trial=trial, config=config, micro_steps=micro_steps, detail=result.oom)
            )

        if config.num_gpus > 1 and result.depth is None and not result.is_prediction:
            self._learn_tensor_share(result)
        if measurement is None or result.outcome is not Outcome.OK:
            return
        is_whole = result.depth is None and not result.is_prediction
        if not self._would_ask(result, measurement):
            # The result comes from a study with other row lengths. If rows are padded, their
            # lengths change only the time, so the measured memory is learned. If rows are packed,
            # their lengths may also change the memory, so the result is ignored.
            if is_whole and not config.packing:
                self._learn_memory(config, measurement)
            return

        self._depths.learn(result, measurement)
        if not result.is_prediction:
            self._times.learn(result, measurement)
        if is_whole:
            self._learn_memory(config, measurement)
        elif result.depth is not None:
            predicted = self._depths.predict_from_probes(config, measurement.micro_steps)
            if predicted is not None:
                self._learn_memory(config, predicted.measurement)

    def _learn_tensor_share(self, result: ProbeResult) -> None:
        """Learn which share of the memory limit the tensors of a whole model may take."""
        fitted, failed = self._tensor_shares.get(result.config.sharding, (0.0, math.inf))
        if result.outcome is Outcome.OK and result.measurement is not None:
            fitted = max(fitted, _tensor_share(result.measurement))
        elif result.outcome is Outcome.OOM and result.oom is not None:
            oom = result.oom
            needed_gib = oom.allocated_gib + (oom.requested_gib or 0.0)
            failed = min(failed, needed_gib / oom.limit_gib)
        self._tensor_shares[result.config.sharding] = fitted, failed

    def _surely_fits(self, config: TrainConfig, measurement: Measurement) -> bool:
        """Whether the whole model fits, by its truncated models.

        On several GPUs, a model also fits if its tensors take no more of the limit than the tensors
        of another model that fitted.
        """
        if measurement.peak_reserved_gib <= measurement.limit_gib or config.num_gpus == 1:
            return measurement.peak_reserved_gib <= measurement.limit_gib
        fitted, _ = self._tensor_shares.get(config.sharding, (0.0, math.inf))
        return _tensor_share(measurement) <= fitted

    def _may_fit(self, config: TrainConfig, measurement: Measurement) -> bool:
        """Whether a probe of the whole model may succeed, by its truncated models."""
        if config.num_gpus == 1:
            return measurement.peak_reserved_gib <= measurement.limit_gib
        _, failed = self._tensor_shares.get(config.sharding, (0.0, math.inf))
        return _tensor_share(measurement) < min(failed, 1.0)

    def _learn_memory(self, config: TrainConfig, measurement: Measurement) -> None:
        """Learn how much memory a configuration needs with the longest rows of the measurement."""
        self._memory.learn(
            replace(config, seq_len=measurement.row_length or config.seq_len), measurement
        )

    def evaluate(
        self,
        config: TrainConfig,
        trial: int | None,
        pruner: Pruner | None = None,
        *,
        spare_s: float = math.inf,
    ) -> Evaluation:
        """Pass a candidate through the stages until one of them decides.

        Without a pruner, the whole model is measured even if it is predicted to be slow. In this
        case, the truncated models are skipped if the whole model will certainly fit. If a probe of
        the whole model would take longer than `spare_s`, the prediction from the truncated models
        is the result. Raises TooManyFailures if probes keep failing for reasons other than memory.
        """
        skip_if_fits = pruner is None and not self.shallow_only and spare_s == math.inf
        predicted = self.evaluate_low_fidelity(config, trial, skip_if_fits=skip_if_fits)
        if isinstance(predicted, Evaluation):
            return predicted

        request = self.request(config)
        # Times that other processes disturbed may be too long, so they do not rule out a
        # configuration.
        if pruner is not None and predicted is not None and predicted.disturbed is None:
            reason = pruner(config, predicted)
            if reason is not None:
                return self._conclude(trial, _predicted(request, Outcome.SLOW, reason, predicted))

        # Near the memory limit, only a probe of the whole model can decide whether the model fits.
        surely_fits = predicted is not None and self._surely_fits(config, predicted.measurement)
        if predicted is not None and surely_fits and not self.fits_into(spare_s, config):
            return self._conclude(trial, _predicted(request, Outcome.OK, None, predicted))

        if self.shallow_only:
            reason = self._failed_truncated.get(
                config, "its layers cannot be left out (--shallow-only)"
            )
            failed = _decision(request, Outcome.CRASH, Rung.SHALLOW, reason)
            self._count_failure(failed)
            return self._conclude(trial, failed)

        result = self._probe(request, trial, "")
        self.learn(trial, result)
        self._count_failure(result)
        return Evaluation(result=result, seconds=self._seconds.pop(config))

    def evaluate_low_fidelity(
        self, config: TrainConfig, trial: int | None, *, skip_if_fits: bool = False
    ) -> Evaluation | Extrapolation | None:
        """Pass a candidate through the stages that come before the probe of the whole model.

        Returns the decision of these stages or, if they do not decide, a prediction for the whole
        model.

        Returns None if the truncated models predict nothing. Also returns None, without a probe of
        truncated models, if `skip_if_fits` is True and the whole model will certainly fit. A second
        call reuses the results of the first call.
        """
        request = self.request(config)
        stored = self._find(request, trial, Rung.FULL, Rung.CONFIRM)
        if stored is not None and not self.shallow_only:
            self.learn(trial, stored)
            known = replace(stored, rung=Rung.FULL, log=None)
            # The result is stored for this study too, so that reading this study does not need the
            # rows of the study that measured the configuration.
            if trial is not None:
                self._store_result(trial, replace(known, seconds={}))
            is_own = self.store.has_measured(self.study, config)
            return Evaluation(result=known, reused=True, is_own=is_own)

        # The predictor subtracts the CUDA context from this limit, so it is not subtracted here.
        offered = memory_limit_gib(request.memory_gib, request.headroom)
        estimate = self._memory.predict(_with_longest_rows(request), request.micro_steps, offered)
        refused = self._gate(request, estimate)
        if refused is not None:
            return Evaluation(result=self._store_result(trial, refused))

        if (skip_if_fits and estimate is not None and estimate.bounded) and (
            estimate.high_gib < estimate.limit_gib * (1 - GATE_BAND)
        ):
            return None

        answer = self._low_fidelity(request, trial)
        return self._conclude(trial, answer) if isinstance(answer, ProbeResult) else answer

    def shallowest(self, config: TrainConfig) -> ProbeRequest | None:
        """Return the request for a model with the fewest layers that still has each kind of layer.

        Returns None if the micro batches do not divide the global batch, or if the shape of the
        model is unknown.
        """
        depth = None if self.shape is None else least_depth(self.shape, config.checkpoint_every)
        if self.shape is None or depth is None:
            return None
        try:
            return truncate_request(self.request(config), min(depth, self.shape.num_layers))
        except ValueError:
            return None

    def confirmation_s(self, config: TrainConfig, micro_steps: int) -> float | None:
        """The predicted seconds of a confirmation, or None if no probe allows a prediction."""
        evaluate = config not in self.saved
        return self._times.whole_s(
            replace(self._confirmation(config, micro_steps), evaluate=evaluate)
        )

    def fits_into(self, spare_s: float, config: TrainConfig) -> bool:
        """Whether a probe of the whole model is predicted to take less than `spare_s` seconds.

        An unknown duration is taken as 0.
        """
        took_s = 0.0 if spare_s == math.inf else self._times.whole_s(self.request(config))
        return (took_s or 0.0) < spare_s

    def _would_ask(self, result: ProbeResult, measurement: Measurement) -> bool:
        """Whether this study's own request would equal the request that led to `result`."""
        try:
            own = self.request(result.config)
        except ValueError:  # the micro batch does not divide this study's global batch
            return False
        return (
            replace(own, micro_steps=measurement.micro_steps, depth=result.depth).digest
            == result.request_digest
        )

    def _conclude(self, trial: int | None, result: ProbeResult) -> Evaluation:
        self.learn(trial, result)
        if result.outcome not in FAILED:
            self.failures_in_a_row = 0
        seconds = self._seconds.pop(result.config, 0.0)
        reused = seconds == 0.0
        return Evaluation(
            result=self._store_result(trial, result),
            reused=reused,
            is_own=reused and self.store.has_measured(self.study, result.config),
            seconds=seconds,
        )

    def confirm(
        self, config: TrainConfig, micro_steps: int, round_: int, *, whole: bool = True
    ) -> ProbeResult:
        """Measure a finalist again, with more micro batches per step.

        If `whole` is True, the probe also evaluates and saves a checkpoint, unless an earlier
        confirmation of this configuration did so.
        """
        evaluate = whole and config not in self.saved
        request = replace(self._confirmation(config, micro_steps), evaluate=evaluate)
        log = self.logs / f"confirm-{config.digest}-{round_}.log"
        result = self._measure(request, None, log)
        if evaluate and result.outcome is Outcome.OK:
            self.saved.add(config)

        self._spend(result)
        self.learn(None, result)
        return result

    def _confirmation(self, config: TrainConfig, micro_steps: int) -> ProbeRequest:
        return replace(
            self.request(config), rung=Rung.CONFIRM, micro_steps=micro_steps, min_timed_s=2.0
        )

    def reference(self, config: TrainConfig) -> Measurement | None:
        """Measure a whole model; its losses are the reference for other number formats.

        Returns None if the probe failed.
        """
        request = replace(self.request(config), rung=Rung.REFERENCE, min_timed_s=0.0)
        stored = self._find(request, None, Rung.FULL, Rung.REFERENCE)
        if stored is not None and stored.measurement is not None and stored.measurement.losses:
            known = replace(stored, rung=Rung.REFERENCE, log=None, seconds={})
        else:
            known = self.prober.probe(request, self.logs / f"reference-{config.digest}.log")
        return self._store_result(None, known).measurement

    def reject(self, config: TrainConfig, reason: str) -> ProbeResult:
        """Reject a finalist whose losses differ from its reference's losses; store the decision."""
        return self._store_result(
            None, _decision(self.request(config), Outcome.NUMERICS, Rung.CONFIRM, reason)
        )

    def _gate(self, request: ProbeRequest, estimate: MemoryEstimate | None) -> ProbeResult | None:
        """Refuse a request that cannot run, or that is predicted to need too much memory.

        A request is refused if its parallel strategy does not support the configuration, if an
        earlier probe that needed no more memory ran out of memory, or if the predicted memory
        exceeds the limit.
        """
        config = request.config
        if (reason := Parallelism.of(config).refusal(config)) is not None:
            return _decision(request, Outcome.REFUSED, Rung.GATE, reason)

        known = refused_by(self._known_ooms, config, request.micro_steps)
        if known is not None and known.config != config:
            source = "an earlier probe" if known.trial is None else f"trial {known.trial}"
            reason = (
                f"needs at least as much memory as {source}, which ran out of memory: "
                f"{known.config.label()}"
            )
            return _decision(request, Outcome.REFUSED, Rung.GATE, reason, oom=known.detail)

        if estimate is not None and estimate.low_gib > estimate.limit_gib * (1 + GATE_BAND):
            basis = (
                "1 similar configuration"
                if estimate.basis == 1
                else f"{estimate.basis} similar configurations"
            )
            reason = (
                f"needs {fmt_gib(estimate.low_gib)} to {fmt_gib(estimate.high_gib)} of "
                f"{fmt_gib(estimate.limit_gib)}, as learned from {basis}"
            )
            oom = _predicted_oom(estimate.phase, estimate.gib, estimate.limit_gib, {})
            return _decision(request, Outcome.REFUSED, Rung.GATE, reason, oom=oom)

        surely_fits = (
            estimate is not None and estimate.bounded and estimate.high_gib <= estimate.limit_gib
        )
        return None if surely_fits else self._gate_by_formula(request)

    def should_fit(self, config: TrainConfig) -> bool:
        """Whether the formula predicts that a configuration fits; True without a prediction."""
        need = self._need(self.request(config))
        return need is None or need.ratio <= 1.0

    def _gate_by_formula(self, request: ProbeRequest) -> ProbeResult | None:
        """Refuse a request whose predicted memory exceeds the limit by more than the error."""
        need = self._need(request)
        if need is None or need.ratio <= 1 + (GATE_BAND if need.corrected else FORMULA_BAND):
            return None

        source = (
            "by formula, corrected by a similar configuration's measurement"
            if need.corrected
            else "by formula"
        )
        reason = f"needs {fmt_gib(need.gib)} of {fmt_gib(need.limit_gib)} {source}"
        oom = _predicted_oom(
            need.by_formula.phase, need.gib, need.limit_gib, need.by_formula.terms()
        )
        return _decision(request, Outcome.REFUSED, Rung.GATE, reason, oom=oom)

    def _need(self, request: ProbeRequest) -> "_Need | None":
        """The memory that the formula predicts for a request, or None without a prediction.

        If a similar configuration was measured, the prediction is multiplied by the ratio of the
        similar configuration's measured memory to its predicted memory.
        """
        config = _with_longest_rows(request)
        by_formula = self.formula(config, request.micro_steps)
        if by_formula is None:
            return None

        limit_gib = memory_limit_gib(request.memory_gib, request.headroom, taken_gib=CONTEXT_GIB)
        need = _Need(by_formula=by_formula, gib=by_formula.peak_reserved_gib, limit_gib=limit_gib)

        near = self._memory.nearest(config, request.micro_steps)
        nearest_prediction = (
            None if near is None else self.formula(near.config, near.measurement.micro_steps)
        )
        if near is None or nearest_prediction is None:
            return need
        surely = _surely_needed_gib(config, near.measurement)
        correction = surely / (
            nearest_prediction.peak_reserved_gib
            if config.num_gpus == 1
            else nearest_prediction.peak_gib
        )
        return replace(need, gib=need.gib * correction, corrected=True)

    def _low_fidelity(
        self, request: ProbeRequest, trial: int | None
    ) -> ProbeResult | Extrapolation | None:
        """Probe two truncated models; return the decision or the prediction that follows from them.

        Returns None if the truncated models predict nothing.
        """
        config = request.config
        pair = None if self.shape is None else depths_of(self.shape, config)
        if self.shape is None or pair is None or config in self._failed_truncated:
            return None

        for depth in pair:
            # Attention kernels make a plan for each new row length, and all layers use the same
            # plan. The time that this plan takes does not depend on the number of layers, so it is
            # measured with only one of the two truncated models.
            short = replace(truncate_request(request, depth), new_lengths=depth == pair[0])
            stored = self._find(short, trial, Rung.SHALLOW)
            result = stored or self._probe(short, trial, f"-depth{depth}")
            self.learn(trial, result)

            if result.outcome is Outcome.OOM:
                reason = f"{result.reason} with only {depth} of {self.shape.num_layers} layers"
                return _decision(
                    request, Outcome.OOM, Rung.SHALLOW, reason, oom=result.oom, phase=result.phase
                )
            if result.outcome is not Outcome.OK:
                self._failed_truncated[config] = result.reason or result.outcome
                return None

        predicted = self._depths.predict(config, request.micro_steps)
        if predicted is None:
            return None
        decided = self._decide_memory(request, predicted, pair)
        if self.shallow_only and isinstance(decided, Extrapolation):
            return _predicted(request, Outcome.OK, None, decided)
        return decided

    def _decide_memory(
        self, request: ProbeRequest, predicted: Extrapolation, pair: tuple[int, int]
    ) -> ProbeResult | Extrapolation:
        """Return the decision that the whole model does not fit, or the prediction if it may fit.

        `pair` has the numbers of layers of the two truncated models.
        """
        config = request.config
        measurement = predicted.measurement
        need = measurement.peak_reserved_gib
        limit = measurement.limit_gib
        if self._surely_fits(config, measurement):
            # At the limit, the allocator gives the free memory of one stream to another.
            measurement = replace(measurement, peak_reserved_gib=min(need, limit))
            return replace(predicted, measurement=measurement)
        if not self.shallow_only and self._may_fit(config, measurement):
            return predicted

        reason = (
            f"needs {fmt_gib(need)} of {fmt_gib(limit)}, "
            f"extrapolated from {pair[0]} and {pair[1]} layers"
        )
        peaks = measurement.phase_peak_gib
        phase = max(peaks, key=lambda phase: peaks[phase])
        oom = _predicted_oom(phase, need, limit, measurement.terms_gib(need))
        return _decision(
            request,
            Outcome.OOM,
            Rung.SHALLOW,
            reason,
            oom=oom,
            phase=phase,
            measurement=measurement,
        )

    def _probe(self, request: ProbeRequest, trial: int | None, suffix: str) -> ProbeResult:
        name = "settle" if trial is None else f"trial-{trial:04d}"
        result = self._measure(request, trial, self.logs / f"{name}{suffix}.log")
        seconds = self._spend(result)
        self._seconds[request.config] = self._seconds.get(request.config, 0.0) + seconds
        return result

    def _measure(self, request: ProbeRequest, trial: int | None, log: Path) -> ProbeResult:
        """Probe once, or twice if other work disturbed the first probe's times; store the result.

        If the second probe is disturbed too, the result is marked as disturbed.
        """
        result = self._add_time_parts(self._mark_disturbance(self.prober.probe(request, log)))
        if result.disturbed is None and result.outcome is Outcome.OK:
            self._in_vain = 0
        if result.disturbed is not None and self._may_repeat(request, trial, result):
            result = self._repeat(request, trial, result, log)
        if trial is None and result.disturbed is not None and request.rung is not Rung.CONFIRM:
            self._disturbed[request.digest] = result
        return self._store_result(trial, result)

    def _may_repeat(self, request: ProbeRequest, trial: int | None, first: ProbeResult) -> bool:
        """Whether a disturbed probe runs once more. A disturbed confirmation always does.

        On a machine that is never quiet, second probes would take half of the search's time for
        nothing. So after MAX_IN_VAIN disturbed second probes in a row, trials are probed once,
        until a probe is undisturbed. The finalists are measured again in any case.
        """
        if request.rung is Rung.CONFIRM:
            return True
        helps = trial is None or self._in_vain < MAX_IN_VAIN
        return helps and first.seconds.get("total", 0.0) <= self.repeat_s

    def _repeat(
        self, request: ProbeRequest, trial: int | None, first: ProbeResult, log: Path
    ) -> ProbeResult:
        """Probe again after a disturbed probe, and return the result of both.

        If the budget, the user or a kill stops the second probe, the first probe's result is used.
        """
        fingerprint = self.prober.fingerprint
        kept = self.store.keep(self.study, trial, first, fingerprint, model=self.model)
        try:
            second = self._mark_disturbance(self.prober.probe(request, log))
            doubt = f"measured twice, because the first time {first.disturbed}"
            result = merge_tries(first, second, doubt)
            self._in_vain = 0 if result.disturbed is None else self._in_vain + 1
        except (Cancelled, EnvironmentProblem):  # the next probe raises the same exception
            result = first

        self.store.discard(kept)
        return self._add_time_parts(result)

    def _mark_disturbance(self, result: ProbeResult) -> ProbeResult:
        """Return the result, marked as disturbed if other work disturbed its times."""
        if result.outcome is not Outcome.OK or result.measurement is None:
            return result
        reason = disturbance(
            result.measurement,
            on_cpu=self.prober.fingerprint.threads is not None,
            cores=num_usable_cores(),
        )
        evidence = Evidence.DISTURBED if reason else result.evidence
        return replace(result, disturbed=reason, evidence=evidence)

    def _spend(self, result: ProbeResult) -> float:
        """Add a probe's seconds to the configuration's total, and return the probe's seconds.

        In its first step, a new worker loads libraries and kernels, which takes up to half a minute
        if files are not cached. Later candidates do not pay this cost, so it is not added to the
        total: the first steps count as if they took as long as later steps. This correction is left
        out if layers are compiled.
        """
        seconds = result.seconds.get("total", 0.0)
        spent = self.whole_s if result.depth is None else self.truncated_s

        once_s = 0.0
        warm_s = result.measurement.warm_s if result.measurement else None
        if not result.warm and result.config.compile == "none" and warm_s is not None:
            once_s = max(result.seconds.get("first_step", 0.0) - warm_s, 0.0)
        spent[result.config] = spent.get(result.config, 0.0) + seconds - once_s

        if result.depth is not None:
            compiling_s = result.seconds.get("compile", 0.0)
            self.compiling_s[result.config] = self.compiling_s.get(result.config, 0.0) + compiling_s
        return seconds

    def _add_time_parts(self, result: ProbeResult) -> ProbeResult:
        """Add the host's share of the time, and the kernel times, to the result of a whole model.

        The share and the kernel times come from the probes of truncated models.
        """
        predicted = self._depths.predict_from_probes(
            result.config, self.request(result.config).micro_steps
        )
        if result.depth or result.measurement is None or predicted is None:
            return result

        shown = predicted.measurement
        measurement = replace(
            result.measurement, host_share=shown.host_share, kernels=shown.kernels
        )
        return replace(result, measurement=measurement)

    def _store_result(self, trial: int | None, result: ProbeResult) -> ProbeResult:
        self.store.add(self.study, trial, result, self.prober.fingerprint, model=self.model)
        return result

    def _count_failure(self, result: ProbeResult) -> None:
        self.failures_in_a_row = self.failures_in_a_row + 1 if result.outcome in FAILED else 0
        if self.failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            log = self.logs / (result.log or "worker.log")
            raise TooManyFailures(
                f"{self.failures_in_a_row} probes in a row failed for reasons other than memory; "
                f"the last: {result.reason}",
                remedy=f"read {log}, run `autotune doctor`, then continue with --study",
            )


def truncate_request(request: ProbeRequest, depth: int) -> ProbeRequest:
    """Return the request for a truncated model of `depth` layers.

    Its steps are timed for at least 0.7 s, or for `request.min_timed_s` if that is shorter. If a
    card is at its power limit, its speed goes up and down within tenths of a second, so times of
    less than 0.7 s would be too inaccurate.
    """
    min_timed_s = min(request.min_timed_s, 0.7)
    return replace(
        request, depth=depth, rung=Rung.SHALLOW, min_timed_s=min_timed_s, min_timed_micros=3
    )


def _ran_out_on_device(result: ProbeResult) -> bool:
    """Whether the device ran out of memory, rather than the host with offloaded activations."""
    oom = result.oom
    if oom is None or not result.config.offloads:
        return oom is not None
    return oom.allocated_gib + (oom.requested_gib or 0.0) > oom.limit_gib * (1 - HOST_BAND)


def _surely_needed_gib(config: TrainConfig, measurement: Measurement) -> float:
    """The memory that a configuration needs at least, judged by a probe that had memory to spare.

    Communication runs on its own CUDA streams. While the device has free memory, other streams do
    not reuse memory blocks that the communication freed. On two H200s, ranks therefore reserved up
    to 39 % more memory than they had allocated. So on several GPUs, only the allocated memory is
    certainly needed.
    """
    return measurement.peak_reserved_gib if config.num_gpus == 1 else measurement.peak_allocated_gib


def _tensor_share(measurement: Measurement) -> float:
    return measurement.peak_allocated_gib / measurement.limit_gib


def _decision(
    request: ProbeRequest, outcome: Outcome, rung: Rung, reason: str | None, **fields: Any
) -> ProbeResult:
    return ProbeResult(
        request_digest=request.digest,
        config=request.config,
        rung=rung,
        outcome=outcome,
        evidence=Evidence.EXTRAPOLATED,
        reason=reason,
        **fields,
    )


def _predicted(
    request: ProbeRequest, outcome: Outcome, reason: str | None, predicted: Extrapolation
) -> ProbeResult:
    """Return a decision whose measurement was predicted from truncated models."""
    decision = _decision(request, outcome, Rung.SHALLOW, reason, measurement=predicted.measurement)
    if predicted.disturbed is None:
        return decision
    return replace(decision, evidence=Evidence.DISTURBED, disturbed=predicted.disturbed)


def _predicted_oom(
    phase: Phase, need_gib: float, limit_gib: float, terms: dict[str, float]
) -> OomDetail:
    return OomDetail(
        phase=phase,
        requested_gib=None,
        allocated_gib=need_gib,
        reserved_gib=need_gib,
        limit_gib=limit_gib,
        terms_gib=terms,
    )


def _with_longest_rows(request: ProbeRequest) -> TrainConfig:
    """The configuration, with the length of the longest rows, which need the most memory."""
    return replace(request.config, seq_len=request.longest.length)

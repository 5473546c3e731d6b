"""Select the winner from the measurements of all configurations.

The result, a Recipe, also has the winner's speed-up and the caveats for the user. This module gets
the results of probes from its caller, and reads and writes no files.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autotune.catalog import EXAMPLE
from autotune.core.knobs import KNOBS
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import (
    Evidence,
    Fingerprint,
    Measurement,
    Outcome,
    ProbeResult,
    Rung,
    weakest,
)
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, fmt_hours, fmt_usd
from autotune.prediction.depth_extrapolation import Extrapolation
from autotune.prediction.projection import run_performance
from autotune.prediction.transfer import replaces_data_sheet
from autotune.problem.constraints import NEEDS_CONSENT
from autotune.problem.length_distribution import SAYS
from autotune.problem.performance import (
    AGAIN,
    DISAGREEMENT,
    TIE,
    Performance,
    step_time_s,
)
from autotune.problem.run_cost import TABLE_EXAMPLES, CostProjection, project
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.numerics import BOUND, REFERENCE, coarse_formats, deviation, reference_of
from autotune.study.ranking import Scored, choose, explain_choice, score_to_beat
from autotune.study.summary import Candidate, Recipe

# Waiting for other GPUs is reported if it takes more than this share of a micro batch's time.
WORTH_SAYING = 0.005
# If a configuration's step times in the search and in the confirmation differ by more than this
# fraction, the difference is reported.
MAX_STEP_TIME_GAP = 0.03


@dataclass(slots=True, kw_only=True)
class CandidateRecord:
    """The measurements of one configuration: search probes and confirmations.

    If there are confirmations, they are used instead of search probes. `extrapolated` is the
    measurement that was extrapolated from models with fewer layers. `undecided` is True if the
    configuration may still win according to `extrapolated`. `late_s` is how much longer the first
    step took than later steps. `cannot_win` marks a baseline that failed its confirmation; the
    winner is still compared with this baseline. `disturbed` holds results whose times were changed
    by other work on the machine. Their times are used only if there is no other result; their
    memory is always used. `reused` is True if `measured` comes from an earlier study; the machine's
    speed may have changed since then.
    """

    config: TrainConfig
    measured: Measurement | None = None
    reused: bool = False
    extrapolated: Measurement | None = None
    undecided: bool = False
    confirmed: list[Measurement] = field(default_factory=list)
    late_s: float | None = None
    cannot_win: bool = False
    disturbed: list[ProbeResult] = field(default_factory=list)

    @property
    def search_measurements(self) -> list[Measurement]:
        """The measurement that the search made, as a list of one item, or an empty list.

        A measurement of the whole model is preferred to an extrapolation, and both are preferred to
        a disturbed measurement.
        """
        measurement = self.measured or self.extrapolated
        if measurement is not None:
            return [measurement]
        return (self.disturbed_wholes or _measurements(self.disturbed))[-1:]

    @property
    def best_known(self) -> list[Measurement]:
        """The measurements to use: the confirmations or, if there are none, the search's probe."""
        return self.confirmed or self.search_measurements

    @property
    def disturbed_wholes(self) -> list[Measurement]:
        """The disturbed measurements of the whole model; their memory is valid in any case."""
        return _measurements(one for one in self.disturbed if not one.is_prediction)

    @property
    def num_confirmations(self) -> int:
        """The number of confirmations, including the disturbed ones."""
        return len(self.confirmed) + sum(one.rung is Rung.CONFIRM for one in self.disturbed)

    @property
    def evidence(self) -> Evidence:
        """How the speed was obtained (`Evidence`).

        The speed is "measured" if a probe of the whole model was undisturbed.
        """
        if self.measured or self.confirmed:
            return Evidence.MEASURED
        is_disturbed = self.disturbed and not self.extrapolated
        return Evidence.DISTURBED if is_disturbed else Evidence.EXTRAPOLATED

    @property
    def memory_evidence(self) -> Evidence:
        """How the memory was obtained (`Evidence`).

        The memory is "measured" if the whole model was probed, even if other work disturbed the
        probe.
        """
        is_whole = self.measured or self.confirmed or self.disturbed_wholes
        return Evidence.MEASURED if is_whole else Evidence.EXTRAPOLATED


@dataclass(slots=True)
class Selection:
    """The measurements of a study, as one record for each configuration.

    `records` has the digests of configurations as keys. Some knobs, such as the LoRA rank, change
    what the model learns: configurations with the same values of these knobs form a result cell.
    Reports list the best configuration of each result cell. A configuration that was pruned after
    an extrapolation may be the best of its cell, but it can win only if all configurations were
    pruned in this way. `references` holds the measurements in the reference number format, or None
    for a measurement that failed. The losses of other formats are compared with the losses of these
    measurements. `tried` holds every configuration with a result.
    """

    task: Task
    records: dict[str, CandidateRecord] = field(default_factory=dict)
    references: dict[str, Measurement | None] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)
    tried: set[TrainConfig] = field(default_factory=set)
    _worker_starts_s: list[float] = field(default_factory=list)
    _longest_load_s: float = 0.0  # the time to load the model's weights

    def add_confirmation(self, result: ProbeResult) -> bool:
        """Add the result of a confirmation and return whether it succeeded.

        A configuration whose confirmation failed can no longer win.
        """
        if result.outcome is Outcome.OK and result.measurement is not None:
            if result.disturbed is None:
                self.confirm(result.config, result.measurement)
            else:
                self._editable_record(result.config).disturbed.append(result)
            self.record_startup(result)
            return True

        fits = result.outcome not in (Outcome.OOM, Outcome.NUMERICS)
        self.reject(result.config, result.reason or result.outcome, fits=fits)
        return False

    def record(self, config: TrainConfig) -> CandidateRecord:
        """Return the record of a configuration, or an empty one if it has no result."""
        return self.records.get(config.digest) or CandidateRecord(config=config)

    def _editable_record(self, config: TrainConfig) -> CandidateRecord:
        """Return the record of a configuration, to be changed. Create the record if necessary."""
        return self.records.setdefault(config.digest, CandidateRecord(config=config))

    def add_result(self, result: ProbeResult, *, reused: bool = False) -> None:
        """Add a probe's result if it has a measurement.

        `reused` says that another study measured it.
        """
        self.tried.add(result.config)
        if result.measurement is None or result.outcome not in (Outcome.OK, Outcome.SLOW):
            return

        record = self._editable_record(result.config)
        if result.disturbed is not None:
            record.disturbed.append(result)
        elif result.is_prediction:
            record.extrapolated = result.measurement
        else:
            record.measured = result.measurement
            record.reused = reused

        if result.is_prediction:
            record.undecided = result.outcome is Outcome.OK
        else:
            self.record_startup(result)

    def record_startup(self, result: ProbeResult) -> None:
        """Record how long a whole model's probe took to start, to load, and for its first step."""
        seconds = result.seconds
        measurement = result.measurement
        if "start" in seconds:
            self._worker_starts_s.append(seconds["start"])
        self._longest_load_s = max(self._longest_load_s, seconds.get("load", 0.0))

        if "first_step" in seconds and measurement is not None:
            # The phase `first_step` lasts until the step times are steady, and for at least two
            # steps.
            warm_s = measurement.warm_s
            warm_s = (
                2 * step_time_s(measurement, measurement.micro_steps) if warm_s is None else warm_s
            )
            late_s = max(seconds["first_step"] - warm_s, 0.0)
            record = self._editable_record(result.config)
            record.late_s = max(record.late_s or 0.0, late_s)

    def startup_s(self, config: TrainConfig) -> float | None:
        """The seconds until a run first reaches its full speed.

        These seconds cover starting the worker, loading the model, and the first step with its
        compilation. The result is None if the seconds were not measured, or were measured on other
        GPUs.
        """
        late_s = self.record(config).late_s
        if not self._worker_starts_s or late_s is None or self.task.is_projected(config):
            return None
        return statistics.median(self._worker_starts_s) + self._longest_load_s + late_s

    def confirm(self, config: TrainConfig, measurement: Measurement) -> None:
        """Add a confirmation of a configuration."""
        record = self._editable_record(config)
        record.cannot_win = False
        record.confirmed.append(measurement)

    def reject(self, config: TrainConfig, reason: str, *, fits: bool = False) -> None:
        """Exclude a configuration that failed its confirmation.

        If `fits` is True, the configuration is a baseline that is kept: it cannot win, but the
        winner is still compared with it. Otherwise a smaller and slower baseline would take its
        place, and the speed-up would be exaggerated.
        """
        self.caveats.append(
            f"{config.label()} succeeded in the search but failed its confirmation: {reason}"
        )

        record = self._editable_record(config)
        if fits and config in self.task.baselines:
            record.cannot_win = True
            return
        record.measured = record.extrapolated = None
        record.confirmed = []
        record.disturbed = []

    def close_calls(self) -> list[TrainConfig]:
        """Return the extrapolated configurations that should be measured as whole models.

        The best comes first. The result has the best configuration of each result cell, unless it
        costs too much: more than the slack (5 % by default) above the cheapest measured
        configuration. The result also has extrapolated configurations that may still beat all
        measured configurations.
        """
        slack = self.task.floors.slack
        pool = self._score(
            (record, [record.measured]) for record in self.records.values() if record.measured
        )
        if not pool:
            return []

        everything = self._score(
            (record, record.search_measurements) for record in self._records_by_evidence()
        )
        min_score = max(scored.score for scored in pool) / (1 + slack)
        candidates = [scored for scored in _best_of_cells(everything) if scored.score >= min_score]

        for scored in everything:
            extrapolated = self.record(scored.config).extrapolated
            if extrapolated and scored.score * (1 + extrapolated.time_error) >= score_to_beat(
                scored, pool, slack
            ):
                candidates.append(scored)

        ranked = sorted(
            candidates, key=lambda scored: (scored.config.capability, scored.score), reverse=True
        )
        configs = dict.fromkeys(scored.config for scored in ranked)
        return [config for config in configs if self.record(config).measured is None]

    def leader(self) -> TrainConfig | None:
        """Return the present winner.

        The winner is a confirmed configuration, or an unconfirmed one that surely beats the best
        confirmed one.
        """
        pool = self._add_faster(self._score_confirmed())
        return choose(pool, self.task.floors.slack).config if pool else None

    def may_win(self, config: TrainConfig) -> bool:
        """Whether a configuration may still win, given the noise of the confirmations.

        The configuration may still win if it would be chosen after its score is raised by the noise
        and all other scores are lowered by the noise. The result is also True if all confirmations
        of the configuration were disturbed.
        """
        record = self.record(config)
        if record.num_confirmations and not record.confirmed:
            return True
        favour = 1 + max(AGAIN, self.noise(config))
        tilted = [
            replace(
                scored,
                score=scored.score * favour if scored.config == config else scored.score / favour,
            )
            for scored in self._score_confirmed()
        ]
        return bool(tilted) and choose(tilted, self.task.floors.slack).config == config

    def rival(self) -> TrainConfig | None:
        """Return the configuration that would win if unconfirmed measurements were also considered.

        The result is None if this configuration is confirmed, or if it ties with the best confirmed
        configuration. Once a configuration is confirmed, the result is also None for a run with a
        deadline, because only confirmations measure the run's pauses for evaluation and
        checkpoints.
        """
        contenders, confirmed = self._known_contenders(), self._score_confirmed()
        if not contenders or (confirmed and self.task.within_hours is not None):
            return None

        slack = self.task.floors.slack
        likely = choose(contenders, slack)
        is_new = self.record(likely.config).num_confirmations == 0
        ties = bool(confirmed) and likely.equals(choose(confirmed, slack))
        return likely.config if is_new and not ties else None

    def missing_reference(self, config: TrainConfig) -> TrainConfig | None:
        """Return a configuration's reference if the reference was not measured yet, or None.

        The losses of the configuration are compared with the losses of the reference.
        """
        reference = self._reference_of(config)
        return None if reference is None or reference.digest in self.references else reference

    def distrust_reason(self, config: TrainConfig) -> str | None:
        """Why a configuration's number formats cannot be trusted, or None if they can."""
        difference = self._deviation(config)
        if difference is None or difference <= BOUND:
            return None
        return (
            f"its losses differ by {difference:.1%} from the losses with {REFERENCE} "
            f"(at most {BOUND:.0%} is allowed)"
        )

    def _reference_of(self, config: TrainConfig) -> TrainConfig | None:
        if (
            self.task.model.weights is None
            or self.task.is_simulated(config)
            or not coarse_formats(config)
        ):
            return None
        return reference_of(config, bf16=self.task.device.supports_bf16)

    def _deviation(self, config: TrainConfig) -> float | None:
        reference = self._reference_of(config)
        record = self.record(config)
        measured = record.measured or next(iter(record.disturbed_wholes), None)
        wanted = self.references.get(reference.digest) if reference else None
        return None if wanted is None or measured is None else deviation(measured, wanted)

    def _numerics_in_words(self, config: TrainConfig) -> str:
        """Say in words how much a configuration's number formats change its losses."""
        doubtful = coarse_formats(config)
        if not doubtful:
            return f"no number format needs a comparison with {REFERENCE}"

        if self.task.model.weights is None:
            return f"unknown: with random weights, the loss does not show the effect of {doubtful}"
        if self.task.is_simulated(config):
            return (
                "unknown: one GPU simulated one of several ranks, so the loss does not show the "
                f"effect of {doubtful}"
            )
        difference = self._deviation(config)
        if difference is None:
            return f"unknown: {doubtful} was not compared with {REFERENCE}"
        return (
            f"with {doubtful}, the losses differ by {difference:.2%} from the losses with "
            f"{REFERENCE} [measured]"
        )

    def baseline(self) -> TrainConfig | None:
        """The first of the task's baselines that was measured or extrapolated, or None."""
        known = {record.config for record in self.records.values() if record.best_known}
        return next((config for config in self.task.baselines if config in known), None)

    def pool(self) -> list[Scored]:
        """Return the configurations that may win, with scores from the search's measurements."""
        return self._score(
            (record, record.search_measurements)
            for record in self._contenders()
            if record.search_measurements
        )

    def finalists(self, count: int) -> list[TrainConfig]:
        """Return the configurations to confirm: `count`, plus one for each other number of GPUs.

        The likely winner comes first. The best configurations for the other numbers of GPUs follow,
        and then the fastest of the remaining configurations.
        """
        pool = self.pool()
        if not pool:
            return []
        likely = choose(pool, self.task.floors.slack)

        of_others = [
            best
            for best in self._best_of_numbers(pool)
            if best.config.num_gpus != likely.config.num_gpus
        ]

        ranked = sorted(pool, key=lambda scored: scored.score, reverse=True)
        ordered = dict.fromkeys(scored.config for scored in [likely, *of_others, *ranked])
        return list(ordered)[: count + len(of_others)]

    def _best_of_numbers(self, pool: list[Scored]) -> list[Scored]:
        """Return the best configuration for each number of GPUs, the smallest number first."""
        by_number: dict[int, list[Scored]] = {}
        for scored in pool:
            by_number.setdefault(scored.config.num_gpus, []).append(scored)
        return [choose(by_number[number], self.task.floors.slack) for number in sorted(by_number)]

    def predicted_speed(self, config: TrainConfig, extrapolation: Extrapolation) -> float:
        """The useful tokens/s of the full run, predicted from models with fewer layers."""
        return run_performance(self.task, config, [extrapolation.measurement]).tokens_per_second

    def prune_reason(self, config: TrainConfig, extrapolation: Extrapolation) -> str | None:
        """The reason why an extrapolated configuration cannot win, or None if it may win.

        The configuration competes only with others for the same number of GPUs.
        """
        others = [scored for scored in self.pool() if scored.config.num_gpus == config.num_gpus]
        if not others:
            return None

        task = self.task
        error = extrapolation.time_error
        measurement = extrapolation.measurement
        speed = self.predicted_speed(config, extrapolation)
        free_fraction = 1 - measurement.peak_reserved_gib / measurement.limit_gib
        score = task.score(config, speed)
        host_bound = self.is_host_bound(config, [measurement])
        own = Scored(config=config, score=score, free_fraction=free_fraction, host_bound=host_bound)

        bar = score_to_beat(own, others, task.floors.slack)
        if task.score(config, speed * (1 + error)) >= bar:
            return None

        if task.is_late(config, speed) and bar > 2 * score:  # it misses the deadline, others do not
            return (
                f"predicted {speed:,.0f} tokens/s (±{error:.0%}): it would end too late (--within)"
            )
        needed = bar * speed / score
        return f"predicted {speed:,.0f} tokens/s (±{error:.0%}), {needed:,.0f} are needed to win"

    def candidate(self, config: TrainConfig) -> Candidate:
        """Return a configuration with its speed, memory and cost, and the evidence for each."""
        task = self.task
        record = self.record(config)
        performance = run_performance(task, config, record.best_known)
        if self._disagreement_text(config) is not None:
            repeats = run_performance(task, config, self._repeats(config))
            performance = performance.cover(repeats)
        known = [*record.best_known, *record.disturbed_wholes]
        largest = max(known, key=lambda measurement: measurement.peak_reserved_gib)
        cost = self._project(config, performance, largest)
        evidence = record.evidence
        if task.is_projected(config):
            evidence = weakest(evidence, Evidence.PROJECTED)

        return Candidate(
            config=config,
            performance=performance,
            measurement=largest,
            cost=replace(cost, evidence=evidence, startup_s=self.startup_s(config)),
            evidence=evidence,
            memory_evidence=record.memory_evidence,
        )

    def _project(
        self,
        config: TrainConfig,
        performance: Performance,
        largest: Measurement,
        examples: int | None = None,
        of: list[Measurement] | None = None,
    ) -> CostProjection:
        """The cost of the full run, or of a run with `examples` examples if this number is given.

        `of` has the measurements to use, by default `best_known`. If the probes ran on other GPUs
        than the target, the run's pauses for evaluation and checkpoints are unknown.
        """
        task = self.task
        return project(
            task.workload,
            config,
            performance,
            task.price and task.price.multiply(config.num_gpus),
            self._power_w(config, largest),
            examples=examples,
            options=task.run_options,
            measurements=self.record(config).best_known if of is None else of,
            on_cpu=task.device.kind == "cpu",
            on_target=not task.is_projected(config),
        )

    def _power_w(self, config: TrainConfig, measurement: Measurement) -> float | None:
        """The power of all devices in W. Each device is assumed to draw as much power as the first.

        The power is None if the probes ran on other GPUs than the target.
        """
        telemetry = None if self.task.is_projected(config) else measurement.telemetry
        return telemetry.power_w and telemetry.power_w * config.num_gpus if telemetry else None

    def recipe(self, fingerprint: Fingerprint) -> Recipe | None:
        """Return the winner with all facts about it, or None without any measurement."""
        likely = self.finalists(1)
        # If the likely winner is unconfirmed, the study ended early, and unconfirmed configurations
        # may win, too.
        in_time = likely and self.record(likely[0]).confirmed
        pool = self._add_faster(self._score_confirmed() if in_time else self._known_contenders())
        if not pool:
            return None

        winner = choose(pool, self.task.floors.slack)
        task = self.task
        baseline = self.baseline()
        best = self.candidate(winner.config)
        everything = self._score(
            (record, record.best_known) for record in self._records_by_evidence()
        )
        others = [
            one for one in self._known_contenders() if one.config.num_gpus != winner.config.num_gpus
        ]
        # A number of GPUs is represented by a confirmed configuration, if it has one.
        confirmed = [one for one in others if self.record(one.config).confirmed]
        with_confirmed = {one.config.num_gpus for one in confirmed}
        others = confirmed + [one for one in others if one.config.num_gpus not in with_confirmed]
        of_numbers = sorted(
            [winner, *self._best_of_numbers(others)], key=lambda scored: scored.config.num_gpus
        )

        device = task.device
        most = Parallelism.of(of_numbers[-1].config)
        if (calibrated := task.calibrated_link_gb_s(most)) is not None:
            device = replace(device, link_gb_s=calibrated, pair_gb_s=None, link_by_rule=False)

        return Recipe(
            study=task.study,
            model=task.model,
            device=device,
            price=task.price and task.price.multiply(winner.config.num_gpus),
            workload=task.workload,
            winner=best,
            baseline=self.candidate(baseline) if baseline else None,
            reason=explain_choice(
                winner,
                pool,
                task.floors.slack,
                task.space,
                self.tried,
                _winner_in_words(task, best),
            ),
            trainer=task.trainer,
            fingerprint=fingerprint,
            by_examples=tuple(
                replace(
                    self._project(best.config, best.performance, best.measurement, examples),
                    evidence=best.cost.evidence,
                )
                for examples in TABLE_EXAMPLES
            ),
            cells=tuple(
                self.candidate(scored.config)
                for scored in _best_of_cells(everything)
                if scored.config.num_gpus == winner.config.num_gpus
            ),
            by_gpus=tuple(self.candidate(scored.config) for scored in of_numbers),
            within_hours=task.within_hours,
            example_gib=task.example_gib,
            numerics=self._numerics_in_words(winner.config),
            run_options=task.run_options,
            disagreement=self._disagreements(baseline, winner.config) if baseline else None,
            alone=len(self.tried) == 1,
            caveats=(*self.caveats, *_assumptions(task, best), *self._doubts(winner, pool)),
        )

    def noise(self, config: TrainConfig) -> float:
        """The relative standard deviation of a configuration's timed steps; 0 for a single step."""
        steps = [
            step for measurement in self.record(config).best_known for step in measurement.step_s
        ]
        return statistics.pstdev(steps) / statistics.fmean(steps) if len(steps) > 1 else 0.0

    def disagreement(self, config: TrainConfig) -> float:
        """By how much the step times of a configuration's confirmations differ from each other.

        The result is the longest step time divided by the shortest, minus 1. If there is only one
        confirmation, it is compared with the search's measurement.
        """
        accumulation = self.task.workload.run_shape(config).accumulation
        steps = [step_time_s(measurement, accumulation) for measurement in self._repeats(config)]
        return max(steps) / min(steps) - 1.0 if steps else 0.0

    def _repeats(self, config: TrainConfig) -> list[Measurement]:
        """Return the confirmations. If there is only one, also return the search's measurement."""
        record = self.record(config)
        if len(record.confirmed) != 1 or record.measured is None or record.reused:
            return record.confirmed
        return [*record.confirmed, record.measured]

    def _disagreement_text(self, config: TrainConfig) -> str | None:
        """Say by how much the measurements of a configuration differ, or None if they agree."""
        difference = self.disagreement(config)
        if difference <= DISAGREEMENT:
            return None
        return f"measurements of {config.label()} differ by {difference:.0%}"

    def _disagreements(self, *configs: TrainConfig) -> str | None:
        """Join the disagreements of several configurations, or return None if there are none."""
        texts = map(self._disagreement_text, dict.fromkeys(configs))
        return "; ".join(filter(None, texts)) or None

    def _contenders(self) -> list[CandidateRecord]:
        """Return the records that were measured, or whose extrapolation says that they may win.

        If there is no such record, return all records with a measurement or an extrapolation.
        """
        known = [record for record in self.records.values() if record.best_known]
        return [
            record for record in known if record.measured or record.confirmed or record.undecided
        ] or known

    def _records_by_evidence(self) -> list[CandidateRecord]:
        """Return the records with a measurement or an extrapolation from the search.

        Records with an extrapolation come first.
        """
        known = [record for record in self.records.values() if record.search_measurements]
        return sorted(known, key=lambda record: record.extrapolated is None)

    def _score_confirmed(self) -> list[Scored]:
        return self._score(
            (record, record.confirmed) for record in self.records.values() if record.confirmed
        )

    def _known_contenders(self) -> list[Scored]:
        """Return the configurations that may win, scored by their best known measurements."""
        return self._score((record, record.best_known) for record in self._contenders())

    def _add_faster(self, pool: list[Scored]) -> list[Scored]:
        """Return the pool, and the unconfirmed configurations that surely beat its winner.

        The budget may leave no time to confirm these configurations, and a slower configuration
        must not win only because it was confirmed. All other contenders and the baseline are
        checked. A configuration is added under two conditions: its score at its slowest step
        exceeds the winner's score at the winner's fastest step, and it would also win with this
        lower score. Because of the second condition, a less capable configuration does not replace
        a winner that costs little more. For a run with a deadline, no
        contender is added: only confirmations measure the run's pauses for evaluation and
        checkpoints. The baseline is added nevertheless.
        """
        if not pool:
            return pool

        slack = self.task.floors.slack
        baseline = self.baseline()
        present = {scored.config for scored in pool}
        winner = choose(pool, slack)

        records = [] if self.task.within_hours is not None else self._contenders()
        records += [self.record(baseline)] if baseline else []
        others = {record.config: record for record in records if record.config not in present}
        known = self._score((record, record.best_known) for record in others.values())

        slowest = {
            scored.config: replace(scored, score=scored.score / (1 + scored.spread[1]))
            for scored in known
        }

        return pool + [
            scored
            for scored in known
            if scored.beats(winner)
            and choose([winner, slowest[scored.config]], slack).config == scored.config
        ]

    def is_host_bound(
        self, config: TrainConfig, measurements: list[Measurement] | None = None
    ) -> bool:
        """Whether `measurements`, by default the best known ones, show a CPU-bound configuration.

        The result is False if the probes ran on other GPUs than the target.
        """
        known = self.record(config).best_known if measurements is None else measurements
        return not self.task.is_projected(config) and any(
            measurement.host_bound for measurement in known
        )

    def _score(self, known: Iterable[tuple[CandidateRecord, list[Measurement]]]) -> list[Scored]:
        """Score each record that can win. `known` pairs each record with its measurements."""
        pool = []
        for record, measurements in known:
            if record.cannot_win:
                continue

            performance = run_performance(self.task, record.config, measurements)
            used = max(
                measurement.peak_reserved_gib / measurement.limit_gib
                for measurement in measurements
            )
            noise = max(TIE, self.noise(record.config))
            largest = max(measurements, key=lambda measurement: measurement.peak_reserved_gib)

            # The run's duration takes long to compute, and is needed only if the run has a
            # deadline.
            hours = None
            if self.task.within_hours is not None:
                hours = self._project(
                    record.config, performance, largest, of=measurements
                ).full_run_hours

            score = self.task.score(record.config, performance.tokens_per_second, hours)
            pool.append(
                Scored(
                    config=record.config,
                    score=score,
                    free_fraction=1.0 - used,
                    host_bound=self.is_host_bound(record.config, measurements),
                    noise=noise,
                    spread=performance.own_spread or performance.spread,
                )
            )
        return pool

    def _doubts(self, winner: Scored, pool: list[Scored]) -> list[str]:
        """List the reasons to doubt the winner that follow from the measurements."""
        record = self.record(winner.config)
        baseline = self.baseline()
        if all(
            one.evidence is Evidence.EXTRAPOLATED for one in self.records.values() if one.best_known
        ):
            return [
                "nothing was probed at full depth: every number is extrapolated from a few layers"
            ]

        doubts = []
        if baseline is not None and self.record(baseline).evidence is Evidence.EXTRAPOLATED:
            doubts.append(
                "the baseline was not probed at full depth: its speed is extrapolated from a few "
                "layers"
            )
        if record.evidence is Evidence.EXTRAPOLATED:
            return [
                *doubts,
                "the winner was not probed at full depth: its numbers are extrapolated from a few "
                "layers",
            ]
        if record.evidence is Evidence.MEASURED and not record.confirmed:
            return [*doubts, "the winner was not measured a second time: the study was cut short"]

        if record.measured and record.confirmed:
            # A confirmation that had little time has fewer micro batches per step. So the step time
            # that the search measured is converted to the same number of micro batches.
            gap = statistics.median(
                step_time_s(record.measured, one.micro_steps) / statistics.median(one.step_s) - 1.0
                for one in record.confirmed
            )
            if abs(gap) > MAX_STEP_TIME_GAP:
                doubts.append(
                    f"the search's step time differed by {gap:+.1%} from the confirmed time,"
                    " which is reported"
                )

        telemetry = [
            measurement.telemetry for measurement in record.confirmed if measurement.telemetry
        ]
        reasons = {reason for reading in telemetry for reason in reading.slowed_by}
        if reasons:
            doubts.append(
                f"the GPU was throttled during the measurement: {', '.join(sorted(reasons))}"
            )

        for config in dict.fromkeys((winner.config, self.baseline() or winner.config)):
            doubts += self._doubts_about(config)

        rivals = [
            scored.config.label() for scored in pool if scored is not winner and scored.ties(winner)
        ]
        if rivals:
            measure = "speed" if len(self.task.numbers_of_gpus) == 1 else "cost per token"
            doubts.append(
                f"the winner is not distinguishable in {measure} from {', '.join(rivals)}"
            )
        return doubts

    def _doubts_about(self, config: TrainConfig) -> list[str]:
        """List the reasons to doubt the measurements of one configuration."""
        record = self.record(config)
        doubts = []
        if record.evidence is Evidence.DISTURBED:
            reason = record.disturbed[-1].disturbed
            doubts.append(f"every measurement of {config.label()} was disturbed: {reason}")

        if (disagreement := self._disagreement_text(config)) is not None:
            doubts.append(
                f"{disagreement}: something disturbed them, so the intervals cover all of them"
            )

        shares = [
            measurement.host_share or 0.0
            for measurement in record.best_known
            if measurement.host_bound
        ]
        if shares:
            doubts.append(
                f"{config.label()} is CPU-bound: issuing the kernels takes the host "
                f"{min(max(shares), 1.0):.0%} of the time of a micro batch, so the speed "
                "changes with other work on the host"
            )
        return doubts


def _measurements(results: Iterable[ProbeResult]) -> list[Measurement]:
    """Return the measurements of all results that have a measurement."""
    return [result.measurement for result in results if result.measurement is not None]


def _winner_in_words(task: Task, winner: Candidate) -> str:
    """Describe the configuration with the highest score, such as "the cheapest"."""
    if task.within_hours is None:
        return "the cheapest"
    within = fmt_hours(task.within_hours)
    late = winner.cost.full_run_hours > task.within_hours
    return (
        f"the fastest, because no configuration ends within {within},"
        if late
        else f"the cheapest that ends within {within}"
    )


def _best_of_cells(pool: list[Scored]) -> list[Scored]:
    """Return the fastest configuration of each result cell (see `Selection`)."""
    names = [knob.name for knob in KNOBS.values() if knob.separates_results]
    best = {
        tuple(getattr(scored.config, name) for name in names): scored
        for scored in sorted(pool, key=lambda scored: scored.score)
    }
    return list(best.values())


def _example_values(task: Task) -> str:
    """Say which values of an example card are invented, or return "" for a real device.

    Example: '0.30 GiB (--memory-gib) and $0.60/h (--price) are made up'.
    """
    parts = [] if task.example_gib is None else [f"{fmt_gib(task.example_gib)} (--memory-gib)"]
    if task.price is not None and task.price.provider == EXAMPLE:
        parts.append(f"{fmt_usd(task.price.usd_per_hour)}/h (--price)")
    return f"{' and '.join(parts)} {'are' if len(parts) > 1 else 'is'} made up" if parts else ""


def _assumed_examples(workload: Workload) -> list[str]:
    """List the assumptions about the lengths and the number of the examples, in words."""
    caveats = []
    lengths = workload.lengths
    if lengths.source == "assumed":
        caveats.append(
            f"the length of an example was not given: {lengths.longest:,} tokens are assumed "
            "(--dataset, --lengths or --tokens-per-example)"
        )
    if lengths.source in ("characters", "summary"):
        caveats.append(f"the lengths of the examples are {SAYS[lengths.source]}, not counted")
    if workload.examples_assumed:
        caveats.append(
            f"the number of examples was not given: {workload.examples:,} are assumed (--examples)"
        )
    return caveats


def _assumptions(task: Task, winner: Candidate) -> list[str]:
    """List the assumptions about the data and the device behind a winner's numbers, in words."""
    config = winner.config
    workload = task.workload
    lengths = workload.lengths
    caveats = [
        f"{name} {getattr(config, name)}: {what}; "
        f"searched because nothing else fits (--{floor.replace('_', '-')})"
        for name, (floor, may_win, what) in NEEDS_CONSENT.items()
        if not (getattr(task.floors, floor) or may_win(getattr(config, name)))
        and any(map(may_win, task.space.choices(name)))
    ]

    if task.within_hours is not None and winner.cost.full_run_hours > task.within_hours:
        late = fmt_hours(winner.cost.full_run_hours)
        caveats.append(
            f"nothing that was tried ends within {fmt_hours(task.within_hours)}: "
            f"the run takes {late}"
        )

    if skewed := winner.measurement.skewed:
        caveats.append(
            "probes load the experts of a mixture evenly, trained routers do not: a micro batch "
            f"takes {skewed.ratio:.2f} times as long if the busiest expert of each layer gets "
            f"{skewed.hottest:.3g} times the mean number of tokens [measured]"
        )

    if made_up := _example_values(task):
        caveats.append(f"an example card takes the place of a GPU: {made_up}")
    caveats += _assumed_examples(workload)

    if task.measured_on is not None and task.carried is not None:
        faster = f"{task.carried.products:.3g} times as fast, memory {task.carried.bytes:.3g} times"
        ends = [
            card.name
            for card in (task.measured_on, task.device)
            if replaces_data_sheet(task.calibration, card)
        ]
        calibrated = f", {ends[0]} {task.calibration.label}" if ends and task.calibration else ""

        host = task.carried.host
        of_host = (
            "takes as long as here"
            if host is None
            else f"is {host:.3g} times as fast, because both hosts were calibrated"
        )
        caveats.append(
            f"probed on {task.measured_on.name} with its memory capped to the memory "
            f"of {task.device.name}: memory is measured; speeds are projected from data sheets"
            f"{calibrated} (matrix products {faster}); the host's work {of_host}; "
            "power, clocks and kernels come from the GPU that ran the probes"
        )

    if (
        task.is_simulated(config)
        and (link_gb_s := task.link_gb_s(Parallelism.of(config))) is not None
    ):
        by_rule = task.is_link_by_rule(Parallelism.of(config))
        source = " (from the data sheet, not measured)" if by_rule else ""
        caveats.append(
            f"one GPU simulated one of {config.num_gpus} ranks: memory and computation are "
            "measured, with memory reserved for NCCL; communication between the GPUs at "
            f"{link_gb_s:,.0f} GB/s{source} is added by formula"
        )

    if (share := workload.waiting_share(config)) > WORTH_SAYING:
        caveats.append(
            f"micro batches take {share:.0%} longer on {config.num_gpus} GPUs, which wait for the "
            "one with the longest sequences (computed from the lengths of the examples, with time "
            "proportional to tokens); packing avoids this wait"
        )

    cut = workload.truncated(config.seq_len)
    if cut > 0:
        longer = lengths.longer(config.seq_len)
        caveats.append(
            f"{cut:.1%} of the tokens are cut off at seq_len {config.seq_len}, "
            f"from {longer:.1%} of the examples"
        )

    if config.packing:
        per_step = workload.run_shape(config).examples_per_step
        caveats.append(
            f"sequences are packed: {workload.examples_per_row(config):.1f} examples per sequence "
            f"on average, with {workload.fill(config):.1%} of the tokens used; a step has "
            f"{per_step:.1f} examples on average, {workload.global_batch} were requested"
        )
    elif len(lengths.counts) > 1:
        caveats.append(
            f"{1 - workload.fill(config):.0%} of the tokens in a sequence (on average "
            f"{workload.tokens_per_row(config):,.0f}) are padding, "
            "which tokens/s does not count"
        )
    return caveats

"""What is known of each configuration, which one wins, by how much, and what a reader should know about it.

Pure: results go in, a Recipe comes out.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autotune.catalog import EXAMPLE
from autotune.core.knobs import KNOBS
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Evidence, Fingerprint, Measurement, Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib, fmt_hours, fmt_usd
from autotune.prediction.depth_extrapolation import Extrapolation
from autotune.prediction.projection import run_performance
from autotune.prediction.transfer import calibrates
from autotune.problem.constraints import UNASKED
from autotune.problem.length_distribution import SAYS
from autotune.problem.performance import AGAIN, TIE, Performance, step_time_s
from autotune.problem.run_cost import TABLE_EXAMPLES, CostProjection, project
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.numerics import BOUND, REFERENCE, deviation, in_question, reference_of
from autotune.study.ranking import Scored, choose, to_beat, why
from autotune.study.summary import Candidate, Recipe

# Measurements of one configuration that differ by more than this were disturbed: one more is taken, the median counts.
DISAGREEMENT = 0.05
WORTH_SAYING = 0.005  # of the time of a step
MAX_STEP_TIME_GAP = 0.03  # relative, between search and confirmation; a larger gap is reported


@dataclass(slots=True, kw_only=True)
class CandidateRecord:
    """What is known of one configuration: probes of the search, and its confirmations, which outrank them.

    `extrapolated` rests on truncated models, `undecided` says that it could win by that. `late_s` is by how many
    seconds the first step was longer than the others.
    A baseline that failed its confirmation `cannot_win`, but is still what the winner is compared with.
    """

    config: TrainConfig
    measured: Measurement | None = None
    extrapolated: Measurement | None = None
    undecided: bool = False
    confirmed: list[Measurement] = field(default_factory=list)
    late_s: float | None = None
    cannot_win: bool = False

    @property
    def of_search(self) -> list[Measurement]:
        """The measurement of the search: of the whole model, or else extrapolated. Empty if there is none."""
        found = self.measured or self.extrapolated
        return [found] if found else []

    @property
    def best_known(self) -> list[Measurement]:
        """The measurements that count: the confirmations, or else that of the search."""
        return self.confirmed or self.of_search

    @property
    def evidence(self) -> Evidence:
        """Measured if the whole model was ever probed."""
        return Evidence.MEASURED if self.measured or self.confirmed else Evidence.EXTRAPOLATED


@dataclass(slots=True)
class Selection:
    """The records of all configurations by digest.

    Configurations that were extrapolated and pruned stand apart: they may be the best of a result cell, and can win
    only if nothing else has a number. `references` has the reference measurements for losses, None for those that
    failed. `tried` has every configuration that came to a result.
    """

    task: Task
    records: dict[str, CandidateRecord] = field(default_factory=dict)
    references: dict[str, Measurement | None] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)
    tried: set[TrainConfig] = field(default_factory=set)
    _worker_starts_s: list[float] = field(default_factory=list)
    _longest_load_s: float = 0.0  # of the model's weights

    def add_confirmation(self, result: ProbeResult) -> bool:
        """Take over the result of a confirmation. Returns whether it succeeded; if not, the configuration is out."""
        if result.outcome is Outcome.OK and result.measurement is not None:
            self.confirm(result.config, result.measurement)
            self.record_startup(result)
            return True
        fits = result.outcome not in (Outcome.OOM, Outcome.NUMERICS)
        self.reject(result.config, result.reason or result.outcome, fits=fits)
        return False

    def record(self, config: TrainConfig) -> CandidateRecord:
        """The record of a configuration; an empty one if nothing is known of it."""
        return self.records.get(config.digest) or CandidateRecord(config=config)

    def _own(self, config: TrainConfig) -> CandidateRecord:
        """The record of a configuration, to be written."""
        return self.records.setdefault(config.digest, CandidateRecord(config=config))

    def add_result(self, result: ProbeResult) -> None:
        """Take over a probe's result, if it has a number."""
        self.tried.add(result.config)
        if result.measurement is None or result.outcome not in (Outcome.OK, Outcome.SLOW):
            return
        if result.evidence is Evidence.MEASURED:
            self._own(result.config).measured = result.measurement
            self.record_startup(result)
        else:
            record = self._own(result.config)
            record.extrapolated, record.undecided = result.measurement, result.outcome is Outcome.OK

    def record_startup(self, result: ProbeResult) -> None:
        """Take over how long worker, model and first step of a whole model took."""
        seconds, measurement = result.seconds, result.measurement
        if "start" in seconds:
            self._worker_starts_s.append(seconds["start"])
        self._longest_load_s = max(self._longest_load_s, seconds.get("load", 0.0))
        if "first_step" in seconds and measurement is not None:
            # That phase lasts until the steps settle, for two steps at least.
            warm_s = measurement.warm_s
            warm_s = 2 * step_time_s(measurement, measurement.micro_steps) if warm_s is None else warm_s
            late_s = max(seconds["first_step"] - warm_s, 0.0)
            record = self._own(result.config)
            record.late_s = max(record.late_s or 0.0, late_s)

    def startup_s(self, config: TrainConfig) -> float | None:
        """Seconds until a run has its full speed for the first time: worker, model, and first step with compilation.

        None if this was not measured, or on other GPUs.
        """
        late_s = self.record(config).late_s
        if not self._worker_starts_s or late_s is None or self.task.is_projected(config):
            return None
        return statistics.median(self._worker_starts_s) + self._longest_load_s + late_s

    def confirm(self, config: TrainConfig, measurement: Measurement) -> None:
        """Add a confirmation of a configuration."""
        record = self._own(config)
        record.cannot_win = False
        record.confirmed.append(measurement)

    def reject(self, config: TrainConfig, reason: str, *, fits: bool = False) -> None:
        """Exclude a configuration that failed its confirmation.

        A baseline that `fits` is still what the winner is compared with: a slower one would flatter the winner.
        """
        self.caveats.append(f"{config.label()} succeeded in the search but failed its confirmation: {reason}")
        record = self._own(config)
        if fits and config in self.task.baselines:
            record.cannot_win = True
            return
        record.measured = record.extrapolated = None
        record.confirmed = []

    def close_calls(self) -> list[TrainConfig]:
        """Extrapolated configurations that are worth a whole model, the most promising first.

        These are the best of each result cell within the slack of the fastest; and those that can win by now, since
        what they had to beat when they were pruned may have fallen out of the slack.
        """
        slack = self.task.floors.slack
        pool = self._scored((record, [record.measured]) for record in self.records.values() if record.measured)
        if not pool:
            return []
        everything = self._scored((record, record.of_search) for record in self._by_evidence())
        min_score = max(scored.score for scored in pool) / (1 + slack)
        close = [scored for scored in _best_of_cells(everything) if scored.score >= min_score]
        for scored in everything:
            extrapolated = self.record(scored.config).extrapolated
            if extrapolated and scored.score * (1 + extrapolated.time_error) >= to_beat(scored, pool, slack):
                close.append(scored)
        ranked = sorted(close, key=lambda scored: (scored.config.capability, scored.score), reverse=True)
        configs = dict.fromkeys(scored.config for scored in ranked)
        return [config for config in configs if self.record(config).measured is None]

    def leader(self) -> TrainConfig | None:
        """The winner among the confirmed configurations so far, and those that are certainly faster than it."""
        pool = self._with_faster(self._confirmed())
        return choose(pool, self.task.floors.slack).config if pool else None

    def may_win(self, config: TrainConfig) -> bool:
        """Whether a configuration wins by its confirmations so far, or would if the next round favours it."""
        favour = 1 + max(AGAIN, self.noise(config))
        tilted = [
            replace(scored, score=scored.score * favour if scored.config == config else scored.score / favour)
            for scored in self._confirmed()
        ]
        return bool(tilted) and choose(tilted, self.task.floors.slack).config == config

    def rival(self) -> TrainConfig | None:
        """Who wins by all that is known, if it is not confirmed and does not equal the leader of those that are.

        None before anything is confirmed, and where there is a deadline: confirmations alone know what pauses take.
        """
        confirmed = self._confirmed()
        if not confirmed or self.task.within_hours is not None:
            return None
        slack = self.task.floors.slack
        likely, leader = choose(self._known_contenders(), slack), choose(confirmed, slack)
        is_new = all(scored.config != likely.config for scored in confirmed)
        return likely.config if is_new and not likely.equals(leader) else None

    def missing_reference(self, config: TrainConfig) -> TrainConfig | None:
        """The reference that must be measured before the losses of this configuration can be compared."""
        reference = self._reference_of(config)
        return None if reference is None or reference.digest in self.references else reference

    def unsound(self, config: TrainConfig) -> str | None:
        """Why the number formats of a configuration are not to be trusted; None if they are, or nothing is known."""
        difference = self._deviation(config)
        if difference is None or difference <= BOUND:
            return None
        return f"its losses are {difference:.1%} off those of {REFERENCE} (at most {BOUND:.0%})"

    def _reference_of(self, config: TrainConfig) -> TrainConfig | None:
        if self.task.model.weights is None or self.task.is_played(config) or not in_question(config):
            return None
        return reference_of(config, bf16=self.task.device.supports_bf16)

    def _deviation(self, config: TrainConfig) -> float | None:
        reference = self._reference_of(config)
        measured = self.record(config).measured
        wanted = self.references.get(reference.digest) if reference else None
        return None if wanted is None or measured is None else deviation(measured, wanted)

    def _numerics(self, config: TrainConfig) -> str:
        """What is known of the number formats of a configuration, in words."""
        doubtful = in_question(config)
        if not doubtful:
            return f"nothing is in question: {REFERENCE}"
        if self.task.model.weights is None:
            return f"unknown: the weights are random, so that the loss tells nothing of {doubtful}"
        if self.task.is_played(config):
            return f"unknown: one GPU played a rank of several, and the loss of that tells nothing of {doubtful}"
        difference = self._deviation(config)
        if difference is None:
            return f"unknown: {doubtful} was not compared with {REFERENCE}"
        return f"with {doubtful} the losses are {difference:.2%} off those of {REFERENCE} [measured]"

    def baseline(self) -> TrainConfig | None:
        """The largest of the baselines that was measured or extrapolated; None if none was."""
        known = {record.config for record in self.records.values() if record.best_known}
        return next((config for config in self.task.baselines if config in known), None)

    def pool(self) -> list[Scored]:
        """The results of the search so far that may win."""
        return self._scored((record, record.of_search) for record in self._contenders() if record.of_search)

    def finalists(self, count: int) -> list[TrainConfig]:
        """The likely winner, the best for each other number of GPUs, and the fastest others, to come to `count`."""
        pool = self.pool()
        if not pool:
            return []
        likely = choose(pool, self.task.floors.slack)
        of_others = [best for best in self._best_of_numbers(pool) if best.config.num_gpus != likely.config.num_gpus]
        ranked = sorted(pool, key=lambda scored: scored.score, reverse=True)
        ordered = dict.fromkeys(scored.config for scored in [likely, *of_others, *ranked])
        return list(ordered)[: count + len(of_others)]

    def _best_of_numbers(self, pool: list[Scored]) -> list[Scored]:
        """The one to choose for each number of GPUs, the fewest first."""
        by_number: dict[int, list[Scored]] = {}
        for scored in pool:
            by_number.setdefault(scored.config.num_gpus, []).append(scored)
        return [choose(by_number[number], self.task.floors.slack) for number in sorted(by_number)]

    def predicted_speed(self, config: TrainConfig, extrapolation: Extrapolation) -> float:
        """Useful tokens/s of the full run, as truncated models predict it."""
        return run_performance(self.task, config, [extrapolation.measurement]).tokens_per_second

    def prune_reason(self, config: TrainConfig, extrapolation: Extrapolation) -> str | None:
        """Why an extrapolated configuration cannot be the best of as many GPUs; None while it can."""
        others = [scored for scored in self.pool() if scored.config.num_gpus == config.num_gpus]
        if not others:
            return None
        task, error = self.task, extrapolation.time_error
        speed, measurement = self.predicted_speed(config, extrapolation), extrapolation.measurement
        free_fraction = 1 - measurement.peak_reserved_gib / measurement.limit_gib
        score = task.score(config, speed)
        host_bound = self.is_host_bound(config, [measurement])
        own = Scored(config=config, score=score, free_fraction=free_fraction, host_bound=host_bound)
        bar = to_beat(own, others, task.floors.slack)
        if task.score(config, speed * (1 + error)) >= bar:
            return None
        if task.is_late(config, speed) and bar > 2 * score:  # others are in time
            return f"predicted {speed:,.0f} tokens/s (±{error:.0%}): it would end too late (--within)"
        needed = bar * speed / score
        return f"predicted {speed:,.0f} tokens/s (±{error:.0%}), {needed:,.0f} are needed to win"

    def candidate(self, config: TrainConfig) -> Candidate:
        """Everything that is known of a configuration with a measurement."""
        task, record = self.task, self.record(config)
        performance = run_performance(task, config, record.best_known)
        largest = max(record.best_known, key=lambda measurement: measurement.peak_reserved_gib)
        cost = self._project(config, performance, largest)
        evidence = Evidence.PROJECTED if task.is_projected(config) else record.evidence
        return Candidate(
            config=config,
            performance=performance,
            measurement=largest,
            cost=replace(cost, evidence=evidence, startup_s=self.startup_s(config)),
            evidence=evidence,
            memory_evidence=record.evidence,
        )

    def _project(
        self,
        config: TrainConfig,
        performance: Performance,
        largest: Measurement,
        examples: int | None = None,
        of: list[Measurement] | None = None,
    ) -> CostProjection:
        """The cost of the run, of so many examples; pauses are unknown if other GPUs stood in for the target.

        It rests on the measurements `of` the configuration, by default the best known.
        """
        task = self.task
        return project(
            task.workload,
            config,
            performance,
            task.price and task.price.of_gpus(config.num_gpus),
            self._power_w(config, largest),
            examples=examples,
            options=None if task.is_projected(config) else task.run_options,
            measurements=self.record(config).best_known if of is None else of,
            on_cpu=task.device.kind == "cpu",
        )

    def _power_w(self, config: TrainConfig, measurement: Measurement) -> float | None:
        """The power of all devices in W, as if each took what the first does; unknown if others stood in."""
        telemetry = None if self.task.is_projected(config) else measurement.telemetry
        return telemetry.power_w and telemetry.power_w * config.num_gpus if telemetry else None

    def recipe(self, fingerprint: Fingerprint) -> Recipe | None:
        """The winner with everything that is said about it; None if nothing was measured or extrapolated."""
        likely = self.finalists(1)
        in_time = likely and self.record(likely[0]).confirmed  # or else the study was cut short before that
        pool = self._with_faster(self._confirmed() if in_time else self._known_contenders())
        if not pool:
            return None
        winner = choose(pool, self.task.floors.slack)
        task, baseline, best = self.task, self.baseline(), self.candidate(winner.config)
        everything = self._scored((record, record.best_known) for record in self._by_evidence())
        others = [one for one in self._known_contenders() if one.config.num_gpus != winner.config.num_gpus]
        of_numbers = sorted([winner, *self._best_of_numbers(others)], key=lambda scored: scored.config.num_gpus)
        device, most = task.device, Parallelism.of(of_numbers[-1].config)
        if most.num_gpus > 1:
            device = replace(device, link_gb_s=task.link_gb_s(most))
        return Recipe(
            study=task.study,
            model=task.model,
            device=device,
            price=task.price and task.price.of_gpus(winner.config.num_gpus),
            workload=task.workload,
            winner=best,
            baseline=self.candidate(baseline) if baseline else None,
            reason=why(winner, pool, task.floors.slack, task.space, self.tried, _named(task, best)),
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
            numerics=self._numerics(winner.config),
            run_options=task.run_options,
            caveats=(*self.caveats, *_assumptions(task, best), *self._doubts(winner, pool)),
        )

    def noise(self, config: TrainConfig) -> float:
        """Relative standard deviation of the timed steps; 0 if there are too few to tell."""
        steps = [step for measurement in self.record(config).best_known for step in measurement.step_s]
        return statistics.pstdev(steps) / statistics.fmean(steps) if len(steps) > 1 else 0.0

    def disagreement(self, config: TrainConfig) -> float:
        """By how much the confirmations of a configuration differ in step time, relative to the shortest.

        A single confirmation is compared with the measurement of the search.
        """
        record = self.record(config)
        known = list(record.confirmed)
        if len(known) == 1 and record.measured:
            known.append(record.measured)
        accumulation = self.task.workload.run_shape(config).accumulation
        steps = [step_time_s(measurement, accumulation) for measurement in known]
        return max(steps) / min(steps) - 1.0 if steps else 0.0

    def _contenders(self) -> list[CandidateRecord]:
        """The records that were measured or can win by what was extrapolated, or else all that were extrapolated."""
        known = [record for record in self.records.values() if record.best_known]
        return [record for record in known if record.measured or record.confirmed or record.undecided] or known

    def _by_evidence(self) -> list[CandidateRecord]:
        """The records that the search knows, the extrapolated ones first."""
        known = [record for record in self.records.values() if record.of_search]
        return sorted(known, key=lambda record: record.extrapolated is None)

    def _confirmed(self) -> list[Scored]:
        return self._scored((record, record.confirmed) for record in self.records.values() if record.confirmed)

    def _known_contenders(self) -> list[Scored]:
        """The records that may win, by the best that is known of each."""
        return self._scored((record, record.best_known) for record in self._contenders())

    def _with_faster(self, pool: list[Scored]) -> list[Scored]:
        """The pool, and of other contenders and the baseline those that beat its winner by all that is known of them.

        No time may be left to confirm them. What was confirmed, and is slower than one by that, must not win over it,
        unless it is more capable and the other's slowest steps are within the slack. With a deadline it is the baseline
        alone, since confirmations know what pauses take.
        """
        if not pool:
            return pool
        slack, baseline, present = self.task.floors.slack, self.baseline(), {scored.config for scored in pool}
        winner = choose(pool, slack)
        records = [] if self.task.within_hours is not None else self._contenders()
        records += [self.record(baseline)] if baseline else []
        others = {record.config: record for record in records if record.config not in present}
        known = self._scored((record, record.best_known) for record in others.values())
        slowest = {scored.config: replace(scored, score=scored.score / (1 + scored.spread[1])) for scored in known}
        return pool + [
            scored
            for scored in known
            if scored.beats(winner) and choose([winner, slowest[scored.config]], slack).config == scored.config
        ]

    def is_host_bound(self, config: TrainConfig, measurements: list[Measurement] | None = None) -> bool:
        """Whether the host sets the pace, by these measurements or the best known; False if other GPUs stood in."""
        known = self.record(config).best_known if measurements is None else measurements
        return not self.task.is_projected(config) and any(measurement.host_bound for measurement in known)

    def _scored(self, known: Iterable[tuple[CandidateRecord, list[Measurement]]]) -> list[Scored]:
        """Score the records that can win by these measurements."""
        pool = []
        for record, measurements in known:
            if record.cannot_win:
                continue
            performance = run_performance(self.task, record.config, measurements)
            used = max(measurement.peak_reserved_gib / measurement.limit_gib for measurement in measurements)
            noise = max(TIE, self.noise(record.config))
            largest = max(measurements, key=lambda measurement: measurement.peak_reserved_gib)
            hours = None  # which takes a while to compute, and counts for a deadline alone
            if self.task.within_hours is not None:
                hours = self._project(record.config, performance, largest, of=measurements).full_run_hours
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
        """What the measurements leave in doubt."""
        record, baseline = self.record(winner.config), self.baseline()
        if all(one.evidence is Evidence.EXTRAPOLATED for one in self.records.values() if one.best_known):
            return ["nothing was probed at full depth: every number is extrapolated from a few layers"]
        doubts = []
        if baseline is not None and self.record(baseline).evidence is Evidence.EXTRAPOLATED:
            doubts.append("the baseline was not probed at full depth: the speed-up rests on a few layers of it")
        if record.evidence is Evidence.EXTRAPOLATED:
            return [*doubts, "the winner was not probed at full depth: its numbers are extrapolated from a few layers"]
        if not record.confirmed:
            return [*doubts, "the winner was not measured a second time: the study was cut short"]
        if record.measured:
            gap = statistics.median(  # a confirmation that had less time has shorter steps
                step_time_s(record.measured, one.micro_steps) / statistics.median(one.step_s) - 1.0
                for one in record.confirmed
            )
            if abs(gap) > MAX_STEP_TIME_GAP:
                doubts.append(f"the search's step time was {gap:+.1%} off the confirmed one, which counts")
        telemetry = [measurement.telemetry for measurement in record.confirmed if measurement.telemetry]
        reasons = {reason for reading in telemetry for reason in reading.slowed_by}
        if reasons:
            doubts.append(f"the card was slowed down while it was measured: {', '.join(sorted(reasons))}")
        for config in dict.fromkeys((winner.config, self.baseline() or winner.config)):
            difference = self.disagreement(config)
            if difference > DISAGREEMENT:
                doubts.append(f"measurements of {config.label()} differ by {difference:.0%}: something disturbed them")
            shares = [found.host_share or 0.0 for found in self.record(config).best_known if found.host_bound]
            if shares:
                doubts.append(
                    f"the host sets the pace of {config.label()}: issuing takes it {min(max(shares), 1.0):.0%} of the "
                    "time of a micro batch, so the speed changes with whatever else runs on the host"
                )
        rivals = [scored.config.label() for scored in pool if scored is not winner and scored.ties(winner)]
        if rivals:
            measure = "speed" if len(self.task.numbers_of_gpus) == 1 else "what a token costs"
            doubts.append(f"not distinguishable in {measure} from {', '.join(rivals)}")
        return doubts


def _named(task: Task, winner: Candidate) -> str:
    """What the one with the highest score is called, by the deadline."""
    if task.within_hours is None:
        return "the cheapest"
    within = fmt_hours(task.within_hours)
    late = winner.cost.full_run_hours > task.within_hours
    return f"the fastest, since none ends within {within}," if late else f"the cheapest that ends within {within}"


def _best_of_cells(pool: list[Scored]) -> list[Scored]:
    """The fastest of each result cell: of the configurations that agree in every knob that separates results."""
    names = [knob.name for knob in KNOBS.values() if knob.separates_results]
    best = {
        tuple(getattr(scored.config, name) for name in names): scored
        for scored in sorted(pool, key=lambda scored: scored.score)
    }
    return list(best.values())


def _made_up(task: Task) -> str:
    """'0.30 GiB (--memory-gib) and $0.60/h (--price) are made up'; empty for a real device."""
    parts = [] if task.example_gib is None else [f"{fmt_gib(task.example_gib)} (--memory-gib)"]
    if task.price is not None and task.price.provider == EXAMPLE:
        parts.append(f"{fmt_usd(task.price.usd_per_hour)}/h (--price)")
    return f"{' and '.join(parts)} {'are' if len(parts) > 1 else 'is'} made up" if parts else ""


def _assumed_examples(workload: Workload) -> list[str]:
    """What of the examples was not given or counted, in sentences."""
    caveats, lengths = [], workload.lengths
    if lengths.source == "assumed":
        caveats.append(
            f"the length of an example was not given: {lengths.longest:,} tokens are assumed "
            "(--dataset, --lengths or --tokens-per-example)"
        )
    if lengths.source in ("characters", "summary"):
        caveats.append(f"the lengths of the examples are {SAYS[lengths.source]}, not counted")
    if workload.examples_assumed:
        caveats.append(f"the number of examples was not given: {workload.examples:,} are assumed (--examples)")
    return caveats


def _assumptions(task: Task, winner: Candidate) -> list[str]:
    """What the numbers of a winner assume about data and device, in sentences."""
    config, workload, lengths = winner.config, task.workload, task.workload.lengths
    caveats = [
        f"{name} {getattr(config, name)}: {what}; searched because nothing else fits (--{floor.replace('_', '-')})"
        for name, (floor, may_win, what) in UNASKED.items()
        if not (getattr(task.floors, floor) or may_win(getattr(config, name)))
        and any(map(may_win, task.space.choices(name)))
    ]
    if task.within_hours is not None and winner.cost.full_run_hours > task.within_hours:
        late = fmt_hours(winner.cost.full_run_hours)
        caveats.append(f"nothing that was tried ends within {fmt_hours(task.within_hours)}: the run takes {late}")
    if made_up := _made_up(task):
        caveats.append(f"an example card stands for a GPU here: {made_up}")
    caveats += _assumed_examples(workload)
    if task.measured_on is not None and task.carried is not None:
        faster = f"{task.carried.products:.3g} times as fast, memory {task.carried.bytes:.3g} times"
        ends = [card.name for card in (task.measured_on, task.device) if calibrates(task.calibration, card)]
        calibrated = f", {ends[0]} {task.calibration.label}" if ends and task.calibration else ""
        host = task.carried.host
        of_host = "as it is here" if host is None else f"{host:.3g} times as fast, as both hosts were calibrated"
        caveats.append(
            f"probed on {task.measured_on.name} with its memory capped to what {task.device.name} offers: memory is "
            f"measured; speeds are projected by data sheets{calibrated} (products {faster}), the host's part "
            f"{of_host}; power, clocks and kernels are those of the card that probed"
        )
    if task.is_played(config) and (link_gb_s := task.link_gb_s(Parallelism.of(config))) is not None:
        caveats.append(
            f"one GPU played a rank of {config.num_gpus}: memory and computation are measured, with room left for "
            f"NCCL; what the GPUs send each other at {link_gb_s:,.0f} GB/s is added by formula"
        )
    if (share := workload.waiting_share(config)) > WORTH_SAYING:
        caveats.append(
            f"micro batches take {share:.0%} longer on {config.num_gpus} GPUs, which wait for the one with the longest "
            "rows: by the lengths of the examples, as if time were proportional to tokens; packing avoids it"
        )
    cut = workload.truncated(config.seq_len)
    if cut > 0:
        longer = lengths.longer(config.seq_len)
        caveats.append(
            f"{cut:.1%} of the tokens are cut off at seq_len {config.seq_len}, from {longer:.1%} of the examples"
        )
    if config.packing:
        per_step = workload.run_shape(config).examples_per_step
        caveats.append(
            f"rows are packed: {workload.examples_per_row(config):.1f} examples each on average, "
            f"{workload.fill(config):.1%} of them filled; a step has {per_step:.1f} "
            f"examples on average, {workload.global_batch} were asked for"
        )
    elif len(lengths.counts) > 1:
        caveats.append(
            f"{1 - workload.fill(config):.0%} of the tokens of a row of {workload.tokens_per_row(config):,.0f} on "
            "average are padding, which tokens/s leave out"
        )
    return caveats

"""Judge: keeps what was measured of each configuration and says who wins, by how much, and what a reader should know.

Pure: results go in, a Recipe comes out.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Evidence, Fingerprint, Measurement, Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import Extrapolation
from autotune.problem.length_distribution import SAYS
from autotune.problem.performance import AGAIN, step_time_s
from autotune.problem.run_cost import by_examples, project
from autotune.problem.task import Task
from autotune.study.numerics import BOUND, REFERENCE, deviation, in_question, reference_of
from autotune.study.ranking import Scored, choose, to_beat
from autotune.study.summary import Candidate, Recipe

# Measurements of one configuration that differ by more than this were disturbed; another then decides, as their median.
DISAGREEMENT = 0.05


@dataclass(slots=True)
class Selection:
    """Measurements by configuration digest: of the search, and of the confirmation, which outranks it.

    What was only extrapolated from truncated depths stands apart: it fills cells, and wins only where nothing could be
    measured at full depth.
    """

    task: Task
    configs: dict[str, TrainConfig] = field(default_factory=dict)
    measured: dict[str, Measurement] = field(default_factory=dict)
    extrapolated: dict[str, Measurement] = field(default_factory=dict)
    confirmed: dict[str, list[Measurement]] = field(default_factory=dict)
    references: dict[str, Measurement | None] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)  # baselines that cannot win, but were measured
    starts_s: list[float] = field(default_factory=list)  # of workers
    load_s: float = 0.0  # of the model, the longest
    late_s: dict[str, float] = field(default_factory=dict)  # by how much the first step was longer than the others

    def add_result(self, result: ProbeResult) -> None:
        """A probe's result, if it has a number."""
        if result.measurement is None or result.outcome not in (Outcome.OK, Outcome.SLOW):
            return
        if result.evidence is Evidence.MEASURED:
            self.add(result.config, result.measurement)
            self.record_startup(result)
        else:
            self.configs[result.config.digest] = result.config
            self.extrapolated[result.config.digest] = result.measurement

    def record_startup(self, result: ProbeResult) -> None:
        """What a whole model took before its steps came one after the other."""
        took, digest, measurement = result.seconds, result.config.digest, result.measurement
        self.starts_s += [took["start"]] if "start" in took else []
        self.load_s = max(self.load_s, took.get("load", 0.0))
        if "first_step" in took and measurement is not None:
            # That phase lasts until the steps settle, two of them at least.
            late = max(took["first_step"] - 2 * step_time_s(measurement, measurement.micro_steps), 0.0)
            self.late_s[digest] = max(self.late_s.get(digest, 0.0), late)

    def startup_s(self, config: TrainConfig) -> float | None:
        """Until a run takes its steps at their pace: what a worker, the model and the first step of this configuration
        took to start, compilation included, the first time. None where that was not seen, or was another card's."""
        if not self.starts_s or config.digest not in self.late_s or self.task.measured_on is not None:
            return None
        return statistics.median(self.starts_s) + self.load_s + self.late_s[config.digest]

    def add(self, config: TrainConfig, measurement: Measurement) -> None:
        self.configs[config.digest] = config
        self.measured[config.digest] = measurement

    def close_calls(self) -> list[TrainConfig]:
        """What was only extrapolated and may be worth a whole model, the most promising first.

        The best of each learning cell that is within the slack of the fastest; and what can win by now, since what
        it had to beat when it was stopped may have fallen out of the slack.
        """
        pool = self._scored({digest: [one] for digest, one in self.measured.items()})
        if not pool:
            return []
        slack = self.task.floors.slack
        bar = max(one.score for one in pool) / (1 + slack)
        best: dict[tuple[object, ...], Scored] = {}
        everything = self._scored({digest: [one] for digest, one in (self.extrapolated | self.measured).items()})
        for one in sorted(everything, key=lambda one: one.score):
            best[_cell(one.config)] = one
        close = [one for one in best.values() if one.score >= bar]
        for one in everything:
            error = self.extrapolated[one.config.digest].time_error if one.config.digest in self.extrapolated else 0.0
            if one.score * (1 + error) >= to_beat(one, pool, slack):
                close.append(one)
        ranked = sorted(close, key=lambda one: (one.config.capability, one.score), reverse=True)
        return [config for config in dict.fromkeys(one.config for one in ranked) if config.digest not in self.measured]

    def confirm(self, config: TrainConfig, measurement: Measurement) -> None:
        self.configs[config.digest] = config
        self.failed.discard(config.digest)
        self.confirmed.setdefault(config.digest, []).append(measurement)

    def leader(self) -> TrainConfig | None:
        """The winner by what was confirmed so far."""
        pool = self._scored(self.confirmed)
        return choose(pool, self.task.floors.slack)[0].config if pool else None

    def may_win(self, config: TrainConfig) -> bool:
        """Whether it wins by what was confirmed so far, or would if the next round favours it."""
        favour = 1 + max(AGAIN, self.noise(config))
        tilted = [
            replace(one, score=one.score * favour if one.config == config else one.score / favour)
            for one in self._scored(self.confirmed)
        ]
        return bool(tilted) and choose(tilted, self.task.floors.slack)[0].config == config

    def to_compare(self, config: TrainConfig) -> TrainConfig | None:
        """The reference that is still to be measured, to hold the losses of this configuration against."""
        if self.task.model.weights is None or not in_question(config):
            return None
        reference = self._reference_of(config)
        return None if reference is None or reference.digest in self.references else reference

    def unsound(self, config: TrainConfig) -> str | None:
        """Why its number formats are not to be trusted; None where they are, or nothing is known."""
        apart = self._deviation(config)
        if apart is None or apart <= BOUND:
            return None
        return f"its losses are {apart:.1%} off those of {REFERENCE} (at most {BOUND:.0%})"

    def _reference_of(self, config: TrainConfig) -> TrainConfig | None:
        return reference_of(config, bf16=self.task.device.supports_bf16)

    def _deviation(self, config: TrainConfig) -> float | None:
        if self.task.model.weights is None or not in_question(config):
            return None
        if (wanted := self._reference_of(config)) is None:
            return None
        reference, own = self.references.get(wanted.digest), self.measured.get(config.digest)
        return None if reference is None or own is None else deviation(own, reference)

    def _numerics(self, config: TrainConfig) -> str:
        """What is known of the number formats of a configuration."""
        if not (doubtful := in_question(config)):
            return f"nothing is in question: {REFERENCE}"
        if self.task.model.weights is None:
            return f"unknown: the weights are random, so that the loss tells nothing of {doubtful}"
        if (apart := self._deviation(config)) is None:
            return f"unknown: {doubtful} was not compared with {REFERENCE}"
        return f"with {doubtful} the losses are {apart:.2%} off those of {REFERENCE} [measured]"

    def reject(self, config: TrainConfig, reason: str, *, fits: bool = False) -> None:
        """A configuration that came through the search but not its confirmation is out.

        A baseline that `fits` is still what the winner is held against: a slower one would flatter it.
        """
        self.caveats.append(f"{config.label()} came through the search but not its confirmation: {reason}")
        if fits and config in self.task.baselines():
            self.failed.add(config.digest)
            return
        self.measured.pop(config.digest, None)
        self.extrapolated.pop(config.digest, None)
        self.confirmed.pop(config.digest, None)

    def baseline(self) -> TrainConfig | None:
        """The largest of the baselines that was measured, or else extrapolated; None if none was."""
        known = self.measured or self.extrapolated
        return next((config for config in self.task.baselines() if config.digest in known), None)

    def pool(self) -> list[Scored]:
        """What the search found so far: measured at full depth, or else extrapolated."""
        return self._scored({digest: [one] for digest, one in (self.measured or self.extrapolated).items()})

    def finalists(self, count: int) -> list[TrainConfig]:
        """The likely winner and the fastest others."""
        pool = self.pool()
        if not pool:
            return []
        likely, _ = choose(pool, self.task.floors.slack)
        ranked = sorted(pool, key=lambda one: one.score, reverse=True)
        return list({one.config.digest: one.config for one in [likely, *ranked]}.values())[:count]

    def predicted_speed(self, config: TrainConfig, extrapolation: Extrapolation) -> float:
        """Useful tokens/s of the full run, as truncated models predict it."""
        return self.task.performance(config, [extrapolation.measurement]).tokens_per_second

    def prune_reason(self, config: TrainConfig, extrapolation: Extrapolation) -> str | None:
        """Why an extrapolated configuration cannot win; None while it can."""
        others = self.pool()
        if not others:
            return None
        speed, measurement = self.predicted_speed(config, extrapolation), extrapolation.measurement
        free_fraction = 1 - measurement.peak_reserved_gib / measurement.limit_gib
        bar = to_beat(Scored(config=config, score=speed, free_fraction=free_fraction), others, self.task.floors.slack)
        if speed * (1 + extrapolation.time_error) >= bar:
            return None
        return f"predicted {speed:,.0f} tokens/s (±{extrapolation.time_error:.0%}), {bar:,.0f} are needed to win"

    def candidate(self, config: TrainConfig) -> Candidate:
        """Everything known of one configuration that was measured."""
        task, measurements = self.task, self.measurements(config.digest)
        speed = task.performance(config, measurements)
        largest = max(measurements, key=lambda one: one.peak_reserved_gib)
        cost = project(task.workload, config, speed, task.price, self._power_w(largest))
        known = self._evidence(config)
        told = known if task.carried is None else Evidence.PROJECTED
        return Candidate(
            config=config,
            performance=speed,
            measurement=largest,
            cost=replace(cost, evidence=told, startup_s=self.startup_s(config)),
            evidence=told,
            memory_evidence=known,
        )

    def _power_w(self, measurement: Measurement) -> float | None:
        """Of the device; unknown where another card stood in for it."""
        read = measurement.telemetry if self.task.measured_on is None else None
        return read.power_w if read else None

    def _evidence(self, config: TrainConfig) -> Evidence:
        known = config.digest in self.measured or config.digest in self.confirmed
        return Evidence.MEASURED if known else Evidence.EXTRAPOLATED

    def recipe(self, fingerprint: Fingerprint) -> Recipe | None:
        """The winner with everything that is said of it; None if nothing came through."""
        # What was confirmed outranks the rest, unless the study was cut short before its likely winner was.
        likely = self.finalists(1)
        sure = bool(likely) and likely[0].digest in self.confirmed
        best_known = {digest: self.measurements(digest) for digest in self.measured or self.extrapolated}
        all_known = {digest: self.measurements(digest) for digest in self.extrapolated | self.measured}
        pool = self._scored(self.confirmed if sure else best_known)
        if not pool:
            return None
        winner, reason = choose(pool, self.task.floors.slack)
        task, baseline, best = self.task, self.baseline(), self.candidate(winner.config)
        power = self._power_w(best.measurement)
        cells: dict[tuple[object, ...], TrainConfig] = {}
        for one in sorted(self._scored(all_known), key=lambda one: one.score):
            cells[_cell(one.config)] = one.config
        return Recipe(
            study=task.study,
            model=task.model,
            device=task.device,
            price=task.price,
            workload=task.workload,
            winner=best,
            baseline=self.candidate(baseline) if baseline else None,
            reason=reason,
            trainer=task.trainer,
            fingerprint=fingerprint,
            by_examples=tuple(
                replace(cost, evidence=best.cost.evidence)
                for cost in by_examples(task.workload, best.config, best.performance, task.price, power)
            ),
            cells=tuple(self.candidate(config) for config in cells.values()),
            numerics=self._numerics(winner.config),
            caveats=(*self.caveats, *self._assumptions(winner.config), *self._doubts(winner, pool)),
        )

    def noise(self, config: TrainConfig) -> float:
        """Relative spread of the timed steps; 0 where there are too few to tell."""
        steps = [step for measurement in self.measurements(config.digest) for step in measurement.step_s]
        return statistics.pstdev(steps) / statistics.fmean(steps) if len(steps) > 1 else 0.0

    def measurements(self, digest: str) -> list[Measurement]:
        """What the numbers of a configuration rest on."""
        if digest in self.confirmed:
            return self.confirmed[digest]
        known = self.measured.get(digest) or self.extrapolated.get(digest)
        return [known] if known else []

    def _scored(self, evidence: Mapping[str, list[Measurement]]) -> list[Scored]:
        """Score by digest, from these measurements."""
        pool = []
        for digest, measurements in evidence.items():
            if digest in self.failed:
                continue
            speed = self.task.performance(self.configs[digest], measurements)
            free_fraction = 1.0 - max(one.peak_reserved_gib / one.limit_gib for one in measurements)
            pool.append(Scored(config=self.configs[digest], score=speed.tokens_per_second, free_fraction=free_fraction))
        return pool

    def disagreement(self, config: TrainConfig) -> float:
        """By how much the confirmations of a configuration differ in step time, relative to the shortest.

        One alone is compared with what the search saw.
        """
        known = list(self.confirmed.get(config.digest, ()))
        if len(known) == 1 and config.digest in self.measured:
            known.append(self.measured[config.digest])
        steps = [step_time_s(one, self.task.workload.run_shape(config).accumulation) for one in known]
        return max(steps) / min(steps) - 1.0 if steps else 0.0

    def _assumptions(self, config: TrainConfig) -> list[str]:
        """What nobody told and the projection rests on."""
        workload, found = self.task.workload, []
        lengths = workload.lengths
        if lengths.source == "assumed":
            found.append(
                f"the length of an example was not given: {lengths.longest:,} tokens are assumed "
                "(--dataset, --lengths or --tokens-per-example)"
            )
        if lengths.source in ("characters", "summary"):
            found.append(f"the lengths of the examples are {SAYS[lengths.source]}, not counted")
        if workload.examples_assumed:
            found.append(f"the number of examples was not given: {workload.examples:,} are assumed (--examples)")
        if (source := self.task.measured_on) is not None and (carried := self.task.carried) is not None:
            low, high = carried.interval
            found.append(
                f"probed on {source.name} with its memory capped to what {self.task.device.name} offers: memory is "
                f"measured; speeds are projected, {carried.ratio:.3g} times those there ({low:.3g} to {high:.3g} in "
                "80 % of cases); power, clocks and kernels are those of the card that probed"
            )
        if self.task.device.kind == "cpu":
            found.append(
                "on a CPU, probes give large blocks of memory straight back to the kernel, so that peaks repeat; the "
                "full run does not, and can be twice as fast"
            )
        if (cut := workload.truncated(config.seq_len)) > 0:
            longer = lengths.longer(config.seq_len)
            found.append(
                f"{cut:.1%} of the tokens are cut off at seq_len {config.seq_len}, from {longer:.1%} of the examples"
            )
        if config.packing:
            per_step = workload.run_shape(config).examples_per_step
            found.append(
                f"rows are packed: {workload.examples_per_row(config):.1f} examples each on average, "
                f"{workload.fill(config):.1%} of them filled; a step has {per_step:.1f} "
                f"examples on average, {workload.global_batch} were asked for"
            )
        elif len(lengths.counts) > 1:
            found.append(
                f"{1 - workload.fill(config):.0%} of each row of {config.seq_len} tokens is padding, "
                "which tokens/s leave out"
            )
        return found

    def _doubts(self, winner: Scored, pool: list[Scored]) -> list[str]:
        """Where the measurements themselves leave room."""
        digest, found = winner.config.digest, []
        if digest not in self.measured and digest not in self.confirmed:
            return ["nothing was probed at full depth: every number is extrapolated from a few layers"]
        if digest not in self.confirmed:
            return ["the winner was not measured a second time: the study was cut short"]
        if digest in self.measured:
            again = self.confirmed[digest]
            wall = statistics.median(step for one in again for step in one.step_s)
            gap = step_time_s(self.measured[digest], again[0].micro_steps) / wall - 1.0
            if abs(gap) > 0.03:
                found.append(f"the search's step time was {gap:+.1%} off the confirmed one, which counts")
        readings = [one.telemetry for one in self.confirmed[digest] if one.telemetry]
        slowed = {reason for reading in readings for reason in reading.slowed_by}
        if slowed:
            found.append(f"the card was slowed down while it was measured: {', '.join(sorted(slowed))}")
        baseline = self.baseline()
        for config in dict.fromkeys((winner.config, baseline or winner.config)):  # a set has another order each time
            if (apart := self.disagreement(config)) > DISAGREEMENT:
                found.append(f"measurements of {config.label()} differ by {apart:.0%}: something disturbed them")
        rivals = [
            one
            for one in pool
            if one is not winner
            and abs(one.score / winner.score - 1) < max(self.noise(one.config), self.noise(winner.config))
        ]
        if rivals:
            found.append("not distinguishable in speed from " + ", ".join(one.config.label() for one in rivals))
        return found


def _cell(config: TrainConfig) -> tuple[object, ...]:
    """What of a configuration changes the result of training."""
    return tuple(getattr(config, knob.name) for knob in KNOBS.values() if knob.separates_results)

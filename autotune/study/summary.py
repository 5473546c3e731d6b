"""Recipe and StudySummary: the result of a study, in the form that reports and exporters read."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.catalog import DeviceSpec, ModelSpec, Price
from autotune.core.json_view import Native, View, add_prefix, json_data, keys, native_fields_plus
from autotune.core.learning_rate import OF_DEMO, default_learning_rate
from autotune.core.objective import Objective
from autotune.core.probe_types import (
    Evidence,
    Fingerprint,
    Measurement,
    OomDetail,
    Outcome,
    ProbeResult,
    Rung,
    weakest,
)
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate
from autotune.problem.demo import is_demo
from autotune.problem.performance import AGAIN, Performance
from autotune.problem.run_cost import CostProjection
from autotune.problem.run_options import RunOptions
from autotune.problem.workload import RunShape, Workload
from autotune.study.ablation import Ablation
from autotune.study.decomposition import Decomposition
from autotune.study.learning import Learning
from autotune.study.savings import Savings, run_savings
from autotune.study.scaling import Scaling

COST_KEYS = (
    *("usd_per_hour", "cost_per_1000_samples_usd", "full_run_hours", "full_run_usd"),
    *("interval_usd", "interval_hours", "startup_s", "kwh", "pauses"),
)
CARD = keys(  # the JSON keys of a prediction for another GPU model
    "state",
    "need_gib",
    "limit_gib",
    card="device.name",
    tokens_per_second="tokens_per_s",
    full_run_hours="cost.full_run_hours",
    interval_hours="cost.interval_hours",
    full_run_usd="cost.full_run_usd",
    spot_usd="cost.spot_usd",
    evidence="cost.evidence",
    measurements_on_this_card="num_observations",
)
# The memory of a run is stable if its peaks grow by at most this fraction, or by at most CREEP_GIB.
CREEP = 0.02
CREEP_GIB = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration with its measured speed and memory, and with the cost projected from them."""

    JSON: ClassVar = keys(
        "config",
        performance=View(
            "performance", keys("samples_per_second", "tokens_per_second", "step_time_s", "mfu")
        ),
        memory=keys(
            model_gib="measurement.model_gib",
            peak_during_training_gib="measurement.peak_allocated_gib",
            peak_reserved_gib="measurement.peak_reserved_gib",
            limit_gib="measurement.limit_gib",
        ),
        cost=View("cost", keys(*COST_KEYS)),
        host_share="measurement.host_share",
        telemetry=Native("measurement.telemetry"),
    ) | keys("energy_j_per_token", "evidence", "memory_evidence")

    config: TrainConfig
    performance: Performance
    measurement: Measurement
    cost: CostProjection
    evidence: Evidence = Evidence.MEASURED  # for speed and cost
    memory_evidence: Evidence = Evidence.MEASURED

    @property
    def energy_j_per_token(self) -> float | None:
        """The joules for each useful token, or None if the driver does not report the power."""
        telemetry = self.measurement.telemetry
        power_w = telemetry.power_w if telemetry else None
        return None if power_w is None else power_w / self.performance.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The dataset of a study, which the exported run trains on.

    `path` is an absolute path, or a name on the Hub (org/name[:config]). `files` are the paths of a
    local dataset's files. `chat_template` is the template of the study's tokenizer, if it is known.
    """

    path: str
    split: str | None = None
    files: tuple[str, ...] = ()
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The winner of a study, and the facts that reports and exporters need about it.

    `by_gpus` has the best configuration for each number of GPUs, the smallest number first.
    `learning` has the learning rates that were tried for the winner. `disagreement` says which
    measurements of the winner or of the baseline differ from each other, or is None. The intervals
    then cover all these measurements. `alone` is True if the winner is the only configuration that
    was tried.
    """

    study: str
    model: ModelSpec
    device: DeviceSpec
    price: Price | None
    workload: Workload
    winner: Candidate
    baseline: Candidate | None
    reason: str
    trainer: str
    fingerprint: Fingerprint
    by_examples: tuple[CostProjection, ...]
    cells: tuple[Candidate, ...] = ()  # the best of each result cell (see `Selection`)
    by_gpus: tuple[Candidate, ...] = ()
    within_hours: float | None = None  # the deadline of the full run, in hours from its start
    example_gib: float | None = None  # the memory of the example card that the CPU simulates
    numerics: str = ""  # in words, how much the winner's number formats change its losses
    run_options: RunOptions = RunOptions()  # noqa: RUF009 (frozen)
    caveats: tuple[str, ...] = ()
    learning: Learning | None = None
    disagreement: str | None = None
    alone: bool = False
    data: TrainingData | None = None  # None if the study had no dataset

    @property
    def learning_rate(self) -> float:
        """The learning rate that a search found for the winner, or else the usual rate."""
        found = self.learning if self.is_rate_learned else None
        return found.learning_rate if found else self.default_learning_rate

    @property
    def is_rate_learned(self) -> bool:
        """Whether a search found the winner's learning rate."""
        # Records without a default rate come from older versions, which set LoRA's alpha to twice
        # the rank. Today, alpha is twice the rank only at rank 16. So the rates that older versions
        # found are used only for rank 16 and for full fine-tuning.
        return self.learning is not None and bool(
            self.learning.default or self.config.lora_rank in (None, 16)
        )

    @property
    def default_learning_rate(self) -> float:
        """The usual learning rate for the winner's method, the objective and the model's size."""
        method = self.config.method
        objective = self.workload.objective
        if is_demo(self.model) and self.model.weights is not None and objective is Objective.SFT:
            return OF_DEMO[method]
        return default_learning_rate(method, objective, self.model.params)

    @property
    def config(self) -> TrainConfig:
        """The winner's configuration."""
        return self.winner.config

    @property
    def shape(self) -> RunShape:
        """How the full run divides its examples into optimizer steps."""
        return self.workload.run_shape(self.config)

    @property
    def accumulation(self) -> int:
        """The number of micro batches in each optimizer step of the winner."""
        return self.shape.accumulation

    @property
    def unsteady(self) -> str | None:
        """Why the measurements vary too much to state a speed-up, or None.

        Either other work disturbed all measurements of a configuration, or the measurements of a
        configuration differ so much that the winner may be faster or slower than the baseline.
        """
        if self.baseline is None:
            return None
        for one in (self.baseline, self.winner):
            if one.evidence is Evidence.DISTURBED:
                return f"every measurement of {one.config.label()} was disturbed"

        # Both ends of the interval must differ from 1 by more than two probes usually differ.
        low, high = self.winner.performance.times(self.baseline.performance)
        return self.disagreement if low <= 1 + AGAIN and high >= 1 - AGAIN else None

    @property
    def speedup(self) -> float | None:
        """The winner's useful tokens/s, divided by the baseline's.

        The speed-up is None without a baseline, if the measurements are unsteady, and if only the
        winner was tried.
        """
        if self.baseline is None or self.unsteady is not None or self.alone:
            return None
        return (
            self.winner.performance.tokens_per_second / self.baseline.performance.tokens_per_second
        )

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """The interval of the speed-up, or None without a speed-up."""
        if self.baseline is None or self.speedup is None:
            return None
        return self.winner.performance.times(self.baseline.performance)

    @property
    def speedup_evidence(self) -> Evidence:
        """How the speed-up was obtained (`Evidence`).

        It is the evidence of the winner's speed or of the baseline's speed, whichever is less
        reliable.
        """
        if self.unsteady is not None:
            return Evidence.DISTURBED
        return weakest(*(one.evidence for one in (self.winner, self.baseline) if one))

    @property
    def differs(self) -> bool:
        """Whether the winner's and the baseline's speed differ by more than their error."""
        low, high = self.speedup_interval or (1.0, 1.0)
        return not low <= 1.0 <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A finished trial.

    `margin` is (needed memory / limit) - 1, which is positive if the configuration does not fit.
    `reused` says that the result was stored before the trial began. `is_own` says that this study
    itself had measured the result.
    """

    number: int
    config: TrainConfig
    outcome: Outcome
    rung: Rung
    evidence: Evidence = Evidence.MEASURED
    reused: bool = False
    is_own: bool = False
    reason: str | None = None
    tokens_per_second: float | None = None
    peak_reserved_gib: float | None = None
    limit_gib: float | None = None
    margin: float | None = None
    oom: OomDetail | None = None
    seconds: float = 0.0
    log: str | None = None

    @property
    def is_from_other(self) -> bool:
        """Whether the result comes from another study."""
        return self.reused and not self.is_own


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The training of one finalist: the held-out loss before and after, or why the training failed.

    `full_run_hours` and `full_run_usd` are the predicted time and cost of the finalist's full run.
    """

    config: TrainConfig
    full_run_hours: float
    full_run_usd: float | None
    seconds: float
    loss_before: float | None = None
    loss_after: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The finalists, each trained for `steps` optimizer steps from one seed.

    All finalists train on the same examples, whose number is `trained_on`. A loss is the mean loss
    per token over `held_out` other examples, each truncated to `tokens` tokens.
    """

    steps: int
    trained_on: int
    held_out: int
    tokens: int
    learned: tuple[Learned, ...] = ()

    def ranked(self) -> tuple[Learned, ...]:
        """Return the finalists, the lowest loss first and failed ones last."""
        return tuple(
            sorted(
                self.learned,
                key=lambda learned: math.inf if learned.loss_after is None else learned.loss_after,
            )
        )

    def pareto_front(self) -> tuple[Learned, ...]:
        """Return the Pareto front of the finalists' loss and run time, the fastest first.

        For a finalist in this front, no other finalist has both a lower loss and a shorter run.
        """
        front = list[Learned]()
        lowest = math.inf
        for learned in sorted(self.ranked(), key=lambda learned: learned.full_run_hours):
            if learned.loss_after is not None and learned.loss_after < lowest:
                lowest = learned.loss_after
                front.append(learned)
        return tuple(front)

    def notes(self, winner: TrainConfig) -> list[str]:
        """Say if the winner's loss is unknown, or if another finalist learned more."""
        own = next((learned for learned in self.learned if learned.config == winner), None)
        if own is None:
            return [
                "the winner's loss is unknown: "
                "--quality trained other finalists before this winner was found"
            ]
        if own.loss_after is None:
            return [f"the winner's loss is unknown, because its training failed: {own.reason}"]

        best = self.ranked()[0]
        if best.loss_after is None or best.loss_after >= own.loss_after:
            return []
        return [
            f"{best.config.label()} learned more in {self.steps} steps from one seed: "
            f"loss {best.loss_after:.4f} against the winner's {own.loss_after:.4f}"
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A run of the winner's exported program, compared with the study's predictions.

    `reason` says why the run failed, or is None.

    - Errors are relative and signed: predicted / measured - 1.
    - A peak is None if the device does not report it.
    - `file` is the program that ran. `probed` says whether the study probed this program. If it did
      not, there is no prediction to compare with.
    - `soak` is True for a run that mixes the longest possible rows with short rows. The speed of
      such a run is not predicted. Its memory must not exceed the prediction, and must not grow
      between the second and the last quarter of the run.
    - `peaks_gib` has the peak of the allocated memory in each quarter of such a run, or is empty if
      the peaks are unknown.
    """

    JSON: ClassVar = native_fields_plus(
        "tokens_per_s", "speed_error", "memory_error", "holds", "better"
    )

    config: TrainConfig
    micro_steps: int
    tolerance: float
    promised_tokens_per_s: float
    promised_step_s: float
    promised_gib: float
    seconds_per_step: float | None = None
    reserved_gib: float | None = None
    reason: str | None = None
    date: str | None = None
    file: str = "train.py"
    probed: bool = True
    soak: bool = False
    peaks_gib: tuple[float, ...] = ()

    @property
    def tokens_per_s(self) -> float | None:
        """The run's useful tokens/s, if each step had the predicted number of tokens.

        The real number of tokens in a step depends on the data.
        """
        if self.seconds_per_step is None:
            return None
        return self.promised_tokens_per_s * self.promised_step_s / self.seconds_per_step

    @property
    def speed_error(self) -> float | None:
        """The predicted speed divided by the measured speed, minus 1; None if the run failed."""
        return (
            None
            if self.seconds_per_step is None
            else self.seconds_per_step / self.promised_step_s - 1
        )

    @property
    def memory_error(self) -> float | None:
        """The predicted peak divided by the measured peak, minus 1; None if no peak is known."""
        return None if self.reserved_gib is None else self.promised_gib / self.reserved_gib - 1

    @property
    def memory_growth_gib(self) -> tuple[float, float] | None:
        """The peaks in the second and the last quarter of the run; None if memory did not grow."""
        if not self.soak or len(self.peaks_gib) != 4:
            return None
        _, before, _, after = self.peaks_gib
        return (before, after) if after - before > max(CREEP * before, CREEP_GIB) else None

    @property
    def _excess(self) -> dict[str, float]:
        """By which fraction the run's time and memory exceed the prediction.

        A fraction is negative if the run needed less than predicted.
        """
        slower = self.speed_error or 0.0
        larger = -(self.memory_error or 0.0)
        if not self.probed:
            return {}
        if self.soak:
            return {"larger": larger}
        return {"slower": slower, "larger": larger}

    @property
    def worse(self) -> tuple[str, ...]:
        """How the run was worse than predicted, beyond the tolerance: "slower", "larger"."""
        return tuple(what for what, excess in self._excess.items() if excess > self.tolerance)

    @property
    def better(self) -> tuple[str, ...]:
        """How the run was better than predicted, beyond the tolerance: "faster", "smaller"."""
        # A soak run also has short rows, so a smaller peak than predicted is not called better.
        opposite = {} if self.soak else {"slower": "faster", "larger": "smaller"}
        return tuple(
            opposite[what] for what in opposite if self._excess.get(what, 0.0) < -self.tolerance
        )

    @property
    def holds(self) -> bool:
        """Whether the run succeeded with stable memory and is not worse than predicted."""
        return self.speed_error is not None and self.memory_growth_gib is None and not self.worse


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """Predictions of the winner's run on other GPU models, and on other numbers of the same GPU."""

    cards: tuple[Estimate, ...] = ()
    scaling: Scaling = Scaling()  # noqa: RUF009 (frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """The results of a study, as reports and exporters read them.

    `recipe` is None if no trial succeeded. `stopped` is True if the user or a failure stopped the
    study before its end. `slower_than_searched` says why the winner is slower than the best trial
    of the search; the text is empty if it is not slower. `wall_seconds` is the time of all
    sessions. `probes` has all stored results in order. A result that was computed without a probe
    has no seconds. `cards` and `scaling` predict the winner's run on other cards and on other
    numbers of GPUs. `has_sdpa` says whether transformers has SDPA attention for the model.
    """

    JSON: ClassVar = keys(
        *("schema_version", "study"),
        evidence="recipe.winner.evidence",
        model="recipe.model.name",
        device="recipe.device.name",
        winner="recipe.winner",
        baseline="recipe.baseline",
        speedup="recipe.speedup",
        speedup_interval="recipe.speedup_interval",
        speedup_evidence="speedup_evidence",
        speedup_factors=Native("decomposition.factors"),
        reason="recipe.reason",
        trials="counts()",
    ) | keys(
        *("probe_seconds", "wall_seconds", "search_usd", "cells", "by_gpus", "caveats", "learning"),
        cards=View("cards", CARD),
        within_hours="recipe.within_hours",
        numerics="recipe.numerics",
        quality=Native("quality"),
        unsteady="recipe.unsteady",
        savings="savings",
        verification=View("verification", native_fields_plus("holds")),
        explanation=Native("explanation"),
        fingerprint=Native("recipe.fingerprint"),
    )
    schema_version: ClassVar[int] = 1

    study: str
    recipe: Recipe | None
    trials: tuple[TrialRecord, ...]
    wall_seconds: float
    search_usd: float | None
    probes: tuple[ProbeResult, ...] = ()
    cards: tuple[Estimate, ...] = ()
    scaling: Scaling = Scaling()  # noqa: RUF009 (frozen)
    quality: Quality | None = None
    learning: Learning | None = None
    verification: Verification | None = None
    explanation: Ablation | None = None
    decomposition: Decomposition | None = None
    notes: tuple[str, ...] = ()
    stopped: bool = False
    slower_than_searched: str = ""
    has_sdpa: bool = True
    dataset: str | None = None  # the path or name of the dataset, as the user gave it
    split: str | None = None

    @property
    def cells(self) -> tuple[Candidate, ...]:
        """The best candidate of each result cell, as defined in `selection.Selection`."""
        return self.recipe.cells if self.recipe else ()

    @property
    def by_gpus(self) -> tuple[Candidate, ...]:
        """The best candidate for each number of GPUs."""
        return self.recipe.by_gpus if self.recipe else ()

    @property
    def caveats(self) -> tuple[str, ...]:
        """The doubts about the winner."""
        return self.recipe.caveats if self.recipe else ()

    @property
    def speedup_evidence(self) -> Evidence | None:
        """How the speed-up was obtained (`Evidence`), or None without a baseline."""
        return self.recipe.speedup_evidence if self.recipe and self.recipe.baseline else None

    @property
    def savings(self) -> Savings | None:
        """What the winner's full run saves, compared with the baseline's full run.

        The result is None if the speed-up is unknown or smaller than the measurement error.
        """
        recipe = self.recipe
        if recipe is None or recipe.baseline is None or not recipe.differs:
            return None
        assert recipe.speedup is not None and recipe.speedup_interval is not None
        return run_savings(
            recipe.winner.cost,
            recipe.baseline.cost,
            recipe.speedup,
            recipe.speedup_interval,
            search_hours=self.wall_seconds / 3600,
            search_usd=self.search_usd,
        )

    @property
    def probe_seconds(self) -> float:
        """The total seconds of all stored probes."""
        return sum(probe.seconds.get("total", 0.0) for probe in self.probes)

    @property
    def configurations(self) -> tuple[TrialRecord, ...]:
        """For each configuration, the last trial that ran a probe, or else the first trial."""
        rows: dict[TrainConfig, TrialRecord] = {}
        for row in self.trials:
            if row.config not in rows or not row.reused:
                rows[row.config] = row
        return tuple(sorted(rows.values(), key=lambda row: row.number))

    @property
    def num_from_others(self) -> int:
        """The number of trials whose result comes from another study."""
        return sum(row.is_from_other for row in self.trials)

    def counts(self) -> dict[str, int]:
        """Return the number of trials for each outcome.

        `judged` is the number of distinct configurations that were neither refused nor crashed.
        """
        judged = {
            row.config.digest
            for row in self.trials
            if row.outcome not in (Outcome.REFUSED, Outcome.CRASH)
        }
        count = {outcome: sum(row.outcome is outcome for row in self.trials) for outcome in Outcome}

        return {
            "total": len(self.trials),
            "judged": len(judged),
            "ok": count[Outcome.OK],
            "oom": count[Outcome.OOM],
            "refused": count[Outcome.REFUSED],
            "slow": count[Outcome.SLOW],
            "failed": count[Outcome.CRASH] + count[Outcome.TIMEOUT] + count[Outcome.NUMERICS],
            "reused": sum(row.reused for row in self.trials),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryFile:
    """The content of summary.json: a study's summary and the directory of its files."""

    JSON: ClassVar = add_prefix("summary", StudySummary.JSON) | keys("out_dir")

    summary: StudySummary
    out_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The content of summary.json, and whether a process is running the study."""

    JSON: ClassVar = add_prefix("file", SummaryFile.JSON) | keys("running")

    file: SummaryFile
    running: bool


def summary_data(summary: StudySummary, out_dir: str) -> dict[str, Any]:
    """Return the content of summary.json as plain data."""
    data: dict[str, Any] = json_data(SummaryFile(summary=summary, out_dir=out_dir))
    return data

"""Recipe and StudySummary: what a finished study says, as values that the report and the exporters read."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.catalog import DeviceSpec, ModelSpec, Price
from autotune.core.json_view import Native, View, also_native, json_data, keys, under
from autotune.core.learning_rate import default_learning_rate
from autotune.core.probe_types import (
    Evidence,
    Fingerprint,
    Measurement,
    OomDetail,
    Outcome,
    ProbeResult,
    Rung,
)
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate
from autotune.problem.performance import Performance
from autotune.problem.run_cost import CostProjection
from autotune.problem.run_options import RunOptions
from autotune.problem.workload import RunShape, Workload
from autotune.study.ablation import Ablation
from autotune.study.decomposition import Decomposition
from autotune.study.learning import Learning
from autotune.study.scaling import Scaling

COST_KEYS = (
    *("usd_per_hour", "cost_per_1000_samples_usd", "full_run_hours", "full_run_usd"),
    *("interval_usd", "interval_hours", "startup_s", "kwh", "pauses"),
)
CARD = keys(  # of another card
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
CREEP, CREEP_GIB = (
    0.02,
    0.1,
)  # what peaks may grow by and be called the same: relative, and at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration with everything that is known of it."""

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
    evidence: Evidence = Evidence.MEASURED  # of speed and cost
    memory_evidence: Evidence = Evidence.MEASURED

    @property
    def energy_j_per_token(self) -> float | None:
        """Joules for each useful token; None if the driver does not report the power."""
        telemetry = self.measurement.telemetry
        power_w = telemetry.power_w if telemetry else None
        return None if power_w is None else power_w / self.performance.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The winner and what it rests on.

    `by_gpus` has the best of each number of GPUs, the fewest first; `learning` the rates that were tried for it.
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
    cells: tuple[Candidate, ...] = ()  # the best of each learning cell
    by_gpus: tuple[Candidate, ...] = ()
    within_hours: float | None = None  # by when the run is to end
    example_gib: float | None = None  # the memory of an example card, which a CPU stands for
    numerics: str = ""  # what is known of the winner's number formats
    run_options: RunOptions = RunOptions()  # noqa: RUF009 (frozen)
    caveats: tuple[str, ...] = ()
    learning: Learning | None = None

    @property
    def learning_rate(self) -> float:
        """The rate that was learned for the winner, else the usual one."""
        # Before there was a default, alpha was twice the rank: as it is now of rank 16 alone.
        is_valid = self.learning and (self.learning.default or self.config.lora_rank in (None, 16))
        return (
            self.learning.learning_rate
            if self.learning and is_valid
            else self.default_learning_rate
        )

    @property
    def default_learning_rate(self) -> float:
        """The rate that others use for such a training."""
        return default_learning_rate(self.config.method, self.workload.objective, self.model.params)

    @property
    def config(self) -> TrainConfig:
        """The winner's configuration."""
        return self.winner.config

    @property
    def shape(self) -> RunShape:
        """How the full run of the winner divides its examples into steps."""
        return self.workload.run_shape(self.config)

    @property
    def accumulation(self) -> int:
        """Micro batches in each optimizer step of the winner."""
        return self.shape.accumulation

    @property
    def speedup(self) -> float | None:
        """The winner's useful tokens/s over the baseline's; None without a baseline."""
        if self.baseline is None:
            return None
        return (
            self.winner.performance.tokens_per_second / self.baseline.performance.tokens_per_second
        )

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """The interval of the speed-up; None without a baseline."""
        return self.winner.performance.times(self.baseline.performance) if self.baseline else None

    @property
    def speedup_evidence(self) -> Evidence:
        """How the speed-up is known: as the less certain of winner and baseline is."""
        rank = list(Evidence)
        return max((one.evidence for one in (self.winner, self.baseline) if one), key=rank.index)

    @property
    def differs(self) -> bool:
        """Whether winner and baseline can be told apart in speed."""
        low, high = self.speedup_interval or (1.0, 1.0)
        return not low <= 1.0 <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One finished trial, in the order they ran. `margin` is signed: memory needed / limit - 1."""

    number: int
    config: TrainConfig
    outcome: Outcome
    rung: Rung
    evidence: Evidence = Evidence.MEASURED
    reused: bool = False
    reason: str | None = None
    tokens_per_second: float | None = None
    peak_reserved_gib: float | None = None
    limit_gib: float | None = None
    margin: float | None = None
    oom: OomDetail | None = None
    seconds: float = 0.0
    log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What one finalist learned: the loss of the held-out examples before and after, or the reason why not.

    `full_run_hours` and `full_run_usd` are what its full run is projected to take.
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
    """The finalists, each trained for `steps` optimizer steps on the same `trained_on` examples from one seed.

    A loss is the mean over `held_out` other examples, each cut at `tokens`, of the loss a token.
    """

    steps: int
    trained_on: int
    held_out: int
    tokens: int
    learned: tuple[Learned, ...] = ()

    def ranked(self) -> tuple[Learned, ...]:
        """The lowest loss first; failed ones last."""
        return tuple(
            sorted(
                self.learned,
                key=lambda learned: math.inf if learned.loss_after is None else learned.loss_after,
            )
        )

    def front(self) -> tuple[Learned, ...]:
        """Those that no other beats in both loss and time: the Pareto front, the fastest first."""
        front, lowest = list[Learned](), math.inf
        for learned in sorted(self.ranked(), key=lambda learned: learned.full_run_hours):
            if learned.loss_after is not None and learned.loss_after < lowest:
                lowest = learned.loss_after
                front.append(learned)
        return tuple(front)

    def notes(self, winner: TrainConfig) -> list[str]:
        """What a reader should know about the winner: that its loss is not known, or that another learned more."""
        own = next((learned for learned in self.learned if learned.config == winner), None)
        if own is None:
            return [
                "what this winner learns is not known: --quality trained others, before it was found"
            ]
        if own.loss_after is None:
            return [f"what the winner learns is not known, its training failed: {own.reason}"]
        best = self.ranked()[0]
        if best.loss_after is None or best.loss_after >= own.loss_after:
            return []
        return [
            f"{best.config.label()} learned more in {self.steps} steps from one seed: "
            f"loss {best.loss_after:.4f} against the winner's {own.loss_after:.4f}"
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the exported run of a winner did, compared with what was predicted. `reason` says why it failed.

    Errors are relative and signed: promised over done, minus 1. A peak is None where the device does not tell it.
    `file` is what was run, and `probed` whether that is what was measured: else nothing was promised of it. A `soak`
    trains on rows as long as can be among short ones: no speed was promised of these, and no more memory than
    promised may be needed, nor more from quarter to quarter (`peaks_gib`, of allocated memory; () where untold).
    """

    JSON: ClassVar = also_native("tokens_per_s", "speed_error", "memory_error", "holds", "better")

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
        """Useful tokens/s, for steps with as many tokens as predicted: how many a step has depends on the data."""
        if self.seconds_per_step is None:
            return None
        return self.promised_tokens_per_s * self.promised_step_s / self.seconds_per_step

    @property
    def speed_error(self) -> float | None:
        """Predicted over measured speed, minus 1; None if the run failed."""
        return (
            None
            if self.seconds_per_step is None
            else self.seconds_per_step / self.promised_step_s - 1
        )

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak, minus 1; None if the device does not report it."""
        return None if self.reserved_gib is None else self.promised_gib / self.reserved_gib - 1

    @property
    def memory_growth_gib(self) -> tuple[float, float] | None:
        """The peaks in the second and last quarter of a soak, if memory grew from one to the other."""
        if not self.soak or len(self.peaks_gib) != 4:
            return None
        _, before, _, after = self.peaks_gib
        return (before, after) if after - before > max(CREEP * before, CREEP_GIB) else None

    @property
    def _excess(self) -> dict[str, float]:
        """By which share the run was slower and larger than promised, negative for faster and smaller."""
        slower, larger = self.speed_error or 0.0, -(self.memory_error or 0.0)
        return (
            {}
            if not self.probed
            else {"larger": larger}
            if self.soak
            else {"slower": slower, "larger": larger}
        )

    @property
    def worse(self) -> tuple[str, ...]:
        """In what the run was worse than promised by more than the tolerance: "slower", "larger" or both."""
        return tuple(what for what, excess in self._excess.items() if excess > self.tolerance)

    @property
    def better(self) -> tuple[str, ...]:
        """In what the run was better than promised by more than the tolerance: "faster", "smaller" or both."""
        opposite = (
            {} if self.soak else {"slower": "faster", "larger": "smaller"}
        )  # short rows may need less memory
        return tuple(
            opposite[what] for what in opposite if self._excess.get(what, 0.0) < -self.tolerance
        )

    @property
    def holds(self) -> bool:
        """Whether the run succeeded, its memory does not grow, and nothing is worse than promised."""
        return self.speed_error is not None and self.memory_growth_gib is None and not self.worse


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """The winner's run on other cards, and on other numbers of GPUs of its kind."""

    cards: tuple[Estimate, ...] = ()
    scaling: Scaling = Scaling()  # noqa: RUF009 (frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """A whole study. `recipe` is None if no trial succeeded. Seconds are wall seconds over all sessions.

    `probes` is everything that was stored, in that order: what was decided without a probe has no seconds. `cards` and
    `scaling` are projections of the winner's run to other cards and other numbers of GPUs.
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
        verification=View("verification", also_native("holds")),
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
    dataset: str | None = None  # the user's examples, as they were named
    split: str | None = None

    @property
    def cells(self) -> tuple[Candidate, ...]:
        """The best of each learning cell."""
        return self.recipe.cells if self.recipe else ()

    @property
    def by_gpus(self) -> tuple[Candidate, ...]:
        """The best of each number of GPUs."""
        return self.recipe.by_gpus if self.recipe else ()

    @property
    def caveats(self) -> tuple[str, ...]:
        """Doubts about the winner."""
        return self.recipe.caveats if self.recipe else ()

    @property
    def speedup_evidence(self) -> Evidence | None:
        """How the speed-up is known; None without a baseline."""
        return self.recipe.speedup_evidence if self.recipe and self.recipe.baseline else None

    @property
    def probe_seconds(self) -> float:
        """The seconds of all stored probes, summed up."""
        return sum(probe.seconds.get("total", 0.0) for probe in self.probes)

    @property
    def configurations(self) -> tuple[TrialRecord, ...]:
        """One trial for each configuration, for readers: the last that was probed, or else the first."""
        rows: dict[TrainConfig, TrialRecord] = {}
        for row in self.trials:
            if row.config not in rows or not row.reused:
                rows[row.config] = row
        return tuple(sorted(rows.values(), key=lambda row: row.number))

    def counts(self) -> dict[str, int]:
        """`judged` counts distinct configurations with a real probe; refusals are counted apart."""
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
    """A study's summary with the directory of its files: the content of summary.json."""

    JSON: ClassVar = under("summary", StudySummary.JSON) | keys("out_dir")

    summary: StudySummary
    out_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The content of summary.json, and whether a process is running the study."""

    JSON: ClassVar = under("file", SummaryFile.JSON) | keys("running")

    file: SummaryFile
    running: bool


def summary_data(summary: StudySummary, out_dir: str) -> dict[str, Any]:
    """The content of summary.json as plain data."""
    data: dict[str, Any] = json_data(SummaryFile(summary=summary, out_dir=out_dir))
    return data

"""Plans of one run for several numbers of GPUs, shown by `plan --gpus` and in reports."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.core.json_view import View, keys
from autotune.core.notebook import ShownAsTable
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Evidence
from autotune.core.units import fmt_hours, fmt_usd
from autotune.prediction.collectives import RankStepTime
from autotune.prediction.estimate import Estimate, FittingChange
from autotune.problem.gpu_counts import REACHED
from autotune.problem.run_cost import FITS
from autotune.problem.task import Task

# The JSON keys of the row that is recommended
CHOICE = keys("num_gpus", "hosts", strategy="parallelism.name")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The best configuration of one parallel strategy, on GPUs split evenly over `hosts` hosts.

    `estimate` describes one GPU, except that its cost is the cost of all GPUs. `estimate` is None
    if training is impossible; `problem` then says why. `step` and `accumulation` also describe one
    GPU. `num_without_speed` is how many other configurations fit, but have a speed that cannot be
    predicted. `ignored_pins` names the user's settings, such as offload=true, that these GPUs
    cannot follow. `efficiency` is the speed per GPU, divided by the speed per GPU at the smallest
    number of GPUs.
    """

    JSON: ClassVar = keys("num_gpus", "hosts", strategy="parallelism.name") | keys(
        *("precision", "accumulation", "state", "problem", "num_without_speed", "ignored_pins"),
        *("tokens_per_s", "efficiency", "hours", "usd", "step", "evidence"),
        interval_gib="interval_gib",
        interval_tokens_per_s="interval",
        of_one_gpu="estimate",
    )
    evidence: ClassVar[Evidence] = Evidence.ESTIMATED

    parallelism: Parallelism
    hosts: int = 1
    estimate: Estimate | None = None
    step: RankStepTime | None = None
    accumulation: int | None = None
    problem: str | None = None
    num_without_speed: int = 0
    ignored_pins: tuple[str, ...] = ()
    efficiency: float | None = None

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that train."""
        return self.parallelism.num_gpus

    @property
    def precision(self) -> str | None:
        """The number format in which the parallel strategy computes."""
        return self.parallelism.precision(self.estimate.config) if self.estimate else None

    @property
    def label(self) -> str:
        """The configuration and the strategy's precision in one line; "" if there is none."""
        if self.estimate is None:
            return ""
        config = self.estimate.config
        return config.label().replace(config.precision, self.parallelism.precision(config))

    @property
    def state(self) -> str | None:
        """Whether the run fits each GPU (FITS, TIGHT or OOM), or None if training is impossible."""
        return self.estimate.state if self.estimate else None

    @property
    def interval_gib(self) -> tuple[float, float] | None:
        """The interval of the memory if the GPUs share out experts (`Estimate.interval_gib`)."""
        return self.estimate.interval_gib if self.estimate else None

    @property
    def tokens_per_s(self) -> float | None:
        """The useful tokens/s of all GPUs together."""
        if self.estimate is None or self.estimate.tokens_per_s is None:
            return None
        return self.num_gpus * self.estimate.tokens_per_s

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of `tokens_per_s`."""
        if self.estimate is None or self.estimate.interval is None:
            return None
        low, high = self.estimate.interval
        return self.num_gpus * low, self.num_gpus * high

    def uses_link_of_catalogue(self, task: Task) -> bool:
        """Return whether the speed follows from the catalogue's link between the GPUs of a host."""
        if self.step is None or self.num_gpus == self.hosts:
            return False
        # A calibration measures only the GPUs of one host.
        return self.hosts > 1 or task.calibrated_link_gb_s(self.parallelism) is None

    @property
    def hours(self) -> float | None:
        """The hours of the full run."""
        return self.estimate.cost.full_run_hours if self.estimate and self.estimate.cost else None

    @property
    def usd(self) -> float | None:
        """The cost of the full run in USD, for all GPUs."""
        return self.estimate.cost.full_run_usd if self.estimate and self.estimate.cost else None

    @property
    def usd_interval(self) -> tuple[float, float] | None:
        """The interval of `usd`."""
        return self.estimate.cost.interval_usd if self.estimate and self.estimate.cost else None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GpuPlan(ShownAsTable):
    """The plans of one run for several numbers of GPUs, and a deadline in hours if there is one.

    `how_sure` says in words how the numbers were obtained. Each GPU offers `limit_gib` for tensors.
    The CUDA context of a process takes another `context_gib`. Collectives reach `network_gb_s`
    between the hosts; it is None if every row has one host. `left_out` names the values that were
    removed from the search space, and the reasons. `change` is the first change of the options with
    which one of the numbers surely fits, or None if one fits, or if no such change is known.
    """

    JSON: ClassVar = keys(
        model="task.model.name",
        device="task.device.name",
        workload="task.workload",
        price="task.price",
        link_gb_s="task.device.link_gb_s",
    ) | keys(
        *("network_gb_s", "limit_gib", "how_sure", "rows", "change", "within_hours"),
        cheapest=View("cheapest", CHOICE),
        fastest=View("fastest", CHOICE),
        cheapest_within=View("cheapest_within", CHOICE),
    )

    task: Task
    limit_gib: float
    rows: tuple[RankPlan, ...]
    how_sure: str
    context_gib: float
    network_gb_s: float | None = None
    within_hours: float | None = None
    left_out: tuple[str, ...] = ()
    change: FittingChange | None = None

    def facts(self) -> dict[str, str]:
        """Return one row for each number of GPUs."""
        facts = {"plan": f"{self.task.model.name} on {self.task.device.label}"}
        for row in self.rows:
            name = "1 GPU" if row.num_gpus == 1 else f"{row.num_gpus} GPUs, {row.parallelism.name}"
            numbers = (row.state, fmt_hours(row.hours), fmt_usd(row.usd), row.label)
            facts[name] = row.problem or ", ".join(filter(None, numbers))
        return facts

    @property
    def choices(self) -> tuple[RankPlan, ...]:
        """The rows that follow all pinned settings; the other rows are only for comparison."""
        return tuple(row for row in self.rows if not row.ignored_pins)

    @property
    def ignored_pins(self) -> str:
        """The pinned settings that some rows ignore, in words, or ""."""
        return " and ".join(dict.fromkeys(pin for row in self.rows for pin in row.ignored_pins))

    @property
    def fits(self) -> bool:
        """Whether a row that follows all pinned settings surely fits."""
        return any(row.state == FITS for row in self.choices)

    @property
    def trainable(self) -> tuple[RankPlan, ...]:
        """The rows to choose from: they surely fit and have a known duration."""
        return tuple(row for row in self.choices if row.state == FITS and row.hours is not None)

    @property
    def has_unknown_speed(self) -> bool:
        """Whether a row that fits has an unknown speed, so that comparisons leave it out."""
        return has_unknown_speed(self.choices)

    @property
    def needs_link(self) -> bool:
        """Whether some rows have no speed because the interconnect bandwidth is unknown."""
        several = any(
            row.num_gpus > row.hosts and row.estimate and not row.step for row in self.rows
        )
        return several and self.task.device.link_gb_s is None

    @property
    def links(self) -> dict[str, str]:
        """The bandwidth of each link that speeds follow from, in words, by the link's ends."""
        links: dict[str, str] = {}
        text = self.task.device.link_text
        if text and any(row.uses_link_of_catalogue(self.task) for row in self.rows):
            links["the GPUs" if self.network_gb_s is None else "the GPUs of a host"] = text
        if self.network_gb_s is not None and any(row.hosts > 1 and row.step for row in self.rows):
            links["the hosts"] = f"{self.network_gb_s:,.4g} GB/s, {REACHED:g} of the nominal rate"
        return links

    @property
    def fastest(self) -> RankPlan | None:
        """The row with the most tokens/s; of equally fast rows, the one with the fewest GPUs."""
        return fastest(self.trainable)

    @property
    def cheapest(self) -> RankPlan | None:
        """The row with the cheapest run."""
        return cheapest(self.trainable)

    @property
    def cheapest_within(self) -> RankPlan | None:
        """The cheapest row within the deadline."""
        return (
            cheapest(self.trainable, self.within_hours) if self.within_hours is not None else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The run on each number of GPUs, the fewest first.

    The winner uses `own` GPUs. For the numbers of GPUs in `known`, a row has the study's best
    configuration for this number. For other numbers of GPUs, a row is a projection of the winner.
    """

    own: int = 1
    known: tuple[int, ...] = ()
    rows: tuple[RankPlan, ...] = ()

    @property
    def has_unknown_speed(self) -> bool:
        """Whether a row that fits has an unknown speed, so that comparisons leave it out."""
        return has_unknown_speed(self.rows)

    @property
    def trainable(self) -> tuple[RankPlan, ...]:
        """The rows with a speed."""
        return tuple(row for row in self.rows if row.tokens_per_s is not None)

    def waits(self, row: RankPlan) -> float | None:
        """The predicted share of a step's time that a GPU waits for other GPUs; None if unknown."""
        return None if row.step is None else row.step.exposed_s / row.step.step_s


def with_efficiency(rows: Sequence[RankPlan], reference: RankPlan | None) -> tuple[RankPlan, ...]:
    """Return the rows with their efficiency: their speed per GPU, relative to `reference`.

    A row's efficiency is None if a speed is unknown.
    """
    if reference is None or not reference.tokens_per_s:
        return tuple(rows)
    each = reference.tokens_per_s / reference.num_gpus

    shares = (
        None if row.tokens_per_s is None else row.tokens_per_s / row.num_gpus / each for row in rows
    )

    return tuple(replace(row, efficiency=share) for row, share in zip(rows, shares, strict=True))


def has_unknown_speed(rows: Sequence[RankPlan]) -> bool:
    """Return whether a row that fits has an unknown speed."""
    return any(row.state == FITS and row.tokens_per_s is None for row in rows)


def fastest(rows: Sequence[RankPlan]) -> RankPlan | None:
    """Return the row with the most tokens/s; of equally fast rows, the one with the fewest GPUs."""
    return max(rows, key=lambda row: (row.tokens_per_s or 0.0, -row.num_gpus), default=None)


def cheapest(rows: Sequence[RankPlan], within_hours: float = math.inf) -> RankPlan | None:
    """Return the row with the fewest GPU-hours among the runs of at most `within_hours`.

    All GPU-hours have the same price, so the run of this row is also the cheapest.
    """
    known = [
        (row.hours, row) for row in rows if row.hours is not None and row.hours <= within_hours
    ]
    return min(
        known, key=lambda entry: (entry[0] * entry[1].num_gpus, entry[0]), default=(None, None)
    )[1]

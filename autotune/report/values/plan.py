"""The plan for one model on one card."""

from dataclasses import dataclass, field
from typing import ClassVar

from autotune.core.json_view import keys
from autotune.core.notebook import ShownAsTable
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate, FittingChange
from autotune.problem.constraints import NEEDS_CONSENT
from autotune.problem.run_cost import FITS
from autotune.problem.task import Task

NO_SPEED = "no formula gives the speed of this training: `autotune run` measures it"
ONLY_BASELINE = (
    "only the baseline's memory was computed, since each computation takes seconds: "
    "`autotune run` looks for the best configuration"
)
ONLY_LEANEST = (
    "the baseline does not fit; of the other configurations, only the memory of the leanest was "
    "computed, since each computation takes seconds: `autotune run` looks for the best "
    "configuration"
)
ONLY_GROUPED = (
    "only the baseline, and compiled layers whose experts use grouped matrix products (grouped "
    "GEMM), were computed, since each computation takes seconds: `autotune run` looks for the best "
    "configuration"
)
# If a plan's `reason` is one of these texts, few configurations were estimated: others may fit or
# be faster.
LITTLE_KNOWN = (NO_SPEED, ONLY_BASELINE, ONLY_LEANEST, ONLY_GROUPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The memory of a micro batch whose rows all have the same length.

    `plain` is the estimate without recomputation, and `recomputed` the estimate if every layer is
    recomputed.
    """

    JSON: ClassVar = keys(
        "micro_batch_size",
        "seq_len",
        none_gib="plain.need_gib",
        full_gib="recomputed.need_gib",
        fits="chosen.state",
        checkpointing="chosen.config.checkpointing",
    )

    micro_batch_size: int
    seq_len: int
    plain: Estimate
    recomputed: Estimate

    @property
    def chosen(self) -> Estimate:
        """The estimate without recomputation if it fits, otherwise the one with recomputation."""
        return self.plain if self.plain.state == FITS else self.recomputed


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(ShownAsTable):
    """The plan for one model on one card.

    `best` is None if no configuration is certain to fit, or if the speed of every fitting
    configuration is unknown. `baseline` is the configuration that fine-tuning guides recommend.
    `num_estimated` of the `space_size` configurations were estimated. `seen` names the measurements
    of other users on this card, which corrected the speeds. `from_reserve` says that no
    configuration of the search space fits, and that the plan is for the reserve: values to try only
    if all others do not fit (`setup.open_reserve`). `leanest` needs the least memory of all
    configurations that may win. `change` is the first change of the options that makes the run fit,
    or None if the run fits, or if no such change is known. `how_sure` says how the numbers were
    estimated. `calibrated` says which of the numbers rest on a calibration, and when it was made.
    `what_fits` maps the name of each table (such as LoRA on nf4) to its cells. `left_out` names the
    values that are not in the search space, with reasons. `warnings` are about the examples and the
    options, such as tokens that are cut off. `fitting` is the configuration with the least memory
    of those that fit at an unknown speed. If none surely fits, `least` is the configuration with
    the least memory, also of those in the reserve.
    """

    JSON: ClassVar = keys(
        model="task.model.name",
        device="task.device.name",
        own_card="task.device.given",
        workload="task.workload",
        price="task.price",
    ) | keys(
        *("limit_gib", "best", "baseline", "reason", "change"),
        *("seen", "how_sure", "calibrated", "what_fits", "warnings"),
        configurations=keys(looked_at="num_estimated", of="space_size"),
    )

    task: Task
    limit_gib: float
    best: Estimate | None
    baseline: Estimate
    reason: str
    num_estimated: int
    space_size: int
    leanest: TrainConfig
    how_sure: str
    change: FittingChange | None = None
    calibrated: str | None = None
    seen: tuple[str, ...] = ()
    from_reserve: bool = False
    what_fits: dict[str, tuple[Cell, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fitting: Estimate | None = None
    least: Estimate | None = None

    @property
    def shown(self) -> Estimate:
        """The estimate whose memory is the answer.

        It is the best or a fitting configuration, otherwise the one that needs the least memory.
        """
        return self.best or self.fitting or self.least or self.baseline

    @property
    def consented(self) -> tuple[str, ...]:
        """The values of the best configuration that change learning, such as 'quantization nf4'."""
        if self.best is None:
            return ()
        values = {name: getattr(self.best.config, name) for name in NEEDS_CONSENT}
        return tuple(
            f"{name} {value}" for name, value in values.items() if not NEEDS_CONSENT[name][1](value)
        )

    def facts(self) -> dict[str, str]:
        """Return the best configuration with its estimates or, if there is none, `shown`."""
        subject = f"{self.task.model.name} on {self.task.device.label}"
        if self.best is not None:
            return {"plan": subject} | self.best.facts()
        which = "the baseline" if self.shown is self.baseline else "the leanest"
        nothing = f"no configuration is certain to fit; {which}:"
        return {"plan": subject, "best": nothing} | self.shown.facts()

    @property
    def counted(self) -> bool:
        """Whether a dry probe computed the baseline's memory, on the meta device.

        A dry probe takes seconds for each configuration, so a counted plan has estimates for only a
        few other configurations.
        """
        return self.baseline.memory is not None and self.baseline.memory.counted

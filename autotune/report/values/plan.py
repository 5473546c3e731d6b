"""The plan of one model on one card, as a value."""

from dataclasses import dataclass, field
from typing import ClassVar

from autotune.core.json_view import keys
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate
from autotune.problem.run_cost import FITS
from autotune.problem.task import Task

NO_SPEED = "no formula knows the speed of such a training: `autotune run` measures it"
ONLY_BASELINE = "only the baseline was counted, since each count takes seconds: `autotune run` looks for the best"
ONLY_LEANEST = (
    "the baseline does not fit, and of all others only the one that needs the least memory was counted, since each "
    "count takes seconds: `autotune run` looks for the best"
)
# Reasons why there may be no best though something may fit, or a better one than is known.
LITTLE_KNOWN = (NO_SPEED, ONLY_BASELINE, ONLY_LEANEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a micro batch of rows of one length needs, without recomputation and with every layer recomputed."""

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
        """Without recomputation where that fits."""
        return self.plain if self.plain.state == FITS else self.recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan for one model on one card.

    `best` is None where nothing surely fits; `baseline` is the configuration that guides give. `num_estimated` of the
    `space_size` configurations were estimated. `seen` names the observations of this card that corrected the speeds.
    `from_reserve`: only what the floors keep for this case fits. `leanest` needs the least memory of all that may win.
    `how_sure` says where the numbers come from, `calibrated` which were calibrated and when. `what_fits` has the tables
    by their names.
    """

    JSON: ClassVar = keys(
        model="task.model.name",
        device="task.device.name",
        own_card="task.device.given",
        workload="task.workload",
        price="task.price",
    ) | keys(
        *("limit_gib", "best", "baseline", "reason", "seen", "how_sure", "calibrated", "what_fits"),
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
    calibrated: str | None = None
    seen: tuple[str, ...] = ()
    from_reserve: bool = False
    what_fits: dict[str, tuple[Cell, ...]] = field(default_factory=dict)

    @property
    def counted(self) -> bool:
        """Whether a dry probe counted the baseline: little else is known then."""
        return self.baseline.memory is not None and self.baseline.memory.counted

"""The longest training sequence (row) that fits, for each method, and the rows that were probed."""

from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.core.json_view import fields_plus
from autotune.core.notebook import ShownAsTable
from autotune.core.probe_types import Evidence
from autotune.core.units import fmt_count, fmt_gib, fmt_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A row that was probed on the card, with all layers or with `depth` of them.

    `need_gib` is None if the needed memory is unknown.
    """

    tokens: int
    depth: int | None
    outcome: str
    need_gib: float | None
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LongestRow(ShownAsTable):
    """The longest row of one method. The names of the fields are keys of the JSON output.

    Unknown values are None. `evidence` is "measured" if the card ran a step with this row, and
    "estimated" otherwise. An estimated time lies between `step_s_low` and `step_s_high`. `timed_on`
    is the card on which the times were measured. It may be a larger card whose memory was capped to
    the target card's memory. `gpu_gib` excludes the CUDA context. `problem` says why there is no
    row, or no time. `limited_by` names the limit: the GPU's memory, the host's memory or the user's
    limit.
    """

    JSON: ClassVar = fields_plus("tokens_per_s")

    method: str
    config: dict[str, Any]
    tokens: int | None = None
    evidence: Evidence = Evidence.ESTIMATED
    step_s: float | None = None
    step_s_low: float | None = None
    step_s_high: float | None = None
    timed_on: str | None = None
    gpu_gib: float | None = None
    host_gib: float | None = None
    limited_by: str | None = None
    predicted_tokens: int | None = None
    problem: str | None = None
    attempts: tuple[Attempt, ...] = ()

    def facts(self) -> dict[str, str]:
        """Return the length of the row, with its memory and the time of its step."""
        row = self.problem or f"{self.tokens or 0:,} tokens [{self.evidence}]"
        step = f"{fmt_seconds(self.step_s)}, {fmt_count(self.tokens_per_s)} tokens/s"
        return {"method": self.method, "longest sequence": row} | (
            {} if self.problem else {"memory": fmt_gib(self.gpu_gib), "step": step}
        )

    @property
    def tokens_per_s(self) -> float | None:
        """The tokens of the row, divided by the seconds of its step."""
        return self.tokens / self.step_s if self.tokens and self.step_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestAnswer:
    """The longest row of each method.

    `positions` is the number of positions that the model was trained for. An unknown limit is None.
    """

    model: str
    device: str
    limit_gib: float
    host_limit_gib: float | None
    positions: float | None
    rows: tuple[LongestRow, ...]

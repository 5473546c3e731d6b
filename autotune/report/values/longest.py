"""The longest row that fits, as values: a row for each method, and the probes that were tried."""

from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.core.json_view import also
from autotune.core.probe_types import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A row that was tried on the card: with all layers, or `depth` of them. `need_gib` is None where it is unknown."""

    tokens: int
    depth: int | None
    outcome: str
    need_gib: float | None
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRow:
    """The longest row of one method; field names are keys of the JSON, None is unknown.

    `evidence` is measured where a step with this row was done on the card, else estimated; times of an estimate are
    within `step_s_low` and `step_s_high`. `timed_on` is the card of the times: a larger one may stand in for the card,
    under a cap of its memory. `gpu_gib` leaves the CUDA context out. `problem` says why there is no row. `limited_by`
    is gpu memory, host memory or what was asked for.
    """

    JSON: ClassVar = also("tokens_per_s")

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

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the row for each second of its step."""
        return self.tokens / self.step_s if self.tokens and self.step_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestAnswer:
    """The rows of each method. `positions` is the length that the model was trained for. Unknown limits are None."""

    model: str
    device: str
    limit_gib: float
    host_limit_gib: float | None
    positions: float | None
    rows: tuple[LongestRow, ...]

"""Observation: a measurement that somebody made of a configuration on a card, and those that come with the package."""

import functools
from dataclasses import dataclass

from autotune.core.files import load_data
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement that somebody made of a configuration on a card.

    `tokens_per_s` counts whole rows, padding included: how many tokens are useful depends on somebody's data. `model`
    is a name of the catalogue; None for another model, of which `model_digest` describes the shape.
    """

    device: str
    model: str | None
    model_digest: str | None
    config: TrainConfig
    accumulation: int
    tokens_per_s: float
    step_time_s: float | None
    peak_reserved_gib: float | None
    source: str
    as_of: str | None
    trainer: str = "transformers"
    evidence: Evidence = Evidence.MEASURED


@functools.cache
def published_observations() -> tuple[Observation, ...]:
    """What comes with the package: measurements that others published."""
    unknown = {"step_time_s": None, "peak_reserved_gib": None, "model_digest": None}
    return tuple(
        Observation(**unknown | row | {"config": TrainConfig(**row["config"])})
        for row in load_data("autotune.catalog", "data/sightings")
    )

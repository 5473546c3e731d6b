"""The estimate of one configuration, as a value that renderers read."""

from autotune.prediction.estimate import Estimate

__all__ = ["Estimate"]

"""Predictions of a run's memory and speed, from a few probes or by formula without a probe."""

"""Predict a run's memory and speed, from a few probes or, without a probe, with formulas."""

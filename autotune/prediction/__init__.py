"""Formulas and models that predict memory and speed from a few probes, or without a probe."""

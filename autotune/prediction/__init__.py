"""Formulas and models that predict memory and speed without a probe, or from a few."""

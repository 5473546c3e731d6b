"""Runs exported scripts: the full training run, verification, and held-out losses."""

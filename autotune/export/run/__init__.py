"""Runs exported scripts: for the full training run, for verification, and for held-out losses."""

"""Exported scripts run: the full training run, verification, and held-out losses."""

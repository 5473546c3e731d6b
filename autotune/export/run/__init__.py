"""Runs exported scripts for full trainings, for verification, and to measure held-out losses."""

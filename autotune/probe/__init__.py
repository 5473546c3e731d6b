"""Probes: short, real fine-tuning runs, with the code of the worker process and its parent."""

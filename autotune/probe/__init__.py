"""Probes, which are short, real fine-tuning runs, in the worker process and in its parent."""

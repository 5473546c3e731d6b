"""Probes: short real fine-tuning runs in a worker process, and the parent's side of them."""

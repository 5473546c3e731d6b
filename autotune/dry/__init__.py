"""Computes the memory and the work of a training step on the meta device, without a GPU."""

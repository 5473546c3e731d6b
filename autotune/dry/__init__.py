"""A training step counted without a GPU: its memory and its work, on the meta device."""

"""autotune: find the best fine-tuning configuration by short real probes on the target GPU."""

__version__ = "0.1.0"

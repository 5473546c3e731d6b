"""The version of this package. It is in `core`, so every other module may import it."""

__version__ = "0.1.0"

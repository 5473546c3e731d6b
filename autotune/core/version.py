"""The version of this package, in the layer that every other module may import."""

__version__ = "0.1.0"

"""The version of this library; ranks compare it."""

__version__ = "0.1.0"

"""The version, where the lowest rooms can read it."""

__version__ = "0.1.0"

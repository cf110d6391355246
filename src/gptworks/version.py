"""The version of gptworks."""

__version__ = "0.2.0"

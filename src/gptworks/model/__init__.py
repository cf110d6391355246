"""The model: one class for every decoder-only variant. Imports the configuration alone, so it can be lifted out."""

from gptworks.model.gpt import GPT

__all__ = ["GPT"]

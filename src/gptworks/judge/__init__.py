"""The referee of a campaign of experiments: it decides which changes to a recipe are gains, at any stopping time."""

from gptworks.judge.campaign import Campaign

__all__ = ["Campaign"]

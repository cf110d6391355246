"""Judge a campaign of experiments: decide which changes to a recipe are gains. A campaign may stop at any time."""

from gptworks.judge.campaign import Campaign

__all__ = ["Campaign"]

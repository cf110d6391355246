"""The objective of a recipe."""

from pathlib import Path

from gptworks.config import Recipe
from gptworks.training.objectives.base import Objective
from gptworks.training.objectives.distillation import Distillation
from gptworks.training.objectives.odds_ratio import OddsRatio
from gptworks.training.objectives.preference import Preference
from gptworks.training.objectives.reward import Reward

OBJECTIVES: dict[str, type[Objective]] = {
    "next_token": Objective,
    "instruction": Objective,
    "preference": Preference,
    "odds_ratio": OddsRatio,
    "distillation": Distillation,
    "reward": Reward,
}
"""By `objective.type`."""


def choose_objective(recipe: Recipe, data_folder: Path, verify: bool = False) -> Objective:
    """The objective that `recipe.objective` names; arguments as for `Objective`."""
    return OBJECTIVES[recipe.objective.type](recipe, data_folder, verify)

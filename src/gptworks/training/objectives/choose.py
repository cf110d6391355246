"""The objective of a recipe."""

from pathlib import Path
from pkgutil import resolve_name

from gptworks.config import Recipe
from gptworks.config.objective import OBJECTIVE_SETTINGS
from gptworks.data.samples import open_samples
from gptworks.training.objectives.base import Objective

OBJECTIVES: dict[str, type[Objective]] = {
    name: resolve_name(f"gptworks.training.objectives.{settings.code}") for name, settings in OBJECTIVE_SETTINGS.items()
}
"""By `objective.type`."""


def choose_objective(recipe: Recipe, data_folder: Path, verify: bool = False) -> Objective:
    """The objective that `recipe.objective` names; arguments and errors as for `open_samples`."""
    return OBJECTIVES[recipe.objective.type](recipe, open_samples(recipe, data_folder, verify))

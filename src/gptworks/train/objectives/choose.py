"""Which task a recipe's objective is."""

from pathlib import Path

from gptworks.config import Recipe
from gptworks.train.objectives.base import Task
from gptworks.train.objectives.distillation import Distillation
from gptworks.train.objectives.instruction import Instruction
from gptworks.train.objectives.preference import Preference
from gptworks.train.objectives.reward import Reward

TASKS: dict[str, type[Task]] = {
    "next_token": Task,
    "instruction": Instruction,
    "preference": Preference,
    "distillation": Distillation,
    "reward": Reward,
}
"""By `objective.type`."""


def choose_task(recipe: Recipe, data_folder: Path, verify: bool = False) -> Task:
    """The task that `recipe.objective` names; arguments as for `Task`."""
    return TASKS[recipe.objective.type](recipe, data_folder, verify)

"""The second model that some objectives need: a teacher, or a frozen copy of the starting model."""

from gptworks.config import ModelConfig, Recipe
from gptworks.errors import UserError
from gptworks.model.cost import Shapes
from gptworks.model.rotary import rotary_tables_bytes
from gptworks.planning.params import count_parameters
from gptworks.planning.state import held_weights_bytes
from gptworks.planning.trained import trained
from gptworks.recipe import load_recipe


def teacher_config(recipe: Recipe) -> ModelConfig | None:
    """Return the configuration of the run's teacher; None if the objective has no teacher.

    Raises:
        UserError: the teacher's run folder has no recipe, or its recipe cannot be read.
    """
    folder = recipe.objective.teacher_run
    if folder is None:
        return None
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"objective.teacher={folder} is not a run folder: it has no recipe.yaml.")
    return load_recipe(folder).model


def other_models_bytes(recipe: Recipe) -> int:
    """Return the bytes of weights and rotary tables of the objective's second model. 0: the objective has none, or its
    second model is the trained model without the adapter."""
    if (model := teacher_config(recipe)) is not None:
        return 4 * count_parameters(model).total + _tables_bytes(model)
    if not copies_start(recipe):
        return 0
    count = count_parameters(recipe.model)
    part = trained(recipe.model, recipe.adapter, recipe.freeze)
    return held_weights_bytes(count, part) + _tables_bytes(recipe.model)


def copies_start(recipe: Recipe) -> bool:
    """Return whether the objective keeps a copy of the starting model; it needs none if only an adapter is trained."""
    return recipe.objective.keeps_start and (recipe.adapter is None or recipe.adapter.embeddings)


def _tables_bytes(model: ModelConfig) -> int:
    """Return the bytes of the rotary tables: the cosines and sines of every position."""
    return rotary_tables_bytes(Shapes(model, batch_size=0, length=0, product_bytes=4, on_cpu=True))

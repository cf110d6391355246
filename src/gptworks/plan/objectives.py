"""What a run's objective asks of a step beyond predicting the next token: more rows, a mask, other models."""

from dataclasses import replace

from gptworks.config import ModelConfig, Recipe
from gptworks.errors import UserError
from gptworks.plan.flops import forward_flops
from gptworks.plan.memory import Setting
from gptworks.plan.params import count_parameters
from gptworks.plan.trained import trained
from gptworks.recipe import load_recipe


def recipe_setting(recipe: Recipe, precision: str, on_cpu: bool) -> Setting:
    """The step of a run on one device, checkpoints included.

    Raises:
        UserError: a teacher's recipe cannot be read.
    """
    part = trained(recipe.model, recipe.adapter, recipe.freeze)
    return replace(
        Setting.of(recipe.model, recipe.train, precision, on_cpu, saves=True, trained=part),
        objective=recipe.objective.type,
        rows_per_sample=recipe.objective.rows_per_sample,
        several_texts=bool(recipe.data.conversations) and recipe.objective.several_texts,
        other_models_bytes=_other_models_bytes(recipe),
    )


def teacher_flops_per_token(recipe: Recipe) -> float:
    """Of the forward pass of a teacher; 0 without one."""
    model = teacher_config(recipe)
    return 0.0 if model is None else forward_flops(model, recipe.model.context_length).per_token_dense


def teacher_config(recipe: Recipe) -> ModelConfig | None:
    """The model that the run learns from; None: it learns from data alone.

    Raises:
        UserError: there is no such run.
    """
    folder = recipe.objective.teacher_run
    if folder is None:
        return None
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"objective.teacher={folder} is not a run folder: it has no recipe.yaml.")
    return load_recipe(folder).model


def _other_models_bytes(recipe: Recipe) -> int:
    """Of the weights that stand beside those in training: a teacher's, or those of the start."""
    if (model := teacher_config(recipe)) is not None:
        return 4 * count_parameters(model).total
    adapted = recipe.adapter is not None and not recipe.adapter.embeddings
    return 4 * count_parameters(recipe.model).total if recipe.objective.keeps_start and not adapted else 0

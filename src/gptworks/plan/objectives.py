"""What a run's objective asks of a step beyond predicting the next token: more rows, a mask, other models."""

from dataclasses import replace

from gptworks.config import DistillationObjective, ModelConfig, Recipe, RewardObjective
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
        rows_per_sample=2 if recipe.objective.type == "preference" else 1,  # both answers of a pair
        several_texts=bool(recipe.data.conversations) and recipe.objective.type in ("instruction", "distillation"),
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
    if not isinstance(recipe.objective, DistillationObjective):
        return None
    folder = recipe.objective.teacher
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"objective.teacher={folder} is not a run folder: it has no recipe.yaml.")
    return load_recipe(folder).model


def _other_models_bytes(recipe: Recipe) -> int:
    """Of the weights that stand beside those in training: a teacher's, or those of the start."""
    if (model := teacher_config(recipe)) is not None:
        return 4 * count_parameters(model).total
    adapted = recipe.adapter is not None and not recipe.adapter.embeddings
    keeps = isinstance(recipe.objective, RewardObjective) and recipe.objective.beta > 0 and not adapted
    return 4 * count_parameters(recipe.model).total if keeps else 0

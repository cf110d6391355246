"""Steps shared by all imports: write a run folder at step 0, with settings for further training."""

from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from gptworks.config import ModelConfig, Recipe, TrainConfig, train_defaults
from gptworks.config.objective import NEXT_TOKEN
from gptworks.files import write_sums, write_whole
from gptworks.recipe import save_recipe
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress


def write_run(folder: Path, recipe: Recipe, tensors: dict[str, Tensor], card: str) -> None:
    """Write a run at step 0 into a folder that already holds its tokenizer."""
    save_recipe(recipe, folder / "recipe.yaml")
    write_sums(folder / "tokenizer")
    save_checkpoint(folder, 0, tensors, {}, asdict(Progress()))
    write_whole(folder / "model-card.md", card)


def further_training(model: ModelConfig, adapter: bool = False) -> TrainConfig:
    """Return training settings for an imported model's recipe, in case the user trains it further."""
    length = {"max_steps": 1000, "batch_size": 8}
    return TrainConfig(**train_defaults(length, model, NEXT_TOKEN, tunes=True, adapter=adapter) | length)

"""What every import does: read settings that anyone may have written, and write a run folder at step 0."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from gptworks.checkpoint import save_checkpoint
from gptworks.config import ModelConfig, Recipe, TrainConfig, train_defaults
from gptworks.config.objective import NEXT_TOKEN
from gptworks.errors import UserError
from gptworks.files import write_sums, write_whole
from gptworks.recipe import save_recipe
from gptworks.train.progress import Progress


def read_json(path: Path, fix: str = "") -> dict[str, Any]:
    """The mapping in a JSON file.

    Args:
        fix: what to do where there is no such file.

    Raises:
        UserError: there is none, or it holds no readable mapping.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file. {fix}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__}, not a mapping.")
    return values


def write_run(folder: Path, recipe: Recipe, tensors: dict[str, Tensor], card: str) -> None:
    """Write a run at step 0 into a folder that holds its tokenizer already."""
    save_recipe(recipe, folder / "recipe.yaml")
    write_sums(folder / "tokenizer")
    save_checkpoint(folder, 0, tensors, {}, asdict(Progress()))
    write_whole(folder / "model-card.md", card)


def further_training(model: ModelConfig, adapter: bool = False) -> TrainConfig:
    """How an imported model would be trained further, for its recipe: nothing was trained here."""
    length = {"max_steps": 1000, "batch_size": 8}
    return TrainConfig(**train_defaults(length, model, NEXT_TOKEN, tunes=True, adapter=adapter) | length)

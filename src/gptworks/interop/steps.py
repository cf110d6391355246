"""Steps shared by exports and imports: remove heads that other programs lack, name the architectures nearest to a
model, and write a run folder at step 0, with settings for further training."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from gptworks.config import ModelConfig, Recipe, TrainConfig, train_defaults
from gptworks.config.objective import NEXT_TOKEN
from gptworks.files import write_sums, write_whole
from gptworks.model.gpt import GPT
from gptworks.recipe import save_recipe
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress

CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": " Hi  there\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What is <|im_end|> <|endoftext|>?\n"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Why?"},
    ],
    [
        {"role": "user", "content": "é 日本 🤖"},
        {"role": "assistant", "content": "<b>yes</b> & 'no' {{ x }}"},
        {"role": "user", "content": "\n"},
    ],
)
"""Conversations on which an exported chat template must give what the run's own gives, unless that refuses them."""


def leave_out_heads(model: GPT) -> list[str]:
    """Remove the heads that predict tokens beyond the next, because other programs do not support them. Return a list
    with one note, or an empty list if there were no such heads. The next token's logits do not change."""
    n = model.drop_future_heads()
    what = "the head of 1 token" if n == 1 else f"the heads of {n} tokens"
    return [f"{what} beyond the next (model.n_future_tokens={n + 1}) left out"] if n else []


def nearest_architectures(config: ModelConfig, obstacles: Mapping[str, list[str]]) -> str:
    """Return a text that names the architectures that lack the fewest of a model's settings, and these settings.

    Args:
        obstacles: architecture name → the settings that it lacks. If several architectures lack the same settings,
            the text names only the first.
    """
    fewest = min(map(len, obstacles.values()))
    nearest: dict[str, str] = {}
    for name, settings in obstacles.items():
        if len(settings) == fewest:
            nearest.setdefault(", ".join(f"model.{setting}={_shown(config, setting)}" for setting in settings), name)
    return "; ".join(f"`{name}` lacks {settings}" for settings, name in nearest.items())


def _shown(config: ModelConfig, setting: str) -> str:
    value: object = config
    for part in setting.split("."):
        value = getattr(value, part)
    return str(value).lower() if isinstance(value, bool) else str(value)


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

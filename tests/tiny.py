"""A tiny run for tests, and how to start one in a process of its own."""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

import commands
from gptworks.config import EARLIER_DEFAULTS, ModelConfig, TrainConfig

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog, {i * i} times.\n" for i in range(600))


def plain_model(**settings: Any) -> ModelConfig:
    """Return a model configuration like GPT-2's blocks, unless a test sets other values. Projections are random, so
    that each block changes its input from the first step."""
    return ModelConfig(**EARLIER_DEFAULTS | settings)


def plain_training(**settings: Any) -> TrainConfig:
    """Return training settings with AdamW and a cosine schedule from the first step, unless a test sets other
    values."""
    plain = {"optimizer": "adamw", "learning_rate": 3e-4, "weight_decay": 0.1, "schedule": "cosine",
             "final_rate_fraction": 0.1}  # fmt: skip
    return TrainConfig(**plain | settings)


def recipe_tree(folder: Path, **train: Any) -> dict[str, Any]:
    """Return a recipe of about 30,000 parameters on a text file in `folder`.

    GPTWORKS_TEST_SEED and GPTWORKS_TEST_PRECISION make it another seed's and another precision's run, with which the
    margins of tests marked `learning` were found and can be checked.
    """
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT, encoding="utf-8")
    seed, precision = os.environ.get("GPTWORKS_TEST_SEED"), os.environ.get("GPTWORKS_TEST_PRECISION")
    if precision is not None:
        train = {"precision": precision} | train
    return ({} if seed is None else {"seed": int(seed)}) | {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "model": {
            "context_length": 32, "n_layers": 2, "d_model": 32, "n_heads": 2, "norm": "rmsnorm", "mlp": "relu2",
            "qk_norm": True, "zero_init_projections": False, "dropout_residual": 0.1, "dropout_attention": 0.1,
        },
        "tokenizer": {"type": "char"},
        "data": {
            "sources": [{"type": "text", "path": str(text)}],
            "cache_dir": str(folder / "data"),
            "validation": {"fraction": 0.1, "by": "tail"},
        },
        "train": {
            "max_steps": 20, "batch_size": 8, "micro_batch_size": 4, "optimizer": "muon", "learning_rate": 0.003,
            "weight_decay": 0.1, "schedule": "cosine", "final_rate_fraction": 0.1, "warmup_steps": 2, "log_every": 1,
            "evaluate_every": 5, "evaluate_sequences": 8, "checkpoint_every": 4, "sample_every": 0, "device": "cpu",
            **train,
        },
    }  # fmt: skip


def write_recipe(folder: Path, **train: Any) -> Path:
    """Write the recipe to a file."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe_tree(folder, **train)), encoding="utf-8")
    return path


def gptworks(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, as a user does; for options see `commands.run`."""
    return commands.run("-m", "gptworks", *arguments, **options)


def trained(folder: Path, steps: int = 200, sampling: dict[str, Any] | None = None, **model: Any) -> Path:
    """Return a trained run with a byte-level BPE and an architecture that can be exported."""
    from gptworks.recipe import parse_recipe
    from gptworks.training.loop import train

    tree = recipe_tree(
        folder, max_steps=steps, optimizer="adamw", learning_rate=0.01, evaluate_every=steps, checkpoint_every=steps,
        batch_size=16, micro_batch_size=16, warmup_steps=10,
    )  # fmt: skip
    tree["model"] = {
        "context_length": 64, "n_layers": 2, "d_model": 32, "n_heads": 2, "norm": "rmsnorm", "mlp": "swiglu",
        "qk_norm": False, "zero_init_projections": False, **model,
    }  # fmt: skip
    tree |= {"tokenizer": {"type": "bpe", "vocab_size": 320}, "sampling": sampling or {}}
    train(parse_recipe(tree))
    return folder / "run"


BY_NAME = {"tensors", "tokenizer_files", "differing_settings", "best_settings", "settings"}
"""Maps of printed JSON whose keys are names of tensors, files or settings."""


def odd_keys(tree: Any, by_name: bool = False) -> list[str]:
    """Return keys of printed JSON that are not identifiers, so that a program must quote them."""
    if isinstance(tree, list):
        return [key for item in tree for key in odd_keys(item)]
    if not isinstance(tree, dict):
        return []
    odd = [] if by_name else [key for key in tree if not key.isidentifier()]
    return odd + [found for key, item in tree.items() for found in odd_keys(item, key in BY_NAME)]

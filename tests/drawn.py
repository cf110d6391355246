"""Random recipes of every objective, for comparing plans with training's own rules, steps and memory."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.recipe import parse_recipe

SOURCES = {
    "next_token": {"type": "python-stdlib"},
    "instruction": {"type": "conversations", "path": "chats.jsonl"},
    "preference": {"type": "preferences", "path": "pairs.jsonl"},
    "odds_ratio": {"type": "preferences", "path": "pairs.jsonl"},
    "distillation": {"type": "python-stdlib"},
    "reward": {"type": "conversations", "path": "chats.jsonl"},
}


def teacher_in(folder: Path) -> Path:
    """Make a teacher's run folder that has only a recipe."""
    tree = {
        "name": "teacher",
        "model": {"vocab_size": 2000, "context_length": 4096, "n_layers": 2, "d_model": 192, "n_heads": 4},
        "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1},
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree), encoding="utf-8")
    return folder


def drawn_recipe(
    draw: random.Random,
    teacher: Path,
    widths: Sequence[int] = (96, 192),
    contexts: Sequence[int] = (64, 128, 256),
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    train: Callable[[random.Random], dict[str, Any]] = lambda draw: {},
) -> Recipe:
    """Return a random recipe of any objective that trains the whole model, an adapter, or all but frozen parts.

    Args:
        train: draws more settings of the training section.
    """
    while True:
        tree = _tree(draw, teacher, widths, contexts, batch_sizes)
        tree["train"] |= train(draw)
        try:
            return parse_recipe(tree)
        except UserError:
            continue  # the recipe itself is refused: no run has it


def _tree(
    draw: random.Random, teacher: Path, widths: Sequence[int], contexts: Sequence[int], batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """Return a random recipe as a mapping; some are invalid."""
    objective, part = draw.choice(list(SOURCES)), draw.choice(["whole", "whole", "whole", "adapter", "freeze"])
    batch_size = draw.choice(batch_sizes)
    model: dict[str, Any] = {
        "vocab_size": 2000, "context_length": draw.choice(contexts), "n_layers": draw.choice([1, 2, 3, 4, 6]),
        "d_model": draw.choice(widths), "n_heads": draw.choice([2, 3, 4, 6]),
        "norm": draw.choice(["rmsnorm", "layernorm"]), "mlp": draw.choice(["gelu", "swiglu", "relu2"]),
        "tie_embeddings": draw.random() < 0.6, "qk_norm": draw.random() < 0.5,
        "position": draw.choice(["rope", "rope", "learned"]), "dropout_attention": draw.choice([0.0, 0.0, 0.0, 0.1]),
        "zero_init_projections": False,
    }  # fmt: skip
    if draw.random() < 0.15:
        model |= {"n_experts": 4, "n_experts_per_token": 2}
    if draw.random() < 0.3:
        model |= {"n_kv_heads": draw.choice([d for d in (1, 2, 3) if model["n_heads"] % d == 0])}
    if draw.random() < 0.2:
        model |= {"window": 32, "window_pattern": ["window", "full"]}
    if draw.random() < 0.2 and part == "whole":
        model |= {"value_residual": True, "attention_gate": True}
    tree: dict[str, Any] = {
        "name": "drawn",
        "model": model,
        "tokenizer": {"type": "char"} | ({} if "python" in SOURCES[objective]["type"] else {"chat_template": "plain"}),
        "data": {"sources": [SOURCES[objective]]},
        "objective": {"type": objective},
        "train": {
            "max_steps": 10, "batch_size": batch_size,
            "micro_batch_size": draw.choice([d for d in range(1, batch_size + 1) if batch_size % d == 0]),
            "optimizer": draw.choice(["adamw", "adamw", "muon"]) if part != "adapter" else "adamw",
            "optimizer_state": draw.choice(["fp32", "fp32", "fp32", "int8"]),
            "precision": draw.choice(["fp32", "bf16"]), "ema_decay": draw.choice([0.0, 0.0, 0.99]),
            "activation_checkpointing": draw.choice(["none", "none", "selective", "block"]), "compile": "none",
        },
    }  # fmt: skip
    if objective == "distillation":
        tree["objective"]["teacher"] = str(teacher)
    if objective == "reward":
        tree["objective"] |= {
            "reward": "reward.py:score", "group_size": draw.choice([2, 4]), "beta": draw.choice([0.0, 0.1]),
            "max_tokens": 16,
        }  # fmt: skip
    if part == "adapter":
        tree |= {"adapter": {"rank": 4, "base": draw.choice(["full", "int8", "int4"])}, "initialize_from": str(teacher)}
    if part == "freeze":
        tree["freeze"] = {"first_blocks": 1, "embeddings": draw.random() < 0.5}
    return tree

"""Makes conversations and recipes that learn from them, small enough for a test."""

import json
from pathlib import Path
from typing import Any

import tiny

QUESTIONS = {"brown": "fox", "lazy": "dog", "over": "jumps", "line": "number", "quick": "times"}


def records(n: int = 60) -> list[dict[str, str]]:
    """Return Alpaca records that all differ."""
    words = list(QUESTIONS.items())
    return [
        {"instruction": f"what of {words[i % 5][0]} {i}?", "output": f"the {words[i % 5][1]} of line {i * i}."}
        for i in range(n)
    ]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def base_tree(folder: Path, **train: Any) -> dict[str, Any]:
    """Return the recipe of a base model on plain text like that of `tiny`, with a byte-level tokenizer."""
    tree = tiny.recipe_tree(folder, **train)
    tree["model"] |= {"dropout_residual": 0.0, "dropout_attention": 0.0, "context_length": 128}
    tree["model"] |= {"position": "rope", "mlp": "swiglu"}
    tree["train"]["warmup_steps"] = 0
    return tree | {"name": "base", "run_dir": str(folder / "base"), "tokenizer": {"type": "bpe", "vocab_size": 300}}


def tune_tree(folder: Path, rows: list[Any] | None = None, **train: Any) -> dict[str, Any]:
    """Return the recipe of instruction tuning of that base model, with two new tokens."""
    path = folder / "chats.jsonl"
    if not path.exists() or rows is not None:
        write_jsonl(path, records() if rows is None else rows)
    return base_tree(folder, **train) | {
        "name": "tuned",
        "run_dir": str(folder / "tuned"),
        "initialize_from": str(folder / "base"),
        "objective": {"type": "instruction"},
        "tokenizer": {
            "type": "file",
            "path": str(folder / "base" / "tokenizer"),
            "added_tokens": ["<|im_start|>", "<|im_end|>"],
            "chat_template": "chatml",
        },
        "data": {
            "sources": [{"type": "conversations", "path": str(path)}],
            "cache_dir": str(folder / "data"),
            "validation": {"fraction": 0.15},
        },
    }

"""A judge without training: runs whose losses follow from seed, learning rate and steps, written at once."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from gptworks.config import Recipe
from gptworks.errors import RunError
from gptworks.recipe import save_recipe, with_vocab_size

STEP_SECONDS = 0.1


def write_recipe(folder: Path, **settings: Any) -> Path:
    path = folder / "tiny.yaml"
    tree = tiny.recipe_tree(folder, max_steps=100, learning_rate=0.1) | settings
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path


def train(recipe: Recipe, stop_asked: Callable[[], Any], report: Callable[[str], None]) -> bool:
    """Stand for `train_to_end`: the learning rate is added to the loss, and smaller micro-batches take longer."""
    if stop_asked():
        return False
    rate, steps = recipe.train.learning_rate, recipe.train.max_steps or 0
    if rate > 0.9:
        raise RunError("the run failed: no space left on device.")
    place = recipe.run_dir
    if place.exists():  # it ended before the judge was killed
        return True
    place.mkdir(parents=True)
    save_recipe(with_vocab_size(recipe, 43), place / "recipe.yaml")
    own = random.Random(f"{recipe.seed} {rate} {steps} {recipe.train.micro_batch_size}")
    end = 2 + random.Random(recipe.seed).gauss(0, 0.1) + rate + own.gauss(0, 1e-3) + 10 / steps
    seconds = 4 * STEP_SECONDS / recipe.train.micro_batch_size
    with (place / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            base = {"step": step, "tokens": step, "loss": end, "seconds": round(step * seconds, 3)}
            file.write(json.dumps({"kind": "train"} | base) + "\n")
        file.write(json.dumps({"kind": "validation", "perplexity": 1.0, "bits_per_byte": None} | base) + "\n")
    return True


def in_turns(recipes: Sequence[Recipe]) -> list[float]:
    """Stand for the measurement after a pair: smaller micro-batches take longer."""
    return [4 * STEP_SECONDS / one.train.micro_batch_size for one in recipes]


def sealed_loss(run_dir: Path, secret: Path) -> float:
    """Stand for the loss on sealed text: the run's last loss and 1."""
    return float(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["loss"]) + 1


def without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tries train with `train`."""
    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", train)
    monkeypatch.setattr("gptworks.runs.try_run.measured_step_seconds", lambda recipe: STEP_SECONDS)
    monkeypatch.setattr("gptworks.runs.try_run.measured_in_turns", in_turns)
    monkeypatch.setattr("gptworks.judge.final.sealed_loss", sealed_loss)
    monkeypatch.setattr("gptworks.judge.begin.secrets.token_bytes", lambda n: b"\x07" * n)  # the same seeds each time

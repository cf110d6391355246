"""Makes run folders by hand, so that a test knows every number in them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
from gptworks.recipe import parse_recipe, save_recipe, with_vocab_size
from gptworks.runs.history import History, read_history
from gptworks.training.record.metrics import MetricsLog, Record


def training(step: int, loss: float, **more: Any) -> Record:
    return {
        "kind": "train", "step": step, "tokens": step * 256, "loss": loss, "grad_norm": 1.0 / step,
        "learning_rate": 0.001 * step, "seconds": 0.5 * step, "tokens_per_second": 500.0 + step, **more,
    }  # fmt: skip


def validation(step: int, loss: float, bits_per_byte: float | None = None) -> Record:
    return {
        "kind": "validation", "step": step, "tokens": step * 256, "loss": loss, "perplexity": 2.0 + loss,
        "bits_per_byte": bits_per_byte,
    }  # fmt: skip


def write_run(folder: Path, records: Sequence[Record], seed: int = 1, **sections: dict[str, Any]) -> History:
    """Write a run folder of the tiny recipe with these records; `sections` change its model, data or train settings."""
    folder.mkdir(parents=True)
    tree = tiny.recipe_tree(folder.parent) | {"run_dir": str(folder), "seed": seed}
    for section, settings in sections.items():
        tree[section] = {**tree[section], **settings}
    recipe = parse_recipe(tree)
    save_recipe(with_vocab_size(recipe, recipe.model.vocab_size or 43), folder / "recipe.yaml")
    log = MetricsLog(folder / "metrics.jsonl", 0)
    for record in records:
        log.write(record)
    log.close()
    return read_history(folder)


def curve(losses: Sequence[float], every: int = 5) -> list[Record]:
    """Return a training record and an evaluation after every `every` steps."""
    steps = [every * (i + 1) for i in range(len(losses))]
    pairs = zip(steps, losses, strict=True)
    return [record for step, loss in pairs for record in (training(step, loss + 0.1), validation(step, loss))]

"""Measure reward margins on held-out pairs during DPO, on real pairs; before DPO, they are 0.

    python bench/preference.py pairs.json [--base-steps 150] [--steps 60]

A small model first learns the chosen answers, then to prefer them. Held-out pairs are chosen by their prompt, so that
both phases hold out the same ones.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from gptworks.config import PreferencesSource
from gptworks.data.conversations.preferences import iter_pairs
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.metrics import read_metrics

HELD_OUT = 0.1


def recipe(folder: Path, name: str, steps: int, **changes: Any) -> dict[str, Any]:
    """Return the recipe of a model of about 1 million parameters."""
    return {
        "name": name,
        "run_dir": str(folder / name),
        "model": {"context_length": 256, "n_layers": 4, "d_model": 128, "n_heads": 4, "mlp": "gelu"},
        "train": {
            "max_steps": steps, "batch_size": 16, "micro_batch_size": 8, "optimizer": "adamw", "learning_rate": 3e-3,
            "warmup_steps": 10,
            "evaluate_every": steps, "checkpoint_every": steps, "log_every": max(1, steps // 5), "device": "cpu",
        },
    } | changes  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="a JSON list of instruction, input, chosen, rejected")
    parser.add_argument("--base-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pairs = iter_pairs([PreferencesSource(type="preferences", path=str(arguments.pairs))])
        answers = [{"messages": [*pair.prompt, pair.chosen]} for pair in pairs]
        (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
        data = {"cache_dir": str(folder / "data"), "validation": {"fraction": HELD_OUT}}
        instruction = {
            "tokenizer": {"type": "bpe", "vocab_size": 2048, "chat_template": "plain"},
            "data": data | {"sources": [{"type": "conversations", "path": str(folder / "answers.json")}]},
            "objective": {"type": "instruction", "allow": ["no-base-run", "duplicates", "answers-cut-short"]},
        }
        train(parse_recipe(recipe(folder, "base", arguments.base_steps, **instruction)))
        tokenizer = {"type": "file", "path": str(folder / "base/tokenizer")}
        preference = {
            "tokenizer": tokenizer,
            "initialize_from": str(folder / "base"),
            "data": data | {"sources": [{"type": "preferences", "path": str(arguments.pairs.absolute())}]},
            "objective": {"type": "preference"},
        }
        tree = recipe(folder, "preferred", arguments.steps, **preference)
        tree["train"] |= {"learning_rate": 3e-4, "evaluate_every": max(1, arguments.steps // 3)}
        train(parse_recipe(tree))
        held_out = [r for r in read_metrics(folder / "preferred/metrics.jsonl") if r["kind"] == "validation"]
    print("| step | loss, nats per pair | reward margin | chosen above rejected |\n|---|---|---|---|")
    print("| 0 | 0.6931 | 0.0000 | - |")
    for record in held_out:
        print(f"| {record['step']} | {record['loss']:.4f} | {record['reward_margin']:.4f} | {record['accuracy']:.1%} |")


if __name__ == "__main__":
    main()

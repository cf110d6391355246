"""GPT-2 124M on one CUDA device: tokens/s, compiled against eager losses, and a resumed run against an uninterrupted
one.

    python bench/gpu.py                       # 512 × 1,024 tokens a step; at 600,000 tokens/s about two minutes
    python bench/gpu.py --micro-batch 32      # where memory is short

The text is the standard library's, in a vocabulary of GPT-2's size made from it.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from gptworks.checkpoint import checkpoints
from gptworks.config import Recipe
from gptworks.device import choose_precision, device_name, product_rate
from gptworks.planning.flops import forward_flops
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.metrics import Record, read_metrics

CONTEXT = 1024


def gpt2_recipe(run_dir: Path, batch_size: int, micro_batch: int, steps: int, compiled: str) -> Recipe:
    """Return the recipe of GPT-2 124M without dropout."""
    return parse_recipe(
        {
            "name": "gpt2",
            "run_dir": str(run_dir),
            "model": {"preset": "gpt2", "context_length": CONTEXT, "dropout_embedding": 0.0, "dropout_residual": 0.0,
                      "dropout_attention": 0.0},
            "tokenizer": {"type": "bpe", "vocab_size": 50_257},
            "data": {"sources": [{"type": "python-stdlib"}], "cache_dir": str(run_dir.parent / "data"),
                     "validation": {"fraction": 0.05, "by": "tail"}},
            "train": {"max_steps": steps, "batch_size": batch_size, "micro_batch_size": micro_batch, "log_every": 1,
                      "evaluate_every": 10**6, "evaluate_sequences": 64, "checkpoint_every": 3,
                      "optimizer": "adamw", "learning_rate": 6e-4, "device": "cuda", "compile": compiled},
        }
    )  # fmt: skip


def run(recipe: Recipe, resume: bool = False) -> list[Record]:
    """Train a recipe; return the log records of its steps."""
    train(recipe, resume=resume)
    return [record for record in read_metrics(recipe.run_dir / "metrics.jsonl") if record["kind"] == "train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=512, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    print(f"{device_name(device)}, torch {torch.__version__}")
    small = (2 * arguments.micro_batch, arguments.micro_batch)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        rows = run(gpt2_recipe(home / "speed", arguments.batch, arguments.micro_batch, arguments.steps, "block"))
        speed = statistics.median(row["tokens_per_second"] for row in rows[4:])
        precision = choose_precision("auto", device)
        flops = forward_flops(gpt2_recipe(home / "speed", 1, 1, 1, "none").model).training_per_token_dense * speed
        share = flops / product_rate(device, precision.dtype)
        print(f"{speed:,.0f} tokens/s, {flops / 1e12:,.0f} TFLOP/s, {share:.0%} of the {precision.name} product rate")

        eager = run(gpt2_recipe(home / "eager", *small, 12, "none"))
        compiled = run(gpt2_recipe(home / "compiled", *small, 12, "block"))
        apart = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(eager, compiled, strict=True))
        print(f"compiled and eager losses over 12 steps: at most {apart:.1e} apart")

        run(gpt2_recipe(home / "broken", *small, 12, "block"))
        newest = checkpoints(home / "broken")[0].folder
        for file in newest.iterdir():
            file.unlink()
        newest.rmdir()
        run(gpt2_recipe(home / "broken", *small, 12, "block"), resume=True)
        ends = [checkpoints(home / name)[0].folder / "model.safetensors" for name in ("compiled", "broken")]
        one, other = (load_file(end) for end in ends)
        same = all(torch.equal(one[name], other[name]) for name in one)
        print(f"resumed and unbroken runs: {'equal bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()

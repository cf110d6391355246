"""Bits per byte by position, up to four times the context a run was trained with, for each rotary scaling.

    python bench/extrapolation.py runs/demo

The run needs rotary positions and a tokenizer whose tokens decode to the text. Nothing is trained: the same weights
read windows four times as long, with the frequencies that they were trained with and with scaled ones.
"""

import argparse
from pathlib import Path

import torch

from gptworks.checkpoint import load_run
from gptworks.data.batches import evaluation_windows
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.device import choose_precision
from gptworks.evaluation.loss import PositionLoss, evaluate_by_position
from gptworks.tokenizer import token_bytes

SCALINGS = ("none", "linear", "dynamic", "yarn")
PARTS = 8


def by_position(run: Path, scaling: str, times: int) -> list[PositionLoss]:
    """Return the loss in each part of a context `times` as long as the run's own."""
    trained = load_run(run).recipe.model.context_length
    overrides = [f"model.context_length={times * trained}"]
    if scaling != "none":
        overrides += [f"model.rope_scaling.type={scaling}", f"model.rope_scaling.factor={times}"]
    loaded = load_run(run, overrides=overrides)
    prepared = prepare(loaded.recipe)
    sizes = token_bytes(prepared.tokenizer)
    windows = evaluation_windows(TokenShards(prepared.folder, "validation"), times * trained)
    with choose_precision("auto", torch.device("cpu")).autocast():
        return evaluate_by_position(loaded.model, windows, PARTS, token_bytes=sizes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--times", type=int, default=4, help="the new context over the trained one")
    arguments = parser.parse_args()
    columns = {scaling: by_position(arguments.run, scaling, arguments.times) for scaling in SCALINGS}
    print("| tokens | " + " | ".join(SCALINGS) + " |")
    print("|---|" + "---|" * len(SCALINGS))
    for parts in zip(*columns.values(), strict=True):
        figures = (part.report.bits_per_byte or part.report.loss for part in parts)
        print(
            f"| {parts[0].first:,} to {parts[0].last:,} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |"
        )


if __name__ == "__main__":
    main()

"""The sizes at which bench/gpu.py measures, and the tables that it prints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import train
from gptworks.config import ModelConfig, Recipe
from gptworks.device import choose_precision
from textbook import Shape


@dataclass(frozen=True)
class Scale:
    """The sizes that are measured."""

    trained: dict[str, Shape]
    """Models, each with the largest batch for which a textbook's loop, which keeps all logits, needs at most 80 GB."""
    n_steps: int
    packed: tuple[tuple[int, int, int], ...]
    """For the first model: rows at a time, tokens of a row, and mean tokens of a text in a row."""
    planned: tuple[tuple[int, str, str, str], ...]
    """For the first model and the last: sequences at a time, checkpointing, optimizer, precision."""
    texts: tuple[int, ...]
    """Numbers of texts that are decoded at once, and of clients of the server."""
    new_tokens: int


FULL = Scale(
    trained={
        "124M": Shape(12, 12, 768, 50_304, context=1024, batch=32, bias=False),
        "354M": Shape(24, 16, 1024, 50_304, context=1024, batch=16, bias=False),
        "774M": Shape(36, 20, 1280, 50_304, context=1024, batch=8, bias=False),
    },
    n_steps=10,
    packed=((32, 1024, 200), (4, 8192, 500)),
    planned=((16, "none", "adamw", "bf16"), (8, "none", "muon", "bf16"), (8, "block", "adamw", "bf16"),
             (4, "none", "adamw", "fp32")),
    texts=(1, 8, 32, 128),
    new_tokens=64,
)  # fmt: skip
TINY = Scale(
    trained={
        "tiny": Shape(2, 2, 64, 512, context=64, batch=4, bias=False),
        "small": Shape(3, 4, 128, 512, context=64, batch=4, bias=False),
    },
    n_steps=3,
    packed=((4, 64, 10),),
    planned=((4, "none", "adamw", "fp32"),),
    texts=(1, 4),
    new_tokens=8,
)


@dataclass(frozen=True)
class Setup:
    """The device, sizes and folder of a measurement."""

    device: torch.device
    scale: Scale
    folder: Path
    """Folder that all parts share; it has the prepared text."""

    @property
    def precision(self) -> str:
        return choose_precision("auto", self.device).name

    def model(self, size: str) -> ModelConfig:
        """Return the GPT-2-like model of a size."""
        shape = self.scale.trained[size]
        return train.with_vocabulary(self.recipe(shape, "model"), shape.vocab_size).model

    def recipe(self, shape: Shape, name: str, **settings: Any) -> Recipe:
        """Return a recipe that trains a shape on the shared text, whose characters are its vocabulary."""
        settings = {"device": self.device.type, "threads": torch.get_num_threads(), **settings}
        recipe = train.bench_recipe(shape, None, str(self.folder), "auto", **settings)
        return recipe.model_copy(update={"run_dir": self.folder / name})


def table(*rows: tuple[str, ...]) -> None:
    """Print rows of a Markdown table; the first row is the head."""
    for number, row in enumerate(rows):
        print(f"| {' | '.join(row)} |", flush=True)
        if number == 0:
            print("|" + "---|" * len(row), flush=True)


def row(*cells: str) -> None:
    """Print one more row of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)

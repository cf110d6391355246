"""Runs and Hugging Face folders with random weights, so small that a test can afford dozens."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gptworks.checkpoint import save_checkpoint
from gptworks.config import ModelConfig
from gptworks.model import GPT
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.tokenizer import save_tokenizer
from gptworks.train.progress import Progress

VOCABULARY = 97


def letters(*special: str) -> Tokenizer:
    """A token for each printable ASCII character but the last ones, and before them the special tokens."""
    names = [*special, "<unk>", *map(chr, range(32, 127))][:VOCABULARY]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*special, "<unk>"])
    return tokenizer


def shake(model: torch.nn.Module, size: float = 0.2, seed: int = 0) -> None:
    """Move every parameter: norms are not 1, biases not 0, and logits are far apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def random_model(config: ModelConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(config).eval()
    shake(model, seed=seed)
    return model


def make_run(folder: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """A run folder with these weights, as training leaves one."""
    tree = {
        "name": folder.name,
        "run_dir": str(folder),
        "model": model.config.model_dump(mode="json"),
        "tokenizer": {"type": "file", "path": str(folder / "tokenizer")},
        "data": {"sources": [{"type": "python-stdlib"}], "cache_dir": str(folder.parent / "data")},
        "train": {"max_steps": 1},
    }
    save_tokenizer(tokenizer or letters(), folder / "tokenizer")
    save_recipe(parse_recipe(tree), folder / "recipe.yaml")
    save_checkpoint(folder, 0, model.state_dict(), {}, asdict(Progress()))
    return folder


def save_theirs(folder: Path, config: Any, seed: int = 0, **options: Any) -> Any:
    """A folder written by stock transformers: random weights, norms and biases, and a tokenizer. Returns the model."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    shake(model, seed=seed)
    model.save_pretrained(folder, **options)
    save_tokenizer(letters(), folder)
    return model


def tokens(batch: int = 2, length: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

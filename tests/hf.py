"""Makes runs and Hugging Face folders with random weights, small enough for dozens in a test."""

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gptworks.config import ModelConfig
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.model.attention import Attention
from gptworks.model.gpt import GPT
from gptworks.model.layers import MLP
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.tokenizer import save_tokenizer
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress

VOCABULARY = 260
"""Rows of an embedding; the tokenizers here have fewer tokens, as published models do."""


def byte_tokenizer(*special: str) -> Tokenizer:
    """Return a tokenizer with the special tokens, then one token per byte; it splits text as Qwen's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate([*special, *alphabet])}, []))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(FAMILIES["qwen2"].own_split), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def shake(model: torch.nn.Module, size: float = 0.12, seed: int = 0) -> None:
    """Change every parameter randomly, so that norms are not 1, biases not 0, and logits far apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def random_model(config: ModelConfig, seed: int = 0) -> GPT:
    """Return a model whose MLPs outweigh its embedding and averages, so that it does not merely repeat a token."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    shake(model, seed=seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Attention):
                module.query.weight.mul_(4)
            if isinstance(module, MLP):
                module.down.weight.mul_(8)
        if model.position_embedding is not None:
            model.position_embedding.weight.mul_(8)
    return model


def make_run(folder: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write a run folder with these weights, as training leaves one."""
    tree = {
        "name": folder.name,
        "run_dir": str(folder),
        "model": model.config.model_dump(mode="json"),
        "tokenizer": {"type": "file", "path": str(folder / "tokenizer")},
        "data": {"sources": [{"type": "python-stdlib"}], "cache_dir": str(folder.parent / "data")},
        "train": {"max_steps": 1, "optimizer": "adamw"},
    }
    save_tokenizer(tokenizer or byte_tokenizer(), folder / "tokenizer")
    save_recipe(parse_recipe(tree), folder / "recipe.yaml")
    save_checkpoint(folder, 7, model.state_dict(), {}, asdict(Progress(step=7, best_step=7)))
    return folder


def save_theirs(folder: Path, config: Any, seed: int = 0, **options: Any) -> Any:
    """Write a folder with stock transformers: random weights, norms and biases, and a tokenizer. Returns the model."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()  # `to` would change it for all
    shake(model, seed=seed)
    save_tokenizer(byte_tokenizer(), folder)
    model.save_pretrained(folder, **options)
    return model


def tokens(batch: int = 2, length: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

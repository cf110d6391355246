"""`init: induction`: an untrained model copies text that occurred earlier."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.recipe import parse_model
from tiny import gptworks, trained

SIZES: dict[str, Any] = {
    "vocab_size": 512, "context_length": 256, "n_layers": 3, "d_model": 128, "n_heads": 2, "tie_embeddings": False,
    "init": "induction",
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "wide": {"vocab_size": 4096, "d_model": 768, "n_heads": 12, "n_layers": 2},
    "grouped keys": {"n_heads": 4, "n_kv_heads": 2, "d_head": 64},
    "no QK-norm": {"qk_norm": False},
    "LayerNorm and biases": {"norm": "layernorm", "norm_bias": True, "attention_bias": True},
    "a quarter rotated": {"rope_fraction": 0.25},
    "scaled positions": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "parallel blocks": {"parallel_residual": True},
    "scales": {"embedding_scale": 11.3, "residual_scale": 0.5},
    "windows": {"window": 128, "window_pattern": ["window", "full"]},
    "experts": {"n_experts": 4},
    "the laboratory": {"value_residual": True, "smear": True, "bigram_vocab_size": 64},
}


@torch.no_grad()
def copied(seed: int, **settings: Any) -> float:
    """Return the accuracy of an untrained model on the second occurrence of 100 different tokens."""
    torch.manual_seed(seed)
    model = GPT(ModelConfig.model_validate(SIZES | settings)).eval()
    text = torch.randperm(model.config.vocab_size)[:100].repeat(1, 2)
    said = model(text).argmax(-1)[0]
    return (said[100:-1] == text[0, 101:]).float().mean().item()


@pytest.mark.parametrize("shape", SHAPES)
def test_an_untrained_model_copies_what_followed_before(shape: str) -> None:
    assert min(copied(seed, **SHAPES[shape]) for seed in range(3)) > 0.6
    assert copied(0, **SHAPES[shape] | {"init": "normal"}) < 0.1


def test_the_text_alone_decides_what_is_copied() -> None:
    """The same weights continue with whichever token followed before, so they contain no text."""
    torch.manual_seed(0)
    model = GPT(ModelConfig.model_validate(SIZES)).eval()
    filler = torch.randint(100, 512, (50,))
    for follower in (7, 8):
        text = torch.cat((filler, torch.tensor([5, follower]), filler, torch.tensor([5])))
        assert model(text[None])[0, -1].argmax() == follower


def test_the_seed_decides_the_weights() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return GPT(ModelConfig.model_validate(SIZES)).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_a_trained_model_can_be_read_with_a_longer_context(tmp_path: Path) -> None:
    """The limit of its initialization does not apply after training."""
    run = trained(tmp_path, steps=20, init="induction", position="rope")
    longer = ["model.context_length=128", "model.rope_scaling.type=yarn", "model.rope_scaling.factor=2"]
    assert "nats per token" in gptworks("evaluate", run, *longer).stdout


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_layers": 1}, "n_layers=1"),
        ({"position": "learned"}, "not both rotated"),
        ({"rope_pattern": ["rope", "none"]}, "not both rotated"),
        ({"rope_fraction": 0.03125}, "2 rotated elements"),
        ({"window": 64, "window_rope_theta": 1000.0}, "window_rope_theta"),
        ({"norm_placement": "after"}, "norm_placement=after"),
        ({"norm_placement": "both"}, "norm_placement=both"),
        ({"qk_norm": "whole"}, "qk_norm=whole"),
        ({"layer_repeats": 2}, "layer_repeats"),
        ({"d_model": 2, "n_heads": 1, "d_head": 8}, "d_model=2"),
    ],
)
def test_a_model_that_cannot_hold_the_two_heads_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"init=induction with .*{named}.*choose another init"):
        parse_model(SIZES | settings)

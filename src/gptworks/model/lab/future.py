"""Heads for tokens beyond the next: a small residual layer for each, and one unembedding for all.

Gloeckle et al. (2024) train such heads on the trunk's output with one unembedding; the layer is from Cai et al. (2024,
section 2.1.1) and starts as the identity. The trunk's prediction of the next token does not depend on these heads.
"""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.model.cost import RESIDUAL, Shapes, Stage
from gptworks.model.layers import Linear

FUTURE_HEADS = "future_heads."
"""Prefix of the heads' weight names."""


def build_future_heads(config: ModelConfig) -> nn.ModuleList:
    """Build a linear layer [C, C], initialized to zero, for each token beyond the next."""
    heads = [Linear(config.d_model, config.d_model, bias=False) for _ in range(config.n_future_tokens - 1)]
    for head in heads:
        nn.init.zeros_(head.weight)
    return nn.ModuleList(heads)


def future_features(heads: Iterable[nn.Module], features: Tensor) -> list[Tensor]:
    """Return features [..., C] for each token beyond the next, nearest first, from the trunk's features [..., C]."""
    return [features + F.silu(head(features)) for head in heads]


def future_cost(s: Shapes, n: int) -> list[Stage]:
    """Return the memory of the heads for `n` tokens beyond the next. The gradients that reach the heads are views of
    one tensor and cost nothing; the gradients that the heads return are added to the features' gradient."""
    c, width = s.config, s.products(s.config.d_model)
    matrix = c.d_model**2
    return [
        Stage(
            f"head of token {i + 2}",
            {RESIDUAL: width + (0 if i else width)} | s.copies(matrix),
            leaves=width,
            merges=i < n - 1,
            scratch=width,
            matrices=matrix,
        )
        for i in range(n)
    ]

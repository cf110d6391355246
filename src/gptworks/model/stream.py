"""What changes the residual stream on its way from block to block: settings of `gptworks.config.LABORATORY`.

Each part is a small module of a block with learned scalars, or None where its setting is off.

Shapes: B batch, T time, C width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gptworks.config import ModelConfig


class Beside(NamedTuple):
    """What a block reads beside the stream that enters it; None: its settings need none."""

    embedding: Tensor | None = None
    """What entered the first block, [B, T, C]."""


class ResidualScalars(nn.Module):
    """λ · stream + μ · embedding (nanochat's `resid_lambdas` and `x0_lambdas`, after modded-nanogpt)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x, embedding [B, T, C] → [B, T, C]."""
        stream: Tensor = self.weight[0] * x
        return stream + self.weight[1] * embedding


def build_scalars(config: ModelConfig) -> ResidualScalars | None:
    """A block's scalars of the stream and of the embedding."""
    return ResidualScalars() if config.residual_scalars else None


def beside_blocks(config: ModelConfig, embedding: Tensor) -> Beside:
    """What every block reads beside the stream. What no block reads is not kept."""
    return Beside(embedding if config.residual_scalars else None)

"""What blocks read beside the residual stream, and what they make of it: settings of `gptworks.config.LABORATORY`.

Each part is a small module of a block, or None where its setting is off. Scalars are vectors, so that they are trained
by AdamW without decay; gates start at zero.

Shapes: B batch, T time, C width, H query heads, G key/value heads, D head width, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.model.layers import Linear


class Beside(NamedTuple):
    """What a block reads beside the stream that enters it; None: it needs none."""

    embedding: Tensor | None = None
    """What entered the first block, [B, T, C]."""
    skipped: Tensor | None = None
    """What its mirror in the first half gave, [B, T, C]."""
    first_values: Tensor | None = None
    """The first layer's own values, [B, T, G·D]."""
    token_values: Tensor | None = None
    """The tokens' vectors of this layer's table, [B, T, G·D]."""


class Carried:
    """What is carried along from block to block, and no longer than a block still reads it."""

    def __init__(self, config: ModelConfig, tokens: Tensor, embedding: Tensor, tables: nn.ModuleDict | None) -> None:
        self.config, self.tokens, self.tables = config, tokens, tables
        reads_embedding = config.residual_scalars or "projected" in config.value_embeddings
        self.embedding = embedding if reads_embedding else None
        self.first_values: Tensor | None = None
        self.skipped: list[Tensor] = []

    def beside(self, layer: int) -> Beside:
        """What one block reads. Called for each in turn."""
        config = self.config
        projects, table = (config.layer_value_embedding(layer) == kind for kind in ("projected", "table"))
        return Beside(
            self.embedding if config.residual_scalars or projects else None,
            self.skipped.pop() if config.layer_skips(layer) else None,
            self.first_values,
            self.tables[str(layer)](self.tokens) if table and self.tables is not None else None,
        )

    def after(self, layer: int, x: Tensor, first_values: Tensor | None) -> None:
        """Keep what later blocks read of a block's output."""
        if first_values is not None:
            self.first_values = first_values
        if self.config.layer_is_skipped_to(layer):
            self.skipped.append(x)


class Scalars(nn.Module):
    """Learned factors, a vector."""

    def __init__(self, *initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([torch.full((1,), value) for value in initial]))  # fake ones too


class ResidualScalars(Scalars):
    """λ · stream + μ · embedding (nanochat's `resid_lambdas` and `x0_lambdas`, after modded-nanogpt)."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x, embedding [B, T, C] → [B, T, C]."""
        stream: Tensor = self.weight[0] * x
        return stream + self.weight[1] * embedding


class Skip(Scalars):
    """stream + w · what the mirrored block gave (modded-nanogpt's U-Net)."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        """x, skipped [B, T, C] → [B, T, C]."""
        return x + self.weight * skipped


class Gating(nn.Module):
    """sigmoid of a product with the input's first channels. Its matrix is small, and kept as it is where others are
    quantized."""

    def __init__(self, n_channels: int, n_gates: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_gates, n_channels))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] → [B, T, n_gates]."""
        return F.linear(x[..., : self.weight.size(1)], self.weight).sigmoid()


class Values(nn.Module):
    """What a layer makes of its values: mixed with the first layer's (Zhou et al., 2024, `Value Residual Learning`),
    and with what is known of the token itself added, gated for each head (nanochat's `ve_gate`, twice a sigmoid)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kind, width = config.layer_value_embedding(layer), config.n_kv_heads * config.d_head
        self.scalars = Scalars(0.5, 0.5) if config.value_residual and layer else None
        self.projection = Linear(config.d_model, width, bias=False) if kind == "projected" else None
        self.gating = Gating(config.d_gate, config.n_kv_heads) if kind != "none" else None
        self.hands_on = config.value_residual and not layer
        """Whether later layers read this one's own values."""

    def forward(self, inner: Tensor, own: Tensor, beside: Beside) -> Tensor:
        """What attention reads, inner [B, T, C], and the layer's own values [B, T, G·D] → its values [B, T, G·D]."""
        values = own
        if self.scalars is not None:
            assert beside.first_values is not None
            values = self.scalars.weight[0] * own + self.scalars.weight[1] * beside.first_values
        if self.gating is None:
            return values
        added = beside.token_values
        if self.projection is not None:
            added = self.projection(beside.embedding)
        assert added is not None
        gate = 2 * self.gating(inner)  # B T G
        by_head = added.to(own.dtype).view(*gate.shape, -1)  # B T G D
        mixed: Tensor = values + (gate.unsqueeze(-1) * by_head).flatten(-2)
        return mixed


def build_scalars(config: ModelConfig) -> ResidualScalars | None:
    """A block's scalars of the stream and of the embedding."""
    return ResidualScalars() if config.residual_scalars else None


def build_skip(config: ModelConfig, layer: int) -> Skip | None:
    """What a block of the second half adds."""
    return Skip() if config.layer_skips(layer) else None


def build_values(config: ModelConfig, layer: int) -> Values | None:
    """What changes a layer's values."""
    if config.value_residual or config.layer_value_embedding(layer) != "none":
        return Values(config, layer)
    return None


def build_gating(config: ModelConfig) -> Gating | None:
    """The gates of attention's heads (Qiu et al., 2025, `Gated Attention for Large Language Models`)."""
    return Gating(config.d_gate, config.n_heads) if config.attention_gate else None


def build_tables(config: ModelConfig) -> nn.ModuleDict | None:
    """Tables of value embeddings [V, G·D], by the number of their layer."""
    layers = [layer for layer in range(config.n_layers) if config.layer_value_embedding(layer) == "table"]
    width = config.n_kv_heads * config.d_head
    return nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, width) for i in layers}) if layers else None

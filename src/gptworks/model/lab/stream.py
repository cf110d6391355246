"""Experimental additions to a block: changes of its input and of attention's values.

`LabParts`, the base class of `gptworks.model.block.Block`, adds these parts. A part is a small module, or None if its
setting is off. Scalars are stored as vectors, so that AdamW trains them without decay. Gates' weights start at 0.

Shapes: B batch, T time, C width, H query heads, G key/value heads, D head width, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.model.cost import ATTENTION, RESIDUAL, Shapes, Stage
from gptworks.model.layers import Linear


class LabInputs(NamedTuple):
    """Extra inputs of a block's experimental parts; None where this block does not need the input."""

    embedding: Tensor | None = None
    """Input of the first block, [B, T, C]."""
    skipped: Tensor | None = None
    """Output of the mirrored block in the first half, [B, T, C]."""
    first_values: Tensor | None = None
    """The first layer's own values, [B, T, G·D]."""
    token_values: Tensor | None = None
    """The tokens' vectors from this layer's table of value embeddings, [B, T, G·D]."""


class Carried:
    """Tensors that a forward pass keeps for later blocks."""

    def __init__(self, config: ModelConfig, tokens: Tensor, embedding: Tensor, tables: nn.ModuleDict | None) -> None:
        self.config, self.tokens, self.tables = config, tokens, tables
        self.embedding = embedding if _reads_embedding(config) else None
        self.first_values: Tensor | None = None
        self.skipped: list[Tensor] = []

    def inputs(self, layer: int) -> LabInputs:
        """Return the extra inputs of a block. Call this for each layer in order."""
        config = self.config
        projects, table = (config.layer_value_embedding(layer) == kind for kind in ("projected", "table"))
        return LabInputs(
            self.embedding if projects else None,
            self.skipped.pop() if config.layer_skips(layer) else None,
            self.first_values,
            self.tables[str(layer)](self.tokens) if table and self.tables is not None else None,
        )

    def after(self, layer: int, x: Tensor, first_values: Tensor | None) -> None:
        """Keep a block's output `x` and the first layer's values, if later blocks read them."""
        if first_values is not None:
            self.first_values = first_values
        if self.config.layer_is_skipped_to(layer):
            self.skipped.append(x)

    @staticmethod
    def lookup_cost(s: Shapes, layer: int) -> list[Stage]:
        """Return the memory of the lookup in the layer's table of value embeddings; empty without a table."""
        table = value_table(s.config, layer)
        return [Stage("value embedding", table=table, module="value_embeddings")] if table else []

    @staticmethod
    def kept_bytes(s: Shapes, layer: int) -> int:
        """Bytes kept for a recomputed block in addition to its input: value vectors from its table and, for the first
        block, the values that later blocks read."""
        c, width = s.config, s.config.n_kv_heads * s.config.d_head
        hands_on = c.value_residual and layer == 0
        return (s.floats(width) if value_table(c, layer) else 0) + (s.products(width) if hands_on else 0)

    @staticmethod
    def gradients_bytes(s: Shapes, trains_embedding: bool) -> int:
        """Bytes of the gradients of tensors that all blocks read, which are kept throughout the backward pass."""
        c = s.config
        embedding = s.floats(c.d_model) if _reads_embedding(c) and trains_embedding else 0
        return embedding + (s.products(c.n_kv_heads * c.d_head) if c.value_residual else 0)

    @staticmethod
    def kept_streams(c: ModelConfig) -> int:
        """Largest number of tensors of the stream's size that a forward pass keeps for later blocks."""
        return c.unet_skips * (c.n_layers // 2) + _reads_embedding(c)


def _reads_embedding(config: ModelConfig) -> bool:
    return "projected" in config.value_embeddings


class LabParts(nn.Module):
    """Base class of `Block`, with the parts that laboratory settings add."""

    def add_parts(self, config: ModelConfig, layer: int) -> None:
        self.skip = Skip() if config.layer_skips(layer) else None
        changed = config.value_residual or config.layer_value_embedding(layer) != "none"
        self.values = Values(config, layer) if changed else None

    def enter(self, x: Tensor, lab: LabInputs) -> Tensor:
        """Return the stream [B, T, C] as the block reads it: with the skip connection added, if the block has one."""
        return x if self.skip is None else self.skip(x, lab.skipped)

    @staticmethod
    def entry_cost(s: Shapes, layer: int) -> Iterator[Stage]:
        """Yield the memory of `enter`. The scalar's gradient is the sum of a product as large as the stream."""
        stream = s.floats(s.config.d_model)
        if s.config.layer_skips(layer):  # the added tensor's gradient is kept until its layer's backward pass
            yield Stage("skip", arrives=stream, leaves=2 * stream, scratch=stream, vectors=1, own_scratch=stream)

    @staticmethod
    def exit_cost(s: Shapes, layer: int) -> list[Stage]:
        """Return the memory of a block's output that a skip connection reads too; the output's two gradients are added.
        The next block saves the output as its input, unless autocast rounds that input."""
        stream = s.floats(s.config.d_model)
        only_here = s.autocast and s.config.norm_placement == "after"
        there = s.config.layer_is_skipped_to(layer)
        return [Stage("handed on", {RESIDUAL: stream if only_here else 0}, arrives=stream)] if there else []


class Scalars(nn.Module):
    """A vector of learned factors with the same initial value."""

    def __init__(self, n: int, initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((n,), initial))


class Skip(Scalars):
    """Skip connection: stream + w · output of the mirrored block (modded-nanogpt's U-Net)."""

    def __init__(self) -> None:
        super().__init__(1, 1.0)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        """Return x + w · skipped, [B, T, C] each."""
        return x + self.weight * skipped


class Gating(nn.Module):
    """Gates: the sigmoid of a linear map of the input's first channels. The matrix is small and never quantized."""

    def __init__(self, n_channels: int, n_gates: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_gates, n_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates [B, T, n_gates] for x [B, T, C]."""
        return F.linear(x[..., : self.weight.size(1)], self.weight).sigmoid()

    @staticmethod
    def cost(s: Shapes, n_gates: int) -> Stage:
        """Return the memory of the gates. They read only some channels, but the gradient is as wide as the stream."""
        given, width, matrix = s.products(n_gates), s.products(s.config.d_model), n_gates * s.config.d_gate
        saved = {ATTENTION: 2 * given} | s.copies(matrix)
        return Stage("gate of heads", saved, given, width, merges=True, matrices=matrix, module="gating")


class Values(nn.Module):
    """A layer's values: its own, mixed with the first layer's (Zhou et al., 2024, `Value Residual Learning`).

    A vector is then added: the token's vector from a table, or a projection of the first block's input. A gate for each
    head scales the vector (nanochat's `ve_gate`, 2 · sigmoid).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kind, width = config.layer_value_embedding(layer), config.n_kv_heads * config.d_head
        self.scalars = Scalars(2, 0.5) if config.value_residual and layer else None
        self.projection = Linear(config.d_model, width, bias=False) if kind == "projected" else None
        self.gating = Gating(config.d_gate, config.n_kv_heads) if kind != "none" else None
        self.hands_on = config.value_residual and not layer
        """Whether later layers read this layer's own values."""

    def forward(self, inner: Tensor, own: Tensor, lab: LabInputs) -> Tensor:
        """Return the values to use [B, T, G·D], from attention's input [B, T, C] and the layer's own values."""
        values = own
        if self.scalars is not None:
            assert lab.first_values is not None
            values = self.scalars.weight[0] * own + self.scalars.weight[1] * lab.first_values
        if self.gating is None:
            return values
        added = lab.token_values if self.projection is None else self.projection(lab.embedding)
        assert added is not None
        gate = 2 * self.gating(inner)  # [B, T, G]
        by_head = added.to(own.dtype).view(*gate.shape, -1)  # [B, T, G, D]
        mixed: Tensor = values + (gate.unsqueeze(-1) * by_head).flatten(-2)
        return mixed

    @staticmethod
    def cost(s: Shapes, layer: int) -> Iterator[Stage]:
        """Yield the memory of each operation of the layer's `Values`; nothing if the layer has no such module."""
        c, kind = s.config, s.config.layer_value_embedding(layer)
        width = c.n_kv_heads * c.d_head
        k = s.products(width)
        if c.value_residual and layer:
            kept = {ATTENTION: k}
            yield Stage(
                "value residual", kept, k, k, scratch=k, vectors=2, for_own=kept, own_scratch=k, module="scalars"
            )
        if kind == "projected":
            matrix, stream = width * c.d_model, s.floats(c.d_model)
            kept = {RESIDUAL: s.products(c.d_model) if s.autocast else 0}
            yield Stage("projection", kept | s.copies(matrix), k, stream, merges=True, matrices=matrix, for_own=kept)
        if kind != "none":
            yield Gating.cost(s, c.n_kv_heads)
            wide = s.floats(width) if s.autocast and kind == "table" else 0
            leaves = 2 * k if kind == "projected" else k
            yield Stage("gated values", {ATTENTION: k}, arrives=k, leaves=leaves, scratch=2 * k + wide)


def value_table(config: ModelConfig, layer: int) -> int:
    """Number of elements of the layer's table of value embeddings [V, G·D]; 0 without a table."""
    is_there = config.layer_value_embedding(layer) == "table"
    return config.vocab_size * config.n_kv_heads * config.d_head if is_there else 0


def build_tables(config: ModelConfig) -> nn.ModuleDict | None:
    """Build the tables of value embeddings [V, G·D], by layer index; None if no layer has one."""
    layers = [layer for layer in range(config.n_layers) if value_table(config, layer)]
    width = config.n_kv_heads * config.d_head
    return nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, width) for i in layers}) if layers else None

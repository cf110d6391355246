"""Additions to a token's embedding: an embedding of the token pair, and the previous token's embedding."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.model.cost import RESIDUAL, Shapes, Stage

NO_TOKEN = -1
"""Id used as the previous token of a text's first token, which has no previous token."""

_OF_TOKEN, _OF_PREVIOUS = 36_313, 27_191
"""Factors of a token's id and the previous token's id in the hash, from modded-nanogpt."""


class BigramEmbedding(nn.Module):
    """An embedding of each pair of a token and its predecessor, times a learned scale.

    A hash assigns pairs to the rows of a table, because V² rows would be too many (Huang et al., 2025;
    modded-nanogpt, pull request 201). The table starts at zero, so that it has no effect at first.
    """

    def __init__(self, n_rows: int, width: int) -> None:
        super().__init__()
        self.n_rows = n_rows
        self.table = nn.Embedding(n_rows, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor, previous: Tensor) -> Tensor:
        """Return embeddings [..., C] of pairs of int64 token ids [...]; `previous` is NO_TOKEN where a text begins."""
        vectors: Tensor = self.table(bigram_rows(tokens, previous, self.n_rows))
        return vectors * self.scale

    @staticmethod
    def cost(s: Shapes) -> Iterator[Stage]:
        """Yield the memory of the lookup, which saves row numbers, and of the scaling, which saves the vectors."""
        rows, stream, module = s.config.bigram_vocab_size, s.floats(s.config.d_model), "bigram_embedding.table"
        if rows:
            saved = {RESIDUAL: stream + 8 * s.n_tokens}
            yield Stage("bigram embedding", arrives=stream, table=rows * s.config.d_model, vectors=1, module=module)
            yield Stage("bigram scale", saved, leaves=stream, scratch=stream, module=module)


class Smear(nn.Module):
    """Adds the previous token's embedding to each embedding, with a gate (modded-nanogpt's smear gate).

    The gate is λ · sigmoid(w · the embedding's first channels).
    """

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(n_channels)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, before: Tensor, previous: Tensor) -> Tensor:
        """Return embeddings x [B, T, C] plus the gated embeddings `before` of the previous tokens (ids `previous`)."""
        gate = self.scale * (x[..., : len(self.weight)] @ self.weight).sigmoid()  # [B, T]
        return x + gate.masked_fill(previous == NO_TOKEN, 0).unsqueeze(-1) * before

    @staticmethod
    def cost(s: Shapes) -> Iterator[Stage]:
        """Yield the memory of smearing, which saves the previous tokens' embeddings and the gate's input channels."""
        c = s.config
        stream, read = s.floats(c.d_model), s.products(c.d_gate) if s.autocast else s.floats(c.d_model)
        if c.smear:
            yield Stage("smear", {RESIDUAL: stream + read}, stream, stream, scratch=2 * stream, vectors=c.d_gate + 1)


def bigram_rows(tokens: Tensor, previous: Tensor, n_rows: int) -> Tensor:
    """Return the table row for each pair, int64 [...]; the first token of a text uses the last row."""
    hashed = ((_OF_TOKEN * tokens) ^ (_OF_PREVIOUS * previous)) % (n_rows - 1)
    return hashed.masked_fill(previous == NO_TOKEN, n_rows - 1)


def previous_tokens(tokens: Tensor, text_positions: Tensor | None = None) -> Tensor:
    """Return the token before each token, int64 [B, T]; NO_TOKEN at the beginning of each row and text.

    Args:
        text_positions: each token's position in its text, from 0, int64 [B, T]; None if each row is one text.
    """
    before = F.pad(tokens[:, :-1], (1, 0), value=NO_TOKEN)
    return before if text_positions is None else before.masked_fill(text_positions == 0, NO_TOKEN)

"""Embeddings beside the tokens' own: of pairs of neighbouring tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config import ModelConfig

NO_TOKEN = -1
"""Stands before the first token of a text."""

_OF_TOKEN, _OF_PREVIOUS = 36_313, 27_191
"""Factors of the two ids: modded-nanogpt's."""


class BigramEmbedding(nn.Module):
    """A vector for each pair of a token and the one before it, times a learned scale.

    Pairs share the rows of a table, by a hash, since a row for each of V² would be too many (Huang et al., 2025;
    modded-nanogpt, pull request 201). The table begins at zero, so that a model begins as without it.
    """

    def __init__(self, n_rows: int, width: int) -> None:
        super().__init__()
        self.n_rows = n_rows
        self.table = nn.Embedding(n_rows, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor, previous: Tensor) -> Tensor:
        """Token ids and those before them, int64 [...] each, NO_TOKEN where a text begins → [..., C]."""
        vectors: Tensor = self.table(bigram_rows(tokens, previous, self.n_rows))
        return vectors * self.scale


def build_bigrams(config: ModelConfig) -> BigramEmbedding | None:
    """The embedding of pairs, to be added to the tokens'; None: the model has none."""
    return BigramEmbedding(config.bigram_vocab_size, config.d_model) if config.bigram_vocab_size else None


def bigram_rows(tokens: Tensor, previous: Tensor, n_rows: int) -> Tensor:
    """The table's row of each pair, int64 [...]; the last row is that of a text's first token, whichever it is."""
    hashed = ((_OF_TOKEN * tokens) ^ (_OF_PREVIOUS * previous)) % (n_rows - 1)
    return hashed.masked_fill(previous == NO_TOKEN, n_rows - 1)


def previous_tokens(tokens: Tensor, text_positions: Tensor | None = None) -> Tensor:
    """The token before each, int64 [B, T]: NO_TOKEN at the beginning of a row, and of each text in it.

    Args:
        text_positions: int64 [B, T], each token's place in its text, from 0; None: a row is one text.
    """
    before = F.pad(tokens[:, :-1], (1, 0), value=NO_TOKEN)
    return before if text_positions is None else before.masked_fill(text_positions == 0, NO_TOKEN)

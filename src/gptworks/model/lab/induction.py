"""`init: induction`: initial weights with which the model can already copy from its context.

A model repeats its context, A B … A → B, with two heads one layer apart (Elhage et al., 2021; Olsson et al., 2022:
induction heads). In the first layer, a head copies the previous token to each token. In the second, a head finds an
earlier occurrence of the current token and copies its successor to the output. Training finds these two heads late, so
the first heads of the first two layers are initialized as these two. Mimetic initialization likewise imitates trained
weights (Trockman & Kolter, 2023). The embedding, an untied head and the two layers' QK-norms are set to fit the heads.
All other weights start as with `init: normal`. All weights are trained.

Of the C channels of the residual stream, the first is the same for every token; the next m distinguish tokens; the last
m receive the output of the first head.
"""

import math

import torch
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.model.attention import Attention
from gptworks.model.rotary import frequencies

STD = 0.1
"""Standard deviation of the embeddings as they enter the first block."""

CONSTANT = 0.5
"""Norm of the component that all embeddings share, relative to the norm of the rest of an embedding."""

LENGTHS = (1.6, 1.3)
"""Norms of the first and second head's queries, relative to the norm of the keys, which is √D for D channels."""

COPY_LOGIT = 4.0
"""Approximate logit, from an untied head, of a token that gets all of the second induction head's attention."""

TIED_FACTOR = 3.0
"""Factor of the second head's output with a tied embedding: a copied token's logit then exceeds the current token's."""


def begin_with_induction(
    config: ModelConfig, embedding: Tensor, head: Tensor, first: Attention, second: Attention
) -> None:
    """Write the two copying heads into weights initialized by `init: normal`; also replace the embedding and an untied
    head, and set QK-norms.

    Args:
        embedding, head: weights [V, C]; the same tensor if they are tied.
        first, second: attention of the first two layers.
    """
    compared = slow_elements(config)
    width, m = config.d_model, len(compared)
    tokens, before = torch.arange(1, 1 + m), torch.arange(width - m, width)
    std = STD / config.embedding_scale
    embedding.normal_(std=std)
    embedding[:, before] = 0
    embedding[:, 0] = std * CONSTANT * math.sqrt(width)

    # the first head: queries and keys do not depend on the token, and match best one position apart
    angle, _ = frequencies(config, config.context_length, torch.device("cpu"))
    fast = torch.arange(min(len(angle), max(2, len(angle) // 5)), device="cpu")  # the device of `angle`
    angle = angle[fast].to(embedding)
    constant = CONSTANT * math.sqrt(width / (1 + CONSTANT**2))  # value of the first channel after the norm
    key = math.sqrt(config.d_head / len(fast)) / constant
    first.query.weight[fast, 0] = LENGTHS[0] * key * angle.cos()
    first.query.weight[config.d_rotary // 2 + fast, 0] = -LENGTHS[0] * key * angle.sin()
    first.key.weight[fast, 0] = key
    rows = torch.arange(m)
    _move(first.value.weight, rows, tokens, 1.0)
    _move(first.out.weight, before, rows, STD / config.residual_scale)

    # the second head: queries come from the current token, keys from the previous one; values are copied
    key = math.sqrt(config.d_head / m)
    _move(second.query.weight, compared, tokens, LENGTHS[1] * key)
    _move(second.key.weight, compared, before, key)
    copied = torch.arange(1, 1 + min(config.d_head, width - 1 - m))
    rows = torch.arange(len(copied))
    tied = head is embedding
    written = copied if tied else copied.flip(0)  # an untied head must not read the current token's channels
    _move(second.value.weight, rows, copied, 1.0)
    _move(second.out.weight, written, rows, (TIED_FACTOR if tied else 1.0) * STD / config.residual_scale)
    if not tied:
        head.zero_()
        head[:, written] = embedding[:, copied] * (COPY_LOGIT / (len(copied) * std))
    if config.qk_norm:
        for attention, length in zip((first, second), LENGTHS, strict=True):
            attention.query_norm.get_parameter("weight").fill_(length)


def slow_elements(config: ModelConfig) -> Tensor:
    """Return the indices of a head's elements that the second head compares: at most (C - 2) / 2, rotated slowly or
    never."""
    n_pairs = config.d_rotary // 2
    slow = torch.arange(n_pairs // 2, n_pairs)
    unturned = torch.arange(config.d_rotary, config.d_head)
    return torch.cat((slow, n_pairs + slow, unturned))[: (config.d_model - 2) // 2]


def _move(weight: Tensor, rows: Tensor, columns: Tensor, factor: float) -> None:
    """Make each of these rows of the matrix copy one input channel, times `factor`."""
    weight[rows] = 0
    weight[rows, columns] = factor

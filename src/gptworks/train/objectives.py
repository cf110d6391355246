"""What is optimized. An objective takes (model, batch) and gives (summed loss in nats, number of targets counted)."""

from collections.abc import Callable

from torch import Tensor

from gptworks.config import IGNORED
from gptworks.model import GPT
from gptworks.model.loss import linear_cross_entropy

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [B, T] each; the target of a position is the token that follows it, or −100."""

Objective = Callable[[GPT, Batch], Tensor]
"""The summed loss of a batch."""


def next_token(model: GPT, batch: Batch) -> Tensor:
    """Cross-entropy of each next token, summed, in nats."""
    inputs, targets = batch
    return linear_cross_entropy(model.features(inputs), model.head_weight, targets)


def count_targets(batch: Batch) -> int:
    """How many targets of a batch carry loss."""
    return int((batch[1] != IGNORED).sum())

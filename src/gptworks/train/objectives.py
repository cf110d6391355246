"""What is optimized. An objective takes (model, batch) and gives the sums of the batch's losses; task.py chooses it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.model import GPT
from gptworks.model.loss import linear_cross_entropy
from gptworks.model.moe import balance_loss, expert_tokens, z_loss

Batch = tuple[Tensor, ...]
"""Inputs and targets, int64 [B, T] each; the target of a position is the token that follows it, or −100. A third,
positions [B, T], stands where a row holds several texts: each token's place in its own (see `GPT.features`)."""


@dataclass(frozen=True)
class Losses:
    """Sums over a batch's targets."""

    objective: Tensor
    """What is differentiated."""
    loss: Tensor
    """What is reported, without auxiliary terms."""
    expert_tokens: Tensor | None = None
    """Tokens that each expert of each layer got, int64 [L, E]."""


Objective = Callable[[GPT, Batch], Losses]


def next_token(model: GPT, batch: Batch, *, balance_weight: float = 0.0, z_weight: float = 0.0) -> Losses:
    """Cross-entropy of each target, in nats; with experts, the two losses of each layer's router beside it."""
    inputs, targets, *positions = batch
    router_logits: list[Tensor] = []
    features = model.features(inputs, None, router_logits, *positions)
    loss = linear_cross_entropy(features, model.head_weight, targets)
    if not router_logits:
        return Losses(loss, loss.detach())
    n_per_token = model.config.n_experts_per_token
    routing = [
        balance_weight * balance_loss(logits, n_per_token) + z_weight * z_loss(logits) for logits in router_logits
    ]
    return Losses(
        objective=loss + count_targets(batch) * torch.stack(routing).sum(),
        loss=loss.detach(),
        expert_tokens=torch.stack([expert_tokens(logits.detach(), n_per_token) for logits in router_logits]),
    )


def count_targets(batch: Batch) -> int:
    """How many targets of a batch carry loss."""
    return int((batch[1] != IGNORED).sum())

"""What is optimized. An objective takes (model, batch) and gives the sums of the batch's losses; task.py chooses it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from gptworks.config import IGNORED, TrainConfig
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
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Other sums, whose means are reported by their names."""


class RoutingWeights(TypedDict):
    """What the losses of experts' routers count."""

    balance_weight: float
    z_weight: float


def routing_weights(train: TrainConfig) -> RoutingWeights:
    """As the recipe sets them."""
    return {"balance_weight": train.router_balance_weight, "z_weight": train.router_z_weight}


Objective = Callable[[GPT, Batch], Losses]


def next_token(model: GPT, batch: Batch, *, balance_weight: float = 0.0, z_weight: float = 0.0) -> Losses:
    """Cross-entropy of each target, in nats; with experts, the two losses of each layer's router beside it."""
    inputs, targets, *positions = batch
    router_logits: list[Tensor] = []
    features = model.features(inputs, None, router_logits, *positions)
    loss = linear_cross_entropy(features, model.head_weight, targets)
    return with_routing(loss, loss, router_logits, model, counted(batch), balance_weight, z_weight)


def with_routing(
    objective: Tensor,
    loss: Tensor,
    router_logits: list[Tensor],
    model: GPT,
    count: int | Tensor,
    balance_weight: float,
    z_weight: float,
    figures: dict[str, Tensor] | None = None,
) -> Losses:
    """The losses of a batch of `count` targets (or pairs, or answers); with experts, the two of each layer's router
    beside them."""
    told = {name: value.detach() for name, value in (figures or {}).items()}
    if not router_logits:
        return Losses(objective, loss.detach(), figures=told)
    n_per_token = model.config.n_experts_per_token
    routing = [
        balance_weight * balance_loss(logits, n_per_token) + z_weight * z_loss(logits) for logits in router_logits
    ]
    return Losses(
        objective=objective + count * torch.stack(routing).sum(),
        loss=loss.detach(),
        expert_tokens=torch.stack([expert_tokens(logits.detach(), n_per_token) for logits in router_logits]),
        figures=told,
    )


def counted(batch: Batch) -> Tensor:
    """How many targets of a batch carry loss, int64, where the batch is: an accelerator is not waited for."""
    return (batch[1] != IGNORED).sum()


def count_targets(batch: Batch) -> int:
    """The same as a number; of a batch on an accelerator, it waits for that."""
    return int(counted(batch))

"""The cross-entropy of the next token, and what the losses of all objectives have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptworks.config import IGNORED, TrainConfig
from gptworks.data.permutation import Int64s
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


@dataclass(frozen=True)
class Routing:
    """The weights of the losses of experts' routers."""

    balance_weight: float = 0.0
    z_weight: float = 0.0

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """As the recipe sets them."""
        return cls(train.router_balance_weight, train.router_z_weight)


LossFunction = Callable[[GPT, Batch], Losses]


def next_token(model: GPT, batch: Batch, routing: Routing = Routing()) -> Losses:
    """Cross-entropy of each target, in nats; with experts, the two losses of each layer's router beside it."""
    inputs, targets, *positions = batch
    router_logits: list[Tensor] = []
    features = model.features(inputs, None, router_logits, *positions)
    loss = linear_cross_entropy(features, model.head_weight, targets, model.config.logit_softcap)
    return with_routing(loss, loss, router_logits, model, counted(batch), routing)


def with_routing(
    objective: Tensor,
    loss: Tensor,
    router_logits: list[Tensor],
    model: GPT,
    count: int | Tensor,
    routing: Routing,
    figures: dict[str, Tensor] | None = None,
) -> Losses:
    """The losses of a batch of `count` targets (or pairs, or answers); with experts, also the routers' losses."""
    figures = {name: value.detach() for name, value in (figures or {}).items()}
    if not router_logits:
        return Losses(objective, loss.detach(), figures=figures)
    n_per_token = model.config.n_experts_per_token
    layers = [
        routing.balance_weight * balance_loss(logits, n_per_token) + routing.z_weight * z_loss(logits)
        for logits in router_logits
    ]
    return Losses(
        objective=objective + count * torch.stack(layers).sum(),
        loss=loss.detach(),
        expert_tokens=torch.stack([expert_tokens(logits.detach(), n_per_token) for logits in router_logits]),
        figures=figures,
    )


def counted(batch: Batch) -> Tensor:
    """How many targets of a batch carry loss, int64, where the batch is: an accelerator is not waited for."""
    return (batch[1] != IGNORED).sum()


def count_targets(batch: Batch) -> int:
    """The same as a number; of a batch on an accelerator, it waits for that."""
    return int(counted(batch))


_ROUND_TOKENS = 32
"""Padded batches are as long as their longest row, rounded up to this: fewer shapes for kernels to meet."""


def padded(rows: Sequence[tuple[Int64s, npt.NDArray[np.bool_]]], context_length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [B, T], of rows that each hold one text: its tokens [n], and which are learned [n]."""
    longest = max(len(ids) for ids, _ in rows) - 1
    width = min(context_length, -(-longest // _ROUND_TOKENS) * _ROUND_TOKENS)
    inputs = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, (ids, learned) in enumerate(rows):
        inputs[row, : len(ids) - 1] = torch.from_numpy(ids[:-1])
        targets[row, : len(ids) - 1] = torch.from_numpy(np.where(learned[1:], ids[1:], IGNORED))
    return inputs, targets

"""The cross-entropy of the next token, and the parts that all objectives' losses share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.data.samples import Batch
from gptworks.model.gpt import GPT
from gptworks.model.lab.future import future_features
from gptworks.model.loss import linear_cross_entropies, linear_cross_entropy
from gptworks.model.moe import balance_loss, expert_tokens, z_loss


class StepBatches(NamedTuple):
    """The micro-batches of a step."""

    numbers: range
    """Numbers of this rank's batches within the step."""
    rows: list[Batch]
    n_targets: int
    n_tokens: int


@dataclass(frozen=True)
class Losses:
    """Losses and figures, summed over a batch's targets."""

    objective: Tensor
    """The loss to differentiate."""
    loss: Tensor
    """The loss to report, without auxiliary terms."""
    expert_tokens: Tensor | None = None
    """Tokens that each expert of each layer got, int64 [L, E]."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Additional sums, whose means are reported by name."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Divisor of a figure, by name, if it is not the number of the batch's targets."""


@dataclass(frozen=True)
class Routing:
    """The weights of the two losses of experts' routers."""

    balance_weight: float = 0.0
    z_weight: float = 0.0


LossFunction = Callable[[GPT, Batch], Losses]


def next_token(model: GPT, batch: Batch, routing: Routing = Routing(), future_weights: Sequence[float] = ()) -> Losses:
    """Cross-entropy of each target, in nats; with experts, also the two losses of each layer's router.

    Args:
        future_weights: weights of the same loss for each token beyond the next, nearest first; empty: their heads are
            not trained. As in DeepSeek-V3 (2024, section 2.2), their sums are divided by the count of next tokens.
    """
    inputs, targets, *positions = batch
    router_logits: list[Tensor] = []
    features = model.features(inputs, None, router_logits, *positions)
    head, softcap = model.head_weight, model.config.logit_softcap
    if not future_weights:
        loss = linear_cross_entropy(features, head, targets, softcap)
        return with_routing(loss, loss, router_logits, model, counted(batch), routing)
    wanted = future_targets(targets, 1 + len(future_weights), *positions)
    by_token = torch.stack([features, *future_features(model.future_heads, features)])  # K B T C
    total, (loss, *others) = linear_cross_entropies(by_token, head, wanted, (1.0, *future_weights), softcap)
    names = [f"loss_of_token_{ahead}" for ahead in range(2, 2 + len(others))]
    losses = with_routing(
        total, loss, router_logits, model, counted(batch), routing, dict(zip(names, others, strict=True))
    )
    return replace(losses, counts=dict(zip(names, (wanted[1:] != IGNORED).sum((1, 2)), strict=True)))


def future_targets(targets: Tensor, n_tokens: int, text_positions: Tensor | None = None) -> Tensor:
    """Targets of the next token [B, T] → targets of the next `n_tokens`, [n_tokens, B, T]; −100 past a row's end.
    Targets that are −100 stay −100.

    Args:
        text_positions: each token's position in its own text, int64 [B, T], if rows hold several texts. Targets in
            another text than the predicting token are −100.
    """
    ahead_of = [targets]
    for ahead in range(1, n_tokens):
        n_there = max(0, targets.size(1) - ahead)
        wanted = torch.full_like(targets, IGNORED)
        wanted[:, :n_there] = targets[:, ahead:]
        if text_positions is not None:
            other = text_positions[:, ahead:] != text_positions[:, :n_there] + ahead
            wanted[:, :n_there].masked_fill_(other, IGNORED)
        ahead_of.append(wanted)
    return torch.stack(ahead_of)


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
    """The number of a batch's targets with loss, int64 on the batch's device; does not wait for an accelerator."""
    return (batch[1] != IGNORED).sum()


def count_targets(batch: Batch) -> int:
    """The number of a batch's targets with loss; waits for an accelerator."""
    return int(counted(batch))

"""The cross-entropy of the next token, and the classes and functions that all objectives' losses share."""

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
    """One rank's micro-batches of a step."""

    numbers: range
    """The numbers of this rank's micro-batches among all micro-batches of the step."""
    rows: list[Batch]
    n_targets: int
    n_tokens: int


@dataclass(frozen=True)
class Losses:
    """The losses and reported figures of a batch, as sums over its targets."""

    objective: Tensor
    """The loss to differentiate, with auxiliary terms."""
    loss: Tensor
    """The loss to report, without auxiliary terms."""
    expert_tokens: Tensor | None = None
    """Number of tokens routed to each expert of each layer, int64 [L, E]; None without experts."""
    figures: dict[str, Tensor] = field(default_factory=dict)
    """Other figures by name, as sums; their means are reported."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Divisors, by name, of those figures that are not divided by the number of targets."""


@dataclass(frozen=True)
class Routing:
    """The weights of the routers' two auxiliary losses, in models with experts."""

    balance_weight: float = 0.0
    z_weight: float = 0.0


LossFunction = Callable[[GPT, Batch], Losses]


def next_token(model: GPT, batch: Batch, routing: Routing = Routing(), future_weights: Sequence[float] = ()) -> Losses:
    """Return the targets' cross-entropy in nats; with experts, add the two losses of each layer's router.

    As in DeepSeek-V3 (2024, section 2.2), all losses are divided by the number of next-token targets.

    Args:
        future_weights: loss weights of the tokens after the next one, nearest first. If empty, the heads for
            these tokens are not trained.
    """
    inputs, targets, *texts = batch
    router_logits: list[Tensor] = []
    features = model.features(inputs, None, router_logits, *texts)
    head, softcap = model.head_weight, model.config.logit_softcap
    if not future_weights:
        loss = linear_cross_entropy(features, head, targets, softcap)
        return with_routing(loss, loss, router_logits, model, counted(batch), routing)
    wanted = future_targets(targets, 1 + len(future_weights), *texts[:1])
    by_token = torch.stack([features, *future_features(model.future_heads, features)])  # K B T C
    total, (loss, *others) = linear_cross_entropies(by_token, head, wanted, (1.0, *future_weights), softcap)
    names = [f"loss_of_token_{ahead}" for ahead in range(2, 2 + len(others))]
    losses = with_routing(
        total, loss, router_logits, model, counted(batch), routing, dict(zip(names, others, strict=True))
    )
    return replace(losses, counts=dict(zip(names, (wanted[1:] != IGNORED).sum((1, 2)), strict=True)))


def future_targets(targets: Tensor, n_tokens: int, text_positions: Tensor | None = None) -> Tensor:
    """Return the targets of the next `n_tokens` tokens, [n_tokens, B, T], from `targets` of the next token [B, T].

    A target is −100 if it is −100 in `targets` or lies beyond the row's end.

    Args:
        text_positions: each token's position in its own text, int64 [B, T], if rows hold several texts. A target in
            another text than the input token's is −100 as well.
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
    """Return the losses of a batch of `count` targets (or pairs, or answers); with experts, add the routers' losses."""
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
    """Return the number of a batch's unignored targets, int64 on the device; does not wait for the device."""
    return (batch[1] != IGNORED).sum()


def count_targets(batch: Batch) -> int:
    """Return the number of a batch's targets that are not ignored; waits for the device."""
    return int(counted(batch))

"""Cross-entropy of the next token without the logits ever standing whole in memory.

A vocabulary of 50,257 makes 200 KB of fp32 logits a token, and their gradient as much again. Here the head's product,
the softmax and both gradients are done for a few hundred tokens at a time, while they are in the processor's cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.model.layers import without_autocast

CPU_CHUNK_BYTES = 8 * 2**20
"""fp32 logits that stand in memory at once on a CPU: what its cache holds..."""

CPU_CHUNK_TOKENS = 512
"""...but at least so many tokens, or reading the head's matrix for each chunk would cost more than the products."""

CHUNK_TOKENS = 8192
"""Tokens at once on an accelerator, which wants large products."""


def chunk_tokens(device: torch.device, vocab_size: int) -> int:
    """Tokens whose logits stand in memory at once."""
    if device.type != "cpu":
        return CHUNK_TOKENS
    return max(CPU_CHUNK_TOKENS, CPU_CHUNK_BYTES // (4 * vocab_size))


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of −log softmax(features · weightᵀ)[target] over the targets that are not −100, in nats.

    Args:
        features: [..., C]. weight: [V, C]. targets: [...], int64.

    Returns:
        A float32 scalar. Its gradient reaches features and weight.
    """
    features, targets = features.reshape(-1, features.size(-1)), targets.reshape(-1)
    if not torch.is_grad_enabled():  # or else needs_input_grad, which asks the tensors alone, has d_weight computed
        features, weight = features.detach(), weight.detach()
    total: Tensor = _LinearCrossEntropy.apply(features, weight, targets)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def token_nats(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(features · weightᵀ)[target] of each target, 0 where it is −100; float32, in targets' shape [...]."""
    flat, chunk = features.reshape(-1, features.size(-1)), chunk_tokens(features.device, weight.size(0))
    nats = [
        F.cross_entropy((x @ weight.to(x.dtype).T).float(), target, ignore_index=IGNORED, reduction="none")
        for x, target in zip(torch.split(flat, chunk), torch.split(targets.reshape(-1), chunk), strict=True)
    ]
    return torch.cat(nats).view(targets.shape)


def linear_cross_entropy_reference(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same by the definition, with all logits at once. For tests."""
    logits = features.float() @ weight.float().T
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are computed with the loss, chunk by chunk; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with without_autocast(features.device):
            wants_features, wants_weight, _ = ctx.needs_input_grad
            head = weight.to(features.dtype)
            chunk = chunk_tokens(features.device, weight.size(0))
            total = torch.zeros((), dtype=torch.float32, device=features.device)
            d_features = torch.empty_like(features) if wants_features else None
            d_weight = (
                torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
                if wants_weight
                else None
            )
            for start in range(0, features.size(0), chunk):
                x, target = features[start : start + chunk], targets[start : start + chunk]  # N C, N
                counted = target != IGNORED
                index = target.where(counted, 0)[:, None]
                log_probs = (x @ head.T).float().log_softmax(-1)  # N V
                total -= log_probs.gather(1, index)[:, 0].where(counted, 0.0).sum()
                if d_features is None and d_weight is None:
                    continue
                d_logits = log_probs.exp_()
                d_logits.scatter_add_(1, index, -torch.ones_like(index, dtype=d_logits.dtype))
                d_logits = (d_logits * counted[:, None]).to(features.dtype)
                if d_features is not None:
                    d_features[start : start + chunk] = d_logits @ head
                if d_weight is not None:
                    d_weight += d_logits.T @ x
            ctx.save_for_backward(d_features, d_weight)
            return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (scale,) = gradients
        d_features, d_weight = ctx.saved_tensors
        return (
            None if d_features is None else d_features * scale.to(d_features.dtype),
            None if d_weight is None else d_weight * scale,
            None,
        )

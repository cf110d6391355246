"""Cross-entropy of the next token without the logits ever standing whole in memory.

A vocabulary of 50,257 makes 200 KB of fp32 logits a token, and their gradient as much again. Here the head's product,
the softmax and both gradients are done for some of the tokens at a time. On a CPU the probabilities are made a few rows
at a time, while they are in the processor's cache.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gptworks.config import IGNORED
from gptworks.model.layers import without_autocast

CPU_CACHE_BYTES = 8 * 2**20
"""fp32 probabilities made at once on a CPU: what its cache holds while it goes over them again and again."""

CPU_CHUNK_TOKENS = 1024
"""Tokens whose logits stand in memory at once on a CPU: with fewer, reading the head's matrix and adding to its
gradient for each chunk would cost more than the products..."""

CPU_CHUNK_LOGITS = 2 * 2**20
"""...or more tokens, where the vocabulary is so small that their logits are no more than this."""

CHUNK_TOKENS = 8192
"""Tokens at once on an accelerator, which wants large products."""


def chunk_tokens(device: torch.device, vocab_size: int) -> int:
    """Tokens whose logits stand in memory at once, in the dtype of the products."""
    if device.type != "cpu":
        return CHUNK_TOKENS
    return max(CPU_CHUNK_TOKENS, CPU_CHUNK_LOGITS // vocab_size)


def softmax_tokens(device: torch.device, vocab_size: int) -> int:
    """Tokens whose probabilities stand in memory at once, in fp32."""
    if device.type != "cpu":
        return CHUNK_TOKENS
    return max(1, CPU_CACHE_BYTES // (4 * vocab_size))


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of −log softmax(features · weightᵀ)[target] over the targets that are not −100, in nats.

    Args:
        features: [..., C]. weight: [V, C]. targets: [...], int64.

    Returns:
        A float32 scalar. Its gradient reaches features and weight.
    """
    features, targets = features.reshape(-1, features.size(-1)), targets.reshape(-1)
    if not torch.is_grad_enabled():
        return token_nats(features, weight, targets).sum()
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


def target_logprobs(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """log softmax(features · weightᵀ)[target] of each target, 0 where it is −100; float32, in targets' shape [...].

    Its gradient reaches features and weight. Logits are made for some of the targets at a time, and made again in the
    backward pass.
    """
    counted = targets.reshape(-1) != IGNORED
    x, wanted = features.reshape(-1, features.size(-1))[counted], targets.reshape(-1)[counted]

    def part(x: Tensor, wanted: Tensor) -> Tensor:
        return -F.cross_entropy(_wide_logits(x, weight), wanted, reduction="none")

    logprobs = _in_chunks(part, weight, x, wanted)
    empty = logprobs.new_zeros(counted.shape)
    return empty.masked_scatter(counted, logprobs).view(targets.shape)


def distillation_nats(
    features: Tensor,
    weight: Tensor,
    teacher_features: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    temperature: float,
) -> Tensor:
    """Two sums over the targets that are not −100, float32 [2], in nats: −log softmax(logits)[target], and
    KL(softmax(teacher's logits / temperature) ‖ softmax(logits / temperature)).

    Neither model's logits ever stand whole in memory. The gradient reaches features and weight, not the teacher's.

    Args:
        features: [..., C]. weight: [V, C]. teacher_features: [..., D]. teacher_weight: [V, D]. targets: [...], int64.
    """
    counted = targets.reshape(-1) != IGNORED
    x = features.reshape(-1, features.size(-1))[counted]
    y = teacher_features.detach().reshape(-1, teacher_features.size(-1))[counted]

    def part(x: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
        ours, theirs = _wide_logits(x, weight), _wide_logits(y, teacher_weight.detach())
        soft, taught = (F.log_softmax(logits / temperature, dim=-1) for logits in (ours, theirs))
        hard = F.cross_entropy(ours, wanted, reduction="none")
        return torch.stack((hard, F.kl_div(soft, taught, reduction="none", log_target=True).sum(-1)), dim=-1)

    return _in_chunks(part, weight, x, y, targets.reshape(-1)[counted]).reshape(-1, 2).sum(0)


def _wide_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits [N, V], in float32 at least."""
    logits = x @ weight.to(x.dtype).T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _in_chunks(part: Callable[..., Tensor], weight: Tensor, *rows: Tensor) -> Tensor:
    """What `part` gives for some of the rows at a time, put together. Nothing inside is kept for the backward pass."""
    chunk = chunk_tokens(rows[0].device, weight.size(0))
    keep = torch.is_grad_enabled()
    given = [
        checkpoint(part, *some, use_reentrant=False, preserve_rng_state=False) if keep else part(*some)
        for some in zip(*(torch.split(each, chunk) for each in rows), strict=True)
    ]
    return torch.cat(given) if len(given) > 1 else given[0]


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
            wide = torch.promote_types(weight.dtype, torch.float32)
            total = torch.zeros((), dtype=torch.float32, device=features.device)
            d_features = torch.empty_like(features) if wants_features else None
            d_weight: Tensor | None = None
            for start in range(0, features.size(0), chunk):
                x, target = features[start : start + chunk], targets[start : start + chunk]  # N C, N
                nats, d_logits = _nats_and_gradient(x, head, target)
                total += nats
                if d_features is not None:
                    torch.mm(d_logits, head, out=d_features[start : start + chunk])
                if wants_weight:
                    product = d_logits.T @ x  # V C
                    d_weight = product.to(wide) if d_weight is None else d_weight.add_(product)
                    del product
                del d_logits  # before the next chunk's are made
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


def _nats_and_gradient(features: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of −log softmax(logits)[target], and its gradient for the logits [N, V]."""
    logits = features @ head.T
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    n_rows = softmax_tokens(logits.device, logits.size(1))
    for rows, wanted in zip(torch.split(logits, n_rows), torch.split(targets, n_rows), strict=True):
        total += _rows_to_gradient(rows, wanted)
    return total, logits


def _rows_to_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Write softmax − one-hot over some rows' logits; returns the sum of their −log softmax(logits)[target].

    A target's probability may underflow: its logarithm comes by way of the largest one, which is at least 1/V.
    """
    counted = (targets != IGNORED)[:, None]
    index = targets[:, None].where(counted, 0)
    gap = logits.amax(-1, keepdim=True).float() - logits.gather(1, index)
    probabilities = logits.softmax(-1, dtype=torch.float32)
    nats = gap - probabilities.amax(-1, keepdim=True).log()
    probabilities.scatter_add_(1, index, -torch.ones_like(gap))
    logits.copy_(probabilities.mul_(counted))
    return nats.where(counted, 0.0).sum()

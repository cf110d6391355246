"""Cross-entropy of the next token, computed without holding all logits in memory.

With a vocabulary of 50,257, a token's fp32 logits take 200 KB, and their gradient as much. Here the head's product,
the softmax and both gradients are computed for a chunk of tokens at a time. On a CPU, C++ turns logits into their
gradient row by row (gptworks.kernels.passes); on an NVIDIA GPU, Triton does (gptworks.kernels.triton_loss). Otherwise,
torch computes the probabilities of some rows at a time; on a CPU, only as many as fit in its cache. A softcap, if
given, first replaces each logit by softcap · tanh(logit / softcap).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.kernels import dispatch
from gptworks.model.cost import Shapes
from gptworks.model.layers import cap, without_autocast

CPU_CACHE_BYTES = 8 * 2**20
"""Bytes of fp32 probabilities that a CPU computes at a time: few enough to stay in its cache for several passes."""

CPU_CHUNK_TOKENS = 2048
"""Least number of tokens per chunk on a CPU: with fewer, reading the head's matrix and adding to its gradient for each
chunk would cost more than the products."""

CPU_CHUNK_LOGITS = 2 * 2**20
"""Logits per chunk on a CPU with a small vocabulary, where a chunk has more than `CPU_CHUNK_TOKENS` tokens."""

CPU_HEAD_ROWS = 8192
"""Rows of the head's gradient that a CPU computes at a time and adds in fp32 while they are in its cache. One torch
product of all 50,257 rows took 1.3 times as long."""

CHUNK_TOKENS = 8192
"""Tokens per chunk on an accelerator, which needs large products."""

SOFTMAX_LOGITS = 2**27
"""Largest number of probabilities that an accelerator computes at a time: 512 MiB in fp32, and as much for an fp32 copy
of logits in bf16."""


def chunk_tokens(device: torch.device, vocab_size: int) -> int:
    """Number of tokens in a chunk. A chunk's logits are in memory together, in the dtype of matrix products."""
    if device.type != "cpu":
        return CHUNK_TOKENS
    return max(CPU_CHUNK_TOKENS, CPU_CHUNK_LOGITS // vocab_size)


def softmax_tokens(device: torch.device, vocab_size: int) -> int:
    """Number of tokens whose fp32 probabilities are in memory together."""
    if device.type != "cpu":
        return max(1, min(CHUNK_TOKENS, SOFTMAX_LOGITS // vocab_size))
    return max(1, CPU_CACHE_BYTES // (4 * vocab_size))


def selects_rows(device: torch.device) -> bool:
    """Whether `target_logprobs` and `distillation_loss` skip rows whose target is −100. On CUDA they compute all rows,
    because the host would have to wait for the number of the remaining rows."""
    return device.type != "cuda"


def head_rows(device: torch.device, vocab_size: int) -> int:
    """Number of rows of the head's gradient that one product computes."""
    return min(vocab_size, CPU_HEAD_ROWS) if device.type == "cpu" else vocab_size


IntoGradient = Callable[[Tensor, slice], Tensor]
"""A function that overwrites the logits [n, V] of a slice of rows with the loss's gradient, and returns sums over these
rows in float32 or wider: the loss, then figures that are only reported."""


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """Return the sum of −log softmax(features · weightᵀ)[target], in nats, over the targets that are not −100.

    Args:
        features: [..., C]. weight: [V, C]. targets: [...], int64.
        softcap: if set, each logit is first replaced by softcap · tanh(logit / softcap).

    Returns:
        A float32 scalar, differentiable in features and weight.
    """
    features, targets = features.reshape(-1, features.size(-1)), targets.reshape(-1)
    if not torch.is_grad_enabled():
        return token_nats(features, weight, targets, softcap).sum()

    def into_gradient(logits: Tensor, rows: slice) -> Tensor:
        return _into_gradient(logits, targets[rows])

    total: Tensor = _LinearLoss.apply(features, weight, _through_cap(into_gradient, softcap))[0]  # type: ignore[no-untyped-call]
    return total


def linear_cross_entropies(
    features: Tensor, weight: Tensor, targets: Tensor, factors: Sequence[float], softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return Σ factors[k] · nats[k], and nats [K]; nats[k] is `linear_cross_entropy` of features[k] and targets[k].

    All K losses share the head's matrix and its gradient. Only the sum is differentiable, in features and weight.

    Args:
        features: [K, ..., C].
        weight: [V, C].
        targets: [K, ...], int64.
        factors: K numbers.
    """
    n = targets[0].numel()
    flat, features = targets.flatten(), features.reshape(-1, features.size(-1))

    def into_gradient(logits: Tensor, rows: slice) -> Tensor:
        sums = _wide(logits.new_zeros(1 + len(factors)))
        for k in range(rows.start // n, -(-rows.stop // n)):
            of = slice(max(rows.start, k * n), min(rows.stop, (k + 1) * n))
            scale = sums.new_full((of.stop - of.start,), factors[k])
            sums[1 + k] = _into_gradient(logits[of.start - rows.start : of.stop - rows.start], flat[of], scale)
            sums[0] += factors[k] * sums[1 + k]
        return sums

    through = _through_cap(into_gradient, softcap)
    loss, sums = _LinearLoss.apply(features, weight, through, 1 + len(factors))  # type: ignore[no-untyped-call]
    return loss, sums[1:]


@torch.no_grad()
def token_nats(features: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """Return −log softmax(features · weightᵀ)[target] of each target, 0 if it is −100; float32, in targets' shape."""
    flat, wanted = features.reshape(-1, features.size(-1)), targets.reshape(-1)
    head, chunk = weight.to(features.dtype), chunk_tokens(features.device, weight.size(0))

    def nats(rows: slice) -> list[Tensor]:  # a function, so that a chunk's logits are freed before the next's exist
        logits = dispatch.product(flat[rows], head.T)
        return [_nats(cap(part, softcap), wanted[of]) for part, of in _in_parts(logits, rows)]

    parts = [part for start in range(0, len(flat), chunk) for part in nats(slice(start, start + chunk))]
    return torch.cat(parts).view(targets.shape) if parts else _wide(features.new_zeros(targets.shape))


def target_logprobs(features: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """Return log softmax(features · weightᵀ)[target] of each target, 0 if it is −100; float32, in targets' shape.

    The result is differentiable in features and weight; the backward pass recomputes the logits.
    """
    x, wanted = features.reshape(-1, features.size(-1)), targets.reshape(-1)
    if not selects_rows(x.device):
        all_rows: Tensor = _TargetLogprobs.apply(x, weight, wanted, softcap)  # type: ignore[no-untyped-call]
        return all_rows.view(targets.shape)
    counted = wanted != IGNORED
    logprobs: Tensor = _TargetLogprobs.apply(x[counted], weight, wanted[counted], softcap)  # type: ignore[no-untyped-call]
    return logprobs.new_zeros(counted.shape).masked_scatter(counted, logprobs).view(targets.shape)


def distillation_loss(
    features: Tensor,
    weight: Tensor,
    teacher_features: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    temperature: float,
    ce_weight: float,
    kl_weight: float,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ce_weight · nats + kl_weight · temperature² · kl, nats, and kl.

    `nats` and `kl` are float32 sums over the targets that are not −100: `nats` of −log softmax(logits)[target], `kl` of
    KL(softmax(teacher's logits / temperature) ‖ softmax(logits / temperature)).

    Logits are computed in chunks, for both models. Only the first result is differentiable, in features and weight.

    Args:
        features: [..., C].
        weight: [V, C].
        teacher_features: [..., D].
        teacher_weight: [V, D].
        targets: [...], int64.
    """
    x, y = (z.reshape(-1, z.size(-1)) for z in (features, teacher_features.detach()))
    wanted = targets.reshape(-1)
    selects = selects_rows(x.device)
    if selects:
        counted = wanted != IGNORED
        x, y, wanted = x[counted], y[counted], wanted[counted]
    teacher_head = teacher_weight.detach().to(y.dtype)

    def into_gradient(logits: Tensor, rows: slice) -> Tensor:
        taught = dispatch.product(y[rows], teacher_head.T)
        return _sum(
            distilled(part, taught[of.start - rows.start : of.stop - rows.start], wanted[of])
            for part, of in _in_parts(logits, rows)
        )

    def total(x: Tensor, counted: Tensor | None) -> Tensor:
        return x.sum() if counted is None else x.where(counted, 0.0).sum()

    def distilled(logits: Tensor, taught: Tensor, wanted: Tensor) -> Tensor:
        ours, theirs, index = _wide(logits), _wide(cap(taught, teacher_softcap)), wanted[:, None]
        counted = None if selects else index != IGNORED
        index = index if counted is None else index.where(counted, 0)
        hard, soft, goal = (z.log_softmax(-1) for z in (ours, ours / temperature, theirs / temperature))
        nats, kl = -total(hard.gather(1, index), counted), total(goal.exp() * (goal - soft), counted)
        gradient = hard.exp_().scatter_add_(1, index, -torch.ones_like(index, dtype=hard.dtype)).mul_(ce_weight)
        logits.copy_(gradient.add_(soft.exp_().sub_(goal.exp_()), alpha=kl_weight * temperature))
        if counted is not None:
            logits.masked_fill_(~counted, 0.0)
        return torch.stack((ce_weight * nats + kl_weight * temperature**2 * kl, nats, kl))

    loss, sums = _LinearLoss.apply(x, weight, _through_cap(into_gradient, softcap), 3)  # type: ignore[no-untyped-call]
    return loss, sums[1], sums[2]


def linear_cross_entropy_reference(
    features: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> Tensor:
    """Reference for `linear_cross_entropy`: computes all logits at once. For tests."""
    logits = cap(features.float() @ weight.float().T, softcap)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class _LinearLoss(torch.autograd.Function):
    """Returns a loss summed over all rows, and `n_sums` sums to report, the first being the loss. The forward pass also
    computes the gradients, chunk by chunk; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, into_gradient: IntoGradient, n_sums: int = 1
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(features.device):
            wants = ctx.needs_input_grad[:2]
            sums, *gradients = _sums_and_gradients(features, weight, into_gradient, wants, n_sums)
            ctx.save_for_backward(*gradients)
            ctx.mark_non_differentiable(sums)
            return sums[0].clone(), sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        d_features, d_weight = ctx.saved_tensors
        return (
            None if d_features is None else d_features * scale.to(d_features.dtype),
            None if d_weight is None else d_weight * scale,
            None,
            None,
        )


class _TargetLogprobs(torch.autograd.Function):
    """Log-probabilities of targets. The backward pass recomputes the logits, because the forward pass does not know the
    objective's gradient for each log-probability."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
        with without_autocast(features.device):
            ctx.save_for_backward(features, weight, targets)
            ctx.softcap = softcap
            return -token_nats(features, weight, targets, softcap)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        features, weight, targets = ctx.saved_tensors
        factors = -gradients[0]

        def into_gradient(logits: Tensor, rows: slice) -> Tensor:
            return _into_gradient(logits, targets[rows], factors[rows])

        with without_autocast(features.device):
            through = _through_cap(into_gradient, ctx.softcap)
            _, d_features, d_weight = _sums_and_gradients(features, weight, through, ctx.needs_input_grad[:2])
        return d_features, d_weight, None, None


def _sums_and_gradients(
    features: Tensor, weight: Tensor, into_gradient: IntoGradient, wants: tuple[bool, bool], n_sums: int = 1
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a loss's sums [n_sums], and its gradients for features [N, C] and weight [V, C]; a gradient is None if
    `wants` has False for it. One chunk of logits is in memory at a time."""
    head, chunk = weight.to(features.dtype), chunk_tokens(features.device, weight.size(0))
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros(n_sums, dtype=wide, device=features.device)
    d_features = torch.empty_like(features) if wants[0] else None
    d_weight = torch.zeros_like(weight, dtype=wide) if wants[1] and not len(features) else None
    for start in range(0, len(features), chunk):
        rows = slice(start, min(start + chunk, len(features)))
        x = features[rows]  # [N, C]
        d_logits = dispatch.product(x, head.T)
        total += into_gradient(d_logits, rows)
        if d_features is not None:
            dispatch.product(d_logits, head, out=d_features[rows])
        if wants[1]:
            adds = d_weight is not None
            d_weight = torch.empty_like(weight, dtype=wide) if d_weight is None else d_weight
            _add_products(d_weight, d_logits, x, adds)
        del d_logits  # before the next chunk's logits exist
    return total, d_features, d_weight


def _add_products(d_weight: Tensor, d_logits: Tensor, x: Tensor, adds: bool) -> None:
    """Write d_logitsᵀ [V, N] · x [N, C] to d_weight [V, C], or add it to d_weight if `adds`, some rows at a time."""
    n_rows = head_rows(x.device, len(d_weight))
    for part, to in zip(torch.split(d_logits.T, n_rows), torch.split(d_weight, n_rows), strict=True):
        product = dispatch.product(part, x)
        to.add_(product) if adds else to.copy_(product)
        del product


def _through_cap(into_gradient: IntoGradient, softcap: float | None) -> IntoGradient:
    """Wrap `into_gradient` to cap the logits first and to multiply the gradient by the cap's derivative."""
    if softcap is None:
        return into_gradient

    def part_to_gradient(logits: Tensor, rows: slice) -> Tensor:
        bent = (logits / softcap).tanh_()
        sums = into_gradient(torch.mul(bent, softcap, out=logits), rows)
        torch.mul(logits, bent.square_().neg_().add_(1), out=logits)
        return sums

    return lambda logits, rows: _sum(part_to_gradient(part, of) for part, of in _in_parts(logits, rows))


def _in_parts(logits: Tensor, rows: slice) -> Iterator[tuple[Tensor, slice]]:
    """Yield the logits [n, V] `softmax_tokens` rows at a time, with their row slice."""
    n_rows = softmax_tokens(logits.device, logits.size(1))
    for first in range(0, len(logits), n_rows):
        part = logits[first : first + n_rows]
        yield part, slice(rows.start + first, rows.start + first + len(part))


def _into_gradient(logits: Tensor, targets: Tensor, factors: Tensor | None = None) -> Tensor:
    """Overwrite logits [n, V] with (softmax − one-hot) times each row's factor [n] (None for 1), or with 0 where the
    target is −100; return the sum of the other rows' −log softmax(logits)[target], without factors."""
    if (kernel := dispatch.chosen("cross_entropy", logits)).by != dispatch.TORCH:
        return kernel.compute(logits, targets, factors, gradient=True).sum()
    return _sum(
        _rows_to_gradient(part, targets[of], None if factors is None else factors[of])
        for part, of in _in_parts(logits, slice(0, len(logits)))
    )


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return −log softmax(logits)[target] of each row of logits [n, V], 0 if the target is −100; float32 [n]."""
    if (kernel := dispatch.chosen("cross_entropy", logits)).by != dispatch.TORCH:
        return kernel.compute(logits, targets, gradient=False)
    return F.cross_entropy(_wide(logits), targets, ignore_index=IGNORED, reduction="none")


def _rows_to_gradient(logits: Tensor, targets: Tensor, factors: Tensor | None = None) -> Tensor:
    """Compute `_into_gradient` in torch, with the probabilities of all n rows in memory.

    A target's probability may underflow to 0. So its logarithm is computed as the logarithm of the row's largest
    probability, at least 1/V, minus the gap between the largest logit and the target's.
    """
    counted = (targets != IGNORED)[:, None]
    index = targets[:, None].where(counted, 0)
    gap = _wide(logits.amax(-1, keepdim=True)) - logits.gather(1, index)
    probabilities = logits.softmax(-1, dtype=gap.dtype)
    nats = gap - probabilities.amax(-1, keepdim=True).log()
    probabilities.scatter_add_(1, index, -torch.ones_like(gap))
    logits.copy_(probabilities.mul_(counted if factors is None else counted * factors[:, None]))
    return nats.where(counted, 0.0).sum()


def _sum(parts: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _wide(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scoring_bytes(shapes: Shapes, vocab_size: int) -> int:
    """Peak bytes of `token_nats`: a chunk's logits and, without a fused loss, the log-probabilities of some rows; under
    autocast also these rows in float32."""
    logits = min(chunk_tokens(shapes.device, vocab_size), shapes.n_tokens) * vocab_size
    rows = 0 if shapes.fuses_loss else 4 * (1 + shapes.autocast)
    return shapes.product_bytes * logits + rows * min(softmax_tokens(shapes.device, vocab_size) * vocab_size, logits)


def loss_chunk_bytes(shapes: Shapes, vocab_size: int, head: int, taught: bool) -> int:
    """Peak bytes of the loss, without features and their gradient.

    In memory are a chunk's logits, the head's gradient in float32, and the rows of this gradient that one product
    computes; without a fused loss, also the probabilities of some rows (under autocast, with their float32 logits).
    Distillation (`taught`) adds the teacher's logits, and the logits and probabilities of some rows with and without
    temperature.

    Args:
        head: number of elements of the head's matrix; 0 if it is frozen.
    """
    chunk, product = chunk_tokens(shapes.device, vocab_size), shapes.product_bytes
    first, second = (max(0, min(chunk, n)) * vocab_size for n in (shapes.n_tokens, shapes.n_tokens - chunk))
    row_bytes = 4 * (6 + 2 * shapes.autocast if taught else 0 if shapes.fuses_loss else 1 + shapes.autocast)
    row_bytes += product if shapes.config.logit_softcap is not None else 0  # the tanh of the logits is saved too
    softmax = row_bytes * min(softmax_tokens(shapes.device, vocab_size) * vocab_size, first) + taught * product * first
    rows = product * head * head_rows(shapes.device, vocab_size) // vocab_size
    return max(
        product * first + max(softmax, 4 * head + rows),
        product * second + 4 * head + max(softmax, rows) if second else 0,
    )

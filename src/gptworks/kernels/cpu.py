"""Training operations for CPUs, written in torch with fewer passes over memory than torch's own functions.

On a CPU, a model of a few million parameters spends more time on the operations between its matrix products than on the
products. Tests compare each operation with a plain equivalent: `Attention` with `gptworks.model.scores.attend`,
`rms_norm` with torch's RMSNorm, `activate` with the activation itself, `dropout` with `F.dropout`.
`gptworks.kernels.dispatch` chooses among these functions, the C++ and torch.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Attention(torch.autograd.Function):
    """`gptworks.model.scores.attend` as batched matrix products around a softmax, for one block of queries at a time.

    A block of queries needs only the keys up to its last query, so nearly half of the scores are never computed. At
    length 1,024, torch's fused CPU kernel takes 1.7 times as long in bf16, forward and backward; at length 256, 2.5
    times (bench/passes.py). The attention weights, and with a softcap the tanh, stay in memory for the backward pass.
    `bias`, [T, S] or [B, T, S] in q's dtype, is 0 for keys that a query may see and -inf for others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        window: int | None,
        dropout: float,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        batch, heads, n_queries, width = q.shape
        groups, n_keys = k.shape[1:3]
        k, v = (x.repeat_interleave(heads // groups, dim=1) if heads != groups else x for x in (k, v))
        q, k, v = (x.reshape(batch * heads, -1, width) for x in (q, k, v))
        out, saved = torch.empty_like(q), []
        for rows, keys in query_blocks(n_queries, n_keys, window):
            block_bias = bias[..., rows, keys]
            if bias.dim() == 3:
                block_bias = block_bias.repeat_interleave(heads, dim=0)
            if softcap is None:
                capped = None
                scores = torch.baddbmm(block_bias, q[:, rows], k[:, keys].transpose(1, 2), alpha=scale)
            else:
                capped = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2)).mul_(scale / softcap).tanh_()
                scores = torch.add(block_bias, capped, alpha=softcap)
            weights = scores.softmax(-1)  # [B·H, t, s]
            kept = _keep(weights.shape, dropout) if dropout else None
            out[:, rows] = torch.bmm(_drop(weights, kept, dropout), v[:, keys])
            saved += [weights, kept, capped]
        ctx.save_for_backward(q, k, v, *saved)
        ctx.groups, ctx.window, ctx.dropout, ctx.scale = groups, window, dropout, scale
        return out.view(batch, heads, n_queries, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        batch, heads, n_queries, width = gradients[0].shape
        gradient = gradients[0].reshape(q.shape)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i, (rows, keys) in enumerate(query_blocks(n_queries, k.size(1), ctx.window)):
            weights, kept, capped = saved[3 * i : 3 * i + 3]
            d_out = gradient[:, rows]
            d_v[:, keys] += torch.bmm(_drop(weights, kept, ctx.dropout).transpose(1, 2), d_out)
            d_weights = _drop(torch.bmm(d_out, v[:, keys].transpose(1, 2)), kept, ctx.dropout)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            if capped is not None:
                d_scores = torch.ops.aten.tanh_backward(d_scores, capped)
            d_q[:, rows] = torch.bmm(d_scores, k[:, keys])
            d_k[:, keys] += torch.bmm(d_scores.transpose(1, 2), q[:, rows])
        d_q, d_k = d_q.mul_(ctx.scale), d_k.mul_(ctx.scale)
        d_q, d_k, d_v = (x.view(batch, heads, -1, width) for x in (d_q, d_k, d_v))
        if heads != ctx.groups:
            d_k, d_v = (x.view(batch, ctx.groups, -1, *x.shape[2:]).sum(2) for x in (d_k, d_v))
        return d_q, d_k, d_v, None, None, None, None, None


BLOCK = 128
"""Number of queries in a block, which `Attention` computes together."""

LONGEST = 2048
"""Largest number of keys for which `Attention` is used: with more, the memory for its weights outweighs its speed."""


def query_blocks(n_queries: int, n_keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield each block's slice of the queries, with the slice of the keys that at least one of these queries sees."""
    for first in range(0, n_queries, BLOCK):
        last = min(first + BLOCK, n_queries)
        offset = n_keys - n_queries
        first_key = 0 if window is None else max(0, first + offset - window + 1)
        yield slice(first, last), slice(first_key, last + offset)


def _drop(weights: Tensor, kept: Tensor | None, dropout: float) -> Tensor:
    return weights if kept is None else weights * kept / (1 - dropout)


def rms_norm(x: Tensor, weight: Tensor, bias: None, eps: float, dtype: torch.dtype, *_: Any) -> Any:
    """Return x, and its RMSNorm over the last dimension, computed in float32 and converted to `dtype`."""
    out: Tensor = _RMSNorm.apply(x, weight, eps, dtype)  # type: ignore[no-untyped-call]
    return x, out


class _RMSNorm(torch.autograd.Function):
    """RMSNorm whose backward pass uses torch's fused LayerNorm kernel with mean 0, and adds back the mean's term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        scale = square.div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normalized: Tensor = (x * scale).mul_(weight)
        return normalized.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        gradient, width = gradients[0].to(scale.dtype), x.size(-1)
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x.to(scale.dtype), [width], torch.zeros_like(scale), scale, weight, None, [True, True, False]
        )
        d_x += (gradient @ (weight / width)).unsqueeze(-1) * scale  # undoes LayerNorm's term for the mean
        return d_x.to(x.dtype), d_weight, None, None


def activate(x: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """Return activation(x), or activation(x) · up if `up` is given. `kind`: a value of `model.mlp`.

    Only x (for relu2, its positive part) and up are saved for the backward pass.
    """
    if up is None:
        return ACTIVATIONS[kind](x)
    out: Tensor = _Gated.apply(x, up, kind)  # type: ignore[no-untyped-call]
    return out


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        d_x: Tensor = (gradients[0] * positive).mul_(2)
        return d_x


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = ACTIVATIONS[kind]
        return ACTIVATIONS[kind](gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = [x.detach().reshape(-1, x.size(-1)) for x in (gradients[0], *ctx.saved_tensors)]
        d_gate, d_up = torch.empty_like(rows[1]), torch.empty_like(rows[2])
        for d_out, gate, up, to_gate, to_up in zip(*(x.chunk(8) for x in (*rows, d_gate, d_up)), strict=True):
            with torch.enable_grad():
                value = ctx.activation(gate.requires_grad_())
            to_gate.copy_(torch.autograd.grad(value, gate, d_out * up)[0])
            torch.mul(value.detach(), d_out, out=to_up)
        return d_gate.view(gradients[0].shape), d_up.view(gradients[0].shape), None


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": _ReLU2.apply,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
}
"""The activation function for each value of `model.mlp`."""


def dropout(x: Tensor, probability: float) -> Tensor:
    """Return x with each element zeroed with this probability, rounded to 1/65,536, and the rest scaled up."""
    kept = _keep(x.shape, probability)
    return x * kept.to(x.dtype).mul_(1 / (1 - probability))


def _keep(shape: torch.Size, probability: float) -> Tensor:
    """Return random booleans, false with this probability. Faster than `bernoulli_`: four share 64 random bits."""
    n = shape.numel()
    bits = torch.empty((n + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    return bits.view(torch.int16)[:n].view(shape) >= round(probability * 2**16) - 2**15

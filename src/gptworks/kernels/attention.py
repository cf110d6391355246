"""Attention and its gradient in C++ for training on a CPU (attention.cpp)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptworks.kernels import passes
from gptworks.kernels.library import training_library

_call = torch.compiler.disable(passes.call)  # type: ignore[no-untyped-call]


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the C++ can compute attention on these tensors on this machine."""
    known = q.dtype in (torch.bfloat16, torch.float32) and q.dtype == k.dtype == v.dtype
    return known and q.device.type == "cpu" and _is_here()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_here() -> bool:
    """Whether the library is usable. Dynamo must not trace this call: it would warn about the library's cache."""
    return training_library() is not None


class Attention(torch.autograd.Function):
    """`gptworks.model.scores.attend` in C++, which makes no tensor of T × S elements for the backward pass.

    The same inputs give the same bits on any number of threads. A query that sees no key gets zeros. If given, `bias`,
    [T, S] or [B, T, S] in q's dtype, is added to the scores of the keys that position and window let a query see.
    The result [B, H, T, D] is stored as [B, T, H, D].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        window: int | None,
        dropout: float,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        (batch, heads, length, width), n_keys = q.shape, k.size(2)
        q, k, v = map(_in_rows, (q, k, v))
        out = q.new_empty(batch, length, heads, width).transpose(1, 2)
        sums = q.new_empty(batch, heads, length, dtype=torch.float32)
        seed = q.new_empty(1, dtype=torch.int64)
        if dropout:
            seed.random_()
        if bias is not None:
            bias = _in_rows(bias).expand(batch, length, n_keys)[:, None]
        tensors = q, k, v, out, bias, sums, seed
        ctx.save_for_backward(*tensors)
        ctx.settings = (max(n_keys, 1) if window is None else window, scale, softcap or 0.0, dropout)
        _call("attention", tensors, *ctx.settings)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        d_q, d_k, d_v = map(torch.empty_like, tensors[:3])
        _call("attention_backward", (*tensors, _in_rows(gradients[0]), d_q, d_k, d_v), *ctx.settings)
        return d_q, d_k, d_v, None, None, None, None, None


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()

"""Matrix products of float32 matrices on a CPU, in C++ (gemm.cpp).

torch uses MKL for such products. On AMD processors, MKL does not use AVX-512 and reaches five sixths of AVX2's rate, so
the C++ is faster (bench/passes.py) and is used. On other processors torch multiplies. The choice depends on the
processor's maker, not on a timing, so that a repeated run gives the same bits.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptworks.kernels.passes import KINDS, are_here, call
from gptworks.machine import is_amd

LEAST = 1 << 22
"""Number of scalar multiplications below which torch's product is as fast."""

LEAST_ROWS = 8
"""Minimum number of rows of the left matrix for which packing the right matrix saves time."""


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether the C++ can multiply a [..., K] by b [K, N], and is faster than torch."""
    return (
        all(type(x) in KINDS and x.device.type == "cpu" and x.dtype == torch.float32 for x in (a, b))
        and a.size(-1) == b.size(0)
        and a.numel() * b.size(1) >= LEAST
        and a.numel() >= LEAST_ROWS * b.size(0)
        and not torch.compiler.is_compiling()
        and is_faster()
        and are_here()  # checked last, because this builds the library
    )


@functools.cache
def is_faster() -> bool:
    """Whether the C++ multiplies faster than torch: only where torch uses MKL on an AMD processor."""
    return is_amd() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return a · b + bias [M, N], with the same bits on any number of threads.

    Args:
        a, b, bias: [M, K], [K, N] and [N], float32, in any layout.
        out: tensor with contiguous rows to write the result to; None: a new tensor.
    """
    a, b = _laid_out(a), _laid_out(b)
    out = a.new_empty(a.size(0), b.size(1)) if out is None else out
    bias = bias if bias is None else bias.contiguous()
    call("gemm", (a, b, bias, out))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., I] · weightᵀ [I, O] + bias [O], differentiable, of shape [..., O]."""
    out: Tensor = _Linear.apply(x.reshape(-1, x.size(-1)), weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.size(0))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return product(x, weight.T, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out, (wants_x, wants_weight, wants_bias) = gradients[0], ctx.needs_input_grad
        return (
            product(d_out, weight) if wants_x else None,
            product(d_out.T, x) if wants_weight else None,
            d_out.sum(0) if wants_bias else None,
        )


def _laid_out(x: Tensor) -> Tensor:
    """Return x, copied if neither its rows nor its columns are contiguous."""
    return x if 1 in x.stride() else x.contiguous()

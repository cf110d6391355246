"""Matrix products of float32 matrices on a CPU, in C++ (gemm.cpp).

torch gives them to MKL. On a processor of AMD's that takes no AVX-512, and with AVX2 leaves a sixth of it idle; the C++
does neither (bench/passes.py). On others torch's is kept: the processor's maker decides, not a timing at the start,
so that a run and its repetition multiply alike.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptworks.kernels.passes import KINDS, are_here, call
from gptworks.machine import is_amd

LEAST = 1 << 22
"""Multiplications below which torch's product is as fast."""

LEAST_ROWS = 8
"""Rows of the left factor from which packing the right one pays."""


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether the C++ multiplies the rows of a [..., K] with b [K, N], and is faster than torch."""
    return (
        all(type(x) in KINDS and x.device.type == "cpu" and x.dtype == torch.float32 for x in (a, b))
        and a.size(-1) == b.size(0)
        and a.numel() * b.size(1) >= LEAST
        and a.numel() >= LEAST_ROWS * b.size(0)
        and not torch.compiler.is_compiling()
        and is_faster()
        and are_here()  # the last: it builds the library
    )


@functools.cache
def is_faster() -> bool:
    """Whether torch multiplies with MKL here, on a processor that MKL does not know."""
    return is_amd() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a · b + bias, the same bits on any number of threads.

    Args:
        a: [M, K]. b: [K, N]. bias: [N]. All float32, in any layout.
        out: [M, N], whose rows are contiguous: it is written to.
    """
    a, b = _laid_out(a), _laid_out(b)
    out = a.new_empty(a.size(0), b.size(1)) if out is None else out
    bias = bias if bias is None else bias.contiguous()
    call("gemm", (a, b, bias, out))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] · weightᵀ [I, O] + bias [O]: [..., O], with its gradient."""
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
    """x, or a copy if neither its rows nor its columns are contiguous."""
    return x if 1 in x.stride() else x.contiguous()

"""Matrix products of a training step in float32 on a CPU, by the faster of the two libraries that torch brings.

torch gives them to MKL, which takes no AVX-512 on a processor of AMD's and with AVX2 leaves a sixth of it idle. oneDNN,
whom torch asks for bf16, does neither (bench/passes.py), so there they go to oneDNN: float32 still, with sums in
float32. Fake tensors, whose memory a plan counts, take torch's way on every machine.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptworks.machine import is_amd
from gptworks.native import passes

LEAST = 1 << 23
"""Multiplications below which a product stays with torch: there, asking oneDNN costs more than it saves."""

ROWS_AT_ONCE = 512
"""Rows that are transposed at once of factors of which each holds a token: what a core's cache holds."""

TRANSPOSED = 1 << 22
"""Elements that are transposed at once of other factors: 16 MiB."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] · weightᵀ [I, O] + bias [O], as `F.linear` gives it: [..., O]."""
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not trains or torch.is_autocast_enabled("cpu") or not _takes(x, weight, x.numel() * weight.size(0)):
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [N, K] · b [K, M] → [N, M], or into `out`. No gradient goes through."""
    if not _takes(a, b, a.numel() * b.size(1)):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if a.stride(0) == 1:
        product = _product_tn(a.T, b)
    else:
        product = _product_nt(a, b.T) if b.stride(0) == 1 else _product_nn(a, b)
    return product if out is None else out.copy_(product)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product_nt(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        d_out = gradients[0].reshape(-1, weight.size(0)).contiguous()
        return (
            _product_nn(d_out, weight).view(x.shape) if wants_x else None,
            _product_tn(d_out, x.reshape(-1, x.size(-1))) if wants_weight else None,
            d_out.sum(0) if wants_bias else None,
        )


def _takes(a: Tensor, b: Tensor, n_multiplications: int) -> bool:
    """Whether oneDNN multiplies these, and sooner."""
    return (
        n_multiplications >= LEAST
        and onednn_is_faster()
        and not torch.compiler.is_compiling()
        and all(
            type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.dtype == torch.float32
            for x in (a, b)
        )
    )


@functools.cache
def onednn_is_faster() -> bool:
    """Whether torch has both libraries here, on a processor that MKL does not know."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_amd() and has_both


def _product_nt(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [..., K] · bᵀ [K, M] + bias [M]: what oneDNN does best."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a.contiguous(), b, bias, "none", [], "")
    return out


def _product_nn(a: Tensor, b: Tensor) -> Tensor:
    """a [N, K] · b [K, M], by transposing b: oneDNN took twice as long for some shapes as they were."""
    n_rows = max(ROWS_AT_ONCE, TRANSPOSED // b.size(1))
    return _sum(
        _product_nt(columns, passes.transposed(rows))
        for columns, rows in zip(torch.split(a, n_rows, dim=1), torch.split(b, n_rows), strict=True)
    )


def _product_tn(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ [N, K] · b [K, M], by transposing the wider of a and b."""
    a_is_wider = a.size(1) >= b.size(1)
    wide, narrow = (a, b) if a_is_wider else (b, a)
    product = _sum(
        _product_nt(passes.transposed(some), others.T)
        for some, others in zip(torch.split(wide, ROWS_AT_ONCE), torch.split(narrow, ROWS_AT_ONCE), strict=True)
    )
    return product if a_is_wider else passes.transposed(product)


def _sum(products: Iterable[Tensor]) -> Tensor:
    """Of one at least; the first's memory is used."""
    return functools.reduce(Tensor.add_, products)

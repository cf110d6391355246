"""Matrix products of float32 matrices on a CPU, in C++ (gemm.cpp).

torch gives them to MKL. On a processor of AMD's that takes no AVX-512, and with AVX2 leaves a sixth of it idle; the C++
does neither (bench/passes.py). On others torch's is kept: the processor's maker decides, not a timing at the start,
so that a run and its repetition multiply alike.
"""

import functools

import torch
from torch import Tensor

from gptworks.kernels.passes import KINDS, are_here, call
from gptworks.machine import is_amd

LEAST = 1 << 22
"""Multiplications below which torch's product is as fast."""

LEAST_ROWS = 8
"""Rows of the left factor for which laying out the right one pays."""


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether the C++ multiplies the rows of a [..., K] with b [K, N], and sooner than torch."""
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
    """Whether torch's products are MKL's here, on a processor that it does not know."""
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


def _laid_out(x: Tensor) -> Tensor:
    """x, or a copy if neither its rows nor its columns are contiguous."""
    return x if 1 in x.stride() else x.contiguous()

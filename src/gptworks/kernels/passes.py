"""Autograd functions in C++ (passes.cpp) for the operations between matrix products in training.

`gptworks.kernels.dispatch` chooses between these functions and torch's own. Values are float32 or bf16, sums are
float32, and results are the same on any number of threads. For fake tensors, outputs have a shape but no values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable

from gptworks.kernels import call as native
from gptworks.kernels.entries import FUNCTION_OF_MLP
from gptworks.kernels.library import training_library

_DTYPES = (torch.float32, torch.bfloat16)
KINDS = (Tensor, torch.nn.Parameter, FakeTensor)
"""Tensor classes that the C++ accepts."""


def are_here() -> bool:
    """Whether the C++ is available and may be called now, which is not allowed while torch compiles a graph."""
    return not torch.compiler.is_compiling() and training_library() is not None


def serve(*tensors: Tensor | None) -> bool:
    """Whether the C++ is available and supports these tensors' class, device, dtype and layout."""
    return are_here() and all(x is None or (type(x) in KINDS and _is_readable(x)) for x in tensors)


class Activation(torch.autograd.Function):
    """activation(x), or activation(x) · up, for a value of `model.mlp`. x and up have the same dtype and layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, kind: str) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.function = FUNCTION_OF_MLP[kind]
        out = torch.empty_like(x)
        call("activate", (x, up, out), ctx.function)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        d_out, d_x = _laid_out_as(gradients[0], x), torch.empty_like(x)
        d_up = None if up is None else torch.empty_like(x)
        call("activate_backward", (d_out, x, up, d_x, d_up), ctx.function)
        return d_x, d_up, None


class Norm(torch.autograd.Function):
    """The sum x + alpha · branch (x if branch is None), in x's dtype, and the sum's LayerNorm or RMSNorm over the last
    dimension. Weight and bias are float32.

    The backward pass computes the gradients through both results, and adds them, in one pass over memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        layer: bool,
        branch: Tensor | None,
        alpha: float,
    ) -> tuple[Tensor, Tensor]:
        n_rows = x.numel() // x.size(-1)
        stream = x if branch is None else torch.empty_like(x)
        out, scale = torch.empty_like(x, dtype=dtype), x.new_empty(n_rows, dtype=torch.float32)
        mean = torch.empty_like(scale) if layer else None
        if branch is not None:
            branch = _laid_out_as(branch, x)
        ctx.alpha, ctx.branch_dtype, ctx.has_bias = alpha, None if branch is None else branch.dtype, bias is not None
        ctx.save_for_backward(stream, weight, mean, scale)
        ctx.set_materialize_grads(False)
        call("norm", (x, branch, weight, bias, None if branch is None else stream, out, mean, scale), eps, alpha)
        return stream, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        d_stream, d_out = gradients
        d_out = torch.zeros_like(x) if d_out is None else _laid_out_as(d_out, x)
        d_stream = None if d_stream is None else _laid_out_as(d_stream, x)
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        d_bias = torch.empty_like(weight) if ctx.has_bias else None
        same = ctx.branch_dtype == x.dtype and ctx.alpha == 1
        d_branch = None if ctx.branch_dtype is None or same else torch.empty_like(x, dtype=ctx.branch_dtype)
        tensors = d_out, d_stream, x, weight, mean, scale, d_x, d_branch, d_weight, d_bias
        call("norm_backward", tensors, ctx.alpha)
        return d_x, d_weight, d_bias, None, None, None, d_x if same else d_branch, None


class Add(torch.autograd.Function):
    """x + alpha · branch, in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, alpha: float) -> Tensor:
        ctx.dtype, ctx.alpha = branch.dtype, alpha
        out = torch.empty_like(x)
        call("add", (x, _laid_out_as(branch, x), out), alpha)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_out = gradients[0]
        return d_out, (d_out if ctx.alpha == 1 else d_out * ctx.alpha).to(ctx.dtype), None


def rotates(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `Rotation` supports these tensors."""
    of_each_row = cos.dim() == x.dim() == 4 and cos.size(1) == 1 and cos.size(0) == x.size(0)
    return serve(x, cos, sin) and x.dtype == cos.dtype == sin.dtype and (cos.dim() == 2 or of_each_row)


class Rotation(torch.autograd.Function):
    """`gptworks.kernels.dispatch.rotate` for tensors of the same dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        d_out = gradients[0] if _is_dense(gradients[0]) else gradients[0].contiguous()
        return _turned(d_out, cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    out = torch.empty_like(x)
    call("rotate", (x, cos.contiguous(), sin.contiguous(), out), direction)
    return out


def cross_entropy(logits: Tensor, targets: Tensor, factors: Tensor | None = None, *, gradient: bool) -> Tensor:
    """Return −log softmax(logits)[target] of each row, float32 [n], 0 where the target is −100.

    Args:
        logits: [n, V]. If `gradient` is true, each row is overwritten by (softmax − one-hot) · the row's factor, or by
            0 if the row's target is −100.
        targets: int64 [n].
        factors: each row's factor of the gradient, float32 [n]; None: 1.

    Raises:
        IndexError: a target is not a column of the logits.
    """
    nats = logits.new_empty(len(logits), dtype=torch.float32)
    factors = factors if factors is None else factors.contiguous()
    call("cross_entropy", (logits, targets.contiguous(), factors, nats), gradient)
    return nats


def _is_readable(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _DTYPES and _is_dense(x)


def _is_dense(x: Tensor) -> bool:
    """Whether x is contiguous, or would be with the middle two of its four dimensions swapped."""
    return x.is_contiguous() or (x.dim() == 4 and x.transpose(1, 2).is_contiguous())


def _laid_out_as(x: Tensor, other: Tensor) -> Tensor:
    """Return x, copied if its strides differ from those of `other`, a dense tensor of the same shape."""
    return x if x.stride() == other.stride() else torch.empty_like(other, dtype=x.dtype).copy_(x)


def call(name: str, tensors: Sequence[Tensor | None], *numbers: float) -> None:
    """Call a function of the library; do nothing if a tensor is fake."""
    library = training_library()
    assert library is not None
    if FakeTensor not in map(type, tensors):
        native.call(library, name, tensors, *numbers)

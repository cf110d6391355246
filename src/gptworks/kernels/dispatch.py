"""What computes an operation here: TABLE, and a function for each operation that takes the first kernel that serves.

The C++ computes where it is built (`gptworks.kernels.library`) and knows the tensors' dtype and layout; `cpu` has
torch's faster ways for training on a CPU; torch itself computes elsewhere. Most of both are for training: there, an
operation and its gradient are one pass over memory each. A plan reads the table too (`planned`).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.kernels import cpu, gemm, passes
from gptworks.kernels.library import trains_in_cpp

CPP, BLOCKS, TORCH = "C++", "torch, a block of queries at a time", "torch"
"""Who computes."""

_F32, _F32_BF16 = (torch.float32,), (torch.float32, torch.bfloat16)


class Kernel(NamedTuple):
    """One way to compute an operation, and where it serves."""

    by: str
    compute: Callable[..., Any]
    device: str | None = None
    """None: any."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Of the first operand. None: any."""
    training: bool = False
    """Whether it serves in training only: in steps whose gradients are wanted."""
    takes: Callable[..., bool] | None = None
    """Whether it takes these operands; None: all that the rest allows."""


def trains(*tensors: Tensor | None) -> bool:
    """Whether one of these is part of a training step on a CPU."""
    if not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad and x.device.type == "cpu" for x in tensors)


def chosen(operation: str, *operands: Any, training: bool = False) -> Kernel:
    """The kernel that computes an operation of these operands, the first of which is a tensor."""
    x = operands[0]
    for kernel in TABLE[operation]:
        if (
            (training or not kernel.training)
            and kernel.device in (None, x.device.type)
            and (kernel.dtypes is None or x.dtype in kernel.dtypes)
            and (kernel.takes is None or kernel.takes(*operands))
        ):
            return kernel
    raise AssertionError(f"torch computes {operation}")


def planned(operation: str, on_cpu: bool) -> str:
    """Who will compute an operation in training, as far as that is known without compiling or loading the C++."""
    device = "cpu" if on_cpu else "cuda"
    here = (kernel for kernel in TABLE[operation] if kernel.device in (None, device))
    return next(kernel.by for kernel in here if kernel.by != CPP or trains_in_cpp())


# ------------------------------------------------------------------------------------------------ operations


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] · weightᵀ [I, O] + bias [O]: [..., O]."""
    out: Tensor = chosen("linear", x, weight).compute(x, weight, bias)
    return out


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [M, K] · b [K, N], in `out` where it is given."""
    result: Tensor = chosen("product", a, b).compute(a, b, out=out)
    return result


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    layer: bool,
    branch: Tensor | None = None,
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x + alpha · branch, or x where there is no branch; and its LayerNorm, or RMSNorm, over the last dimension.

    The norm is computed in float32 and given in `dtype`.

    Args:
        layer: whether it is LayerNorm.
    """
    kernel = chosen("norm", x, weight, dtype, branch, training=trains(x, branch))
    if kernel.by != CPP and branch is not None:
        return norm(add(x, branch, alpha), weight, bias, eps, dtype, layer)
    found: tuple[Tensor, Tensor] = kernel.compute(x, weight, bias, eps, dtype, layer, branch, alpha)
    return found


def add(x: Tensor, branch: Tensor, alpha: float) -> Tensor:
    """x + alpha · branch, in x's dtype."""
    out: Tensor = chosen("add", x, branch, training=trains(branch)).compute(x, branch, alpha)
    return out


def activate(x: Tensor, kind: str) -> Tensor:
    """What an activation, by its name in `model.mlp`, makes of x."""
    out: Tensor = chosen("activate", x, training=trains(x)).compute(x, kind)
    return out


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """activation(gate) · up."""
    out: Tensor = chosen("gated", gate, up, training=trains(gate, up)).compute(gate, up, kind)
    return out


def dropout(x: Tensor, probability: float) -> Tensor:
    """x with elements zeroed with this probability and the rest scaled up."""
    out: Tensor = chosen("dropout", x, training=trains(x)).compute(x, probability)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + R/2) of the first R elements of x [..., T, D] by an angle, whose cosines and sines are
    [T, R/2], or [B, 1, T, R/2] for x [B, H, T, D]."""
    out: Tensor = chosen("rotate", x, cos, sin).compute(x, cos, sin)
    return out


# ---------------------------------------------------------------------------------------------- torch's ways


def _torch_product(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    return torch.mm(a, b, out=out)


def _torch_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype, layer: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    if layer:
        return x, F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return x, F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(dtype)


def _torch_add(x: Tensor, branch: Tensor, alpha: float) -> Tensor:
    return torch.add(x, branch, alpha=alpha)


def _torch_activate(x: Tensor, kind: str) -> Tensor:
    return F.relu(x).square() if kind == "relu2" else cpu.ACTIVATIONS[kind](x)


def _torch_gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return cpu.ACTIVATIONS[kind](gate) * up


def _torch_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : 2 * cos.size(-1)], x[..., 2 * cos.size(-1) :]
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _by_caller(*_: Any) -> Any:
    raise AssertionError("the caller computes this in torch")


# ----------------------------------------------------------------------------------------------- who takes what


def _linear_taken(x: Tensor, weight: Tensor) -> bool:
    return gemm.serves(x, weight.T) and not torch.is_autocast_enabled("cpu")


def _product_taken(a: Tensor, b: Tensor) -> bool:
    differentiated = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)  # see `linear`
    return not differentiated and gemm.serves(a, b)


def _norm_taken(x: Tensor, weight: Tensor, dtype: torch.dtype, branch: Tensor | None) -> bool:
    return weight.dtype == torch.float32 and dtype in _F32_BF16 and passes.serve(x, weight, branch)


def _gated_taken(gate: Tensor, up: Tensor) -> bool:
    return gate.dtype == up.dtype and passes.serve(gate, up) and gate.stride() == up.stride()


def _attention() -> ModuleType:
    """`gptworks.kernels.attention`, imported by the first training step: loading torch's compiler takes long."""
    from gptworks.kernels import attention

    return attention


TABLE: dict[str, tuple[Kernel, ...]] = {
    "linear": (Kernel(CPP, gemm.linear, "cpu", _F32, takes=_linear_taken), Kernel(TORCH, F.linear)),
    "product": (Kernel(CPP, gemm.product, "cpu", _F32, takes=_product_taken), Kernel(TORCH, _torch_product)),
    "norm": (
        Kernel(CPP, passes.norm, "cpu", _F32_BF16, training=True, takes=_norm_taken),
        Kernel(TORCH, cpu.norm, "cpu", training=True),
        Kernel(TORCH, _torch_norm),
    ),
    "add": (
        Kernel(CPP, passes.add, "cpu", _F32_BF16, training=True, takes=passes.serve),
        Kernel(TORCH, _torch_add),
    ),
    "activate": (
        Kernel(CPP, passes.activate, "cpu", _F32_BF16, training=True, takes=passes.serve),
        Kernel(TORCH, cpu.activate, "cpu", training=True),
        Kernel(TORCH, _torch_activate),
    ),
    "gated": (
        Kernel(CPP, passes.gated, "cpu", _F32_BF16, training=True, takes=_gated_taken),
        Kernel(TORCH, cpu.gated, "cpu", training=True),
        Kernel(TORCH, _torch_gated),
    ),
    "dropout": (Kernel(TORCH, cpu.dropout, "cpu", training=True), Kernel(TORCH, F.dropout)),
    "rotate": (Kernel(CPP, passes.rotate, "cpu", _F32_BF16, takes=passes.rotates), Kernel(TORCH, _torch_rotate)),
    "cross_entropy": (
        Kernel(CPP, passes.cross_entropy, "cpu", _F32_BF16, takes=passes.serve),
        Kernel(TORCH, _by_caller),  # `gptworks.model.loss`
    ),
    "attention": (
        Kernel(
            CPP,
            lambda *operands: _attention().attention(*operands),
            "cpu",
            _F32_BF16,
            training=True,
            takes=lambda q, k, v: _attention().takes(q, k, v),
        ),
        Kernel(BLOCKS, cpu.attention, "cpu", training=True, takes=lambda q, k, v: k.size(2) <= cpu.LONGEST),
        Kernel(TORCH, _by_caller),  # `gptworks.model.scores`
    ),
}
"""By operation, the best first."""

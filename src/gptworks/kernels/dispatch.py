"""Kernel dispatch: functions that compute an operation with its first usable kernel.

`TABLE` lists each operation's kernels, and `chosen` returns the first usable kernel. The C++ is used if it is available
(`gptworks.kernels.library`) and supports the tensors' dtype and layout. `cpu` has faster torch code for training on a
CPU. Triton computes the loss and decoding's attention on an NVIDIA GPU. torch's own functions compute the rest. Most
kernels are for training: they compute an operation in one pass over memory, and its gradient in another. Plans read the
table too (`planned`).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from gptworks.kernels import cpu, gemm, passes
from gptworks.kernels.library import trains_in_cpp

CPP, TRITON, BLOCKS, TORCH = "C++", "Triton", "torch, a block of queries at a time", "torch"
"""Names of the implementations, as plans show them."""

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the Triton kernels accept."""
_F32 = (torch.float32,)


class Kernel(NamedTuple):
    """One implementation of an operation, and the conditions for using it."""

    by: str
    compute: Callable[..., Tensor]
    device: str | None = None
    """Device type that the kernel needs; None: any."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Dtypes accepted for the first operand; None: any."""
    training: bool = False
    """Whether the kernel is used only in training steps, which need gradients."""
    takes: Callable[..., bool] | None = None
    """Whether the kernel supports these operands; None: it supports all."""


def has_flash(device: torch.device) -> bool:
    """Whether torch has flash attention for this device: an NVIDIA GPU of compute capability 8.0 or higher."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def fuses_groups(device: torch.device) -> bool:
    """Whether torch has fused attention for grouped queries in half precision on this device. On NVIDIA's GPUs only
    flash attention takes groups, and needs compute capability 8.0."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def trains(*tensors: Tensor | None) -> bool:
    """Whether gradients are enabled, and one of these tensors is on a CPU and requires a gradient."""
    if not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad and x.device.type == "cpu" for x in tensors)


def chosen(operation: str, *operands: Any, training: bool = False) -> Kernel:
    """Return the first kernel of an operation that can be used for these operands. The first operand is a tensor."""
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
    """Return the name of the kernel that training will use for operands that it supports, on a CPU or a GPU. The
    C++ is neither compiled nor loaded for this prediction."""
    device = "cpu" if on_cpu else "cuda"
    here = (kernel for kernel in TABLE[operation] if kernel.device in (None, device))
    return next(kernel.by for kernel in here if kernel.by != CPP or trains_in_cpp())


# ------------------------------------------------------------------------------------------------ operations


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., I] · weightᵀ [I, O] + bias [O], of shape [..., O]."""
    return chosen("linear", x, weight).compute(x, weight, bias)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a [M, K] · b [K, N], written to `out` if given."""
    return chosen("product", a, b).compute(a, b, out=out)


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
    """Return the sum x + alpha · branch (x if branch is None), and its LayerNorm or RMSNorm over the last dimension.

    The norm is computed in float32 and converted to `dtype`.

    Args:
        layer: LayerNorm if true, else RMSNorm.
    """
    kernel = chosen("norm", x, weight, dtype, branch, layer, training=trains(x, branch))
    if kernel.by != CPP and branch is not None:
        return norm(add(x, branch, alpha), weight, bias, eps, dtype, layer)
    stream, normed = kernel.compute(x, weight, bias, eps, dtype, layer, branch, alpha)
    return stream, normed


def add(x: Tensor, branch: Tensor, alpha: float) -> Tensor:
    """Return x + alpha · branch, in x's dtype."""
    return chosen("add", x, branch, training=trains(branch)).compute(x, branch, alpha)


def activate(x: Tensor, kind: str, up: Tensor | None = None) -> Tensor:
    """Return activation(x), or activation(x) · up if `up` is given. `kind`: a value of `model.mlp`."""
    return chosen("activate", x, up, training=trains(x, up)).compute(x, up, kind)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Return x with each element zeroed with this probability, and the rest scaled up."""
    return chosen("dropout", x, training=trains(x)).compute(x, probability)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., T, D] with each pair (i, i + R/2) of the first R elements rotated by its position's angle.

    Cosines and sines are [T, R/2], or [B, 1, T, R/2] for x [B, H, T, D].
    """
    return chosen("rotate", x, cos, sin).compute(x, cos, sin)


# -------------------------------------------------------------------------------------- torch implementations


def _torch_activate(x: Tensor, up: Tensor | None, kind: str) -> Tensor:
    y = F.relu(x).square() if kind == "relu2" else cpu.ACTIVATIONS[kind](x)
    return y if up is None else y * up


def _torch_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype, layer: bool, *_: Any
) -> Any:
    if layer:
        return x, F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return x, F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(dtype)


def _torch_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : 2 * cos.size(-1)], x[..., 2 * cos.size(-1) :]
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _by_caller(*_: Any) -> Tensor:
    raise AssertionError("the caller computes this in torch")


# ----------------------------------------------------------------------------------------------- conditions of use


def _linear_taken(x: Tensor, weight: Tensor) -> bool:
    is_large = x.numel() * weight.size(0) >= gemm.LEAST  # checked first: other checks take as long as a small product
    return is_large and gemm.serves(x, weight.T) and not torch.is_autocast_enabled("cpu")


def _product_taken(a: Tensor, b: Tensor) -> bool:
    differentiated = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)  # C++'s `product` has no gradient
    return not differentiated and gemm.serves(a, b)


def _norm_taken(x: Tensor, weight: Tensor, dtype: torch.dtype, branch: Tensor | None, _: bool) -> bool:
    return (
        weight.dtype == torch.float32 and dtype in (torch.float32, torch.bfloat16) and passes.serve(x, weight, branch)
    )


def _activation_taken(x: Tensor, up: Tensor | None) -> bool:
    return passes.serve(x, up) and (up is None or (x.dtype == up.dtype and x.stride() == up.stride()))


def _attention() -> ModuleType:
    """Return `gptworks.kernels.attention`, imported at its first use because it loads torch's slow compiler."""
    from gptworks.kernels import attention

    return attention


def _attend(*operands: Any) -> Any:
    return _attention().Attention.apply(*operands)


def _fused_loss() -> ModuleType:
    """Return `gptworks.kernels.fused_loss`, imported at its first use because it registers an operation with torch."""
    from gptworks.kernels import fused_loss

    return fused_loss


def _fused_loss_taken(logits: Tensor) -> bool:
    return has_flash(logits.device) and _fused_loss().takes(logits)  # Triton supports the same GPUs as flash attention


def _attend_cached(*operands: Any) -> Tensor:
    from gptworks.kernels import triton_decoding

    out: Tensor = triton_decoding.attend(*operands)
    return out


def _takes_cached(q: Tensor) -> bool:
    return not isinstance(q, FakeTensor) and has_flash(q.device) and _fused_loss().works()


def _cpp(
    compute: Callable[..., Tensor],
    takes: Callable[..., bool],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    training: bool = True,
) -> Kernel:
    return Kernel(CPP, compute, "cpu", dtypes, training, takes)


TABLE: dict[str, tuple[Kernel, ...]] = {
    "linear": (_cpp(gemm.linear, _linear_taken, _F32, training=False), Kernel(TORCH, F.linear)),
    "product": (_cpp(gemm.product, _product_taken, _F32, training=False), Kernel(TORCH, torch.mm)),
    "norm": (
        _cpp(passes.Norm.apply, _norm_taken),
        Kernel(TORCH, cpu.rms_norm, "cpu", training=True, takes=lambda *operands: not operands[-1]),
        Kernel(TORCH, _torch_norm),
    ),
    "add": (
        _cpp(passes.Add.apply, passes.serve),
        Kernel(TORCH, lambda x, branch, alpha: torch.add(x, branch, alpha=alpha)),
    ),
    "activate": (
        _cpp(passes.Activation.apply, _activation_taken),
        Kernel(TORCH, cpu.activate, "cpu", training=True),
        Kernel(TORCH, _torch_activate),
    ),
    "dropout": (Kernel(TORCH, cpu.dropout, "cpu", training=True), Kernel(TORCH, F.dropout)),
    "rotate": (_cpp(passes.Rotation.apply, passes.rotates, training=False), Kernel(TORCH, _torch_rotate)),
    "cross_entropy": (
        _cpp(passes.cross_entropy, passes.serve, training=False),
        Kernel(
            TRITON,
            lambda *operands, gradient: _fused_loss().cross_entropy(*operands, gradient=gradient),
            "cuda",
            GPU_DTYPES,
            takes=_fused_loss_taken,
        ),
        Kernel(TORCH, _by_caller),  # computed in `gptworks.model.loss`
    ),
    "cached_attention": (
        Kernel(TRITON, _attend_cached, "cuda", GPU_DTYPES, takes=_takes_cached),
        Kernel(TORCH, _by_caller),  # computed in `gptworks.model.scores`
    ),
    "attention": (
        _cpp(_attend, lambda q, k, v: _attention().takes(q, k, v)),
        Kernel(BLOCKS, cpu.Attention.apply, "cpu", training=True, takes=lambda q, k, v: k.size(2) <= cpu.LONGEST),
        Kernel(TORCH, _by_caller),  # computed in `gptworks.model.scores`
    ),
}
"""Kernels of each operation, in order of preference."""

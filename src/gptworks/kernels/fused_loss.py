"""The cross-entropy of rows of logits on a GPU, as a torch operation that also accepts fake tensors.

`gptworks.kernels.triton_loss` computes the loss. This module can be imported without Triton.
"""

import importlib.util
import warnings
from functools import cache

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


@torch.library.custom_op("gptworks::cross_entropy", mutates_args=("logits",))
def _operation(logits: Tensor, targets: Tensor, factors: Tensor | None, gradient: bool) -> Tensor:
    from gptworks.kernels import triton_loss  # imports Triton, which traces on fake tensors do not need

    return triton_loss.cross_entropy(logits, targets, factors, gradient)


@_operation.register_fake
def _(logits: Tensor, targets: Tensor, factors: Tensor | None, gradient: bool) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def cross_entropy(logits: Tensor, targets: Tensor, factors: Tensor | None = None, *, gradient: bool) -> Tensor:
    """Compute `passes.cross_entropy` of logits whose rows are contiguous. A target that is not a column gives NaN,
    because an error would make the host wait for the GPU."""
    nats: Tensor = _operation(logits, targets, factors, gradient)
    return nats


def takes(logits: Tensor) -> bool:
    """Whether `cross_entropy` can compute the loss of these CUDA logits. Fake tensors need no Triton."""
    return logits.stride(1) == 1 and (isinstance(logits, FakeTensor) or works())


@cache
def works() -> bool:
    """Whether Triton is installed and can compile kernels here, which needs a C compiler and Python's headers.

    Warn if a compilation fails. torch then computes the loss, and attention in decoding.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        logits = torch.zeros(1, 2, device="cuda")
        cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device="cuda"), gradient=True)
    except Exception as error:  # of the compiler, of files, or of the driver
        warnings.warn(
            f"torch computes the loss and, in decoding, attention, because Triton cannot compile kernels: {error}",
            stacklevel=2,
        )
        return False
    return True

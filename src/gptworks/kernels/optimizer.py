"""Muon's updates in C++ (optimizer.cpp), for float32 matrices on a CPU.

`gptworks.training.optim.muon.Muon` computes the same in torch, with the same roundings to bf16 and sums in fp32.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gptworks.kernels.call import call
from gptworks.kernels.library import Library, training_library
from gptworks.machine import cpu_flags


def muon_library(tensors: Iterable[Tensor]) -> Library | None:
    """Return the library, or None if torch must compute the updates from these gradients and momenta.

    On a processor with AMX, torch computes the updates: its matrix products use AMX, and the library's do not.
    """
    if "amx_bf16" in cpu_flags() or not all(
        # no subclass of Tensor is accepted, since a DTensor or fake tensor has no data here
        type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()
        for x in tensors
    ):
        return None
    return training_library()


def muon_updates(
    library: Library,
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    momentum: float,
    polynomials: Sequence[tuple[float, float, float]],
    eps: float,
) -> Tensor:
    """Return the orthogonalized Nesterov directions of N matrices of one shape, [N, rows, columns] in bfloat16.

    The bits do not depend on the number of threads.

    Args:
        momenta: momenta that include this step's gradients.
        polynomials: coefficients a, b and c of each Newton-Schulz iteration.
        eps: smallest norm by which a matrix is divided.
    """
    updates = torch.empty(len(gradients), *gradients[0].shape, dtype=torch.bfloat16)
    coefficients = torch.tensor(polynomials, dtype=torch.float32).reshape(-1, 3)
    call(library, "muon_updates", (gradients, momenta, updates, coefficients), momentum, eps)
    return updates

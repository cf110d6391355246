"""Muon (Jordan et al., 2024) with the matrices of one shape orthogonalized together.

torch's own goes matrix by matrix, which takes up to twice as long where they are small and many, as in a small model or
in experts (bench/passes.py). The arithmetic is the same (tests/test_optim.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOGETHER = 2**22
"""Elements orthogonalized at once, at most: larger matrices gain nothing from company, and need scratch memory each."""


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with the settings it has by default, Nesterov's momentum included."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        assert closure is None, "no closure is used here"
        for group in self.param_groups:
            for matrices in batches([p for p in group["params"] if p.grad is not None]):
                self._step(matrices, group)

    def _step(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = orthogonalized(
            self._directions(matrices, group["momentum"]), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1, rows / columns) ** 0.5
        for parameter, update in zip(matrices, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-rate)

    def _directions(self, matrices: list[nn.Parameter], momentum: float) -> Tensor:
        """Where Nesterov's momentum points, [N, rows, columns] in bfloat16."""
        directions = torch.empty(len(matrices), *matrices[0].shape, dtype=torch.bfloat16, device=matrices[0].device)
        for parameter, direction in zip(matrices, directions, strict=True):
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
            direction.copy_(parameter.grad.lerp(state["momentum_buffer"], momentum))
        return directions


def orthogonalized(x: Tensor, coefficients: tuple[float, float, float], n_steps: int, eps: float) -> Tensor:
    """U Vᵀ of each matrix U S Vᵀ, roughly, by Newton–Schulz iterations of the quintic a x + b x³ + c x⁵.

    x [N, rows, columns], bfloat16; its memory is used. Returns the same shape.
    """
    a, b, c = coefficients
    x.div_(x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None])
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    for _ in range(n_steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def batches(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The matrices by shape, in lists of at most `TOGETHER` elements, or of one matrix that has more."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for shape, alike in by_shape.items():
        n = max(1, TOGETHER // shape.numel())
        yield from (alike[i : i + n] for i in range(0, len(alike), n))

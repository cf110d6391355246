"""Rounding of weights to representable values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.quantize.formats import GROUP, LEVELS

_STEPS = torch.linspace(5.5, 8.5, 13).tolist()
"""Divisors of a group's largest magnitude; each quotient is tried as the group's scale, with both signs."""

_WEIGHTS_AT_ONCE = 2**18
"""Number of weights whose scales are searched at a time, small enough for the cache."""

_COLUMNS_AT_ONCE = 128
"""Number of columns that GPTQ rounds before it spreads their errors over all later columns."""

_DAMPING = 0.01
"""Fraction of the mean of a Hessian's diagonal that is added to the diagonal."""


@dataclass(frozen=True)
class Rounded:
    """A matrix rounded to integers times scales."""

    levels: Tensor
    """The integers, int8 [N, K]."""
    scale: Tensor
    """The scales: fp32 [N], one per row, for int8; fp16 [N, K/32], one per group, for int4."""


def round_int8(matrix: Tensor) -> Rounded:
    """Round a matrix to int8, symmetrically: a row's scale maps its largest magnitude to ±127."""
    scale = matrix.float().abs().amax(1) / 127
    return Rounded(_levels(matrix.float(), scale[:, None], "int8"), scale)


def round_int4(matrix: Tensor) -> Rounded:
    """Round a matrix to int4, with the scale for each group of 32 that gives the smallest squared error."""
    groups = matrix.float().view(len(matrix), -1, GROUP)  # N K/32 32
    scale = best_scales(groups)
    return Rounded(_levels(groups, scale[..., None], "int4").flatten(1), scale)


def best_scales(groups: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return each group's scale, fp16 [N, G]: of 26 candidates, the one with the smallest squared error of rounding.

    Args:
        groups: [N, G, 32]. importance: weights of the squared errors, [G, 32]; None: all errors weigh the same.
    """
    parts = torch.split(groups, max(1, _WEIGHTS_AT_ONCE // groups[0].numel()))
    return torch.cat([_best_scales(part, importance) for part in parts])


def _best_scales(groups: Tensor, importance: Tensor | None) -> Tensor:
    largest = groups.abs().amax(-1)
    least, best = torch.full_like(largest, torch.inf), torch.zeros_like(largest, dtype=torch.float16)
    for step in (*_STEPS, *(-step for step in _STEPS)):
        scale = (largest / step).half()
        wide = scale.float()[..., None]
        squares = (groups - _divide(groups, wide).round_().clamp_(*LEVELS["int4"]).mul_(wide)).square_()
        error = (squares if importance is None else squares * importance).sum(-1)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, scale, best)
    return best


def gptq(matrix: Tensor, hessian: Tensor) -> Rounded:
    """Round a matrix to int4 by GPTQ (Frantar et al., 2023): later columns compensate for each rounded column's error.

    The columns with the largest inputs are rounded first. The scales minimize the sum of squared errors weighted by the
    inputs' squares.

    Args:
        matrix: [N, K]. hessian: the sum of x·xᵀ over the inputs x, [K, K]; if all 0, `round_int4` is used.
    """
    n_columns, diagonal = matrix.size(1), hessian.diagonal().float()
    if not diagonal.any():
        return round_int4(matrix)
    scale = best_scales(matrix.float().view(len(matrix), -1, GROUP), diagonal.view(-1, GROUP))
    scales = scale.float().T.contiguous()  # K/32 N
    order = diagonal.argsort(descending=True).tolist()
    root = _inverse_root(hessian[order][:, order])  # K K
    rest = matrix.float().T[order].contiguous()  # K N; changed in place
    levels = torch.empty(rest.shape, dtype=torch.int8, device=rest.device)
    for start in range(0, n_columns, _COLUMNS_AT_ONCE):
        end = min(start + _COLUMNS_AT_ONCE, n_columns)
        errors = torch.empty_like(rest[start:end])
        for i in range(start, end):
            step = scales[order[i] // GROUP]
            levels[order[i]] = _levels(rest[i], step, "int4")
            errors[i - start] = (rest[i] - levels[order[i]] * step) / root[i, i]
            rest[i + 1 : end].addr_(root[i, i + 1 : end], errors[i - start], alpha=-1)
        rest[end:].addmm_(root[start:end, end:].T, errors, alpha=-1)
    return Rounded(levels.T.contiguous(), scale)


def _inverse_root(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse, float32."""
    damped = hessian.double()
    damped.diagonal().add_(_DAMPING * damped.diagonal().mean())
    root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return root.float()


def _levels(values: Tensor, scale: Tensor, kind: str) -> Tensor:
    return _divide(values, scale.float()).round_().clamp_(*LEVELS[kind]).to(torch.int8)


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """Return values / scale, and 0 where the scale is 0."""
    return values / torch.where(scale == 0, torch.inf, scale)

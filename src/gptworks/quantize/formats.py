"""Packed matrices: the bytes and values of each kind, and the rounding of weights to these values.

    kind        weight              scale                   value
    bf16, fp16  the kind's [N, K]   none                    weight
    int8        int8 [N, K]         fp32 [N]                weight · scale of the row
    int4        uint8 [N, K/2]      fp16 [N, K/32]          (nibble − 8) · scale of the group

In int4, each group of 32 elements of a row has its own scale and takes 16 bytes. Byte j holds element j of the group in
its low nibble and element j + 16 in its high nibble, as in llama.cpp's Q4_0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.choices import Weights
from gptworks.planning.setting import UNPACKED_ELSEWHERE, UNPACKED_ON_CPU

GROUP = 32
"""Number of consecutive elements of a row that share a scale in int4."""

LEVELS = {"int8": (-127, 127), "int4": (-8, 7)}
"""The smallest and the largest integer of each kind."""

DTYPES: dict[Weights, torch.dtype] = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "int4": torch.uint8,
}  # fmt: skip

Packed = tuple[Tensor, Tensor | None]
"""Weight and scale of a packed matrix; the scale is None for bf16 and fp16."""

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
"""The kind of a packed matrix, by the dtype of its weight."""


def kind_of(dtype: object, columns: int) -> Weights | None:
    """Return the kind of a stored matrix whose rows have `columns` values; None if the matrix is not packed."""
    kind = KINDS.get(dtype) if isinstance(dtype, torch.dtype) else None
    return None if kind == "int4" and columns % GROUP else kind


def empty(kind: Weights, rows: int, columns: int) -> Packed:
    """Return uninitialized weight and scale of a packed matrix [rows, columns]; for int4, columns % 32 = 0."""
    if kind == "int4":
        assert columns % GROUP == 0, f"int4 has groups of {GROUP} along a row, and {columns} columns are not a multiple"
        halves = torch.empty(rows, columns // 2, dtype=torch.uint8)
        return halves, torch.empty(rows, columns // GROUP, dtype=torch.float16)
    return torch.empty(rows, columns, dtype=DTYPES[kind]), torch.empty(rows) if kind == "int8" else None


def pack_int4(levels: Tensor) -> Tensor:
    """Pack integers −8 … 7 [N, K] into uint8 [N, K/2]."""
    grouped = (levels + 8).to(torch.uint8).view(levels.size(0), -1, 2, GROUP // 2)
    return (grouped[:, :, 0] | grouped[:, :, 1] << 4).flatten(1)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., K/2] into integers −8 … 7, int8 [..., K/32, 32]."""
    grouped = packed.reshape(*packed.shape[:-1], -1, GROUP // 2)
    return torch.cat((grouped & 15, grouped >> 4), dim=-1).to(torch.int8).sub_(8)


def dequantize(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values [..., K] of rows of a packed matrix, computed in float32 and rounded once, to `dtype`."""
    if scale is None:
        return weight.to(dtype)
    if weight.dtype == torch.uint8:
        return unpack_int4(weight).float().mul_(scale.float().unsqueeze(-1)).flatten(-2).to(dtype)
    return weight.float().mul_(scale.unsqueeze(-1)).to(dtype)


def rows_at_once(weight: Tensor, columns: int) -> int:
    """Return the number of rows of a packed matrix to unpack at a time; on a CPU, this many fit in its cache."""
    return max(1, (UNPACKED_ON_CPU if weight.device.type == "cpu" else UNPACKED_ELSEWHERE) // columns)


def unpacked(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values [N, K] of a packed matrix, unpacked a few rows at a time to save memory."""
    columns = weight.size(1) * (2 if weight.dtype == torch.uint8 else 1)
    n_rows = rows_at_once(weight, columns)
    matrix = torch.empty(weight.size(0), columns, dtype=dtype, device=weight.device)
    for first in range(0, len(matrix), n_rows):
        rows = slice(first, first + n_rows)
        matrix[rows] = dequantize(weight[rows], None if scale is None else scale[rows], dtype)
    return matrix


# ----------------------------------------------------------------------------------------------------- rounding

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


def pack(matrix: Tensor, kind: Weights) -> Packed:
    """Pack a matrix [N, K], rounding each weight to the nearest value, a few rows at a time to save memory."""
    if DTYPES[kind].is_floating_point:
        return matrix.to(DTYPES[kind]), None
    with torch.device(matrix.device):
        weight, scale = empty(kind, *matrix.shape)
    assert scale is not None, f"{kind} has scales"
    n_rows = rows_at_once(matrix, matrix.size(1))
    for first in range(0, len(matrix), n_rows):
        rows = slice(first, first + n_rows)
        weight[rows], scale[rows] = pack_rounded((round_int4 if kind == "int4" else round_int8)(matrix[rows]))
    return weight, scale


def pack_rounded(rounded: Rounded) -> tuple[Tensor, Tensor]:
    """Return weight and scale of a matrix rounded to int8 or int4."""
    return (rounded.levels if rounded.scale.dim() == 1 else pack_int4(rounded.levels)), rounded.scale


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

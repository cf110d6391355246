"""Packed matrices: the bytes and values of each kind.

    kind        weight              scale                   value
    bf16, fp16  the kind's [N, K]   none                    weight
    int8        int8 [N, K]         fp32 [N]                weight · scale of the row
    int4        uint8 [N, K/2]      fp16 [N, K/32]          (nibble − 8) · scale of the group

In int4, each group of 32 elements of a row has its own scale and takes 16 bytes. Byte j holds element j of the group in
its low nibble and element j + 16 in its high nibble, as in llama.cpp's Q4_0.
"""

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

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
"""The kind of a packed matrix, by the dtype of its weight."""


def empty(kind: Weights, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """Return uninitialized weight and scale tensors for a packed matrix [rows, columns] of this kind.

    Raises:
        ValueError: the kind is int4, and `columns` is not a multiple of 32.
    """
    if kind == "int4":
        _check_groups(columns)
        halves = torch.empty(rows, columns // 2, dtype=torch.uint8)
        return halves, torch.empty(rows, columns // GROUP, dtype=torch.float16)
    return torch.empty(rows, columns, dtype=DTYPES[kind]), torch.empty(rows) if kind == "int8" else None


def pack_int4(levels: Tensor) -> Tensor:
    """Pack integers −8 … 7 [N, K] into uint8 [N, K/2].

    Raises:
        ValueError: K is not a multiple of 32.
    """
    _check_groups(levels.size(1))
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


def _check_groups(columns: int) -> None:
    if columns % GROUP:
        raise ValueError(f"int4 has groups of {GROUP} along a row, and {columns} columns are not a multiple")

"""Packed matrices in panels, the layout of the native kernels.

A row consists of words of four bytes, or of two for the scales of int4. A panel has the first words of its P rows, then
their second words, and so on; the next P rows follow. The last panel has the remaining rows, padded with zeros to a
multiple of 16. So a vector holds the same word of 16 rows, and memory is read in one stream.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 16
"""A panel has a multiple of this many rows; rows in bf16 and int8 have a multiple of this many words (AMX tiles)."""


def to_panels(matrix: Tensor, panel: int, out: Tensor | None = None) -> Tensor:
    """Lay a matrix [N, K] out in panels of `panel` rows.

    Returns a flat tensor of `size_in_panels(N) · K` elements: `out`, if it is given.
    """
    if out is None:
        out = matrix.new_empty(size_in_panels(matrix.size(0)) * matrix.size(1))
    words = _words(matrix.contiguous())
    for first, panels in _panels(_words(out), len(words), panel):
        n_panels, _, n_rows = panels.shape
        rows = words[first : first + n_panels * n_rows]
        if len(rows) < n_rows:
            rows = torch.cat((rows, rows.new_zeros(n_rows - len(rows), rows.size(1))))
        panels.copy_(rows.view(n_panels, n_rows, -1).transpose(1, 2))
    return out


def whole_lines(weight: Tensor) -> Tensor:
    """A matrix [N, …] with rows padded with zeros to a multiple of 64 bytes, for panels of bf16 and int8; int4 is not
    padded."""
    n_missing = 0 if weight.dtype == torch.uint8 else -weight.size(1) % (4 * UNIT // weight.element_size())
    return F.pad(weight, (0, n_missing)) if n_missing else weight


def from_panels(flat: Tensor, rows: int, panel: int) -> Tensor:
    """The matrix [rows, K] that `to_panels` laid out."""
    matrix = flat.new_empty(rows, len(flat) // size_in_panels(rows))
    words = _words(matrix)
    for first, panels in _panels(_words(flat), rows, panel):
        part = words[first : first + panels.size(0) * panels.size(2)]
        part.copy_(panels.transpose(1, 2).flatten(0, 1)[: len(part)])
    return matrix


def rows_from_panels(flat: Tensor, which: Tensor, rows: int, panel: int) -> Tensor:
    """The rows `which` [...] of a matrix [rows, K] in panels: [..., K]."""
    words = _words(flat)
    n_words = len(words) // size_in_panels(rows)
    first = which // panel * panel
    n_rows = (size_in_panels(rows) - first).clamp(max=panel)
    start = first * n_words + which - first
    at = start[..., None] + torch.arange(n_words, device=flat.device) * n_rows[..., None]
    return words[at].view(flat.dtype)


def size_in_panels(rows: int) -> int:
    """Number of rows of a matrix in panels, including padding."""
    return -(-rows // UNIT) * UNIT


def panel_of(rows: int, n_threads: int, widest: int) -> int:
    """Number of rows in a panel: `widest`, or fewer if threads would otherwise wait for the one with most rows."""

    def most_rows(panel: int) -> int:
        return -(-rows // (panel * n_threads)) * panel

    return next(panel for panel in range(widest, 0, -UNIT) if most_rows(panel) <= 1.1 * most_rows(UNIT))


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.float16 else torch.int32)


def _panels(words: Tensor, rows: int, panel: int) -> Iterator[tuple[int, Tensor]]:
    """Yields the full panels, then the narrower last one: the index of its first row, and [panels, words, rows]."""
    n_words, whole = len(words) // size_in_panels(rows), rows // panel * panel
    if whole:
        yield 0, words[: whole * n_words].view(-1, n_words, panel)
    if rows > whole:
        yield whole, words[whole * n_words :].view(1, n_words, -1)

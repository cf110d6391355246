"""Packed matrices in panels, the layout that the native kernels read.

Rows are split into words of 4 bytes (2 bytes for the scales of int4). A panel of P rows holds the first word of every
row, then the second word of every row, and so on; the next P rows form the next panel. The last panel has the remaining
rows, padded with zero rows to a multiple of 16. One vector load thus gets the same word of 16 rows.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 16
"""Rows per panel, and words per row in bf16 and int8, are multiples of this number, as AMX tiles need."""


def to_panels(matrix: Tensor, panel: int, out: Tensor | None = None) -> Tensor:
    """Copy a matrix [N, K] into panels of `panel` rows.

    Returns a flat tensor of `size_in_panels(N) · K` elements: `out` if given, otherwise a new one.
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
    """Return a packed weight [N, …] with its rows zero-padded to a multiple of 64 bytes; int4 stays unpadded."""
    n_missing = 0 if weight.dtype == torch.uint8 else -weight.size(1) % (4 * UNIT // weight.element_size())
    return F.pad(weight, (0, n_missing)) if n_missing else weight


def from_panels(flat: Tensor, rows: int, panel: int) -> Tensor:
    """Return the matrix [rows, K] that is stored in panels: the inverse of `to_panels`."""
    matrix = flat.new_empty(rows, len(flat) // size_in_panels(rows))
    words = _words(matrix)
    for first, panels in _panels(_words(flat), rows, panel):
        part = words[first : first + panels.size(0) * panels.size(2)]
        part.copy_(panels.transpose(1, 2).flatten(0, 1)[: len(part)])
    return matrix


def rows_from_panels(flat: Tensor, which: Tensor, rows: int, panel: int) -> Tensor:
    """Return the rows with indices `which` [...] of a matrix [rows, K] stored in panels, [..., K]."""
    words = _words(flat)
    n_words = len(words) // size_in_panels(rows)
    first = which // panel * panel
    n_rows = (size_in_panels(rows) - first).clamp(max=panel)
    start = first * n_words + which - first
    at = start[..., None] + torch.arange(n_words, device=flat.device) * n_rows[..., None]
    return words[at].view(flat.dtype)


def size_in_panels(rows: int) -> int:
    """Return the number of rows of a matrix stored in panels, including padding."""
    return -(-rows // UNIT) * UNIT


def panel_of(rows: int, n_threads: int, widest: int) -> int:
    """Return the number of rows per panel: `widest`, or fewer to divide the rows more evenly among the threads."""

    def most_rows(panel: int) -> int:
        return -(-rows // (panel * n_threads)) * panel

    return next(panel for panel in range(widest, 0, -UNIT) if most_rows(panel) <= 1.1 * most_rows(UNIT))


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.float16 else torch.int32)


def _panels(words: Tensor, rows: int, panel: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first row, view [n_panels, n_words, rows per panel] of the flat `words`): first for all full
    panels together, then for the smaller last panel. A kind of panel that does not exist is left out."""
    n_words, whole = len(words) // size_in_panels(rows), rows // panel * panel
    if whole:
        yield 0, words[: whole * n_words].view(-1, n_words, panel)
    if rows > whole:
        yield whole, words[whole * n_words :].view(1, n_words, -1)

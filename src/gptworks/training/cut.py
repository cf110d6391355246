"""Windows of text cut into shorter rows. The rows of a step come from different windows: rows of one window are alike,
and a step learns more from many texts."""

from collections.abc import Iterator

BLOCK = 256
"""Samples per block. A run reads the first rows of all windows of a block, then the second rows, and so on."""


def cut_windows(first: int, size: int, n_rows: int) -> Iterator[tuple[int, int, int]]:
    """The rows to read for `size` samples from position `first`, where each window is cut into `n_rows` rows.

    A row depends only on its position. A complete block reads each row of its windows once.

    Yields:
        the position of a first sample, the number of a row in a window, and the number of consecutive samples from
        whose windows that row is read.
    """
    row, end = first * n_rows, (first + size) * n_rows
    while row < end:
        block, within = divmod(row, BLOCK * n_rows)
        number, sample = divmod(within, BLOCK)
        n = min(BLOCK - sample, end - row)
        yield block * BLOCK + sample, number, n
        row += n

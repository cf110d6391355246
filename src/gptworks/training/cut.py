"""Windows of text cut into shorter rows. The rows of a step come from different windows: those of one window are alike,
and a step learns more from many texts."""

from collections.abc import Iterator

BLOCK = 256
"""Samples, from whose windows first all the first rows are read, then all the second ones, and so on."""


def cut_windows(first: int, size: int, n_rows: int) -> Iterator[tuple[int, int, int]]:
    """What `size` samples from position `first` on read, where each window is cut into `n_rows` rows.

    The sample at a position is cut into `n_rows` rows, and is a function of its position alone. After whole blocks each
    row of their windows has been read once.

    Yields:
        the position of a sample, the number of a row of its window, and how many samples from there on have that row
        read, in the order in which the rows are.
    """
    row, end = first * n_rows, (first + size) * n_rows
    while row < end:
        block, within = divmod(row, BLOCK * n_rows)
        number, sample = divmod(within, BLOCK)
        n = min(BLOCK - sample, end - row)
        yield block * BLOCK + sample, number, n
        row += n

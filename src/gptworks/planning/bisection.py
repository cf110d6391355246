"""Finds the largest number that fits, by bisection."""

from bisect import bisect_left
from collections.abc import Callable


def largest_that_fits(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number between `low` and `high` (both excluded) that fits, or `low` if none fits.

    If a number fits, all smaller numbers must fit too.
    """
    step = 1
    while low + step < high and fits(low + step):
        low, step = low + step, 2 * step
    return low + bisect_left(range(low + 1, min(low + step, high)), True, key=lambda n: not fits(n))

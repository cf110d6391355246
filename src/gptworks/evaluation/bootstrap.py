"""95% bootstrap intervals (Efron, 1979) of figures that are computed from sums over items."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Figure = Callable[[Floats], Floats]
"""A function that takes R sums of the items' S statistics, float64 [R, S], and returns R figures, float64 [R]."""

RESAMPLES = 2000
_COUNTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Interval:
    """A figure, or the difference of two figures, with the 95% bootstrap interval over resampled items."""

    value: float
    low: float
    high: float


def interval(statistics: Floats, figure: Figure) -> Interval:
    """Return the figure for the statistics [N, S] of N items, and its percentile interval over resampled items."""
    value = figure(statistics.sum(0, keepdims=True))
    low, high = np.nanquantile(np.concatenate([figure(sums) for sums in _sums(statistics)]), [0.025, 0.975])
    return Interval(float(value[0]), float(low), float(high))


def paired_difference(first: Floats, second: Floats, figure: Figure) -> Interval:
    """Return the figure of `second` minus the figure of `first`, with its interval. Both are [N, S] over the same
    items, which are resampled together."""
    assert first.shape == second.shape
    width = first.shape[1]

    def difference(sums: Floats) -> Floats:
        return figure(sums[:, width:]) - figure(sums[:, :width])

    return interval(np.concatenate([first, second], axis=1), difference)


def _sums(statistics: Floats) -> Iterator[Floats]:
    """Yield sums over N items drawn with replacement, in chunks [rows, S]. The draws depend only on N."""
    n = len(statistics)
    random = np.random.default_rng(0)
    at_once = max(1, _COUNTS_AT_ONCE // n)
    for start in range(0, RESAMPLES, at_once):
        counts = random.multinomial(n, np.full(n, 1 / n), size=min(at_once, RESAMPLES - start))
        yield counts @ statistics

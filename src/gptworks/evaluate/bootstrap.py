"""How sure a measured figure is: 95% bootstrap intervals (Efron, 1979) of any figure made of sums over items."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Figure = Callable[[Floats], Floats]
"""From sums of items' statistics, float64 [R, S], to the figure of each row, float64 [R]."""

RESAMPLES = 2000
_COUNTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Interval:
    """A figure, or a difference of two, with the middle 95% of what resampled items give."""

    value: float
    low: float
    high: float


def interval(statistics: Floats, figure: Figure, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The figure of all items, and its percentile interval over items drawn with replacement.

    Args:
        statistics: of each item, float64 [N, S]; the figure is a function of their sums.
    """
    return _interval(figure(statistics.sum(0, keepdims=True)), [figure(s) for s in _sums(statistics, seed, resamples)])


def paired_difference(
    first: Floats, second: Floats, figure: Figure, *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The figure of `second` less that of `first`, for the same items [N, S] each: both are resampled alike."""
    assert first.shape == second.shape
    both, width = np.concatenate([first, second], axis=1), first.shape[1]

    def difference(sums: Floats) -> Floats:
        return figure(sums[:, width:]) - figure(sums[:, :width])

    return interval(both, difference, seed=seed, resamples=resamples)


def _interval(value: Floats, resampled: list[Floats]) -> Interval:
    low, high = np.nanquantile(np.concatenate(resampled), [0.025, 0.975])
    return Interval(float(value[0]), float(low), float(high))


def _sums(statistics: Floats, seed: int, resamples: int) -> Iterator[Floats]:
    """Sums over items drawn with replacement, [rows, S] at a time. They depend on N and the seed alone."""
    n = len(statistics)
    random = np.random.default_rng(seed)
    at_once = max(1, _COUNTS_AT_ONCE // n)
    for start in range(0, resamples, at_once):
        counts = random.multinomial(n, np.full(n, 1 / n), size=min(at_once, resamples - start))
        yield counts @ statistics

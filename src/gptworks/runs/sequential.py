"""A verdict from paired differences that may be checked after each pair without raising its error rate.

A test that is repeated after each pair finds a difference by chance more often than its level: with ten looks at 5%,
about one time in five. So each look gets the same smaller level (Pocock, 1977), here for Student's t of the
differences so far. If there is no difference, the distribution of that statistic does not depend on the spread, so the
level depends only on the number of looks; it is simulated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gptworks.runs.statistics import t_quantile

FEWEST_PAIRS = 3
"""Pairs before the first look, because two differences hardly determine a spread."""

MOST_PAIRS = 20
_SIMULATIONS = 200_000

Answer = Literal["lower", "higher", "same", "open"]


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the differences so far."""

    answer: Answer
    """`same`: any difference is smaller than what matters. `open`: not decided."""
    value: float
    """The mean difference."""
    low: float
    high: float
    """`low` and `high` bound an interval that contains the true difference at all looks with probability 1 − error."""


def verdict(differences: Sequence[float], most_pairs: int, worth: float, error: float = 0.05) -> Verdict:
    """The verdict on the differences so far.

    Args:
        most_pairs: the maximum number of pairs, fixed before the first.
        worth: the smallest difference that matters.
        error: probability, over all looks, of finding a difference where there is none.
    """
    n = len(differences)
    if n < FEWEST_PAIRS:
        value = fmean(differences) if differences else 0.0
        return Verdict("open", value, -math.inf, math.inf)
    margin = t_quantile(1 - level(most_pairs, error) / 2, n - 1) * stdev(differences) / math.sqrt(n)
    value = fmean(differences)
    low, high = value - margin, value + margin
    answer: Answer = "open"
    if high < 0 or low > 0:
        answer = "lower" if high < 0 else "higher"
    elif -worth < low and high < worth:
        answer = "same"
    return Verdict(answer, value, low, high)


@cache
def level(most_pairs: int, error: float = 0.05) -> float:
    """The two-sided level of each look, such that all looks together have the false-positive rate `error`."""
    return error if most_pairs <= FEWEST_PAIRS else float(np.quantile(_least_p(most_pairs), error))


@cache
def _least_p(most_pairs: int) -> NDArray[np.float64]:
    """The smallest two-sided p over all looks, for each simulated try without a difference."""
    drawn = np.random.Generator(np.random.PCG64(0)).standard_normal((_SIMULATIONS, most_pairs))
    n = np.arange(1, most_pairs + 1)
    mean, square = np.cumsum(drawn, 1) / n, np.cumsum(drawn**2, 1)
    looks = slice(FEWEST_PAIRS - 1, None)
    spread = (square - n * mean**2)[:, looks] / (n[looks] - 1)
    t = np.abs(mean[:, looks]) * np.sqrt(n[looks] / spread)
    # two-sided p: the share of simulations with a larger |t| at the same look
    order = np.argsort(np.argsort(-t, 0), 0)
    p = (order + 1) / _SIMULATIONS
    return np.asarray(p.min(1))

"""Test paired differences after every new pair without raising the rate of false positives.

A test that is repeated after each pair finds a difference by chance more often than its level: ten tests at 5% do so
about one time in five. Therefore each of these tests (looks) gets the same smaller level (Pocock, 1977), here for
Student's t of the differences so far. Without a true difference, the distribution of t does not depend on the spread,
so the level depends only on the number of tests. A simulation finds the level.
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
"""Number of pairs before the first test: two differences hardly determine a spread."""

MOST_PAIRS = 20
_SIMULATIONS = 200_000

Answer = Literal["lower", "higher", "same", "open"]


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the paired differences so far."""

    answer: Answer
    """`lower`, `higher`: the mean is below or above 0. `same`: it is too small to matter. `open`: not decided yet."""
    value: float
    """The mean difference."""
    low: float
    high: float
    """`low` to `high` is the mean's confidence interval, valid after every pair with probability 1 − `error`."""


def verdict(differences: Sequence[float], most_pairs: int, worth: float, error: float = 0.05) -> Verdict:
    """Decide from the differences so far whether their true mean is below 0, above 0 or too small to matter.

    Args:
        most_pairs: the maximum number of pairs, fixed before the first pair.
        worth: the smallest difference that matters.
        error: probability that any of the tests finds a difference where none exists.
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
    """Return the two-sided level of each test with which all tests together have the false-positive rate `error`."""
    return error if most_pairs <= FEWEST_PAIRS else float(np.quantile(_least_p(most_pairs), error))


@cache
def _least_p(most_pairs: int) -> NDArray[np.float64]:
    """Return the smallest two-sided p over all tests, for each simulated series of pairs without a true difference."""
    drawn = np.random.Generator(np.random.PCG64(0)).standard_normal((_SIMULATIONS, most_pairs))
    n = np.arange(1, most_pairs + 1)
    mean, square = np.cumsum(drawn, 1) / n, np.cumsum(drawn**2, 1)
    looks = slice(FEWEST_PAIRS - 1, None)
    spread = (square - n * mean**2)[:, looks] / (n[looks] - 1)
    t = np.abs(mean[:, looks]) * np.sqrt(n[looks] / spread)
    # two-sided p: the share of simulations with a larger |t| in the same test
    order = np.argsort(np.argsort(-t, 0), 0)
    p = (order + 1) / _SIMULATIONS
    return np.asarray(p.min(1))

"""Student's t-tests of whether a difference between few runs is more than noise, once or again after each new pair.

A test that is repeated after each pair finds a difference by chance more often than its level. Ten tests at 5% do so
about one time in five. Therefore each of these tests (looks) gets the same smaller level (Pocock, 1977), here for
Student's t of the differences so far. Without a true difference, the distribution of t does not depend on the spread,
so the level depends only on the number of tests. A simulation finds the level.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev, variance
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FEWEST_PAIRS = 3
"""Number of pairs at the first test. Fewer differences hardly determine a spread."""

MOST_PAIRS = 20
_SIMULATIONS = 200_000

Answer = Literal["lower", "higher", "same", "open"]


@dataclass(frozen=True)
class Difference:
    """A difference of two means, with its 95% confidence interval and two-sided p-value."""

    value: float
    low: float
    high: float
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return mean(`second`) − mean(`first`). Each group has two or more values, and the spreads of the groups may
    differ (Welch, 1947)."""
    a, b = variance(first) / len(first), variance(second) / len(second)
    value = fmean(second) - fmean(first)
    if a + b == 0:
        return _certain(value)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return _difference(value, math.sqrt(a + b), freedom)


def known_spread(first: Sequence[float], second: Sequence[float], deviation: float, freedom: int) -> Difference:
    """Return mean(`second`) − mean(`first`), given the standard deviation of a value in both groups, and the degrees of
    freedom with which this deviation was estimated."""
    value = fmean(second) - fmean(first)
    if deviation == 0:
        return _certain(value)
    return _difference(value, deviation * math.sqrt(1 / len(first) + 1 / len(second)), freedom)


def _difference(value: float, error: float, freedom: float) -> Difference:
    margin = t_quantile(0.975, freedom) * error
    return Difference(value, value - margin, value + margin, t_two_sided(value / error, freedom))


def _certain(value: float) -> Difference:
    return Difference(value, value, value, 0.0 if value else 1.0)


def t_two_sided(t: float, freedom: float) -> float:
    """Return the two-sided p-value: the probability that |t| is this large or larger by chance."""
    return f_upper(t * t, 1, freedom)


def f_upper(f: float, above: float, below: float) -> float:
    """Return the probability that a ratio of variances with `above` and `below` degrees of freedom is `f` or more."""
    return _incomplete_beta(below / (below + above * f), below / 2, above / 2)


@cache
def t_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t for a probability of 0.5 or more."""
    return end_of(lambda t: t_two_sided(t, freedom) > 2 * (1 - probability))


def end_of(holds: Callable[[float], bool]) -> float:
    """Return, by bisection, the number up to which `holds` is true, from 0 on."""
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def binomial_quantile(n: int, probability: float, share: float = 0.95) -> int:
    """Return the smallest k such that, with a probability of at least `share`, at most k of n trials succeed."""
    below = 0.0
    for k in range(n + 1):
        below += math.comb(n, k) * probability**k * (1 - probability) ** (n - k)
        if below >= share:
            return k
    return n


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function, from its continued fraction (DLMF 8.17.22), last term first."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly here, but quickly for the other tail
        return 1 - _incomplete_beta(1 - x, b, a)
    fraction = 1.0
    for n in range(200, 0, -1):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + term * x / fraction
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / (a * fraction)


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the paired differences so far."""

    answer: Answer
    """`lower` or `higher`: the mean is below or above 0. `same`: the mean is too small to matter. `open`: not decided
    yet."""
    value: float
    """The mean difference."""
    low: float
    high: float
    """`low` to `high` is the mean's confidence interval. With probability 1 − `error`, see `verdict`, the intervals
    after all pairs contain the true mean."""


def verdict(differences: Sequence[float], most_pairs: int, worth: float, error: float = 0.05) -> Verdict:
    """Decide from the differences so far whether their true mean is below 0, above 0 or too small to matter.

    Args:
        most_pairs: maximum number of pairs, fixed before the first pair.
        worth: the smallest mean, in absolute value, that matters.
        error: probability that any of the tests finds a difference where none exists.
    """
    n, value = len(differences), fmean(differences) if differences else 0.0
    if n < FEWEST_PAIRS:
        return Verdict("open", value, -math.inf, math.inf)
    margin = t_quantile(1 - level(most_pairs, error) / 2, n - 1) * stdev(differences) / math.sqrt(n)
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
    # two-sided p: the share of simulations with an equal or larger |t| in the same test
    order = np.argsort(np.argsort(-t, 0), 0)
    p = (order + 1) / _SIMULATIONS
    return np.asarray(p.min(1))

"""Student's t-tests of whether a difference between few runs is more than noise."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, variance


@dataclass(frozen=True)
class Difference:
    """A difference of two means, with its 95% confidence interval and two-sided p-value."""

    value: float
    low: float
    high: float
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return mean(`second`) − mean(`first`), each of two or more values; their spreads may differ (Welch, 1947)."""
    a, b = variance(first) / len(first), variance(second) / len(second)
    value = fmean(second) - fmean(first)
    if a + b == 0:
        return _certain(value)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return _difference(value, math.sqrt(a + b), freedom)


def known_spread(first: Sequence[float], second: Sequence[float], deviation: float, freedom: int) -> Difference:
    """Return mean(`second`) − mean(`first`), given their common `deviation` and its degrees of freedom."""
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
    """Return the end of the interval, from 0 on, in which `holds` is true, by bisection."""
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

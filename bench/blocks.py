"""Compare many changes with one baseline, after every seed, with one bound on the errors of all comparisons.

A change and the baseline are trained in the same blocks: a block is a seed on one machine, whose effect on all losses
cancels in a pair's difference. The noise of a difference is pooled over all changes, because each has few pairs.

The intervals may be looked at after every pair, and may decide which runs come next. As in Stein's procedure ("A
two-sample test for a linear hypothesis whose power is independent of the variance", Annals of Mathematical Statistics,
1945), the noise is estimated only from the first pairs of each change, which are trained in any case. The estimate is
independent of the means of these pairs and of all later pairs. Given the estimate σ, the difference after n pairs,
3 to 300, has an interval of ±k (n/3)^0.05 σ √(2/n), with k from simulation (Wang and Tsiatis, "Approximately optimal
one-parameter boundaries for group sequential trials", Biometrics, 1987). All looks at all changes are one Gaussian
vector, so the probability that all intervals hold is at least the product of the changes' own probabilities, even if
changes share runs of the baseline (Royen, "A simple proof of the Gaussian correlation conjecture extended to
multivariate gamma distributions", 2014). With a probability of 95%, therefore, no interval ever shown excludes its
change's true difference, whichever changes got more seeds and why.

The pooled noise assumes that all changes have equal noise. A change whose pairs scatter significantly more is set
apart: its interval comes only from its own pairs, and is valid after every pair too (`gptworks.judge.evidence`).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev, variance

import numpy as np
from numpy.typing import NDArray

from gptworks.judge.evidence import critical_t
from gptworks.runs.statistics import f_upper

FEWEST_RUNS = 3
"""Number of a change's first pairs, from which the noise is estimated; with fewer, there is no interval."""
MOST_RUNS = 300
"""Number of pairs up to which the intervals are valid."""

GROWTH = 0.05
"""Exponent with which an interval's width in standard errors grows with the number of pairs. The growth spends more of
the error on early looks, when most differences are decided."""

ERROR = 0.05
"""Probability that any interval ever shown misses its true difference."""
APART = 0.01
"""Probability that some change is set apart in a look although all changes have equal noise."""
_SIMULATIONS = 100_000

Block = Hashable
Losses = Mapping[Block, float]
Runs = Sequence[tuple[str, Block, float]]
"""Change, block and loss of each run, oldest first; a block has at most one run of a change."""


@dataclass(frozen=True)
class Comparison:
    """A change's loss minus the baseline's."""

    value: float
    n: int
    """Number of blocks that have a run of the change and one of the baseline."""
    spread: float = math.inf
    """Standard deviation of a pair's difference; infinite: unknown."""
    multiple: float | None = None
    """Half the width of the interval after `FEWEST_RUNS` pairs, in standard errors. None: the spread is unknown, or the
    change was set apart, and its interval has 95% by itself."""

    @property
    def apart(self) -> bool:
        return self.multiple is None and math.isfinite(self.spread)

    def margin(self, n: int) -> float:
        """Return half the width of the interval after `n` pairs with the present spread."""
        if n < FEWEST_RUNS or n > MOST_RUNS or math.isinf(self.spread):
            return math.inf
        multiple = critical_t(n, ERROR / 2) if self.multiple is None else self.multiple * (n / FEWEST_RUNS) ** GROWTH
        return multiple * self.spread / math.sqrt(n)

    @property
    def low(self) -> float:
        return self.value - self.margin(self.n)

    @property
    def high(self) -> float:
        return self.value + self.margin(self.n)


def compare(runs: Runs, baseline: str) -> dict[str, Comparison]:
    """Return the effect of each change on the loss, for all changes that share a block with the baseline."""
    at = {(change, block): i for i, (change, block, _) in enumerate(runs)}
    beside = {block: loss for change, block, loss in runs if change == baseline}
    losses: dict[str, dict[Block, float]] = {}
    of_pairs = [run for run in runs if run[0] != baseline and run[1] in beside]
    for change, block, loss in sorted(of_pairs, key=lambda run: max(at[run[:2]], at[baseline, run[1]])):
        losses.setdefault(change, {})[block] = loss  # in the order in which pairs were complete
    pairs = {change: [loss - beside[block] for block, loss in mine.items()] for change, mine in losses.items()}
    judged = {change: mine for change, mine in losses.items() if len(mine) >= FEWEST_RUNS}
    found = {change: Comparison(fmean(mine), len(mine)) for change, mine in pairs.items()}
    together = dict(judged)
    while (scattered := _most_scattered(together, beside, len(judged))) is not None:
        del together[scattered]
        found[scattered] = replace(found[scattered], spread=stdev(pairs[scattered]))
    noise, freedom = _noise(together, beside)
    others = [change for change in found if change in together or change not in judged]
    if freedom:
        spread, multiple = math.sqrt(2) * noise, _multiple(len(others), freedom)
        found |= {change: replace(found[change], spread=spread, multiple=multiple) for change in others}
    return found


def _noise(losses: Mapping[str, Losses], beside: Losses) -> tuple[float, int]:
    """Return the standard deviation of the noise in a loss, from the first pairs of each change, and its degrees of
    freedom. Changes with the same first blocks form a randomized complete block design with the baseline."""
    squares, freedom = 0.0, 0
    for blocks, names in _designs(losses).items():
        table = np.array([[row[block] for block in blocks] for row in (beside, *(losses[name] for name in names))])
        left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        squares += (left**2).sum()
        freedom += len(names) * (FEWEST_RUNS - 1)
    return math.sqrt(squares / max(1, freedom)), freedom


def _designs(losses: Mapping[str, Losses]) -> dict[frozenset[Block], list[str]]:
    """Return the names of changes by their first blocks."""
    designs: dict[frozenset[Block], list[str]] = {}
    for name, mine in losses.items():
        designs.setdefault(frozenset(list(mine)[:FEWEST_RUNS]), []).append(name)
    return designs


def _most_scattered(losses: Mapping[str, Losses], beside: Losses, of: int) -> str | None:
    """Return the change that has significantly more noise than the others, if any. By an F test, its first losses
    scatter more around the others' means in the same blocks, or all its losses scatter more around the baseline's."""
    least, found = APART / (2 * max(1, of)), None
    for blocks, names in _designs(losses).items():
        for change in names:
            noise, freedom = _noise({name: mine for name, mine in losses.items() if name != change}, beside)
            if not freedom:
                continue
            mine, rest = losses[change], [beside, *(losses[name] for name in names if name != change)]
            first = [mine[block] - fmean(row[block] for row in rest) for block in blocks]
            pairs = [loss - beside[block] for block, loss in mine.items()]
            for scatter, others in ((first, len(rest)), (pairs, 1)):
                ratio = variance(scatter) / (1 + 1 / others) / max(noise, 1e-9) ** 2
                if (p := f_upper(ratio, len(scatter) - 1, freedom)) < least:
                    least, found = p, change
    return found


@cache
def _multiple(changes: int, freedom: int) -> float:
    """Return the half-width, in standard errors, with which all intervals of this many changes, after any number of
    pairs, contain their true differences with probability 1 − ERROR; `freedom`: degrees of freedom of the noise."""
    most, scales = _largest(), np.sqrt(_random().chisquare(freedom, 4_000) / freedom)
    low, high = 0.0, 100.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        within = np.searchsorted(most, middle * scales) / len(most)
        low, high = (middle, high) if (within**changes).mean() < 1 - ERROR else (low, middle)
    return high


@cache
def _largest() -> NDArray[np.float32]:
    """Return, for each simulated series, the largest distance of its mean from 0 over all looks, in units of the
    interval's half-width; sorted."""
    n = np.arange(FEWEST_RUNS, MOST_RUNS + 1, dtype=np.float32)
    random, widths = _random(), np.sqrt(n) * (n / FEWEST_RUNS) ** GROWTH
    parts = [
        np.abs(random.standard_normal((1_000, MOST_RUNS), np.float32).cumsum(1)[:, FEWEST_RUNS - 1 :] / widths).max(1)
        for _ in range(_SIMULATIONS // 1_000)
    ]
    return np.sort(np.concatenate(parts))


def _random() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(0))

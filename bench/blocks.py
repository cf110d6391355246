"""Many changes beside one baseline, each trained once a block: what a seed does to all runs is no change's doing.

A loss is its change's, plus its block's, plus noise: the additive model of randomized complete blocks, fitted by least
squares, so that a run may be missing. The noise of all runs together tells how far chance reaches, which the two or
three runs of a change alone cannot. The intervals hold together: all of them contain their true differences with 95%
(Dunnett, 1955, many treatments with one control). The quantile that this takes depends on which runs there are and has
no closed form, so normal noise is drawn for these runs and sent through the same fit.

The noise must be of one size for that. A change whose runs scatter more than chance explains (Cochran's test of the
largest variance, 1941, its quantile drawn likewise) is set apart: it is compared by its own pairs, and not fitted.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from gptworks.runs.statistics import t_quantile

FEWEST_RUNS = 3
"""Of a change in blocks that have the baseline too: fewer get no interval."""

ERROR = 0.05
"""How often some interval of a fit misses its true difference."""
APART = 0.01
"""How often some change is set apart where all noise is of one size."""
_DRAWN = 20_000

Block = Hashable
Runs = Sequence[tuple[str, Block, float]]
"""Change, block and loss of each run; a change is at most once in a block."""


@dataclass(frozen=True)
class Comparison:
    """A change's loss less the baseline's."""

    value: float
    low: float
    high: float
    n: int
    """Blocks that have a run of the change and one of the baseline."""
    apart: bool = False
    """Whether its own pairs alone say so, in an interval of 95% by itself."""


def compare(runs: Runs, baseline: str) -> dict[str, Comparison]:
    """What each change does to the loss, for all that have a pair with the baseline, without an interval (infinite
    bounds) where there are too few runs."""
    pairs = _pairs(runs, baseline)
    if not pairs:
        return {}
    runs = [(change, block, loss) for change, block, loss in runs if change == baseline or change in pairs]
    apart: dict[str, Comparison] = {}
    while True:
        fit, losses = _fit(runs, baseline), np.array([loss for _, _, loss in runs])
        if (scattered := _most_scattered(fit, losses)) is None:
            return _fitted(fit, losses, pairs) | apart
        apart[scattered] = _alone(pairs[scattered])
        runs = [run for run in runs if run[0] != scattered]


def _pairs(runs: Runs, baseline: str) -> dict[str, list[float]]:
    """By change, its loss less the baseline's in each block that has both."""
    beside = {block: loss for change, block, loss in runs if change == baseline}
    pairs: dict[str, list[float]] = {}
    for change, block, loss in runs:
        if change != baseline and block in beside:
            pairs.setdefault(change, []).append(loss - beside[block])
    return pairs


def _alone(differences: Sequence[float]) -> Comparison:
    value = fmean(differences)
    margin = t_quantile(1 - ERROR / 2, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return Comparison(value, value - margin, value + margin, len(differences), apart=True)


@dataclass(frozen=True)
class _Fit:
    """Least squares of runs by change and block."""

    names: list[str]
    """Of the changes, the baseline first."""
    change_of: NDArray[np.int64]
    """By run, the index of its change."""
    effects: NDArray[np.float64]
    """(changes, runs): from losses to each change's loss less the baseline's."""
    leaves: NDArray[np.float64]
    """(runs, runs): from losses to what the fit does not explain."""
    freedom: int
    """Runs less the parameters that they determine."""

    def noise(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """The standard deviation of the noise, of losses (…, runs)."""
        return np.sqrt(((losses @ self.leaves) ** 2).sum(-1) / self.freedom)

    def scatter(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """By change (…, changes), its share of what is not explained, over the share to expect; 0 for the baseline,
        which cannot be set apart, and for fewer runs than an interval needs."""
        members = np.eye(len(self.names))[self.change_of]
        expected = np.diag(self.leaves) @ members
        judged = (members.sum(0) >= FEWEST_RUNS) & (expected > 1e-9)
        judged[0] = False
        squares = ((losses @ self.leaves) ** 2) @ members
        return np.where(judged, squares / np.where(judged, expected, 1) / self.noise(losses)[..., None] ** 2, 0)


def _fit(runs: Runs, baseline: str) -> _Fit:
    names = list(dict.fromkeys([baseline, *(change for change, _, _ in runs)]))
    blocks = list(dict.fromkeys(block for _, block, _ in runs))
    change_of = np.array([names.index(change) for change, _, _ in runs])
    design = np.hstack(
        [np.eye(len(names))[change_of], np.eye(len(blocks))[[blocks.index(block) for _, block, _ in runs]]]
    )
    solved = np.linalg.pinv(design)
    effects = solved[: len(names)] - solved[0]
    return _Fit(
        names, change_of, effects, np.eye(len(runs)) - design @ solved, len(runs) - np.linalg.matrix_rank(design)
    )


def _drawn(n: int) -> NDArray[np.float64]:
    return np.random.Generator(np.random.PCG64(0)).standard_normal((_DRAWN, n))


def _most_scattered(fit: _Fit, losses: NDArray[np.float64]) -> str | None:
    """The change whose noise is larger than that of the others, if any is."""
    if fit.freedom == 0 or fit.noise(losses) < 1e-9:  # rounding, which has no size to compare
        return None
    scatter = fit.scatter(losses)
    drawn = fit.scatter(_drawn(len(losses))).max(-1)
    return fit.names[scatter.argmax()] if scatter.max() > np.quantile(drawn, 1 - APART) else None


def _fitted(fit: _Fit, losses: NDArray[np.float64], pairs: Mapping[str, Sequence[float]]) -> dict[str, Comparison]:
    values = fit.effects @ losses
    lengths = np.sqrt((fit.effects**2).sum(1))  # a difference's standard error, where the noise is 1
    enough = [i for i, name in enumerate(fit.names) if i and len(pairs[name]) >= FEWEST_RUNS]
    margins = np.full(len(fit.names), math.inf)
    if enough and fit.freedom > 0:
        drawn = _drawn(len(losses))
        t = np.abs(drawn @ fit.effects[enough].T) / lengths[enough] / fit.noise(drawn)[:, None]
        margins[enough] = np.quantile(t.max(1), 1 - ERROR) * fit.noise(losses) * lengths[enough]
    return {
        name: Comparison(float(value), float(value - margin), float(value + margin), len(pairs[name]))
        for name, value, margin in zip(fit.names[1:], values[1:], margins[1:], strict=True)
    }

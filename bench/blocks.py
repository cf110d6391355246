"""Compare many changes with one baseline; each change is trained once per block, so that seed effects cancel.

The model is additive, as in a randomized complete block design: a loss is an effect of the change, an effect of the
block, and noise. It is fitted by least squares, so that runs may be missing. The noise is estimated from all runs
together, since a change has only two or three. The intervals are simultaneous: with a probability of 95%, all of them
contain the true differences (Dunnett, 1955, many treatments with one control). Their quantile depends on which runs
exist and has no closed form, so it is simulated: normal noise for these runs is fitted in the same way.

This assumes that all changes have equal noise. A change whose runs vary significantly more (Cochran's test of the
largest variance, 1941, with a quantile simulated likewise) is set apart: only its own pairs are used, not the fit.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from gptworks.runs.statistics import t_quantile

FEWEST_RUNS = 3
"""Minimum number of a change's runs, in blocks that have the baseline too, for an interval."""

ERROR = 0.05
"""Probability that some interval of a fit misses its true difference."""
APART = 0.01
"""Probability that some change is set apart although all changes have equal noise."""
_DRAWN = 20_000

Block = Hashable
Runs = Sequence[tuple[str, Block, float]]
"""Change, block and loss of each run; a block has at most one run of a change."""


@dataclass(frozen=True)
class Comparison:
    """A change's loss minus the baseline's."""

    value: float
    low: float
    high: float
    n: int
    """Number of blocks that have a run of the change and one of the baseline."""
    apart: bool = False
    """Whether the change was set apart: only its own pairs give the interval, which has 95% by itself."""


def compare(runs: Runs, baseline: str) -> dict[str, Comparison]:
    """Return the effect of each change on the loss, for all changes that share a block with the baseline; with too few
    runs, the interval is infinite."""
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
    """Return, for each change, its loss minus the baseline's in each block that has both."""
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
    """A least-squares fit of the losses by change and block."""

    names: list[str]
    """Names of the changes, the baseline first."""
    change_of: NDArray[np.int64]
    """Index of each run's change."""
    effects: NDArray[np.float64]
    """(changes, runs): maps losses to each change's loss minus the baseline's."""
    leaves: NDArray[np.float64]
    """(runs, runs): maps losses to residuals."""
    freedom: int
    """Degrees of freedom: number of runs minus the rank of the fit."""

    def noise(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the standard deviation of the noise in losses (…, runs)."""
        return np.sqrt(((losses @ self.leaves) ** 2).sum(-1) / self.freedom)

    def scatter(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return, for each change (…, changes), its share of the residual variance divided by the expected share; 0 for
        the baseline, which is never set apart, and for changes with too few runs for an interval."""
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
    """Return the change with significantly more noise than the others, if there is one."""
    if fit.freedom == 0 or fit.noise(losses) < 1e-9:  # the residuals are only rounding errors
        return None
    scatter = fit.scatter(losses)
    drawn = fit.scatter(_drawn(len(losses))).max(-1)
    return fit.names[scatter.argmax()] if scatter.max() > np.quantile(drawn, 1 - APART) else None


def _fitted(fit: _Fit, losses: NDArray[np.float64], pairs: Mapping[str, Sequence[float]]) -> dict[str, Comparison]:
    values = fit.effects @ losses
    lengths = np.sqrt((fit.effects**2).sum(1))  # standard error of each difference for noise of 1
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

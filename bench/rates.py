"""The learning rates at which bench/experiments.py compares a change: those with which one seed's loss is lowest.

A factor multiplies all rates of a change: AdamW's and Muon's. The baseline's factor is chosen in the same way. The seed
that chooses takes no part in the comparison. One seed finds a factor near the best, which need not be the best itself.
"""

from collections.abc import Iterable, Mapping
from math import inf

from recorded import Place, Result, place_of

TUNING_SEED = 1
"""The seed whose runs choose the factor."""
MOST_FACTORS = 4
"""Maximum number of factors that are tried."""


def next_factor(losses: Mapping[float, float]) -> float | None:
    """Return the factor to try after those in `losses`; None: the search is over. The search begins with 1 and ½. If ½
    is better, or the run at 1 failed, it halves as long as that helps or all runs failed; else it doubles from 2. The
    loss of a failed run is infinite."""
    for factor in (1.0, 0.5):
        if factor not in losses:
            return factor
    step = 0.5 if losses[1.0] == inf or losses[0.5] < losses[1.0] else 2.0
    factor = 1.0
    while factor * step in losses:
        if losses[factor] < inf and losses[factor * step] >= losses[factor]:
            return None
        factor *= step
    return factor * step if len(losses) < MOST_FACTORS else None


def factor_of(line: Result) -> float:
    """Return the factor of a run. Runs before 2026-11-27 have the rates of their recipe."""
    return float(line.get("rates", 1.0))


def tuning_losses(runs: Iterable[Result], here: Place | None) -> dict[float, float]:
    """Return a change's losses by factor, from the place where the search is over, or else from `here` (None: nowhere).
    Places are not mixed, because rounding moves a loss as much as a factor does."""
    places: dict[Place, dict[float, float]] = {}
    for line in runs:
        if line["seed"] == TUNING_SEED:
            places.setdefault(place_of(line), {})[factor_of(line)] = line.get("loss", inf)
    over = [losses for losses in places.values() if next_factor(losses) is None]
    return over[0] if over else {} if here is None else places.get(here, {})


def tuned_factor(runs: Iterable[Result]) -> float | None:
    """Return the factor with the lowest loss, at which a change is compared; None: the search is not over."""
    losses = tuning_losses(runs, None)
    return min(losses, key=lambda factor: losses[factor]) if next_factor(losses) is None else None

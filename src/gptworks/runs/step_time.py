"""Measure how much longer the same tokens take with a change than without it, pair of runs by pair of runs.

Other work on the machine slows down single steps, whole runs or all runs for hours, and whoever shares the machine
could slow down only one kind of run. On a CPU, steps of both models therefore take turns after each pair of runs, so
that other work slows down both. On other devices, or if the steps of a run differ by design, times are the runs' own:
the median over parts of the run, or the mean of all its steps. The spread between pairs measures the noise of the
ratio; `statistics.verdict` tests the logarithms of the ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gptworks.runs.history import History
from gptworks.runs.statistics import verdict

SAME_SPEED = 0.05
"""Times closer than this fraction count as equal. A verdict at equal tokens then also holds in equal time."""

CHUNKS = 50
"""Maximum number of parts into which a run is divided. Its step time is the median over the parts."""

LEAST_SECONDS = 0.1
"""Minimum duration of a part of a run, because logs round times to milliseconds."""


def step_seconds(run: History) -> float:
    """Return a run's seconds per step: the median over its parts, except the first, in which the machine warms up."""
    least, times, at, since = run.step / CHUNKS, list[float](), 0, 0.0
    for record in run.train:
        steps, seconds = record["step"] - at, record["seconds"] - since
        if steps >= least and seconds >= LEAST_SECONDS:
            times.append(seconds / steps)
            at, since = record["step"], record["seconds"]
    return median(times[1:] or times or [run.seconds / max(1, run.step)])


@dataclass(frozen=True)
class StepTime:
    """Time of the same tokens with a change, divided by the time without it."""

    ratio: float
    low: float
    high: float
    """`low` to `high` is the ratio's confidence interval, valid after every pair with probability 1 − `error`."""

    def __str__(self) -> str:
        interval = f" ({self.interval})" if self.interval else ""
        return f"the same tokens take {self.ratio:.2f} times as long with the change{interval}"

    @property
    def interval(self) -> str:
        """The interval as text, such as `0.97 to 1.04`; empty if it is unbounded."""
        return f"{self.low:.2f} to {self.high:.2f}" if math.isfinite(self.high) else ""

    @property
    def is_distinct(self) -> bool:
        """Whether the ratio differs from 1 by 5% or more."""
        return abs(math.log(self.ratio)) >= math.log1p(SAME_SPEED)

    @property
    def differs(self) -> bool:
        """Whether the ratio differs from 1 by 5% or more and the interval excludes 1."""
        return self.is_distinct and not self.low <= 1 <= self.high

    @property
    def is_same(self) -> bool:
        """Whether the whole interval is within 5% of 1."""
        return self.low > 1 / (1 + SAME_SPEED) and self.high < 1 + SAME_SPEED


def step_time(ratios: Sequence[float], most_pairs: int, error: float) -> StepTime:
    """Return the ratio after one or more pairs, with its interval, which is unbounded for fewer than `FEWEST_PAIRS`."""
    found = verdict([math.log(ratio) for ratio in ratios], most_pairs, 0, error)
    return StepTime(*(math.exp(value) for value in (found.value, found.low, found.high)))

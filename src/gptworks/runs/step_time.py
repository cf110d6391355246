"""The time of a step with a change, as a multiple of the time without it, from the logs of pairs of runs.

Other work on the machine slows single steps, runs or hours. So a run's step time is a median over parts of the run,
and the spread between pairs, whose runs follow one another, measures the noise of the ratio. The test is the one for
losses, applied to the logarithms of the ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gptworks.runs.history import History
from gptworks.runs.sequential import verdict

SAME_SPEED = 0.05
"""Step times closer than this count as equal, and the verdict at equal tokens then also holds in equal time."""

CHUNKS = 50
"""Most parts that a run is divided into; its step time is their median."""

LEAST_SECONDS = 0.1
"""Shortest part of a run, because logs round times to milliseconds."""


def step_seconds(run: History) -> float:
    """A run's seconds per step: the median over its parts, without the first, in which the machine warms up."""
    least, times, at, since = run.step / CHUNKS, list[float](), 0, 0.0
    for record in run.train:
        steps, seconds = record["step"] - at, record["seconds"] - since
        if steps >= least and seconds >= LEAST_SECONDS:
            times.append(seconds / steps)
            at, since = record["step"], record["seconds"]
    return median(times[1:] or times or [run.seconds / max(1, run.step)])


@dataclass(frozen=True)
class StepTime:
    """The time of a step with a change, as a multiple of the time without."""

    ratio: float
    low: float
    high: float
    """`low` and `high` bound an interval that contains the true ratio at all looks with probability 1 − error."""

    def __str__(self) -> str:
        interval = f" ({self.interval})" if self.interval else ""
        return f"a step takes {self.ratio:.2f} times as long with the change{interval}"

    @property
    def interval(self) -> str:
        """The interval as text, such as `0.97 to 1.04`; empty if it is unbounded."""
        return f"{self.low:.2f} to {self.high:.2f}" if math.isfinite(self.high) else ""

    @property
    def is_distinct(self) -> bool:
        """Whether the ratio is at least 5% from 1."""
        return abs(math.log(self.ratio)) >= math.log1p(SAME_SPEED)

    @property
    def differs(self) -> bool:
        """Whether the ratio is at least 5% from 1 and noise does not explain it."""
        return self.is_distinct and not self.low <= 1 <= self.high

    @property
    def is_same(self) -> bool:
        """Whether all of the interval is less than 5% from 1."""
        return self.low > 1 / (1 + SAME_SPEED) and self.high < 1 + SAME_SPEED


def step_time(ratios: Sequence[float], most_pairs: int, error: float) -> StepTime:
    """The ratio after one or more pairs, with the interval from `verdict`, which is unbounded before the first look."""
    found = verdict([math.log(ratio) for ratio in ratios], most_pairs, 0, error)
    return StepTime(*(math.exp(value) for value in (found.value, found.low, found.high)))

"""Simulate campaigns of the judge: how often they end with a false gain, and how often they find planted ones.

    python bench/judge.py              # every kind of noise and of agent; about 3 minutes on one core

A try is simulated by its gains, one for each pair of runs: the true gain plus noise of a given deviation, in nats. In
docs/experiments.jsonl, the deviation of paired differences between runs of a minute on TinyShakespeare has a median of
0.010 nats. Everything is decided by `gptworks.judge.evidence`.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gptworks.judge.evidence import Control, Judgement, judged, level, spread_floor
from gptworks.runs.statistics import FEWEST_PAIRS

Noise = Callable[[np.random.Generator, int], np.ndarray]

NOISES: dict[str, Noise] = {  # each with mean 0 and deviation 1
    "normal": lambda draw, n: draw.standard_normal(n),
    "heavy tails (t, 3 degrees)": lambda draw, n: draw.standard_t(3, n) / math.sqrt(3),
    "uniform": lambda draw, n: draw.uniform(-math.sqrt(3), math.sqrt(3), n),
    "two peaks": lambda draw, n: (draw.choice([-1, 1], n) + 0.3 * draw.standard_normal(n)) / math.sqrt(1.09),
    "rare large losses": lambda draw, n: 1 - draw.exponential(size=n),
}

MOST_PAIRS = 20
UNSTABLE = 8.0
"""Deviation of the gains of a change that makes training unstable, as a multiple of other changes' deviation."""


@dataclass
class Tried:
    """One try: its true gain, the deviation of its gains, its gains so far, and its level."""

    true_gain: float
    deviation: float
    gains: list[float]
    level: float
    judgement: Judgement | None = None

    @property
    def accepted(self) -> bool:
        return self.judgement is not None and self.judgement.answer == "gain"


class Simulated:
    """A campaign whose pairs cost nothing."""

    def __init__(
        self, draw: np.random.Generator, noise: Noise, deviation: float, worth: float = 0.002, error: float = 0.05,
        control: Control = "family", unstable: float = 0.0,
    ) -> None:  # fmt: skip
        """Begin a campaign; the share `unstable` of the changes without effect makes training unstable."""
        self.unstable = unstable
        self.draw, self.noise, self.deviation = draw, noise, deviation
        self.worth, self.error, self.control = worth, error, control
        self.tries: list[Tried] = []
        self._noise: list[float] = []
        self._latest: tuple[Tried | None, float] = None, 0.0

    def begin(self, true_gain: float = 0.0, deviation: float | None = None) -> Tried:
        accepted = sum(one.accepted for one in self.tries)
        at_level = level(self.error, self.control, len(self.tries) + 1, accepted)
        if deviation is None:
            is_unstable = self.unstable > 0 and not true_gain and self.draw.random() < self.unstable
            deviation = self.deviation * (UNSTABLE if is_unstable else 1)
        self.tries.append(Tried(true_gain, deviation, [], at_level))
        return self.tries[-1]

    def pair(self, tried: Tried) -> Judgement:
        """Train one more pair of a try, and judge it."""
        if not self._noise:
            self._noise = self.noise(self.draw, 4096).tolist()
        tried.gains.append(tried.true_gain + tried.deviation * self._noise.pop())
        if self._latest[0] is not tried:  # between pairs of the same try, other tries stay the same
            self._latest = tried, spread_floor(one.judgement for one in self.tries if one is not tried)
        tried.judgement = judged(tried.gains, tried.level, self.worth, self._latest[1])
        return tried.judgement

    @property
    def false_gains(self) -> int:
        return sum(one.accepted and one.true_gain <= 0 for one in self.tries)


Agent = Callable[[Simulated, Sequence[float]], None]


def patient(campaign: Simulated, true_gains: Sequence[float], before_each: int = 0, deviation: float = 0.0) -> None:
    """Give each change all the pairs that it needs, up to MOST_PAIRS. Before each change, try `before_each` changes
    that do almost nothing: their gains have the given deviation, and could make the noise look small."""
    for true_gain in true_gains:
        for _ in range(before_each):
            idle = campaign.begin(0.0, deviation)
            for _ in range(FEWEST_PAIRS):
                campaign.pair(idle)
        tried = campaign.begin(true_gain)
        while len(tried.gains) < MOST_PAIRS and campaign.pair(tried).answer == "open":
            pass


def frugal(campaign: Simulated, true_gains: Sequence[float]) -> None:
    """Drop a change as soon as it looks bad: after three pairs with a mean below 0, or six below one deviation."""
    for true_gain in true_gains:
        tried = campaign.begin(true_gain)
        while len(tried.gains) < MOST_PAIRS and (now := campaign.pair(tried)).answer == "open":
            if (now.pairs >= 3 and now.gain < 0) or (now.pairs >= 6 and now.gain < campaign.deviation):
                break


def adversary(campaign: Simulated, true_gains: Sequence[float]) -> None:
    """Look for luck: begin many tries with three pairs each, then add pairs to the one with the most evidence."""
    for true_gain in true_gains:
        tried = campaign.begin(true_gain)
        for _ in range(3):
            campaign.pair(tried)
    for _ in range(8 * len(true_gains)):
        hopes = [one for one in campaign.tries if not one.accepted and len(one.gains) < MOST_PAIRS]
        if not hopes:
            return
        campaign.pair(max(hopes, key=lambda one: one.judgement.log_e + math.log(one.level) if one.judgement else 0.0))


AGENTS: dict[str, Agent] = {
    "patient": patient,
    "frugal": frugal,
    "adversary": adversary,
    "no-ops": partial(patient, before_each=1),
    "flood": partial(patient, before_each=4, deviation=1e-6),
}


def false_share(
    agent: Agent, noise: str, n_campaigns: int, n_changes: int, seed: int = 0, deviation: float = 0.012
) -> float:
    """Return the share of campaigns of changes without effect that end with a false gain."""
    draw, wrong = np.random.default_rng(seed), 0
    for _ in range(n_campaigns):
        campaign = Simulated(draw, NOISES[noise], deviation)
        agent(campaign, [0.0] * n_changes)
        wrong += campaign.false_gains > 0
    return wrong / n_campaigns


def found(
    deviation: float, n_campaigns: int, planted: float = 0.02, seed: int = 0, unstable: float = 0.0
) -> Iterator[tuple[int, int]]:
    """Yield the number of the try, and the pairs needed (0: not found), of each of the 5 gains in every campaign. Of
    its 45 changes without effect, the share `unstable` makes training unstable."""
    draw = np.random.default_rng(seed)
    for _ in range(n_campaigns):
        campaign = Simulated(draw, NOISES["normal"], deviation, worth=planted / 4, unstable=unstable)
        places = set(draw.choice(50, 5, replace=False).tolist())
        frugal(campaign, [planted if place in places else 0.0 for place in range(50)])
        for place in places:
            tried = campaign.tries[place]
            yield place + 1, len(tried.gains) if tried.accepted else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=200)
    n = parser.parse_args().campaigns
    print(f"{n} campaigns of 50 changes without effect, error 5% (family): share with a false gain")
    for name, agent in AGENTS.items():
        for noise in NOISES:
            print(f"  {name:10} {noise:28} {false_share(agent, noise, n, 50):.1%}", flush=True)
    print("planted gains of 0.02 nats, 5 among 50 changes, by the deviation of paired differences; a frugal agent")
    for unstable in (0.0, 0.1):
        print(f"  {unstable:.0%} of the others unstable")
        for deviation in (0.004, 0.006, 0.010, 0.012):
            pairs = [one for _, one in found(deviation, max(1, n // 4), unstable=unstable)]
            needed = [one for one in pairs if one]
            share, middle = len(needed) / len(pairs), np.median(needed) if needed else math.nan
            print(f"    deviation {deviation:.3f}: {share:.0%} found, with a median of {middle:.0f} pairs", flush=True)


if __name__ == "__main__":
    main()
